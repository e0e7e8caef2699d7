"""The `time:` node of the config. Plain data: no jax here."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from jaxllm.errors import UserError

Part = Literal["model", "layers", "hardware"]
What = Literal["forward", "backward", "train", "prefill", "decode"]
DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class TimeSettings:
    """What `task=time` times. parts: the whole model, each of its layer kinds alone, and the machine itself (`hardware`).

    what: forward (whole sequences, all logits), backward (forward and gradient), train (a step with its optimiser), prefill (a prompt
    into a cache), decode (one more token behind `context`); layers have no train step. context: tokens, batch: rows, dtype: of the
    computation (null = the model's); each one value or a list, and every combination is timed. repeats: steady calls of each, at
    least 20 for a figure that is quoted. chunk: tokens of one call of a prefill, as in generation. sizes: of the hardware's square
    products. trace: also write a profile of a few calls into the run folder.
    """

    parts: tuple[Part, ...] = ("model", "layers")
    what: What | tuple[What, ...] = ("forward", "backward", "train", "prefill", "decode")
    context: int | tuple[int, ...] = (256,)
    batch: int | tuple[int, ...] = (1,)
    dtype: str | tuple[str, ...] | None = None
    repeats: int = 20
    chunk: int = 1024
    sizes: tuple[int, ...] = (128, 256, 512, 1024)
    trace: bool = False

    def __post_init__(self) -> None:
        for name in ("context", "batch", "sizes"):
            values = listed(getattr(self, name))
            if not values or any(value < 1 for value in values):
                raise UserError(f"{name}: {getattr(self, name)} must be numbers of at least 1")
        for name in ("repeats", "chunk"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: {getattr(self, name)} must be at least 1")
        if not self.parts or not listed(self.what):
            raise UserError(f"{'what' if self.parts else 'parts'}: is empty, so there is nothing to time")
        for dtype in listed(self.dtype):
            if dtype not in DTYPES:
                raise UserError(f"dtype: {dtype!r} is not one of {', '.join(DTYPES)}")


def listed(value: Any) -> tuple[Any, ...]:
    """One value, or several, as a tuple; null as none."""
    return () if value is None else tuple(value) if isinstance(value, tuple | list) else (value,)
