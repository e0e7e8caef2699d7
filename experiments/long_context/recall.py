"""How many needles of a haystack a model finds, by how far back they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

PARTS = 4  # of the haystack
ROWS = 4  # read at a time


class Needles(NamedTuple):
    """tokens `[n t]`; at `[n q]`: the token behind which an answer is due; depth `[n q]`: where its needle lies, 0 = farthest, 1 = end."""

    tokens: np.ndarray
    at: np.ndarray
    depth: np.ndarray


def needles(tokenizer: Any, pairs: int, length: int, count: int) -> Needles:
    """`count` haystacks of `length` tokens with `pairs` needles, all asked for in another order, as the models were trained."""
    from jaxllm.data.synthetic import KEYS, VALUES, haystack

    rng, rows, at, depth = np.random.default_rng([pairs, length]), [], [], []
    begin = len(tokenizer.prompt("a")) - 1
    filler = length - begin - 4 * pairs - 1
    for _ in range(count):
        keys = [KEYS[i] for i in rng.permutation(len(KEYS))[:pairs]]
        values = [VALUES[i] for i in rng.integers(len(VALUES), size=pairs)]
        texts = [k + v for k, v in zip(keys, values, strict=True)]
        hay = haystack(rng, texts, np.sort(rng.integers(filler + 1, size=pairs)), filler)
        asked = rng.permutation(pairs)
        rows.append(tokenizer.prompt(hay + "?" + "".join(texts[i] for i in asked)))
        at.append(begin + len(hay) + 1 + 2 * np.arange(pairs))
        depth.append([hay.index(texts[i]) / len(hay) for i in asked])
    return Needles(np.array(rows, np.int32), np.array(at, np.int32), np.array(depth))


def found(model: Any, params: Any, asked: Needles) -> np.ndarray:
    """bool `[n q]`: is the answer the likeliest token?"""
    import jax
    import jax.numpy as jnp

    from jaxllm.layers.base import Context

    @jax.jit
    def read(params: Any, tokens: Any, at: Any) -> Any:
        hidden = model.apply({"params": params}, Context.whole(tokens))[1].logits
        return jnp.argmax(jnp.take_along_axis(hidden, at[..., None], axis=1), axis=-1)

    out = []
    for i in range(0, len(asked.tokens), ROWS):
        tokens, at = asked.tokens[i : i + ROWS], asked.at[i : i + ROWS]
        out.append(np.asarray(read(params, tokens, at)) == np.take_along_axis(tokens, at + 1, axis=1))
    return np.concatenate(out)


def by_part(right: np.ndarray, depth: np.ndarray) -> list[float]:
    """Share found in each equal part of the haystack, the farthest first."""
    part = np.minimum((depth * PARTS).astype(int), PARTS - 1)
    return [float(right[part == i].mean()) if (part == i).any() else float("nan") for i in range(PARTS)]


def asks(run: Path, models: Mapping[str, Mapping[str, Any]], lengths: Sequence[int], count: int) -> dict[str, Any]:
    """Of a run under each of some overrides: share found for every length, and at the last one by part of the haystack."""
    from jaxllm.tasks.source import open_source

    out = {}
    for name, overrides in models.items():
        source = open_source(run, overrides={**overrides, "model.max_seq_len": None})
        shares, parts = [], []
        for length in lengths:
            asked = needles(source.tokenizer, int(source.config["data"]["length"]), length, count)
            right = found(source.model, source.params, asked)
            shares.append(float(right.mean()))
            parts = by_part(right, asked.depth)
        out[name] = {"found": shares, "parts": parts}
    return out
