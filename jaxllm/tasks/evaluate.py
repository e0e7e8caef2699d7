"""`task=eval source=...`: the loss of a trained model on text it was not trained on, and whatever suites `eval.*` asks for."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxllm.config import Config
from jaxllm.data.corpus import Corpus
from jaxllm.data.corpus import Source as Text
from jaxllm.data.loader import Loader
from jaxllm.data.probes import haystack
from jaxllm.data.store import TokenStore
from jaxllm.data.vocabulary import Tokenizer
from jaxllm.errors import UserError
from jaxllm.mesh import build_mesh, check_batch, param_shardings, use_mesh
from jaxllm.params import declare
from jaxllm.tasks import TaskIO, eval_suites
from jaxllm.tasks.source import open_source
from jaxllm.tasks.texts import Fixed
from jaxllm.training.evaluation import Evaluator
from jaxllm.training.likelihood import Scorer
from jaxllm.training.loop import batch_shards
from jaxllm.training.settings import EvalSettings, TrainSettings


def run(cfg: Config, io: TaskIO) -> dict[str, Any]:
    """`loss` (nats a token), `bpb`, `perplexity`, `accuracy`, `tokens`, `batches`, and of which checkpoint.

    The text is the held-out part of the run's own, or all of another one where the command names one (`data=...`,
    `data.path=...`); either is read in the model's tokens. Rows and batches are the run's unless `train.seq_len` or
    `train.batch_size` were typed; the size of a batch changes no result. Further suites and their fields: `EvalSettings`.
    """
    suites: EvalSettings = cfg.section("eval")
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

    text, foreign = text_of(cfg, source.config)
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
        positions=suites.positions,
    )
    limit = settings.eval_batches if "train.eval_batches" in typed else None

    def watched(loader: Loader, what: str, limit: int | None) -> Any:
        total = -(-loader.rows_per_epoch // loader.batch_size)
        for n, batch in enumerate(loader.epoch()):
            io.progress(f"{what}: batch {n + 1}/{total if limit is None else min(limit, total)}")
            if io.stop.is_set():
                raise KeyboardInterrupt
            yield batch

    with use_mesh(mesh, place.rules):
        result = evaluator(params, watched(loader, "text", limit), limit)
        io.log(f"loss {result['loss']:.4f}, {result['bpb']:.4f} bits per byte over {result['tokens']:,} tokens")
        if suites.asked:
            result |= _suites(cfg, io, suites, source, tokenizer, store, params, evaluator, settings, watched)
    total = -(-loader.rows_per_epoch // loader.batch_size)
    batches = total if limit is None else min(limit, total)
    if io.run_dir is not None and _tracked(cfg):
        _track(cfg, io, result, source.step)
    return {**result, "batches": batches, "step": source.step, "checkpoint": str(source.folder)}


def _suites(
    cfg: Config,
    io: TaskIO,
    suites: EvalSettings,
    source: Any,
    tokenizer: Tokenizer,
    text: TokenStore,
    params: Any,
    evaluator: Evaluator,
    settings: TrainSettings,
    watched: Any,
) -> dict[str, Any]:
    """The results of the suites that were asked for, by name."""
    found: dict[str, Any] = {}
    hosts = {"host": jax.process_index(), "hosts": jax.process_count()}

    def prepare(text: Text) -> Corpus:
        return dataclasses.replace(text, tokenizer=Fixed(tokenizer)).prepare(io.log, cfg.original_cwd)

    def evaluate(batches: Any) -> dict[str, Any]:
        return evaluator(params, batches)

    def rows(store: TokenStore, length: int | None) -> Any:
        return watched(
            Loader(store, settings.batch_size, length or settings.seq_len, shuffle=False, **hosts), "suite", None
        )

    if suites.domains:
        found["domains"] = eval_suites.domains(suites, prepare, evaluate, rows)
    if suites.recall:
        found["recall"] = eval_suites.recall(suites, prepare, evaluate, rows)
    if suites.needle:
        hay = haystack(text, tokenizer, 16 * max(suites.needle))
        found["needle"] = eval_suites.needle(suites, tokenizer, hay, evaluate, rows, cfg.seed)
    if suites.choices:
        scorer = Scorer(source.model)
        found["choices"] = eval_suites.choices(suites, tokenizer, scorer, params, cfg.original_cwd)
    if suites.lm_eval:
        from jaxllm.tasks.lm_eval_adapter import evaluate as harness

        found["lm_eval"] = harness(suites, source, params, cfg.original_cwd)
    for name, value in found.items():
        for row in tabled(value)[1]:
            io.log(f"{name}: " + ", ".join(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row))
    return found


def tabled(value: Any) -> tuple[list[str], list[list[Any]]]:
    """(columns, rows) of a suite's result: a list of records, or records by name."""
    records = value if isinstance(value, list) else [{"name": key, **row} for key, row in value.items()]
    columns = list(dict.fromkeys(key for row in records for key in row))
    return columns, [[row.get(column) for column in columns] for row in records]


def _tracked(cfg: Config) -> bool:
    """Was a tracker asked for? Judging a model writes and sends nothing unasked."""
    typed = [*(text.lstrip("+").partition("=")[0] for text in cfg.groups), *cfg.explicit]
    return any(key.split(".")[0] == "track" for key in typed)


def _track(cfg: Config, io: TaskIO, result: dict[str, Any], step: int) -> None:
    """Numbers and tables to the tracker of the folder that was asked for."""
    assert io.run_dir is not None
    tracker = cfg.build("track").open(io.run_dir, config=cfg.to_dict(), resume_id=None, log=io.log)
    try:
        numbers = {f"eval/{key}": value for key, value in result.items() if isinstance(value, int | float)}
        tracker.log(step, numbers)
        tracker.summary(numbers)
        for name, value in result.items():
            if isinstance(value, list | dict) and value:
                tracker.table(step, f"eval/{name}", *tabled(value))
    finally:
        tracker.close()


def text_of(cfg: Config, trained: Config) -> tuple[Text, bool]:
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
