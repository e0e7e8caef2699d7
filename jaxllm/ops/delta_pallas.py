"""The matrices of every chunk of the gated delta rule, T and M of `delta_chunk.py`, in one Pallas kernel for GPUs and TPUs.

A program makes one chunk of one head: decays, products of all pairs, the inverse. What XLA writes to memory between these stays on the
chip, and all chunks go at once; the state's walk over the chunks is left to XLA, which has it in few large products.

Everything is in tiles of 16 tokens, read and written through references, since that is what both compilers take. Between tiles both
exponents are sums of one pair's log-decays and never positive. Within a tile a bounded gate is factored around the middle row (no
exponent leaves [-40, 40]); with an unbounded one the tile goes column by column, and a pair's exponent is made as a sum too: the difference
of two long sums would lose what the last tokens add.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jaxllm.ops import triton
from jaxllm.ops.delta_pairs import TILE


def _dot(a: Array, b: Array, transposed: bool = False) -> Array:
    """`a @ b`, or `a @ b.T`."""
    axes = ((1,), (1 if transposed else 0,))
    return lax.dot_general(a, b, (axes, ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _lower(size: int, strict: bool) -> Array:
    row = lax.broadcasted_iota(jnp.int32, (size, size), 0)
    column = lax.broadcasted_iota(jnp.int32, (size, size), 1)
    return row > column if strict else row >= column


def _kernel(
    q_ref: Any, k_ref: Any, g_ref: Any, beta_ref: Any, number_ref: Any, t_ref: Any, m_ref: Any, *, bounded: bool
) -> None:
    """One chunk: q, k, g `[C k]`, beta, number `[C 1]` -> T, M `[C C]`."""
    chunk, width = q_ref.shape
    size = min(TILE, chunk)
    tiles = [pl.ds(n, size) for n in range(0, chunk, size)]
    upto, strict = _lower(size, False), _lower(size, True)
    before, after = (mask.astype(jnp.float32) for mask in (upto, ~upto))

    def load(rows: Any) -> tuple[Array, ...]:
        g = jnp.broadcast_to(g_ref[rows, :], (size, width))
        return q_ref[rows, :], k_ref[rows, :], _dot(before, g), _dot(after, g), g

    inverse: dict[tuple[int, int], Array] = {}
    for i, rows in enumerate(tiles):
        q, k, prefix, _, g = load(rows)  # log-decays from the tile's start to each token, and from each to its end
        beta, number = beta_ref[rows, :], number_ref[rows, :]
        kb = beta * k
        below: dict[int, Array] = {}
        between = jnp.zeros((1, width), jnp.float32)  # decays of the tiles that lie between the two
        grown = jnp.exp(prefix)
        for j in reversed(range(i)):
            _, key, _, suffix, key_g = load(tiles[j])
            key = key * jnp.exp(suffix + between)
            same = number == number_ref[tiles[j], :].reshape(1, size)
            below[j] = jnp.where(same, _dot(kb * grown, key, True), 0.0)
            m_ref[rows, tiles[j]] = jnp.where(same, _dot(q * grown, key, True), 0.0)
            between = between + jnp.sum(key_g, axis=0, keepdims=True)
        same = number == number.reshape(1, size)
        lower, scores = _tile(q, k, kb, prefix, g) if bounded else _columns(q, kb, k_ref, g_ref, rows)
        m_ref[rows, rows] = jnp.where(same & upto, scores, 0.0)
        inverse[i, i] = _tile_inverse(jnp.where(same & strict, lower, 0.0))
        t_ref[rows, rows] = inverse[i, i]
        for j in range(i):
            total = sum((_dot(below[n], inverse[n, j]) for n in range(j, i)), jnp.zeros((size, size), jnp.float32))
            inverse[i, j] = -_dot(inverse[i, i], total)
            t_ref[rows, tiles[j]] = inverse[i, j]
        for j in range(i + 1, len(tiles)):
            t_ref[rows, tiles[j]] = jnp.zeros((size, size), jnp.float32)
            m_ref[rows, tiles[j]] = jnp.zeros((size, size), jnp.float32)


def _tile(q: Array, k: Array, kb: Array, prefix: Array, g: Array) -> tuple[Array, Array]:
    """Products of a tile with itself, for both readers, of a bounded gate; above the diagonal there is rubbish."""
    first_half = lax.broadcasted_iota(jnp.int32, g.shape, 0) < k.shape[0] // 2
    middle = jnp.sum(jnp.where(first_half, g, 0.0), axis=0, keepdims=True)
    key, grown = k * jnp.exp(middle - prefix), jnp.exp(prefix - middle)
    return _dot(kb * grown, key, True), _dot(q * grown, key, True)


def _columns(q: Array, kb: Array, k_ref: Any, g_ref: Any, rows: Any) -> tuple[Array, Array]:
    """The same of any gate, from the last key to the first: what a reader's decay to a key is, it is to the key before and one more."""
    size, width = q.shape
    reader = lax.broadcasted_iota(jnp.int32, (size, width), 0)
    column = lax.broadcasted_iota(jnp.int32, (size, size), 1)

    def meet(n: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        between, lower, scores = state
        i = size - 1 - n
        g = g_ref[pl.ds(rows.start + jnp.minimum(i + 1, size - 1), 1), :]  # of the next key; the last has no reader
        between = jnp.where(reader > i, between + g, 0.0)
        key = jnp.exp(between) * k_ref[pl.ds(rows.start + i, 1), :]
        lower, scores = (
            jnp.where(column == i, jnp.sum(a * key, axis=-1, keepdims=True), x) for a, x in ((kb, lower), (q, scores))
        )
        return between, lower, scores

    square = jnp.zeros((size, size), jnp.float32)
    return lax.fori_loop(0, size, meet, (jnp.zeros((size, width), jnp.float32), square, square))[1:]


def _tile_inverse(lower: Array) -> Array:
    """`(I - A)(I + A^2)(I + A^4)(I + A^8)`: see `delta_chunk.inverse`."""
    size = lower.shape[0]
    out, power, reach = (_lower(size, False) & ~_lower(size, True)).astype(jnp.float32) - lower, lower, 2
    while reach < size:
        power = _dot(power, power)
        out, reach = out + _dot(out, power), 2 * reach
    return out


def chunk_matrices(
    q: Array, k: Array, g: Array, beta: Array, number: Array | None, bounded: bool
) -> tuple[Array, Array]:
    """T and M `[b h n C C]` fp32 from q, k, g `[b h n C k]`, beta `[b h n C 1]` and the count of documents `[b 1 n C 1]`.

    Runs interpreted, and slowly, where there is neither a GPU nor a TPU.
    """
    b, h, n, chunk, width = k.shape
    number = jnp.zeros((b, 1, n, chunk, 1), jnp.int32) if number is None else number
    number = jnp.broadcast_to(number, (b, h, n, chunk, 1))
    operands = [x.reshape(math.prod((b, h, n)), chunk, x.shape[-1]) for x in (q, k, g, beta, number)]

    def block(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, chunk, width), lambda i: (i, 0, 0))

    square = jax.ShapeDtypeStruct((b * h * n, chunk, chunk), jnp.float32)
    made = pl.pallas_call(
        functools.partial(_kernel, bounded=bounded),
        out_shape=(square, square),
        grid=(b * h * n,),
        in_specs=[block(x.shape[-1]) for x in operands],
        out_specs=(block(chunk), block(chunk)),
        interpret=(here := jax.default_backend()) not in ("gpu", "tpu"),
        compiler_params=triton.compiler() if here == "gpu" else None,
    )(*operands)
    t, scores = (x.reshape(b, h, n, chunk, chunk) for x in made)
    return t, scores
