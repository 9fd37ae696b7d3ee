"""Tests of the MPI driver alone: communicators, calls of their own, arrays of any layout, and steps after an error."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from hvdcompress.engine.state import SEEN
from hvdcompress.engine.telemetry.observer import Observer
from hvdcompress.loopback import Loopback
from hvdcompress.mpi import Compressor, PeerError
from hvdcompress.optimizers import SGD
from hvdcompress.plan import IN_ORDER
from tests.ranks import checks
from tests.ranks.checks import EXACT, FOLDER, assert_close, assert_same_state, logged, summed
from tests.ranks.drivers.mpi import MPI, MpiDriver
from tests.ranks.promises.test_together import check_all_features
from tests.unit.house.pages import ROOT, blocks

pytestmark = pytest.mark.drivers("mpi")

COMM = MPI.COMM_WORLD
SHAPES = {"b": (37, 41), "a": (16, 7, 3, 5), "e": (5,), "d": (1,), "c": (8, 131)}


def gradients(step: int, rank: int | None = None, names: Iterable[str] = SHAPES) -> dict[str, np.ndarray]:
    """Return heavy-tailed gradients of a rank, by default of this one, in an order that differs between ranks."""
    rank = COMM.rank if rank is None else rank
    drawn = checks.heavy_tailed(SHAPES, step, rank)
    ordered = drawn if rank % 2 == 0 else dict(reversed(drawn.items()))
    return {name: array for name, array in ordered.items() if name in names}


def everyone(step: int) -> list[dict[str, np.ndarray]]:
    return [gradients(step, rank) for rank in range(COMM.size)]


def assert_sums(got: dict, want: dict, what: str) -> None:
    """Check that sums over all ranks are equal, as exactly as MPI's can be: it chooses the order of three or more."""
    assert_close(got, want, summed(COMM.size), what)


def must_raise(kind: Any, words: list[str], run: Callable[[], object], same: bool = True) -> None:
    checks.must_raise(kind, words, run, COMM.allgather, same)


def topk_and_loopback(density: float) -> tuple[Compressor, Loopback]:
    return Compressor("topk", density=density), Loopback("topk", world_size=COMM.size, density=density)


def test_local_steps_of_the_guide() -> None:
    (code,) = (c for c, _ in blocks((ROOT / "docs/guides/local-steps.md").read_text(), "python") if "mpi" in c)
    rng = np.random.default_rng(COMM.rank)
    weights = {name: rng.normal(size=size).astype("f") for name, size in (("a", 1100), ("b", 5))}

    def inner_step(weights: dict[str, np.ndarray]) -> None:
        """Descend towards ones, with noise of this rank's own."""
        for array in weights.values():
            array -= np.float32(0.01) * (array - 1 + rng.normal(size=array.shape).astype("f"))

    exec(code, {"comm": COMM, "weights": weights, "inner_step": inner_step, "steps": 300})
    assert np.abs(weights["a"] - 1).mean() < 0.5
    checks.assert_same_on_all_ranks(weights, COMM.allgather, "local steps")


def test_arrays_of_any_layout() -> None:
    comp, net = topk_and_loopback(0.1)
    given = [{"w": np.asfortranarray(one["b"])[:, ::2].T} for one in everyone(0)]
    mine = given[COMM.rank]["w"]
    before = mine.copy()
    mine.flags.writeable = False
    got = comp.allreduce(mine, name="w")
    assert_sums({"w": got}, net.allreduce_many(given)[0], "a view")
    np.testing.assert_array_equal(mine, before)
    assert got.flags.writeable and not np.shares_memory(got, mine)
    assert comp.allreduce_many({}) == {}
    assert comp.residual("w").shape == got.shape


class Rings(Observer):
    """Sends this process a signal at one of the exchange's events."""

    at = ""

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "at"):
            signal.raise_signal(signal.SIGALRM)
        return object.__getattribute__(self, name)


