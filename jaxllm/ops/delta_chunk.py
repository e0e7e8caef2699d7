"""The gated delta rule, C tokens at once by matrix products: the WY form of `delta_rule.py`, safe and fast, with its own backward.

In a chunk, with A and M as there and `T = (I + A)^{-1}`, only the state S is sequential over chunks:

    W = T (beta e^G K),  U = T (beta V);    V' = U - W S;    O = (e^G Q) S + M V';    S <- e^{G_C} S + (e^{G_C - G} K)^T V'

Backward, with dS the cotangent of the state after the chunk, again sequential in dS alone:

    dV' = M^T dO + (e^{G_C - G} K) dS;    dB = T^T dV';    dS <- e^{G_C} dS + (e^G Q)^T dO - (beta e^G K)^T dB
    dM = dO V'^T,   dA = -dB V'^T;    dg = reversed running sum of  q dq + (beta k) d(beta k) - k dk  (k as a key), channel by channel

the last because a decay only ever enters as `e^{G_r - G_i}` between what reads at r and what was written at i. Kept for the backward: the
inputs, and T, M, V' and the states between chunks, all linear in the length.

How A and M are made is in `delta_pairs.py`. Documents: pairs of different ones count 0, and a chunk's state knows the last one alone.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxllm.ops.delta_pairs import Decays, decays_of, dot, pair_products, pair_products_pullback
from jaxllm.ops.delta_pallas import chunk_matrices
from jaxllm.ops.delta_rule import empty_state, recurrent

BLOCK = 64  # chunks x rows x heads that are worked on at once: bounds the memory of what is not kept


class Chunked(NamedTuple):
    """Static choices. chunk: C, a power of two. bounded: no log-decay is below -5. block: chunks at once. scan: where no derivative
    is asked for, go token by token. pallas: make T and M by the kernel of `delta_pallas.py`.
    """

    chunk: int
    bounded: bool
    block: int
    scan: bool
    pallas: bool


class Documents(NamedTuple):
    """What a chunk's tokens may see, bool: pairs of one document `[b 1 n C C]`; tokens of the document that the chunk begins in, and of
    the one that it ends in, `[b 1 n C 1]`.
    """

    number: Array  # how many began in the chunk so far, int `[b 1 n C 1]`
    same: Array
    old: Array
    last: Array

    @classmethod
    def of(cls, first: Array) -> "Documents":
        """first: bool `[b 1 n C]`."""
        number = jnp.cumsum(first.astype(jnp.int32), axis=-1)[..., None]
        return cls(number, number == number.swapaxes(-1, -2), number == 0, number == number[..., -1:, :])


def inverse(lower: Array) -> Array:
    """`(I + A)^{-1}` of strictly lower `A [.. C C]`, C a power of two.

    Tiles of up to 16: `(I - A)(I + A^2)(I + A^4)(I + A^8)`, exact since A^16 = 0. Then two tiles at a time: the lower left of the inverse
    of `[[P, 0], [R, Q]]` is `-Q^{-1} R P^{-1}`.
    """
    c = lower.shape[-1]
    size = min(16, c)

    def tiles(i: int, j: int, step: int) -> Array:
        return jnp.stack([lower[..., n + i : n + i + size, n + j : n + j + size] for n in range(0, c, step)], axis=-3)

    power = tiles(0, 0, size)
    out, reach = jnp.eye(size) - power, 2
    while reach < size:
        power = dot("...ri,...ij->...rj", power, power)
        out, reach = out + dot("...ri,...ij->...rj", out, power), 2 * reach
    while size < c:
        left, right = out[..., 0::2, :, :], out[..., 1::2, :, :]
        below = -dot("...ri,...ij,...jl->...rl", right, tiles(size, 0, 2 * size), left)
        top = jnp.concatenate([left, jnp.zeros_like(left)], axis=-1)
        out, size = jnp.concatenate([top, jnp.concatenate([below, right], axis=-1)], axis=-2), 2 * size
    return out[..., 0, :, :]


class Parts(NamedTuple):
    """A block's operands, fp32 `[b h n C ..]`: what reads the state, what is written to it, and the decays."""

    readers: Array  # beta k and q `[.. C 2 k]`
    k: Array
    v: Array
    beta: Array  # [.. C 1]
    decays: Decays
    documents: Documents | None

    def old(self, x: Array) -> Array:
        return x if self.documents is None else jnp.where(self.documents.old, x, 0.0)

    def last(self, x: Array) -> Array:
        return x if self.documents is None else jnp.where(self.documents.last, x, 0.0)

    def seen(self, x: Array) -> Array:
        return x if self.documents is None else jnp.where(self.documents.same, x, 0.0)

    @property
    def queries(self) -> Array:
        """`e^G Q`, zero where the state is of another document."""
        return self.old(self.readers[..., 1, :] * self.decays.prefix)

    @property
    def removers(self) -> Array:
        """`beta e^G K`."""
        return self.old(self.readers[..., 0, :] * self.decays.prefix)

    @property
    def writers(self) -> Array:
        """`e^{G_C - G} K`."""
        return self.last(self.k * self.decays.suffix)

    @property
    def total(self) -> Array:
        """`e^{G_C}` `[b h n k 1]`."""
        total = self.decays.total
        if self.documents is not None:
            total = jnp.where(self.documents.old[..., -1, :], total, 0.0)
        return total[..., None]


