"""The checks of ``check_method`` can fail: the library is broken on purpose, and the check that should notice does.

Each mutation is applied with monkeypatch. The guard, a check of the suite, passes without it and raises with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import hvdcompress
from hvdcompress import registry, testing
from hvdcompress.engine.exchange import Exchange
from hvdcompress.engine.setup import Setup
from hvdcompress.engine.state import RankState
from hvdcompress.engine.telemetry.ledger import Ledger
from hvdcompress.engine.telemetry.observer import Sent
from hvdcompress.loopback import Loopback
from hvdcompress.method import AllReduce, Broadcast, Method, Reduced, Slot
from hvdcompress.ops import numpy as reference
from hvdcompress.ops.numpy.arithmetic import FINDERS
from hvdcompress.ops.scan import NOTHING, Found, Scan, Velocity
from hvdcompress.ops.shared import accumulate_pieces, find
from hvdcompress.parts import feedback, pack, seed
from hvdcompress.testing import Check, check_method
from tests.unit.methods import (
    test_contract,
)

Patch = pytest.MonkeyPatch
Guard = Callable[[], Any]


def holds(id: str, *checks: Check, world_sizes: tuple[int, ...] = (3,), **options: Any) -> Guard:
    """A guard: these checks of the suite, on the reference backend."""
    density = {"density": 0.1} if "density" in hvdcompress.get(id).hyperparameters() else {}
    method = hvdcompress.get(id, **{**density, **options})
    return lambda: check_method(method, world_sizes=world_sizes, sizes=(1, 60), steps=4, ops=reference, checks=checks)


# -- the mutations ----------------------------------------------------------------------------------------


def accumulate_otherwise(patch: Patch, accumulate: Callable[[Any, Any, float, Any], None]) -> None:
    """Gradient and residual are added like this."""

    def otherwise(
        gradient: Any,
        residual: Any,
        scale: float,
        out: Any,
        scan: Scan = NOTHING,
        velocity: Velocity | None = None,
    ) -> Found:
        if velocity is not None:
            accumulate(velocity.old, gradient, velocity.momentum, velocity.new)
            gradient, scale = velocity.new, 1.0
        accumulate(gradient, residual, scale, out)
        return find(out, scan, FINDERS)

    replace_accumulate(patch, reference, otherwise)


def replace_accumulate(patch: Patch, ops: Any, accumulate: Callable[..., Found]) -> None:
    """Gradients and residuals are added by this, one by one."""
    patch.setattr(ops, "accumulate", accumulate)
    patch.setattr(ops, "accumulate_parts", partial(accumulate_pieces, accumulate))


def feedback_is_switched_off(patch: Patch) -> None:
    def forget(gradient: Any, residual: Any, scale: float, out: Any) -> None:
        np.multiply(gradient, np.float32(scale), out=out)

    accumulate_otherwise(patch, forget)


def residual_is_never_updated(patch: Patch) -> None:
    exchange = feedback.Feedback.exchange

    def same(self: feedback.Feedback, x: Any, ctx: Any, work: Any) -> Any:
        reduced = yield from exchange(self, x, ctx, work)
        return replace(reduced, state={name: self.state[name] for name in reduced.state})

    patch.setattr(feedback.Feedback, "exchange", same)


def residual_sign_is_flipped(patch: Patch) -> None:
    def flipped(gradient: Any, residual: Any, scale: float, out: Any) -> None:
        out[...] = np.float32(scale) * gradient - residual

    accumulate_otherwise(patch, flipped)


def own_share_is_added_to_the_residual(patch: Patch) -> None:
    subtract = reference.subtract
    patch.setattr(reference, "subtract", lambda x, own, factor: subtract(x, own, -factor))


def sent_places_are_zeroed_under_low_pass(patch: Patch) -> None:
    """m' = 0 at sent places, where it must be (1 − β)m."""
    exchange = feedback.Feedback.exchange

    def zeroing(self: feedback.Feedback, x: Any, ctx: Any, work: Any) -> Any:
        reduced = yield from exchange(self, x, ctx, work)
        reduced.state[feedback.RESIDUAL][reduced.own.index] = 0
        return reduced

    patch.setattr(feedback.Feedback, "exchange", zeroing)


