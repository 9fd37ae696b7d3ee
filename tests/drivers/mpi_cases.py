"""Run by every rank, under mpirun or alone: each case checks one promise of the MPI driver or of the ring.

``python mpi_cases.py OUT [CASE…]``: see ``harness.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import harness
import numpy as np
from harness import NUMBERS, OUT, Skip, case

import hvdcompress
from hvdcompress import registry
from hvdcompress.lab.scale import ring
from hvdcompress.loopback import Loopback
from hvdcompress.method import Context, TensorSpec
from hvdcompress.mpi import MPI, Compressor, PeerError
from hvdcompress.parts import codecs
from hvdcompress.testing import variants

COMM = MPI.COMM_WORLD
RANK, WORLD = COMM.rank, COMM.size
SHAPES = {"b": (37, 41), "a": (16, 7, 3, 5), "e": (5,), "d": (1,), "c": (8, 131)}
OVERHEAD = ("plan", "status", "lengths")  # what the ledger has beside the tensors


def needs(world: int) -> None:
    if world > WORLD:
        raise Skip(f"needs {world} ranks")


def gradients(step: int, rank: int, shapes: dict = SHAPES, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Heavy-tailed values that float16 holds exactly, in an order of names that differs between ranks."""
    out = {}
    for number, (name, shape) in enumerate(shapes.items()):
        drawn = np.random.default_rng([step, rank, number]).standard_t(3, size=shape)
        out[name] = (np.round(np.clip(drawn, -100, 100) * 16) / 16).astype(dtype)
    names = list(out) if rank % 2 == 0 else list(out)[::-1]
    return {name: out[name] for name in names}


def everyone(step: int, **more: Any) -> list[dict[str, np.ndarray]]:
    return [gradients(step, rank, **more) for rank in range(WORLD)]


def own_bytes(ledger: Any) -> int:
    """Bytes of the tensors themselves."""
    tensors = ledger.tensors()
    return ledger.bytes_sent() - sum(tensors[name].sent for name in OVERHEAD if name in tensors)


def tolerance(method: str, settings: dict) -> float:
    """Two ranks are added alike in any order; MPI adds more in an order of its own."""
    if WORLD <= 2:
        return 0.0
    half = "fp16" in (method, settings.get("values"), settings.get("dense_values"))
    return 2e-3 if half else 1e-4 if method in ("powersgd", "gradiveq") else 1e-6


def assert_close(got: dict, want: dict, rtol: float, what: str) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype and got[name].shape == want[name].shape, (what, name)
        scale = float(np.abs(want[name]).max(initial=0))
        np.testing.assert_allclose(got[name], want[name], rtol=rtol, atol=rtol * scale, err_msg=f"{what}, {name}")


def assert_same_on_all_ranks(arrays: dict[str, np.ndarray], what: str) -> None:
    gathered = COMM.allgather({name: array.tobytes() for name, array in arrays.items()})
    assert all(one == gathered[0] for one in gathered), f"{what}: ranks differ"


