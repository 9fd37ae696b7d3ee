"""Cases of the MPI driver alone: communicators, calls of their own, arrays of any layout, and steps after an error."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hvdcompress.engine.state import SEEN
from hvdcompress.engine.telemetry.observer import Observer
from hvdcompress.loopback import Loopback
from hvdcompress.mpi import Compressor, PeerError
from hvdcompress.optimizers import SGD
from hvdcompress.plan import IN_ORDER
from tests import harness
from tests.harness import EXACT, OUT, REORDERED, Skip, assert_close, case, logged, summed
from tests.promises.drivers.mpi import MPI, MpiDriver
from tests.promises.interactions import all_features_at_once
from tests.promises.numbers import assert_same_state

COMM = MPI.COMM_WORLD
RANK, WORLD = COMM.rank, COMM.size
SHAPES = {"b": (37, 41), "a": (16, 7, 3, 5), "e": (5,), "d": (1,), "c": (8, 131)}
ROUNDING = summed(WORLD)  # MPI adds more than two in an order of its own


def needs(world_size: int) -> None:
    if world_size > WORLD:
        raise Skip(f"needs {world_size} ranks")


def gradients(step: int, rank: int) -> dict[str, np.ndarray]:
    """Heavy-tailed values, in an order of names that differs between ranks."""
    drawn = harness.heavy_tailed(SHAPES, step, rank)
    return drawn if rank % 2 == 0 else dict(reversed(drawn.items()))


def everyone(step: int) -> list[dict[str, np.ndarray]]:
    return [gradients(step, rank) for rank in range(WORLD)]


def must_raise(kind: Any, words: list[str], run: Callable[[], object], same: bool = True) -> None:
    harness.must_raise(kind, words, run, COMM.allgather, same)


@case
def local_steps_of_the_guide() -> None:
    from tests.unit.house.pages import ROOT, blocks

    (code,) = (c for c, _ in blocks((ROOT / "docs/guides/local-steps.md").read_text(), "python") if "mpi" in c)
    rng = np.random.default_rng(RANK)
    truth = {name: np.random.default_rng(9).normal(size=n).astype("f") for name, n in (("a", 1100), ("b", 5))}
    weights = {name: rng.normal(size=array.shape).astype("f") for name, array in truth.items()}

    def distance() -> float:
        return sum(float(np.square(weights[name] - truth[name]).sum()) for name in truth)

    def inner_step(weights: dict[str, np.ndarray]) -> None:
        for name, array in weights.items():
            array -= np.float32(0.01) * (array - truth[name] + rng.normal(size=array.shape).astype("f"))

    before = distance()
    exec(code, {"comm": COMM, "weights": weights, "inner_step": inner_step, "steps": 300})
    assert distance() < before / 2
    harness.assert_same_on_all_ranks(weights, COMM.allgather, "local steps")


@case
def arrays_of_any_layout() -> None:
    comp, net = Compressor("topk", density=0.1), Loopback("topk", world_size=WORLD, density=0.1)
    given = [{"w": np.asfortranarray(one["b"])[:, ::2].T} for one in everyone(0)]
    before = given[RANK]["w"].copy()
    given[RANK]["w"].flags.writeable = False
    got = comp.allreduce(given[RANK]["w"], name="w")
    assert_close({"w": got}, {"w": net.allreduce_many(given)[RANK]["w"]}, ROUNDING, "a view")
    np.testing.assert_array_equal(given[RANK]["w"], before)
    assert got.flags.writeable and not np.shares_memory(got, given[RANK]["w"])
    assert comp.allreduce_many({}) == {}
    assert comp.residual("w").shape == got.shape


@case
def a_signal_handler_that_raises_waits_for_the_end_of_the_step() -> None:
    """On one rank alone, at any time: the exception comes between steps, and ranks go on together."""

    class Rung(Exception):
        pass

    def ring(number: int, frame: object) -> None:
        raise Rung

    class Rings(Observer):
        """Sends this process the signal at one of the exchange's events."""

        at = ""

        def __getattribute__(self, name: str) -> Any:
            if name == object.__getattribute__(self, "at"):
                signal.raise_signal(signal.SIGALRM)
            return object.__getattribute__(self, name)

    comp, net, rings = Compressor("topk", density=0.1), Loopback("topk", world_size=WORLD, density=0.1), Rings()
    comp.watch(rings)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        for step, at in enumerate(("begun", "encoded", "sent", "completed", "decoded", "committed", "")):
            given, rung = everyone(step), False
            rings.at = at if RANK == 0 else ""
            out = {name: np.empty_like(array) for name, array in given[RANK].items()}
            try:
                comp.allreduce_many(given[RANK], out=out)
            except Rung:
                rung = True
            assert rung == (RANK == 0 and at != ""), at
            assert_close(out, net.allreduce_many(given)[RANK], ROUNDING, f"step {step}")
    finally:
        assert signal.signal(signal.SIGALRM, before) is ring


