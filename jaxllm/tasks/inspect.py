"""`task=inspect source=... prompt=...`: what a model does with a text, looked at from inside, as one HTML page.

Everything is asked for by `Context.capture`, in one forward pass: attention maps, choices of keys, experts, decay and writing of
recurrent layers, the stream after each layer (read by the model's own head: the logit lens), and heads that look further ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import Config
from jaxllm.data.vocabulary import Tokenizer
from jaxllm.errors import UserError
from jaxllm.folder import write_text
from jaxllm.inference.generate import start_ids
from jaxllm.inference.sampling import Sampling, SamplingParams, filter_logits
from jaxllm.layers.base import Context
from jaxllm.model import LanguageModel
from jaxllm.report import insides
from jaxllm.report.insides import Layer, Lens, Sampled
from jaxllm.report.settings import InspectSettings
from jaxllm.tasks import TaskIO
from jaxllm.tasks.source import Source, open_source

MOST = 256  # tokens: a map has the square of that many cells
CAPTURE = ("stream", "attention", "selected", "routing", "decay", "mtp")
TEMPERATURES = np.round(np.arange(0, 2.01, 0.1), 1)
LIKELY = 12  # ids that the picture of sampling names
EXAMPLE = {"top_k": 8, "top_p": 0.9}  # the cut that is shown where none was asked for


def run(cfg: Config, io: TaskIO) -> dict[str, Any]:
    """Writes the page, and with a run folder the maps as images; returns `html`, `tokens`, `layers`, `images` and the `next` token."""
    settings: InspectSettings = cfg.section("inspect")
    if cfg.source is None:
        raise UserError("source: missing; give source=<run folder, checkpoint, Hugging Face folder or GGUF file>")
    if (settings.prompt is None) == (settings.prompt_ids is None):
        raise UserError("prompt: give either prompt=TEXT or prompt_ids=[1,2,3] to look at")
    cut = SamplingParams(settings.temperature, settings.top_k, settings.top_p, settings.min_p).check()
    name = settings.out or str((io.run_dir or Path()) / "inspect.html")
    out = cfg.path(name)
    if out.is_dir():
        raise UserError(f"out={name}: is a folder; give the name of the page to write")
    overrides = {key: value for key, value in cfg.explicit.items() if key.startswith("model.")}
    source = open_source(cfg.path(cfg.source), overrides=overrides, allow_targets=cfg.allow_targets, warn=io.log)
    ids = _ids(settings, source)
    io.progress(f"{len(ids)} tokens through {source.model.num_layers} layers")
    seen = look(source.model, source.params, ids)
    texts = [_text(source.tokenizer, i) for i in ids]
    layers = layers_of(source.model, seen["capture"])
    sampled = sampling(seen["logits"][-1, : source.model.vocab_size], cut, source.tokenizer)
    title = f"Inside {source.folder.parent.parent.name if source.folder.name.isdecimal() else source.folder.name}"
    streams = ["embedding", *(f"layer {i}" for i in range(source.model.num_layers))]
    lens = _lens(streams, seen["lens"], source.tokenizer)
    further = None
    if "further" in seen:
        ahead = [f"{k + 2} tokens ahead" for k in range(len(seen["further"][0]))]
        further = _lens(ahead, seen["further"], source.tokenizer)
    html = insides.report(texts, layers, lens, further, sampled, title)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, html)
    images = _track(cfg, io, layers, source.step)
    io.log(f"{out}: next {sampled.texts[0]!r} ({float(np.max(sampled.before[10])):.2f} at T = 1)")
    return {
        "html": str(out),
        "tokens": len(ids),
        "layers": len(layers),
        "images": images,
        "next": sampled.texts[0],
        "checkpoint": str(source.folder),
    }


def _ids(settings: InspectSettings, source: Source) -> list[int]:
    if settings.prompt is not None:
        if source.tokenizer is None:
            raise UserError("prompt: this source has no tokenizer; give prompt_ids=[...]")
        ids = start_ids(source.tokenizer, settings.prompt)
    else:
        ids = list(settings.prompt_ids or [])
        bad = [i for i in ids if not 0 <= i < source.model.vocab_size]
        if bad or not ids:
            what = f"{bad[0]} is outside the vocabulary of {source.model.vocab_size} ids" if bad else "is empty"
            raise UserError(f"prompt_ids: {what}")
    most = min(MOST, source.model.max_seq_len or MOST)
    if len(ids) > most:
        raise UserError(f"prompt: {len(ids)} tokens; at most {most} can be looked at, shorten it")
    return ids


def look(model: LanguageModel, params: Mapping[str, Any], ids: list[int]) -> dict[str, Any]:
    """One forward pass: `logits [t v]`, `capture` (numpy, without the row axis), and what the stream after each layer (`lens`) and the
    heads that look further (`further`, where there are any) would say: `(id [rows t], probability [rows t])`."""

    def read(m: Any, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = m.head(hidden)[..., : model.vocab_size]
        best = jnp.argmax(logits, axis=-1)
        top = jnp.max(logits, axis=-1)
        return best, jnp.exp(top - jax.nn.logsumexp(logits, axis=-1))

    def forward(m: Any, ctx: Context) -> tuple[Any, ...]:
        out = m.backbone(ctx)[1]
        stream = out.capture.pop("stream")
        # One layer's logits at a time: all of them would be layers x tokens x vocabulary.
        parts = [read(m, m.final_norm(x)) for x in stream]
        further = [read(m, x) for x in out.capture.pop("mtp", ())]
        return m.head(out.hidden), out.capture, parts, further

    ctx = Context.whole(jnp.asarray(ids, jnp.int32)[None], capture=CAPTURE)
    logits, capture, lens, further = jax.jit(lambda p, c: model.apply({"params": p}, c, method=forward))(params, ctx)
    result = {
        "logits": np.asarray(logits[0], np.float32),
        "capture": {name: np.asarray(value) for name, value in capture.items()},
        "lens": _stacked(lens),
    }
    return result | ({"further": _stacked(further)} if further else {})


def _stacked(parts: list[tuple[Any, Any]]) -> tuple[np.ndarray, np.ndarray]:
    ids, sure = zip(*parts, strict=True)
    return np.stack([np.asarray(x[0]) for x in ids]), np.stack([np.asarray(x[0], np.float32) for x in sure])


def layers_of(model: LanguageModel, capture: Mapping[str, np.ndarray]) -> list[Layer]:
    """What was captured, layer by layer in the order of computation. Captures are `g<i>/b<j>/<site>/<name>`, a repeat a row."""
    layers: list[Layer] = []
    for i, group in enumerate(model.groups):
        for n in range(group.repeats):
            for j, (mixer, ffn) in enumerate(group.period):

                def of(site: str, name: str, i: int = i, j: int = j, n: int = n) -> np.ndarray | None:
                    value = capture.get(f"g{i}/b{j}/{site}/{name}")
                    return None if value is None else value[n][0]

                rate = getattr(model.mixer(mixer), "compress_rate", None)
                index, decay, experts = of("mixer", "selected"), of("mixer", "decay"), of("ffn", "experts")
                if decay is not None:
                    decay = decay.astype(np.float32)
                    decay = decay.mean(axis=-1) if decay.ndim == 3 else decay  # a channel each, or one a head
                layers.append(
                    Layer(
                        f"layer {len(layers)}, {mixer}/{ffn}",
                        attention=of("mixer", "attention"),
                        entries=of("mixer", "entries"),
                        # Compressed attention chooses among entries, each of which stands for a window of tokens.
                        selected=None if index is None else _chosen(index, max(1, len(index) // (rate or 1))),
                        experts=experts,
                        weights=of("ffn", "weights"),
                        number=0 if experts is None else int(model.ffn(ffn).num_experts),
                        decay=decay,
                        beta=of("mixer", "beta"),
                    )
                )
    return layers


def _chosen(index: np.ndarray, keys: int) -> np.ndarray:
    """bool `[t keys]` of places `[t k]`; places beyond the keys are none."""
    out = np.zeros((len(index), keys), bool)
    rows, columns = np.nonzero((index >= 0) & (index < keys))
    out[rows, index[rows, columns]] = True
    return out


def _lens(rows: list[str], said: tuple[np.ndarray, np.ndarray], tokenizer: Tokenizer | None) -> Lens:
    ids, sure = said
    return Lens(rows, [[_text(tokenizer, int(i)) for i in line] for line in ids], sure)


def sampling(logits: np.ndarray, cut: SamplingParams, tokenizer: Tokenizer | None) -> Sampled:
    """The most likely ids of `logits [v]` at every temperature, before and after the cut, as generation makes it."""
    asked = {key: getattr(cut, key) for key in ("top_k", "top_p", "min_p") if getattr(cut, key) not in (0, 0.0, 1.0)}
    used: dict[str, Any] = asked or EXAMPLE
    order = np.argsort(-logits, kind="stable")[:LIKELY]

    rows = [SamplingParams(float(t)) for t in TEMPERATURES]
    rows += [row._replace(**used) for row in rows]
    repeated = np.broadcast_to(logits.astype(np.float32), (len(rows), len(logits)))
    scaled = np.asarray(jax.jit(filter_logits)(repeated, Sampling.rows(rows)))
    weights = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    greedy = np.arange(len(logits)) == order[0]
    weights[[i for i, row in enumerate(rows) if row.temperature == 0]] = (
        greedy  # a filter's T = 0 means another thing there
    )
    before, after = np.split(weights, 2)
    words = " and ".join(f"{key} {value:g}" for key, value in used.items()) + ("" if asked else ", as an example")
    texts = [_text(tokenizer, int(i)) for i in order]
    return Sampled(texts, TEMPERATURES, before[:, order], after[:, order], (after > 0).sum(axis=1), words)


def _text(tokenizer: Tokenizer | None, i: int) -> str:
    """A token as text; bytes that are no whole character, and ids without text, by number."""
    text = "" if tokenizer is None else tokenizer.decode([i])
    return text if text and "\ufffd" not in text else f"<{i}>"


def _track(cfg: Config, io: TaskIO, layers: list[Layer], step: int) -> list[str]:
    """The maps as files of the run folder, and through its tracker."""
    if io.run_dir is None:
        return []
    tracker = cfg.build("track").open(io.run_dir, config=cfg.to_dict(), log=io.log)
    paths = []
    try:
        for name, data in insides.pictures(layers).items():
            path = io.run_dir / "images" / f"{name.replace('/', '_')}.png"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
            tracker.image(step, name, path)
            paths.append(str(path))
    finally:
        tracker.close()
    return paths
