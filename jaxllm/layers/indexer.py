"""The lightning indexer (DeepSeek-V3.2, arXiv 2512.02556, section 2.1): a cheap scorer of every pair of tokens."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jaxllm.errors import UserError
from jaxllm.layers.base import fan_in, param
from jaxllm.layers.norm import LayerNorm
from jaxllm.ops.rope import rotate

NORM_EPS = 1e-6  # of the keys' LayerNorm, whatever the model's


class Indexer(nn.Module, kw_only=True):
    """Queries, keys and head weights of the scores in `jaxllm.ops.topk`:

        q_h = R (z W_q,h);   k = R norm(x W_k);   w = fp32(x) W_w num_heads^-0.5;   I[t, s] = sum_h w_h relu(head_dim^-0.5 q_h . k)

    z: the queries' latent, or x itself. norm: LayerNorm with weight and bias. R turns the first channels of a head by the angles it is
    given, in pairs (i, i + o/2), or (2i, 2i + 1) where `interleaved`; None: no rotation. One key serves all heads.
    """

    num_heads: int
    head_dim: int
    interleaved: bool = False
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def _turn(self, x: Array, angles: tuple[Array, Array] | None) -> Array:
        return x if angles is None else rotate(x, *angles, interleaved=self.interleaved)

    @nn.compact
    def __call__(
        self, x: Array, latent: Array | None, angles: tuple[Array, Array] | None
    ) -> tuple[Array, Array, Array]:
        """`q [b t h k]`, `w [b t h]` fp32 and `k [b t k]` of `x [b t d]`, the queries' `latent [b t r]` and `cos, sin [b t o/2]`."""
        d, h, k = x.shape[-1], self.num_heads, self.head_dim
        z, axis = (x, "embed") if latent is None else (latent, "latent")
        w_q = param(self, "q_proj", fan_in(z.shape[-1]), (z.shape[-1], h, k), (axis, None, "head"))
        w_k = param(self, "k_proj", fan_in(d), (d, k), ("embed", "head"))
        w_w = param(self, "head_proj", fan_in(d), (d, h), ("embed", None))
        q = self._turn(jnp.einsum("btr,rhk->bthk", z, w_q.astype(self.dtype)), angles)
        key = jnp.einsum("btd,dk->btk", x, w_k.astype(self.dtype))
        key = LayerNorm(eps=NORM_EPS, param_dtype=self.param_dtype, name="k_norm")(key)
        w = jnp.einsum("btd,dh->bth", x.astype(jnp.float32), w_w.astype(jnp.float32)) * h**-0.5
        return q, w, self._turn(key[:, :, None], angles)[:, :, 0]

    @staticmethod
    def check(heads: int, width: int, turned: int, top_k: int) -> None:
        """Refuse numbers of the fields `index_heads`, `index_head_dim` (whose first `turned` channels rotate) and `top_k`."""
        if top_k < 1:
            raise UserError(f"top_k: {top_k} must be at least 1")
        if heads < 1:
            raise UserError(f"index_heads: {heads} must be at least 1")
        if width < max(turned, 1):
            raise UserError(f"index_head_dim: {width} must be at least {max(turned, 1)}, the channels that turn")

    @staticmethod
    def weights(d: int, r: int, heads: int, width: int) -> int:
        """Multiply-adds of a token, r being the width of z."""
        return r * heads * width + d * (width + heads)
