"""The methods, one file per paper. The file's name is the method's id in plans.

``from hvdcompress.methods import TopK`` gives the class: ``ddp.attach(model, TopK(density=0.01))``.

Notation in every file: n is the number of elements of a tensor, k the number of elements sent, and p the number of
ranks. g is a gradient, x = g + residual the input of a method, Σ a sum over ranks, and ĝ the reduced gradient.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdcompress.methods.acpsgd import ACPSGD
    from hvdcompress.methods.arctopk import ARCTopK
    from hvdcompress.methods.bf16 import Bf16
    from hvdcompress.methods.blockwise import Blockwise
    from hvdcompress.methods.dgc import DGC
    from hvdcompress.methods.fft import FFT
    from hvdcompress.methods.fp16 import Fp16
    from hvdcompress.methods.gaussiank import GaussianK
    from hvdcompress.methods.gradiveq import GradiVeQ
    from hvdcompress.methods.gtopk import GTopK
    from hvdcompress.methods.natural import Natural
    from hvdcompress.methods.none import Dense
    from hvdcompress.methods.oktopk import OkTopk
    from hvdcompress.methods.onebit import OneBit
    from hvdcompress.methods.powersgd import PowerSGD
    from hvdcompress.methods.qsgd import QSGD
    from hvdcompress.methods.randomk import RandomK
    from hvdcompress.methods.redsync import RedSync
    from hvdcompress.methods.scalecom import ScaleCom
    from hvdcompress.methods.signsgd import SignSGD
    from hvdcompress.methods.terngrad import TernGrad
    from hvdcompress.methods.topk import TopK

#: Module of each class. ``__getattr__`` imports it on first use, so that importing this package stays fast.
_MODULES = {
    "ACPSGD": "acpsgd",
    "ARCTopK": "arctopk",
    "Bf16": "bf16",
    "Blockwise": "blockwise",
    "Dense": "none",
    "DGC": "dgc",
    "FFT": "fft",
    "Fp16": "fp16",
    "GaussianK": "gaussiank",
    "GradiVeQ": "gradiveq",
    "GTopK": "gtopk",
    "Natural": "natural",
    "OkTopk": "oktopk",
    "OneBit": "onebit",
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
    "DGC",
    "FFT",
    "QSGD",
    "ARCTopK",
    "Bf16",
    "Blockwise",
    "Dense",
    "Fp16",
    "GTopK",
    "GaussianK",
    "GradiVeQ",
    "Natural",
    "OkTopk",
    "OneBit",
    "PowerSGD",
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
    cls = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = cls
    return cls