@case
def sets_of_tensors_that_change() -> None:
    """A NaN in a set's first step, tensors that become too small to be compressed, and groups in which they are not."""
    sizes = {"a": 10, "b": 10, "c": 100}
    for settings in ({"min_elements": 1}, {"min_elements": 50}, {"min_elements": 50, "bucket_elements": 1000}):
        comp, random = Compressor("topk", density=0.1, **settings), np.random.default_rng(0)
        given, received = ({name: np.zeros(size) for name, size in sizes.items()} for _ in range(2))
        for step, names in enumerate(("ab", "bc", "ab", "c", "abc", "a", "abc", "b", "ac", "abc")):
            everyone = [
                {name: random.standard_normal(sizes[name]).astype(np.float32) for name in names} for _ in range(WORLD)
            ]
            if step == 0:
                everyone[-1]["a"][0] = np.nan
            got = comp.allreduce_many(everyone[RANK])
            for name in names if step else ():
                given[name] += np.mean([one[name] for one in everyone], axis=0)
                received[name] += got[name]
        for name in sizes:
            kept = np.mean(COMM.allgather(comp.residual(name)), axis=0)
            np.testing.assert_allclose(received[name] + kept, given[name], atol=2e-5, err_msg=f"{settings}, {name}")


@case
def a_tensor_without_a_name_is_refused() -> None:
    """Two tensors of one shape would share a residual, and nobody would know."""
    comp = Compressor("topk", density=0.1)
    must_raise(TypeError, ["name", 'allreduce(gradient, name="layer1.weight")'], lambda: comp.allreduce(np.ones(3)))
    must_raise(TypeError, ["name"], lambda: comp.allreduce(np.ones(3), op="sum"))


@case
def results_in_given_arrays() -> None:
    for method in ("topk", "qsgd", "none", "scalecom"):
        comp, control = Compressor(method), Compressor(method)
        for step in range(3):
            given = gradients(step, RANK)
            want = control.allreduce_many({name: array.copy() for name, array in given.items()})
            got = comp.allreduce_many(given, out=given)
            assert all(got[name] is given[name] for name in given)
            assert_close(got, want, EXACT, f"{method}, in place")
            other = {name: np.full_like(array, 7) for name, array in given.items()}
            before = {name: array.copy() for name, array in gradients(step, RANK).items()}
            kept = {name: array.copy() for name, array in before.items()}
            want = control.allreduce_many({name: array.copy() for name, array in before.items()})
            assert_close(comp.allreduce_many(before, out=other), want, EXACT, f"{method}, out=")
            assert_close(before, kept, EXACT, f"{method}, inputs")
    given = gradients(0, RANK)
    for wrong in (
        {name: array for name, array in given.items() if name != "b"},
        {**given, "b": given["b"][:-1]},
        {**given, "b": given["b"].astype(np.float64)},
    ):
        must_raise(ValueError, ["out['b']"], lambda w=wrong: comp.allreduce_many(given, out=w), same=False)
    assert_close(comp.allreduce_many(given), control.allreduce_many(given), EXACT, "after errors")


@case
def tensors_that_come_in_changing_company() -> None:
    """They get and keep what they would alone."""
    for method in ("topk", "qsgd", "powersgd", "dgc"):
        comp, alone = Compressor(method), Compressor(method, bucket_elements=0)
        sets = ["abc", "abc", "ab", "b", "abc", "c", "ac", "abc", "abc"]
        for step, names in enumerate(sets):
            given = {name: array for name, array in gradients(step, RANK).items() if name in names}
            got, want = comp.allreduce_many(given), alone.allreduce_many(given)
            assert_close(got, want, EXACT if WORLD == 2 else ROUNDING, f"{method}, step {step}")
            for name in "abc":
                if step > 1 and WORLD == 2:
                    np.testing.assert_array_equal(comp.residual(name), alone.residual(name), err_msg=f"{name}, {step}")


