"""Draw the house from its imports: docs/house.svg, rooms on the floors that tests/unit/house/test_imports.py holds.

    python tools/write_house.py [--check]

The lab is drawn as one room. An arrow says that files of one room import files of another; one that others imply is
left out. ``--check`` writes
nothing and fails if the picture is out of date.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.unit.house.test_imports import FLOORS, graph, room_of  # noqa: E402

OUT = ROOT / "docs" / "house.svg"
WIDTH, HEIGHT, GAP, MARGIN = 1000, 40, 34, 16
SAYS = {
    "ops": "array ops: spec, numpy, numba, torch, triton",
    "method": "the contract",
    "parts": "steps that methods share",
    "methods": "one file = one paper",
    "registry": "id → class",
    "plan": "which method each tensor gets",
    "__init__": "the package's face",
    "engine": "one rank's side, without I/O",
    "_torch": "what the PyTorch drivers share",
    "loopback": "N ranks in one process",
    "horovod": "its frameworks",
    "horovod/torch": "Horovod, PyTorch",
    "ddp": "DistributedDataParallel",
    "fsdp": "FSDP2, between replicas",
    "horovod/tensorflow": "Horovod, TensorFlow",
    "mpi": "mpi4py, numpy",
    "horovod/keras": "Horovod, Keras 3",
    "integrations": "Lightning, accelerate, Trainer",
    "testing": "check_method()",
    "lab": "experiments, benchmarks, predictions, pages",
    "cli": "the command",
}


def outer(name: str) -> str:
    """The room of a file, the lab's taken as one."""
    return room_of(name).split("/")[0] if name.startswith("lab") else room_of(name)


def arrows() -> dict[str, set[str]]:
    """Room -> rooms that it imports, without those that other arrows imply."""
    direct: dict[str, set[str]] = defaultdict(set)
    for name, targets in graph().items():
        direct[outer(name)] |= {outer(target) for target in targets} - {outer(name)}

    def below(room: str) -> set[str]:
        found = set(direct[room])
        for target in direct[room]:
            found |= below(target)
        return found

    return {room: {t for t in ts if not any(t in below(other) for other in ts)} for room, ts in dict(direct).items()}


def picture() -> str:
    """The SVG."""
    rooms = {outer(name) for name in graph()} - {"__main__"}
    floors = [sorted(floor & rooms) for floor in reversed(FLOORS)]
    floors = [floor for floor in floors if floor]
    places: dict[str, tuple[float, float, float]] = {}
    parts = []
    for number, floor in enumerate(floors):
        width = (WIDTH - 2 * MARGIN - 12 * (len(floor) - 1)) / max(len(floor), 3)
        left = (WIDTH - len(floor) * width - 12 * (len(floor) - 1)) / 2
        y = MARGIN + number * (HEIGHT + GAP)
        for at, room in enumerate(floor):
            x = left + at * (width + 12)
            places[room] = (x, y, width)
            title = {"__init__": "hvdcompress"}.get(room, room)
            says = SAYS.get(room, "")
            parts.append(
                f'<g><rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{HEIGHT}" rx="5" class="room"/>'
                f'<text x="{x + width / 2:.0f}" y="{y + 17}" class="name">{title}</text>'
                f'<text x="{x + width / 2:.0f}" y="{y + 32}" class="says">{says}</text></g>'
            )
    lines = []
    for room, targets in sorted(arrows().items()):
        for target in sorted(targets):
            if room in places and target in places:
                (x, y, width), (tx, ty, twidth) = places[room], places[target]
                middle, end = x + width / 2, tx + twidth / 2
                bend = (y + HEIGHT + ty) / 2
                lines.append(
                    f'<path d="M{middle:.0f},{y + HEIGHT} C{middle:.0f},{bend:.0f} {end:.0f},{bend:.0f} '
                    f'{end:.0f},{ty - 3}" class="arrow" marker-end="url(#tip)"/>'
                )
    height = 2 * MARGIN + len(floors) * (HEIGHT + GAP) - GAP
    style = (
        "svg{font-family:system-ui,sans-serif;background:#fff}.room{fill:#eef3f8;stroke:#7b93ab}"
        ".name{font-size:13px;font-weight:600;text-anchor:middle;fill:#1c2b3a}.says{font-size:11px;text-anchor:middle;fill:#43566a}.arrow{fill:none;stroke:#9aa9b8;"
        "stroke-width:1.2}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="The rooms of hvdcompress by floor; arrows point from a room to those that it imports">'
        f"<style>{style}</style><defs>"
        '<marker id="tip" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0,0 L6,3 L0,6 z" fill="#9aa9b8"/></marker></defs>' + "\n".join([*lines, *parts]) + "</svg>\n"
    )


if __name__ == "__main__":
    made = picture()
    if "--check" in sys.argv:
        stale = not OUT.exists() or OUT.read_text(encoding="utf-8") != made
        sys.exit("docs/house.svg is out of date; run: python tools/write_house.py" if stale else 0)
    OUT.write_text(made, encoding="utf-8")
    print(f"wrote {OUT.relative_to(ROOT)}")
