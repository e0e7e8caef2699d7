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


class EntryIndexer(nn.Module, kw_only=True):
    """The lightning indexer over compressed keys: `q_h = R (z W_q,h)`, `w = fp32(x W_w) num_heads^-0.5`, keys by its own compressor."""

    num_heads: int
    compressor: Compressor
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, x: Array, latent: Array, angles: tuple[Array, Array] | None, before: Array | None, windows: Windows
    ) -> tuple[Array, Array, Array, Array]:
        """`q [b t i k]`, `w [b t i]` fp32, keys `[b e k]`, and what the tokens bring to later windows."""
        i, k, r, d = self.num_heads, self.compressor.dim, latent.shape[-1], x.shape[-1]
        w_q = param(self, "q_proj", fan_in(r), (r, i, k), ("latent", None, "head")).astype(self.dtype)
        w_w = param(self, "head_proj", fan_in(d), (d, i), ("embed", None)).astype(self.dtype)
        q = jnp.einsum("btr,rik->btik", latent, w_q)
        q = q if angles is None else turn_tail(q, angles)
        keys, fresh = self.compressor.clone(parent=self, name="compress")(x, before, windows)
        return q, jnp.einsum("btd,di->bti", x, w_w).astype(jnp.float32) * i**-0.5, keys, fresh

    def weights(self, d: int, r: int) -> int:
        """Multiply-adds of a token."""
        return r * self.num_heads * self.compressor.dim + d * self.num_heads + self.compressor.weights(d)
