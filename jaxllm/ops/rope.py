"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864): rotate channel pairs by an angle proportional to the position.

    q'_i = q_i cos(p f_i) - q_j sin(p f_i),   q'_j = q_j cos(p f_i) + q_i sin(p f_i),   f_i = theta^(-2i/dim)

Angles are always fp32 from int32 positions: bf16 cannot even hold the integer 257. Frequencies are float32 numpy constants `[dim/2]`,
made in float64: they are no parameters, so no cast of the parameters can touch them.
"""

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array


def inverse_frequencies(dim: int, theta: float) -> np.ndarray:
    """`f_i = theta^(-2i/dim)`, i = 0 .. dim/2 - 1."""
    return _powers(dim, theta).astype(np.float32)


def _powers(dim: int, theta: float) -> np.ndarray:
    return float(theta) ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)


def linear_frequencies(dim: int, theta: float, factor: float) -> np.ndarray:
    """`f_i / s`: position interpolation (Chen et al. 2023, arXiv 2306.15595)."""
    return (_powers(dim, theta) / factor).astype(np.float32)


def ntk_theta(dim: int, theta: float, stretch: float) -> float:
    """`theta s^(dim/(dim-2))`, which divides the lowest frequency by s and leaves the highest alone (bloc97 2023, "NTK-aware RoPE")."""
    return theta * stretch ** (dim / (dim - 2))


def dynamic_stretch(factor: float, length: int, max_position: int) -> float:
    """Dynamic NTK: `s L / L_max - (s - 1)` for a call of length `L`, which is 1 up to `L_max` (emozilla 2023)."""
    return factor * max(length, max_position) / max_position - (factor - 1)


def yarn_frequencies(
    dim: int,
    theta: float,
    factor: float,
    original_max_position: int,
    *,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> np.ndarray:
    """YaRN's "NTK by parts" (Peng et al. 2023, arXiv 2309.00071, section 3.2).

    A channel that turns `r` times within the original context has the index `c(r) = dim ln(Lo / (2 pi r)) / (2 ln theta)`. Those that
    turn more than beta_fast times keep their frequency, those below beta_slow have it divided by s, in between a ramp over the index.
    `truncate` widens the ramp to whole indices.
    """

    def where(turns: float) -> float:
        return dim * math.log(original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = where(beta_fast), where(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 1e-3 if high == low else 0
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    f = _powers(dim, theta)
    return (ramp * f / factor + (1 - ramp) * f).astype(np.float32)


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """`m(s, x) = 0.1 x ln s + 1`, and 1 for s <= 1 (arXiv 2309.00071, section 3.3)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def llama3_frequencies(
    dim: int,
    theta: float,
    factor: float,
    original_max_position: int,
    *,
    low_freq_factor: float,
    high_freq_factor: float,
) -> np.ndarray:
    """Llama 3.1 (arXiv 2407.21783): by the turns `u = Lo f / (2 pi)` within the original context.

    u < lo: `f / s`; u > hi: `f`; between: `(1 - w) f / s + w f` with `w = (u - lo) / (hi - lo)`.
    """
    f = _powers(dim, theta)
    turns = original_max_position * f / (2 * math.pi)
    w = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    return ((1 - w) * f / factor + w * f).astype(np.float32)


def longrope_frequencies(dim: int, theta: float, divisors: Sequence[float]) -> np.ndarray:
    """`f_i / e_i` with searched divisors `[dim/2]` (Ding et al. 2024, arXiv 2402.13753)."""
    return (_powers(dim, theta) / np.asarray(divisors, np.float64)).astype(np.float32)


def proportional_frequencies(head_dim: int, theta: float, partial: float, factor: float) -> np.ndarray:
    """`theta^(-2i/head_dim) / s` for the first `int(p head_dim / 2)` of `head_dim / 2` pairs, 0 for the rest (Gemma 4)."""
    f = _powers(head_dim, theta) / factor
    f[int(partial * head_dim // 2) :] = 0.0
    return f.astype(np.float32)


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
