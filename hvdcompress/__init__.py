"""Gradient compression for data-parallel training.

The drivers are ``hvdcompress.ddp``, ``.fsdp``, ``.horovod.torch``, ``.horovod.tensorflow``, ``.horovod.keras`` and
``.mpi``; ``.loopback`` simulates all ranks in one process. Importing this package imports no framework: public names
are loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdcompress.plan import Plan, load_plan
    from hvdcompress.registry import available, get_method

__version__ = "0.1.0"
__all__ = ["Plan", "__version__", "available", "get_method", "load_plan"]

_MODULE_OF = {
    "Plan": "plan",
    "available": "registry",
    "get_method": "registry",
    "load_plan": "plan",
}


def __getattr__(name: str) -> Any:
    """Import a public name, or a module that defines public names, on first use."""
    if name in _MODULE_OF.values():
        return import_module(f"{__name__}.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