def duplicates_are_dropped(patch: Patch) -> None:
    def write(out: Any, total: Any, factor: float) -> None:
        if isinstance(total, tuple):
            out[...] = 0
            out[total.index] += (total.values * np.float32(factor)).astype(out.dtype)
        else:
            out[...] = total * factor

    patch.setattr(reference, "write", write)


def one_ranks_leader_is_off_by_one(patch: Patch) -> None:
    _turn_leader(patch, lambda collective, ctx: (collective.root + (ctx.rank == 1)) % ctx.world_size)


def _turn_leader(patch: Patch, root: Callable[[Broadcast, Any], int]) -> None:
    cls = type(hvdcompress.get("scalecom"))
    exchange = cls.exchange

    def turned(self: Method, x: Any, state: Any, ctx: Any, work: Any) -> Any:
        inner = exchange(self, x, state, ctx, work)
        collective = next(inner)
        while True:
            collective = (
                replace(collective, root=root(collective, ctx)) if isinstance(collective, Broadcast) else collective
            )
            result = yield collective
            try:
                collective = inner.send(result)
            except StopIteration as stop:
                return stop.value

    patch.setattr(cls, "exchange", turned)


def bad_step_is_not_rolled_back(patch: Patch) -> None:
    def keep(self: Exchange, fill: bool = False) -> None:
        self.setup.local.swap({self.name: self.new_state()})
        for out in self.outs:
            self.setup.ops.fill(out, float("nan"))

    patch.setattr(Exchange, "abandon", keep)


def nan_is_not_noticed(patch: Patch) -> None:
    receive = feedback.Feedback.receive
    blind = FINDERS._replace(all_finite=lambda x: True)
    patch.setattr(reference, "inspect", lambda x, scan: find(x, scan, blind))

    def believe(self: feedback.Feedback, *given: Any) -> Any:
        return [found._replace(finite=True) for found in receive(self, *given)]

    patch.setattr(feedback.Feedback, "receive", believe)


def residual_is_written_in_place(patch: Patch) -> None:
    """Accumulating into the residual itself: a step that is abandoned cannot be undone then."""
    receive = feedback.Feedback.receive

    def in_place(self: feedback.Feedback, gradients: Any, indices: Any, spans: Any, *rest: Any) -> Any:
        for gradient, span in zip(gradients, spans, strict=True):
            self.state[feedback.RESIDUAL][slice(*span)] += gradient
        return receive(self, [np.zeros_like(gradient) for gradient in gradients], indices, spans, *rest)

    patch.setattr(feedback.Feedback, "receive", in_place)


def input_is_written(patch: Patch) -> None:
    def scribble(gradient: Any, residual: Any, scale: float, out: Any) -> None:
        gradient += residual
        out[...] = gradient

    accumulate_otherwise(patch, scribble)


def steps_are_not_restored(patch: Patch) -> None:
    load = RankState.load_state_dict

    def forget(self: RankState, *args: Any, **more: Any) -> None:
        load(self, *args, **more)
        self.states = {name: replace(state, step=0) for name, state in self.states.items()}

    patch.setattr(RankState, "load_state_dict", forget)


def residual_of_rank_0_is_loaded_everywhere(patch: Patch) -> None:
    saved = testing.Trial.saved

    def first(self: testing.Trial) -> Any:
        ranks = saved(self)
        return [{**one, "state": ranks[0]["state"]} for one in ranks]

    patch.setattr(testing.Trial, "saved", first)


def state_dict_is_a_view(patch: Patch) -> None:
    patch.setattr(RankState, "state_dict", _view)


def _view(self: RankState) -> dict[str, Any]:
    head = {"format": 1, "plan": self.plan.to_dict(), "world": self.world_size, "rank": self.rank}
    steps = {name: state.step for name, state in self.states.items()}
    return {**head, "steps": steps, "state": {name: state.slots for name, state in self.states.items()}}


