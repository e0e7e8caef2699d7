"""Pallas's Triton compiler, which kernels for GPUs name: the other one moves tiles by copies that columns of one number, and pages, do not
suit. It is deprecated in JAX 0.12, so it is looked for before it is asked for."""

import importlib
import importlib.util
from typing import Any

MODULE = "jax.experimental.pallas.triton"


def is_there() -> bool:
    return importlib.util.find_spec(MODULE) is not None


def compiler(**options: Any) -> Any:
    """The `compiler_params` of a kernel; None, which leaves the choice to JAX, where it is gone."""
    return importlib.import_module(MODULE).CompilerParams(**options) if is_there() else None
