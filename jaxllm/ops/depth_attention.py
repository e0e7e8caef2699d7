"""Attention over depth: a learned query weighs earlier outputs of the same token. Arithmetic of attention residuals.

    score_i = sum_d q_d V_id / rms(V_i)      p = softmax over i      out = sum_i p_i V_i

All in fp32, cast once. Sources are a tuple of `[b t d]` that is never stacked: a stack would copy every block at every site.
"""

import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax


def depth_attention_naive(sources: Sequence[Array], query: Array, valid: Sequence[Array | bool], eps: float) -> Array:
    """The truth, stacked."""
    v = jnp.stack([source.astype(jnp.float32) for source in sources])
    u = v / jnp.sqrt(jnp.mean(v * v, axis=-1, keepdims=True) + eps)
    scores = jnp.where(jnp.asarray(valid)[:, None, None], jnp.sum(u * query.astype(jnp.float32), axis=-1), -jnp.inf)
    return jnp.einsum("n...,n...d->...d", jax.nn.softmax(scores, axis=0), v).astype(sources[0].dtype)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(3,))
def depth_attention(sources: tuple[Array, ...], query: Array, last: Array | bool, eps: float) -> Array:
    """`[b t d]`: the mixture of `sources`, of which the last counts only where `last` (a boolean scalar) holds. query: `[d]` fp32.

    Keeps its arguments alone for the backward pass: sources are alive anyway, their fp32 copies need not be.
    """
    q = query.astype(jnp.float32)

    def score(v: Array) -> Array:
        v = v.astype(jnp.float32)
        return jnp.sum(v * q, axis=-1) * lax.rsqrt(jnp.mean(v * v, axis=-1) + eps)

    scores = [score(v) for v in sources]
    scores[-1] = jnp.where(last, scores[-1], -jnp.inf)
    p = jax.nn.softmax(jnp.stack(scores), axis=0)
    weighted = (w[..., None] * v.astype(jnp.float32) for w, v in zip(p, sources, strict=True))
    return functools.reduce(operator.add, weighted).astype(sources[0].dtype)
