"""Table of a Compressor's work so far, within 80 columns."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvdcompress.engine.telemetry.figures import Figures
from hvdcompress.engine.telemetry.ledger import Ledger

WIDTH = 80
COLUMNS = ("tensors", "gradients", "sent", "ratio", "residual", "codec")
_WIDTHS = (7, 9, 8, 9, 8, 9)
_FIRST = WIDTH - sum(_WIDTHS) - len(_WIDTHS)  # width of the column with the method
_SCALES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def summary(groups: Sequence[Figures], ledger: Ledger, rank: int) -> str:
    """Return the table: one line per program, one for traffic that belongs to no tensor, and a total.

    With two levels, the bytes sent to ranks of the same node follow.

    The columns are the method of the next step (with an arrow to the last method of its program), the number of
    tensors, the bytes of the gradients in their own dtype, the bytes sent, the compression ratio, the l2-norm of the
    residuals ("-" if the method keeps none), and the codec time without Numba's compilation.

    Args:
        groups: the figures by program.
        ledger: the ledger of the rank.
        rank: the rank.
    """
    seconds = ledger.seconds(rank)
    lines = [_line("method", COLUMNS)]
    lines += [_line(_label(group), _cells(group)) for group in groups]
    whole = Figures("", "total", sum(each.tensors for each in groups), sum(each.elements for each in groups))
    for each in groups:
        whole.totals = each.account if whole.totals is None else whole.totals + each.account
    kept = [each.residual for each in groups if each.residual is not None]
    whole.residual = math.hypot(*kept) if kept else None
    lines.append(_line("total", _cells(whole)))
    lines.append(
        f"rank {rank} of {ledger.world_size}, {ledger.steps} steps: {seconds['codec']:.2f} s in the codec, "
        f"{seconds['wait']:.2f} s waiting"
    )
    if inside := ledger.bytes_inside_node(rank):
        lines.append(f"two levels: these tensors between nodes, and {with_prefix(inside)}B to ranks of this node")
    return "\n".join(lines)


def _label(group: Figures) -> str:
    last = group.program.rsplit(": ", 1)[-1]
    return group.now if last == group.now or not group.tensors else f"{group.now} > {last}"


def _cells(group: Figures) -> list[str]:
    entry = group.account
    return [
        str(group.tensors) if group.tensors else "-",
        f"{with_prefix(entry.dense)}B" if entry.dense else "-",
        f"{with_prefix(entry.sent)}B",
        "-" if math.isnan(group.ratio) else f"{group.ratio:.4g}",
        "-" if group.residual is None else f"{group.residual:.3g}",
        f"{entry.seconds:.2f} s" if entry.seconds < 1000 else f"{entry.seconds:.0f} s",
    ]


def _line(first: str, cells: Sequence[str]) -> str:
    first = first if len(first) <= _FIRST else f"{first[: _FIRST - 1]}…"
    return " ".join([first.ljust(_FIRST), *(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))])


def with_prefix(amount: float) -> str:
    """Format a number with three digits and a unit prefix: 25600000 becomes "25.6 M"."""
    for scale, letter in _SCALES:
        if amount >= scale:
            number = amount / scale
            return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f} {letter}"
    return f"{amount:.0f} "
