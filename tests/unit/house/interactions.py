"""Which tests hold that features work together, and which combinations are refused: data for docs/interactions.md."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: each feature, and how it is asked for
FEATURES = {
    "feedback": "`feedback: plain`, `lowpass` or `momentum`",
    "clipping": "`local_clip_norm`",
    "warm-up": "`warmup`",
    "rules": "`rules`",
    "joined buckets": "`bucket_elements`; PyTorch's and MPI's drivers join small tensors unasked",
    "resume": "`save` and `load`, `state_dict` and `load_state_dict`",
    "re-shard": "`load` of what another number of ranks has saved",
    "trigger": "`trigger()` and `observe()`, which restart a method's schedule",
    "NaN step": "a gradient with an Inf or a NaN, on any rank",
    "loss scale": "`loss_scale`: torch.amp's GradScaler, Keras' LossScaleOptimizer",
    "accumulation": "`backward_passes_per_step` under Horovod, `no_sync()` under DDP",
    "process sets": "`process_set` under Horovod, `process_group` under DDP, a communicator under MPI",
}
PLANNED = tuple(FEATURES)[:10]  #: those that are no driver's own


@dataclass(frozen=True)
class Held:
    """A test that holds every pair of some features.

    Attributes:
        features: those that the test has at once, or pair by pair.
        where: what it runs under, in words.
        test: ``file::function``, from the root; a function of a launch's ranks counts.
    """

    features: tuple[str, ...]
    where: str
    test: str


HELD = (
    Held(PLANNED, "loopback, each pair, against a model in numpy", "tests/engine/test_interactions.py::test_pair"),
    Held(
        PLANNED,
        "every driver, all at once; TensorFlow without joined buckets",
        "tests/drivers/promises/interactions.py::all_features_at_once",
    ),
    Held(
        (*PLANNED, "accumulation"),
        "PyTorch under Horovod, all at once",
        "tests/drivers/torch_cases.py::several_backward_passes_with_all_other_features",
    ),
    Held(
        tuple(FEATURES),
        "PyTorch under Horovod, all at once",
        "tests/drivers/torch_cases.py::a_process_set_with_all_other_features",
    ),
    Held(
        (*PLANNED, "accumulation"),
        "DDP, all at once",
        "tests/drivers/ddp_cases.py::no_sync_with_all_other_features",
    ),
    Held(
        tuple(FEATURES),
        "DDP, all at once",
        "tests/drivers/ddp_cases.py::a_process_group_with_all_other_features",
    ),
    Held(
        (*PLANNED, "process sets"),
        "MPI, all at once",
        "tests/drivers/mpi_cases.py::a_communicator_of_some_ranks_with_all_other_features",
    ),
    Held(
        ("feedback", "clipping"),
        "every method and every feedback",
        "tests/parts/test_feedback.py::test_every_method_clips_as_if_the_gradients_had_come_clipped",
    ),
    Held(
        ("feedback", "NaN step", "loss scale"),
        "PyTorch under Horovod, GradScaler",
        "tests/drivers/torch_cases.py::a_gradscaler_that_overflows",
    ),
    Held(
        ("feedback", "NaN step", "loss scale"),
        "DDP, GradScaler and autocast",
        "tests/drivers/ddp_cases.py::a_gradscaler_that_overflows",
    ),
    Held(
        ("feedback", "NaN step", "loss scale"),
        "Keras 3, LossScaleOptimizer",
        "tests/drivers/keras_cases.py::an_overflow_on_one_rank_skips_the_step_on_all",
    ),
    Held(
        ("feedback", "accumulation"),
        "Keras 3",
        "tests/drivers/keras_cases.py::several_backward_passes_per_step",
    ),
    Held(("feedback", "process sets"), "TensorFlow", "tests/drivers/tf_cases.py::a_process_set"),
)

#: what is refused, in words, and the test that holds it
REFUSED = (
    (
        "`local_clip_norm` without feedback: nothing waits that it could bound",
        "tests/parts/test_feedback.py::test_clipping_without_feedback_is_refused",
    ),
    (
        "`bucket_elements` and `scope: global` under TensorFlow, where each gradient has a graph of its own",
        "tests/drivers/promises/table.py::EXCEPTIONS",
    ),
    (
        "`no_sync()` with `static_graph`, and `join()`, under DDP",
        "tests/drivers/ddp_cases.py::join_and_a_static_graph_with_no_sync_are_refused",
    ),
    (
        "states of other numbers of ranks of which one rank's is missing",
        "tests/drivers/test_loopback.py::test_reshard_needs_every_rank",
    ),
    (
        "two optimizers on one Compressor whose steps interleave",
        "tests/drivers/torch_refusals.py::two_optimizers_on_one_compressor",
    ),
    (
        "different loss scales on different ranks (but under TensorFlow, which does not compare them)",
        "tests/drivers/promises/agreement.py::different_loss_scales_are_one_message",
    ),
)


def pairs() -> list[tuple[str, str]]:
    """Every pair of features."""
    return list(itertools.combinations(FEATURES, 2))


def holding(pair: tuple[str, str]) -> list[int]:
    """The places in HELD of the tests of a pair."""
    return [place for place, held in enumerate(HELD) if set(pair) <= set(held.features)]


@cache
def _defined(file: Path) -> frozenset[str]:
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return frozenset(names)


def missing(tests: Iterator[str]) -> list[str]:
    """Those tests that are not there."""
    found = []
    for test in tests:
        file, _, name = test.partition("::")
        if not (ROOT / file).is_file() or name not in _defined(ROOT / file):
            found.append(test)
    return found
