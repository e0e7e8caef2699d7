"""What has to be settled before JAX is used: platform, number of CPU devices, the compilation cache, quiet logs."""

from __future__ import annotations

import hashlib
import logging
import os
import platform as machine
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from jaxllm.errors import UserError

if TYPE_CHECKING:
    from jaxllm.config import Common

# JAX takes 75 % of a GPU's memory by default; a program that owns the GPU can have more. The user's own settings win.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", "TF_CPP_MIN_LOG_LEVEL": "2", "GRPC_VERBOSITY": "ERROR"}


def prepare(common: Common) -> None:
    """Apply the common keys to JAX. Call before the first array is made; a second call may only repeat the first."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    _logs(common.log_level)
    quiet_late_callbacks()
    keep_freed_memory()
    import jax

    try:
        if common.platform is not None and jax.config.jax_platforms != common.platform:
            jax.config.update("jax_platforms", common.platform)
        if common.cpu_devices is not None and jax.config.jax_num_cpu_devices != common.cpu_devices:
            jax.config.update("jax_num_cpu_devices", common.cpu_devices)
    except RuntimeError as error:
        raise UserError(
            f"platform={common.platform}, cpu_devices={common.cpu_devices}: cannot change within one process "
            f"({' '.join(str(error).split())[:120]})"
        ) from error
    cache = compile_cache_dir(common.compile_cache)
    if cache is None:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(cache))
    # Everything is kept: a start-up is dozens of small programs, each far below JAX's one-second threshold.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def quiet_late_callbacks() -> None:
    """Keep one harmless traceback off stderr: when a damaged array ends a checkpoint's reading, reads that were under way still report
    to the event loop that has been closed, and that would bury the one line that says what is wrong."""
    if not isinstance(sys.unraisablehook, _LateCallbacks):
        sys.unraisablehook = _LateCallbacks(sys.unraisablehook)


class _LateCallbacks:
    """A hook that passes everything on to the one `before` it, but for that one error."""

    def __init__(self, before: Callable[[sys.UnraisableHookArgs], object]) -> None:
        self.before = before

    def __call__(self, unraisable: sys.UnraisableHookArgs) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            self.before(unraisable)


def keep_freed_memory() -> bool:
    """Let the C library keep memory that XLA frees, instead of giving it back and asking for it again at every step.

    A training step on CPU allocates its scratch space (hundreds of MiB) afresh each time; from glibc's defaults that is one mmap, so
    every page is faulted in and zeroed again: a fifth of the step. True where it was set (glibc on Linux); settings in the
    environment (MALLOC_*) win.
    """
    if sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    import ctypes

    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # M_MMAP_MAX, M_TRIM_THRESHOLD and M_ARENA_MAX of malloc.h. One arena: those of other threads cannot grow to such sizes.
    options = ((-4, 0), (-1, 2**31 - 1), (-8, 1))
    return all(mallopt(*option) == 1 for option in options)


def compile_cache_dir(setting: str | bool) -> Path | None:
    """true: $JAX_COMPILATION_CACHE_DIR, else the user's cache folder; false: off; text: that folder.

    The name carries the kind of processor: CPU code compiled on one machine may crash another that shares the folder.
    Safe to delete at any time.
    """
    if setting is False:
        return None
    if isinstance(setting, str):
        base = Path(setting).expanduser().absolute()
    elif os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        base = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxllm" / "compiled"
    return base / f"{machine.machine()}-{_processor()}"


def _processor() -> str:
    """A short digest of the processor's instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        text = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    except OSError:
        text = machine.processor() + machine.version()
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _logs(level: str) -> None:
    """Other packages' logs: to stderr, warnings and worse (everything with log_level=debug)."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(name)s: %(message)s")
    logging.getLogger().setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
    for noisy in ("absl", "orbax", "jax._src.xla_bridge", "jax._src.compilation_cache", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.INFO if level == "debug" else logging.ERROR)