@case
def tensors_that_come_in_calls_of_their_own() -> None:
    comp, net = Compressor("topk", density=0.05), Loopback("topk", world_size=WORLD, density=0.05)
    for step in range(3):
        given = everyone(step)
        for name in ("b", "a"):
            want = net.allreduce([one[name] for one in given], name=name)[RANK]
            assert_close({name: comp.allreduce(given[RANK][name], name)}, {name: want}, ROUNDING, name)
    assert "topk" in comp.describe() and "2 tensors" in comp.describe()


@case
def communicators_of_some_ranks() -> None:
    half = COMM.Split(RANK % 2, -RANK)  # in the opposite order
    comp, net = Compressor("scalecom", half, density=0.05), Loopback("scalecom", half.size, density=0.05)
    whole = Compressor("topk", density=0.05)
    for step in range(3):
        given = [gradients(step, rank) for rank in range(half.size)]
        whole.allreduce_many(gradients(step, RANK))
        assert_close(comp.allreduce_many(given[half.rank]), net.allreduce_many(given)[half.rank], REORDERED, f"{step}")
    comp.close()


class Part(MpiDriver):
    """The ranks of a communicator."""

    def __init__(self, comm: Any, folder: str):
        self.comm, self.rank, self.world_size, self.folder = comm, comm.rank, comm.size, OUT / folder

    def meet(self) -> None:
        self.comm.Barrier()


@case
def a_communicator_of_some_ranks_with_all_other_features() -> None:
    needs(2)
    all_features_at_once(Part(COMM.Split(RANK % 2, -RANK), f"half{RANK % 2}"))


@case
def a_state_comes_back_tensor_by_tensor() -> None:
    comp = Compressor("scalecom", density=0.02)
    for step in range(3):
        comp.allreduce_many(gradients(step, RANK))
    comp.save(OUT / "state")
    COMM.barrier()
    again = Compressor("scalecom", density=0.02)
    again.load(OUT / "state")
    given = gradients(3, RANK)
    for name in sorted(given):
        got = again.allreduce(given[name], name)
        assert_close({name: got}, {name: comp.allreduce(given[name], name)}, EXACT, name)
    assert_same_state(again.state_dict(), comp.state_dict(), "tensor by tensor")


@case
def a_state_of_other_shapes_is_refused_when_they_come() -> None:
    comp = Compressor("topk", density=0.05)
    comp.allreduce_many(gradients(0, RANK))
    other = Compressor("topk", density=0.05)
    other.load_state_dict(comp.state_dict())
    shorter = {**gradients(0, RANK), "b": np.ones((37, 40), np.float32)}
    must_raise((ValueError, PeerError), ["elements", "'b'"], lambda: other.allreduce_many(shorter), same=False)


@case
def a_rank_whose_input_is_wrong() -> None:
    comp, last = Compressor("topk", density=0.05), WORLD - 1
    good = gradients(0, RANK)
    wrong: list[tuple[Any, list[str], dict, str]] = [
        (ValueError, ["int64", "'b'"], {**good, "b": np.arange(12)}, "average"),
        (ValueError, ["complex64"], {**good, "b": np.ones(9, np.complex64)}, "average"),
        (ValueError, ["op", "mean"], good, "mean"),
        (TypeError, ["name"], {**good, 7: good["b"]}, "average"),
    ]
    for kind, words, arrays, op in wrong:
        for ranks in ({last}, set(range(WORLD))):
            given, how = (arrays, op) if RANK in ranks else (good, "average")
            expected = kind if RANK in ranks else PeerError
            must_raise(expected, words, lambda g=given, h=how: comp.allreduce_many(g, op=h), same=False)
    control = Compressor("topk", density=0.05)
    assert_close(comp.allreduce_many(good), control.allreduce_many(good), EXACT, "after errors")


@case
def a_step_after_ranks_differed_is_as_good_as_any() -> None:
    needs(2)
    comp, control = Compressor("topk", density=0.05), Compressor("topk", density=0.05)
    good = gradients(0, RANK)
    renamed = {("w" if name == "b" else name): array for name, array in good.items()}
    different: list[tuple[list[str], dict, Any]] = [
        (["'b'", "(37, 41)", "(37, 40)", "rank 1"], {**good, "b": np.ones((37, 40), np.float32)}, "average"),
        (["'b'", "float64", "float32"], {**good, "b": good["b"].astype(np.float64)}, "average"),
        (["'b'", "None"], renamed, "average"),
        (["'c'", "None"], {name: array for name, array in good.items() if name != "c"}, "average"),
        (["ranks disagree"], {}, "average"),
        (["op", "sum", "average"], good, "sum"),
    ]
    for step in range(2):
        for words, arrays, op in different:
            given, how = (arrays, op) if RANK == 1 else (good, "average")
            must_raise(PeerError, ["ranks disagree", *words], lambda g=given, h=how: comp.allreduce_many(g, op=h))
        got, want = comp.allreduce_many(gradients(step, RANK)), control.allreduce_many(gradients(step, RANK))
        assert_close(got, want, EXACT, "after the disagreement")