def test_a_signal_handler_that_raises_waits_for_the_end_of_the_step() -> None:
    """On one rank alone, at any time: the exception comes between steps, and ranks go on together."""

    def ring(number: int, frame: object) -> None:
        raise TimeoutError

    (comp, net), rings = topk_and_loopback(0.1), Rings()
    comp.watch(rings)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        for step, at in enumerate(("begun", "encoded", "sent", "completed", "decoded", "committed", "")):
            given = everyone(step)
            rings.at = at if COMM.rank == 0 else ""
            out = {name: np.empty_like(array) for name, array in given[COMM.rank].items()}
            if rings.at:
                with pytest.raises(TimeoutError):
                    comp.allreduce_many(given[COMM.rank], out=out)
            else:
                comp.allreduce_many(given[COMM.rank], out=out)
            assert_sums(out, net.allreduce_many(given)[COMM.rank], f"step {step}")
    finally:
        assert signal.signal(signal.SIGALRM, before) is ring


def test_sets_of_tensors_that_change() -> None:
    """A NaN in a set's first step, tensors that become too small to be compressed, and groups in which they are not."""
    sizes = {"a": 10, "b": 10, "c": 100}
    for settings in ({"min_elements": 1}, {"min_elements": 50}, {"min_elements": 50, "bucket_elements": 1000}):
        comp, random = Compressor("topk", density=0.1, **settings), np.random.default_rng(0)
        given, received = ({name: np.zeros(size) for name, size in sizes.items()} for _ in range(2))
        for step, names in enumerate(("ab", "bc", "ab", "c", "abc", "a", "abc", "b", "ac", "abc")):
            arrays = [
                {name: random.standard_normal(sizes[name]).astype(np.float32) for name in names}
                for _ in range(COMM.size)
            ]
            if step == 0:
                arrays[-1]["a"][0] = np.nan
            got = comp.allreduce_many(arrays[COMM.rank])
            for name in names if step else ():
                given[name] += np.mean([one[name] for one in arrays], axis=0)
                received[name] += got[name]
        for name in sizes:
            kept = np.mean(COMM.allgather(comp.residual(name)), axis=0)
            np.testing.assert_allclose(received[name] + kept, given[name], atol=2e-5, err_msg=f"{settings}, {name}")


def test_tensors_that_come_in_changing_company() -> None:
    """They get and keep what they would alone."""
    for method in ("topk", "qsgd", "powersgd"):
        comp, alone = Compressor(method), Compressor(method, bucket_elements=0)
        for step, names in enumerate(("abc", "ab", "b", "abc", "c", "ac", "abc")):
            given = gradients(step, names=names)
            assert_sums(comp.allreduce_many(given), alone.allreduce_many(given), f"{method}, step {step}")
            for name in "abc" if step and COMM.size == 2 else ():
                np.testing.assert_array_equal(comp.residual(name), alone.residual(name), err_msg=f"{name}, {step}")


def test_results_in_given_arrays() -> None:
    """In the inputs, or in others."""
    for method in ("topk", "none"):
        comp, control = Compressor(method), Compressor(method)
        for step in range(2):
            for in_place in (True, False):
                given = gradients(step)
                out = given if in_place else {name: np.full_like(array, 7) for name, array in given.items()}
                got = comp.allreduce_many(given, out=out)
                assert_close(got, control.allreduce_many(gradients(step)), EXACT, f"{method}, {in_place}")
                assert all(got[name] is out[name] for name in out)
        assert_close(given, gradients(step), EXACT, "inputs")
    for wrong in (
        {name: array for name, array in given.items() if name != "b"},
        {**given, "b": given["b"][:-1]},
        {**given, "b": given["b"].astype(np.float64)},
    ):
        must_raise(ValueError, ["out['b']"], lambda w=wrong: comp.allreduce_many(given, out=w), same=False)
    assert_close(comp.allreduce_many(given), control.allreduce_many(given), EXACT, "after errors")


