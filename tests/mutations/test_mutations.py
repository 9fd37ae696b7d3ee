"""The checks can fail: the library is broken on purpose, and the tests that should notice must go red.

(Einops' own ``check_equal`` lacked an ``assert`` for years.) Each mutation is applied with monkeypatch; the
guard, a check of ``check_method`` or a test by its name, must pass without it and raise with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import test_bf16
import test_contract
import test_convergence
import test_fp16
import test_gaussiank
import test_randomk
import test_scalecom
import test_topk
import test_wire

import hvdcompress
from hvdcompress import testing
from hvdcompress.engine.exchange import Exchange
from hvdcompress.engine.setup import Setup
from hvdcompress.engine.state import RankState
from hvdcompress.engine.telemetry.ledger import Ledger
from hvdcompress.engine.telemetry.observer import Sent
from hvdcompress.loopback import Loopback
from hvdcompress.method import AllReduce, Broadcast, Method
from hvdcompress.ops import fast
from hvdcompress.ops import numpy as reference
from hvdcompress.ops.numba import selection as numba_selection
from hvdcompress.ops.numpy.arithmetic import FINDERS
from hvdcompress.ops.scan import NOTHING, Found, Scan, Velocity
from hvdcompress.ops.shared import accumulate_pieces, find
from hvdcompress.ops.vectors import Half, Sparse
from hvdcompress.parts import codecs, feedback, pack, seed, select
from hvdcompress.testing import Check, check_method

Patch = pytest.MonkeyPatch
Guard = Callable[[], Any]


def holds(id: str, *checks: Check, worlds: tuple[int, ...] = (3,), **options: Any) -> Guard:
    """A guard: these checks of the suite, on the reference backend."""
    density = {"density": 0.1} if "density" in hvdcompress.get(id).hyperparameters() else {}
    method = hvdcompress.get(id, **{**density, **options})
    return lambda: check_method(method, worlds=worlds, sizes=(1, 60), steps=4, ops=reference, checks=checks)


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


def beta_is_ignored(patch: Patch) -> None:
    patch.setattr(feedback, "beta", lambda method: 1.0)


def duplicates_are_dropped(patch: Patch) -> None:
    def write(out: Any, total: Any, factor: float) -> None:
        if isinstance(total, tuple):
            out[...] = 0
            out[total.index] += (total.values * np.float32(factor)).astype(out.dtype)
        else:
            out[...] = total * factor

    patch.setattr(reference, "write", write)


def one_ranks_leader_is_off_by_one(patch: Patch) -> None:
    _turn_leader(patch, lambda collective, ctx: (collective.root + (ctx.rank == 1)) % ctx.world)


def every_ranks_leader_is_off_by_one(patch: Patch) -> None:
    _turn_leader(patch, lambda collective, ctx: (collective.root + 1) % ctx.world)


def leader_is_always_rank_0(patch: Patch) -> None:
    _turn_leader(patch, lambda collective, ctx: 0)


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


def last_index_is_off_by_one(patch: Patch) -> None:
    encode = pack.encode_index

    def off(index: Any, coding: Any, n: int, ops: Any, out: Any = None) -> Any:
        index = index.copy()
        if len(index) and index[-1] + 1 < n:
            index[-1] += 1
        return encode(index, coding, n, ops, out)

    patch.setattr(pack, "encode_index", off)


def last_value_is_lost(patch: Patch) -> None:
    encode = pack.encode

    def lost(chosen: Any, *rest: Any, **more: Any) -> Any:
        amounts = chosen.values.copy()
        amounts[-1:] = 0
        return encode(chosen._replace(values=amounts), *rest, **more)

    patch.setattr(pack, "encode", lost)


def top_k_otherwise(patch: Patch, top_k: Callable[[Any, int], Any]) -> None:
    """All ops that select the largest do it like this."""

    def largest_of(candidates: Sequence[Sparse], counts: Sequence[int], starts: Sequence[int]) -> Any:
        chosen = [top_k(each.values, k) for each, k in zip(candidates, counts, strict=True)]
        index = [each.index[places] + start for each, places, start in zip(candidates, chosen, starts, strict=True)]
        values = [each.values[places] for each, places in zip(candidates, chosen, strict=True)]
        return Sparse(np.concatenate(index), np.concatenate(values)), np.zeros(len(counts))

    for place in (reference, fast, numba_selection):
        patch.setattr(place, "top_k", top_k)
        patch.setattr(place, "largest_of", largest_of)


def top_k_takes_the_smallest(patch: Patch) -> None:
    top_k_otherwise(patch, lambda x, k: np.sort(np.argsort(np.abs(x), kind="stable")[:k]).astype("int32"))


def ties_go_to_the_highest_index(patch: Patch) -> None:
    top_k = reference.top_k
    top_k_otherwise(patch, lambda x, k: np.sort(len(x) - 1 - top_k(x[::-1], k)).astype("int32"))


def fp16_is_not_scaled_before_the_sum(patch: Patch) -> None:
    def sum_of_halves(x: Any, ctx: Any, work: Any, stream: int = 0, saturated: Any = None) -> Any:
        ops = work.ops
        payload, _ = ops.to_fp16(x, 1.0)
        return Half((yield AllReduce(payload)), 1.0), ops.from_fp16(payload, 1.0)

    patch.setattr(codecs, "sum_of_halves", sum_of_halves)


def saturation_is_not_counted(patch: Patch) -> None:
    patch.setattr(codecs, "_count_saturated", lambda work, count: None)


def bf16_is_cut_off_instead_of_rounded(patch: Patch) -> None:
    patch.setattr(
        "hvdcompress.ops.fast.to_bf16",
        lambda x: (np.ascontiguousarray(x).view(np.uint32) >> 16).astype("uint16"),
    )


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
    head = {"format": 1, "plan": self.plan.to_dict(), "world": self.world, "rank": self.rank}
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


def places_come_with_repeats(patch: Patch) -> None:
    patch.setattr(seed, "distinct_indices", lambda key, k, n: np.sort((seed.uniform(key, k) * n).astype(np.int64)))


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
    patch.setattr(cls, "num_bytes", lambda self, spec, world: num_bytes(6, self.packing(spec)) - 24)


def verbs_depend_on_the_data(patch: Patch) -> None:
    cls = type(hvdcompress.get("topk"))
    exchange = cls.exchange

    def lazy(self: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
        if work.ops.max_abs(x) > 0:
            yield AllReduce(np.zeros(1, np.float32))
        return (yield from exchange(self, x, state, ctx, work))

    patch.setattr(cls, "exchange", lazy)


def decoder_trusts_the_indices(patch: Patch) -> None:
    patch.setattr(reference, "all_below", lambda index, n: True)


def decoder_trusts_the_header(patch: Patch) -> None:
    patch.setattr("hvdcompress.parts.wire.check", lambda *anything: None)


def a_half_of_the_threshold_rounds_is_left_out(patch: Patch) -> None:
    paper = select.refine_paper

    def once(elements: Any, start: Any, wanted: Any) -> Any:
        kept = paper(elements, start, wanted)[0]
        return (kept if kept == start else np.float32(start * np.float32(0.5))), None

    patch.setattr(select, "refine_paper", once)


def a_third_change_reaches_the_mask(patch: Patch) -> None:
    paper = select.refine_paper

    def thrice(elements: Any, start: Any, wanted: Any) -> Any:
        kept = paper(elements, start, wanted)[0]
        count = elements.count_above(kept, wanted.most)
        return np.float32(kept * (0.5 if count < wanted.least else 1.5 if count > wanted.most else 1)), None

    patch.setattr(select, "refine_paper", thrice)


def bisection_stops_after_four(patch: Patch) -> None:
    def short(elements: Any, start: Any, wanted: Any) -> Any:
        return np.float32(start), None

    patch.setattr(select, "refine_bisect", short)


c = testing
CASES: list[tuple[Callable[[Patch], None], Guard]] = [
    (feedback_is_switched_off, holds("topk", c.check_conservation)),
    (feedback_is_switched_off, holds("scalecom", c.check_conservation)),
    (feedback_is_switched_off, holds("randomk", c.check_conservation)),
    (residual_is_never_updated, holds("gaussiank", c.check_conservation)),
    (residual_is_never_updated, lambda: test_convergence.gate("scalecom", density=0.02)),
    (residual_sign_is_flipped, holds("topk", c.check_conservation)),
    (residual_sign_is_flipped, holds("scalecom", c.check_conservation)),
    (own_share_is_added_to_the_residual, holds("gaussiank", c.check_conservation)),
    (own_share_is_added_to_the_residual, holds("scalecom", c.check_conservation)),
    (sent_places_are_zeroed_under_low_pass, holds("scalecom", c.check_conservation, beta=0.3)),
    (beta_is_ignored, lambda: test_scalecom.run_beside_oracle(beta=0.3)),
    (beta_is_ignored, lambda: test_scalecom.test_low_pass_residual(0.3)),
    (duplicates_are_dropped, holds("topk", c.check_conservation)),
    (duplicates_are_dropped, holds("gaussiank", c.check_conservation)),
    (one_ranks_leader_is_off_by_one, holds("scalecom", c.check_results)),
    (every_ranks_leader_is_off_by_one, lambda: test_scalecom.test_leader_is_step_modulo_world(3)),
    (every_ranks_leader_is_off_by_one, test_scalecom.run_beside_oracle),
    (leader_is_always_rank_0, test_scalecom.run_beside_oracle),
    (last_index_is_off_by_one, test_topk.run_beside_oracle),
    (last_index_is_off_by_one, lambda: test_scalecom.run_beside_oracle(select="exact")),
    (last_index_is_off_by_one, lambda: test_contract.test_golden_case("topk", "numpy")),
    (last_value_is_lost, test_topk.run_beside_oracle),
    (last_value_is_lost, test_gaussiank.run_beside_oracle),
    (top_k_takes_the_smallest, lambda: test_contract.test_golden_case("topk", "numpy")),
    (ties_go_to_the_highest_index, test_topk.test_among_equal_magnitudes_the_lowest_index_is_sent),
    (fp16_is_not_scaled_before_the_sum, lambda: test_fp16.average_stays_in_range(64)),
    (fp16_is_not_scaled_before_the_sum, lambda: test_contract.test_golden_case("fp16", "numpy")),
    (saturation_is_not_counted, lambda: test_fp16.test_beyond_the_range_saturates_and_is_counted(2)),
    (bf16_is_cut_off_instead_of_rounded, test_bf16.test_ties_go_to_even),
    (bad_step_is_not_rolled_back, holds("topk", c.check_nonfinite)),
    (bad_step_is_not_rolled_back, holds("scalecom", c.check_nonfinite)),
    (nan_is_not_noticed, holds("none", c.check_nonfinite)),
    (nan_is_not_noticed, holds("topk", c.check_nonfinite)),
    (residual_is_written_in_place, holds("topk", c.check_nonfinite)),
    (input_is_written, holds("topk", c.check_shapes)),
    (steps_are_not_restored, holds("scalecom", c.check_resume)),
    (steps_are_not_restored, holds("randomk", c.check_resume)),
    (residual_of_rank_0_is_loaded_everywhere, holds("topk", c.check_resume)),
    (state_dict_is_a_view, holds("topk", c.check_resume)),
    (residual_is_kept_scaled, holds("topk", c.check_loss_scale)),
    (ranks_draw_different_places, holds("randomk", c.check_conservation)),
    (global_generator_is_reseeded, holds("randomk", c.check_deterministic)),
    (places_come_with_repeats, test_randomk.test_all_places_when_all_are_kept),
    (
        nothing_is_scaled_up_without_feedback,
        holds("randomk", c.check_unbiased, feedback="none", unbiased=True),
    ),
    (broadcasts_are_not_counted, holds("scalecom", c.check_bytes)),
    (formula_forgets_the_header, holds("topk", c.check_bytes)),
    (verbs_depend_on_the_data, holds("topk", c.check_collectives)),
    (decoder_trusts_the_indices, lambda: test_wire.test_damaged_payloads(method=test_wire.METHODS[0])),
    (decoder_trusts_the_header, holds("topk", c.check_wire)),
    (a_half_of_the_threshold_rounds_is_left_out, test_gaussiank.run_beside_oracle),
    (
        a_third_change_reaches_the_mask,
        test_gaussiank.test_the_mask_before_the_third_change_is_sent_of_real_residuals,
    ),
    (
        bisection_stops_after_four,
        lambda: test_gaussiank.test_bisection_holds_the_count_on_any_distribution("laplace", 0.01),
    ),
]


@pytest.mark.parametrize("mutation,guard", CASES, ids=[f"{i}-{m.__name__}" for i, (m, _) in enumerate(CASES)])
def test_mutation_is_noticed(mutation: Callable[[Patch], None], guard: Guard) -> None:
    must_notice(mutation, guard)


@cache
def passes(guard: Guard) -> float:
    """The guard passes, which is tried once for all mutations that it notices; the seconds that it takes."""
    began = time.process_time()
    guard()
    return time.process_time() - began


def must_notice(mutation: Callable[[Patch], None], guard: Guard) -> None:
    """The guard passes, raises with the mutation applied, and passes again (tried where that takes no time)."""
    seconds = passes(guard)  # first, as it draws data that is cached and must not be a mutation's
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        with pytest.raises(Exception) as caught:
            guard()
    # a crash of the mutation itself would prove nothing
    assert not isinstance(caught.value, NameError | AttributeError | TypeError | KeyError), caught.value
    if seconds < 0.1:
        guard()


def test_every_check_of_the_suite_has_been_seen_red() -> None:
    """A check that no mutation turns red may check nothing."""
    import inspect

    text = inspect.getsource(inspect.getmodule(test_every_check_of_the_suite_has_been_seen_red))  # type: ignore[arg-type]
    seen = {check.__name__ for check in testing.CHECKS if f"c.{check.__name__}" in text}
    rest = {check.__name__ for check in testing.CHECKS} - seen
    assert rest == {"check_value", "check_layout", "check_finite", "check_state"}, "these are shown red below"


# -- methods that break the contract in ways no patch of the library can ----------------------------------


def test_value_must_be_frozen() -> None:
    method = test_contract._third_party()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(method), "__setattr__", object.__setattr__)
        with pytest.raises(AssertionError, match="frozen"):
            check_method(method, worlds=(1,), checks=[testing.check_value])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(method), "__hash__", lambda self: id(self))
        with pytest.raises(AssertionError, match="is not equal"):
            check_method(method, worlds=(1,), checks=[testing.check_value])


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
