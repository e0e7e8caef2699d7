"""Learned pooling of m tokens into one key (DeepSeek-V4, arXiv 2606.19348): the compressors of CSA and HCA and of CSA's indexer."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jaxllm.layers.base import Constant, fan_in, param
from jaxllm.layers.norm import RMSNorm
from jaxllm.layers.rope import RoPE
from jaxllm.ops.compress import Windows, pool
from jaxllm.ops.rope import rotate


def turn_tail(x: Array, angles: tuple[Array, Array], *, back: bool = False) -> Array:
    """Turn the last channels of `x [b t h k]` by `cos, sin [b t o/2]`, in neighbouring pairs and in fp32; `back`: the other way."""
    cos, sin = angles
    o = 2 * cos.shape[-1]
    tail = rotate(x[..., -o:].astype(jnp.float32), cos, -sin if back else sin, interleaved=True).astype(x.dtype)
    return jnp.concatenate([x[..., :-o], tail], axis=-1)


class Compressor(nn.Module, kw_only=True):
    """`v = x W_v, z = x W_z`; of window w `e_w = R_{w m} norm(sum_j softmax_j(z_j + bias_j) v_j)`: see `jaxllm.ops.compress`.

    rate: m. dim: of an entry. overlap: windows overlap the ones before, and v and z have twice the width. rope: R turns the last
    `rope_dim` channels by the position of the window's first token.
    """

    rate: int
    dim: int
    overlap: bool
    rope: RoPE | None
    rope_dim: int
    eps: float
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @property
    def width(self) -> int:
        return 2 * self.dim if self.overlap else self.dim

    @property
    def span(self) -> int:
        """Tokens that an entry is made of."""
        return 2 * self.rate if self.overlap else self.rate

    @nn.compact
    def __call__(self, x: Array, before: Array | None, windows: Windows) -> tuple[Array, Array]:
        """Entries `[b e c]` of the windows of `x [b t d]`, behind tokens `before [b n 2w]` of earlier calls; and x's own `[b t 2w]`."""
        d, w = x.shape[-1], self.width
        parts = [param(self, f"{name}_proj", fan_in(d), (d, w), ("embed", None)) for name in ("kv", "gate")]
        fresh = jnp.concatenate([jnp.einsum("btd,dw->btw", x, p.astype(self.dtype)) for p in parts], axis=-1)
        bias = param(self, "bias", Constant(0.0), (self.rate, w), (None, None)).astype(jnp.float32)
        raw = fresh if before is None else jnp.concatenate([before.astype(fresh.dtype), fresh], axis=1)
        entries = pool(raw[..., :w], raw[..., w:], bias, windows, overlap=self.overlap)
        entries = RMSNorm(eps=self.eps, param_dtype=self.param_dtype, round_first=False, name="norm")(entries)
        if self.rope is not None:
            angles = self.rope.angles(windows.number * self.rate, self.rope_dim)
            entries = turn_tail(entries[:, :, None], angles)[:, :, 0]
        return entries, fresh

    def weights(self, d: int) -> int:
        """Multiply-adds of a token."""
        return 2 * d * self.width

    @property
    def small(self) -> int:
        """Parameters that multiply no token: bias and norm."""
        return self.rate * self.width + self.dim
