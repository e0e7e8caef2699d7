"""`task=convert source=... format=run|hf out=FOLDER`: checkpoints from elsewhere into run folders, models of ours out to everybody.

A run folder made this way is like any other: it can be generated from, evaluated, served, and training can start from it (`source=`).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax

from jaxllm.checkpoint import Checkpoints
from jaxllm.config import Config
from jaxllm.data.vocabulary import Tokenizer
from jaxllm.errors import UserError
from jaxllm.folder import CONFIG
from jaxllm.layers.added import without
from jaxllm.mesh import build_mesh
from jaxllm.tasks import TaskIO
from jaxllm.tasks.source import CHECKPOINTS, TOKENIZER, Source, open_source, pack_tokenizer
from jaxllm.weights.choose import choose
from jaxllm.weights.export import new_folder, write_folder
from jaxllm.weights.settings import ConvertSettings
from jaxllm.weights.tokenizer_files import generation_settings, hf_files


def run(cfg: Config, io: TaskIO) -> dict[str, Any]:
    """`tensors, params, bytes`, and where it went."""
    settings: ConvertSettings = cfg.section("convert")
    if cfg.source is None:
        raise UserError("source: missing; give source=<run folder, checkpoint, Hugging Face folder or GGUF file>")
    if settings.format is None:
        raise UserError("format: missing; format=run makes a run folder, format=hf a Hugging Face folder")
    if settings.out is None:
        raise UserError("out: missing; give out=<folder to make>")
    if jax.process_count() > 1:
        raise UserError("task=convert: runs in one process; start it on one host")
    place = cfg.section("mesh")
    out = cfg.path(settings.out)
    with new_folder(out) as folder:
        overrides = {key: value for key, value in cfg.explicit.items() if key.startswith("model.")}
        source = open_source(
            cfg.path(cfg.source),
            overrides=overrides,
            allow_targets=cfg.allow_targets,
            warn=io.log,
            mesh=build_mesh(place.axes, axis_type=place.axis_type),
            rules=place.rules,
        )
        result = _to_run(source, folder) if settings.format == "run" else _to_hf(source, folder, settings, io)
    io.log(f"{result['params']:,} parameters in {result['tensors']} tensors, {result['bytes'] / 2**20:,.1f} MiB: {out}")
    return {**result, "format": settings.format, "out": str(out)}


def _to_run(source: Source, folder: Path) -> dict[str, Any]:
    """A run folder that has not been trained: its configuration, tokenizer, and a checkpoint of step 0."""
    tokenizer = source.tokenizer
    text = source.config.to_yaml()
    (folder / CONFIG).write_text(text, encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save(folder / TOKENIZER)
    meta = {
        **source.meta,
        "config": text,
        "tokenizer": None if tokenizer is None else pack_tokenizer(tokenizer),
        "tokens": int(source.meta.get("tokens", 0)),
    }
    meta.setdefault(
        "hf", {}
    )  # says that this checkpoint was converted, so that it may lack what training would have written
    checkpoints = Checkpoints(folder / CHECKPOINTS)
    try:
        checkpoints.save(0, {"params": source.params}, meta)
    finally:
        checkpoints.close()
    leaves = jax.tree.leaves(source.params)
    return {
        "tensors": len(leaves),
        "params": sum(leaf.size for leaf in leaves),
        "bytes": sum(leaf.nbytes for leaf in leaves),
    }


def _to_hf(source: Source, folder: Path, settings: ConvertSettings, io: TaskIO) -> dict[str, Any]:
    if source.model.draft is not None:
        io.log("the draft head is left out: it is no part of the model, and its checkpoint stays where it is")
        trunk = source.model.clone(draft=None)
        source = dataclasses.replace(source, model=trunk, params=without(source.params))
    origin = source.meta.get("hf") or {}
    choice = choose(source.model, origin.get("config"))
    if choice.folded:
        io.log(
            "factors on the embedding or the logits are folded into the weights, and the head is no longer tied: the same function"
        )
    params = choice.fold(source.model, source.params)
    files = {} if source.tokenizer is None else hf_files(source.tokenizer, source.model.max_seq_len)
    choice.config.update(
        {key: value for key, value in _ids(source.tokenizer).items() if key not in (origin.get("config") or {})}
    )
    files.setdefault("generation_config.json", json.dumps(_ids(source.tokenizer), indent=2) + "\n")
    result = write_folder(
        folder,
        choice,
        params,
        dtype=settings.dtype or origin.get("dtype") or "float32",
        shard_bytes=settings.shard_bytes,
        files=files,
        progress=lambda done, total: io.progress(f"tensor {done}/{total}"),
    )
    return {**result, "architecture": choice.family.architectures[0]}


def _ids(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The special ids of config.json. Without a tokenizer none is known, and the class must not take its own defaults for them."""
    none: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return none if tokenizer is None else {**none, **generation_settings(tokenizer)}
