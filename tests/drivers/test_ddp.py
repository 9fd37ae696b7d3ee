"""The DDP driver when a rank is killed, as Horovod's, and in the example; ``test_promises.py`` has all else."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launching import environment

pytest.importorskip("torch")
pytestmark = pytest.mark.parallel

HERE = Path(__file__).parent


@pytest.mark.timeout(120)
def test_a_killed_rank_is_an_error_on_the_other(tmp_path: Path) -> None:
    """Ranks are started by hand, as torchrun would end the other one before it can say anything."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    line = [sys.executable, str(HERE / "ddp_killed.py"), str(tmp_path)]
    ranks = [subprocess.Popen(line, env=environment("alone", RANK=str(rank), **place)) for rank in range(2)]
    try:
        status = [rank.wait(100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert (tmp_path / "before").exists() and not (tmp_path / "survivor").exists()
    assert status == [1, -signal.SIGKILL]
    seconds, words = (tmp_path / "error").read_text().split(maxsplit=1)
    assert float(seconds) < 25, "the process group's timeout is 20 s"
    assert "the process group has failed on rank 0" in words


@pytest.mark.timeout(60)
def test_one_parameter_has_one_driver() -> None:
    """A model under DDP whose optimizer is Horovod's, with a Compressor, would exchange each gradient twice."""
    hvd = pytest.importorskip("horovod.torch")
    torch = pytest.importorskip("torch")
    from hvdcompress import ddp
    from hvdcompress.torch import Compressor

    hvd.init()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(40, 40))
        under_horovod = Compressor("topk", model.named_parameters())
        with pytest.raises(ValueError, match="exchanged twice.*Horovod.*DistributedDataParallel"):
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
