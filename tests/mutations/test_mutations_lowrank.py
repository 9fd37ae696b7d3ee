"""The tests of PowerSGD and GradiVeQ can fail: what they rest on is broken on purpose (see ``test_mutations.py``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import test_gradiveq
import test_powersgd
from test_mutations import Guard, Patch, must_notice

import hvdcompress
from hvdcompress import testing
from hvdcompress.method import AllReduce, Broadcast, Method
from hvdcompress.ops import fast
from hvdcompress.ops import numpy as reference
from hvdcompress.parts import codecs, matrices, seed
from hvdcompress.testing import Check, check_method

SHORT = {"dense_steps": 2, "compressed_steps": 2}


def suite(id: str, *checks: Check, **options: Any) -> Guard:
    """A guard: checks of the suite, long enough for every phase."""
    method = hvdcompress.get(id, **options)
    return lambda: check_method(method, worlds=(3,), sizes=(97,), steps=6, ops=reference, checks=checks)


def both(patch: Patch, op: str, change: Callable[..., Any]) -> None:
    """Put ``change(old, *arguments)`` in an op's place, in the reference and in the CPU drivers' backend."""
    for ops in (reference, fast):
        old = getattr(ops, op)
        patch.setattr(ops, op, lambda *args, old=old, **more: change(old, *args, **more))


def changed(patch: Patch, id: str, change: Callable[..., Any]) -> None:
    """Put ``change(collective, ctx)`` in the place of each collective that a method yields."""
    cls = type(hvdcompress.get(id))
    exchange = cls.exchange

    def turned(self: Method, x: Any, state: Any, ctx: Any, work: Any) -> Any:
        inner = exchange(self, x, state, ctx, work)
        result = None
        while True:
            try:
                collective = inner.send(result)
            except StopIteration as stop:
                return stop.value
            result = yield change(collective, ctx)

    patch.setattr(cls, "exchange", turned)


def returned(patch: Patch, id: str, change: Callable[..., Any]) -> None:
    """Put ``change(reduced, ctx, state)`` in the place of what a method returns."""
    cls = type(hvdcompress.get(id))
    exchange = cls.exchange

    def turned(self: Method, x: Any, state: Any, ctx: Any, work: Any) -> Any:
        return change((yield from exchange(self, x, state, ctx, work)), ctx, state)

    patch.setattr(cls, "exchange", turned)


# -- PowerSGD -----------------------------------------------------------------------------------------------------


def q_is_not_kept(patch: Patch) -> None:
    returned(patch, "powersgd", lambda reduced, ctx, state: replace(reduced, state={"q": 0 * reduced.state["q"]}))


def first_q_is_each_ranks_own(patch: Patch) -> None:
    patch.setattr(seed, "shared_key", seed.private_key)


def p_is_not_orthonormal(patch: Patch) -> None:
    both(patch, "orthonormalise", lambda old, x, rows, key=None: x if key is None else old(x, rows, key))


def what_is_lost_of_q_stays_lost(patch: Patch) -> None:
    """Nothing is drawn, but for the very first Q."""
    first = []

    def unfilled(old: Any, x: Any, rows: int, key: Any = None) -> Any:
        if key is not None:
            first.append(key)
        return old(x, rows, key if len(first) <= 2 else None)  # one for each of two ranks

    both(patch, "orthonormalise", unfilled)


def own_share_is_the_ranks_own_projection(patch: Patch) -> None:
    """x − M̂ is the authors' residual; half of it does not add up."""
    returned(patch, "powersgd", lambda reduced, ctx, state: replace(reduced, own=reduced.own._replace(scale=0.25)))


def nothing_is_made_small(patch: Patch) -> None:
    patch.setattr(matrices, "shrinkage", lambda length, world: 1.0)


def fp16_is_made_small_as_well(patch: Patch) -> None:
    patch.setattr(matrices, "all_reduce", lambda x, shrunk, name, ctx, work: codecs.all_reduce(x, name, ctx, work))


def p_is_not_summed(patch: Patch) -> None:
    changed(patch, "powersgd", lambda collective, ctx: replace(collective, x=collective.x * (ctx.rank == 0)))


