"""Made by docs/settings.py: run it after a change of a method's hyper-parameters."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

class Settings(TypedDict, total=False):
    """Hyper-parameters of the methods, and keys of a plan."""

    beta: float
    bits: int
    block: int
    bucket: int
    bucket_elements: int
    clip_factor: float
    compressed_steps: int
    dense_steps: int
    dense_values: str
    density: float
    end_after: int
    fallback: bool
    feedback: str
    half: bool
    interval: int
    lam: float
    local_clip_norm: None | float
    matrix_rank: None | int
    max_samples: int
    mean: bool
    min_elements: int
    min_rate: float
    momentum: float
    nodes: int | Literal["auto"]
    norm: str
    optimizer_momentum: str
    order: str
    paper: bool
    recovery: float
    refine: str
    retrain_drop: float
    retrain_error: None | float
    rotation: bool
    rounding: str
    route: str
    row: int
    rules: list[dict[str, Any]]
    sample: float
    samples: str
    schedule: dict[str, Any]
    scope: str
    seed: int
    select: str
    sketch: int
    slice_elements: int
    steps_per_epoch: int
    tensors: str
    tolerance: float
    unbiased: bool
    values: str
    verify_every: int
    warmup: dict[str, float]
    warn_after: int
    watchdog: bool

class DriverSettings(Settings, total=False):
    """The same, and the settings of PyTorch's drivers."""

    loss_scale: float | Callable[[], float]
    backend: Literal["auto", "torch"]

class LocalStepsSettings(Settings, total=False):
    """The same, and the settings of local steps."""

    outer: Mapping[str, Any] | Literal["auto"] | None
    fragments: int
    delay: int
    mixing: float
    warmup: int  # type: ignore[misc]
    checkpoint: str | Path | None
