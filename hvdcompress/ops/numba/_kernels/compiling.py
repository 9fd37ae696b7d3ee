"""How kernels are compiled and kept on disk, and the constants that they share."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numba import config, njit
from numba.core.caching import FunctionCache

try:
    import fcntl
except ImportError:  # Windows: each rank compiles for itself
    fcntl = None  # type: ignore[assignment]

# Compiled kernels have these values in them, and numba looks at a kernel's own file alone: after a change here, delete
# __pycache__/*.nb* of this folder.
MAGNITUDE = np.int32(0x7FFFFFFF)  #: all bits of a float32 but its sign
LANES = 64  #: how many sums run side by side
FOUR = 4 * LANES  #: elements of which four go into each of these sums
SPAN = 1 << 16  #: elements whose sums are one row: threads begin at multiples of it, so that sums are the same
BLOCK = 1024  #: how many elements stay in the processor's nearest cache
NEAR = 256  #: so few that the processor fetches the next elements while it looks at these again

#: next to the kernels' files, where ``hvdcompress doctor --warm`` puts compiled kernels when the package is installed
INSTALLED = Path(__file__).with_name("__pycache__")


def compiled(function: Any, **options: Any) -> Any:
    """Compile ``function`` when it is first called; the result is kept on disk, for all ranks and later runs."""
    kernel = njit(function, nogil=True, **options)
    kernel._cache = _cache_of(function)  # what njit(cache=True) does, with a cache that ranks share
    compile_now = kernel.compile

    def compile_once(signature: Any) -> Any:
        with LOCK.compiling():
            return compile_now(signature)

    kernel.compile = compile_once
    return kernel


def folder() -> str:
    """Return where compiled kernels are kept."""
    return str(_cache_of(folder).cache_path)


def reordered(function: Any) -> Any:
    """Do :func:`compiled` for an op "to rounding": sums may be added in the order that suits the processor."""
    return compiled(function, fastmath={"reassoc"})


class Lock:
    """A lock of a cache's folder among processes. The operating system releases it when its holder dies.

    Attributes:
        seconds: how long this process has compiled kernels, or loaded them, until now.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._threads = threading.RLock()
        self._depth = 0  # a kernel that calls another one compiles it, too
        self._file: Any = None

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Context manager: what :meth:`acquire` locks inside is released at the end of the outermost one."""
        with self._threads:
            self._depth += 1
            began = time.perf_counter()
            try:
                yield
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - began
                    if self._file:
                        self._file.close()
                        self._file = None

    def acquire(self, folder: str) -> None:
        """Wait until no other process holds the lock of ``folder``. Without file locks there, do nothing."""
        if self._file or not fcntl:
            return
        with contextlib.suppress(OSError):
            file = open(os.path.join(folder, "compiling.lock"), "a")  # noqa: SIM115 (closing it releases the lock)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:
                file.close()
                raise
            self._file = file


LOCK = Lock()


class SharedCache(FunctionCache):
    """Numba's cache of a kernel. One process of a host compiles what is missing, and the others wait and load it."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled kernel; None if this process is to compile it, while it holds the lock."""
        found = super().load_overload(sig, target_context)
        if found is None:
            LOCK.acquire(self.cache_path)
            _copy_installed(self.cache_path)
            found = super().load_overload(sig, target_context)
        return found


def _cache_of(function: Any) -> Any:
    try:
        return SharedCache(function)
    except RuntimeError:  # neither next to the kernel's file nor in the user's cache can anything be written
        folder = _temporary_folder()
    before, config.CACHE_DIR = config.CACHE_DIR, folder
    try:
        return SharedCache(function)
    finally:
        config.CACHE_DIR = before


@cache
def _temporary_folder() -> str:
    """Return a folder for the cache that no other user can write to, as a cache is code that is run."""
    folder = os.path.join(tempfile.gettempdir(), f"hvdcompress-{os.getuid() if hasattr(os, 'getuid') else ''}")
    with contextlib.suppress(OSError):
        os.mkdir(folder, 0o700)
    status = os.lstat(folder) if os.path.isdir(folder) and not os.path.islink(folder) else None
    if not status or (hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022)):
        folder = tempfile.mkdtemp(prefix="hvdcompress-")
    logging.getLogger("hvdcompress").warning(
        "compiled kernels are kept in %s, as nothing can be written to %s or to the user's cache", folder, INSTALLED
    )
    return folder


@cache
def _copy_installed(folder: str) -> None:
    """Copy kernels that were compiled when the package was installed, which numba does not read where it cannot write.

    The caller holds the lock of ``folder``.
    """
    if config.CACHE_DIR or not INSTALLED.is_dir() or os.path.samefile(INSTALLED, folder):
        return
    for file in INSTALLED.glob("*.nb?"):
        target = os.path.join(folder, file.name)
        if not os.path.exists(target):
            shutil.copy2(file, target)