def test_tensors_that_come_in_calls_of_their_own() -> None:
    """Two tensors of one shape would share a residual, so one without a name is refused."""
    comp, net = topk_and_loopback(0.05)
    for step in range(2):
        given = everyone(step)
        for name in ("b", "a"):
            want = net.allreduce([one[name] for one in given], name=name)[COMM.rank]
            assert_sums({name: comp.allreduce(given[COMM.rank][name], name)}, {name: want}, name)
    assert "topk" in comp.describe() and "2 tensors" in comp.describe()
    must_raise(TypeError, ["name", 'allreduce(gradient, name="layer1.weight")'], lambda: comp.allreduce(np.ones(3)))
    must_raise(TypeError, ["name"], lambda: comp.allreduce(np.ones(3), op="sum"))


class Part(MpiDriver):
    """The ranks of a communicator."""

    def __init__(self, comm: Any, folder: str):
        self.comm, self.rank, self.world_size, self.folder = comm, comm.rank, comm.size, FOLDER / folder

    def meet(self) -> None:
        self.comm.Barrier()


def test_a_communicator_of_some_ranks_with_all_other_features() -> None:
    check_all_features(Part(COMM.Split(COMM.rank % 2, -COMM.rank), f"half{COMM.rank % 2}"))  # in the opposite order


def test_a_communicator_that_is_none() -> None:
    for comm in (None, 3, MPI.COMM_NULL):
        must_raise(ValueError, ["intracommunicator"], lambda c=comm: Compressor("topk", c), same=False)


def test_a_state_comes_back_tensor_by_tensor() -> None:
    """Also from files; a tensor whose shape is another one is refused when it comes."""
    comp, again, other = (Compressor("scalecom", density=0.02) for _ in range(3))
    for step in range(2):
        comp.allreduce_many(gradients(step))
    comp.save(FOLDER / "state")
    COMM.barrier()
    for one in (again, other):
        one.load(FOLDER / "state")
    given = gradients(3)
    for name in sorted(given):
        got = again.allreduce(given[name], name)
        assert_close({name: got}, {name: comp.allreduce(given[name], name)}, EXACT, name)
    assert_same_state(again.state_dict(), comp.state_dict(), "tensor by tensor")
    shorter = {**given, "b": np.ones((37, 40), np.float32)}
    must_raise((ValueError, PeerError), ["elements", "'b'"], lambda: other.allreduce_many(shorter), same=False)


def test_a_loaded_state_that_no_tensor_claims_is_said() -> None:
    first, second = (Compressor("topk", COMM, density=0.1, min_elements=1) for _ in range(2))
    first.allreduce(np.ones(1000, np.float32), "layer.w")
    second.load_state_dict(first.state_dict())
    with logged() as said:
        for _ in range(SEEN + 2):
            second.allreduce(np.ones(1000, np.float32), "model.layer.w")
    found = [line for line in said if "no tensor has used the loaded state of 'layer.w'" in line]
    assert len(found) == (COMM.rank == 0), said


def test_a_step_after_one_rank_was_wrong_is_as_good_as_any() -> None:
    """With an input that it refuses itself, or one that the others do not have."""
    comp, control, good = Compressor("topk", density=0.05), Compressor("topk", density=0.05), gradients(0)
    for kind, words, arrays, op in (
        (ValueError, ["int64", "'b'"], {**good, "b": np.arange(12)}, "average"),
        (ValueError, ["complex64"], {**good, "b": np.ones(9, np.complex64)}, "average"),
        (ValueError, ["op", "mean"], good, "mean"),
        (TypeError, ["name"], {**good, 7: good["b"]}, "average"),
        (PeerError, ["'b'", "(37, 41)", "(37, 40)", "rank 1"], {**good, "b": np.ones((37, 40), "f")}, "average"),
        (PeerError, ["'c'", "None"], {name: good[name] for name in good if name != "c"}, "average"),
        (PeerError, ["ranks disagree"], {}, "average"),
        (PeerError, ["ranks disagree", "op", "sum", "average"], good, "sum"),
    ):
        given, how = (arrays, op) if COMM.rank == 1 else (good, "average")
        expected = kind if COMM.rank == 1 else PeerError
        must_raise(expected, words, lambda g=given, h=how: comp.allreduce_many(g, op=h), same=kind is PeerError)
        got, want = (one.allreduce_many(gradients(1)) for one in (comp, control))
        assert_close(got, want, EXACT, f"after {words}")


