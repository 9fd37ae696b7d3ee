"""The PyTorch driver on a simulated GPU: no operation mixes host and device, and the host waits as seldom as possible.

``elsewhere.py`` simulates the GPU and Horovod.
"""

from __future__ import annotations

import gc
import importlib
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
from hvdcompress.testing import numbers  # noqa: E402
from tests.unit.drivers.elsewhere import CUDA, Device, Elsewhere, Horovod, each, plain  # noqa: E402

SIZES = (600, 300)
STEPS = 3


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run Triton's interpreter on the memory of the device's tensors."""
    pytest.importorskip("triton")
    from hvdcompress.ops.triton._kernels import launching

    def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        with torch._C.DisableTorchFunction():
            launching.launch(kernel, programs, *each(plain, arguments), **constants)

    for subject in comparing.LAUNCHING:
        monkeypatch.setattr(f"hvdcompress.ops.triton.{subject}.launch", launch)


class Run:
    """Steps of one rank that exchanges two tensors.

    Args:
        method: an id.
        on_device: whether the gradients are on the device.
        nan: whether the gradients of the second step have a NaN.
        fails: whether the method fails in the last step.
        net: the collectives.
        settings: of the Compressor.

    Attributes:
        waits: how often the host waited in the last step.
        results: the reduced gradients of every step.
        counters: of the ledger.
        started: the collectives, with the class of the input of each.
    """

    def __init__(
        self,
        method: str,
        on_device: bool = True,
        nan: bool = False,
        fails: bool = False,
        net: Horovod | None = None,
        **settings: Any,
    ):
        net = net or Horovod()
        self.results: list[list[np.ndarray]] = []
        about = {"dtype": torch.float32, "device": CUDA if on_device else None, "is_cpu": not on_device}
        about |= {"grad": None, "requires_grad": True, "is_complex": lambda: False}
        parameters = {f"p{n}": SimpleNamespace(shape=(n,), **about) for n in SIZES}
        with Device() as device, pytest.MonkeyPatch.context() as patch:
            for module in (driver, transport):
                patch.setattr(module, "hvd", net)
            patch.setattr(driver, "number_compressor", lambda *_: 0)  # the real one counts the Compressors of a process
            settings = {"min_elements": 1, "bucket_elements": 0, **settings}
            compressor = driver.Compressor(method, parameters.items(), process_set=net, **settings)
            for step in range(STEPS):
                device.waits.clear()
                net.step = step
                if fails and step == STEPS - 1:
                    compressor._framework.vector = lambda *_: 1 / 0
                sent = []
                for name, parameter in parameters.items():
                    gradient = torch.from_numpy(numbers(parameter.shape, 0, step).copy())
                    if nan and step == 1:
                        gradient[7] = torch.nan
                    parameter.grad = gradient.as_subclass(Elsewhere) if on_device else gradient
                    stock, ticket = compressor.compress(parameter.grad)
                    sent.append((net.allreduce_async(stock, name=name), ticket))
                done = [compressor.decompress(net.synchronize(handle), ticket) for handle, ticket in sent]
                self.results.append([plain(one).numpy().copy() for one in done])
        self.waits = dict(+device.waits)
        self.counters = compressor.ledger.counters()
        self.started = net.started


#: How often the host waits for the device in a step of two tensors: with Triton, with torch alone.
#: Once, for the status ("__bool__"); more where a payload's size or header decides what comes next.
WAITS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "scalecom": (  # how many are above the leader's threshold, and where a code's set bits are
        {"__bool__": 3, "argwhere": 2},
        {"__bool__": 5, "argwhere": 6},
    ),
    "scalecom chunk": ({"__bool__": 1}, {"__bool__": 3}),
    "fp16": ({"__bool__": 1}, {"__bool__": 1}),
    "powersgd": ({"__bool__": 1}, {"__bool__": 1}),
    "randomk": ({"__bool__": 1}, {"__bool__": 3}),
    "qsgd": ({"__bool__": 1, "tolist": 2}, {"__bool__": 1, "tolist": 2}),  # each payload's header
    "topk": (  # and of the indices how many they are, and whether they are in range
        {"__bool__": 3, "tolist": 2, "argwhere": 2},
        {"__bool__": 5, "tolist": 2, "argwhere": 6},
    ),
}


@pytest.mark.parametrize("method", WAITS)
def test_the_number_of_waits_and_results_equal_to_those_on_the_host(method: str) -> None:
    id, *select = method.split()
    settings = {"select": select[0]} if select else {}
    host = Run(id, on_device=False, **settings)
    for ops, waits in zip(("auto", "torch"), WAITS[method], strict=True):
        run = Run(id, backend=ops, **settings)
        assert run.waits == waits
        assert run.counters == host.counters
        if method != "powersgd":  # its products round as the library's do
            np.testing.assert_equal(run.results, host.results)


@pytest.mark.parametrize(
    "method,settings,waits",
    [
        ("scalecom", {"select": "chunk"}, {"__bool__": 1}),
        ("scalecom", {}, {"__bool__": 2, "argwhere": 1}),  # one code of all positions
        # values of 4 bits are scaled in each tensor, and travel in one payload
        ("topk", {"values": "qsgd4"}, {"__bool__": 2, "tolist": 1, "argwhere": 1}),
    ],
)
def test_the_host_waits_once_for_joined_tensors(method: str, settings: dict[str, Any], waits: dict[str, int]) -> None:
    assert Run(method, bucket_elements=10**6, **settings).waits == waits


@pytest.mark.parametrize(
    "method,ops", [("scalecom", "auto"), ("topk", "auto"), ("gaussiank", "torch"), ("qsgd", "torch"), ("fp16", "auto")]
)
def test_a_step_with_a_nan_is_undone(method: str, ops: str) -> None:
    """Whether the device knows of it or the host: later steps are as if it had not been."""
    host, run = (Run(method, on_device=on_device, nan=True, backend=ops) for on_device in (False, True))
    assert run.started == Run(method, backend=ops).started, "other ranks expect these collectives, on these devices"
    assert np.isnan(np.concatenate(run.results[1])).all()
    assert np.isfinite(np.concatenate(run.results[2])).all()
    np.testing.assert_equal(run.results, host.results)


@pytest.mark.parametrize("method", ["randomk", "topk"])
def test_a_rank_that_fails_still_sends_from_the_device(method: str) -> None:
    """Horovod refuses a collective if ranks have its tensor on different devices: its message would replace ours."""
    net = Horovod()
    with pytest.raises(PeerError, match="division"):
        Run(method, fails=True, net=net)
    sent = {each for each in net.started if ".error" not in each[1]}
    assert sent <= set(Run(method).started)
    gc.collect()  # the traceback of the error refers to the Compressor, which later tests would find


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_no_op_mixes_host_and_device(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Results of everything that the tests of the ops call stay on the device, and equal the reference's."""
    ops = importlib.import_module(f"hvdcompress.ops.{name}").ops
    monkeypatch.setattr(comparing, "device_of", lambda backend: "cuda" if backend is ops else None)
    with Device():
        comparing.compare(ops, comparing.vector("special", 9), comparing.vector("special", 9, seed=1))


def test_the_simulated_device_is_as_strict_as_cuda() -> None:
    with Device() as device:
        x = torch.ones(5, device="cuda")
        assert isinstance(x, Elsewhere) and isinstance(x[1:] + 1, Elsewhere) and not device.waits
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(5)
        x.to("cpu"), x.sum().item(), x[x > 0], x.nonzero(), torch.ones(5).to("cuda"), torch.tensor([1], device="cuda")
        torch.ones(5).to("cuda", non_blocking=True)
        assert bool(x.any())
        assert device.waits == {"cpu": 1, "item": 1, "index of booleans": 1, "nonzero": 1, "upload": 2, "__bool__": 1}
