"""Programs for machines that are not here: lowered, never run. Everything in a kernel must be something that their compiler has."""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

TARGETS = [
    ("tpu", "tpu", "tpu_custom_call"),
    ("gpu", "cuda", "triton"),
]  # platform, its target, what the text then holds


def lowered(f: Callable[..., Any], platform: str, target: str, *args: Any) -> str:
    """The text of `f(*args)` lowered for the platform."""
    known: dict[str, Any] = {"device_kind": "NVIDIA H100", "num_cores": None}
    if "platform" in inspect.signature(AbstractDevice).parameters:
        known["platform"] = target
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(**known))
    with use_abstract_mesh(mesh) if platform == "gpu" else contextlib.nullcontext():
        return jax.jit(f).trace(*args).lower(lowering_platforms=(target,)).as_text()
