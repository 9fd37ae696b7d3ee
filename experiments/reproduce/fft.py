"""The claims of FFT's paper (Wang et al., HPDC 2020, arXiv 1811.08596): what is measured for each, and its verdict."""

from __future__ import annotations

from experiments.report.numbers import percent
from experiments.reproduce import fft_measures as measures
from experiments.reproduce.claims import Claim, Paper
from experiments.reproduce.fft_reports import alexnet, errors, numbers, training
from experiments.reproduce.fft_settings import (
    EXCHANGED,
    HALVED,
    LARGE,
    MOST,
    POINTS,
    RANKS,
    REGAINED,
    STAGES,
    THETA,
    THETAS,
    WORLD,
    diminishing,
    schedules,
    task,
    timed,
    trained,
    watched,
)

__all__ = ["EXCHANGED", "PAPER", "THETAS", "diminishing", "schedules", "task"]

PAPER = Paper(
    "fft",
    "FFT",
    'Wang et al., "FFT-based Gradient Sparsification for the Distributed Training of Deep Neural Networks", HPDC 2020 '
    "(arXiv 1811.08596).",
    ["fashion_mnist", "noisy_digits", "bytes"],
    [
        Claim(
            "F1",
            "Dropping frequencies errs less than top-k, QSGD and TernGrad do.",
            "approximation errors of gradients",
            "Gradients of two ranks in dense trainings: ResNet-20 and FNN-3 on Fashion-MNIST, a convolutional net on "
            "noisy digits, an LSTM and a transformer on Python source. One exchange without feedback, "
            "‖ĝ − ḡ‖/‖ḡ‖ of each tensor of at least "
            f"{measures.LEAST} elements, at 6 (24 with --full) steps. At equal bytes, FFT writes range floats of 10 "
            f"bits: top-k gets the bytes of FFT at θ {THETA:g}, and FFT those of the quantizers. At equal θ, both send "
            "values in full.",
            f"in every seed, a lower median error in at least {percent(MOST)} of the cells (net, kind of layer, phase "
            "of training); a verdict for each competitor.",
            watched,
            errors,
        ),
        Claim(
            "F2",
            "Training converges with a diminishing θ, stalls with a large constant one, recovers when θ is lowered.",
            "convergence theorem and experiments with θ",
            f"FNN-3 and LeNet-5 (with --full a convolutional net on noisy digits, too) on Fashion-MNIST, {RANKS} "
            "simulated ranks with 32 examples each, 300 steps (3000 with --full), SGD with momentum 0.9, a cosine to "
            f"zero from 0.05 (0.02), no feedback. θ_t = sqrt(L·η_t) follows it in {STAGES} stages.",
            f"by held-out accuracy at the end: a constant θ of {LARGE:g} is more than {POINTS:g} point below dense; a "
            f"diminishing one, which begins there or at {THETA:g}, at most that; lowered to {HALVED:g} halfway, at "
            f"least {percent(REGAINED)} of what the large one lost is regained.",
            trained,
            training,
        ),
        Claim(
            "F3",
            "Range floats err less than other formats of as many bits.",
            "range-based quantization",
            "The trainings of F1: rank 0's gradients, and the frequencies kept of them, each tensor coded by itself, "
            "with 6 to 10 bits: range floats, uniform codes, and floats with 3 to 5 bits of exponent (with 8 bits also "
            "the fp8 of today's hardware). With 16 bits: range floats, bf16 and fp16, not judged.",
            "in every seed, a lower median error in each of the five nets, with 6 to 10 bits.",
            watched,
            numbers,
        ),
        Claim(
            "F4",
            "AlexNet's exchange is faster than dense, with QSGD, with TernGrad and with top-k.",
            "end-to-end times on 8 GPUs, InfiniBand",
            "AlexNet's tensors (61 million elements). What a rank computes is measured on one core of this machine, on "
            f"drawn gradients with heavy tails; an exchange among {WORLD} ranks is *predicted* from that by the cost "
            "model that `python -m experiments scale` uses, for three links, with this codec and with a faster one.",
            "the predicted exchange is shorter with each seed's codec times.",
            timed,
            alexnet,
            "on 8 GPUs 2.26 times as fast as dense, 1.31 times as with QSGD, 1.25 times as with TernGrad, 1.47 times "
            "as with top-k.",
        ),
    ],
)
