"""The methods, one file per paper. The file's name is the method's id in plans.

``from hvdcompress.methods import TopK`` gives the class: ``ddp.attach(model, TopK(density=0.01))``.

Notation, the same in every file: n elements per tensor, k of them sent, p ranks (the world), g a gradient,
x = g + residual what a method is given, Σ a sum over ranks, ĝ the reduced gradient.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdcompress.methods.acpsgd import ACPSGD
    from hvdcompress.methods.bf16 import Bf16
    from hvdcompress.methods.dgc import DGC
    from hvdcompress.methods.fft import FFT
    from hvdcompress.methods.fp16 import Fp16
    from hvdcompress.methods.gaussiank import GaussianK
    from hvdcompress.methods.gradiveq import GradiVeQ
    from hvdcompress.methods.gtopk import GTopK
    from hvdcompress.methods.none import Dense
    from hvdcompress.methods.powersgd import PowerSGD
    from hvdcompress.methods.qsgd import QSGD
    from hvdcompress.methods.randomk import RandomK
    from hvdcompress.methods.redsync import RedSync
    from hvdcompress.methods.scalecom import ScaleCom
    from hvdcompress.methods.signsgd import SignSGD
    from hvdcompress.methods.terngrad import TernGrad
    from hvdcompress.methods.topk import TopK

#: The module of each class, which is imported when the class is asked for
_MODULES = {
    "ACPSGD": "acpsgd",
    "Bf16": "bf16",
    "Dense": "none",
    "DGC": "dgc",
    "FFT": "fft",
    "Fp16": "fp16",
    "GaussianK": "gaussiank",
    "GradiVeQ": "gradiveq",
    "GTopK": "gtopk",
    "PowerSGD": "powersgd",
    "QSGD": "qsgd",
    "RandomK": "randomk",
    "RedSync": "redsync",
    "ScaleCom": "scalecom",
    "SignSGD": "signsgd",
    "TernGrad": "terngrad",
    "TopK": "topk",
}
__all__ = [
    "ACPSGD",
    "Bf16",
    "DGC",
    "Dense",
    "FFT",
    "Fp16",
    "GTopK",
    "GaussianK",
    "GradiVeQ",
    "PowerSGD",
    "QSGD",
    "RandomK",
    "RedSync",
    "ScaleCom",
    "SignSGD",
    "TernGrad",
    "TopK",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return found
