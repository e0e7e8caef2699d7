"""The lightning indexer (DeepSeek-V3.2, arXiv 2512.02556, section 2.1): a cheap scorer of every pair of tokens."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jaxllm.errors import UserError
from jaxllm.layers.base import Constant, fan_in, param
from jaxllm.layers.norm import LayerNorm
from jaxllm.ops.compress import Windows, pool
from jaxllm.ops.rope import rotate

NORM_EPS = 1e-6  # of the keys' LayerNorm, whatever the model's


class Indexer(nn.Module, kw_only=True):
    """Queries, keys and head weights of the scores in `jaxllm.ops.topk`:

        q_h = R (z W_q,h);   k = R norm(x W_k);   w = fp32(x) W_w num_heads^-0.5;   I[t, s] = sum_h w_h relu(head_dim^-0.5 q_h . k)

    z: the queries' latent, or x itself. norm: LayerNorm with weight and bias. R turns the first channels of a head by the angles it is
    given, in pairs (i, i + o/2), or (2i, 2i + 1) where `interleaved`; None: no rotation. One key serves all heads.

    pool m: with more than 1, a key is of m tokens (GLM-5.3-Flash), `sum_j a_j k_j` with `a = softmax_j(x_j W_g + bias_j)` channel by
    channel: see `jaxllm.ops.compress`. Such keys take no rotation.
    """

    num_heads: int
    head_dim: int
    interleaved: bool = False
    pool: int = 1
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def _turn(self, x: Array, angles: tuple[Array, Array] | None) -> Array:
        return x if angles is None else rotate(x, *angles, interleaved=self.interleaved)

    @nn.compact
    def __call__(
        self,
        x: Array,
        latent: Array | None,
        angles: tuple[Array, Array] | None,
        windows: Windows | None = None,
        before: Array | None = None,
    ) -> tuple[Array, Array, Array, Array | None]:
        """`q [b t h k]`, `w [b t h]` fp32 and `k [b t k]` of `x [b t d]`, the queries' `latent [b t r]` and `cos, sin [b t o/2]`.

        Pooled: `k [b e k]` of the pools `windows`, behind tokens `before [b n 2k]` of earlier calls; and x's own such, `[b t 2k]`.
        """
        d, h, k = x.shape[-1], self.num_heads, self.head_dim
        z, axis = (x, "embed") if latent is None else (latent, "latent")
        w_q = param(self, "q_proj", fan_in(z.shape[-1]), (z.shape[-1], h, k), (axis, None, "head"))
        w_k = param(self, "k_proj", fan_in(d), (d, k), ("embed", "head"))
        w_w = param(self, "head_proj", fan_in(d), (d, h), ("embed", None))
        q = self._turn(jnp.einsum("btr,rhk->bthk", z, w_q.astype(self.dtype)), angles)
        key = jnp.einsum("btd,dk->btk", x, w_k.astype(self.dtype))
        key = LayerNorm(eps=NORM_EPS, param_dtype=self.param_dtype, name="k_norm")(key)
        w = jnp.einsum("btd,dh->bth", x.astype(jnp.float32), w_w.astype(jnp.float32)) * h**-0.5
        if windows is None:
            return q, w, self._turn(key[:, :, None], angles)[:, :, 0], None
        gate = param(self, "pool_gate", fan_in(d), (d, k), ("embed", "head"))
        bias = param(self, "pool_bias", Constant(0.0), (self.pool, k), (None, "head")).astype(jnp.float32)
        fresh = jnp.concatenate([key, jnp.einsum("btd,dk->btk", x, gate.astype(self.dtype))], axis=-1)
        raw = fresh if before is None else jnp.concatenate([before.astype(fresh.dtype), fresh], axis=1)
        return q, w, pool(raw[..., :k], raw[..., k:], bias, windows, overlap=False), fresh

    @staticmethod
    def check(heads: int, width: int, turned: int, top_k: int, pool: int) -> None:
        """Refuse numbers of the fields `index_heads`, `index_head_dim` (whose first `turned` channels rotate), `top_k`, `index_pool`."""
        if top_k < 1:
            raise UserError(f"top_k: {top_k} must be at least 1")
        if pool < 1:
            raise UserError(f"index_pool: {pool} must be at least 1, the tokens of an index key")
        if top_k % pool:
            raise UserError(f"top_k: {top_k} is not a multiple of index_pool={pool}, whose tokens are chosen together")
        if heads < 1:
            raise UserError(f"index_heads: {heads} must be at least 1")
        if width < max(turned, 1):
            raise UserError(f"index_head_dim: {width} must be at least {max(turned, 1)}, the channels that turn")

    @staticmethod
    def weights(d: int, r: int, heads: int, width: int, pool: int) -> int:
        """Multiply-adds of a token, r being the width of z."""
        return r * heads * width + d * (width + heads) + (d * width if pool > 1 else 0)

    @staticmethod
    def small(width: int, pool: int) -> int:
        """Parameters that multiply no token: norm and bias."""
        return 2 * width + (pool * width if pool > 1 else 0)
