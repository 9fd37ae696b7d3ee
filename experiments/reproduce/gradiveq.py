"""The claims of GradiVeQ's paper (Yu et al. 2018, arXiv 1811.03617): what is measured for each, and its verdict."""

from __future__ import annotations

from experiments.cluster.hosts import problem
from experiments.report.numbers import percent
from experiments.reproduce import gradiveq_measures as measures
from experiments.reproduce import gradiveq_reports as reports
from experiments.reproduce import gradiveq_ring as ring
from experiments.reproduce import simulate
from experiments.reproduce.claims import Claim, Paper, Scale, Unit
from experiments.reproduce.rows import Row

RANKS = 2
LAYERS = {
    "lenet5": ("3.weight", "7.weight", "9.weight"),
    "resnet20": ("4.conv1.weight", "7.conv2.weight", "9.conv2.weight", "11.conv2.weight"),
    "digits_net": ("2.weight", "5.weight"),
}
TRAINED = ("lenet5", "digits_net")  #: without --full
#: a net's layers: the 3x3 convolutions of ResNet-32 but the first, the paper's net, and one of VGG's
RINGS: dict[str, list[tuple[int, ...]]] = {
    "ResNet-32": [
        *[(16, 16, 3, 3)] * 10,
        (32, 16, 3, 3),
        *[(32, 32, 3, 3)] * 9,
        (64, 32, 3, 3),
        *[(64, 64, 3, 3)] * 9,
    ],
    "VGG layer": [(512, 512, 3, 3)],
}
SECONDS = {"lenet5": 9, "resnet20": 32, "digits_net": 10}  #: of a training
FEW = ("dense", "default", "paper")  #: of the small net with --quick
SIZES = [0, 64, 192]  #: elements of a slice; 0: the method's own choice


