"""What `task=count` answers beyond counting: rows that fit in a memory, ZeRO stages, speculation, and the page of calculators."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxllm.config import Config
from jaxllm.errors import UserError
from jaxllm.folder import write_text
from jaxllm.report import formulas, tools
from jaxllm.tasks import TaskIO


def answers(cfg: Config, io: TaskIO, settings: Any, result: dict[str, Any]) -> dict[str, Any]:
    """The fields that `settings` (`CountSettings`) ask for, from the count of a model; a line each to stderr.

    memory_gb: `users`, rows of `context` tokens whose caches fit beside one copy of the weights in the compute dtype. devices:
    `train_bytes_by_zero`, one device's bytes at ZeRO stages 0 to 3. accept: `speculative`. tools: `html`, the calculators.
    """
    out: dict[str, Any] = {}
    if settings.memory_gb is not None:
        weights = result["params_total"] * jnp.dtype(result["dtype"]).itemsize
        row = result["cache_bytes_total"] / result["batch"]
        room = settings.memory_gb * 1e9 - weights
        if room < 0:
            io.log(f"memory          {settings.memory_gb:g} GB do not hold the weights, {weights / 1e9:,.1f} GB")
        users = max(0, int(room // row)) if row else None
        out |= {"users": users, "weights_bytes": weights}
        number = "any number of" if users is None else f"{users:,}"
        io.log(
            f"users           {number} rows of {result['context']:,} tokens in {settings.memory_gb:g} GB,"
            f" of which {weights / 1e9:,.1f} GB are weights"
        )
    if settings.devices is not None:
        if any(size > 1 for size in result["mesh"].values()):
            raise UserError(
                "count.devices: counts from one device's bytes; leave the mesh at one device, or read train_bytes"
            )
        parts = {name: result["train_bytes_parts"][name] for name in ("params", "grads", "optimiser", "activations")}
        stages = {z: formulas.zero_stage(**parts, devices=settings.devices, zero=z)["total bytes"] for z in range(4)}
        out["train_bytes_by_zero"] = {str(stage): round(total) for stage, total in stages.items()}
        words = ", ".join(f"stage {stage} {total / 2**20:,.1f}" for stage, total in stages.items())
        io.log(f"ZeRO            MiB a device of {settings.devices}: {words}")
    if settings.accept is not None:
        got = formulas.speculative(settings.accept, settings.draft, settings.draft_cost)
        out["speculative"] = {"tokens_per_step": got["tokens a step"], "speedup": got["times as fast"]}
        io.log(
            f"speculation     {got['tokens a step']:.2f} tokens a step of {settings.draft} drafted,"
            f" {got['times as fast']:.2f} times as fast"
        )
    if settings.tools is not None:
        path = cfg.path(settings.tools)
        if path.is_dir():
            raise UserError(f"count.tools: {settings.tools} is a folder; give the name of the page to write")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, tools.report())
        out["html"] = str(path)
        io.log(f"calculators     {path}")
    return out
