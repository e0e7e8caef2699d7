"""Runs of m tokens pooled into one entry each, for compressed attention (DeepSeek-V4, arXiv 2606.19348) and pooled indexers.

Window w of a document is its tokens `w m .. w m + m - 1`, counted from its first valid token, and exists once the last of them does. Its
entry is a mean of per-token values, weighted channel by channel:

    e_w = sum_j a_j v_j,    a = softmax_j(z_j + bias_j), in fp32

over the window's own m tokens, or, overlapping, over the m tokens before them as well: every token then brings two values, one for the
window after its own (the first half of the channels) and one for its own (the second half).

Whole sequences may hold many documents and padding anywhere: entries stand in the order of their last tokens. In a call with a cache,
entry w lies at place w; a window is pooled again whenever a call brings its last token, so nothing has to be undone for tokens that are
rejected: their entries are seen by no query before they are written again.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.cache import EMPTY
from jaxllm.ops.sparse_attention import rows_at


class Windows(NamedTuple):
    """Of each window `[b e]`: the index of its `last` token (EMPTY where there is none), its `number` and its document."""

    last: Array
    number: Array
    docs: Array


def whole_windows(positions: Array, segments: Array, m: int) -> tuple[Windows, Array]:
    """The complete windows of whole sequences, `e = max(t // m, 1)`; and `reach [b t]`: entries that end at or before each token."""
    b, t = positions.shape
    e = max(t // m, 1)
    ends = (segments > 0) & (positions % m == m - 1)
    reach = jnp.cumsum(ends, axis=1, dtype=jnp.int32)
    place = jnp.where(ends, reach - 1, e)
    index = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t))
    last = jax.vmap(lambda p, i: jnp.full(e, EMPTY, jnp.int32).at[p].set(i, mode="drop"))(place, index)
    at = jnp.minimum(last, t - 1)
    real = last < EMPTY
    number = jnp.where(real, jnp.take_along_axis(positions, at, axis=1) // m, 0)
    return Windows(last, number, jnp.where(real, jnp.take_along_axis(segments, at, axis=1), 0)), reach


def touched_windows(lengths: Array, new: Array, t: int, m: int, before: int) -> Windows:
    """The windows of which a call brings tokens: `new [b]` of t, behind `lengths [b]`. `last` counts in an array that begins `before`
    tokens earlier; docs are 1 where the call brings the window's last token, else 0."""
    number = lengths[:, None] // m + jnp.arange((t + m - 2) // m + 1, dtype=jnp.int32)
    end = (number + 1) * m
    return Windows(end - 1 - lengths[:, None] + before, number, (end <= (lengths + new)[:, None]).astype(jnp.int32))


def tokens_of(pools: Array, m: int, places: Array, positions: Array, valid: Array, last: Array | None = None) -> Array:
    """Tokens of chosen pools `[b t n]`, and of each query's own pool while that is not complete: int32 `[b t n m + m - 1]`, else EMPTY.

    Queries lie at `places [b t]` of the key axis; `last [b e]`: see `Windows`, None where pool w begins at place w m.
    """
    b, t, n = pools.shape
    first = pools * m
    if last is not None:
        at = jnp.minimum(pools, last.shape[1] - 1).reshape(b, t * n)
        first = jnp.take_along_axis(last, at, axis=1).reshape(b, t, n) - (m - 1)
    chosen = jnp.where((pools < EMPTY)[..., None], first[..., None] + jnp.arange(m, dtype=jnp.int32), EMPTY)
    tail, offset = jnp.where(valid, (positions + 1) % m, 0)[..., None], jnp.arange(m - 1, dtype=jnp.int32)
    own = jnp.where(offset < tail, places[..., None] - tail + 1 + offset, EMPTY)
    return jnp.concatenate([chosen.reshape(b, t, n * m), own], axis=-1)


def pools_of(tokens: Array, reach: Array) -> Array:
    """Which pools of a whole sequence their first `tokens [b t n]` belong to, with `reach` of `whole_windows`; EMPTY stays."""
    b, t, n = tokens.shape
    ended = jnp.pad(reach, ((0, 0), (1, 0)))[:, :-1]  # pools that end before each token
    at = jnp.minimum(tokens, ended.shape[1] - 1).reshape(b, t * n)
    return jnp.where(tokens < EMPTY, jnp.take_along_axis(ended, at, axis=1).reshape(b, t, n), EMPTY)


def pool_naive(values: Array, logits: Array, seen: Array) -> Array:
    """The truth, one softmax at a time: `values, logits [b e n c]`, `seen [b e n]` -> `[b e c]`."""
    scores = jnp.where(seen[..., None], logits.astype(jnp.float32), -1e30)
    return jnp.sum(jax.nn.softmax(scores, axis=2).astype(values.dtype) * values, axis=2)


def pool(values: Array, logits: Array, bias: Array, windows: Windows, *, overlap: bool) -> Array:
    """Entries `[b e c]` of `values, logits [b s w]` and `bias [m w]`, where w is c, or 2 c overlapping."""
    m, width = bias.shape
    c = width // 2 if overlap else width
    index = windows.last[..., None] + jnp.arange(1 - m, 1, dtype=jnp.int32)
    b, e = windows.last.shape

    def at(x: Array, places: Array) -> Array:
        return rows_at(x, jnp.clip(places, 0, x.shape[1] - 1).reshape(b, e * m)).reshape(b, e, m, -1)

    own = slice(width - c, width)
    parts = [(at(values[..., own], index), at(logits[..., own], index).astype(jnp.float32) + bias[:, own])]
    seen = jnp.ones((b, e, m), bool)
    if overlap:
        parts.insert(
            0, (at(values[..., :c], index - m), at(logits[..., :c], index - m).astype(jnp.float32) + bias[:, :c])
        )
        seen = jnp.concatenate([jnp.broadcast_to(windows.number[..., None] > 0, (b, e, m)), seen], axis=2)
    together, weights = (jnp.concatenate(x, axis=2) for x in zip(*parts, strict=True))
    return pool_naive(together, weights, seen)
