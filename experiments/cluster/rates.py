"""Links: their rates in words, and the settings that make MPI's collectives rings."""

from __future__ import annotations

from hvdcompress.cli.numbers import bits_of

RING = {
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_allreduce_algorithm": "4",
    "OMPI_MCA_coll_tuned_allgather_algorithm": "4",
    "OMPI_MCA_coll_tuned_allgatherv_algorithm": "3",
}


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
