"""Products between all pairs of a chunk's tokens under decays: `X_ri = sum_k L_rk K_ik e^{G_rk - G_ik}` for i <= r, without overflow.

`e^{G_r - G_i} = e^{G_r} e^{-G_i}` would make it one matrix product, but `e^{-G_i}` overflows: 64 tokens may decay by e^320. So a chunk
is halved again and again. Between the two halves of a piece every pair decays from i to the end of the left half and from there to r:

    X_ri = sum_k (L_rk e^{sum of g over the right half up to r}) (K_ik e^{sum of g over the left half after i})

Both exponents are differences of one pair's decays that are never positive, whatever the gate, so nothing overflows and what underflows
is 0; and they are built up as products of at most C decays, so nothing cancels either. Halving ends at single tokens. Where no log-decay
is below -5 it may end at tiles of 16, where `e^{G_r}` is at least e^-80 and both factors fit into fp32 and bf16 once they are moved by a
power of two into the middle of the range (Kimi Linear, arXiv 2510.26692, moves them by a row's decay; a constant keeps the tokens
of a document free of what the one before rounds to).

One decay a head needs none of this: its `e^{G_r - G_i}` is one more matrix, `[C C]`.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

TILE = 16
MIDDLE = 2.0**58  # about e^40: half of what sixteen tokens may decay by


def dot(equation: str, *operands: Array) -> Array:
    """An einsum that is fp32 on every device: the inverse of a chunk's matrix does not bear less."""
    return jnp.einsum(equation, *operands, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


class Decays(NamedTuple):
    """Products of decays over a chunk: `prefix` e^{G_r}, `suffix` e^{G_C - G_i} `[.. C k]`, `total` e^{G_C} `[.. k]` (k = 1: a head's).

    levels: from the shortest piece up, (prefix of right halves, suffix of left halves) `[.. pieces size k]`. tile: `MIDDLE` times the
    prefixes within tiles of 16, `[.. tiles 16 k]`, where halving ends there; they begin anew with a document. matrix: `e^{G_r - G_i}`
    `[.. C C]` of a head.
    """

    prefix: Array
    suffix: Array
    total: Array
    levels: tuple[tuple[Array, Array], ...]
    tile: Array | None
    matrix: Array | None


def _split(x: Array, size: int) -> tuple[Array, Array]:
    """Left and right halves `[.. pieces size m]` of all pieces of `2 size` tokens of `x [.. C m]`."""
    pieces = x.reshape(*x.shape[:-2], -1, 2, size, x.shape[-1])
    return pieces[..., 0, :, :], pieces[..., 1, :, :]


def _join(left: Array, right: Array) -> Array:
    """The inverse of `_split`."""
    x = jnp.stack([left, right], axis=-3)
    return x.reshape(*x.shape[:-4], -1, x.shape[-1])


def decays_of(g: Array, bounded: bool, number: Array | None = None) -> Decays:
    """From log-decays `g [.. C k]`, or `[.. C 1]` of a head. number: rising count of documents `[.. C 1]`."""
    if g.shape[-1] == 1:
        return _head_decays(g)
    prefix = total = jnp.exp(g)
    suffix, size, levels, tile = jnp.ones_like(g), 1, [], None
    if bounded and g.shape[-2] == 1:
        tile = prefix[..., None, :] * MIDDLE
    while size < g.shape[-2]:
        p, x, t = _split(prefix, size), _split(suffix, size), _split(total, 1)
        if not bounded or size >= TILE:
            levels.append((p[1], x[0]))
        grown = p[1] * p[0][..., -1:, :]  # from the left half's end
        if bounded and number is not None:
            left, right = _split(number, size)
            grown = jnp.where(right > left[..., -1:, :], p[1], grown)
        prefix, suffix = _join(p[0], grown), _join(x[0] * t[1], x[1])
        total, size = (t[0] * t[1])[..., 0, :], 2 * size
        if bounded and size == min(TILE, g.shape[-2]):
            tile = prefix.reshape(*g.shape[:-2], -1, size, g.shape[-1]) * MIDDLE
    return Decays(prefix, suffix, total[..., 0, :], tuple(levels), tile, None)


def _head_decays(g: Array) -> Decays:
    """The sums between every two tokens are made as sums: the difference of two long ones would lose what the last tokens add."""
    c = g.shape[-2]
    upto = jnp.tril(jnp.ones((c, c)))
    after = jnp.triu(jnp.ones((c, c)), 1)
    between = dot("...rj,ij->...ri", upto * g.swapaxes(-1, -2), after)
    prefix, suffix = (jnp.exp(dot("ri,...ik->...rk", m, g)) for m in (upto, after))
    return Decays(prefix, suffix, prefix[..., -1, :], (), None, upto * jnp.exp(between))


def pair_products(readers: Array, k: Array, decays: Decays) -> tuple[Array, Array]:
    """X `[.. C C]` for each of two kinds of L, `readers [.. C 2 k]`; above the diagonal there is rubbish or 0."""
    *lead, c, _, width = readers.shape
    if decays.matrix is not None:
        x = dot("...rk,...ik->...ri", readers.reshape(*lead, 2 * c, width), k).reshape(*lead, c, 2, c)
        return x[..., 0, :] * decays.matrix, x[..., 1, :] * decays.matrix
    if decays.tile is None:
        x = dot("...ck,...k->...c", readers, k)[..., None]
    else:
        left, right = _tile_operands(readers, k, decays.tile)
        x = dot("...rk,...ik->...ri", left, right)
    x = x.reshape(*lead, 2 * c, -1)  # rows (r, kind) of the pieces' own triangles, side by side
    for p, s in decays.levels:
        size = x.shape[-1]
        left, right = _level_operands(readers, k, p, s, size)
        below = dot("...rk,...ik->...ri", left, right)
        a, b = _split(x, 2 * size)
        top = jnp.concatenate([a, jnp.zeros_like(below)], axis=-1)
        x = _join(top, jnp.concatenate([below, b], axis=-1))
    x = x.reshape(*lead, c, 2, c)
    return x[..., 0, :], x[..., 1, :]


def _level_operands(readers: Array, k: Array, prefix: Array, suffix: Array, size: int) -> tuple[Array, Array]:
    """L of the right halves `[.. pieces 2size k]`, both kinds of a token side by side, and K of the left ones `[.. pieces size k]`."""
    *lead, _, _, width = readers.shape
    right = readers.reshape(*lead, -1, 2, size, 2, width)[..., 1, :, :, :] * prefix[..., None, :]
    return right.reshape(*lead, -1, 2 * size, width), _split(k, size)[0] * suffix


def _tile_operands(readers: Array, k: Array, tile: Array) -> tuple[Array, Array]:
    """The same of a tile with itself."""
    *lead, n, size, width = tile.shape
    left = readers.reshape(*lead, n, size, 2, width) * tile[..., None, :]
    return left.reshape(*lead, n, 2 * size, width), k.reshape(*lead, n, size, width) / tile


def pair_products_pullback(
    readers: Array, k: Array, decays: Decays, d_lower: Array, d_scores: Array
) -> tuple[Array, Array]:
    """Cotangents of `readers` and `k` from those of both X, which must be 0 where X does not count."""
    *lead, c, _, width = readers.shape
    if decays.matrix is not None:
        dx = jnp.stack([d_lower * decays.matrix, d_scores * decays.matrix], axis=-2).reshape(*lead, 2 * c, c)
        d_readers = dot("...ri,...ik->...rk", dx, k).reshape(readers.shape)
        return d_readers, dot("...ri,...rk->...ik", dx, readers.reshape(*lead, 2 * c, width))
    dx = jnp.stack([d_lower, d_scores], axis=-2)
    size = 1 if decays.tile is None else decays.tile.shape[-2]
    blocks = [dx.reshape(*lead, c // size, size, 2, c // size, size)]
    diagonal = jnp.moveaxis(jnp.diagonal(blocks[0], axis1=-5, axis2=-2), -1, -4)
    diagonal = diagonal.reshape(*lead, c // size, 2 * size, size)
    if decays.tile is None:
        d_readers = diagonal.reshape(*lead, c, 2, 1) * k[..., None, :]
        d_key = jnp.sum(diagonal.reshape(*lead, c, 2, 1) * readers, axis=-2)
    else:
        left, right = _tile_operands(readers, k, decays.tile)
        d_left = dot("...ri,...ik->...rk", diagonal, right).reshape(*lead, -1, size, 2, width)
        d_readers = (d_left * decays.tile[..., None, :]).reshape(readers.shape)
        d_key = (dot("...ri,...rk->...ik", diagonal, left) / decays.tile).reshape(k.shape)
    for p, s in decays.levels:
        size = p.shape[-2]
        left, right = _level_operands(readers, k, p, s, size)
        pieces = dx.reshape(*lead, c // (2 * size), 2, size, 2, c // (2 * size), 2, size)
        below = pieces[..., 1, :, :, :, 0, :]  # right halves read left ones
        below = jnp.moveaxis(jnp.diagonal(below, axis1=-5, axis2=-2), -1, -4).reshape(*lead, -1, 2 * size, size)
        d_left = dot("...ri,...ik->...rk", below, right).reshape(*lead, -1, size, 2, width) * p[..., None, :]
        d_right = dot("...ri,...rk->...ik", below, left) * s
        whole = d_readers.reshape(*lead, -1, 2, size, 2, width)
        d_readers = jnp.stack([whole[..., 0, :, :, :], whole[..., 1, :, :, :] + d_left], axis=-4).reshape(readers.shape)
        a, b = _split(d_key, size)
        d_key = _join(a + d_right, b)
    return d_readers, d_key
