"""Attention over cached latents (multi-head latent attention, DeepSeek-V2, arXiv 2405.04434, section 2.1).

A token keeps a latent `c [r]` and one key `k_R [o]` shared by all heads. With `k_h = [UK_h c | k_R]` and `v_h = UV_h c`,

    s_h = scale (q_N,h . UK_h c + q_R,h . k_R),    o_h = sum_j softmax(s_h)_j UV_h c_j

*Expanded*: make every head's keys and values, then attend. *Absorbed*: move the products to the query's side, `q~_h = UK_h^T q_N,h`
and `o_h = UV_h (sum_j p_j c_j)`, which is multi-query attention on the latents themselves. Multiply-adds of t queries on s keys, per
head, besides `t r (n + v)` that both need for their own tokens:

    absorbed   t s (2 r + o)            expanded   t s (n + o + v) + s r (n + v)

So a decode step absorbs, and a chunk of a prompt expands from about `r (n + v) / (2 r - n - v)` queries on (DeepSeek-V3: 171).

Shapes: `q_n [b t h n]`, `q_r [b t h o]`, `c [b s r]`, `k_r [b s o]`, `up_k [h n r]`, `up_v [h r v]`, output `[b t h v]`.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxllm.ops.attention import LOWEST, attention_naive
from jaxllm.ops.blockwise import State, online_finish, online_start, online_step

BLOCK = 512  # latents expanded at a time: their keys and values stay near the cores, whatever the length of the cache
QUERIES = 256  # queries that meet a block of latents at a time
DIRECT = 16  # so few queries hold their scores on the whole cache at once


def expand(c: Array, k_r: Array, up_k: Array, up_v: Array) -> tuple[Array, Array]:
    """Keys `[b h s n+o]` and values `[b h s v]` of every head."""
    k_n = jnp.einsum("bsr,hnr->bhsn", c, up_k, preferred_element_type=jnp.float32).astype(c.dtype)
    value = jnp.einsum("bsr,hrv->bhsv", c, up_v, preferred_element_type=jnp.float32).astype(c.dtype)
    shared = jnp.broadcast_to(k_r[:, None].astype(c.dtype), (*k_n.shape[:3], k_r.shape[-1]))
    return jnp.concatenate([k_n, shared], axis=-1), value


def latent_naive(
    q_n: Array, q_r: Array, c: Array, k_r: Array, up_k: Array, up_v: Array, mask: Array, *, scale: float
) -> Array:
    """The truth: all keys and values, all scores; `mask [b t s]`."""
    key, value = (x.transpose(0, 2, 1, 3) for x in expand(c, k_r, up_k, up_v))
    return attention_naive(jnp.concatenate([q_n, q_r], axis=-1), key, value, mask, scale=scale)


def absorb(q_n: Array, up_k: Array) -> Array:
    """`q~ [b h t r]`, accumulated in fp32. Rows and queries form one axis: with two, XLA has no bf16 product by head on CPU."""
    b, t, h, n = q_n.shape
    q = jnp.einsum("mhn,hnr->hmr", q_n.reshape(b * t, h, n), up_k, preferred_element_type=jnp.float32)
    return q.reshape(h, b, t, -1).transpose(1, 0, 2, 3).astype(q_n.dtype)


def unabsorb(z: Array, up_v: Array) -> Array:
    """`o [b t h v]` from the weighted latents `z [b h t r]`."""
    b, h, t, r = z.shape
    out = jnp.einsum(
        "hmr,hrv->hmv", z.transpose(1, 0, 2, 3).reshape(h, b * t, r), up_v, preferred_element_type=jnp.float32
    )
    return out.reshape(h, b, t, -1).transpose(1, 2, 0, 3).astype(z.dtype)


def absorbed_is_cheaper(t: int, s: float, *, r: int, n: int, o: int, v: int) -> bool:
    """Whether t queries on s cached latents take fewer multiply-adds absorbed (see the module's equation)."""
    return t * (r * (n + v) + s * (2 * r + o)) <= s * (r * (n + v) + t * (n + o + v))


def attend_absorbed(
    q_n: Array, q_r: Array, c: Array, k_r: Array, up_k: Array, up_v: Array, mask: Array, *, scale: float
) -> Array:
    """Absorbed form in one piece, for a few queries on a whole cache, `mask [b t s]`.

    Heads and queries form one axis of each product, and latents and rotated keys are arrays of their own: slices of one array, or an
    axis of size 1, would be copied at every token.
    """
    b, t, h, _ = q_n.shape

    def flat(x: Array) -> Array:
        return x.reshape(b, h * t, -1)

    scores = jnp.einsum("bmr,bsr->bms", flat(absorb(q_n, up_k)), c, preferred_element_type=jnp.float32)
    turned = flat(q_r.transpose(0, 2, 1, 3))
    scores = (scores + jnp.einsum("bmo,bso->bms", turned, k_r, preferred_element_type=jnp.float32)) * scale
    scores = jnp.where(mask[:, None], scores.reshape(b, h, t, -1), 10 * LOWEST)
    top = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), LOWEST)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    z = jnp.einsum("bms,bsr->bmr", flat(weights).astype(c.dtype), c, preferred_element_type=jnp.float32)
    z = (z.reshape(b, h, t, -1) / jnp.where(total > 0, total, 1.0)).astype(q_n.dtype)
    return unabsorb(z, up_v)


