"""Compile kernels, cache them on disk for all ranks of a host, and define the constants that kernels share.

Numba's own ``cache=True`` does not serve: ranks that start cold at the same time would each compile every kernel, and
numba would not read the kernels of an installation whose folder is read-only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import threading
import time
import zlib
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

# Compiled kernels contain these values, but numba recompiles a kernel only if the kernel's own file changes. After a
# change here, delete __pycache__/*.nb* in this folder.
MAGNITUDE = np.int32(0x7FFFFFFF)  #: mask: all bits of a float32 except the sign
LANES = 64  #: number of partial sums
FOUR = 4 * LANES  #: number of elements of which each partial sum receives four
BLOCK = 1024  #: number of elements that stay in the first-level cache
NEAR = 256  #: block so small that the processor prefetches the next elements during the second loop over it

#: the folder in which ``hvdcompress doctor --warm`` stores compiled kernels when the package is installed
INSTALLED = Path(__file__).with_name("__pycache__")


def compiled(function: Any, **options: Any) -> Any:
    """Compile ``function`` on its first call, and cache the result on disk for all ranks and later runs."""
    kernel = njit(function, nogil=True, **options)
    kernel._cache = _cache_of(function)  # as njit(cache=True) does, with a cache that ranks share
    compile_now = kernel.compile

    def compile_once(signature: Any) -> Any:
        with LOCKS.compiling():
            return compile_now(signature)

    kernel.compile = compile_once
    return kernel


def folder() -> str:
    """Return the folder of the kernel cache."""
    return str(_cache_of(folder).cache_path)


def reordered(function: Any) -> Any:
    """Compile a kernel of an op "to rounding": LLVM may add sums in any order."""
    return compiled(function, fastmath={"reassoc"})


class Locks:
    """Locks between the processes of a host, by name: a process that has the lock of a kernel compiles it.

    A lock is one byte of a file in the folder of the kernel cache. The operating system releases the locks of a process
    that dies. Where the file system has no locks, each process compiles for itself.

    Attributes:
        seconds: time that this process has spent compiling or loading kernels so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._threads = threading.RLock()
        self._held: list[contextlib.ExitStack] = []  # per compilation: compiling a kernel compiles those that it calls
        self._files: dict[str, int] = {}  # by folder; never closed, because that would release all locks of the file

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Context manager around a compilation, at whose end what :meth:`acquire` took is released."""
        with self._threads:
            self._held.append(contextlib.ExitStack())
            began = time.perf_counter()
            try:
                yield
            finally:
                self._held.pop().close()
                if not self._held:
                    self.seconds += time.perf_counter() - began

    def acquire(self, folder: str, name: str) -> None:
        """Wait for a lock, and hold it until the end of the compilation."""
        self._held[-1].enter_context(self.holding(folder, name, wait=True))

    @contextlib.contextmanager
    def holding(self, folder: str, name: str, wait: bool) -> Iterator[bool]:
        """Context manager that holds a lock.

        Args:
            folder: that of the kernel cache.
            name: the lock's.
            wait: whether to wait for the lock; if not, the context manager yields False if another process has it.
        """
        place = zlib.crc32(name.encode()) >> 1  # names that share a byte exclude each other, without harm
        held = None
        if fcntl:
            try:
                held = self._file(folder)
                fcntl.lockf(held, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
            except BlockingIOError:
                yield False
                return
            except OSError:  # the file system has no locks
                held = None
        try:
            yield True
        finally:
            if held is not None:
                fcntl.lockf(held, fcntl.LOCK_UN, 1, place)

    def _file(self, folder: str) -> int:
        if folder not in self._files:
            os.makedirs(folder, exist_ok=True)
            self._files[folder] = os.open(os.path.join(folder, "compiling.lock"), os.O_RDWR | os.O_CREAT, 0o644)
        return self._files[folder]


LOCKS = Locks()


class SharedCache(FunctionCache):
    """Numba's cache of a kernel, shared by processes: one compiles a missing kernel, the others wait and load it."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled kernel, or None if this process must compile it. This process then holds its lock."""
        found = super().load_overload(sig, target_context)
        if found is None:
            LOCKS.acquire(self.cache_path, self._impl.filename_base)
            with LOCKS.holding(self.cache_path, "copying", wait=True):
                _copy_installed(self.cache_path)
            found = super().load_overload(sig, target_context)
        return found


def _cache_of(function: Any) -> Any:
    try:
        return SharedCache(function)
    except RuntimeError:  # neither the folder of the kernel's file nor the user's cache folder is writable
        folder = _temporary_folder()
    before = config.CACHE_DIR
    config.CACHE_DIR = folder
    try:
        return SharedCache(function)
    finally:
        config.CACHE_DIR = before


@cache
def _temporary_folder() -> str:
    """Return a cache folder that no other user can write to, because cached kernels are executed."""
    folder = os.path.join(tempfile.gettempdir(), f"hvdcompress-{os.getuid() if hasattr(os, 'getuid') else ''}")
    with contextlib.suppress(OSError):
        os.mkdir(folder, 0o700)
    status = os.lstat(folder) if os.path.isdir(folder) and not os.path.islink(folder) else None
    if not status or (hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022)):
        folder = tempfile.mkdtemp(prefix="hvdcompress-")
    logging.getLogger("hvdcompress").warning(
        "compiled kernels are cached in %s, because neither %s nor the user's cache folder is writable",
        folder,
        INSTALLED,
    )
    return folder


@cache
def _copy_installed(folder: str) -> None:
    """Copy the kernels that were compiled at installation to ``folder``. The caller holds the lock "copying".

    Without the copy numba would not find them, because it does not read a cache folder that it cannot write to.
    """
    if config.CACHE_DIR or not INSTALLED.is_dir() or os.path.samefile(INSTALLED, folder):
        return
    for file in INSTALLED.glob("*.nb?"):
        target = os.path.join(folder, file.name)
        if not os.path.exists(target):
            shutil.copy2(file, target)
