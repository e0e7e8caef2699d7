"""`task=train`: from a configuration to a finished run folder.

    config.yaml  tokenizer/  checkpoints/<step>/  metrics.jsonl  samples.jsonl  plots/  wandb/  result.json

Everything that was computed is in that folder, and it can be moved, continued and generated from by itself.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxllm.checkpoint import Checkpoints, read_meta
from jaxllm.config import CONF, Config
from jaxllm.data.store import TokenStore
from jaxllm.data.tokenizer import Tokenizer, load_tokenizer
from jaxllm.errors import UserError
from jaxllm.folder import CONFIG, write_text
from jaxllm.inference.generate import Generator, sample_text
from jaxllm.layers.added import additions, without
from jaxllm.layers.draft import NAME as DRAFT
from jaxllm.measure import plots
from jaxllm.measure.chips import peak_flops
from jaxllm.measure.environment import environment
from jaxllm.measure.memory import check_room, shard_bytes
from jaxllm.measure.trackers import Tracker
from jaxllm.mesh import build_mesh, check_batch, param_shardings
from jaxllm.model import LanguageModel
from jaxllm.params import declare, init_params, is_declared, plain
from jaxllm.targets import is_node
from jaxllm.tasks import TaskIO
from jaxllm.tasks.card import card, origin_of
from jaxllm.tasks.source import add_base, build_model, checksum_of, has_of_its_own, open_source, overlay, pack_tokenizer
from jaxllm.tasks.teachers import check_vocabulary, teachers_of
from jaxllm.tasks.texts import Opener, corpus_of
from jaxllm.training.drafts import begin_draft, check_objectives
from jaxllm.training.loop import Loop, Outside, Result
from jaxllm.training.settings import TrainSettings
from jaxllm.training.stages import Stage, plan
from jaxllm.training.state import TrainState, abstract_state, leaves_by_path, new_state, stored, trained

CHECKPOINTS, TOKENIZER, SAMPLES = "checkpoints", "tokenizer", "samples.jsonl"
# What can be added to a model that is there: the field that names that model, and the choices in conf/.
ADDED = {"lora": ("base", ("attention", "all")), "draft": ("trunk", ("eagle3", "module"))}


def run(cfg: Config, io: TaskIO) -> dict[str, Any]:
    """Train; returns `loss, val_bpb, tokens, tokens_per_s, steps, checkpoint, skipped_steps` and a few more."""
    assert io.run_dir is not None, "training always has a run folder"
    settings: TrainSettings = cfg.section("train")
    place = cfg.section("mesh")
    mesh = build_mesh(place.axes, axis_type=place.axis_type)
    io.log(f"{jax.device_count()} x {jax.devices()[0].device_kind}, mesh {_sizes(mesh.shape)}")
    cfg, tokenizer, params, checksum = _given(cfg, io, mesh, place.rules)
    entries = [
        dataclasses.replace(entry, model={k: _field(cfg, v, f"stages.{i}.model.{k}") for k, v in entry.model.items()})
        for i, entry in enumerate(cfg.section("stages"))
    ]
    optimiser, objectives = cfg.build("optim"), cfg.build("objective")
    schedules = {i: cfg.build_node(s.schedule, f"stages.{i}.schedule") for i, s in enumerate(entries) if s.schedule}
    if cfg.get("model.vocab_size") is None:
        cfg.build("model", vocab_size=1)  # its mistakes too are told before any text is read
    teachers, tokenizer = teachers_of(cfg, io, objectives, tokenizer, mesh, place.rules)
    corpus = corpus_of(cfg, io, io.run_dir, tokenizer)
    model = build_model(cfg, corpus.tokenizer)
    check_vocabulary(cfg, objectives, model.vocab_size)
    declared = declare(model)
    check_objectives(model, objectives)
    stages = plan(settings, entries, model, optimiser, objectives, schedules, declared)
    for stage in stages:
        check_batch(stage.batch_size // stage.accumulate, stage.seq_len, mesh, place.rules)
    data = Opener(cfg, io, corpus, cfg.seed, settings)

    checkpoints = Checkpoints(io.run_dir / CHECKPOINTS, settings.keep_last, settings.keep_best, warn=io.log)
    state, before = _state(cfg, io, model, optimiser, checkpoints, mesh, place.rules, declared, params, corpus.train)
    del params  # the state's are the only ones from here on
    if jax.process_index() == 0 and not (io.run_dir / TOKENIZER).is_dir():  # the first trace: mistakes above leave none
        corpus.tokenizer.save(io.run_dir / TOKENIZER)
    origin = [str(text) for text in before.get("origin") or origin_of(cfg)]
    facts = environment()
    counts = _counts(declared)
    tracker = cfg.build("track").open(
        io.run_dir,
        config={**cfg.to_dict(), "environment": facts, "data_facts": corpus.facts, **counts},
        resume_id=before.get("tracker", {}).get("id"),
        log=io.log,
    )
    try:
        io.log(
            f"model: {model.num_layers} layers, {counts['params_total']:,} parameters,"
            f" {counts['params_trained']:,} of them trained"
        )
        outside = Outside(
            tracker=tracker,
            checkpoints=checkpoints,
            log=io.log,
            progress=io.progress,
            stop=io.stop.is_set,
            sample=_Samples(io, tracker, corpus.tokenizer, settings, cfg.seed) if settings.sample_tokens else None,
            meta={
                "config": cfg.to_yaml(),
                "tokenizer": pack_tokenizer(corpus.tokenizer),
                "tracker": {"id": tracker.id},
                "data": corpus.facts,
                "environment": facts,
                "origin": origin,
                **({} if checksum is None else {"base": checksum}),
            },
            run_dir=io.run_dir,
            peak=peak_flops(jax.devices()[0], CONF / "chip"),
        )
        more = {"before": before, "declared": declared, "teachers": teachers}
        loop = Loop(stages, settings, data, outside, mesh=mesh, rules=place.rules, **more)
        try:
            result = loop.run(state)
        finally:
            checkpoints.close()
        return _finish(cfg, io, result, checkpoints, tracker, stages, origin)
    finally:
        tracker.close()


def _field(cfg: Config, value: Any, key: str) -> Any:
    """A field that a stage sets anew: a plain value, or the object of a node (another rotary embedding, say)."""
    return cfg.build_node(value, key) if is_node(value) else value


# --- what a run starts from -------------------------------------------------------------------------------------------


def _given(
    cfg: Config, io: TaskIO, mesh: Any, rules: Any
) -> tuple[Config, Tokenizer | None, dict[str, Any] | None, str | None]:
    """(configuration, tokenizer, parameters, their checksum) to start from. With `source=`, its model takes the place of the one
    composed here; the checksum is of the model that adapters or a draft head are added to.

    A run that goes on has all it needs in its own folder, and the source may be gone; but what was added to a model needs that model.
    """
    added = {name: cfg.get(f"model.{name}") for name in ADDED if cfg.get(f"model.{name}") is not None}
    if cfg.source is None or io.run_dir is None:
        for name in added:
            raise UserError(f"model.{name}: is for a model that is there; give source=<run folder or checkpoint>")
        return cfg, None, None, None
    typed = {key: value for key, value in cfg.explicit.items() if key.startswith("model.")}
    step = Checkpoints(io.run_dir / CHECKPOINTS).latest() if io.resume else None
    checksum = None
    if step is not None:
        meta = read_meta(io.run_dir / CHECKPOINTS / str(step))
        node = Config.from_yaml(meta["config"], typed, cfg.allow_targets)["model"]
        tokenizer, params = load_tokenizer(io.run_dir / TOKENIZER), None
        if any(node.get(name) is not None for name in ADDED):
            checksum = meta.get("base")
            model = build_model(cfg.replace({"model": node}), tokenizer)
            params = add_base(model, {}, checksum, cfg.allow_targets, io.log)
    else:
        path = cfg.path(cfg.source)
        fields = [name for name in added if "_target_" not in added[name]]  # of what the source has, not another one
        new = {name: value for name, value in added.items() if name not in fields}
        for name in fields:
            if not has_of_its_own(path, name, cfg.allow_targets):
                choices = " or ".join(f"+{name}@model.{name}={choice}" for choice in ADDED[name][1])
                raise UserError(f"model.{name}: choose it by {choices}")
        rest = {key: value for key, value in typed.items() if key.split(".")[1] not in new}
        given = open_source(path, overrides=rest, allow_targets=cfg.allow_targets, warn=io.log, mesh=mesh, rules=rules)
        if given.tokenizer is None:
            raise UserError(f"source={cfg.source}: has no tokenizer, so text cannot be read in its tokens")
        io.log(f"source: training starts from {given.folder}, with its model and tokenizer")
        node, tokenizer, params = given.config["model"], given.tokenizer, given.params
        for name, value in new.items():
            params = without(params)
            node, checksum = node | {name: value | {ADDED[name][0]: str(given.folder)}}, checksum_of(params)
        if not new and node.get("draft") is not None:  # a head that is there goes on, beside the trunk that it names
            checksum = given.meta.get("base") or checksum_of(without(params))
    cfg = cfg.replace({"model": node})
    if jax.process_index() == 0:
        write_text(io.run_dir / CONFIG, cfg.to_yaml())
    return cfg, tokenizer, params, checksum


def _state(
    cfg: Config,
    io: TaskIO,
    model: LanguageModel,
    optimiser: Any,
    checkpoints: Checkpoints,
    mesh: Any,
    rules: Any,
    declared: Mapping[str, Any],
    params: Mapping[str, Any] | None = None,
    text: TokenStore | None = None,
) -> tuple[TrainState, dict[str, Any]]:
    """A new state (of `params` where given; `text` is what a draft head's ids are chosen by), or that of the newest whole checkpoint, and
    what was written beside it."""
    ema = cfg.section("train").ema is not None
    abstract = abstract_state(model, optimiser, mesh=mesh, rules=rules, declared=declared, ema=ema)
    check_room(
        shard_bytes(abstract),
        jax.local_devices()[0],
        "parameters and optimiser state",
        "split them over more devices (mesh.axes.fsdp) or make the model smaller",
    )
    if params is not None:
        theirs = declared if DRAFT in params else without(declared)
        wanted = jax.tree.map(lambda box: box.value, theirs, is_leaf=is_declared)
        params = _placed(params, wanted, param_shardings(theirs, mesh, rules))
    if io.resume and checkpoints.latest() is not None:
        state, meta, step = checkpoints.restore(stored(abstract, model, declared), warn=io.log)
        io.log(f"resume: from step {step}")
        return (state if params is None else dataclasses.replace(state, params=_completed(state.params, params))), meta
    if io.resume:
        io.log("resume: no checkpoint was saved yet, so the run starts at step 0")
    new = additions(declared)
    if params is not None and new and DRAFT not in params:
        key = jax.random.key(cfg.seed, impl="threefry2x32")
        params = overlay(params, init_params(model, key, mesh=mesh, rules=rules, declared=new))
        if model.draft is not None:
            params = begin_draft(model, params, text)
    places = {"mesh": mesh, "rules": rules, "declared": declared}
    return new_state(model, optimiser, cfg.seed, params=params, ema=ema, **places), {}


def _placed(params: Mapping[str, Any], wanted: Any, shardings: Any) -> dict[str, Any]:
    """Parameters in the model's dtypes and on its devices."""
    return jax.tree.map(lambda a, w, s: jax.device_put(a.astype(w.dtype), s), dict(params), wanted, shardings)


def _completed(kept: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint of adapters kept, and the base's parameter wherever it kept none."""
    return {
        key: _completed(value, base.get(key, {}))
        if isinstance(value, Mapping)
        else base[key]
        if value is None
        else value
        for key, value in kept.items()
    }


def _counts(declared: Mapping[str, Any]) -> dict[str, int]:
    sizes = {name: math.prod(box.value.shape) for name, box in leaves_by_path(declared, is_declared).items()}
    free = leaves_by_path(trained(declared))
    return {"params_total": sum(sizes.values()), "params_trained": sum(n for name, n in sizes.items() if free[name])}


# --- while it runs and after ------------------------------------------------------------------------------------------


class _Samples:
    """Lets the model speak: into samples.jsonl, the tracker's table, and a few lines of the log."""

    def __init__(self, io: TaskIO, tracker: Tracker, tokenizer: Tokenizer, settings: TrainSettings, seed: int):
        self.io, self.tracker, self.tokenizer, self.settings, self.seed = io, tracker, tokenizer, settings, seed
        self._generator: tuple[LanguageModel, Generator] | None = None

    def __call__(self, model: LanguageModel, params: Mapping[str, Any], step: int) -> None:
        bare, params = plain(model, params)
        if self._generator is None or self._generator[0] is not model:
            self._generator = (model, Generator(bare, self.tokenizer))
        self.io.progress("sampling")
        rows = sample_text(
            self._generator[1],
            params,
            list(self.settings.sample_prompts),
            max_new_tokens=self.settings.sample_tokens,
            temperature=self.settings.sample_temperature,
            seed=self.seed,
        )
        if jax.process_index() != 0 or self.io.run_dir is None:
            return
        with open(self.io.run_dir / SAMPLES, "a", encoding="utf-8") as file:
            for row in rows:
                record = {"step": step, "prompt": row["prompt"], "text": row["text"]}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self.tracker.table(step, "samples", ["step", "prompt", "text"], [[step, r["prompt"], r["text"]] for r in rows])
        for row in rows:
            self.io.log(f"step {step}: sample {row['prompt']!r} ->\n{_indent(row['prompt'] + row['text'])}")


def _finish(
    cfg: Config,
    io: TaskIO,
    result: Result,
    checkpoints: Checkpoints,
    tracker: Tracker,
    stages: list[Stage],
    origin: list[str],
) -> dict[str, Any]:
    """Curves, summary, closing card, JSON fields."""
    assert io.run_dir is not None
    latest = checkpoints.latest()
    fields: dict[str, Any] = {
        "loss": result.loss,
        "val_bpb": result.val.get("bpb", math.nan),
        "val_loss": result.val.get("loss", math.nan),
        "tokens": result.tokens,
        "tokens_per_s": None if result.tokens_per_s is None else round(result.tokens_per_s, 1),
        "steps": result.step,
        "checkpoint": None if latest is None else str(io.run_dir / CHECKPOINTS / str(latest)),
        "skipped_steps": result.skipped,
        "compile_s": round(result.compile_s, 2),
        "interrupted": result.interrupted,
    }
    fields = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
    tracker.summary({f"result/{k}": v for k, v in fields.items() if v is not None})
    drawn: list[Path] = []
    if jax.process_index() == 0:
        try:
            drawn = plots.curves(io.run_dir)
        except OSError as error:
            io.log(f"plots: not drawn ({error})")
        for path in drawn:
            tracker.image(result.step, f"train/{path.stem}", path)
        io.log(card(cfg, io.run_dir, fields, drawn, stages, origin, interrupted=result.interrupted))
    return fields


def _indent(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines())


def _sizes(shape: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in shape.items())
