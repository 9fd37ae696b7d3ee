"""Tests of the MPI driver alone: arrays, calls for some of the tensors, communicators, signals, errors."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest

from hvdcompress.engine.state import SEEN
from hvdcompress.engine.telemetry.observer import Observer
from hvdcompress.mpi import Compressor, PeerError
from tests.ranks.checks import EXACT, FOLDER, assert_close, assert_same_on_all_ranks, assert_same_state, logged, summed
from tests.ranks.drivers.mpi import MPI, MpiDriver
from tests.ranks.promises.test_together import check_all_features
from tests.ranks.reduced import assert_reduced
from tests.unit.house.pages import ROOT, blocks, run_blocks

pytestmark = pytest.mark.drivers("mpi")

SHAPES = MpiDriver.shapes


def topk_and_loopback(driver, **settings):
    """Return a Compressor and the loopback with its plan."""
    settings = {"density": 0.1, **settings}
    return driver.make("topk", settings, SHAPES).compressor, driver.yardstick("topk", settings)


def test_local_steps_of_the_guide(driver):
    (code,) = (c for c, _ in blocks((ROOT / "docs/guides/local-steps.md").read_text(), "python") if "mpi" in c)
    rng = np.random.default_rng(driver.rank)
    weights = {name: rng.normal(size=size).astype("f") for name, size in (("a", 1100), ("b", 5))}

    def inner_step(weights):
        """Descend towards ones, with noise of this rank's own."""
        for array in weights.values():
            array -= np.float32(0.01) * (array - 1 + rng.normal(size=array.shape).astype("f"))

    exec(code, {"comm": driver.comm, "weights": weights, "inner_step": inner_step, "steps": 300})
    assert np.abs(weights["a"] - 1).mean() < 0.5
    assert_same_on_all_ranks(weights, driver.gather, "local steps")


def test_blocks_of_the_pages(driver):
    """Of the guide, the start page and the page on momentum."""
    comp, _ = topk_and_loopback(driver, optimizer_momentum="adapt")
    gradients = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    names = {"compressor": comp, "first": gradients["a"], "second": gradients["b"], "gradients": gradients}
    names |= {"weights": {name: array.copy() for name, array in gradients.items()}}
    names |= {"velocity": {name: np.zeros_like(array) for name, array in gradients.items()}}
    run_blocks("docs/guides/mpi.md", names)
    assert names["averages"].keys() == {"layer1", "layer2"}
    run_blocks("docs/momentum.md", names)
    assert all((array < 1).any() for array in names["weights"].values())
    run_blocks("docs/index.md", {"Compressor": Compressor, "MPI": MPI, "gradient": gradients["a"]})


# -- arrays, and calls for some of the tensors -----------------------------------------------------


def test_array_of_any_layout(driver):
    """Read-only and non-contiguous. The result is a new array."""
    comp, net = topk_and_loopback(driver)
    everyone = [{"w": np.asfortranarray(one["a"])[:, ::2].T} for one in driver.everyone(0, SHAPES)]
    mine = everyone[driver.rank]["w"]
    before = mine.copy()
    mine.flags.writeable = False
    got = comp.allreduce(mine, name="w")
    assert_reduced(driver, {"w": got}, net, everyone)
    np.testing.assert_array_equal(mine, before)
    assert got.flags.writeable and not np.shares_memory(got, mine)
    assert comp.allreduce({}) == {}
    assert comp.residual("w").shape == got.shape


@pytest.mark.parametrize("method", ["topk", "none"])
def test_results_in_given_arrays(driver, method):
    """In the inputs, or in other arrays. Wrong arrays are refused, and the next step succeeds."""
    comp, control = Compressor(method), Compressor(method)
    for step in range(2):
        for in_place in (True, False):
            given = driver.gradients(step, SHAPES)
            out = given if in_place else {name: np.full_like(array, 7) for name, array in given.items()}
            got = comp.allreduce(given, out=out)
            assert_close(got, control.allreduce(driver.gradients(step, SHAPES)), EXACT, f"in place: {in_place}")
            assert all(got[name] is out[name] for name in out)
    assert_close(given, driver.gradients(step, SHAPES), EXACT, "inputs")
    for wrong in (
        {name: array for name, array in given.items() if name != "b"},
        {**given, "b": given["b"][:-1]},
        {**given, "b": given["b"].astype(np.float64)},
    ):
        driver.must_raise(ValueError, ["out['b']"], lambda w=wrong: comp.allreduce(given, out=w), same=False)
    assert_close(comp.allreduce(given), control.allreduce(given), EXACT, "after errors")


def test_call_for_each_tensor(driver):
    """A call without a name is refused: two tensors of one shape would share a residual."""
    comp, net = topk_and_loopback(driver)
    for step in range(2):
        for name in ("a", "b"):
            everyone = [{name: one[name]} for one in driver.everyone(step, SHAPES)]
            got = comp.allreduce(everyone[driver.rank][name], name)
            assert_reduced(driver, {name: got}, net, everyone, f"step {step}")
    assert "topk" in comp.describe() and "2 tensors" in comp.describe()
    words = ["name", 'allreduce(gradient, name="layer1.weight")']
    driver.must_raise(TypeError, words, lambda: comp.allreduce(np.ones(3)))
    driver.must_raise(TypeError, ["name"], lambda: comp.allreduce(np.ones(3), op="sum"))


