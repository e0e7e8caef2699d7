"""`task=eval source=...`: the loss of a trained model on text it was not trained on."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxllm.config import Config
from jaxllm.data.corpus import Source as Text
from jaxllm.data.loader import Loader
from jaxllm.errors import UserError
from jaxllm.mesh import build_mesh, check_batch, param_shardings, use_mesh
from jaxllm.params import declare
from jaxllm.tasks import TaskIO
from jaxllm.tasks.source import open_source
from jaxllm.tasks.train import Fixed
from jaxllm.training.evaluation import Evaluator
from jaxllm.training.loop import batch_shards
from jaxllm.training.settings import TrainSettings


def run(cfg: Config, io: TaskIO) -> dict[str, Any]:
    """`loss` (nats a token), `bpb`, `perplexity`, `accuracy`, `tokens`, `batches`, and of which checkpoint.

    The text is the held-out part of the run's own, or all of another one where the command names one (`data=...`,
    `data.path=...`); either is read in the model's tokens. Rows and batches are the run's unless `train.seq_len` or
    `train.batch_size` were typed; the size of a batch changes no result.
    """
    if cfg.source is None:
        raise UserError("source: missing; give source=<run folder or checkpoint>")
    typed = {k: v for k, v in cfg.explicit.items() if k.split(".")[0] in ("model", "train")}
    source = open_source(cfg.path(cfg.source), overrides=typed, allow_targets=cfg.allow_targets, warn=io.log)
    tokenizer = source.tokenizer
    if tokenizer is None:
        raise UserError(f"source={cfg.source}: has no tokenizer, so text cannot be read in its tokens")
    settings: TrainSettings = source.config.section("train")
    place = cfg.section("mesh")
    mesh = build_mesh(place.axes, axis_type=place.axis_type)
    check_batch(settings.batch_size, settings.seq_len, mesh, place.rules)

    text, foreign = _text(cfg, source.config)
    changes: dict[str, Any] = {"tokenizer": Fixed(tokenizer)}
    if foreign and "data.val_every" not in cfg.explicit:
        changes["val_every"] = 0
    corpus = dataclasses.replace(text, **changes).prepare(io.log, cfg.original_cwd)
    store = corpus.val if changes.get("val_every", text.val_every) else corpus.train
    loader = Loader(
        store, settings.batch_size, settings.seq_len, seed=0, host=jax.process_index(), hosts=jax.process_count()
    )
    params = jax.device_put(source.params, param_shardings(declare(source.model), mesh, place.rules))
    evaluator = Evaluator(
        source.model,
        tokenizer.token_bytes(),
        mesh=mesh,
        rules=place.rules,
        shards=batch_shards(mesh, place.rules),
    )
    limit = settings.eval_batches if "train.eval_batches" in typed else None
    total = -(-loader.rows_per_epoch // loader.batch_size)
    batches = total if limit is None else min(limit, total)

    def watched() -> Any:
        for n, batch in enumerate(loader.epoch()):
            io.progress(f"batch {n + 1}/{batches}")
            if io.stop.is_set():
                raise KeyboardInterrupt
            yield batch

    with use_mesh(mesh, place.rules):
        result = evaluator(params, watched(), limit)
    io.log(f"loss {result['loss']:.4f}, {result['bpb']:.4f} bits per byte over {result['tokens']:,} tokens")
    return {**result, "batches": batches, "step": source.step, "checkpoint": str(source.folder)}


def _text(cfg: Config, trained: Config) -> tuple[Text, bool]:
    """What to evaluate on, and whether the command named it. Typed `data.*` keys change the run's own data node where
    they are of its kind; else they belong to the kind that was chosen (or the usual one)."""
    keys = {k: v for k, v in cfg.explicit.items() if k.startswith("data.")}
    own = trained.get("data._target_")  # a foreign checkpoint has no text of its own
    if (
        own is None
        or any(text.lstrip("+").startswith("data=") for text in cfg.groups)
        or (keys and cfg["data._target_"] != own)
    ):
        return cfg.build("data"), True
    return trained.replace(keys).build("data"), bool(keys)
