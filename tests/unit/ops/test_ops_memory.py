"""The ops of ``memory.py``: make, view and rearrange arrays."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from hvdcompress.ops import numpy as reference
from tests.unit.ops.comparing import call, changed, chosen


def bytes_at(start: int, x: np.ndarray) -> np.ndarray:
    """``start`` bytes, then whole 8-byte words."""
    return np.frombuffer(b"\1" * start + x[: x.size // 2 * 2].tobytes(), np.uint8)


call("zeros")(lambda o, put, x, r: tuple(o.zeros(x.size, d, like=put(x)) for d in ("float32", "uint16", "int64")))
call("asarray")(lambda o, put, x, r: o.asarray(np.frombuffer(x.tobytes(), np.uint8), like=put(r)))  # read-only
call("concat")(lambda o, put, x, r: o.concat([put(x), put(r)]))
call("concat")(lambda o, put, x, r: o.concat([put(reference.to_bf16(x)), o.zeros(3, "uint16", like=put(x))]))
call("to_bytes")(lambda o, put, x, r: o.to_bytes(put(x)))
call("to_bytes")(lambda o, put, x, r: o.to_bytes(o.to_bf16(put(x))))


def stamped(now: int, index: Any, o: Any, put: Any, x: np.ndarray, r: np.ndarray) -> Any:
    """What is found, and the new stamps; of runs of indices, of which some may be in several."""
    out = put(np.zeros(4 * x.size, np.int8), changes=True)
    return o.stamp(put(r[:100]), put(x.view(np.int8)), now, put(np.ascontiguousarray(index(x))), out), out


for at in (0, 1, 2, 4):
    for dtype in ("float32", "float16", "uint16", "int32", "int64"):
        call("from_bytes")(lambda o, put, x, r, a=at, d=dtype: o.from_bytes(put(bytes_at(a, x))[a:], d))
call("head_bytes")(lambda o, put, x, r: o.head_bytes(put(x.view(np.uint8)), 24))
call("fill")(lambda o, put, x, r: changed(o, put, x, lambda out: o.fill(out, float("nan"))))
call("take")(lambda o, put, x, r: o.take(put(x), put(chosen(x))))
call("take")(lambda o, put, x, r: o.take(put(x), put(chosen(x).astype(np.int64))))
call("take")(lambda o, put, x, r: o.take(put(x.view(np.int8)), put(chosen(x))))
for now in (-(2**7), 7, 2**7 - 1):  # stamps are any 8 bits, so ages overflow
    for index in (
        chosen,
        lambda x: np.concatenate([chosen(x), chosen(x, 2)[1:], chosen(x, 5)]),
        lambda x: chosen(x)[::-1],
    ):
        call("stamp")(partial(stamped, now, index))
    call("take_by_age")(lambda o, put, x, r, now=now: o.take_by_age(put(r[:100]), put(x.view(np.int8)), now))
call("sort")(lambda o, put, x, r: o.sort(put(x.view(np.int32))))
call("searchsorted")(lambda o, put, x, r: o.searchsorted(put(np.sort(x.view(np.int32))), put(r.view(np.int32))))
call("index_dtype")(lambda o, put, x, r: (o.index_dtype(x.size), o.index_dtype(2**31)))
call("index_range")(lambda o, put, x, r: o.index_range(x.size, put(x)))


def test_index_dtype_holds_every_index() -> None:
    assert [reference.index_dtype(n) for n in (0, 2**31 - 1, 2**31)] == ["int32", "int32", "int64"]
