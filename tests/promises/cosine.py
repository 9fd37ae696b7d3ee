"""Compressed gradients are compared with the uncompressed average, and nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.promises.registry import promise

SUBJECT = "Cosine"
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("topk", {"density": 0.1}),
    ("powersgd", {}),
    ("fp16", {}),
    ("none", {}),
    ("topk", {"density": 0.1, "clip_norm": 0.5}),
]


@promise(ranks=2)
def cosine_every_compares_and_changes_nothing(driver: Any) -> None:
    """With ``cosine_every: 2``, every second step has the cosine between what the methods bring and the uncompressed
    average, of all tensors together and of the worst one, on every rank. Results and states are what they are without
    it."""
    for method, settings in METHODS:
        plain, handle = (driver.make(method, {**settings, "cosine_every": every}, driver.shapes) for every in (0, 2))
        rtol, atol = driver.again(method, settings) or (1.0, 1.0)
        for step in range(4):
            given = driver.gradients(step, driver.shapes)
            wanted, got = (each.reduce(dict(given)) for each in (plain, handle))
            for name in driver.shapes:
                np.testing.assert_allclose(got[name], wanted[name], rtol, atol * np.abs(wanted[name]).max())
            found = handle.compressor.ledger.last_compared(driver.rank)
            assert (found.step if found else 0) == 2 * ((step + 1) // 2), (method, step, found)
        everyone = [driver.gradients(3, driver.shapes, rank) for rank in range(driver.world_size)]
        mean = {name: sum(each[name].astype(float) for each in everyone) / driver.world_size for name in driver.shapes}
        if "clip_norm" in settings:  # one factor for all tensors: the angles are the same
            assert found.cosine < 1
        elif settings.get("density") or method == "powersgd":
            whole = _cosine([got[name] for name in mean], list(mean.values()))
            assert abs(found.cosine - whole) < 1e-4 and found.cosine < 0.999, (method, found, whole)
            assert abs(found.least - _cosine([got[found.name]], [mean[found.name]])) < 1e-4, (method, found)
        else:
            assert abs(found.cosine - 1) < 1e-5, (method, found)
        assert all(abs(each - found.cosine) < 1e-6 for each in driver.gather(found.cosine))
        assert "cosine with the uncompressed average" in handle.summary()
        for name, slots in plain.state()["state"].items():
            for slot, array in slots.items():
                there = handle.state()["state"][name][slot]
                np.testing.assert_allclose(there, array, rtol, atol * np.abs(array).max(initial=0.0), err_msg=slot)
        plain.close()
        handle.close()


def _cosine(some: list[np.ndarray], others: list[np.ndarray]) -> float:
    a, b = (np.concatenate([np.ravel(each) for each in one]).astype(np.float64) for one in (some, others))
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))
