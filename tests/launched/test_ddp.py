"""Scripts that ``python -m hvdcompress.ddp`` compresses, parameters that two drivers would exchange, and imports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.installed import needs
from tests.launching import environment, launch

needs("torch")

HERE = Path(__file__).parent


@pytest.mark.timeout(120)
def test_a_script_that_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("method: scalecom\ndensity: 0.02\n")
    own = ["4", "--lr", "0.6", "--snapshot", str(tmp_path / "snapshot.pt")]
    plan = ["--plan", str(tmp_path / "plan.yaml"), "--set", "min_elements=8"]
    done = launch("torchrun-2", Path("-m"), "hvdcompress.ddp", *plan, str(HERE / "ddp_script.py"), *own, seconds=90)
    assert done.returncode == 0, done.stdout[-3000:]
    assert '"epochs": 4' in done.stdout and '"lr": 0.6' in done.stdout, "its arguments are its own"
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 4 and losses[-1] < losses[0] / 2 and (tmp_path / "snapshot.pt").exists()
    assert "hvdcompress: compressing Linear" in done.stdout and "scalecom" in done.stdout
    (steps, rate) = re.search(r"hvdcompress: (\d+) steps, .*: ([\d.]+)x less", done.stdout).groups()
    assert int(steps) == 32 and float(rate) > 5, done.stdout[-2000:]


@pytest.mark.timeout(60)
def test_one_parameter_has_one_driver() -> None:
    """A model under DDP whose optimizer is Horovod's, with a Compressor, would exchange each gradient twice."""
    hvd = pytest.importorskip("horovod.torch")
    torch = pytest.importorskip("torch")
    from hvdcompress import ddp
    from hvdcompress.horovod.torch import Compressor

    hvd.init()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(40, 40))
        under_horovod = Compressor("topk", model.named_parameters())
        with pytest.raises(ValueError, match=r"exchanged twice.*Horovod.*DistributedDataParallel"):
            ddp.attach(model, "topk")
        with pytest.raises(ValueError, match="under Horovod cannot be attached"):
            ddp.attach(model, under_horovod)
        del under_horovod
        attached = ddp.attach(model, "topk")
        with pytest.raises(ValueError, match="exchanged twice"):
            Compressor("topk", model.named_parameters())
        attached.close()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.timeout(60)
def test_import_of_the_horovod_driver_changes_nothing() -> None:
    """It registers no optimizer hook that the program did not ask for, and leaves the environment as it was."""
    pytest.importorskip("horovod.torch")
    program = (
        "import os, torch; from torch.optim import optimizer; before = dict(os.environ); "
        "import hvdcompress.horovod.torch; "
        "assert not optimizer._global_optimizer_pre_hooks and dict(os.environ) == before"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=environment("alone"))