def test_a_bad_plan_on_one_rank_is_every_ranks_error() -> None:
    bad = {"density": 7.0} if COMM.rank == 1 else {}
    expected = ValueError if COMM.rank == 1 else PeerError
    must_raise(expected, ["density"], lambda: Compressor("topk", **bad), same=False)
    assert isinstance(Compressor("topk").allreduce(np.ones(3), "w"), np.ndarray)


def test_an_alarm_of_the_next_step_is_not_of_this_one() -> None:
    """A rank that lingers in the end of a step hears that another has failed in the next: the step ends well."""
    comp, control = Compressor("topk", density=0.05), Compressor("topk", density=0.05)
    wait, exchange = comp._transport.wait, comp.plan.program.main.exchange
    fails = False

    def failing(*args: Any) -> Any:
        if fails:
            raise FloatingPointError("made by the test")
        return exchange(*args)

    def linger(handle: Any) -> Any:
        time.sleep(0.01)
        return wait(handle)

    object.__setattr__(comp.plan.program.main, "exchange", failing)
    for step in range(8):
        given, guilty = gradients(step), COMM.rank == step % COMM.size
        comp._transport.wait = wait if guilty else linger  # the others are late in every collective
        assert_close(comp.allreduce_many(given), control.allreduce_many(given), EXACT, f"step {step}")
        fails = guilty and step % 4 < 2
        wrong = {**given, "b": np.arange(12)} if guilty and step % 4 >= 2 else given
        with pytest.raises((PeerError, ValueError), match="made by the test" if step % 4 < 2 else "int64"):
            comp.allreduce_many(wrong)
        fails = False
        assert_same_state(comp.state_dict(), control.state_dict(), f"after the error that follows step {step}")
    comp._transport.wait = wait


@pytest.mark.also("two levels")
def test_owners_are_the_same_after_an_error() -> None:
    """A rank that fails before it knows its tensors has not chosen owners for them, so no rank keeps its choice."""
    settings = {"density": 0.1, "min_elements": 1, **MpiDriver(FOLDER).placed({})}
    comp = Compressor("topk", optimizer=SGD(0.0), **settings)
    net = Loopback("topk", COMM.size, grouping=IN_ORDER, **settings)
    large, small, other = (
        {name: np.full(size, COMM.rank, np.float32)} for name, size in (("x", 90), ("y", 10), ("z", 50))
    )
    wrong = {"x": large["x"][1:]} if COMM.rank == 0 else None
    must_raise(Exception, ["out['x']"], lambda: comp.allreduce_many({**large, **small}, out=wrong), same=False)
    for given in (other, {**large, **other}, {**small, **large}):
        assert_sums(comp.allreduce_many(given), net.allreduce_many(COMM.allgather(given))[COMM.rank], str([*given]))
        placement = comp.local.placement
        assert len(set(COMM.allgather(str(placement and sorted(placement.owners.items()))))) == 1
    comp.close()


@pytest.mark.also("two levels")
def test_nodes_that_do_not_fit_are_every_ranks() -> None:
    """A number of nodes among which the ranks cannot be distributed, on one rank or on all."""
    words = [f"nodes = {COMM.size + 1}", "cannot be distributed equally"]
    for is_wrong in (True, COMM.rank == COMM.size - 1):
        nodes = COMM.size + 1 if is_wrong else 0
        must_raise(Exception, words, lambda nodes=nodes: Compressor("topk", nodes=nodes), same=False)
