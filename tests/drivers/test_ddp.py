"""The DDP driver when a rank is killed, as Horovod's, and in the example; ``test_promises_ddp.py`` has all else."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from installed import needs
from launching import environment, launch

needs("torch")
pytestmark = pytest.mark.parallel

HERE = Path(__file__).parent


def by_hand(words: list[str], world: int) -> list[subprocess.Popen[str]]:
    """Start ranks of a script without a launcher, each with what it prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(world)}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return [
        subprocess.Popen([sys.executable, *words], env=environment("alone", RANK=str(rank), **place), **options)
        for rank in range(world)
    ]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_a_killed_rank_is_an_error_on_all_others(world: int, tmp_path: Path) -> None:
    """Ranks are started by hand, as torchrun would end the others before they can say anything."""
    ranks = by_hand([str(HERE / "ddp_killed.py"), str(tmp_path)], world)
    try:
        status = [rank.wait(100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert (tmp_path / "before").exists() and not (tmp_path / "survivor").exists()
    assert status == [-signal.SIGKILL if rank == 1 else 1 for rank in range(world)]
    for rank in set(range(world)) - {1}:
        seconds, words = (tmp_path / f"error-{rank}").read_text().split(maxsplit=1)
        assert float(seconds) < 10, f"rank {rank} waited {seconds} s; the process group's timeout is 60 s"
        assert f"the process group has failed on rank {rank}" in words


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind,status", [("error", 1), ("exit", 3), ("interrupt", -signal.SIGINT)])
def test_an_exception_in_the_backward_pass_ends_every_rank(kind: str, status: int) -> None:
    """At once, with the rank's own traceback; and not after the plan's ``end_after`` or the process group's."""
    ranks = by_hand([str(HERE / "ddp_ends.py"), kind], 2)
    began = time.monotonic()
    try:
        texts = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert time.monotonic() - began < 35, "`end_after` is 40 s, and all of this starts in seconds"
    assert [rank.returncode for rank in ranks] == [1, status], texts
    assert "rank 1: a backward pass ended before all of its gradients" in texts[0]
    assert kind != "error" or "ValueError: made by the test" in texts[1]


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


def test_a_script_without_such_a_module_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("import helper, sys\nprint(__name__, sys.argv[1:])\nsys.exit(int(sys.argv[1]))\n")
    (tmp_path / "helper.py").write_text("")
    (tmp_path / "package.py").write_text("import sys\nprint('module', sys.argv[1:])\n")
    options = ["--method", "topk", "--set", "density=0.1"]
    done = subprocess.run(
        [sys.executable, "-m", "hvdcompress.ddp", *options, str(script), "0", "--set", "x"],
        env=environment("alone"), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "__main__ ['0', '--set', 'x']\n", done.stderr
    assert "nothing.py has made no DistributedDataParallel module" in done.stderr

    from hvdcompress.ddp.__main__ import main

    monkeypatch.setattr(sys, "argv", [])  # it changes both
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path])
    with pytest.raises(SystemExit, match="3"):
        main([*options, str(script), "3"])
    assert "warning" not in capsys.readouterr().err, "it has failed for another reason"
    main([*options, "-m", "package", "--set", "y"])
    said = capsys.readouterr()
    assert said.out == "module ['--set', 'y']\n" and "package has made no" in said.err


@pytest.mark.parametrize(
    "line,words",
    [
        (["train.py"], "--plan FILE or --method ID"),
        (["--plan", "a.yaml", "--method", "topk", "train.py"], "--plan FILE or --method ID"),
        (["--plan", "missing.yaml", "train.py"], "missing.yaml"),
        (["--method", "topkk", "train.py"], "did you mean"),
        (["--method", "topk", "--set", "density", "train.py"], "KEY=VALUE, not 'density'"),
        (["--method", "topk", "--set", "density=2", "train.py"], "density"),
        (["--method", "topk"], "no script"),
    ],
)
def test_wrong_command_lines(line: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    from hvdcompress.ddp.__main__ import main

    with pytest.raises(SystemExit) as end:
        main(line)
    assert end.value.code == 2 and words in capsys.readouterr().err


def test_modules_are_plain_again_afterwards() -> None:
    from torch.nn.parallel import DistributedDataParallel

    from hvdcompress.ddp.__main__ import every_module
    from hvdcompress.plan import plan_of

    plain = DistributedDataParallel.__init__
    with pytest.raises(KeyError), every_module(plan_of("topk")):
        assert DistributedDataParallel.__init__ is not plain
        raise KeyError
    assert DistributedDataParallel.__init__ is plain


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
