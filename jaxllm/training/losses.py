"""Losses on arrays: sums over tokens and their denominators, never means of means.

    loss = sum over all micro-batches and devices of sum_i w_i l_i,   divided once by   sum_i w_i

A mean of per-batch means weighs a token by how empty its batch was. So a loss returns its sum, and the one division is
by a count that spans the whole step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.layers.base import Context
from jaxllm.layers.mtp import ahead, within
from jaxllm.mesh import shard
from jaxllm.model import LanguageModel, Out
from jaxllm.ops.cross_entropy import DEFAULT_CHUNK, TokenStats, chunked_cross_entropy

Batch = Mapping[str, jax.Array]


def trained_tokens(batch: Batch) -> jax.Array:
    """Sum of label weights, float32: how many next-token predictions the batch trains."""
    return jnp.sum(batch["weights"], dtype=jnp.float32)


def valid_tokens(batch: Batch) -> jax.Array:
    """Tokens that are not padding, float32: what a layer's `loss/*` sums run over."""
    return jnp.sum(batch["segments"] > 0, dtype=jnp.float32)


def mean(total: jax.Array, count: jax.Array) -> jax.Array:
    """`total / count`, and 0 for a batch without a single counted token."""
    return total / jnp.maximum(count, jnp.finfo(jnp.float32).tiny)


def backbone(model: LanguageModel, params: Mapping[str, Any], ctx: Context, rngs: Any = None) -> Out:
    """Everything but the head, on whole sequences: `Out.hidden [b t d]` and the layers' reports."""
    result: Any = model.apply({"params": params}, ctx, method="backbone", rngs=rngs)
    return result[1]


def head(model: LanguageModel, params: Mapping[str, Any], hidden: jax.Array) -> jax.Array:
    """The head's matrix for a loss by chunks: gathered over the axis that splits its rows once, before the chunks, and split over the
    vocabulary."""
    return shard(model.head_weight(params).astype(hidden.dtype), None, "act_vocab")


def next_token(
    model: LanguageModel,
    params: Mapping[str, Any],
    hidden: jax.Array,
    batch: Batch,
    *,
    z_loss: float | jax.Array = 0.0,
    chunk: int = DEFAULT_CHUNK,
) -> tuple[jax.Array, TokenStats]:
    """Sum of weighted next-token losses from hidden states `[b t d]`; about `chunk` tokens' logits live at a time."""
    return chunked_cross_entropy(
        hidden,
        head(model, params, hidden),
        batch["labels"],
        batch["weights"],
        valid_vocab=model.vocab_size,
        softcap=model.logit_softcap,
        z_loss=z_loss,
        chunk=chunk,
    )


def labels_ahead(batch: Batch, k: int) -> dict[str, jax.Array]:
    """Labels and weights `k` positions later, weight 0 where that is another document: what MTP module k is judged by."""
    weights = jnp.where(within(batch["segments"], k), ahead(batch["weights"], k), 0.0)
    return {"labels": ahead(batch["labels"], k), "weights": weights}


def top_tokens(
    model: LanguageModel, params: Mapping[str, Any], hidden: jax.Array, chunk: int = DEFAULT_CHUNK
) -> jax.Array:
    """The likeliest next token of each position, int32 `[b t]`, from hidden states `[b t d]`; logits of about `chunk` tokens at a time."""

    def logits(h: jax.Array) -> Any:
        return model.apply({"params": params}, h, method="head")

    return _best(hidden, logits, chunk)


def top_of(hidden: jax.Array, w: jax.Array, chunk: int = DEFAULT_CHUNK) -> jax.Array:
    """The same for a head `[d v]` of its own."""
    return _best(hidden, lambda h: jnp.einsum("btd,dv->btv", h, w, preferred_element_type=jnp.float32), chunk)


def _best(hidden: jax.Array, logits: Callable[[jax.Array], jax.Array], chunk: int) -> jax.Array:
    b, t, d = hidden.shape
    count = -(-t // max(1, chunk // b))
    width = -(-t // count)
    cut = jnp.pad(hidden, ((0, 0), (0, count * width - t), (0, 0))).reshape(b, count, width, d)

    def best(h: jax.Array) -> jax.Array:
        return jnp.argmax(logits(h), axis=-1).astype(jnp.int32)

    return jnp.moveaxis(jax.lax.map(best, jnp.moveaxis(cut, 1, 0)), 0, 1).reshape(b, -1)[:, :t]


def bits_per_byte(nll_sum: float, byte_sum: float) -> float:
    """Bits the model needs per byte of text: `nll / (ln 2 * bytes)`. Independent of the tokenizer; nan without
    bytes."""
    return nll_sum / (math.log(2.0) * byte_sum) if byte_sum > 0 else math.nan


def perplexity(nll_mean: float) -> float:
    """`exp(nll)`, inf where that overflows."""
    try:
        return math.exp(nll_mean)
    except OverflowError:
        return math.inf
