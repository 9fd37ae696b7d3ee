"""The checks of gtopk, dgc, redsync and the feedback "momentum" can fail: what they check is broken here on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import test_dgc
import test_gtopk
import test_ops_selection
import test_ops_statistics
import test_redsync
from test_mutations import Guard, Patch, holds, must_notice

import hvdcompress
from hvdcompress import testing as c
from hvdcompress.method import Method, Sparse
from hvdcompress.methods import gtopk, redsync
from hvdcompress.ops import fast
from hvdcompress.ops import numpy as reference
from hvdcompress.parts import feedback, seed, select

GTOPK, DGC, REDSYNC = (type(hvdcompress.get(id)) for id in ("gtopk", "dgc", "redsync"))
FAST = "hvdcompress.ops.fast"


def what_a_merge_drops_is_lost(patch: Patch) -> None:
    split_largest = gtopk.split_largest

    def forget(entries: Any, k: int, ops: Any) -> Any:
        kept, dropped = split_largest(entries, k, ops)
        return kept, Sparse(dropped.index, 0 * dropped.values)

    patch.setattr(gtopk, "split_largest", forget)


def a_merge_keeps_the_smallest(patch: Patch) -> None:
    split_largest = gtopk.split_largest

    def weakest(entries: Any, k: int, ops: Any) -> Any:
        others, kept = split_largest(entries, len(entries.index) - k, ops)
        return kept, others

    patch.setattr(gtopk, "split_largest", weakest)


def rounding_is_nobodys(patch: Patch) -> None:
    patch.setattr(GTOPK, "add_rounding_error", lambda self, own, encoded, decoded, n, ops: own)


def rounding_is_everybodys(patch: Patch) -> None:
    """The broadcast's error taken over by all ranks, not by the one that wrote it."""
    exchange = GTOPK.exchange

    def all_take_it(self: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
        reduced = yield from exchange(self, x, state, ctx, work)
        error = reduced.total.values * np.float32(2.0**-12)
        return replace(reduced, own=work.ops.merge(reduced.own, Sparse(reduced.total.index, error), ctx.spec.size))

    patch.setattr(GTOPK, "exchange", all_take_it)


def a_merge_forgets_what_was_there(patch: Patch) -> None:
    def overwrite(a: Sparse, b: Sparse, n: int) -> Sparse:
        index, place = np.unique(np.concatenate([a.index, b.index]), return_inverse=True)
        values = np.zeros(len(index), np.float32)
        values[place] += np.concatenate([a.values, b.values])
        return Sparse(index.astype(np.int32), values)

    patch.setattr(reference, "merge", overwrite)


def merged_indices_are_not_sorted(patch: Patch) -> None:
    merge = reference.merge

    def backwards(a: Sparse, b: Sparse, n: int) -> Sparse:
        index, values = merge(a, b, n)
        return Sparse(index[::-1].copy(), values[::-1].copy())

    patch.setattr(reference, "merge", backwards)


def the_broadcast_is_forgotten_in_the_formula(patch: Patch) -> None:
    patch.setattr(GTOPK, "num_bytes", lambda self, spec, world: self.num_payload_bytes(spec.size))


def velocity_is_not_masked(patch: Patch) -> None:
    patch.setattr(f"{FAST}.zero_where", lambda x, own: None)


def velocity_is_masked_everywhere(patch: Patch) -> None:
    patch.setattr(f"{FAST}.zero_where", lambda x, own: x.fill(0))


def _method_before_feedback(patch: Patch, change: Callable[[Method], Method]) -> None:
    begin = feedback.Feedback.__init__
    patch.setattr(
        feedback.Feedback, "__init__", lambda self, method, *rest, **more: begin(self, change(method), *rest, **more)
    )


def momentum_is_ignored(patch: Patch) -> None:
    _method_before_feedback(patch, lambda method: replace(method, momentum=0.0))


def momentum_comes_after_the_residual(patch: Patch) -> None:
    """v = m·v + g, as if an optimizer's momentum worked on the residual: what momentum correction corrects."""

    def receive(self: feedback.Feedback, gradients: Any, indices: Any, spans: Any, ctx: Any, work: Any, *_: Any) -> Any:
        residual = np.float32(self.method.momentum) * self.state[feedback.RESIDUAL]
        scans = [
            self.method.scan(index, self.state, ctx, work, gradient)
            for index, gradient in zip(indices, gradients, strict=True)
        ]
        x = self.spare[feedback.RESIDUAL]
        return work.ops.accumulate_parts(gradients, residual, [1.0] * len(gradients), x, spans, scans)

    def exchange(self: feedback.Feedback, x: Any, ctx: Any, work: Any) -> Any:
        reduced = yield from self.method.exchange(x, self.state, ctx, work)
        work.ops.subtract(x, reduced.own, 1.0)
        return replace(reduced, state={**self.spare, **reduced.state})

    patch.setattr(feedback.Feedback, "receive", receive)
    patch.setattr(feedback.Feedback, "exchange", exchange)


def clipping_forgets_the_workers(patch: Patch) -> None:
    clip = feedback.clipping
    patch.setattr(feedback, "clipping", lambda m, g, scale, ctx, work: clip(m, g, scale, replace(ctx, world=1), work))


def clipping_is_in_scaled_units(patch: Patch) -> None:
    clip = feedback.clipping
    patch.setattr(feedback, "clipping", lambda m, g, scale, ctx, work: scale * clip(m, g, 1.0, ctx, work))


def the_norm_is_taken_in_float32(patch: Patch) -> None:
    def narrow(x: Any) -> float:
        with np.errstate(over="ignore"):
            return float(np.sqrt((x * x).sum()))

    patch.setattr(f"{FAST}.l2_norm", narrow)


def the_threshold_is_believed(patch: Patch) -> None:
    patch.setattr(select, "refine_bisect", lambda elements, start, k, capacity: (start, None))


def the_sample_is_always_the_same(patch: Patch) -> None:
    patch.setattr(seed, "distinct_indices", lambda key, k, n: np.arange(k))


def the_kth_is_one_off(patch: Patch) -> None:
    kth = reference.kth_magnitude
    patch.setattr(reference, "kth_magnitude", lambda x, k: kth(x, min(k + 1, max(len(x), 1))))


def vectors_are_compressed(patch: Patch) -> None:
    patch.setattr(DGC, "suits", Method.suits)


def the_capacity_overflows(patch: Patch) -> None:
    """Room for k entries where 4k/3 may come."""
    patch.setattr(select, "capacity", lambda density, n: select.num_kept(density, n) // 2)


def thresholds_are_never_used_again(patch: Patch) -> None:
    patch.setattr(REDSYNC, "reused_threshold", lambda self, state, ctx, work: np.float32(0))


def the_search_is_never_repeated(patch: Patch) -> None:
    reused = REDSYNC.reused_threshold

    def always(self: Any, state: Any, ctx: Any, work: Any) -> Any:
        return reused(replace(self, interval=10**9), state, ctx, work)

    patch.setattr(REDSYNC, "reused_threshold", always)


def a_stale_threshold_is_believed(patch: Patch) -> None:
    search = REDSYNC.search

    def believe(self: Any, elements: Any, reused: Any, wanted: Any) -> Any:
        return (reused, None) if reused > 0 else search(self, elements, reused, wanted)

    patch.setattr(REDSYNC, "search", believe)


def the_search_gives_up(patch: Patch) -> None:
    """With whatever is above the last threshold, as the published one does."""
    patch.setattr(select, "refine_bisect", lambda elements, start, wanted: (start, None))


def the_published_search_is_led_to_k(patch: Patch) -> None:
    patch.setattr(REDSYNC, "published_search", REDSYNC.search)


def the_middle_is_from_zero_to_the_maximum(patch: Patch) -> None:
    patch.setattr(redsync, "threshold_at", lambda r, mean, largest: np.float32(r * largest))


def the_first_are_trimmed_not_the_largest(patch: Patch) -> None:
    """The first k above a threshold that more exceed, not the k largest."""

    def first(elements: Any, k: int) -> Any:
        return elements.above(redsync.threshold_at(0.0, elements.mean(), elements.largest()), k)

    patch.setattr(redsync, "trimmed_top_k", first)


CASES: list[tuple[Callable[[Patch], None], Guard]] = [
    (what_a_merge_drops_is_lost, holds("gtopk", c.check_conservation)),
    (what_a_merge_drops_is_lost, test_gtopk.run_beside_oracle),
    (a_merge_keeps_the_smallest, test_gtopk.test_two_ranks_get_the_top_k_of_the_sum_of_their_top_ks),
    (rounding_is_nobodys, lambda: test_gtopk.test_nothing_is_lost(5, "fp16")),
    (rounding_is_everybodys, lambda: test_gtopk.test_nothing_is_lost(5, "bf16")),
    (a_merge_forgets_what_was_there, holds("gtopk", c.check_conservation)),
    (merged_indices_are_not_sorted, holds("gtopk", c.check_conservation)),
    (the_broadcast_is_forgotten_in_the_formula, holds("gtopk", c.check_bytes)),
    (velocity_is_not_masked, test_dgc.run_beside_oracle),
    (velocity_is_not_masked, test_dgc.test_where_all_is_sent_there_is_no_momentum),
    (velocity_is_masked_everywhere, test_dgc.test_velocity_ends_at_sent_places_and_nowhere_else),
    (momentum_is_ignored, test_dgc.run_beside_oracle),
    (momentum_is_ignored, test_dgc.test_what_waited_is_what_momentum_sgd_would_have_moved),
    (momentum_comes_after_the_residual, test_dgc.test_what_waited_is_what_momentum_sgd_would_have_moved),
    (clipping_forgets_the_workers, lambda: test_dgc.test_gradients_are_clipped_to_their_share_of_the_norm(4, 100.0)),
    (clipping_is_in_scaled_units, test_dgc.test_clipping_is_in_unscaled_units),
    (the_norm_is_taken_in_float32, lambda: test_dgc.test_gradients_are_clipped_to_their_share_of_the_norm(1, 1e37)),
    (the_norm_is_taken_in_float32, lambda: test_ops_statistics.test_norm_neither_overflows_nor_vanishes(fast, 1e-30)),
    (the_threshold_is_believed, lambda: test_dgc.test_count_is_near_k_on_any_distribution("normal", 0.01)),
    (
        the_sample_is_always_the_same,
        test_dgc.test_the_sample_is_the_same_on_all_ranks_and_another_one_each_step,
    ),
    (the_kth_is_one_off, lambda: test_dgc.test_of_small_tensors_the_sample_is_all(10)),
    (the_kth_is_one_off, lambda: test_ops_selection.test_kth_magnitude_by_sorting(reference, 7)),
    (vectors_are_compressed, lambda: test_dgc.test_vectors_go_dense((2000,), True)),
    (thresholds_are_never_used_again, lambda: test_redsync.test_a_threshold_is_used_again(3, 4)),
    (thresholds_are_never_used_again, test_redsync.run_beside_oracle),
    (the_search_is_never_repeated, lambda: test_redsync.test_a_threshold_is_used_again(3, 4)),
    (the_search_is_never_repeated, test_redsync.run_beside_oracle),
    (a_stale_threshold_is_believed, test_redsync.test_a_threshold_that_no_longer_fits_is_searched_anew),
    (the_search_gives_up, test_redsync.test_a_single_spike_defeats_the_published_search),
    (the_published_search_is_led_to_k, test_redsync.run_beside_oracle),
    (the_middle_is_from_zero_to_the_maximum, test_redsync.run_beside_oracle),
    (the_first_are_trimmed_not_the_largest, test_redsync.test_trimmed_is_topk_in_every_step),
    (the_capacity_overflows, lambda: test_dgc.test_count_is_near_k_on_any_distribution("normal", 0.01)),
]


@pytest.mark.parametrize("mutation,guard", CASES, ids=[f"{i}-{m.__name__}" for i, (m, _) in enumerate(CASES)])
def test_mutation_is_noticed(mutation: Callable[[Patch], None], guard: Guard) -> None:
    must_notice(mutation, guard)