@case
def a_bad_plan_on_one_rank_is_every_ranks_error() -> None:
    needs(2)
    bad = {"density": 7.0} if RANK == 1 else {}
    expected = ValueError if RANK == 1 else PeerError
    must_raise(expected, ["density"], lambda: Compressor("topk", **bad), same=False)
    assert isinstance(Compressor("topk").allreduce(np.ones(3), "w"), np.ndarray)


@case
def a_communicator_that_is_none() -> None:
    for comm in (None, 3, MPI.COMM_NULL):
        must_raise(ValueError, ["intracommunicator"], lambda c=comm: Compressor("topk", c), same=False)


@case
def an_alarm_of_the_next_step_is_not_of_this_one() -> None:
    """A rank that lingers in the end of a step hears that another has failed in the next: the step ends well."""
    needs(2)
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
    for step in range(12):
        given, guilty = gradients(step, RANK), step % WORLD
        comp._transport.wait = wait if guilty == RANK else linger  # the others are late in every collective
        assert_close(comp.allreduce_many(given), control.allreduce_many(given), EXACT, f"step {step}")
        wrong, fails = dict(given), guilty == RANK and step % 2 == 0
        if guilty == RANK and step % 2:
            wrong["b"] = np.arange(12)
        try:
            comp.allreduce_many(wrong)
            message = "no error"
        except (PeerError, ValueError) as error:
            message = str(error)
        fails = False
        assert ("made by the test" if step % 2 == 0 else "int64") in message, (step, message)
        assert_same_state(comp.state_dict(), control.state_dict(), f"after the error that follows step {step}")
    comp._transport.wait = wait


@case
def a_loaded_state_that_no_tensor_claims_is_said() -> None:
    first, second = (Compressor("topk", COMM, density=0.1, min_elements=1) for _ in range(2))
    first.allreduce(np.ones(1000, np.float32), "layer.w")
    second.load_state_dict(first.state_dict())
    with logged() as said:
        for _ in range(SEEN + 2):
            second.allreduce(np.ones(1000, np.float32), "model.layer.w")
    found = [line for line in said if "no tensor has used the loaded state of 'layer.w'" in line]
    assert len(found) == (COMM.rank == 0), said


@case
def owners_are_the_same_after_an_error() -> None:
    """A rank that fails before it knows its tensors has not chosen owners for them, so no rank keeps its choice."""
    settings = {"density": 0.1, "min_elements": 1, **MpiDriver(OUT).placed({})}
    comp, net = (
        Compressor("topk", optimizer=SGD(0.0), **settings),
        Loopback("topk", WORLD, grouping=IN_ORDER, **settings),
    )
    large, small, other = ({name: np.full(size, RANK, np.float32)} for name, size in (("x", 90), ("y", 10), ("z", 50)))
    wrong = {name: array[1:] for name, array in large.items()} if RANK == 0 else None
    must_raise(Exception, ["out['x']"], lambda: comp.allreduce_many({**large, **small}, out=wrong), same=False)
    for given in (other, {**large, **other}, {**small, **large}):
        everyone = COMM.allgather(given)
        assert_close(comp.allreduce_many(given), net.allreduce_many(everyone)[RANK], ROUNDING, str(list(given)))
        placement = comp.local.placement
        assert len(set(COMM.allgather(str(placement and sorted(placement.owners.items()))))) == 1
    comp.close()


@case
def nodes_that_do_not_fit_are_every_ranks() -> None:
    """A number of nodes among which the ranks cannot be distributed, on one rank or on all."""
    needs(2)
    for ranks in ((WORLD - 1,), range(WORLD)):
        nodes = WORLD + 1 if RANK in ranks else 0
        words = [f"nodes = {WORLD + 1}", "cannot be distributed equally"]
        must_raise(Exception, words, lambda nodes=nodes: Compressor("topk", nodes=nodes), same=False)
