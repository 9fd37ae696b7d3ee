"""fft and the range float, broken on purpose: their tests must notice (see ``test_mutations.py``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import test_fft
import test_ops_spectra
import test_rangefloat
from test_mutations import Guard, Patch, holds, must_notice

import hvdcompress
from hvdcompress import testing
from hvdcompress.ops import numpy as reference
from hvdcompress.ops.numpy import arithmetic, floats, spectra
from hvdcompress.parts import matrices

FFT = type(hvdcompress.get("fft"))


def everywhere(patch: Patch, op: str, other: Callable[..., Any]) -> None:
    """Put another function in an op's place, in the reference and where the reference itself uses it."""
    for module in (reference, spectra, arithmetic):
        if hasattr(module, op):
            patch.setattr(module, op, other)


# -- range float ------------------------------------------------------------------------------------------------


def decoder_truncates(patch: Patch) -> None:
    def truncated(codes: Any, bounds: Any, bits: int, mantissa: int) -> Any:
        middle = range_values(codes, bounds, bits, mantissa)
        return (middle.view(np.int32) >> (23 - mantissa) << (23 - mantissa)).view(np.float32)

    range_values = reference.range_values
    patch.setattr(reference, "range_values", truncated)


def decoder_goes_beyond_the_range(patch: Patch) -> None:
    space = floats.range_space

    def wider(bounds: Any, bits: int, shift: int) -> Any:
        edges, *rest = space(bounds, bits, shift)
        return (edges | (1 << shift) - 1, *rest)  # the last bin's far end

    patch.setattr(floats, "range_space", wider)


def eps_is_one_bin_too_low(patch: Patch) -> None:
    space = floats.range_space

    def lower(bounds: Any, bits: int, shift: int) -> Any:
        edges, first, positive, negative = space(bounds, bits, shift)
        return edges, first - 1, positive + 1, negative + 1

    patch.setattr(floats, "range_space", lower)


def both_signs_always_get_half(patch: Patch) -> None:
    bounds = reference.float_bounds
    patch.setattr(reference, "float_bounds", lambda x: np.full(2, bounds(x).max(), np.float32))


def sign_is_lost(patch: Patch) -> None:
    range_values = reference.range_values
    patch.setattr(reference, "range_values", lambda *rest: np.abs(range_values(*rest)))


