"""Write the tables and pictures of docs/advise.md from what was measured:

hvdcompress advise --validate advise_truth --out runs/advise
python tools/write_advise_docs.py runs/advise
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

from experiments.output.table import folded

DOCS = Path(__file__).resolve().parents[1] / "docs"
PLACE = re.compile(r"(<!-- validation: .*? -->\n).*?(<!-- end -->)", re.DOTALL)


def parts(table: str) -> str:
    """The tables, of which the long one, of every plan, is shown to who asks for it."""
    verdicts, _, plans = table.partition("Predicted and measured:")
    return verdicts + folded(plans, "Every plan: predicted and measured steps")


def main() -> None:
    """Read the folder, and write the page's part."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    config = (folder / "config.yaml").read_text(encoding="utf-8")
    lines = (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
    days = sorted({json.loads(line)["case"]["profile"]["made"] for line in lines})
    table = (folder / "table.md").read_text(encoding="utf-8")
    shutil.copyfile(folder / "advise.svg", DOCS / "advise" / "truth.svg")
    hosts = re.search(r"^hosts: (\d+)", config, re.MULTILINE)
    text = (
        f"`hvdcompress advise --validate advise_truth`, {hosts[1] if hosts else '?'} emulated hosts on one machine, "
        f"{' and '.join(days)}. A case's mean error is that of all its plans.\n\n"
        f"![Predicted against measured steps](advise/truth.svg)\n\n{parts(table)}"
    )
    page = DOCS / "advise.md"
    page.write_text(PLACE.sub(lambda found: found[1] + text + found[2], page.read_text(encoding="utf-8")), "utf-8")


if __name__ == "__main__":
    main()
