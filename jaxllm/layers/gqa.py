"""Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245); MHA and MQA are its two ends."""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jaxllm.cache import KVCache, write
from jaxllm.errors import UserError
from jaxllm.layers.base import RESIDUAL_SCALE, Aux, Constant, Context, Cost, Layer, fan_in, param
from jaxllm.layers.norm import RMSNorm
from jaxllm.layers.rope import RoPE
from jaxllm.mesh import shard
from jaxllm.ops.attention import attend, attend_cache, causal_blocks, visible
from jaxllm.ops.linear import linear


class GQA(Layer, kw_only=True):
    """`q_h = x Wq_h, k_g = x Wk_g, v_g = x Wv_g; o_h = softmax(q_h k_g^T / sqrt(k)) v_g; y = concat_h(o_h) Wo`.

    num_kv_heads: null = num_heads (MHA), 1 = MQA; must divide num_heads. head_dim: null = d_model / num_heads.
    qk_norm: RMSNorm over each head of q and k before RoPE (Qwen3). qkv_bias, out_bias: biases (Qwen2, GPT-2).
    softcap: `s <- c tanh(s / c)` on scaled scores before the mask (Gemma 2). scale: null = head_dim^-0.5. rope: null = NoPE.
    Cache: keys and values, `2 g k` elements a token.
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    rope: RoPE | None = RoPE()
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    softcap: float | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.kv_heads < 1 or self.num_heads % self.kv_heads:
            raise UserError(f"num_kv_heads: {self.num_kv_heads} must divide num_heads={self.num_heads}")
        if self.head_dim is None and self.d_model % self.num_heads:
            raise UserError(
                f"num_heads: {self.num_heads} does not divide d_model={self.d_model}; set head_dim or change one"
            )
        if self.rope is not None:
            self.rope.dim(self.key_dim)
        super().__post_init__()

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def key_dim(self) -> int:
        return self.head_dim or self.d_model // self.num_heads

    def _project(self, x: Array) -> tuple[Array, Array, Array]:
        """`x [b t d]` -> `q [b t h k]`, `k [b t g k]`, `v [b t g k]`."""
        d, h, g, k = self.d_model, self.num_heads, self.kv_heads, self.key_dim
        if self.has_variable("params", "qkv_proj"):  # made by `prepare`
            qkv = jnp.einsum("btd,dhk->bthk", x, self.get_variable("params", "qkv_proj").astype(self.dtype))
            if self.qkv_bias:
                qkv = qkv + self.get_variable("params", "qkv_bias").astype(self.dtype)
            return qkv[:, :, :h], qkv[:, :, h : h + g], qkv[:, :, h + g :]

        def one(name: str, heads: int, axis: str | None) -> Array:
            axis = axis if heads > 1 else None  # the one kv head of MQA is held by every device
            y = linear(
                x, param(self, f"{name}_proj", fan_in(d), (d, heads, k), ("embed", axis, "head")).astype(self.dtype)
            )
            if self.qkv_bias:
                y = y + param(self, f"{name}_bias", Constant(0.0), (heads, k), (axis, "head")).astype(self.dtype)
            return shard(y, "batch", "length", "act_heads" if heads > 1 else None, None)

        return one("q", h, "heads"), one("k", g, "kv_heads"), one("v", g, "kv_heads")

    @nn.compact
    def __call__(
        self, x: Array, ctx: Context, cache: KVCache | None = None, shared: Mapping[str, Array] | None = None
    ) -> tuple[Array, KVCache | None, Mapping[str, Array], Aux]:
        d, h, k = self.d_model, self.num_heads, self.key_dim
        query, key, value = self._project(x)
        if self.qk_norm:
            query = RMSNorm(eps=self.norm_eps, param_dtype=self.param_dtype, name="q_norm")(query)
            key = RMSNorm(eps=self.norm_eps, param_dtype=self.param_dtype, name="k_norm")(key)
        if self.rope is not None:
            angles = self.rope.angles(ctx.positions, k)
            query, key = self.rope(query, angles), self.rope(key, angles)
        scale = k**-0.5 if self.scale is None else self.scale
        if cache is None:
            mask = visible(ctx.positions, ctx.positions, ctx.segments, ctx.segments)
            out = attend(
                query, key, value, mask, scale=scale, softcap=self.softcap, causal_blocks=causal_blocks(x.shape[1])
            )
        else:
            out, cache = self._cached(query, key, value, ctx, cache, scale)
        w = param(self, "o_proj", fan_in(h * k, RESIDUAL_SCALE), (h, k, d), ("heads", "head", "embed")).astype(
            self.dtype
        )
        y = linear(shard(out, "batch", "length", "act_heads", None), w, 2)
        if self.out_bias:
            y = y + param(self, "o_bias", Constant(0.0), (d,), ("norm",)).astype(self.dtype)
        return y, cache, {} if shared is None else shared, {}

    def _cached(
        self, query: Array, key: Array, value: Array, ctx: Context, cache: KVCache, scale: float
    ) -> tuple[Array, KVCache]:
        """Write first, then read: the token sees itself. Slots beyond a row's last token hold nothing a mask lets through."""
        b, t, h, k = query.shape
        g = self.kv_heads
        valid = ctx.segments > 0
        cache = KVCache(
            write(cache.k, key.transpose(0, 2, 1, 3), ctx.positions, valid),
            write(cache.v, value.transpose(0, 2, 1, 3), ctx.positions, valid),
        )
        index = jnp.arange(cache.capacity, dtype=jnp.int32)[None]
        mask = (index[:, None] <= ctx.positions[:, :, None]) & valid[:, :, None]
        q = query.reshape(b, t, g, h // g, k).transpose(0, 2, 3, 1, 4)
        out = attend_cache(q, cache.k.astype(q.dtype), cache.v.astype(q.dtype), mask, scale=scale, softcap=self.softcap)
        return out.transpose(0, 3, 1, 2, 4).reshape(b, t, h, k), cache

    @nn.nowrap
    def init_cache(self, batch: int, length: int, dtype: Any, *, draft: int = 0, pages: int | None = None) -> KVCache:
        """Room for `length` tokens a row, tentative ones included: KV shortens by itself, so `draft` needs nothing."""
        del draft
        if pages is not None:
            raise UserError("cache: paged attention caches are not available; leave pages at null")
        return KVCache.zeros(batch, self.kv_heads, length, self.key_dim, self.key_dim, dtype)

    @nn.nowrap
    def prepare(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Fuse q, k and v into one matrix `[d, h + 2 g, k]`: decoding is bound by reading weights, and one dot reads faster than three."""
        fused = {"qkv_proj": jnp.concatenate([params[f"{n}_proj"] for n in "qkv"], axis=1)}
        if self.qkv_bias:
            fused["qkv_bias"] = jnp.concatenate([params[f"{n}_bias"] for n in "qkv"], axis=0)
        gone = {f"{n}_{kind}" for n in "qkv" for kind in ("proj", "bias")}
        return {**{name: value for name, value in params.items() if name not in gone}, **fused}

    @nn.nowrap
    def cost(self, batch: int, t: int, s: float, dtype: Any) -> Cost:
        """FLOPs `2 b t (d (h + 2 g) k + h k d) + 4 b t s h k`; cache `2 g k` a token."""
        d, h, g, k = self.d_model, self.num_heads, self.kv_heads, self.key_dim
        size = jnp.dtype(dtype).itemsize
        weights = d * (2 * h + 2 * g) * k
        params = (
            weights
            + (2 * k if self.qk_norm else 0)
            + ((h + 2 * g) * k if self.qkv_bias else 0)
            + (d if self.out_bias else 0)
        )
        per_token = 2 * g * k * size
        return Cost(
            flops=2 * batch * t * weights + 4 * batch * t * s * h * k,
            params=params,
            params_active=params,
            cache_per_token=per_token,
            cache_read=batch * s * per_token,
            activation_bytes=batch * t * (d + (2 * h + 2 * g) * k) * size + batch * h * t * s * 4,
            collective_bytes=batch * t * d * size,
        )
