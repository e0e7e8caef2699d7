"""How long a call must take at least, and why: work of every part of a model against what a chip can do.

    time of a part = max(FLOPs / peak, bytes / bandwidth, collective bytes / link);   whole = sum over parts + layers x overhead

A part is a mixer, an ffn or the head; each reads its weights once and meets memory with what it must keep, so a memory-bound part does
not hide behind a compute-bound one. The bytes are the least that any program moves: what stays in registers or caches is not counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxllm.cache import RecurrentCache
from jaxllm.layers.base import Cost
from jaxllm.measure.chips import Chip
from jaxllm.model import LanguageModel

Phase = Literal["forward", "backward", "train", "prefill", "decode"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "train", "prefill", "decode")
LIMITS = ("compute", "memory", "link", "overhead")


@dataclasses.dataclass(frozen=True)
class Work:
    """Of one part in one call. flops: of matrix products. bytes: to and from memory. collective: bytes all-reduced. layers: that a
    fixed cost is paid for."""

    name: str
    flops: float
    bytes: float
    collective: float = 0.0
    repeats: int = 1
    layers: int = 0


@dataclasses.dataclass(frozen=True)
class Prediction:
    """seconds of a whole call; `parts`: how many of them each limit takes; `limit`: the one that takes most."""

    seconds: float
    parts: dict[str, float]

    @property
    def limit(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name])


def work_of(
    cost: Cost, phase: Phase, *, name: str, ends: float, weights: float, state: float = 0.0, keys: float = 0.0
) -> Work:
    """The work of one part, from the cost of its forward call.

    ends: bytes of its input and output. weights: bytes of parameters that it reads. state, keys: bytes of a constant state and of new
    entries of a cache that it writes. Forward, prefill, decode: all these once, and in a decode step the cache that is read. Backward
    (with its forward): weights thrice (read twice, their gradient written) and what is kept for it written and read. Train adds the
    optimiser, see `optimiser_bytes`.
    """
    if phase in ("backward", "train"):
        return Work(name, 3 * cost.flops, 3 * weights + 2 * (ends + cost.activation_bytes), 2 * cost.collective_bytes)
    cached = state + keys + (cost.cache_read if phase == "decode" else 0.0)
    return Work(name, cost.flops, weights + ends + cached, cost.collective_bytes)


def call(phase: Phase, context: int) -> tuple[int, float]:
    """(new tokens of a row, keys that each meets on average): a decode step behind `context` tokens, else a causal sequence."""
    return (1, context) if phase == "decode" else (context, (context + 1) / 2)


def layer_work(model: LanguageModel, role: str, phase: Phase, batch: int, context: int, dtype: Any = None) -> Work:
    """The work of the mixer or ffn of that role."""
    dtype = jnp.dtype(model.compute_dtype if dtype is None else dtype)
    t, s = call(phase, context)
    mixes = role in model.mixers
    layer = model.mixer(role) if mixes else model.ffn(role)
    cost = layer.cost(batch, t, s, dtype)
    state = keys = 0.0
    if mixes and phase in ("prefill", "decode"):
        keys = batch * t * cost.cache_per_token
        if isinstance(jax.eval_shape(lambda: layer.init_cache(1, 1, dtype)), RecurrentCache):  # all of it is made anew
            state = batch * cost.cache_constant
    return work_of(
        cost,
        phase,
        name=role,
        ends=2.0 * batch * t * model.d_model * dtype.itemsize,
        weights=layer.params_read(batch * t) * _weight_size(model, phase, dtype),
        state=state,
        keys=keys,
    )


def model_work(
    model: LanguageModel, phase: Phase, batch: int, context: int, dtype: Any = None, update_bytes: float = 0.0
) -> list[Work]:
    """All parts of a call of the whole model. A prefill makes logits for the last token of a row alone, as generation does.

    update_bytes: what the optimiser of a train step reads and writes.
    """
    dtype = jnp.dtype(model.compute_dtype if dtype is None else dtype)
    t = 1 if phase in ("prefill", "decode") else context
    d, v = model.d_model, model.padded_vocab
    head = Cost(flops=2.0 * batch * t * d * v)
    ends = batch * t * (d * dtype.itemsize + 4.0 * v)
    parts = [work_of(head, phase, name="head", ends=ends, weights=d * v * _weight_size(model, phase, dtype))]
    for group in model.groups:
        for mixer, ffn in group.period:
            for role in (mixer, ffn):
                work = layer_work(model, role, phase, batch, context, dtype)
                parts.append(dataclasses.replace(work, repeats=group.repeats, layers=int(role == mixer)))
    residual = model.residual_site("out").cost(batch, call(phase, context)[0], model.groups, dtype)
    if residual.flops:
        parts.append(work_of(residual, phase, name="residual", ends=0.0, weights=0.0))
    if update_bytes:
        parts.append(Work("optimiser", 0.0, update_bytes))
    return parts


def _weight_size(model: LanguageModel, phase: Phase, dtype: Any) -> int:
    """Bytes of a parameter as a call reads it: prepared for decoding in the dtype of the products, else as it is trained."""
    return jnp.dtype(dtype if phase in ("prefill", "decode") else model.param_dtype).itemsize


def total(parts: Sequence[Work], name: str = "model") -> Work:
    """All parts as one."""
    sums = [sum(getattr(p, field) * p.repeats for p in parts) for field in ("flops", "bytes", "collective", "layers")]
    return Work(name, float(sums[0]), float(sums[1]), float(sums[2]), 1, int(sums[3]))


def predict(parts: Sequence[Work], chip: Chip, dtype: Any, devices: int = 1) -> Prediction | None:
    """The least time of the parts one after another on `devices` chips that share them evenly; None where the chip is not known."""
    peak, bandwidth = chip.peak(dtype), chip.bandwidth
    if peak is None or bandwidth is None or (devices > 1 and chip.link is None):
        return None
    seconds = dict.fromkeys(LIMITS, 0.0)
    for part in parts:
        link = ring_seconds("all-reduce", part.collective / devices, devices, chip.link or 1.0)
        times = {"compute": part.flops / peak / devices, "memory": part.bytes / bandwidth / devices, "link": link}
        limit = max(times, key=lambda name: times[name])
        seconds[limit] += part.repeats * times[limit]
        seconds["overhead"] += part.repeats * part.layers * chip.layer_overhead
    return Prediction(sum(seconds.values()), seconds)


def ring_seconds(kind: str, size: float, devices: int, link: float) -> float:
    """Seconds of a collective over a ring. size: bytes of one device's *result* (all-reduce, all-gather, all-to-all, permute) or, for
    reduce-scatter, of its input; link: bytes/s out of a device."""
    if devices < 2:
        return 0.0
    share = (devices - 1) / devices
    passes = {"all-reduce": 2 * share, "all-gather": share, "reduce-scatter": share, "all-to-all": share}
    return passes.get(kind, 1.0) * size / link


def optimiser_bytes(params: float, grads: float, state: float) -> float:
    """Of an update: parameters and the optimiser's state are read and written, gradients are read."""
    return 2 * params + 2 * state + grads


def utilisation(work: float, seconds: float, peak: float | None) -> float | str:
    """Share of the peak that was reached; "n/a" where there is none."""
    return work / seconds / peak if peak and seconds > 0 else "n/a"