def task(net: str, scale: Scale) -> Row:
    """The training of all claims. ResNet-20 has fewer and smaller steps, which take ten times as long.

    The small net of convolutions learns digits with a fifth of random labels: there gradients do not vanish.
    """
    if net == "digits_net":
        steps = 600 if scale.quick else 3000
        found = {"task": "noisy_digits", "net": net, "steps": steps, "batch_size": 32, "learning_rate": 0.02}
        return {**found, "warmup_steps": steps // 10}
    steps = {"lenet5": 400 if scale.quick else 4000, "resnet20": 200 if scale.quick else 900}[net]
    batch = {"lenet5": 32, "resnet20": 8 if scale.quick else 16}[net]
    found = {"task": "fashion_mnist", "net": net, "steps": steps, "batch_size": batch, "learning_rate": 0.05}
    return {**found, "warmup_steps": steps // 10, **({"path": scale.path} if scale.path else {})}


# -- units ---------------------------------------------------------------------------------------


def gradiveq(net: str, dense: int, compressed: int, **more: object) -> Row:
    """The method's settings; all tensors of the small nets, whose convolutions are a part of them."""
    found = {"method": "gradiveq", "dense_steps": dense, "compressed_steps": compressed, **more}
    return {**found, **({} if net == "resnet20" else {"tensors": "all"})}


def windows(net: str, scale: Scale) -> Row:
    """A training, and the windows of it in which methods are watched: with the paper's Lt and Lc where time allows."""
    training = task(net, scale)
    if net == "digits_net":
        longer = {**training, "steps": 1000, "warmup_steps": 100}
        return {"task": longer, "starts": [200], "dense_steps": 100, "compressed_steps": 400, "every": 8}
    if not scale.quick:
        starts = [0, 1200, 2400] if net == "lenet5" else [0, 400]
        return {"task": training, "starts": starts, "dense_steps": 100, "compressed_steps": 400, "every": 8}
    if net == "lenet5":
        longer = {**training, "steps": 900, "warmup_steps": 90}
        return {"task": longer, "starts": [0, 400], "dense_steps": 100, "compressed_steps": 400, "every": 8}
    return {"task": training, "starts": [0, 100], "dense_steps": 40, "compressed_steps": 60, "every": 2}


def watched(scale: Scale) -> list[Unit]:
    """Dense trainings during which GradiVeQ reduces the same gradients."""
    units = []
    for net, layers in LAYERS.items():
        found = windows(net, scale)
        lengths = found["dense_steps"], found["compressed_steps"]
        entries = {"default": gradiveq(net, *lengths), "paper": gradiveq(net, *lengths, paper=True)}
        units += watches("watch", net, {**found, "tensors": list(layers), "sizes": SIZES, "entries": entries}, scale)
    return units


def watches(name: str, net: str, settings: Row, scale: Scale) -> list[Unit]:
    """A dense training for each seed, watched: a unit each."""
    seconds = 40 if scale.quick or net == "digits_net" else 240
    return [
        Unit(f"{name} {net} seed {seed}", measures.watched, {**settings, "ranks": RANKS, "seed": seed}, seconds=seconds)
        for seed in scale.seeds
    ]


def quantized(scale: Scale) -> list[Unit]:
    """The same with GradiVeQ, QSGD and both at equal ratios, in the 40 steps after 60 dense ones."""
    units = []
    for net in ("lenet5",) if scale.quick else ("lenet5", "resnet20"):
        found = windows(net, scale) | {"starts": [200], "dense_steps": 60, "compressed_steps": 40, "every": 2}
        lengths = found["dense_steps"], found["compressed_steps"]
        entries: dict[str, Row] = {}
        for name, rate, bits in [mix for mixes in measures.MIXES.values() for mix in mixes]:
            more: Row = {"values": f"qsgd{bits}"} if bits else {}
            own = gradiveq(net, *lengths, min_rate=rate, lam=0.0, max_samples=512, **more)
            entries[name] = own if rate else {"method": "qsgd", "bits": bits}
        units += watches(
            "quantize", net, {**found, "tensors": list(LAYERS[net]), "sizes": [], "entries": entries}, scale
        )
    return units


def trainings(net: str, scale: Scale) -> dict[str, Row]:
    """The methods that are trained with, by name; those with a ratio in their name might reach 5x overall.

    All but one do not train their basis again when the learning rate falls (``retrain_drop``), as the rate falls in
    each step here, and most late steps would be dense.
    """
    steps = task(net, scale)["steps"]
    tenth, twentieth = steps // 10, steps // 20

    def plan(name: str, warm: int, compressed: int, **more: object) -> dict[str, Row]:
        settings: Row = {"retrain_drop": 0.0, **more}
        return {name: {**gradiveq(net, warm, compressed, **settings), "warmup": {"steps": warm}}}

    def candidate(name: str, compressed: int = steps, **more: object) -> dict[str, Row]:
        return plan(name, twentieth, compressed, **more)

    both: Row = {"min_rate": 4.0, "values": "qsgd8"}
    mild: Row = {"min_rate": 2.0, "lam": 0.0, "values": "qsgd8", "dense_values": "qsgd4"}
    return {
        "dense": {"method": "none"},
        **plan("default", tenth, 4 * tenth),
        **plan("paper", tenth, 4 * tenth, paper=True),
        **plan("default, trained again as the rate falls", tenth, 4 * tenth, retrain_drop=0.5),
        **plan("paper, 4-bit dense steps", tenth, 4 * tenth, paper=True, dense_values="qsgd4"),
        **candidate("4x, 8-bit values, 4-bit dense steps, refreshed", 4 * twentieth, dense_values="qsgd4", **both),
        **candidate("2x, 8-bit values, 4-bit dense steps, refreshed", 4 * twentieth, **mild),
        **candidate("4x, 8-bit values", **both),
        **candidate("8x, 4-bit dense steps", dense_values="qsgd4"),
        **candidate("8x, 4-bit dense steps, feedback", dense_values="qsgd4", feedback="plain"),
        **candidate("16x", min_rate=16.0),
    }


def trained(scale: Scale) -> list[Unit]:
    """Dense trainings and those with GradiVeQ."""
    return [
        Unit(
            f"train {net} {name} seed {seed}",
            simulate.accuracy,
            {"task": task(net, scale), "method": method, "ranks": RANKS, "seed": seed},
            seconds=SECONDS[net] * (1 if scale.quick else 6 if net == "resnet20" else 10),
        )
        for net in (TRAINED if scale.quick else LAYERS)
        for name, method in trainings(net, scale).items()
        if not (scale.few and net == "digits_net") or name in FEW
        for seed in scale.seeds
    ]


def rings(scale: Scale) -> list[Unit]:
    """Rings of every link; those of emulated hosts where they can be set up."""
    counts = (2,) if scale.quick else (2, 4)
    links = [None, *(("100mbit", "1gbit") if problem() is None else ())]
    every = [mix for mixes in measures.MIXES.values() for mix in mixes]
    contenders: Row = {name: [rate, f"qsgd{bits}" if bits else "fp32"] for name, rate, bits in every}
    return [
        Unit(
            f"ring {net}, {ranks} ranks {rate or 'shared memory'}, seed {seed}",
            ring.timed,
            {
                "layers": RINGS[net],
                "ranks": ranks,
                "rate": rate,
                "seed": seed,
                "rounds": 2 if scale.few else 3 if scale.quick else 15,
                "contenders": {"dense": [0, "fp32"], **contenders},
            },
            seconds=8 if scale.few else 12 if scale.quick else 40,
            alone=True,
        )
        for net in RINGS
        for ranks in counts
        for rate in links
        for seed in scale.seeds
    ]


def mixed(scale: Scale) -> list[Unit]:
    """Errors and times of GradiVeQ, QSGD and both."""
    return [*quantized(scale), *rings(scale)]


SETTING = (
    f"{RANKS} simulated ranks, SGD with momentum 0.9. Fashion-MNIST at a peak learning rate of 0.05: LeNet-5 with 32 "
    "examples per rank, and ResNet-20 with 8 (16 with --full). Digits, a fifth of whose labels are random, at 0.02: "
    "`digits_net` with 32 examples. Of ResNet-20 convolutions are compressed, of the others all matrices: convolutions "
    "are 4 % of LeNet-5 and 45 % of `digits_net`"
)
WINDOWS = (
    "Trained dense; meanwhile methods see the same gradients in windows of Lt dense steps and Lc others. LeNet-5's "
    "begin at steps 0 and 400 of 900, with Lt = 100 and Lc = 400; that of `digits_net` at step 200 of 1000 with the "
    "same; ResNet-20's at steps 0 and 100 of 200, with Lt = 40 and Lc = 60. With --full: Lt = 100 and Lc = 400 for "
    "all, LeNet-5 with three windows of 4000 steps and ResNet-20 with two of 900."
)

PAPER = Paper(
    "gradiveq",
    "GradiVeQ",
    'Yu et al., "GradiVeQ: Vector Quantization for Bandwidth-Efficient Gradient Aggregation in Distributed CNN '
    'Training", NeurIPS 2018 (arXiv 1811.03617).',
    ["fashion_mnist", "noisy_digits"],
    [
        Claim(
            "V1",
            "Slices of a convolution's gradient are strongly linearly correlated.",
            "the PCA spectrum of gradient slices",
            f"{SETTING}. {WINDOWS} The best basis of rank n/8 for all slices of size n in a window (an oracle: without "
            "a mean, of the very slices it is judged by), by layer, slice size and order of the weights. LeNet-5's two "
            "matrices are shown, and not judged.",
            f"what the basis leaves, ‖g − UUᵀg‖/‖g‖, is below {reports.CORRELATED:g} in every window.",
            watched,
            reports.correlated,
        ),
        Claim(
            "V2",
            "A basis from Lt dense steps serves the Lc steps that follow.",
            "the training of the compressor, with Lt = 100 and Lc = 400",
            f"{SETTING}. {WINDOWS} Errors of GradiVeQ with the default and with the paper's settings, "
            f"without feedback.",
            f"the median error over steps is at most {reports.LASTS:g} times the oracle's (median of the layers).",
            watched,
            reports.carries,
        ),
        Claim(
            "V3",
            "Training loses no accuracy at 8x.",
            "convergence of ResNet-32 on CIFAR-100",
            f"{SETTING}; ResNet-20 with --full alone. 400 steps of LeNet-5 (4000 with --full), 600 of `digits_net` "
            f"(3000) and 900 of ResNet-20, compressed from at most {percent(reports.EARLY)} of the training on; the "
            "same learning rate for all of a net.",
            f"it ends at most {reports.POINTS:g} point of held-out accuracy below dense.",
            trained,
            reports.training,
            "ResNet-32 on CIFAR-100: top-1 accuracy 0.676 → 0.666.",
        ),
        Claim(
            "V4",
            "Around the ring, aggregation is more than 5 times as fast, dense steps counted.",
            "aggregation time around the ring",
            "The pipelined ring (Algorithm 1) by point-to-point messages of MPI, its compression while messages are on "
            "their way; 2 ranks (with --full 4, too) on emulated hosts with links of 100 Mbit/s and 1 Gbit/s (left out "
            "where hosts cannot be emulated), and over shared memory; the layers of ResNet-32, and one of VGG's (512 "
            "filters of 512×3×3).",
            f"a cycle, its dense steps and its fit counted, is at least {reports.FASTER:g} times as fast "
            f"as dense steps.",
            rings,
            reports.aggregation,
            "850 s → 162 s for 500 iterations, 6 CPU nodes, ResNet-32 on CIFAR-100; a whole training takes 46 to 50 % "
            "less time.",
        ),
        Claim(
            "V5",
            "With QSGD it is better than either alone at an equal compression ratio.",
            "GradiVeQ combined with QSGD",
            f"{SETTING}. Errors of LeNet-5's layers (with --full of ResNet-20's, too) in the 40 steps after 60 dense "
            "ones from step 200 on, the basis from 512 slices; times of the rings of V4. Without feedback; every slice "
            "keeps exactly its share (λ = 0).",
            "at least one combination of the ratio has a lower error and a shorter step than each alone.",
            mixed,
            reports.together,
        ),
    ],
)
