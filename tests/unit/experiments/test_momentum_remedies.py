"""The other remedies of the momentum study do what their papers' equations say."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.momentum import contenders, remedies
from hvdcompress.loopback import Loopback

RANKS, STEPS, SHAPE, K = 2, 6, (20, 5), 10


def exchanged(method, **settings):
    """Return every rank's gradients [steps, ranks, n], and the reduced gradients [steps, n]."""
    remedies.register()
    random = np.random.default_rng(1)
    gradients = random.standard_normal((STEPS, RANKS, *SHAPE)).astype(np.float32)
    net = Loopback({"method": method, "density": K / 100, "min_elements": 1, **settings}, RANKS)
    reduced = [net.allreduce(list(each), name="w")[0].ravel() for each in gradients]
    return gradients.reshape(STEPS, RANKS, -1).astype(np.float64), np.array(reduced)


def top(x, by=None):
    """Return x with all but the K elements of largest magnitude (of ``by``) set to 0."""
    kept = np.zeros_like(x)
    index = np.argsort(-np.abs(x if by is None else by))[:K]
    kept[index] = x[index]
    return kept


def test_gmc():
    gradients, reduced = exchanged("gmc", momentum=0.9)
    residuals, update = np.zeros((RANKS, 100)), np.zeros(100)
    for step, each in enumerate(gradients):
        u = each + residuals + 0.9 * update
        sent = np.array([top(x) for x in u])
        residuals, update = u - sent, sent.mean(0)
        assert reduced[step] == pytest.approx(update, abs=1e-5)


def test_regtopk():
    gradients, reduced = exchanged("regtopk", softness=2.0, optimizer_momentum="keep")
    residuals, factors = np.zeros((RANKS, 100)), np.ones((RANKS, 100))
    for step, each in enumerate(gradients):
        a = each + residuals
        sent = np.array([top(x, x * factor) for x, factor in zip(a, factors, strict=True)])
        residuals = a - sent
        with np.errstate(divide="ignore", invalid="ignore"):
            distortion = (sent.sum(0) - sent) / sent
        factors = np.where(sent != 0, np.tanh(np.abs(1 + distortion) / 2.0), 1.0)
        assert reduced[step] == pytest.approx(sent.mean(0), abs=1e-5)


def test_ef21_sgdm():
    gradients, reduced = exchanged("ef21_sgdm", momentum=0.7)
    averages, estimates = gradients[0], np.zeros((RANKS, 100))
    for step, each in enumerate(gradients):
        averages = 0.7 * averages + 0.3 * each if step else each
        estimates = estimates + np.array([top(x) for x in averages - estimates])
        assert reduced[step] == pytest.approx(estimates.mean(0), abs=1e-5)


def test_their_optimizers():
    found = contenders.parse("ef21_sgdm@lr=5")
    assert (found.lr, found.momentum) == (5.0, 0.0)
    assert contenders.parse("gmc").momentum == 0.0 and contenders.parse("regtopk:plain").momentum is None
