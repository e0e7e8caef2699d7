"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864): rotate channel pairs by an angle proportional to the position.

    q'_i = q_i cos(p f_i) - q_j sin(p f_i),   q'_j = q_j cos(p f_i) + q_i sin(p f_i),   f_i = theta^(-2i/dim)

Angles are always fp32 from int32 positions: bf16 cannot even hold the integer 257.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array


def inverse_frequencies(dim: int, theta: float) -> np.ndarray:
    """`f_i = theta^(-2i/dim)`, float32 `[dim/2]`. A numpy constant, so no cast of the parameters can touch it."""
    return (float(theta) ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)).astype(np.float32)


def rotation(positions: Array, frequencies: Array | np.ndarray, scale: float = 1.0) -> tuple[Array, Array]:
    """`cos` and `sin`, fp32 `[b, t, dim/2]`, for integer `positions [b, t]`; both times `scale`."""
    angles = positions.astype(jnp.float32)[..., None] * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(x: Array, cos: Array, sin: Array, *, interleaved: bool = False) -> Array:
    """Rotate the first `dim` channels of `x [b, t, h, k]` by `cos, sin [b, t, dim/2]`; the rest passes through.

    Half-split pairs are (i, i + dim/2) (NeoX, Llama); interleaved pairs are (2i, 2i + 1). Done in x's dtype, as transformers does.
    """
    dim = 2 * cos.shape[-1]
    turn, rest = x[..., :dim], x[..., dim:]
    cos, sin = cos[:, :, None].astype(x.dtype), sin[:, :, None].astype(x.dtype)
    if interleaved:
        a, b = turn[..., 0::2], turn[..., 1::2]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(turn.shape)
    else:
        a, b = jnp.split(turn, 2, axis=-1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned if rest.shape[-1] == 0 else jnp.concatenate([turned, rest], axis=-1)
