"""The part of `task=count` that goes layer by layer, and how long a chip would need: from the configuration alone."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.config import CONF, Config
from jaxllm.layers.base import Cost
from jaxllm.measure.chips import detect, filled
from jaxllm.measure.roofline import Phase, call, model_work, optimiser_bytes, predict
from jaxllm.model import LanguageModel

COLUMNS = (
    "layer",
    "number",
    "mflops",
    "param_bytes",
    "cache_bytes",
    "cache_read",
    "activation_bytes",
    "collective_bytes",
)


def by_layer(model: LanguageModel, phase: Phase, batch: int, context: int) -> list[dict[str, Any]]:
    """One row a role, of **one** layer of it in a forward call of that phase; `number`: how many there are.

    flops, and bytes: of parameters as they are stored, of the cache that `batch` rows hold and read, of what a backward would keep,
    and of what is all-reduced under tensor parallelism. The last row is the head.
    """
    t, s = call(phase, context)
    number: collections.Counter[str] = collections.Counter()
    for group in model.groups:
        for role in (role for pair in group.period for role in pair):
            number[role] += group.repeats
    rows = []
    for role, n in number.items():
        layer = model.mixer(role) if role in model.mixers else model.ffn(role)
        rows.append(_row(model, role, n, layer.cost(batch, t, s, model.compute_dtype), batch, context))
    d, v = model.d_model, model.padded_vocab
    return [*rows, _row(model, "head", 1, Cost(flops=2.0 * batch * t * d * v, params=d * v), batch, context)]


def _row(model: LanguageModel, role: str, number: int, cost: Cost, batch: int, context: int) -> dict[str, Any]:
    return {
        "layer": role,
        "number": number,
        "flops": cost.flops,
        "param_bytes": cost.params * jnp.dtype(model.param_dtype).itemsize,
        "cache_bytes": batch * (cost.cache_per_token * context + cost.cache_constant),
        "cache_read": cost.cache_read,
        "activation_bytes": cost.activation_bytes,
        "collective_bytes": cost.collective_bytes,
    }


def predicted(
    cfg: Config, model: LanguageModel, phase: Phase, batch: int, context: int, state: Mapping[str, int]
) -> dict[str, Any]:
    """`chip`, `predicted_ms` of one call on one such chip, and the `limit` that binds; "n/a" where the chip is not known unmeasured.

    state: bytes of `params`, `grads` and `optimiser` that an update touches.
    """
    chip = filled(cfg.build("chip")) if cfg.get("chip") is not None else detect(jax.devices()[0], CONF / "chip")
    update = optimiser_bytes(state["params"], state["grads"], state["optimiser"]) if phase == "train" else 0.0
    works = model_work(model, phase, batch, context, update_bytes=update)
    found = predict(works, chip, model.compute_dtype)
    if found is None:
        return {"chip": chip.name, "predicted_ms": "n/a", "limit": "n/a"}
    return {"chip": chip.name, "predicted_ms": 1e3 * found.seconds, "limit": found.limit}


def table(rows: list[dict[str, Any]], phase: str, batch: int, context: int) -> list[str]:
    """One line a role."""
    lines = [list(COLUMNS)]
    for row in rows:
        shown = {**row, "mflops": row["flops"] / 1e6}
        lines.append(
            [
                f"{v:,.2f}" if name == "mflops" else f"{v:,.0f}" if name != "layer" else v
                for name in COLUMNS
                for v in [shown[name]]
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    head = f"one layer of each kind, {phase} of {batch} x {context:,}:"
    text = [
        "  ".join(c.ljust(w) if not i else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    ]
    return ["", head, *text]
