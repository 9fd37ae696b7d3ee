"""Links: their rates, what they carry besides the payload, and the settings that make MPI's collectives rings."""

from __future__ import annotations

import re

FACTORS = {"": 1, "k": 1_000, "m": 1_000_000, "g": 1_000_000_000}
RING = {
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_allreduce_algorithm": "4",
    "OMPI_MCA_coll_tuned_allgather_algorithm": "4",
    "OMPI_MCA_coll_tuned_allgatherv_algorithm": "3",
}
#: What TCP/IP and Ethernet add: 66 bytes of headers to each 1448 of payload (with TCP's time stamps)
HEADERS = 66 / 1448


def bits_of(rate: str) -> int:
    """Return the bits per second of what tc calls a rate.

    >>> bits_of("100mbit"), bits_of("2.5gbit")
    (100000000, 2500000000)

    Raises:
        ValueError: the text is not a rate.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate.strip())
    bits = round(float(match[1]) * FACTORS[match[2]]) if match else 0
    if bits < 10_000:
        raise ValueError(f"{rate!r} is not a rate: write 100mbit or 2.5gbit; 10kbit at least")
    return bits


def ring(ranks: int) -> dict[str, str]:
    """Environment that makes Open MPI's collectives rings, as the ledger's ``bytes_on_wire`` is a ring's.

    Its own choice is mostly another. Non-blocking all-reduces of two ranks are left alone: they send as many bytes
    as a ring's, whose two directions do not overlap there.
    """
    return RING | ({"OMPI_MCA_coll_libnbc_iallreduce_algorithm": "1"} if ranks > 2 else {})


def title(rate: str) -> str:
    """Return a rate for a reader.

    >>> title("100mbit"), title("2.5gbit")
    ('100 Mbit/s', '2.5 Gbit/s')
    """
    bits = bits_of(rate)
    factor, unit = (1e9, "Gbit/s") if bits >= 1e9 else (1e6, "Mbit/s") if bits >= 1e6 else (1e3, "kbit/s")
    return f"{bits / factor:.3g} {unit}"