def residual_is_kept_scaled(patch: Patch) -> None:
    begin = Setup.__init__
    patch.setattr(Setup, "__init__", lambda *args: begin(*args[:6]))


def ranks_draw_different_places(patch: Patch) -> None:
    patch.setattr(seed, "shared_key", seed.private_key)


def global_generator_is_reseeded(patch: Patch) -> None:
    def reseeding(key: Any, k: int, n: int) -> Any:
        np.random.seed(int(key[0]) % 1000)
        return np.sort(np.random.permutation(n)[:k])

    patch.setattr(seed, "distinct_indices", reseeding)


def nothing_is_scaled_up_without_feedback(patch: Patch) -> None:
    cls = type(hvdcompress.get("randomk"))
    exchange = cls.exchange

    def biased(self: Any, *rest: Any) -> Any:
        return exchange(hvdcompress.get("randomk", **{**self.hyperparameters(), "unbiased": False}), *rest)

    patch.setattr(cls, "exchange", biased)


def broadcasts_are_not_counted(patch: Patch) -> None:
    sent = Ledger.sent

    def skip(self: Ledger, rank: int, name: str, what: Sent) -> None:
        if what.collective != "Broadcast":
            sent(self, rank, name, what)

    patch.setattr(Ledger, "sent", skip)


def formula_forgets_the_header(patch: Patch) -> None:
    num_bytes = pack.num_bytes
    cls = type(hvdcompress.get("topk"))
    patch.setattr(cls, "num_bytes", lambda self, spec, world_size: num_bytes(6, self.packing(spec)) - 24)


def lengths_depend_on_the_step(patch: Patch) -> None:
    cls = type(hvdcompress.get("none"))
    exchange = cls.exchange

    def longer(self: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
        if ctx.step % 2:
            yield AllReduce(np.zeros(1, np.float32))
        return (yield from exchange(self, x, state, ctx, work))

    patch.setattr(cls, "exchange", longer)


def verbs_depend_on_the_data(patch: Patch) -> None:
    cls = type(hvdcompress.get("topk"))
    exchange = cls.exchange

    def lazy(self: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
        if work.ops.max_abs(x) > 0:
            yield AllReduce(np.zeros(1, np.float32))
        return (yield from exchange(self, x, state, ctx, work))

    patch.setattr(cls, "exchange", lazy)


def decoder_trusts_the_header(patch: Patch) -> None:
    patch.setattr("hvdcompress.parts.wire.check", lambda *anything: None)


CASES: list[tuple[Callable[[Patch], None], Check, str, dict[str, Any]]] = [
    (input_is_written, testing.check_shapes, "topk", {}),
    (one_ranks_leader_is_off_by_one, testing.check_results, "scalecom", {}),
    (feedback_is_switched_off, testing.check_conservation, "topk", {}),
    (residual_is_never_updated, testing.check_conservation, "gaussiank", {}),
    (residual_sign_is_flipped, testing.check_conservation, "scalecom", {}),
    (own_share_is_added_to_the_residual, testing.check_conservation, "scalecom", {}),
    (sent_places_are_zeroed_under_low_pass, testing.check_conservation, "scalecom", {"beta": 0.3}),
    (duplicates_are_dropped, testing.check_conservation, "topk", {}),
    (ranks_draw_different_places, testing.check_conservation, "randomk", {}),
    (nothing_is_scaled_up_without_feedback, testing.check_unbiased, "randomk", {"feedback": "none", "unbiased": True}),
    (broadcasts_are_not_counted, testing.check_bytes, "scalecom", {}),
    (formula_forgets_the_header, testing.check_bytes, "topk", {}),
    (lengths_depend_on_the_step, testing.check_bytes, "none", {"feedback": "plain"}),
    (verbs_depend_on_the_data, testing.check_collectives, "topk", {}),
    (global_generator_is_reseeded, testing.check_deterministic, "randomk", {}),
    (bad_step_is_not_rolled_back, testing.check_nonfinite, "topk", {}),
    (nan_is_not_noticed, testing.check_nonfinite, "none", {}),
    (residual_is_written_in_place, testing.check_nonfinite, "topk", {}),
    (steps_are_not_restored, testing.check_resume, "scalecom", {}),
    (residual_of_rank_0_is_loaded_everywhere, testing.check_resume, "topk", {}),
    (state_dict_is_a_view, testing.check_resume, "topk", {}),
    (residual_is_kept_scaled, testing.check_loss_scale, "topk", {}),
    (decoder_trusts_the_header, testing.check_wire, "topk", {}),
]
#: checks that no patch of the library can turn red: methods that do are below
SHOWN_BELOW = {testing.check_value, testing.check_layout, testing.check_finite, testing.check_state}


@pytest.mark.parametrize("mutation,check,id,options", CASES, ids=[mutation.__name__ for mutation, *_ in CASES])
def test_mutation_is_noticed(mutation: Callable[[Patch], None], check: Check, id: str, options: dict[str, Any]) -> None:
    """The check passes, raises with the mutation applied, and passes again."""
    guard = holds(id, check, **options)
    guard()
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        with pytest.raises(Exception) as caught:
            guard()
    # a crash of the mutation itself would prove nothing
    assert not isinstance(caught.value, NameError | AttributeError | TypeError | KeyError), caught.value
    guard()


def test_every_check_of_the_suite_has_been_seen_red() -> None:
    assert {check for _, check, *_ in CASES} | SHOWN_BELOW == set(testing.CHECKS)


# -- methods that break the contract in ways no patch of the library can ----------------------------------


def test_value_must_be_frozen() -> None:
    method = test_contract._third_party()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(method), "__setattr__", object.__setattr__)
        with pytest.raises(AssertionError, match="frozen"):
            check_method(method, world_sizes=(1,), checks=[testing.check_value])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(method), "__hash__", lambda self: id(self))
        with pytest.raises(AssertionError, match="is not equal"):
            check_method(method, world_sizes=(1,), checks=[testing.check_value])