def attend_latents(
    q_n: Array,
    q_r: Array,
    c: Array,
    k_r: Array,
    up_k: Array,
    up_v: Array,
    positions: Array,
    valid: Array,
    *,
    scale: float,
    block: int = BLOCK,
    queries: int = QUERIES,
    direct: int = DIRECT,
    absorbed: bool | None = None,
) -> Array:
    """Queries at `positions [b t]` (where `valid [b t]`) on a cache whose index is the position. `absorbed`: None = the cheaper form.

    Beyond a few queries the cache is met block by block with a running softmax, as far as the furthest query sees: no score matrix
    and no expanded cache is ever whole, and an empty end of the cache costs nothing.
    """
    b, t, h, n = q_n.shape
    s, r = c.shape[1:]
    v = up_v.shape[-1]
    if absorbed is None:
        absorbed = absorbed_is_cheaper(t, s, r=r, n=n, o=q_r.shape[-1], v=v)
    if absorbed and t <= direct:
        mask = (jnp.arange(s, dtype=jnp.int32) <= positions[:, :, None]) & valid[:, :, None]
        return attend_absorbed(q_n, q_r, c, k_r, up_k, up_v, mask, scale=scale)

    turned = q_r.transpose(0, 2, 1, 3)
    if absorbed:  # one kv head, h query heads
        q = jnp.concatenate([absorb(q_n, up_k), turned], axis=-1)[:, None]
    else:  # h kv heads, each with its own query head
        q = jnp.concatenate([q_n.transpose(0, 2, 1, 3), turned], axis=-1)[:, :, None]
    places = jnp.where(valid, positions, -1)
    out = _by_blocks(q, c, k_r, up_k, up_v, places, scale, absorbed, min(block, s), min(queries, t))
    if absorbed:
        return unabsorb(out[:, 0], up_v)
    return out[:, :, 0].transpose(0, 2, 1, 3)


def _by_blocks(
    q: Array,
    c: Array,
    k_r: Array,
    up_k: Array,
    up_v: Array,
    places: Array,
    scale: float,
    absorbed: bool,
    size: int,
    step: int,
) -> Array:
    """`q [b g r t k]` at `places [b t]` (-1: sees nothing) on the cache, `size` latents and `step` queries at a time.

    Latents are the outer loop: each is expanded once a call. A block of queries joins in where its last query sees the latents.
    """
    t, s = q.shape[3], c.shape[1]
    count, extra = -(-t // step), -t % step
    q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, extra), (0, 0)))
    q = jnp.moveaxis(q.reshape(*q.shape[:3], count, step, q.shape[-1]), 3, 0)
    places = jnp.pad(places, ((0, 0), (0, extra)), constant_values=-1)
    rows = jnp.moveaxis(places.reshape(places.shape[0], count, step), 1, 0)
    start = online_start((*q.shape[1:-1], c.shape[-1] if absorbed else up_v.shape[-1]), None)

    def meet(i: Array, states: State) -> State:
        first = jnp.minimum(
            i * size, s - size
        )  # the last block may overlap the one before it: what it repeats is masked
        here, shared = (lax.dynamic_slice_in_dim(x, first, size, 1) for x in (c, k_r))
        keys, values = (jnp.concatenate([here, shared], -1), here) if absorbed else expand(here, shared, up_k, up_v)
        index = first + jnp.arange(size, dtype=jnp.int32)

        def one(j: Array, states: State) -> State:
            seen = (index >= i * size) & (index <= rows[j][:, :, None])
            new = online_step(jax.tree.map(lambda x: x[j], states), q[j], keys, values, seen, scale, None)
            return jax.tree.map(lambda x, y: x.at[j].set(y), states, new)

        return lax.fori_loop(jnp.maximum(i * size - jnp.max(places[:, 0]), 0) // step, count, one, states)

    states = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), start)
    states = lax.fori_loop(0, jnp.max(places) // size + 1, meet, states)
    out, _ = online_finish(states, q.dtype)
    return jnp.moveaxis(out, 0, 3).reshape(*q.shape[1:4], count * step, -1)[:, :, :, :t]