@pytest.mark.parametrize("method", ["topk", "qsgd", "powersgd"])
def test_calls_for_changing_sets_of_tensors(driver, method):
    """Results and residuals are as without buckets."""
    comp, alone = Compressor(method), Compressor(method, bucket_elements=0)
    for step, names in enumerate(("abc", "ab", "b", "abc", "c", "ac", "abc")):
        given = driver.gradients(step, {name: SHAPES[name] for name in names})
        got, want = (one.allreduce(given) for one in (comp, alone))
        assert_close(got, want, summed(driver.world_size), f"step {step}")
        for name in "abc" if step and driver.exact else ():
            np.testing.assert_array_equal(comp.residual(name), alone.residual(name), err_msg=f"{name}, {step}")


def test_state_is_loaded_tensor_by_tensor(driver):
    """From files. A tensor whose shape differs from the saved one is refused in its first step."""
    comp, again, other = (Compressor("scalecom", density=0.02) for _ in range(3))
    for step in range(2):
        comp.allreduce(driver.gradients(step, SHAPES))
    comp.save(FOLDER / "state")
    driver.meet()
    for one in (again, other):
        one.load(FOLDER / "state")
    given = driver.gradients(3, SHAPES)
    for name in sorted(given):
        got, want = (one.allreduce(given[name], name) for one in (again, comp))
        assert_close({name: got}, {name: want}, EXACT, name)
    assert_same_state(again.state_dict(), comp.state_dict(), "tensor by tensor")
    shorter, words = {**given, "b": np.ones((37, 40), np.float32)}, ["elements", "'b'"]
    driver.must_raise((ValueError, PeerError), words, lambda: other.allreduce(shorter), same=False)


def test_loaded_state_that_no_tensor_uses_is_logged(driver):
    first, second = (Compressor("topk", density=0.1, min_elements=1) for _ in range(2))
    first.allreduce(np.ones(1000, np.float32), "layer.w")
    second.load_state_dict(first.state_dict())
    with logged() as lines:
        for _ in range(SEEN + 2):
            second.allreduce(np.ones(1000, np.float32), "model.layer.w")
    found = [line for line in lines if "no tensor has used the loaded state of 'layer.w'" in line]
    assert len(found) == (driver.rank == 0), lines


# -- communicators and nodes -----------------------------------------------------------------------


class Part(MpiDriver):
    """The ranks of a communicator."""

    def __init__(self, comm, folder):
        self.comm, self.rank, self.world_size, self.folder = comm, comm.rank, comm.size, FOLDER / folder

    def meet(self):
        self.comm.Barrier()


def test_communicator_of_some_ranks_with_all_other_features(driver):
    """In the opposite order."""
    half = driver.rank % 2
    check_all_features(Part(driver.comm.Split(half, -driver.rank), f"half{half}"))


def test_arrays_with_more_than_their_elements_are_refused(driver):
    """As a gradient of one rank, and to receive results. mpi4py's own Allreduce keeps a mask."""
    comp, plain = Compressor("topk", density=1.0, min_elements=1), np.ones(30, np.float32)
    for kind in (np.ma.MaskedArray, np.recarray):
        given, words = plain.view(kind) if driver.rank == 1 else plain, ["'w' is a numpy.", kind.__name__]
        driver.must_raise(Exception, words, lambda given=given: comp.allreduce(given, "w"), same=False)
        out = plain.view(kind)
        driver.must_raise(ValueError, ["out['w']"], lambda out=out: comp.allreduce(plain, "w", out=out))
    assert (comp.allreduce(plain, "w") == 1).all()


def test_communicator_that_is_none_is_refused(driver):
    for comm in (None, 3, MPI.COMM_NULL):
        driver.must_raise(ValueError, ["intracommunicator"], lambda c=comm: Compressor("topk", c), same=False)


@pytest.mark.also("two levels")
def test_number_of_nodes_that_does_not_divide_the_ranks_is_refused(driver):
    """On one rank or on all: an error on every rank."""
    wrong = driver.world_size + 1
    words = [f"nodes = {wrong}", "cannot be distributed equally"]
    for is_wrong in (True, driver.rank == driver.world_size - 1):
        nodes = wrong if is_wrong else 0
        driver.must_raise(Exception, words, lambda nodes=nodes: Compressor("topk", nodes=nodes), same=False)


