"""The checks of qsgd, signsgd, terngrad and their codec can fail: what they check is broken here on purpose."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import test_ops_codes
import test_ops_statistics
import test_qsgd
import test_quantize
import test_signsgd
import test_terngrad
from test_mutations import Guard, Patch, holds, must_notice, replace_accumulate

import hvdcompress
from hvdcompress import testing as c
from hvdcompress.method import Reduced
from hvdcompress.methods import signsgd, terngrad
from hvdcompress.ops import fast
from hvdcompress.ops import numpy as reference
from hvdcompress.ops.numpy import codes
from hvdcompress.ops.scan import NOTHING, Found, Scan
from hvdcompress.ops.shared import level_values
from hvdcompress.ops.vectors import FP32_MAX
from hvdcompress.parts import quantize, seed, sums

FAST = "hvdcompress.ops.fast"
CODEC = quantize.StochasticCodec
TERNGRAD = type(hvdcompress.get("terngrad"))


def _key(patch: Patch, change: Callable[[Any], Any]) -> None:
    """What the streams are keyed by is changed first."""
    private = seed.private_key
    patch.setattr(seed, "private_key", lambda ctx, stream=0: private(*change((ctx, stream))))


def ranks_share_a_stream(patch: Patch) -> None:
    _key(patch, lambda given: (replace(given[0], rank=0), given[1]))


def steps_share_a_stream(patch: Patch) -> None:
    _key(patch, lambda given: (replace(given[0], step=0), given[1]))


def streams_are_one(patch: Patch) -> None:
    _key(patch, lambda given: (given[0], 0))


def _drawn(patch: Patch, change: Callable[[Any], Any]) -> None:
    """The reference's random numbers are changed, and the compiled op gives way to it."""
    uniform = codes.uniform
    patch.setattr(codes, "uniform", lambda *rest: change(uniform(*rest)))
    for op in ("quantize", "quantize_max", "quantize_fields"):
        patch.setattr(f"{FAST}.{op}", getattr(reference, op))


def levels_are_rounded_to_nearest(patch: Patch) -> None:
    _drawn(patch, lambda u: 0 * u + np.float32(0.5))


def levels_are_rounded_down(patch: Patch) -> None:
    _drawn(patch, lambda u: 0 * u + np.float32(1))


def random_numbers_stop_short_of_one(patch: Patch) -> None:
    _drawn(patch, lambda u: u * np.float32(0.9))


def _unfused_signs(patch: Patch) -> None:
    """The pass that finds signs and mean of a sum asks the ops that find them alone."""
    for ops in (fast, reference):
        accumulate = ops.accumulate

        def apart(
            gradient: Any,
            residual: Any,
            scale: float,
            out: Any,
            scan: Scan = NOTHING,
            *rest: Any,
            ops: Any = ops,
            accumulate: Any = accumulate,
            **more: Any,
        ) -> Found:
            found = accumulate(gradient, residual, scale, out, scan._replace(signs=False), *rest, **more)
            if not scan.signs or not found.finite:
                return found
            return found._replace(signs=(ops.pack_signs(out), ops.bucket_norms(out, out.size, "mean")))

        replace_accumulate(patch, ops, apart)


def _norms(patch: Patch, change: Callable[..., Any]) -> None:
    def quantize_max(ops: Any, x: Any, bucket: int, bits: int, key: Any, out: Any = None) -> Any:
        norms = ops.bucket_norms(x, bucket, "max")
        return norms, ops.quantize(x, norms, bucket, bits, key, out)

    _unfused_signs(patch)
    found = {ops: ops.bucket_norms for ops in (fast, reference)}
    for ops, op in found.items():
        patch.setattr(ops, "bucket_norms", lambda *rest, op=op: change(op, *rest))
        patch.setattr(ops, "quantize_max", lambda *rest, ops=ops: quantize_max(ops, *rest))