# -- GradiVeQ -----------------------------------------------------------------------------------------------------


def mean_is_not_shared_out(patch: Patch) -> None:
    """Every rank subtracts μ, and not μ/p."""
    patch.setattr(type(hvdcompress.get("gradiveq")), "exchange_compressed", _with_world_1)


def _with_world_1(self: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
    return (yield from COMPRESSED(self, x, state, replace(ctx, world=1), work))


COMPRESSED = type(hvdcompress.get("gradiveq")).exchange_compressed  # type: ignore[attr-defined]


def mean_is_left_out(patch: Patch) -> None:
    def without(reduced: Any, ctx: Any, state: Any) -> Any:
        return replace(reduced, state={slot: x * (slot != "mean") for slot, x in reduced.state.items()})

    returned(patch, "gradiveq", without)


def mean_goes_on_into_the_next_round(patch: Patch) -> None:
    def keep(reduced: Any, ctx: Any, state: Any) -> Any:
        return replace(reduced, state={**reduced.state, "count": state["count"] + 1})

    returned(patch, "gradiveq", keep)


def a_trigger_does_not_reset_the_mean(patch: Patch) -> None:
    changed_turn(patch, lambda ctx: replace(ctx, triggers=0))


def changed_turn(patch: Patch, change: Callable[[Any], Any]) -> None:
    cls = type(hvdcompress.get("gradiveq"))
    exchange = cls.exchange
    patch.setattr(cls, "exchange", lambda self, x, state, ctx, work: exchange(self, x, state, change(ctx), work))


def one_component_too_few(patch: Patch) -> None:
    both(patch, "principal", lambda old, x, rows, least, most, dropped, *more: old(
        x, rows, 1, max(1, most - 1), dropped, *more))  # fmt: skip


def one_component_too_many(patch: Patch) -> None:
    def more(old: Any, x: Any, rows: int, least: int, most: int, *others: Any) -> Any:
        found = int(old(x, rows, least, most, *others)[0][0])
        return old(x, rows, min(most, found + 1), most, *others)

    both(patch, "principal", more)


def components_are_not_centred(patch: Patch) -> None:
    patch.setattr("hvdcompress.ops.numpy.matrices.centred", lambda wide: wide)


def every_rank_makes_its_own_basis(patch: Patch) -> None:
    """With a sign of its own, as another LAPACK might."""
    cls = type(hvdcompress.get("gradiveq"))
    fitted = cls.fit_basis  # type: ignore[attr-defined]

    def own(self: Any, history: Any, ctx: Any, work: Any) -> Any:
        new = yield from fitted(self, history, ctx, work)
        new["basis"] = new["basis"] * (-1) ** ctx.rank
        return new

    patch.setattr(cls, "fit_basis", own)


def root_is_each_rank_itself(patch: Patch) -> None:
    changed(
        patch,
        "gradiveq",
        lambda collective, ctx: replace(collective, root=ctx.rank) if isinstance(collective, Broadcast) else collective,
    )


def axes_are_height_first_but_depth_last(patch: Patch) -> None:
    patch.setattr(matrices, "_axes", lambda ndim, order: (2, 3, 0, 1)[:ndim])


def one_dense_step_too_few(patch: Patch) -> None:
    cls = type(hvdcompress.get("gradiveq"))
    patch.setattr(cls, "phase_of", lambda self, age: 2 if age % 7 == 0 and age else (age % 7 >= 3) + (age % 7 >= 4))


def ends_of_slices_are_lost(patch: Patch) -> None:
    size = type(hvdcompress.get("gradiveq")).slice_of  # type: ignore[attr-defined]

    def zeros(collective: Any, ctx: Any) -> Any:
        rest = ctx.spec.size % size(
            hvdcompress.get("gradiveq", **test_gradiveq.SHORT | {"slice_elements": 20}), ctx.spec
        )
        if not isinstance(collective, AllReduce) or len(collective.x) == ctx.spec.size:
            return collective
        return replace(
            collective, x=np.concatenate([collective.x[: len(collective.x) - rest], np.zeros(rest, np.float32)])
        )

    changed(patch, "gradiveq", zeros)


def formula_forgets_the_broadcast(patch: Patch) -> None:
    patch.setattr(type(hvdcompress.get("gradiveq")), "num_fit_bytes", lambda self, spec: 0)


def trigger_is_never_asked_for(patch: Patch) -> None:
    returned(patch, "gradiveq", lambda reduced, ctx, state: replace(reduced, trigger=False))


def learning_rates_are_not_noticed(patch: Patch) -> None:
    patch.setattr(type(hvdcompress.get("gradiveq")), "wants_trigger", lambda self, *anything: False)


def damage_is_not_noticed(patch: Patch) -> None:
    patch.setattr(type(hvdcompress.get("gradiveq")), "max_components", lambda self, size: 2**33)


CASES: list[tuple[Callable[[Patch], None], Guard]] = [
    (q_is_not_kept, test_powersgd.test_error_contracts_to_the_best_approximation),
    (q_is_not_kept, test_powersgd.run_beside_oracle),
    (first_q_is_each_ranks_own, test_powersgd.run_beside_oracle),
    (p_is_not_orthonormal, test_powersgd.run_beside_oracle),
    (what_is_lost_of_q_stays_lost, test_powersgd.test_a_gradient_of_zero_does_not_end_it),
    (own_share_is_the_ranks_own_projection, suite("powersgd", testing.check_conservation)),
    (own_share_is_the_ranks_own_projection, test_powersgd.test_own_share_is_the_mean_approximation),
    (nothing_is_made_small, lambda: test_powersgd.test_finite_in_finite_out("fp32", rank=1)),
    (fp16_is_made_small_as_well, test_powersgd.test_half_precision_has_the_numbers_at_their_own_size),
    (p_is_not_summed, test_powersgd.run_beside_oracle),
    (mean_is_not_shared_out, test_gradiveq.run_beside_oracle),
    (mean_is_left_out, test_gradiveq.run_beside_oracle),
    (mean_goes_on_into_the_next_round, test_gradiveq.test_the_mean_is_that_of_the_last_round),
    (a_trigger_does_not_reset_the_mean, lambda: test_gradiveq.test_forced_training(2)),
    (one_component_too_few, lambda: test_gradiveq.test_d_is_the_least_that_drops_at_most_lam(0.0)),
    (one_component_too_many, lambda: test_gradiveq.test_d_is_the_least_that_drops_at_most_lam(0.1)),
    (components_are_not_centred, test_gradiveq.run_beside_oracle),
    (every_rank_makes_its_own_basis, lambda: test_gradiveq.test_the_basis_is_orthonormal_and_the_same_on_all_ranks({})),
    (every_rank_makes_its_own_basis, suite("gradiveq", testing.check_state, **SHORT)),
    (root_is_each_rank_itself, suite("gradiveq", testing.check_results, **SHORT)),
    (
        axes_are_height_first_but_depth_last,
        lambda: test_gradiveq.test_layout_is_the_papers_in_both_frameworks((4, 2, 3, 3)),
    ),
    (one_dense_step_too_few, test_gradiveq.test_dense_exactly_in_the_training_steps),
    (ends_of_slices_are_lost, lambda: test_gradiveq.run_beside_oracle(size=20)),
    (formula_forgets_the_broadcast, suite("gradiveq", testing.check_bytes, **SHORT)),
    (nothing_is_made_small, test_gradiveq.test_huge_gradients_in_the_span_come_back),
    (
        trigger_is_never_asked_for,
        lambda: test_gradiveq.test_a_growing_loss_on_one_rank_trains_again(0.5, [False] * 2 + [True] * 2),
    ),
    (learning_rates_are_not_noticed, test_gradiveq.test_a_falling_learning_rate_trains_again),
    (damage_is_not_noticed, test_gradiveq.test_damaged_broadcasts_are_refused),
]


@pytest.mark.parametrize("mutation,guard", CASES, ids=[f"{i}-{m.__name__}" for i, (m, _) in enumerate(CASES)])
def test_mutation_is_noticed(mutation: Callable[[Patch], None], guard: Guard) -> None:
    must_notice(mutation, guard)