@pytest.mark.also("two levels")
def test_owners_are_equal_on_all_ranks_after_an_error(driver):
    """A rank that fails before it knows its tensors has not chosen owners for them, so no rank keeps its choice."""
    comp, net = topk_and_loopback(driver, min_elements=1)
    large, small, other = (
        {name: np.full(size, driver.rank, np.float32)} for name, size in (("x", 90), ("y", 10), ("z", 50))
    )
    wrong = {"x": large["x"][1:]} if driver.rank == 0 else None
    driver.must_raise(Exception, ["out['x']"], lambda: comp.allreduce({**large, **small}, out=wrong), same=False)
    for given in (other, {**large, **other}, {**small, **large}):
        want = net.allreduce(driver.gather(given))[driver.rank]
        assert_close(comp.allreduce(given), want, summed(driver.world_size), str([*given]))
        placement = comp.rank_state.placement
        assert len(set(driver.gather(str(placement and sorted(placement.owners.items()))))) == 1
    comp.close()


# -- signals and errors ----------------------------------------------------------------------------


class SignalAtEvent(Observer):
    """Send this process a signal at one of the events of a step."""

    event = ""

    def __getattribute__(self, name):
        if name == object.__getattribute__(self, "event"):
            signal.raise_signal(signal.SIGALRM)
        return object.__getattribute__(self, name)


def test_exception_of_a_signal_handler_waits_for_the_end_of_the_step(driver):
    """On one rank alone. The step is complete on all ranks, and the next one succeeds."""

    def handler(number, frame):
        raise TimeoutError

    (comp, net), observer = topk_and_loopback(driver), SignalAtEvent()
    comp.add_observer(observer)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        for step, event in enumerate(("begun", "encoded", "sent", "completed", "decoded", "committed", "")):
            everyone = driver.everyone(step, SHAPES)
            observer.event = event if driver.rank == 0 else ""
            out = {name: np.empty_like(array) for name, array in everyone[driver.rank].items()}
            if observer.event:
                with pytest.raises(TimeoutError):
                    comp.allreduce(everyone[driver.rank], out=out)
            else:
                comp.allreduce(everyone[driver.rank], out=out)
            assert_reduced(driver, out, net, everyone, f"step {step}")
    finally:
        assert signal.signal(signal.SIGALRM, before) is handler


def test_step_after_a_wrong_input_on_one_rank_succeeds(driver):
    """The rank refuses the input itself, or the ranks disagree. Rank 1 is wrong."""
    comp, control = (Compressor("topk", density=0.05) for _ in range(2))
    good = driver.gradients(0, SHAPES)
    for kind, words, arrays, op in (
        (ValueError, ["int64", "'b'"], {**good, "b": np.arange(12)}, "average"),
        (ValueError, ["complex64"], {**good, "b": np.ones(9, np.complex64)}, "average"),
        (ValueError, ["op", "mean"], good, "mean"),
        (TypeError, ["name"], {**good, 7: good["b"]}, "average"),
        (PeerError, ["'a'", "(37, 41)", "(37, 40)", "rank 1"], {**good, "a": np.ones((37, 40), "f")}, "average"),
        (PeerError, ["'c'", "None"], {name: good[name] for name in good if name != "c"}, "average"),
        (PeerError, ["ranks disagree"], {}, "average"),
        (PeerError, ["ranks disagree", "op", "sum", "average"], good, "sum"),
    ):
        given, how = (arrays, op) if driver.rank == 1 else (good, "average")
        expected = kind if driver.rank == 1 else PeerError
        run = lambda g=given, h=how: comp.allreduce(g, op=h)  # noqa: E731
        driver.must_raise(expected, words, run, same=kind is PeerError)
        got, want = (one.allreduce(driver.gradients(1, SHAPES)) for one in (comp, control))
        assert_close(got, want, EXACT, f"after {words}")


def test_wrong_plan_on_one_rank_is_an_error_on_every_rank(driver):
    wrong = {"density": 7.0} if driver.rank == 1 else {}
    expected = ValueError if driver.rank == 1 else PeerError
    driver.must_raise(expected, ["density"], lambda: Compressor("topk", **wrong), same=False)
    assert isinstance(Compressor("topk").allreduce(np.ones(3), "w"), np.ndarray)


def test_error_in_the_next_step_does_not_undo_this_one(driver):
    """A rank that is late in the end of a step hears that another has failed in the next: the late step succeeds."""
    comp, control = (Compressor("topk", density=0.05) for _ in range(2))
    wait, exchange = comp._transport.wait, comp.plan.program.main.exchange
    fails = False

    def failing(*args):
        if fails:
            raise FloatingPointError("made by the test")
        return exchange(*args)

    def late(handle):
        time.sleep(0.01)
        return wait(handle)

    object.__setattr__(comp.plan.program.main, "exchange", failing)
    for step in range(8):
        given, is_failing = driver.gradients(step, SHAPES), driver.rank == step % driver.world_size
        comp._transport.wait = wait if is_failing else late
        assert_close(comp.allreduce(given), control.allreduce(given), EXACT, f"step {step}")
        in_method = step % 4 < 2  # else in the input
        fails = is_failing and in_method
        wrong = {**given, "b": np.arange(12)} if is_failing and not in_method else given
        with pytest.raises((PeerError, ValueError), match="made by the test" if in_method else "int64"):
            comp.allreduce(wrong)
        fails = False
        assert_same_state(comp.state_dict(), control.state_dict(), f"after the error that follows step {step}")
    comp._transport.wait = wait
