"""The gated delta rule for a few tokens on a state: a decode step, and drafts that may be rejected.

All n tokens are one chunk of the WY form (see `delta_rule.py`), so that the outputs of all of them need the state before the first
one alone, and what is written back is the state after the tokens that are certain. The state is read once and written once, in place.
"""

import jax.numpy as jnp
from jax import Array

FEW = 16  # tokens up to which a chunk's decays between all pairs are small: n^2 k a head


def few_tokens(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, commit: Array, fresh: Array
) -> tuple[Array, Array]:
    """Outputs `[b n h v]` of all n tokens, in v's dtype, and the state after the first `commit [b]` of them.

    Shapes as in `delta_rule.py`; state fp32 `[b h k v]`, taken as empty in rows that are `fresh`, bool `[b]`. Products of one or two rows
    with nothing but each other are sums: XLA would make calls of them.
    """
    n, dtype = k.shape[1], v.dtype
    g = g if g.ndim == 4 else g[..., None]
    q, k, v, g, beta = (x.astype(jnp.float32).transpose(0, 2, 1, 3) for x in (q, k, v, g, beta[..., None]))
    total = jnp.cumsum(g, axis=2)
    grown = jnp.exp(total)
    read = jnp.einsum("bhnk,bhkv->bhnv", jnp.concatenate([beta * k * grown, q * grown], axis=2), state)
    empty = fresh[:, None, None, None]
    read = jnp.where(empty, 0.0, read)  # not the state itself: an emptied state would be a copy of it
    known, old = read[:, :, :n], read[:, :, n:]
    lower, scores = _pair_products(q, k, beta, total)
    u = _substitute(lower, beta * v - known)
    out = old + jnp.sum(scores[..., None] * u[:, :, None], axis=3)
    certain = jnp.arange(n)[None, None, :, None] < commit[:, None, None, None]
    end = jnp.sum(jnp.where(certain, g, 0.0), axis=2)
    written = jnp.where(certain, k * jnp.exp(jnp.where(certain, end[:, :, None] - total, 0.0)), 0.0)
    new = jnp.where(empty, 0.0, state * jnp.exp(end)[..., None])
    for i in range(n):  # not a product, whose result would lie beside the state before it is added
        new = new + written[:, :, i, :, None] * u[:, :, i, None, :]
    return out.transpose(0, 2, 1, 3).astype(dtype), new


def _pair_products(q: Array, k: Array, beta: Array, total: Array) -> tuple[Array, Array]:
    """A and M `[b h n n]` of `delta_rule.py`, by the differences of the decays themselves."""
    n = k.shape[2]
    sees = jnp.tril(jnp.ones((n, n), bool))[:, :, None]
    difference = jnp.where(sees, total[:, :, :, None] - total[:, :, None], 0.0)
    keys = jnp.where(sees, jnp.exp(difference), 0.0) * k[:, :, None]
    scores = jnp.sum(q[:, :, :, None] * keys, axis=-1)
    return jnp.tril(jnp.sum((beta * k)[:, :, :, None] * keys, axis=-1), -1), scores


def _substitute(lower: Array, rhs: Array) -> Array:
    """`(I + A)^{-1} rhs [b h n v]` for strictly lower A, row by row."""
    rows: list[Array] = []
    for r in range(rhs.shape[2]):
        row = rhs[:, :, r]
        for i, done in enumerate(rows):
            row = row - lower[:, :, r, i, None] * done
        rows.append(row)
    return jnp.stack(rows, axis=2)