def test_results_must_be_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm taken in float32 overflows at 1e37."""
    accumulate = reference.accumulate

    def by_norm(gradient: Any, residual: Any, scale: float, out: Any, *_: Any) -> Found:
        accumulate(gradient, residual, scale, out)
        norm = np.float32(np.sqrt((out * out).sum()))
        out *= norm / (norm + np.float32(0))
        return Found(True)

    guard = holds("topk", testing.check_finite)
    guard()
    replace_accumulate(monkeypatch, reference, by_norm)
    with pytest.raises(AssertionError, match="not finite"):
        guard()


def test_layout_must_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = holds("none", testing.check_layout)
    guard()
    allreduce = Loopback.allreduce

    def as_it_lay(self: Loopback, arrays: Any, *rest: Any, **more: Any) -> Any:
        """Elements written in memory order, as into ``empty_like(gradient)`` through a flat view."""
        pairs = zip(allreduce(self, arrays, *rest, **more), arrays, strict=True)
        return [o.ravel().reshape(o.shape, order="C" if g.flags.c_contiguous else "F") for o, g in pairs]

    monkeypatch.setattr(Loopback, "allreduce", as_it_lay)
    with pytest.raises(AssertionError, match="F-ordered"):
        guard()


@pytest.mark.parametrize("backend", testing.backends())
def test_gradients_must_not_be_written(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = hvdcompress.get("none")
    guard = partial(
        check_method, method, world_sizes=(2,), checks=[testing.check_shapes], ops=testing.backends()[backend]
    )
    guard()

    def exchange(self: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
        x *= 2
        total = yield AllReduce(x)
        return Reduced(total=total, own=x)

    monkeypatch.setattr(type(method), "exchange", exchange)
    with pytest.raises(AssertionError, match="read-only|input was changed"):
        guard()


def test_state_must_be_what_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = holds("topk", testing.check_state)
    guard()
    cls = type(hvdcompress.get("topk"))
    exchange = cls.exchange

    def more(self: Any, *rest: Any) -> Any:
        reduced = yield from exchange(self, *rest)
        return replace(reduced, state={"undeclared": np.zeros(1)})

    monkeypatch.setattr(cls, "exchange", more)
    with pytest.raises(AssertionError, match="undeclared"):
        guard()


@pytest.mark.parametrize("returned", [True, False])
def test_a_declared_slot_must_be_returned(returned: bool) -> None:
    def exchange(self: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
        total = yield AllReduce(x)
        return Reduced(total=total, own=x, state={"last": total + 0} if returned else {})

    method = test_contract._third_party(state=_slot("last"), exchange=exchange)
    guard = partial(check_method, method, world_sizes=(2,), checks=[testing.check_state])
    if returned:
        return guard()
    with pytest.raises(AssertionError, match=r"'last', but exchange\(\) returned no new value.*do not declare it"):
        guard()


@pytest.mark.parametrize("name,value", [("level", 3), ("feedback", "lowpass")])
@pytest.mark.parametrize("annotation", ["str | int", None])
def test_a_field_must_have_a_type_annotation(name: str, value: Any, annotation: str | None) -> None:
    """A dataclass ignores a new field, and a new default of an inherited field, without its type."""
    body = {name: value, "__annotations__": {name: annotation} if annotation else {}, "__module__": __name__}
    method = registry.method(type("Later", (type(test_contract._third_party()),), body))()
    guard = partial(check_method, method, world_sizes=(1,), checks=[testing.check_value])
    if annotation:
        return guard()
    with pytest.raises(AssertionError, match=rf"Later\.{name} has no type annotation.*Write `{name}: <type> = "):
        guard()


# -- mistakes in a first method, and what is said about them -------------------------------------------------


def _silent(self: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
    return Reduced(total=x, own=x)


def _bare(self: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
    total = yield x
    return Reduced(total=total, own=x)


def _pair(self: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
    total = yield AllReduce(x)
    return total, x


def _keeps_x(self: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
    total = yield AllReduce(x)
    return Reduced(total=total, own=x, state={"last": x})


def _slot(name: str) -> Callable[..., Any]:
    return lambda self, spec: {name: Slot((spec.size,))}


@pytest.mark.parametrize(
    "edit,message",
    [
        ({"exchange": _silent}, "never yields a collective"),
        ({"exchange": _bare}, "yielded ndarray; it must yield AllReduce"),
        ({"exchange": _pair}, "returned tuple, expected Reduced"),
        ({"exchange": _keeps_x, "state": _slot("last")}, "'residual' and 'last' share memory"),
        ({"state": _slot("residual")}, "has the name of its error feedback's slot"),
        ({"num_bytes": Method.num_bytes}, "must define num_bytes"),
        ({"exchange": Method.exchange}, "must define exchange"),
    ],
)
def test_a_mistake_is_named(edit: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = hvdcompress.get("none", feedback="plain")
    for name, value in edit.items():
        monkeypatch.setattr(type(method), name, value)
    with pytest.raises(AssertionError, match=message):
        check_method(method, world_sizes=(1,))


def test_a_class_is_no_method() -> None:
    cls: Any = type(hvdcompress.get("none"))
    with pytest.raises(TypeError, match=r"pass Dense\(\)"):
        check_method(cls)


def test_feedback_must_be_on_if_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    method = hvdcompress.get("none")
    monkeypatch.setattr(type(method), "needs_feedback", True)
    with pytest.raises(AssertionError, match="feedback is off by default"):
        check_method(method, world_sizes=(1,))


def test_a_short_payload_needs_a_wire_error(monkeypatch: pytest.MonkeyPatch) -> None:
    method = hvdcompress.get("none")
    cls = type(method)
    monkeypatch.setattr(cls, "exchange", Method.exchange)
    monkeypatch.setattr(cls, "encode", lambda self, x, state, ctx, work: work.ops.to_bytes(x))
    monkeypatch.setattr(cls, "decode", lambda self, payload, ctx, work: work.ops.from_bytes(payload, "float32"))
    with pytest.raises(AssertionError, match="damaged payload .* expected hvdcompress.parts.wire.WireError"):
        check_method(method, world_sizes=(1,), checks=[testing.check_wire])
