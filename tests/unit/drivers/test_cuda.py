"""The PyTorch driver on a device that is not the host's memory: which tensors lie where, and who waits for whom.

No GPU is needed: ``elsewhere.py`` stands for one, and for Horovod.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.unit.ops import comparing

torch = pytest.importorskip("torch")
pytest.importorskip("horovod.torch")

from hvdcompress.engine.agreement import PeerError  # noqa: E402
from hvdcompress.horovod.torch import compressor as driver  # noqa: E402
from hvdcompress.horovod.torch import transport  # noqa: E402
from tests.unit.drivers.elsewhere import CUDA, Device, Elsewhere, Horovod, each, plain  # noqa: E402

SIZES = (600, 300)
STEPS = 3


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter on the memory of the device's tensors, for one thread at a time."""
    pytest.importorskip("triton")
    from hvdcompress.ops.triton._kernels import launching

    lock = threading.Lock()

    def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        with lock, torch._C.DisableTorchFunction():
            launching.launch(kernel, programs, *each(plain, arguments), **constants)

    for subject in comparing.LAUNCHING:
        monkeypatch.setattr(f"hvdcompress.ops.triton.{subject}.launch", launch)


class Run:
    """Two ranks, each a thread with its own Compressor, over several steps.

    Args:
        monkeypatch: puts our Horovod in the place of the real one.
        method: what compresses.
        on: the device of the gradients; None: the host.
        fails: whether rank 1 fails in the last step.
        nan: whether rank 1's first gradient of the second step has one.
        settings: of the Compressors.

    Attributes:
        waits: of rank 0, in the last step.
        results: of every step, rank 0's reduced gradients.
        counters: of rank 0's ledger.
        errors: what the ranks raised.
        mixed: collectives that ranks started with tensors on unlike devices.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        method: str,
        on: Any = CUDA,
        fails: bool = False,
        nan: bool = False,
        **settings: Any,
    ):
        self.net, self.on, self.fails, self.nan = Horovod(2), on, fails, nan
        for module in (driver, transport):
            monkeypatch.setattr(module, "hvd", self.net)
        monkeypatch.setattr(driver, "_number", lambda *_: 0)  # the real one counts the Compressors of a process
        self.waits: Counter[str] = Counter()
        self.results: list[list[np.ndarray]] = []
        self.counters: dict[str, int] = {}
        self.errors: list[Exception] = []
        settings = {"min_elements": 1, "bucket_elements": 0, **settings}
        make = functools.partial(driver.Compressor, method, **settings)
        threads = [threading.Thread(target=self._rank, args=(rank, make), daemon=True) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        self.mixed = self.net.mixed
        if self.errors and not fails:
            raise self.errors[0]

    def _rank(self, rank: int, make: Any) -> None:
        try:
            self.net.rank.number = rank
            members = SimpleNamespace(rank=lambda: rank, size=lambda: 2, process_set_id=0)
            with Device() as device:
                parameters = {
                    f"p{n}": SimpleNamespace(
                        shape=(n,),
                        dtype=torch.float32,
                        device=self.on,
                        is_cpu=self.on is None,
                        grad=None,
                        requires_grad=True,
                        is_complex=lambda: False,
                    )
                    for n in SIZES
                }
                compressor = make(parameters.items(), process_set=members)
                for step in range(STEPS):
                    device.waits.clear()
                    if self.fails and rank == 1 and step == STEPS - 1:
                        compressor.framework.vector = lambda *_: 1 / 0
                    results = self._step(rank, step, compressor, parameters)
                    if rank == 0:
                        self.waits = +device.waits
                        self.results.append(results)
                if rank == 0:
                    self.counters = compressor.ledger.counters()
        except Exception as error:
            self.errors.append(error)

    def _step(self, rank: int, step: int, compressor: Any, parameters: dict[str, Any]) -> list[np.ndarray]:
        sent = []
        for name, parameter in parameters.items():
            values = np.random.default_rng([rank, step, *parameter.shape]).normal(size=parameter.shape)
            values[7] = np.nan if self.nan and (rank, step, name) == (1, 1, f"p{SIZES[0]}") else values[7]
            gradient = torch.from_numpy(values.astype(np.float32))
            parameter.grad = gradient if self.on is None else gradient.as_subclass(Elsewhere)
            stock, ticket = compressor.compress(parameter.grad)
            sent.append((self.net.allreduce_async(stock, name=name), ticket))
        done = [compressor.decompress(self.net.synchronize(handle), ticket) for handle, ticket in sent]
        return [plain(one).numpy().copy() for one in done]


#: How often the host waits for the device in a step of two tensors among two ranks: with Triton, with torch alone.
#: Once, for the status ("__bool__"); more where a payload's size or header decides what comes next.
WAITS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "scalecom": (  # how many are above the leader's threshold, and where a code's set bits are
        {"__bool__": 1, "tolist": 2, "nonzero": 2},
        {"__bool__": 1, "tolist": 4, "nonzero": 6},
    ),
    "scalecom chunk": ({"__bool__": 1}, {"__bool__": 1, "tolist": 2}),
    "fp16": ({"__bool__": 1}, {"__bool__": 1}),
    "powersgd": ({"__bool__": 1}, {"__bool__": 1}),
    "randomk": ({"__bool__": 1, "tolist": 1}, {"__bool__": 1, "tolist": 3}),  # the factor comes with the payload
    "qsgd": ({"__bool__": 1, "tolist": 4}, {"__bool__": 1, "tolist": 4}),  # each rank's header
    "topk": (  # and of each rank's indices how many they are, and whether they are in range
        {"__bool__": 1, "tolist": 8, "nonzero": 4},
        {"__bool__": 1, "tolist": 12, "nonzero": 8, "bincount": 2},
    ),
}


@pytest.mark.parametrize("method", WAITS)
def test_the_host_waits_so_often_and_results_are_the_hosts(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    id, *select = method.split()
    settings = {"select": select[0]} if select else {}
    host = Run(monkeypatch, id, on=None, **settings)
    for ops, waits in zip(("auto", "torch"), WAITS[method], strict=True):
        run = Run(monkeypatch, id, ops=ops, **settings)
        assert dict(run.waits) == waits
        assert not run.mixed
        assert run.counters == host.counters
        if method != "powersgd":  # its products round as the library's do
            for mine, its in zip(run.results, host.results, strict=True):
                assert [one.tobytes() for one in mine] == [one.tobytes() for one in its]


def test_joined_tensors_wait_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the one code of all positions."""
    run = Run(monkeypatch, "scalecom", bucket_elements=10**6, select="chunk")
    assert run.waits == {"__bool__": 1}
    run = Run(monkeypatch, "scalecom", bucket_elements=10**6)
    assert run.waits == {"__bool__": 1, "tolist": 1, "nonzero": 1}
    for values in ("fp32", "qsgd4"):  # values of 4 bits are scaled in each tensor, and travel in one payload
        run = Run(monkeypatch, "topk", bucket_elements=None, values=values)
        assert run.waits == {"__bool__": 1, "tolist": 4, "nonzero": 2}


