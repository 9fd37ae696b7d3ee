"""torch.distributed.checkpoint: two ranks save a Compressor with its model, and other numbers of ranks load it."""

from __future__ import annotations

from pathlib import Path

from tests.installed import needs
from tests.launching import launch

SCRIPT = Path(__file__).with_name("dcp_ranks.py")


def test_another_number_of_ranks_takes_over(tmp_path: Path) -> None:
    """The sum of the residuals over the ranks stays."""
    needs("torch")
    for num_ranks in (2, 3, 1):
        done = launch(f"torchrun-{num_ranks}", SCRIPT, str(tmp_path / "saved"), seconds=100)
        assert done.returncode == 0, done.stdout[-4000:]
