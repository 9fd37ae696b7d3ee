"""The order of a convolution's elements before it is cut into slices, in the layouts of both frameworks."""

from __future__ import annotations

import numpy as np
import pytest

from hvdcompress.method import TensorSpec
from hvdcompress.ops.numpy import ops as reference
from hvdcompress.parts import matrices


@pytest.mark.parametrize("shape", [(4, 2, 3, 3), (1, 1, 2, 2), (2, 7, 1, 3)])
def test_order_is_the_same_in_both_frameworks(shape: tuple[int, ...]) -> None:
    """ "hwio" is the paper's order, ((h·W + w)·D + d)·F + f; "oihw" is PyTorch's."""
    filters, depth, height, width = shape
    g = np.arange(np.prod(shape), dtype=np.float32)
    orders = {"oihw": g, "hwio": np.ascontiguousarray(g.reshape(shape).transpose(2, 3, 1, 0)).ravel()}
    pytorch, keras = TensorSpec("w", shape), TensorSpec("w", (height, width, depth, filters), layout="hwio")
    for spec, stored in ((pytorch, orders["oihw"]), (keras, orders["hwio"])):
        for order, vector in orders.items():
            np.testing.assert_array_equal(matrices.arranged(stored, spec, reference, order), vector)
            np.testing.assert_array_equal(matrices.stored_order(vector, spec, reference, order), stored)
        assert matrices.blocks(spec) == (filters * depth, height * width)
        assert matrices.blocks(spec, "oihw") == (depth * height * width, filters)


@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 3, 2), (2, 3, 4, 2, 3)])
def test_other_shapes_are_arranged_along_the_outputs_first(shape: tuple[int, ...]) -> None:
    spec, g = TensorSpec("w", shape), np.arange(np.prod(shape), dtype=np.float32)
    vector = matrices.arranged(g, spec, reference)
    np.testing.assert_array_equal(matrices.stored_order(vector, spec, reference), g)
    if len(shape) > 1:
        np.testing.assert_array_equal(vector[: shape[0]], g.reshape(shape[0], -1)[:, 0])