def one_norm_for_the_whole_tensor(patch: Patch) -> None:
    def same(op: Any, x: Any, bucket: int, norm: str) -> Any:
        norms = op(x, bucket, norm)
        return np.full_like(norms, norms.max(initial=0))

    _norms(patch, same)


def norms_are_rounded_down(patch: Patch) -> None:
    """To bfloat16 by cutting bits off: the largest values exceed them."""

    def cut(op: Any, *rest: Any) -> Any:
        return (op(*rest).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)

    _norms(patch, cut)


def l2_norms_overflow(patch: Patch) -> None:
    def narrow(op: Any, x: Any, bucket: int, norm: str) -> Any:
        starts = np.arange(0, x.size, max(1, min(bucket, x.size)))
        with np.errstate(over="ignore"):
            return np.sqrt(np.add.reduceat(x * x, starts)) if x.size and norm == "l2" else op(x, bucket, norm)

    _norms(patch, narrow)


def means_are_summed_in_float32(patch: Patch) -> None:
    def narrow(op: Any, x: Any, bucket: int, norm: str) -> Any:
        with np.errstate(over="ignore"):
            mean = np.cumsum(np.abs(x), dtype=np.float32)[-1:] / np.float32(max(x.size, 1))
        return mean if norm == "mean" else op(x, bucket, norm)

    _norms(patch, narrow)


def codes_go_as_bytes(patch: Patch) -> None:
    """Four bits sent as eight, as other implementations have done; formula and all."""
    patch.setattr(CODEC, "num_bytes", lambda self, count: self._edge(count) + count)
    wide: dict[str, Any] = {"bits": 8}
    encode, decode = CODEC.encode, CODEC.decode
    patch.setattr(CODEC, "encode", lambda self, *rest, **more: encode(replace(self, **wide), *rest, **more))
    patch.setattr(CODEC, "decode", lambda self, *rest: decode(replace(self, **wide), *rest))


def the_norms_are_forgotten_in_the_formula(patch: Patch) -> None:
    patch.setattr(CODEC, "_edge", lambda self, count: 4)


def length_is_not_checked(patch: Patch) -> None:
    def parts(self: Any, buffer: Any, count: int, ops: Any) -> Any:
        edge = self._edge(count)
        return buffer[edge:], ops.from_bytes(buffer[:edge], "float32")

    patch.setattr(CODEC, "_parts", parts)


