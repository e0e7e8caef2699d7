"""Attention of each query on a window of near tokens and on compressed entries of all before (DeepSeek-V4, arXiv 2606.19348).

    o_h[t] = sum_j p_j key_j,    p = softmax_j([scale q_h[t] . key_j, sink_h]),    key_j: the last W tokens, and entries

One softmax over both; keys are values; the sink has value 0. One kv head. Which entries: all that are complete, or those that an indexer
chose. A block of queries meets the W - 1 tokens before it, itself and its entries, so nothing grows with the square of the length but
the scores on entries, of which there is one for m tokens.

Shapes: `q [b t h k]`, `near [b W-1+t k]` (W - 1 tokens from before the call, then its own), `entries [b e k]`, output `[b t h k]`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxllm.ops.attention import LOWEST, normalised
from jaxllm.ops.mask import Mask, visible
from jaxllm.ops.sparse_attention import chosen_mask, rows_at
from jaxllm.ops.topk import Docs, reachable

SCORES = 2**22  # scores that a block of queries holds at a time
MOST = 256  # queries of a block: a block's window is its queries and W - 1 tokens more


class Far(NamedTuple):
    """Entries `[b e k]`, how many of them each query may see, `reach [b t]`, documents of queries and entries (None: all one), and the
    `chosen` ones `[b t n]` (None: all)."""

    entries: Array
    reach: Array
    docs: Docs | None
    chosen: Array | None
    gather: bool = False


class Near(NamedTuple):
    """Keys `[b W-1+t k]`, and the place of each in its document: positions and document ids (0 = none) `[b W-1+t]`."""

    keys: Array
    positions: Array
    docs: Array


def weights_naive(
    q: Array, near: Near, far: Far | None, sinks: Array, *, window: int, scale: float
) -> tuple[Array, Array]:
    """fp32 `[b t h s]`, by every key beside every other and one mask, and the keys `[b s k]`: the near ones, then all entries."""
    t = q.shape[1]
    keys, seen = (
        near.keys,
        visible(near.positions[:, -t:], near.positions, near.docs[:, -t:], near.docs, Mask(window=window)),
    )
    if far is not None:
        e = far.entries.shape[1]
        more = reachable(far.reach, e, far.docs)
        more = more if far.chosen is None else chosen_mask(far.chosen, e)
        keys, seen = jnp.concatenate([keys, far.entries], 1), jnp.concatenate([seen, more], 2)
    scores = jnp.where(seen[:, :, None], scale * jnp.einsum("bthk,bsk->bths", q, keys), 10 * LOWEST)
    sink = jnp.broadcast_to(sinks[:, None], (*scores.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, sink], -1).astype(jnp.float32), axis=-1)[..., :-1]
    return jnp.where(seen[:, :, None], weights, 0), keys


def compressed_naive(q: Array, near: Near, far: Far | None, sinks: Array, *, window: int, scale: float) -> Array:
    """The truth."""
    weights, keys = weights_naive(q, near, far, sinks, window=window, scale=scale)
    return jnp.einsum("bths,bsk->bthk", weights.astype(q.dtype), keys)


def attend_compressed(
    q: Array, near: Near, far: Far | None, sinks: Array, *, window: int, scale: float, want_mass: bool = False
) -> tuple[Array, Array | None]:
    """Output, and the weights on the chosen (or all) entries summed over heads, fp32 `[b t n]`, where asked for.

    Nothing of a block is kept for the backward.
    """
    b, t, h, k = q.shape
    many = 0 if far is None else far.entries.shape[1] if far.chosen is None or not far.gather else far.chosen.shape[2]
    c = max(1, min(t, MOST, SCORES // (b * h * (window + many))))
    extra = -t % c

    def padded(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, extra)) + ((0, 0),) * (x.ndim - 2))

    near = Near(*(padded(x) for x in near))
    mine: dict[str, Array] = {"q": padded(q)}
    if far is not None:
        mine["reach"] = padded(far.reach)
        if far.chosen is not None:
            mine["index"] = padded(far.chosen)
        if far.docs is not None:
            mine["docs"] = padded(far.docs[0])

    @jax.checkpoint
    def block(start: Array, mine: dict[str, Array], near: Near, entries: Array | None) -> tuple[Array, Array | None]:
        part = {name: lax.dynamic_slice_in_dim(x, start, c, 1) for name, x in mine.items()}
        tokens = Near(*(lax.dynamic_slice_in_dim(x, start, window - 1 + c, 1) for x in near))
        own = (tokens.positions[:, window - 1 :], tokens.docs[:, window - 1 :])
        seen = visible(own[0], tokens.positions, own[1], tokens.docs, Mask(window=window))
        scores = jnp.where(seen[:, :, None], _scores(part["q"], tokens.keys, scale), 10 * LOWEST)
        if far is None or entries is None:
            weights, total, _ = normalised(scores, sinks[:, None])
            return (_values(weights, tokens.keys) / total).astype(q.dtype), None
        e = entries.shape[1]
        if far.gather and far.chosen is not None:
            seen, keys = part["index"] < e, rows_at(entries, part["index"])
        else:
            docs = None if far.docs is None else (part["docs"], far.docs[1])
            seen = reachable(part["reach"], e, docs) if far.chosen is None else chosen_mask(part["index"], e)
            keys = entries
        more = jnp.where(seen[:, :, None], _scores(part["q"], keys, scale), 10 * LOWEST)
        weights, total, _ = normalised(jnp.concatenate([scores, more], axis=-1), sinks[:, None])
        here, there = weights[..., : scores.shape[-1]], weights[..., scores.shape[-1] :]
        out = (_values(here, tokens.keys) + _values(there, keys)) / total
        mass = jnp.sum(there / total, axis=2) if want_mass else None
        if mass is not None and far.chosen is not None and not far.gather:
            mass = jnp.take_along_axis(mass, jnp.minimum(part["index"], e - 1), axis=-1)
            mass = jnp.where(part["index"] < e, mass, 0.0)
        return out.astype(q.dtype), mass

    entries = None if far is None else far.entries
    if c == t:
        return block(jnp.int32(0), mine, near, entries)
    starts = jnp.arange(0, t + extra, c, dtype=jnp.int32)
    out, mass = lax.map(lambda start: block(start, mine, near, entries), starts)

    def joined(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(b, -1, *x.shape[3:])[:, :t]

    return joined(out), None if mass is None else joined(mass)


def mass_on_entries(
    q: Array, at: np.ndarray, near: Near, far: Far, sinks: Array, *, window: int, scale: float
) -> tuple[Array, Array]:
    """Of the few queries `q [b n h k]` at the places `at` of a call: weights on every entry they see, summed over heads, fp32 `[b n e]`,
    and which those are, bool."""
    own = at[:, None] + np.arange(window)  # `near` begins W - 1 tokens before the call
    last = at + window - 1
    docs, positions = near.docs[:, own], near.positions[:, own]
    seen = (docs == near.docs[:, last, None]) & (docs > 0)
    seen &= Mask(window=window).sees(near.positions[:, last, None], positions)
    scores = jnp.where(seen[:, :, None], _scores(q, near.keys[:, own], scale), 10 * LOWEST)
    reached = None if far.docs is None else (far.docs[0][:, at], far.docs[1])
    there = reachable(far.reach[:, at], far.entries.shape[1], reached)
    more = jnp.where(there[:, :, None], _scores(q, far.entries, scale), 10 * LOWEST)
    weights, total, _ = normalised(jnp.concatenate([scores, more], axis=-1), sinks[:, None])
    return jnp.sum(weights[..., window:] / total, axis=2), there


def _scores(q: Array, keys: Array, scale: float) -> Array:
    """fp32 `[b t h n]` on keys for all `[b n k]` or of each query `[b t n k]`."""
    if keys.ndim == 4:
        return scale * jnp.einsum("bthk,btnk->bthn", q, keys, preferred_element_type=jnp.float32)
    b, t, h, k = q.shape
    dots = jnp.einsum("bmk,bsk->bms", q.reshape(b, t * h, k), keys, preferred_element_type=jnp.float32)
    return scale * dots.reshape(b, t, h, -1)


def _values(weights: Array, keys: Array) -> Array:
    """fp32 `[b t h k]`."""
    if keys.ndim == 4:
        return jnp.einsum("bthn,btnk->bthk", weights.astype(keys.dtype), keys, preferred_element_type=jnp.float32)
    b, t, h, n = weights.shape
    rows = weights.reshape(b, t * h, n).astype(keys.dtype)
    return jnp.einsum("bms,bsk->bmk", rows, keys, preferred_element_type=jnp.float32).reshape(b, t, h, -1)
