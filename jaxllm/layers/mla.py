"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), its NoPE form (Kimi Linear) and its gated form (Kimi K3)."""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.cache import IndexedCache, LatentCache, UnrolledCache, write
from jaxllm.errors import UserError
from jaxllm.layers.base import RESIDUAL_SCALE, Aux, Constant, Context, Cost, Layer, fan_in, param
from jaxllm.layers.norm import RMSNorm
from jaxllm.layers.rope import RoPE
from jaxllm.mesh import shard
from jaxllm.ops.attention import attention_weights
from jaxllm.ops.kernels import attention, check_kernel
from jaxllm.ops.latent import absorbed_is_cheaper, attend_latents
from jaxllm.ops.linear import linear
from jaxllm.ops.mask import CAUSAL, visible
from jaxllm.ops.sparse_attention import chosen_mask
from jaxllm.ops.unroll import unrolled_attention

Cache = LatentCache | UnrolledCache | IndexedCache  # the last: of layers built on this one


class Inputs(NamedTuple):
    """What a call's tokens bring to latent attention: `q_n [b t h n]`, `q_r [b t h o]`, latents `c [b t r]`, keys `k_r [b t 1 o]`,
    `up_k [h n r]`, `up_v [h r v]`, and where there are any the queries' latent `[b t r_q]` and the gate `[b t h v]`."""

    q_n: Array
    q_r: Array
    c: Array
    k_r: Array
    up_k: Array
    up_v: Array
    latent: Array | None
    gate: Array | None


