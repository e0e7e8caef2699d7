"""How fast it goes and how long it still takes. Compilation, validation, saving and sampling are not step time."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from jaxllm.model import LanguageModel


class Clock:
    """Times steps by when their results arrive, so that dispatch ahead of the device costs and gains nothing.

    `pause()` before anything that is not a step: the next step counts from its own dispatch.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now = now
        self._last: float | None = None
        self._warm = False
        self.seconds = self.tokens = 0.0  # of steady steps
        self._recent: deque[float] = deque(maxlen=20)

    def start_stage(self) -> None:
        """A newly compiled step: its first run also pays for memory and caches, and counts only if it stays alone."""
        self._last, self._warm = None, False

    def pause(self) -> None:
        self._last = None

    def dispatched(self) -> None:
        if self._last is None:
            self._last = self._now()

    def arrived(self, tokens: int) -> float:
        """A step's result is here: the seconds it took."""
        now = self._now()
        took = now - (self._last if self._last is not None else now)
        self._last = now
        if not self._warm:
            self._warm = True
            if self.seconds:
                return took
            self._first = (took, tokens)
            return took
        self.seconds += took
        self.tokens += tokens
        self._recent.append(took)
        return took

    @property
    def tokens_per_s(self) -> float | None:
        """Over all steady steps; None before any step."""
        if self.seconds:
            return self.tokens / self.seconds
        took, tokens = getattr(self, "_first", (0.0, 0))
        return tokens / took if took else None

    def eta(self, steps: int) -> float | None:
        """Seconds for that many more steps, from recent ones (validation and saves not included)."""
        return steps * sum(self._recent) / len(self._recent) if self._recent else None


def step_flops(model: LanguageModel, batch: int, length: int) -> float:
    """Matmul FLOPs of forward and backward of one step; causal attention counts the keys it sees, (t + 1) / 2."""
    return 3.0 * model.cost(batch=batch, t=length, s=(length + 1) / 2).flops


def mfu(flops: float, seconds: float, peak: float | None, devices: int) -> float | str:
    """Share of the devices' peak that model FLOPs reach; "n/a" where the chip's peak is not known."""
    return flops / seconds / (peak * devices) if peak and seconds > 0 else "n/a"


def duration(seconds: float | None) -> str:
    """`1:02` or `3:04:05`."""
    if seconds is None:
        return "-:--"
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def progress_line(step: int, steps: int, loss: float, speed: float | None, eta: float | None, **more: Any) -> str:
    """`step 120/400  loss 3.2140  5,632 tokens/s  ETA 1:02  val_bpb 2.31`."""
    parts = [f"step {step}/{steps}", f"loss {loss:.4f}"]
    parts.append(f"{speed:,.0f} tokens/s" if speed else "- tokens/s")
    parts.append(f"ETA {duration(eta)}")
    parts += [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in more.items()
        if value and not (isinstance(value, float) and not math.isfinite(value))
    ]
    return "  ".join(parts)
