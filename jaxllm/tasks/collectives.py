"""The collectives of `task=count count.collectives=true`: one train step, compiled for the mesh and never run; nothing is allocated."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.config import CONF, Config
from jaxllm.errors import UserError
from jaxllm.measure.chips import detect, filled
from jaxllm.measure.collectives import collectives, rows, table
from jaxllm.mesh import batch_sharding, build_mesh, check_batch, use_mesh
from jaxllm.model import LanguageModel
from jaxllm.params import declare
from jaxllm.tasks import TaskIO
from jaxllm.training.loop import batch_shards
from jaxllm.training.settings import TrainSettings
from jaxllm.training.state import abstract_state
from jaxllm.training.step import compile_step, make_train_step


def of_train_step(
    cfg: Config, io: TaskIO, model: LanguageModel, batch: int | None, length: int | None
) -> dict[str, Any]:
    """JSON fields: `collectives`, one entry a kind, group and size; `collective_bytes` and `collective_seconds` of one step.

    batch, length: of a step; null = the training configuration's. Links are those of `chip=NAME`, else of the device here.
    """
    place = cfg.section("mesh")
    wanted = math.prod(size for size in place.axes.values() if size > 0)
    if wanted > jax.device_count():
        raise UserError(
            f"count.collectives: the mesh needs {wanted} devices, {jax.device_count()} are present; cpu_devices={wanted} stands in for them"
        )
    train: TrainSettings = cfg.section("train")
    mesh = build_mesh(place.axes, axis_type=place.axis_type)
    b, t = batch or train.batch_size, length or train.seq_len
    check_batch(b // train.accumulate, t, mesh, place.rules)
    declared, optimiser = declare(model), cfg.build("optim")
    state = abstract_state(model, optimiser, mesh=mesh, rules=place.rules, declared=declared)
    shape = jax.ShapeDtypeStruct((b, t), jnp.int32, sharding=batch_sharding(mesh, place.rules))
    arrays: dict[str, Any] = dict.fromkeys(("tokens", "labels", "positions", "segments"), shape)
    arrays["weights"] = jax.ShapeDtypeStruct((b, t), jnp.float32, sharding=shape.sharding)
    step = make_train_step(
        model,
        cfg.build("objective"),
        optimiser,
        accumulate=train.accumulate,
        shards=batch_shards(mesh, place.rules),
        declared=declared,
    )
    with use_mesh(mesh, place.rules):
        program, seconds = compile_step(step, state, arrays, mesh)
    chip = filled(cfg.build("chip")) if cfg.get("chip") is not None else detect(jax.devices()[0], CONF / "chip")
    found = collectives(program.as_text(), mesh.size)
    io.log(
        f"collectives of a train step of {b} x {t} on {mesh.size} devices ({seconds:.1f} s to compile), links of {chip.name}:"
    )
    for line in table(found, chip.link):
        io.log(line)
    times = [c.seconds(chip.link) for c in found]
    known = [s for s in times if s is not None]
    return {
        "collectives": rows(found, chip.link),
        "collective_bytes": sum(c.bytes * (c.count or 0) for c in found),
        "collective_seconds": sum(known) if len(known) == len(times) else "n/a",
    }
