"""The page of what a model does with one prompt: next tokens, attention, choices, experts, decay, and what each layer would say."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.report import charts, page
from jaxllm.report.charts import GREY, Line
from jaxllm.report.heat import heat, png_bytes, tiles

HEADS = 64  # maps of single heads that a layer shows


@dataclasses.dataclass(frozen=True)
class Layer:
    """name: its place and roles. attention `[h t s]`; entries `[h t e]`: weights on compressed entries, beside those; selected bool
    `[t s]` (keys, or entries of compressed keys) that it chose; experts int `[t k]`, weights `[t k]`, number: of experts; decay, beta
    `[t h]`: what a recurrent state keeps and how strongly it is written. Null: not of this layer's kind."""

    name: str
    attention: np.ndarray | None = None
    entries: np.ndarray | None = None
    selected: np.ndarray | None = None
    experts: np.ndarray | None = None
    weights: np.ndarray | None = None
    number: int = 0
    decay: np.ndarray | None = None
    beta: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Lens:
    """Most likely token after each token of the prompt, read from the stream after each layer, or by a head that looks further.

    rows: names. texts: `[rows][t]`. probability: `[rows t]`, of that token."""

    rows: Sequence[str]
    texts: Sequence[Sequence[str]]
    probability: np.ndarray


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Of the last token's logits: the ids worth a look (most likely first), their texts, `[T ids]` probabilities before and after
    the cut at each temperature, and how many ids of the vocabulary the cut leaves there."""

    texts: Sequence[str]
    temperatures: np.ndarray
    before: np.ndarray
    after: np.ndarray
    kept: np.ndarray
    cut: str


def report(
    tokens: Sequence[str], layers: Sequence[Layer], lens: Lens, further: Lens | None, sampled: Sampled, title: str
) -> str:
    """HTML of the page. tokens: the prompt's, as text."""
    parts = {"What comes next": sampling(sampled), "What each layer would say": lens_table(tokens, lens)}
    if further is not None:
        parts["Heads that look further ahead"] = lens_table(tokens, further)
    kinds: Mapping[str, Any] = {
        "Attention": attention, "Keys that were chosen": selection, "Experts": routing, "Decay and writing": recurrence,
    }  # fmt: skip
    for name, draw in kinds.items():
        if shown := [text for layer in layers if (text := draw(tokens, layer))]:
            parts[name] = page.grid(shown) if name != "Experts" else "".join(shown)
    intro = page.paragraph(f"{len(tokens)} tokens, {len(layers)} layers.") + page.tokens_plain(tokens)
    return page.page(title, parts, intro=intro)


def pictures(layers: Sequence[Layer]) -> dict[str, bytes]:
    """The maps as PNG files by name, for a tracker: `attn/layer_00`, `infer/decay/layer_03`, ..."""
    out: dict[str, bytes] = {}
    for i, layer in enumerate(layers):
        if layer.attention is not None:
            out[f"attn/layer_{i:02}"] = png_bytes(tiles(layer.attention[:HEADS]), 0, 1, least=480)
        if layer.entries is not None and layer.entries.size:
            out[f"attn/entries/layer_{i:02}"] = png_bytes(tiles(layer.entries[:HEADS]), 0, 1, least=480)
        if layer.selected is not None:
            out[f"attn/selected/layer_{i:02}"] = png_bytes(layer.selected.astype(float), 0, 1, least=480)
        if layer.experts is not None:
            out[f"moe/layer_{i:02}"] = png_bytes(by_expert(layer), 0, 1, least=480)
        if layer.decay is not None and layer.beta is not None:
            out[f"attn/decay/layer_{i:02}"] = png_bytes(layer.decay.T, 0, 1, least=480)
            out[f"attn/write/layer_{i:02}"] = png_bytes(layer.beta.T, 0, 1, least=480)
    return out


# --- parts ------------------------------------------------------------------------------------------------------------


def sampling(s: Sampled) -> str:
    """softmax(logits / T) over T, and what the cut leaves at some temperatures."""
    shown = range(min(7, len(s.texts)))
    series = [Line(repr(s.texts[i]), s.temperatures, s.before[:, i], colour=i) for i in shown]
    flat = [
        f"at T = {t:g} the most likely has {p.max():.2f} and the cut leaves {n:,}"
        for t, p, n in zip(s.temperatures, s.before, s.kept, strict=True)
        if t in (0.0, 1.0, 2.0)
    ]
    caption = f"Probability of the next token over temperature: {'; '.join(flat)} ids. The cut: {s.cut}."
    rows = [
        ["T", *(repr(s.texts[i]) for i in shown), "ids left"],
        *(
            [f"{t:g}", *(f"{p[i]:.3f}" for i in shown), f"{n:,}"]
            for t, p, n in zip(s.temperatures, s.before, s.kept, strict=True)
        ),
    ]
    legend = [(i, repr(s.texts[i])) for i in shown]
    picture = charts.lines(series, title="softmax(logits / T)", x="temperature T", y="probability", bounds=(0, 1.02))
    figures = [page.figure(picture, caption, legend=legend, data=page.table(rows))]
    for t in (0.5, 1.0, 1.5):
        at = int(np.argmin(np.abs(s.temperatures - t)))
        stays = s.after[at] > 0
        bars = charts.bars(
            [(repr(text), float(p)) for text, p in zip(s.texts, s.before[at], strict=True)],
            title=f"T = {s.temperatures[at]:g}", x="probability", colours=[0 if keep else GREY for keep in stays],
        )  # fmt: skip
        figures.append(page.figure(bars, f"Colour: can be drawn, {s.kept[at]:,} ids in all. Grey: cut off by {s.cut}."))
    return page.grid(figures)


