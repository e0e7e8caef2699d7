"""`task=label source=TEACHER out=FOLDER`: what a teacher says of a text, written down once, so that students need no teacher."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxllm.config import Config
from jaxllm.data.plan import make_plan
from jaxllm.data.soft_labels import Writer, description
from jaxllm.errors import UserError
from jaxllm.layers.base import Context
from jaxllm.mesh import build_mesh, check_batch, param_shardings, use_mesh
from jaxllm.ops.cross_entropy import DEFAULT_CHUNK
from jaxllm.ops.divergence import Head, top_and_rest
from jaxllm.params import declare
from jaxllm.tasks import TaskIO
from jaxllm.tasks.evaluate import text_of
from jaxllm.tasks.source import checksum_of, open_source
from jaxllm.tasks.texts import Fixed
from jaxllm.training.feed import place as on_devices
from jaxllm.training.losses import backbone, head
from jaxllm.training.settings import LabelSettings, TrainSettings


def run(cfg: Config, io: TaskIO) -> dict[str, Any]:
    """Writes the labels of the text's training part (`jaxllm.data.soft_labels`); returns `rows, tokens, bytes, top_k, kept` (the mean
    probability of the labels together) and where they are. A run that was stopped goes on where it was."""
    settings: LabelSettings = cfg.section("label")
    out = cfg.section("convert").out
    if cfg.source is None:
        raise UserError(
            "source: missing; give source=<the teacher: run folder, checkpoint, Hugging Face folder or GGUF file>"
        )
    if out is None:
        raise UserError("out: missing; give out=<folder of labels to make, or to go on with>")
    if jax.process_count() > 1:
        raise UserError("task=label: runs in one process; start it on one host")
    typed = {k: v for k, v in cfg.explicit.items() if k.split(".")[0] in ("model", "train")}
    source = open_source(cfg.path(cfg.source), overrides=typed, allow_targets=cfg.allow_targets, warn=io.log)
    if source.tokenizer is None:
        raise UserError(f"source={cfg.source}: has no tokenizer, so text cannot be read in its tokens")
    train: TrainSettings = source.config.section("train")
    place = cfg.section("mesh")
    mesh = build_mesh(place.axes, axis_type=place.axis_type)
    check_batch(train.batch_size, train.seq_len, mesh, place.rules)
    text, _ = text_of(cfg, source.config)
    corpus = dataclasses.replace(text, tokenizer=Fixed(source.tokenizer)).prepare(io.log, cfg.original_cwd)
    if corpus.parts:
        raise UserError(
            f"data: labels are of the rows of one source, and this is a mix of {len(corpus.parts)}; name one"
        )
    store = corpus.train
    # Rows of a head behind the tokenizer's last id are nobody's, and a student has no such ids.
    ids_of = min(source.model.vocab_size, source.tokenizer.vocab_size)
    k = min(settings.top_k, ids_of)
    meta = {
        **description(corpus.facts, store, train.seq_len),
        "top_k": k,
        "temperature": settings.temperature,
        "vocab_size": ids_of,
        "teacher": checksum_of(source.params),
        "ids": "<u2" if ids_of <= 2**16 else "<u4",
        "logp": {"float16": "<f2", "float32": "<f4"}[settings.dtype],
    }
    writer = Writer(cfg.path(out), meta, source.tokenizer, f"out={out}", settings.max_gb * 1e9)
    if writer.done:
        io.log(f"label: goes on behind row {writer.done:,} of {meta['rows']:,}")
    model = source.model
    params = jax.device_put(source.params, param_shardings(declare(model), mesh, place.rules))
    shards = mesh.shape.get("data", 1) * mesh.shape.get("fsdp", 1) * mesh.shape.get("expert", 1)

    @jax.jit
    def said(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        hidden = backbone(model, params, Context.whole(batch["tokens"], batch["segments"], batch["positions"])).hidden
        whole = Head(hidden, head(model, params, hidden), model.logit_softcap)
        found = top_and_rest(whole, ids_of, k, settings.temperature, DEFAULT_CHUNK * shards)
        return found.ids, found.log_p

    plan = make_plan(store, train.seq_len, 1, 0, 0, shuffle=False)
    b, rows, kept = train.batch_size, meta["rows"], []
    with use_mesh(mesh, place.rules):
        for n, first in enumerate(range(writer.done, rows, b)):
            at = np.arange(first, first + b)
            batch = plan.gather(np.where(at < rows, at, -1), 0)
            ids, logp = jax.device_get(said(params, on_devices(batch, mesh, place.rules)))
            real = min(b, rows - first)
            writer.put(ids[:real], logp[:real])
            kept.append(np.mean(1 - np.exp(logp[:real, :, -1])[batch["segments"][:real] > 0]))
            io.progress(f"label: row {first + real:,} of {rows:,}")
            if io.stop.is_set():
                writer.flush()
                raise KeyboardInterrupt
            if n % settings.flush_every == settings.flush_every - 1:
                writer.flush()
    writer.flush()
    size = sum(file.stat().st_size for file in cfg.path(out).iterdir() if file.is_file())
    io.log(f"{store.size:,} tokens with {k} labels each, {size / 2**20:,.1f} MiB: {out}")
    mass = round(float(np.mean(kept)), 6) if kept else None
    return {"rows": rows, "tokens": store.size, "bytes": size, "top_k": k, "kept": mass, "out": str(cfg.path(out))}