def against_loopback(method: str, settings: dict, steps: int = 4, op: Any = "average", **more: Any) -> None:
    """Reduce by MPI and by loopback, from the same gradients; compare results, residuals and bytes."""
    what, rtol = f"{method} {settings}", tolerance(method, settings)
    comp, net = Compressor(method, COMM, **settings), Loopback(method, world=WORLD, **settings)
    for step in range(steps):
        given = everyone(step, **more)
        got, want = comp.allreduce_many(given[RANK], op=op), net.allreduce_many(given, op=op)[RANK]
        assert_close(got, want, rtol, f"{what}, step {step}")
        assert_same_on_all_ranks(got, f"{what}, step {step}")
    for name in given[RANK]:
        got, want = comp.residual(name), net.residual(name, RANK)
        np.testing.assert_allclose(got, want, rtol=rtol, atol=10 * rtol, err_msg=f"residual of {name}, {what}")
    assert own_bytes(comp.ledger) == net.ledger.bytes_sent(RANK), what
    tensors = comp.ledger.tensors()
    assert tensors["status"].sent == 64 * steps, what
    gathers = sum(one.collectives for name, one in tensors.items() if name == "lengths")
    assert gathers == (tensors["lengths"].sent // 8 if "lengths" in tensors else 0)
    assert {n: e.sent for n, e in tensors.items() if n not in OVERHEAD} == {
        n: e.sent for n, e in net.ledger.tensors(RANK).items()
    }, what
    assert comp.ledger.counters() == net.ledger.counters(RANK), what
    comp.close()


@case
def equals_loopback() -> None:
    every = [(id, one) for id in hvdcompress.available() for one in variants(registry.classes()[id]).values()]
    for method, settings in every if WORLD == 2 else every[WORLD % 5 :: 5]:  # all where sums are equal to the bit
        against_loopback(method, settings)


@case
def equals_loopback_with_sum() -> None:
    for method in hvdcompress.available():
        against_loopback(method, {}, steps=2, op="sum")


@case
def equals_loopback_under_plans() -> None:
    rules = [{"match": {"name": "a"}, "method": "none"}, {"match": {"ndim": 2}, "density": 0.05}]
    for settings in (
        {"density": 0.05, "bucket_elements": 1200, "min_elements": 1},
        {"density": 0.05, "bucket_elements": 10**6, "min_elements": 1, "seed": 3},
        {"density": 0.05, "warmup": {"steps": 2}, "schedule": {"density": {"steps": {3: 0.01}}}},
        {"density": 0.1, "rules": rules},
    ):
        for method in ("topk", "scalecom", "gaussiank"):
            against_loopback(method, settings, steps=5)


@case
def other_dtypes() -> None:
    for dtype in ("float16", "float64"):
        for method in ("none", "topk", "scalecom", "fp16", "gtopk", "qsgd"):
            against_loopback(method, {}, steps=2, dtype=dtype)


@case
def many_tensors() -> None:
    shapes = {f"w{number:02d}": (40, 41 + number) for number in range(60)}
    comp, net = Compressor("scalecom", density=0.02), Loopback("scalecom", world=WORLD, density=0.02)
    for step in range(3):
        given = everyone(step, shapes=shapes)
        mine = {name: given[RANK][name] for name in np.random.default_rng(RANK).permutation(list(shapes)).tolist()}
        assert_close(comp.allreduce_many(mine), net.allreduce_many(given)[RANK], tolerance("scalecom", {}), f"{step}")


@case
def odd_shapes_and_layouts() -> None:
    shapes = {"none": (0,), "empty": (3, 0, 2), "scalar": (), "prime": (1009,), "matrix": (64, 33)}
    for method in hvdcompress.available():
        against_loopback(method, {"min_elements": 0}, steps=2, shapes=shapes)
    comp, net = Compressor("topk", density=0.1), Loopback("topk", world=WORLD, density=0.1)
    given = [{"w": np.asfortranarray(one["b"])[:, ::2].T} for one in everyone(0)]
    before = given[RANK]["w"].copy()
    given[RANK]["w"].flags.writeable = False
    got = comp.allreduce(given[RANK]["w"], name="w")
    assert_close({"w": got}, {"w": net.allreduce_many(given)[RANK]["w"]}, tolerance("topk", {}), "a view")
    np.testing.assert_array_equal(given[RANK]["w"], before)
    assert got.flags.writeable and not np.shares_memory(got, given[RANK]["w"])
    assert comp.allreduce_many({}) == {}
    assert comp.residual("w").shape == got.shape


@case
def tensors_that_come_in_calls_of_their_own() -> None:
    comp, net = Compressor("topk", density=0.05), Loopback("topk", world=WORLD, density=0.05)
    for step in range(3):
        given = everyone(step)
        for name in ("b", "a"):
            want = net.allreduce([one[name] for one in given], name=name)[RANK]
            assert_close({name: comp.allreduce(given[RANK][name], name)}, {name: want}, tolerance("topk", {}), name)
    assert "topk" in comp.describe() and "2 tensors" in comp.describe()


@case
def a_changing_loss_scale() -> None:
    scale = {"now": 1.0}
    plain = Compressor("scalecom", density=0.02, beta=0.5)
    scaled = Compressor("scalecom", density=0.02, beta=0.5, loss_scale=lambda: scale["now"])
    for step, now in enumerate((1.0, 1024.0, 512.0, 65536.0)):
        scale["now"], given = now, gradients(step, RANK)
        want = plain.allreduce_many(given)
        got = scaled.allreduce_many({name: array * np.float32(now) for name, array in given.items()})
        assert_close({name: array / np.float32(now) for name, array in got.items()}, want, 0.0, f"step {step}")


@case
def communicators_of_some_ranks() -> None:
    half = COMM.Split(RANK % 2, -RANK)  # in the opposite order
    comp, net = Compressor("scalecom", half, density=0.05), Loopback("scalecom", half.size, density=0.05)
    whole = Compressor("topk", density=0.05)
    for step in range(3):
        given = [gradients(step, rank) for rank in range(half.size)]
        whole.allreduce_many(gradients(step, RANK))
        assert_close(comp.allreduce_many(given[half.rank]), net.allreduce_many(given)[half.rank], 1e-6, f"{step}")
    comp.close()


# -- not finite, state, triggers -----------------------------------------------------------------------


def assert_same_state(a: dict, b: dict) -> None:
    assert a.keys() == b.keys() and a["steps"] == b["steps"] and a["restarts"] == b["restarts"]
    assert {n: set(s) for n, s in a["state"].items()} == {n: set(s) for n, s in b["state"].items()}
    for name, slots in a["state"].items():
        for slot, array in slots.items():
            np.testing.assert_array_equal(array, b["state"][name][slot], err_msg=f"{name} {slot}")


@case
def nan_on_one_rank() -> None:
    for method in hvdcompress.available():
        comp, control = Compressor(method), Compressor(method)
        for step in range(4):
            given = gradients(step, RANK)
            want, got = control.allreduce_many(given), comp.allreduce_many(given)
            assert_close(got, want, 0.0, method)
            before = comp.state_dict()
            bad = {name: array.copy() for name, array in given.items()}
            if RANK == WORLD - 1:
                bad["a"].flat[3] = np.inf if step % 2 else np.nan
            got = comp.allreduce_many(bad)
            assert all(np.isnan(array).all() for array in got.values()), "all tensors are NaN on all ranks"
            assert_same_state(before, comp.state_dict())
        assert comp.ledger.steps == 4


@case
def state_is_saved_and_restored_bit_exactly() -> None:
    for method in hvdcompress.available():
        settings = {"dense_steps": 2, "compressed_steps": 3} if method == "gradiveq" else {}
        comp = Compressor(method, **settings)
        for step in range(3):
            comp.allreduce_many(gradients(step, RANK))
        saved = comp.state_dict()
        fresh, used = Compressor(method, **settings), Compressor(method, **settings)
        used.allreduce_many(gradients(9, RANK))
        for other in (fresh, used):
            other.load_state_dict(saved)
            assert_same_state(other.state_dict(), saved)
        for step in range(3, 6):
            want = comp.allreduce_many(gradients(step, RANK))
            for other in (fresh, used):
                assert_close(other.allreduce_many(gradients(step, RANK)), want, 0.0, f"{method}, step {step}")
        assert_same_state(fresh.state_dict(), comp.state_dict())


@case
def state_goes_through_files_and_comes_back_tensor_by_tensor() -> None:
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
        assert_close({name: got}, {name: comp.allreduce(given[name], name)}, 0.0, name)
    assert_same_state(again.state_dict(), comp.state_dict())


@case
def another_number_of_ranks_takes_over_the_sum_of_residuals() -> None:
    needs(2)
    comp = Compressor("topk", density=0.02)
    for step in range(2):
        comp.allreduce_many(gradients(step, RANK))
    comp.save(OUT / "reshard")
    want = COMM.reduce(comp.residual("b"))
    alone = COMM.Split(RANK)
    if RANK == 0:
        fewer = Compressor("topk", alone, density=0.02)
        fewer.load(OUT / "reshard")
        np.testing.assert_allclose(fewer.state_dict()["state"]["b"]["residual"], want.reshape(-1), rtol=1e-5, atol=1e-5)
        fewer.allreduce_many(gradients(2, RANK))
        assert fewer.state_dict()["steps"]["b"] == 3


@case
def states_that_do_not_fit_are_refused() -> None:
    needs(2)
    comp = Compressor("topk", density=0.05)
    comp.allreduce_many(gradients(0, RANK))
    saved = comp.state_dict()
    try:
        comp.load_state_dict({**saved, "rank": (RANK + 1) % WORLD})
    except ValueError as error:
        assert "rank" in str(error)
    else:
        raise AssertionError("rank 0's residuals must not be loaded into every rank")
    other = Compressor("topk", density=0.05)
    other.load_state_dict(saved)
    shorter = {**gradients(0, RANK), "b": np.ones((37, 40), np.float32)}
    must_raise((ValueError, PeerError), ["elements", "'b'"], lambda: other.allreduce_many(shorter), same=False)
    if RANK == 0:  # only this rank loads a later step
        comp.load_state_dict({**saved, "steps": {name: 7 for name in saved["steps"]}})
    must_raise(PeerError, ["step"], lambda: comp.allreduce_many(gradients(1, RANK)))


@case
def a_trigger_of_one_rank_is_every_ranks() -> None:
    settings = {"dense_steps": 2, "compressed_steps": 4, "min_elements": 1}
    for call in ("trigger", "observe"):
        comp, net = Compressor("gradiveq", **settings), Loopback("gradiveq", world=WORLD, **settings)
        for step in range(10):
            given = everyone(step)
            if step == 3:
                if RANK == WORLD - 1:
                    comp.trigger() if call == "trigger" else comp.observe(learning_rate=0.01)
                net.trigger() if call == "trigger" else net.observe(learning_rate=0.01)
            elif step == 1 and call == "observe":
                comp.observe(learning_rate=1.0)
                net.observe(learning_rate=1.0)
            got, want = comp.allreduce_many(given[RANK]), net.allreduce_many(given)[RANK]
            assert_close(got, want, tolerance("gradiveq", {}), f"{call}, step {step}")
            assert own_bytes(comp.ledger) == net.ledger.bytes_sent(RANK), f"{call}, step {step}"
        assert comp.state_dict()["restarts"]["a"][0] == 1


# -- errors: on all ranks, and no hang -----------------------------------------------------------------


def must_raise(kind: Any, words: list[str], run: Callable[[], object], same: bool = True) -> None:
    harness.must_raise(kind, words, run, COMM.allgather, same)


@contextmanager
def failing(comp: Compressor, ranks: tuple[int, ...], rounds: int) -> Iterator[None]:
    """On these ranks the plan's method fails for tensor "c", when so many of its collectives are done."""
    method = comp.plan.program.main
    original = method.exchange

    def exchange(x: Any, state: Any, ctx: Context, ops: Any) -> Any:
        steps, result = original(x, state, ctx, ops), None
        for _ in range(rounds if ctx.spec.name == "c" else 99):
            try:
                result = yield steps.send(result)
            except StopIteration as stop:
                return stop.value
        raise FloatingPointError("a fault made by the test")

    if RANK in ranks:
        object.__setattr__(method, "exchange", exchange)
    try:
        yield
    finally:
        method.__dict__.pop("exchange", None)


@case
def a_rank_that_fails_in_any_round() -> None:
    """All raise; nothing has changed; and the next step is as good as any."""
    variety = (
        ("topk", {"density": 0.05}, 1),
        ("scalecom", {"density": 0.05}, 2),
        ("gtopk", {"density": 0.05}, 2),
        ("qsgd", {"route": "scatter"}, 2),
        ("fp16", {}, 1),
        ("terngrad", {}, 2),
    )
    for method, settings, last in variety:
        for rounds in range(min(last, WORLD) + 1):  # alone, there is no one to send to
            for ranks in {(WORLD - 1,), (0, WORLD // 2), tuple(range(WORLD))}:
                comp, control = Compressor(method, **settings), Compressor(method, **settings)
                for step in range(2):
                    where = f"tensor 'c' (method {method}, round {max(rounds - 1, 0)}, rank "
                    where += str(ranks[0]) if len(ranks) == 1 else ""  # else the first to fail ends the step
                    words = ["a fault made by the test", where]
                    with failing(comp, ranks, rounds):
                        must_raise(PeerError, words, lambda c=comp, s=step: c.allreduce_many(gradients(s, RANK)))
                    assert_same_state(comp.state_dict(), control.state_dict())
                    want = control.allreduce_many(gradients(step, RANK))
                    got = comp.allreduce_many(gradients(step, RANK))
                    assert_close(got, want, 0.0, f"{method} after a failure")
                assert_same_state(comp.state_dict(), control.state_dict())
                comp.close()
                control.close()


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
    assert_close(comp.allreduce_many(good), control.allreduce_many(good), 0.0, "after errors")
    comp = Compressor("topk", loss_scale=lambda: float(last != RANK))
    must_raise((ValueError, PeerError), ["loss_scale is 0.0"], lambda: comp.allreduce_many(good), same=False)


@case
def ranks_with_different_tensors() -> None:
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
        assert_close(got, want, 0.0, "after the disagreement")
    comp = Compressor("topk", loss_scale=2.0 if RANK == 1 else 1.0)
    must_raise(PeerError, ["loss scale", "1.0", "2.0"], lambda: comp.allreduce_many(good))


@case
def ranks_with_different_plans() -> None:
    needs(2)
    must_raise(PeerError, ["'method'", "topk", "scalecom"], lambda: Compressor("topk" if RANK else "scalecom"))
    words = ["density", "0.01", "0.02", "rank 1"]
    must_raise(PeerError, words, lambda: Compressor("topk", density=0.02 if RANK == 1 else 0.01))
    must_raise(PeerError, ["seed"], lambda: Compressor("topk", seed=RANK))
    bad = {"density": 7.0} if RANK == 1 else {}
    expected = ValueError if RANK == 1 else PeerError
    must_raise(expected, ["density"], lambda: Compressor("topk", **bad), same=False)
    must_raise(ValueError, ["bits"], lambda: Compressor("topk", bits=3), same=False)
    assert isinstance(Compressor("topk").allreduce(np.ones(3)), np.ndarray)


@case
def a_communicator_that_is_none() -> None:
    for comm in (None, 3, MPI.COMM_NULL):
        must_raise(ValueError, ["intracommunicator"], lambda c=comm: Compressor("topk", c), same=False)


# -- bytes ---------------------------------------------------------------------------------------------


class Counting:
    """A communicator that counts the bytes it is given."""

    def __init__(self, comm: MPI.Comm):
        self.comm, self.given = comm, 0

    def Iallreduce(self, given: np.ndarray, *rest: Any) -> MPI.Request:
        self.given += given.nbytes
        return self.comm.Iallreduce(given, *rest)

    def Iallgatherv(self, given: list, *rest: Any) -> MPI.Request:
        self.given += given[0].nbytes
        return self.comm.Iallgatherv(given, *rest)

    def Ialltoallv(self, given: list, *rest: Any) -> MPI.Request:
        self.given += given[0].nbytes
        return self.comm.Ialltoallv(given, *rest)


@case
def the_ledger_counts_what_mpi_is_given() -> None:
    for method in hvdcompress.available():
        comp = Compressor(method)
        comp.ledger.reset()
        comp._net.comm = counter = Counting(comp._net.comm)  # type: ignore[assignment]
        for step in range(3):
            comp.allreduce_many(gradients(step, RANK))
        assert comp.ledger.bytes_sent() == counter.given, method


@case
def bytes_sent_by_scalecom() -> None:
    """Not a check of its own: the launches of 2 and 4 ranks are compared by the test."""
    comp = Compressor("scalecom", density=0.01)
    for step in range(4):
        comp.allreduce_many(gradients(step, RANK))
    NUMBERS["scalecom"] = own_bytes(comp.ledger)


# -- the ring ------------------------------------------------------------------------------------------


@case
def the_ring_over_mpi_is_the_simulated_one() -> None:
    basis = np.ascontiguousarray(np.linalg.qr(np.random.default_rng(0).standard_normal((24, 5)))[0].T, np.float32)
    for n in (0, 1, 2, 7, 240, 5003, 200_000):
        xs = [np.random.default_rng([n, rank]).standard_normal(n).astype(np.float32) for rank in range(WORLD)]
        turns = [Context(rank, WORLD, 0, TensorSpec("w", (n,))) for rank in range(WORLD)]
        kinds: list[list[ring.SegmentCodec]] = [
            [ring.Dense()] * WORLD,
            [ring.Chosen(np.arange(0, n, 3))] * WORLD,
            [ring.Projection(basis, WORLD)] * WORLD,
            *([ring.Recoded(codecs.codec(name), ctx) for ctx in turns] for name in ("bf16", "qsgd4", "rangefloat8")),
        ]
        for each in kinds:
            want, got = ring.simulate(xs, each)[RANK], ring.ring_allreduce(xs[RANK], each[RANK], COMM)
            np.testing.assert_array_equal(got.total, want.total)
            assert (got.payload, got.sent) == (want.payload, want.sent)
    for wrong in (np.ones(3), np.ones((2, 2), np.float32), [1.0]):
        must_raise(ValueError, ["float32"], lambda w=wrong: ring.ring_allreduce(w, ring.Dense(), COMM))


@case
def a_ring_of_unequal_vectors_is_an_error_on_every_rank() -> None:
    if WORLD == 1:
        return
    x = np.arange(8, dtype=np.float32)
    other = ring.Dense() if RANK else ring.Chosen(np.arange(3))
    unequal = [f"from 5 to {4 + WORLD} elements"]
    must_raise(RuntimeError, unequal, lambda: ring.ring_allreduce(np.ones(5 + RANK, np.float32), ring.Dense(), COMM))
    must_raise(RuntimeError, ["from 12 to 32 bytes"], lambda: ring.ring_allreduce(x, other, COMM))
    wrong = x if RANK else x.astype(np.float64)
    must_raise(
        (ValueError, RuntimeError),
        ["flat float32"],
        lambda: ring.ring_allreduce(wrong, ring.Dense(), COMM),
        same=False,
    )
    np.testing.assert_array_equal(ring.ring_allreduce(x, ring.Dense(), COMM).total, WORLD * x)  # nothing is stuck


def main() -> None:
    harness.run(RANK, COMM.barrier)


if __name__ == "__main__":
    main()