@pytest.mark.parametrize("ops", ["auto", "torch"])
@pytest.mark.parametrize("method", ["scalecom", "fp16", "randomk", "topk", "gaussiank", "qsgd"])
def test_a_step_with_a_nan_is_undone(monkeypatch: pytest.MonkeyPatch, method: str, ops: str) -> None:
    """Whether the device knows it or the host: the next step is as if it had not been."""
    host, run = (Run(monkeypatch, method, on=on, nan=True, ops=ops) for on in (None, CUDA))
    assert not run.mixed
    for step in range(STEPS):
        for mine, its in zip(run.results[step], host.results[step], strict=True):
            assert np.array_equal(mine, its, equal_nan=True)
            assert np.isnan(mine).all() if step == 1 else np.isfinite(mine).all()


@pytest.mark.parametrize("method", ["randomk", "none", "topk"])
def test_a_rank_that_fails_sends_from_the_same_device(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Horovod refuses a collective of tensors on unlike devices: its own message would come in the place of ours."""
    run = Run(monkeypatch, method, fails=True)
    assert not run.mixed
    if method != "none":
        assert len(run.errors) == 2
        assert all(isinstance(error, PeerError) and "division" in str(error) for error in run.errors), run.errors


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_no_op_mixes_host_and_device(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """All that the tests of the ops call, on tensors of the device; results stay there, and are the reference's."""
    ops = importlib.import_module(f"hvdcompress.ops.{name}")
    for file in sorted((Path(__file__).parents[1] / "ops").glob("test_ops_*.py")):
        importlib.import_module(f"tests.unit.ops.{file.stem}")
    monkeypatch.setattr(comparing, "device_of", lambda backend: "cuda" if backend is ops else None)
    with Device():
        comparing.compare(ops, comparing.vector("special", 9), comparing.vector("special", 9, seed=1))


def test_the_device_is_as_strict_as_cuda() -> None:
    with Device() as device:
        x = torch.ones(5, device="cuda")
        assert isinstance(x, Elsewhere) and isinstance(x[1:] + 1, Elsewhere) and not device.waits
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(5)
        x.to("cpu"), x.sum().item(), x[x > 0], x.nonzero(), torch.ones(5).to("cuda"), torch.tensor([1], device="cuda")
        torch.ones(5).to("cuda", non_blocking=True)
        assert bool(x.any())
        assert device.waits == {"cpu": 1, "item": 1, "index of booleans": 1, "nonzero": 1, "upload": 2, "__bool__": 1}