def mantissa_is_half_of_the_bits(patch: Patch) -> None:
    patch.setattr(reference, "range_mantissa", lambda x, bounds, bits: np.uint8([bits // 2]))


# -- fft ----------------------------------------------------------------------------------------------------------


def smallest_frequencies_are_kept(patch: Patch) -> None:
    magnitudes = reference.magnitudes
    everywhere(patch, "magnitudes", lambda pairs: magnitudes(pairs).max(initial=0) - magnitudes(pairs))


def selection_looks_at_real_parts_only(patch: Patch) -> None:
    everywhere(patch, "magnitudes", lambda pairs: np.abs(pairs[::2]))


def inverse_takes_the_conjugate(patch: Patch) -> None:
    irfft = reference.irfft
    everywhere(patch, "irfft", lambda s, n, block: irfft(s * np.resize(np.float32([1, -1]), s.size), n, block))


def last_block_counts_like_a_whole_one(patch: Patch) -> None:
    """Its bins divided by its own length: they look larger than they are."""
    rfft = reference.rfft

    def own_length(x: Any, block: int) -> Any:
        out, rest = rfft(x, block), len(x) % block
        if rest:
            out[-2 * (rest // 2 + 1) :] *= np.float32((block / rest) ** 0.5)
        return out

    everywhere(patch, "rfft", own_length)


def every_share_is_inverted_by_itself(patch: Patch) -> None:
    invert = FFT.invert

    def one_by_one(self: Any, shares: Any, *rest: Any) -> Any:
        return sum(arithmetic.dense(invert(self, [share], *rest)) for share in shares)

    patch.setattr(FFT, "invert", one_by_one)


def only_the_first_share_is_inverted(patch: Patch) -> None:
    invert = FFT.invert
    patch.setattr(FFT, "invert", lambda self, shares, *rest: invert(self, shares[:1], *rest))


def own_share_is_what_should_have_been_sent(patch: Patch) -> None:
    """Quantization is forgotten: the residual then lacks its error."""
    exchange = FFT.exchange

    def forgetful(self: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
        reduced = yield from exchange(self, x, state, ctx, work)
        reduced.own = reduced.own._replace(after=1.01 * reduced.own.after)
        return reduced

    patch.setattr(FFT, "exchange", forgetful)


def triggers_do_not_matter(patch: Patch) -> None:
    num_kept = FFT.num_kept
    patch.setattr(FFT, "num_kept", lambda self, spec, triggers=0: num_kept(self, spec))


def any_loss_will_do(patch: Patch) -> None:
    patch.setattr(FFT, "wants_trigger", lambda self, metric, value, low, high: self.recovery > 1 and value > low)


def order_is_not_undone(patch: Patch) -> None:
    patch.setattr(matrices, "stored_order", lambda x, spec, ops: x)


def squares_are_taken_in_float32(patch: Patch) -> None:
    def narrow(pairs: Any) -> Any:
        with np.errstate(over="ignore", under="ignore"):
            return np.sqrt(pairs[::2] ** 2 + pairs[1::2] ** 2)

    everywhere(patch, "magnitudes", narrow)


def nothing_holds_the_values_within_float32(patch: Patch) -> None:
    def loose(x: Any, factor: float, limit: float = 0.0) -> Any:
        with np.errstate(over="ignore"):
            return x * np.float32(factor)

    everywhere(patch, "scaled", loose)


def spectrum_is_not_divided(patch: Patch) -> None:
    rfft = reference.rfft

    def plain(x: Any, block: int) -> Any:
        with np.errstate(over="ignore"):
            return rfft(x, block) * np.float32(block)

    everywhere(patch, "rfft", plain)


def half_is_ignored(patch: Patch) -> None:
    patch.setattr("hvdcompress.parts.codecs.Float16.encode", lambda self, x, *rest: x)
    patch.setattr("hvdcompress.parts.codecs.Float16.decode", lambda self, x, *rest: x)


def formula_counts_half(patch: Patch) -> None:
    num_bytes = FFT.num_bytes
    patch.setattr(FFT, "num_bytes", lambda self, spec, world: num_bytes(self, spec, world) // 2)


c = testing

CASES: list[tuple[Callable[[Patch], None], Guard]] = [
    (decoder_truncates, lambda: test_rangefloat.test_relative_error_is_half_a_bin(8, 4)),
    (decoder_truncates, lambda: test_rangefloat.test_figures_on_gaussian_data()),
    (decoder_goes_beyond_the_range, test_rangefloat.test_monotone_idempotent_and_within_the_range),
    (eps_is_one_bin_too_low, test_rangefloat.test_beside_an_independent_oracle),
    (eps_is_one_bin_too_low, lambda: test_rangefloat.test_every_code_stands_for_itself(8, 4)),
    (both_signs_always_get_half, test_rangefloat.test_data_of_one_sign_spend_no_code_on_the_other),
    (sign_is_lost, lambda: test_fft.run_beside_oracle(values="rangefloat10", block=64)),
    (mantissa_is_half_of_the_bits, test_rangefloat.test_figures_on_gaussian_data),
    (smallest_frequencies_are_kept, test_fft.run_beside_oracle),
    (selection_looks_at_real_parts_only, test_fft.run_beside_oracle),
    (inverse_takes_the_conjugate, test_fft.run_beside_oracle),
    (last_block_counts_like_a_whole_one, lambda: test_fft.run_beside_oracle(n=57, block=32)),
    (every_share_is_inverted_by_itself, lambda: test_fft.inverses_of_a_step({"none": 4, "plain": 8})),
    (only_the_first_share_is_inverted, holds("fft", c.check_conservation, feedback="plain")),
    (only_the_first_share_is_inverted, test_fft.run_beside_oracle),
    (own_share_is_what_should_have_been_sent, holds("fft", c.check_conservation, feedback="plain")),
    (triggers_do_not_matter, test_fft.test_density_grows_when_the_loss_gets_worse),
    (any_loss_will_do, test_fft.test_what_calls_for_recovery),
    (order_is_not_undone, test_fft.test_filters_are_collocated_in_both_frameworks),
    (squares_are_taken_in_float32, lambda: test_ops_spectra.test_magnitudes_neither_overflow_nor_vanish(reference)),
    (nothing_holds_the_values_within_float32, lambda: test_fft.test_magnitudes_up_to_1e37("numpy")),
    (spectrum_is_not_divided, lambda: test_ops_spectra.test_no_spectrum_exceeds_the_largest_element(reference)),
    (spectrum_is_not_divided, test_fft.run_beside_oracle),
    (half_is_ignored, test_fft.test_half_rounds_gradients_to_fp16_first),
    (formula_counts_half, holds("fft", c.check_bytes)),
]


@pytest.mark.parametrize("mutation,guard", CASES, ids=[f"{i}-{m.__name__}" for i, (m, _) in enumerate(CASES)])
def test_mutation_is_noticed(mutation: Callable[[Patch], None], guard: Guard) -> None:
    must_notice(mutation, guard)