class MLA(Layer, kw_only=True):
    """Keys and values of all heads are made from one small latent a token, which is all that is cached.

        q_h = [q_N | R q_R]_h = W_qb norm(x W_qa)        or x W_q
        [c | k_R] = x W_kva;   c <- norm(c);   k_R <- R k_R, shared by the heads
        k_h = [c W_kb,h | k_R];   v_h = c W_vb,h
        o_h = softmax(scale q_h k_h^T) v_h;   y = concat_h(o_h) W_o

    q_lora_rank `r_q`: null = queries straight from x. kv_lora_rank `r`: null = 4 qk_nope_head_dim. qk_nope_head_dim `n`: channels of
    a head that are not rotated; null = d_model / num_heads. qk_rope_head_dim `o`: channels that are; null = half of n. v_head_dim
    `v`: null = n.

    rope: turns q_R and k_R; null = NoPE, where both still exist as they are, unless o is 0. scale: null = `(n + o)^-0.5` times the
    rope's own factor (YaRN's mscale squared). gate: `o_h <- o_h * sigmoid(x W_g,h)`, in fp32. qkv_bias: on W_qa and W_kva; out_bias:
    on W_o. latent_norm_eps: null = norm_eps (released checkpoints use 1e-6 whatever their norm_eps). kernel: for whole sequences, see
    `jaxllm.ops.kernels`.

    Whole sequences run expanded; calls with a cache absorb W_kb and W_vb into the queries' side where that is cheaper
    (`jaxllm.ops.latent`). Cache: `r + o` elements a token.
    """

    unrolls: ClassVar[bool] = True

    num_heads: int
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    rope: RoPE | None = RoPE(interleaved=True)
    scale: float | None = None
    gate: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    latent_norm_eps: float | None = None
    kernel: str = "auto"

    def __post_init__(self) -> None:
        check_kernel(self.kernel)
        if self.num_heads < 1:
            raise UserError(f"num_heads: {self.num_heads} must be at least 1")
        if self.qk_nope_head_dim is None and self.d_model % self.num_heads:
            raise UserError(
                f"num_heads: {self.num_heads} does not divide d_model={self.d_model}; set qk_nope_head_dim or change one"
            )
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        for name, value in zip(names, (self.q_lora_rank or 1, *self.sizes), strict=True):
            if name == "qk_rope_head_dim" and value == 0 and self.rope is None:
                continue
            if value < 1 or getattr(self, name) == 0:
                raise UserError(f"{name}: {getattr(self, name)} must be at least 1")
        if self.rope is not None:
            try:
                self.rope.dim(self.sizes[2])
            except UserError as error:
                raise UserError(f"qk_rope_head_dim: {self.sizes[2]}: {error}") from error
        super().__post_init__()

    # ---- what the fields mean ------------------------------------------------------------------------------------

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """`r, n, o, v` of the docstring, with what null means filled in."""
        n = self.d_model // self.num_heads if self.qk_nope_head_dim is None else self.qk_nope_head_dim
        r = 4 * n if self.kv_lora_rank is None else self.kv_lora_rank
        o = n // 2 if self.qk_rope_head_dim is None else self.qk_rope_head_dim
        return r, n, o, n if self.v_head_dim is None else self.v_head_dim

    @property
    def score_scale(self) -> float:
        if self.scale is not None:
            return self.scale
        _, n, o, _ = self.sizes
        return (n + o) ** -0.5 * (1.0 if self.rope is None else self.rope.attention_scale(o))

    @property
    def _projections(self) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...], bool]]:
        """Shape without d, logical axes and whether there is a bias, of each product with x itself."""
        r, n, o, v = self.sizes
        h, r_q = self.num_heads, self.q_lora_rank
        query: dict[str, Any] = {"q": ((h, n + o), ("heads", "head"), False)}
        if r_q is not None:
            query = {"q_a": ((r_q,), ("latent",), self.qkv_bias)}
        gate: dict[str, Any] = {"gate": ((h, v), ("heads", "head"), False)} if self.gate else {}
        return {**query, "kv_a": ((r + o,), ("latent",), self.qkv_bias), **gate}

    # ---- the forward pass ----------------------------------------------------------------------------------------

    def _project(self, x: Array) -> dict[str, Array]:
        """Products of `x [b t d]`: `q [b t h n+o]` or `q_a [b t r_q]`, `kv_a [b t r+o]`, `gate [b t h v]`."""
        if self.has_variable("params", "x_proj"):  # made by `prepare`
            y = jnp.einsum("btd,dm->btm", x, self.get_variable("params", "x_proj").astype(self.dtype))
            if self.qkv_bias:
                y = y + self.get_variable("params", "x_bias").astype(self.dtype)
            return self._unfuse(y)
        out = {}
        for name, (shape, axes, bias) in self._projections.items():
            w = param(self, f"{name}_proj", fan_in(self.d_model), (self.d_model, *shape), ("embed", *axes))
            y = linear(x, w.astype(self.dtype))
            if bias:
                y = y + param(self, f"{name}_bias", Constant(0.0), shape, axes).astype(self.dtype)
            out[name] = shard(
                y, "batch", "length", "act_heads" if len(shape) == 2 else None, *([None] * (len(shape) - 1))
            )
        return out

    def _unfuse(self, y: Array) -> dict[str, Array]:
        parts, start = {}, 0
        for name, (shape, _, _) in self._projections.items():
            width = shape[0] * (shape[1] if len(shape) == 2 else 1)
            parts[name] = y[..., start : start + width].reshape(*y.shape[:2], *shape)
            start += width
        return parts

    def _norm(self, name: str, x: Array) -> Array:
        eps = self.norm_eps if self.latent_norm_eps is None else self.latent_norm_eps
        return RMSNorm(eps=eps, param_dtype=self.param_dtype, name=name)(x)

    def _queries(self, parts: Mapping[str, Array]) -> tuple[Array, Array, Array | None]:
        """`q_N [b t h n]` and `q_R [b t h o]`, not yet turned, and the normed latent `[b t r_q]` that they came from, if any."""
        _, n, o, _ = self.sizes
        if self.q_lora_rank is None:
            query, latent = parts["q"], None
        else:
            shape = (self.q_lora_rank, self.num_heads, n + o)
            w = param(self, "q_b_proj", fan_in(self.q_lora_rank), shape, ("latent", "heads", "head"))
            latent = self._norm("q_a_norm", parts["q_a"])
            query = linear(latent, w.astype(self.dtype))
            query = shard(query, "batch", "length", "act_heads", None)
        return query[..., :n], query[..., n:], latent

    def _ups(self) -> tuple[Array, Array]:
        """`W_kb [r h n]` and `W_vb [r h v]`; or, made by `prepare`, `[h n r]` and `[h r v]`."""
        r, n, _, v = self.sizes
        if self.has_variable("params", "up_k"):
            return self.get_variable("params", "up_k").astype(self.dtype), self.get_variable("params", "up_v").astype(
                self.dtype
            )
        axes = ("latent", "heads", "head")
        k = param(self, "k_b_proj", fan_in(r), (r, self.num_heads, n), axes)
        return k.astype(self.dtype), param(self, "v_b_proj", fan_in(r), (r, self.num_heads, v), axes).astype(self.dtype)

    def _inputs(self, x: Array, ctx: Context) -> Inputs:
        """All that attention needs, of `x [b t d]`."""
        r, _, o, _ = self.sizes
        parts = self._project(x)
        q_n, q_r, latent = self._queries(parts)
        c, k_r = self._norm("kv_a_norm", parts["kv_a"][..., :r]), parts["kv_a"][..., None, r:]
        if self.rope is not None:
            angles = self.rope.angles(ctx.positions, o)
            q_r, k_r = self.rope(q_r, angles), self.rope(k_r, angles)
        up_k, up_v = self._ups()
        if not self.has_variable("params", "up_k"):
            up_k, up_v = up_k.transpose(1, 2, 0), up_v.transpose(1, 0, 2)
        return Inputs(q_n, q_r, c, k_r, up_k, up_v, latent, parts.get("gate"))

    def _output(self, out: Array, gate: Array | None) -> Array:
        """`y [b t d]` from the heads' outputs `[b t h v]`."""
        d, h, v = self.d_model, self.num_heads, self.sizes[3]
        if gate is not None:
            out = (out.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(self.dtype)
        w = param(self, "o_proj", fan_in(h * v, RESIDUAL_SCALE), (h, v, d), ("heads", "head", "embed"))
        y = linear(shard(out, "batch", "length", "act_heads", None), w.astype(self.dtype), 2)
        if self.out_bias:
            y = y + param(self, "o_bias", Constant(0.0), (d,), ("norm",)).astype(self.dtype)
        return y

    @nn.compact
    def __call__(
        self, x: Array, ctx: Context, cache: Cache | None = None, shared: Mapping[str, Array] | None = None
    ) -> tuple[Array, Cache | None, Mapping[str, Array], Aux]:
        inputs = self._inputs(x, ctx)
        aux: Aux = {}
        if cache is None:
            out = self._expanded(inputs, ctx)
            if "attention" in ctx.capture:
                aux["capture/attention"] = self._map(inputs, ctx)
        elif isinstance(cache, UnrolledCache):
            out, cache = self._unrolled(inputs, ctx, cache)
        else:
            assert isinstance(cache, LatentCache)
            cache = self._written(inputs, ctx, cache)
            out = self._cached(inputs, ctx, cache)
        return self._output(out, inputs.gate), cache, {} if shared is None else shared, aux

    def _map(self, i: Inputs, ctx: Context, index: Array | None = None) -> Array:
        """The weights `[b h t s]` of whole sequences, for whoever looks; on keys of a choice `index [b t n]` alone where there is one."""
        query, key, _ = self._keys_values(i)
        seen = visible(ctx.positions, ctx.positions, ctx.segments, ctx.segments)
        seen = seen if index is None else seen & chosen_mask(index, seen.shape[-1])
        return attention_weights(query, key, seen, scale=self.score_scale)

    def _keys_values(self, i: Inputs) -> tuple[Array, Array, Array]:
        """Of whole sequences, all heads' own: query and key `[b t h n+o]`, value `[b t h v]`."""
        k_n, value = linear(i.c, i.up_k.transpose(2, 0, 1)), linear(i.c, i.up_v.transpose(1, 0, 2))
        key = jnp.concatenate([k_n, jnp.broadcast_to(i.k_r, (*k_n.shape[:3], i.k_r.shape[-1]))], axis=-1)
        key, value = (shard(part, "batch", "length", "act_heads", None) for part in (key, value))
        return jnp.concatenate([i.q_n, i.q_r], axis=-1), key, value

    def _expanded(self, i: Inputs, ctx: Context) -> Array:
        """Whole sequences: keys and values of every head, then ordinary attention."""
        query, key, value = self._keys_values(i)
        scale, kernel = self.score_scale, self.kernel
        return attention(query, key, value, ctx.positions, ctx.segments, CAUSAL, scale=scale, kernel=kernel)

    def _unrolled(self, i: Inputs, ctx: Context, cache: UnrolledCache) -> tuple[Array, UnrolledCache]:
        """One more step of a draft layer's unroll, expanded; `ctx` is that of the tokens it reads."""
        query, key, value = self._keys_values(i)
        first, cache = ctx.positions - cache.steps, cache.add(key, value, ctx.segments)
        if cache.steps == 1:
            return self._expanded(i, ctx), cache
        held, scale = (cache.keys, cache.values), self.score_scale
        return unrolled_attention(query, *held, first, ctx.segments, cache.segments, CAUSAL, scale=scale), cache

    def _written(self, i: Inputs, ctx: Context, cache: LatentCache) -> LatentCache:
        """The cache with this call's tokens in it: written first, then read, so that a token sees itself."""
        valid = ctx.segments > 0
        return LatentCache(
            write(cache.latent, i.c[:, None], ctx.positions, valid),
            write(cache.key, i.k_r.transpose(0, 2, 1, 3), ctx.positions, valid),
        )

    def _cached(self, i: Inputs, ctx: Context, cache: LatentCache) -> Array:
        """On all that the cache holds; slots beyond a row's last token hold nothing a mask lets through."""
        latent, key = cache.latent.astype(self.dtype), cache.key.astype(self.dtype)
        valid = ctx.segments > 0
        return attend_latents(i.q_n, i.q_r, latent, key, i.up_k, i.up_v, ctx.positions, valid, scale=self.score_scale)

    # ---- unbound: what callers ask without arrays ----------------------------------------------------------------

    @nn.nowrap
    def init_cache(self, batch: int, length: int, dtype: Any, *, draft: int = 0) -> Cache:
        """Room for `length` tokens a row, tentative ones included: what is rejected is written over, so `draft` needs nothing."""
        del draft
        if self.rope is not None:
            self.rope.check_cache(length)
        r, _, o, _ = self.sizes
        return LatentCache.zeros(batch, length, r, o, dtype)

    @nn.nowrap
    def prepare(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Fuse the products with x into one matrix, and lay W_kb and W_vb out head by head as the absorbed products read them.

        W_qb and W_kb stay two matrices: their product `[r_q h r]` is larger than both wherever `r > n (1 + r / r_q)`.
        """
        parts = self._projections
        fused = {"x_proj": jnp.concatenate([params[f"{n}_proj"].reshape(self.d_model, -1) for n in parts], axis=1)}
        if self.qkv_bias:

            def width(name: str) -> int:
                return params[f"{name}_proj"].reshape(self.d_model, -1).shape[1]

            fused["x_bias"] = jnp.concatenate([params.get(f"{n}_bias", jnp.zeros(width(n))).reshape(-1) for n in parts])
        fused["up_k"] = params["k_b_proj"].transpose(1, 2, 0)
        fused["up_v"] = params["v_b_proj"].transpose(1, 0, 2)
        gone = {f"{n}_{kind}" for n in parts for kind in ("proj", "bias")} | {"k_b_proj", "v_b_proj"}
        return {**{name: value for name, value in params.items() if name not in gone}, **fused}

    @nn.nowrap
    def cost(self, batch: int, t: int, s: float, dtype: Any) -> Cost:
        """FLOPs, twice: `t` times the weights (W_kb and W_vb enter both forms alike), and attention on s keys:

        whole sequences (s <= t)       `t s h (n + o + v)`
        with a cache (s > t)           the cheaper of `t s h (2 r + o)` and, expanding s latents, `t s h (n + o + v) + (s - t) r h (n + v)`

        Cache: `r + o` a token; absorbed attention reads the latents twice.
        """
        r, n, o, v = self.sizes
        h, d, r_q = self.num_heads, self.d_model, self.q_lora_rank
        size = jnp.dtype(dtype).itemsize
        query = d * h * (n + o) if r_q is None else d * r_q + r_q * h * (n + o)
        weights = query + d * (r + o) + r * h * (n + v) + h * v * d * (2 if self.gate else 1)
        biases = (r + o + (r_q or 0) if self.qkv_bias else 0) + (d if self.out_bias else 0)
        params = weights + biases + r + (r_q or 0)
        absorbed = s > t and absorbed_is_cheaper(t, s, r=r, n=n, o=o, v=v)
        attention = t * s * h * (2 * r + o if absorbed else n + o + v)
        if s > t and not absorbed:
            attention += (s - t) * r * h * (n + v)
        kept = d + (r_q or 0) + r + o + h * (2 * (n + o) + 2 * v)
        return Cost(
            flops=2 * batch * (t * weights + attention),
            params=params,
            params_active=params,
            cache_per_token=(r + o) * size,
            cache_read=batch * s * (2 * r + o if absorbed else r + o) * size,
            activation_bytes=batch * t * kept * size + batch * h * t * s * 4,
            collective_bytes=batch * t * d * size,
        )
