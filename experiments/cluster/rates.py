"""Links: their rates, what they carry besides the payload, and the settings that make MPI's collectives rings."""

from __future__ import annotations

import re
from dataclasses import dataclass

FACTORS = {"": 1, "k": 1_000, "m": 1_000_000, "g": 1_000_000_000}
RING = {
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_allreduce_algorithm": "4",
    "OMPI_MCA_coll_tuned_allgather_algorithm": "4",
    "OMPI_MCA_coll_tuned_allgatherv_algorithm": "3",
}
#: What TCP/IP and Ethernet add: 66 bytes of headers to each 1448 of payload (with TCP's time stamps)
HEADERS = 66 / 1448


@dataclass(frozen=True)
class Rate:
    """The rates at which a host sends and receives, in bits per second."""

    up: int
    down: int

    @classmethod
    def parse(cls, text: str) -> Rate:
        """From what tc calls a rate, or two for both directions.

        >>> Rate.parse("100mbit")
        Rate(up=100000000, down=100000000)
        >>> Rate.parse("2.5gbit/500kbit")
        Rate(up=2500000000, down=500000)

        Raises:
            ValueError: the text is not a rate.
        """
        found = []
        for word in text.split("/"):
            match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", word.strip())
            if not match:
                raise ValueError(
                    f"{text!r} is not a rate: write 100mbit, 2.5gbit or, to send and receive, 10mbit/1gbit"
                )
            found.append(round(float(match[1]) * FACTORS[match[2]]))
        if len(found) > 2 or min(found) < 10_000:
            raise ValueError(f"{text!r} is not a rate: one or two of 10kbit at least")
        return cls(found[0], found[-1])

    def __str__(self) -> str:
        return speed(self.up) if self.up == self.down else f"{speed(self.up)} up and {speed(self.down)} down"

    @property
    def slower(self) -> int:
        """The lower of both rates, which limits exchanges: each host sends as much as it receives."""
        return min(self.up, self.down)


def ring(ranks: int) -> dict[str, str]:
    """Environment that makes Open MPI's collectives rings, as the ledger's ``bytes_on_wire`` is a ring's.

    Its own choice is mostly another. Non-blocking all-reduces of two ranks are left alone: they send as many bytes
    as a ring's, whose two directions do not overlap there.
    """
    return RING | ({"OMPI_MCA_coll_libnbc_iallreduce_algorithm": "1"} if ranks > 2 else {})


def speed(bits: float) -> str:
    """Bits per second for a reader.

    >>> speed(100_000_000), speed(2.5e9), speed(94_123_456)
    ('100 Mbit/s', '2.5 Gbit/s', '94.1 Mbit/s')
    """
    factor, unit = (1e9, "Gbit/s") if bits >= 1e9 else (1e6, "Mbit/s") if bits >= 1e6 else (1e3, "kbit/s")
    return f"{bits / factor:.3g} {unit}"