def lens_table(tokens: Sequence[str], lens: Lens) -> str:
    """A row a layer, the last on top; a column a token; the brighter, the more sure."""
    rows: list[list[object]] = [["after", *(_mark(token) for token in tokens)]]
    for name, texts, sure in reversed(list(zip(lens.rows, lens.texts, lens.probability, strict=True))):
        rows.append(
            [name, *(page.shaded(_mark(text), float(p), f"{p:.2f}") for text, p in zip(texts, sure, strict=True))]
        )
    note = "Each cell: the most likely next token if the model ended there; the stronger the colour, the more sure."
    return page.table(rows) + page.paragraph(note, "note")


def attention(tokens: Sequence[str], layer: Layer) -> str:
    if layer.attention is None:
        return ""
    weights = layer.attention
    mean, t = weights.mean(axis=0), weights.shape[1]
    first, own = weights[:, 1:, 0].mean() if t > 1 else 1.0, np.einsum("hii->hi", weights).mean()
    spread = -(weights * np.log(np.maximum(weights, 1e-30))).sum(-1).mean()
    words = f"{first:.0%} of the weight on the first token, {own:.0%} on the token itself, as wide as {np.exp(spread):.1f} even keys"
    caption = f"Mean of {len(weights)} heads; a row is what a token looks at. On average {words}."
    picture = heat(mean, tokens, tokens, title=layer.name, high=1.0, words=words)
    figure = page.figure(picture, caption)
    if layer.entries is not None and layer.entries.size:
        figure += on_entries(tokens, layer.name, layer.entries)
    if len(weights) == 1:
        return figure
    heads = page.png(png_bytes(tiles(weights[:HEADS]), 0, 1, least=480), f"{layer.name}, each head", pixels=True)
    return f"<div>{figure}{page.details('Each head', heads)}</div>"


def on_entries(tokens: Sequence[str], name: str, weights: np.ndarray) -> str:
    """The part of a row that goes to compressed entries, each of which stands for a window of tokens."""
    words = f"{weights.sum(axis=-1).mean():.0%} of the weight goes to {weights.shape[-1]} entries of compressed tokens"
    columns = [f"entry {i}" for i in range(weights.shape[-1])]
    return page.figure(
        heat(weights.mean(axis=0), tokens, columns, title=f"{name}: entries", high=1.0, words=words),
        f"The same rows, on entries: {words}.",
    )


def selection(tokens: Sequence[str], layer: Layer) -> str:
    if layer.selected is None:
        return ""
    chosen = layer.selected
    n = chosen.shape[1]
    columns = list(tokens) if n == len(tokens) else [f"entry {i}" for i in range(n)]
    words = f"a token chooses {chosen.sum(1).mean():.1f} of {n} on average, {chosen.sum(1).max()} at most"
    picture = heat(chosen.astype(float), tokens, columns, title=layer.name, high=1.0, words=words)
    return page.figure(picture, f"Bright: chosen; {words}.")


def routing(tokens: Sequence[str], layer: Layer) -> str:
    if layer.experts is None or layer.weights is None:
        return ""
    load = np.bincount(layer.experts.ravel(), minlength=layer.number)
    busiest = int(load.argmax())
    used = f"{int((load > 0).sum())} of {layer.number} experts are used"
    words = f"{layer.name}: {used}, the busiest is {busiest} with {load[busiest]} tokens."
    text = page.tokens(tokens, layer.experts, layer.weights, layer.number)
    names = [f"expert {i}" for i in range(layer.number)]
    picture = heat(by_expert(layer), names, tokens, title=layer.name, words=words)
    return page.paragraph(words) + text + page.details("Weights by expert", page.figure(picture, words))


def by_expert(layer: Layer) -> np.ndarray:
    """`[experts t]`: the weight of each expert for each token."""
    assert layer.experts is not None and layer.weights is not None
    out = np.zeros((len(layer.experts), layer.number))
    np.put_along_axis(out, layer.experts, layer.weights, axis=1)
    return out.T


def recurrence(tokens: Sequence[str], layer: Layer) -> str:
    if layer.decay is None or layer.beta is None:
        return ""
    heads = [f"head {i}" for i in range(layer.decay.shape[1])]
    keeps, writes = float(layer.decay.mean()), float(layer.beta.mean())
    decay = heat(layer.decay.T, heads, tokens, title=f"{layer.name}: kept", high=1.0, words=f"{keeps:.2f} on average")
    beta = heat(
        layer.beta.T,
        heads,
        tokens,
        title=f"{layer.name}: written",
        high=max(1.0, float(layer.beta.max())),
        words=f"{writes:.2f} on average",
    )
    return page.figure(
        decay, f"How much of its state a head keeps at each token, mean over channels: {keeps:.2f} on average."
    ) + page.figure(beta, f"How strongly it writes (beta): {writes:.2f} on average.")


def _mark(text: str) -> str:
    """A token for a narrow cell: white space made visible, long ones cut."""
    shown = text.replace("\n", "↵").replace("\t", "→").replace(" ", "·")
    return shown if len(shown) <= 14 else shown[:13] + "…"
