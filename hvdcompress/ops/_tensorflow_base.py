"""What the TensorFlow verbs share: buffers that can be written, bits of numbers, and the one way to the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvdcompress.method import Array


class Buffer:
    """A tensor that can be replaced: what verbs that write in place are given, as no eager tensor can be changed.

    It reads as the tensor that it holds, ``value``, in TensorFlow's functions, operators and slices. Tensors never
    change, so what was read stays what it was. ``Buffer(tensor)`` makes one of a tensor, which it does not copy, or
    of a numpy array, which it does.
    """

    __slots__ = ("value",)
    __array_ufunc__ = None  # so that numpy's scalars leave their operators to TensorFlow
    __hash__ = None  # type: ignore[assignment]  # as a tensor's: == compares elements

    def __init__(self, value: Array):
        self.value = tf.convert_to_tensor(tensor(value))

    def assign(self, value: Array) -> None:
        """Hold another tensor, of the same shape and dtype."""
        value = tf.convert_to_tensor(tensor(value))
        if value.shape != self.value.shape or value.dtype != self.value.dtype:
            here, there = f"{self.dtype.name} {self.shape}", f"{value.dtype.name} {value.shape}"
            raise ValueError(f"a buffer of {here} cannot hold {there}")
        self.value = value

    @property
    def dtype(self) -> Any:
        return self.value.dtype

    @property
    def shape(self) -> Any:
        return self.value.shape

    @property
    def device(self) -> str:
        return self.value.device

    @property
    def nbytes(self) -> int:
        return len(self) * self.value.dtype.size

    def __len__(self) -> int:
        return len(self.value)

    def __getitem__(self, where: Any) -> Array:
        return self.value[where]

    def __repr__(self) -> str:
        return f"Buffer({self.value!r})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.value, dtype)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Array:
        return self.value if dtype is None else tf.convert_to_tensor(self.value, dtype)


def _operator(name: str) -> Any:
    return lambda self, *others: getattr(self.value, name)(*map(tensor, others))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor"):
    setattr(Buffer, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(Buffer, f"__r{_name}__", _operator(f"__r{_name}__"))
for _name in ("neg", "invert", "abs", "eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Buffer, f"__{_name}__", _operator(f"__{_name}__"))


def tensor(x: Any) -> Any:
    """What a buffer or a variable holds; anything else as it is."""
    if isinstance(x, Buffer):
        return x.value
    return tf.convert_to_tensor(x) if isinstance(x, tf.Variable) else x


def host(x: Array) -> Any:
    """The numbers of a small tensor, on the host: waits for the device (``tensorflow.py`` tells where and why)."""
    return x.numpy().tolist()


def on_device_of(like: Array) -> Any:
    """A context in which tensors are made where ``like`` is."""
    return tf.device(like.device)


def f32(number: float) -> float:
    """Rounded to float32, as the reference's scalars are."""
    return float(np.float32(number))


def word(number: int) -> Array:
    """A uint32."""
    return tf.constant(number, tf.uint32)


def bits(x: Array) -> Array:
    """The bits of float32 as uint32."""
    return tf.bitcast(tensor(x), tf.uint32)


def magnitudes(x: Array) -> Array:
    """The bits of |x| as uint32: they ascend with |x|, and tell denormal numbers, which TensorFlow takes for 0."""
    return bits(x) & 0x7FFFFFFF


def nonzero(x: Array) -> Array:
    """Whether elements of float32 or float64 are neither 0 nor −0."""
    if x.dtype == tf.float64:
        return (tf.bitcast(tensor(x), tf.int64) & 0x7FFFFFFFFFFFFFFF) != 0
    return magnitudes(x) != 0


def where(condition: Array) -> Array:
    """The indices of what is true, ascending [m] int64."""
    return tf.where(condition)[:, 0]


def rows(x: Array, width: int) -> Array:
    """x [n] as rows of ``width``, the last one filled with zeros."""
    x = tensor(x)
    if missing := -len(x) % width:
        x = tf.pad(x, [[0, missing]])
    return tf.reshape(x, [len(x) // width, width])
