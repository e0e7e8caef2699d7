"""What a router did, as numbers: choices of each token, by kind of text and by kind of token, and which experts go together."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

# Kinds of tokens that need no parser: what a piece of text looks like.
TOKEN_KINDS: dict[str, str] = {
    "space, indent": r"\s+",
    "word": r"\s*[A-Za-z]+",
    "digits": r"\s*\d+",
    "brackets": r"\s*[()\[\]{}]+\s*",
    "punctuation": r"\s*[^\w\s]+\s*",
}
OTHER = "mixed"


def kind_of(text: str) -> str:
    """The first of `TOKEN_KINDS` that the whole token matches, or `mixed`."""
    return next((name for name, form in TOKEN_KINDS.items() if re.fullmatch(form, text)), OTHER)


def reader(model: Any, length: int) -> Callable[[Any, Sequence[int]], tuple[np.ndarray, np.ndarray]]:
    """`(params, ids) -> (experts, weights)`, both `[layers n k]`, of up to any number of ids: rows of `length`, each a document.

    Layers without experts are left out; of the others the order is that of the model.
    """
    import jax
    import jax.numpy as jnp

    from jaxllm.layers.base import Context
    from jaxllm.training.losses import backbone

    @jax.jit
    def read(params: Any, tokens: Any, segments: Any) -> Any:
        out = backbone(model, params, Context.whole(tokens, segments, capture=("routing",)))
        return ordered(out.capture, "experts"), ordered(out.capture, "weights")

    def ordered(capture: Mapping[str, Any], name: str) -> Any:
        layers = []
        for i, group in enumerate(model.groups):
            parts = [capture.get(f"g{i}/b{j}/ffn/{name}") for j in range(len(group.period))]
            layers += [part[n] for n in range(group.repeats) for part in parts if part is not None]
        return jnp.stack(layers)  # [layers b t k]

    def call(params: Any, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        found: list[tuple[np.ndarray, np.ndarray]] = []
        for start in range(0, len(ids), length):
            row = np.asarray(ids[start : start + length], np.int32)
            tokens, segments = np.zeros((1, length), np.int32), np.zeros((1, length), np.int32)
            tokens[0, : len(row)], segments[0, : len(row)] = row, 1
            e, w = (np.asarray(a)[:, 0, : len(row)] for a in read(params, tokens, segments))
            found.append((e, w))
        experts, weights = (np.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
        return experts, weights

    return call


def shares(experts: np.ndarray, number: int) -> np.ndarray:
    """`[layers n k]` -> `[layers e]`: how often each expert was chosen, in times an even share."""
    counts = np.stack([np.bincount(layer.ravel(), minlength=number) for layer in experts])
    return counts * number / np.maximum(counts.sum(-1, keepdims=True), 1)


def together(experts: np.ndarray, number: int) -> np.ndarray:
    """`[n k]` of one layer -> `[e e]`: of the tokens that chose the row's expert, the share that also chose the column's."""
    chosen = np.zeros((len(experts), number))
    np.put_along_axis(chosen, experts, 1.0, axis=-1)
    both = chosen.T @ chosen
    alone = np.diag(both).copy()
    np.fill_diagonal(both, 0.0)
    return both / np.maximum(alone[:, None], 1.0)


def difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Total variation between two routings `[layers e]` of shares: 0 where alike, 1 where no expert is in common."""
    number = a.shape[-1]
    return 0.5 * np.abs(a - b).sum(-1) / number


def by_kind(texts: Sequence[str], experts: np.ndarray, number: int) -> dict[str, np.ndarray]:
    """`{kind of token: shares [layers e]}` for tokens with these texts, kinds with ten tokens and more."""
    kinds = np.array([kind_of(text) for text in texts])
    names = [name for name in (*TOKEN_KINDS, OTHER) if np.sum(kinds == name) >= 10]
    return {name: shares(experts[:, kinds == name], number) for name in names}


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token, by itself; bytes that are no character alone show as the replacement sign."""
    return [tokenizer.decode([int(i)]) for i in ids]
