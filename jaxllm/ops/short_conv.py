"""Short causal depthwise convolutions: each channel sees its own last few tokens of the same document."""

import jax.numpy as jnp
from jax import Array


def short_conv(x: Array, w: Array, reach: Array | None = None, window: Array | None = None) -> Array:
    """`y_t = sum_j w[n-1-j] x_{t-j}`, j = 0..n-1: the last tap multiplies the token itself.

    Args:
        x: `[b t c]`. w: taps `[n c]`.
        reach: int `[b t]`, how many earlier tokens of its document stand before a token; taps that go farther read 0. None = no end.
        window: the `n - 1` inputs before x, `[b n-1 c]`; None = zeros.

    Returns:
        `[b t c]` fp32: sums of a few products are not worth rounding twice.
    """
    n, t = w.shape[0], x.shape[1]
    before = jnp.zeros((x.shape[0], n - 1, x.shape[2]), x.dtype) if window is None else window.astype(x.dtype)
    joined = jnp.concatenate([before, x], axis=1)
    taps = w.astype(jnp.float32)
    y = x.astype(jnp.float32) * taps[n - 1]
    for j in range(1, n):
        earlier = joined[:, n - 1 - j : n - 1 - j + t].astype(jnp.float32) * taps[n - 1 - j]
        if reach is not None:
            earlier = jnp.where((reach >= j)[:, :, None], earlier, 0.0)
        y = y + earlier
    return y


def next_window(x: Array, window: Array, end: Array) -> Array:
    """The window after the first `end [b]` tokens of `x [b t c]`, given the one before them: `[b n-1 c]`."""
    joined = jnp.concatenate([window, x.astype(window.dtype)], axis=1)
    index = end[:, None] + jnp.arange(window.shape[1], dtype=jnp.int32)[None]
    return jnp.take_along_axis(joined, index[:, :, None], axis=1)