def damaged_norms_are_believed(patch: Patch) -> None:
    def believe(buffer: Any, norms: Any, bucket: int, bits: int, count: int) -> Any:
        each = np.unpackbits(buffer, count=count * bits, bitorder="little").reshape(count, bits)
        number = each @ (1 << np.arange(bits))
        with np.errstate(all="ignore"):
            return level_values(bits)[number] * norms[np.arange(count) // bucket]

    for ops in (fast, reference):
        patch.setattr(ops, "dequantize", believe)


def the_second_rounding_is_nobodys(patch: Patch) -> None:
    """Scatter forgets the error that the shard's owner made when it encoded the sum."""
    scatter = sums.scatter

    def forget(x: Any, codec: Any, ctx: Any, work: Any) -> Any:
        total, _ = yield from scatter(x, codec, ctx, work)
        shard = -(-len(x) // ctx.world)
        parts = [x[r * shard : (r + 1) * shard] for r in range(ctx.world)]
        ops = work.ops
        own = [codec.decode(codec.encode(p, ctx, work, stream=r), len(p), ops) for r, p in enumerate(parts)]
        return total, ops.concat(own)

    patch.setattr(sums, "scatter", forget)


def zeros_are_sent_as_minus(patch: Patch) -> None:
    _unfused_signs(patch)
    for ops in (fast, reference):
        patch.setattr(ops, "pack_signs", lambda x: np.packbits(x <= 0, bitorder="little"))


def signs_are_turned(patch: Patch) -> None:
    _unfused_signs(patch)
    for ops in (fast, reference):
        patch.setattr(ops, "pack_signs", lambda x: np.packbits(x >= 0, bitorder="little"))


def signs_go_as_bytes(patch: Patch) -> None:
    patch.setattr(signsgd.SignCodec, "num_bytes", lambda self, count: (4 if count else 0) + count)


def the_residual_forgets_the_magnitude(patch: Patch) -> None:
    """Signs without the mean magnitude, as signSGD without its fix has them."""
    coded = signsgd.SignCodec.coded

    def ones(self: Any, *rest: Any) -> Any:
        found = coded(self, *rest)
        return found._replace(norms=np.ones_like(found.norms))

    patch.setattr(signsgd.SignCodec, "coded", ones)


def fields_are_too_narrow(patch: Patch) -> None:
    """⌈log2(2p)⌉ bits, one value less than needed: they carry when all agree."""
    patch.setattr(terngrad, "field_width", lambda world: max(2, (2 * world - 1).bit_length()))


def fields_are_too_wide(patch: Patch) -> None:
    patch.setattr(terngrad, "field_width", lambda world: 8)


def scalers_are_ones_own(patch: Patch) -> None:
    exchange = TERNGRAD.exchange

    def unshared(self: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
        steps = exchange(self, x, state, ctx, work)
        collective = next(steps)
        yield collective
        words = yield steps.send(collective.x)
        try:
            steps.send(words)
        except StopIteration as stop:
            reduced: Reduced = stop.value
            return reduced

    patch.setattr(TERNGRAD, "exchange", unshared)


def _clipping(patch: Patch, limit: Callable[[float, float, float], float]) -> None:
    def clipping_limit(found: Any, factor: float) -> float:
        return limit(factor, *found.moments) if factor else FP32_MAX

    patch.setattr(terngrad, "clipping_limit", clipping_limit)


def clipping_forgets_constants(patch: Patch) -> None:
    _clipping(patch, lambda factor, mean, std: factor * std)


def clipping_knows_exact_constants_only(patch: Patch) -> None:
    _clipping(patch, lambda factor, mean, std: factor * std if std else math.inf)


def clipping_is_at_one_sigma(patch: Patch) -> None:
    _clipping(patch, lambda factor, mean, std: max(std, abs(mean)))


def clipping_is_always_on(patch: Patch) -> None:
    clipping_limit = terngrad.clipping_limit
    patch.setattr(terngrad, "clipping_limit", lambda found, factor: clipping_limit(found, 1.0))


def _mean(bits: int = 4, **options: Any) -> Guard:
    return lambda: test_qsgd.run_unbiased(bits=bits, bucket=64, **options)


MEAN = _mean()
FINE = CODEC(8, 7, "l2")

CASES: list[tuple[Callable[[Patch], None], Guard]] = [
    (ranks_share_a_stream, test_qsgd.run_errors_average_out),
    (ranks_share_a_stream, test_terngrad.run_errors_average_out),
    (ranks_share_a_stream, lambda: test_quantize.test_errors_of_ranks_and_streams_average_out(FINE)),
    (streams_are_one, lambda: test_quantize.test_errors_of_ranks_and_streams_average_out(FINE)),
    (steps_share_a_stream, test_qsgd.test_each_step_and_tensor_draws_anew),
    (steps_share_a_stream, MEAN),
    (levels_are_rounded_to_nearest, MEAN),
    (levels_are_rounded_to_nearest, lambda: test_quantize.test_the_mean_is_x(CODEC(4))),
    (levels_are_rounded_to_nearest, holds("qsgd", c.check_unbiased, bits=2)),
    (levels_are_rounded_down, holds("qsgd", c.check_unbiased)),
    (levels_are_rounded_down, test_terngrad.run_mean),
    (random_numbers_stop_short_of_one, MEAN),
    (random_numbers_stop_short_of_one, lambda: test_quantize.test_the_mean_is_x(CODEC(4))),
    (random_numbers_stop_short_of_one, lambda: test_ops_codes.test_levels_are_their_definition(reference, 4)),
    (one_norm_for_the_whole_tensor, test_quantize.test_one_large_value_spoils_its_own_bucket_only),
    (one_norm_for_the_whole_tensor, test_qsgd.run_one_of_two_levels),
    (norms_are_rounded_down, lambda: test_ops_statistics.test_no_element_exceeds_its_norm(reference)),
    (norms_are_rounded_down, lambda: test_quantize.test_the_mean_is_x(CODEC(8, 7, "max"))),
    (l2_norms_overflow, lambda: test_ops_statistics.test_no_element_exceeds_its_norm(fast)),
    (l2_norms_overflow, lambda: test_quantize.test_constants(FINE, -1e37)),
    (means_are_summed_in_float32, test_signsgd.test_the_magnitude_is_summed_in_float64),
    (codes_go_as_bytes, lambda: test_quantize.test_bytes_by_the_formula(513, 4)),
    (codes_go_as_bytes, lambda: test_qsgd.test_bytes_by_the_formula(1000, 4, 512, "gather")),
    (the_norms_are_forgotten_in_the_formula, lambda: test_quantize.test_bytes_by_the_formula(513, 4)),
    (length_is_not_checked, lambda: test_quantize.test_damaged_bytes_are_refused_or_read_as_finite(CODEC(4))),
    (damaged_norms_are_believed, lambda: test_quantize.test_damaged_bytes_are_refused_or_read_as_finite(CODEC(4))),
    (the_second_rounding_is_nobodys, test_qsgd.run_nothing_is_lost_with_feedback),
    (the_second_rounding_is_nobodys, holds("signsgd", c.check_conservation, route="scatter")),
    (the_second_rounding_is_nobodys, lambda: test_terngrad.run_nothing_is_lost_with_feedback("scatter")),
    (zeros_are_sent_as_minus, test_signsgd.test_zeros_are_sent_as_plus_and_taken_back),
    (signs_are_turned, test_signsgd.run_beside_oracle),
    (signs_are_turned, test_signsgd.run_residual_stays_small),
    (signs_go_as_bytes, holds("signsgd", c.check_bytes)),
    (the_residual_forgets_the_magnitude, test_signsgd.run_beside_oracle),
    (the_residual_forgets_the_magnitude, lambda: test_signsgd.test_it_is_a_contraction("heavy")),
    (fields_are_too_narrow, lambda: test_terngrad.test_nothing_carries_when_all_agree(1024)),
    (fields_are_too_wide, lambda: test_terngrad.test_bytes_by_the_formula(3, 3)),
    (fields_are_too_wide, lambda: test_terngrad.test_nothing_carries_when_all_agree(1024)),
    (scalers_are_ones_own, holds("terngrad", c.check_results)),
    (scalers_are_ones_own, lambda: test_terngrad.test_fields_are_ternaries_and_the_scaler_is_the_largest(3)),
    (clipping_forgets_constants, lambda: test_terngrad.run_survives("reduce", [0.1])),
    (clipping_knows_exact_constants_only, lambda: test_terngrad.test_a_nearly_constant_tensor_survives("gather")),
    (clipping_is_at_one_sigma, lambda: test_terngrad.run_mean(2.0)),
    (clipping_is_at_one_sigma, test_terngrad.test_clipping_lowers_the_scaler),
    (clipping_is_always_on, holds("terngrad", c.check_unbiased, clip_factor=0.0)),
    (clipping_is_always_on, test_terngrad.run_mean),
]


@pytest.mark.parametrize("mutation,guard", CASES, ids=[f"{i}-{m.__name__}" for i, (m, _) in enumerate(CASES)])
def test_mutation_is_noticed(mutation: Callable[[Patch], None], guard: Guard) -> None:
    must_notice(mutation, guard)