def _parts(block: tuple[Array, ...], first: Array | None, cfg: Chunked) -> Parts:
    """From a block's q, k, v, g, beta `[b h n C ..]` (first `[b 1 n C]`), in any dtype."""
    q, k, v, g, beta = (x.astype(jnp.float32) for x in block)
    documents = None if first is None else Documents.of(first)
    decays = decays_of(g, cfg.bounded, None if documents is None else documents.number)
    return Parts(jnp.stack([beta * k, q], axis=-2), k, v, beta, decays, documents)


def _matrices(parts: Parts) -> tuple[Array, Array]:
    """T and M `[b h n C C]`."""
    lower, scores = pair_products(parts.readers, parts.k, parts.decays)
    return inverse(jnp.tril(parts.seen(lower), -1)), jnp.tril(parts.seen(scores))


def _forward(state: Array, parts: Parts, t: Array, scores: Array) -> tuple[Array, Array, tuple[Array, ...]]:
    """State after the block, outputs, and what the backward needs: T, M `[.. C C]`, V' and the state before every chunk."""
    w = dot("...ri,...ik->...rk", t, parts.removers)
    u = dot("...ri,...iv->...rv", t, parts.beta * parts.v)

    def step(s: Array, x: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        w, u, writers, total = x
        new = u - dot("...rk,...kv->...rv", w, s)
        return s * total + dot("...ik,...iv->...kv", writers, new), (s, new)

    xs = tuple(jnp.moveaxis(x, 2, 0) for x in (w, u, parts.writers, parts.total))
    state, (states, new) = lax.scan(step, state, xs)
    states, new = jnp.moveaxis(states, 0, 2), jnp.moveaxis(new, 0, 2)
    out = dot("...rk,...kv->...rv", parts.queries, states) + dot("...ri,...iv->...rv", scores, new)
    return state, out, (t, scores, new, states)


def _backward(ds: Array, d_out: Array, parts: Parts, kept: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
    """Cotangents of the state before the block and of q, k, v, g, beta, from those of the state after it and of the outputs."""
    t, scores, new, states = kept
    w = dot("...ri,...ik->...rk", t, parts.removers)
    seen_out = dot("...ri,...rv->...iv", scores, d_out)
    from_out = dot("...rk,...rv->...kv", parts.queries, d_out)

    def step(ds: Array, x: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        w, seen_out, from_out, writers, total = x
        d_new = seen_out + dot("...ik,...kv->...iv", writers, ds)
        return ds * total + from_out - dot("...rk,...rv->...kv", w, d_new), (ds, d_new)

    xs = tuple(jnp.moveaxis(x, 2, 0) for x in (w, seen_out, from_out, parts.writers, parts.total))
    ds, (after, d_new) = lax.scan(step, ds, xs, reverse=True)
    after, d_new = jnp.moveaxis(after, 0, 2), jnp.moveaxis(d_new, 0, 2)

    db = dot("...ri,...rv->...iv", t, d_new)
    d_lower = jnp.tril(parts.seen(-dot("...rv,...iv->...ri", db, new)), -1)
    d_scores = jnp.tril(parts.seen(dot("...rv,...iv->...ri", d_out, new)))
    d_readers, d_key = pair_products_pullback(parts.readers, parts.k, parts.decays, d_lower, d_scores)
    prefix, suffix = parts.decays.prefix, parts.decays.suffix
    d_removed = d_readers[..., 0, :] - prefix * parts.old(dot("...rv,...kv->...rk", db, states))
    dq = d_readers[..., 1, :] + prefix * parts.old(dot("...rv,...kv->...rk", d_out, states))
    d_written = suffix * parts.last(dot("...iv,...kv->...ik", new, after))
    d_key = d_key + d_written

    d_log = parts.readers[..., 1, :] * dq + parts.readers[..., 0, :] * d_removed - parts.k * d_key
    end = jnp.sum(parts.k * d_written, axis=-2) + jnp.sum(states * parts.total * after, axis=-1)
    d_log = d_log.at[..., -1, :].add(end)
    dg = _later_sums(d_log, parts, scalar=prefix.shape[-1] == 1)
    dk = parts.beta * d_removed + d_key
    d_beta = jnp.sum(parts.k * d_removed, axis=-1, keepdims=True) + jnp.sum(parts.v * db, axis=-1, keepdims=True)
    return ds, (dq, dk, parts.beta * db, dg, d_beta)


def _later_sums(d_log: Array, parts: Parts, scalar: bool) -> Array:
    """`dg_i = sum_{r >= i} dG_r` over the tokens of i's document."""
    if scalar:
        d_log = jnp.sum(d_log, axis=-1, keepdims=True)
    c = d_log.shape[-2]
    later = jnp.tril(jnp.ones((c, c)))
    return dot("...ri,...rk->...ik", later if parts.documents is None else parts.seen(later), d_log)


# ---- blocks of chunks, and the derivative rule -------------------------------------------------------------------


def _blocks(x: Array, cfg: Chunked) -> Array:
    """`[b t h m]` -> `[blocks, b h n C m]`."""
    b, t, h, m = x.shape
    n = t // (cfg.chunk * cfg.block)
    return x.reshape(b, n, cfg.block, cfg.chunk, h, m).transpose(1, 0, 4, 2, 3, 5)


def _unblocks(x: Array) -> Array:
    """The inverse of `_blocks`."""
    n, b, h, block, chunk, m = x.shape
    return x.transpose(1, 0, 3, 4, 2, 5).reshape(b, n * block * chunk, h, m)


def _over_blocks(step: Any, start: Array, xs: Any, reverse: bool = False) -> tuple[Array, Any]:
    """`lax.scan`, without a loop where there is one block."""
    if jax.tree.leaves(xs)[0].shape[0] > 1:
        return lax.scan(step, start, xs, reverse=reverse)
    end, ys = step(start, jax.tree.map(lambda x: x[0], xs))
    return end, jax.tree.map(lambda y: y[None], ys)


def _all_blocks(parts: tuple[Array, ...], first: Array | None, cfg: Chunked) -> tuple[tuple[Array, ...], Array | None]:
    split = tuple(_blocks(x, cfg) for x in parts)
    return split, None if first is None else _blocks(first[:, :, None, None], cfg)[..., 0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(cfg: Chunked, state: Array, parts: tuple[Array, ...], first: Array | None) -> tuple[Array, Array]:
    if cfg.scan:
        q, k, v, g, beta = parts
        return recurrent(q, k, v, g, beta[..., 0], first, state)
    return _chunked_forward(cfg, state, parts, first)[0]


def _chunked_forward(
    cfg: Chunked, state: Array, parts: tuple[Array, ...], first: Array | None
) -> tuple[tuple[Array, Array], Any]:
    def step(s: Array, x: Any) -> tuple[Array, Any]:
        block, first = x
        made = _parts(block, first, cfg)
        if cfg.pallas:
            q, k, _, g, beta = (x.astype(jnp.float32) for x in block)
            number = None if made.documents is None else made.documents.number
            matrices = chunk_matrices(q, k, g, beta, number, cfg.bounded)
        else:
            matrices = _matrices(made)
        s, out, kept = _forward(s, made, *matrices)
        return s, (out.astype(parts[2].dtype), kept)

    state, (out, kept) = _over_blocks(step, state, _all_blocks(parts, first, cfg))
    return (_unblocks(out), state), (parts, first, kept)


def _chunked_backward(
    cfg: Chunked, saved: Any, cotangents: tuple[Array, Array]
) -> tuple[Array, tuple[Array, ...], None]:
    parts, first, kept = saved
    d_out, d_state = cotangents

    def step(ds: Array, x: Any) -> tuple[Array, tuple[Array, ...]]:
        (block, first), kept, d_out = x
        ds, grads = _backward(ds, d_out.astype(jnp.float32), _parts(block, first, cfg), kept)
        return ds, tuple(g.astype(x.dtype) for g, x in zip(grads, block, strict=True))

    xs = (_all_blocks(parts, first, cfg), kept, _blocks(d_out, cfg))
    d_state, grads = _over_blocks(step, d_state, xs, reverse=True)
    return d_state, tuple(map(_unblocks, grads)), None


_chunked.defvjp(_chunked_forward, _chunked_backward)


def chunked(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    first: Array | None = None,
    state: Array | None = None,
    *,
    chunk: int = 64,
    bounded: bool = False,
    scan: bool = False,
    pallas: bool = False,
) -> tuple[Array, Array]:
    """`recurrent` of `delta_rule.py`, in chunks of `chunk` tokens, a power of two; products and state are fp32 whatever the inputs.

    bounded: promises that no log-decay is below -5 (see `delta_pairs.py`). scan: run `recurrent` itself where no derivative is asked for.
    pallas: by the kernel of `delta_pallas.py`.
    """
    b, t, h, _ = k.shape
    chunk = min(chunk, 1 << max(t - 1, 0).bit_length())
    count = -(-t // chunk)
    block = min(count, max(1, BLOCK // (b * h)))
    pad = -t % (chunk * block)

    def padded(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2)) if pad else x

    g = g if g.ndim == k.ndim else g[..., None]
    args = tuple(padded(x) for x in (q, k, v, g, beta[..., None]))
    start = empty_state(k, v) if state is None else state.astype(jnp.float32)
    out, end = _chunked(
        Chunked(chunk, bounded, block, scan, pallas), start, args, None if first is None else padded(first)
    )
    return out[:, :t], end
