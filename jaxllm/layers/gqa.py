"""Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245) and its family; MHA and MQA are its two ends."""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, TypedDict

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.cache import EMPTY, IndexedCache, KVCache, RingCache, UnrolledCache, write
from jaxllm.errors import UserError
from jaxllm.layers.base import RESIDUAL_SCALE, Aux, Constant, Context, Cost, Layer, Normal, fan_in, matrices_as, param
from jaxllm.layers.norm import RMSNorm
from jaxllm.layers.rope import RoPE
from jaxllm.mesh import shard
from jaxllm.ops.attention import attend_cache, attention_weights
from jaxllm.ops.blockwise import BLOCK
from jaxllm.ops.blockwise_cache import Source, blockwise_sources
from jaxllm.ops.kernels import attention, check_kernel
from jaxllm.ops.linear import linear
from jaxllm.ops.mask import Mask, visible
from jaxllm.ops.paged_attention import PagedKV, paged_attention
from jaxllm.ops.sparse_attention import chosen_mask
from jaxllm.ops.unroll import unrolled_attention
from jaxllm.pages import PAGES, Paged

Cache = KVCache | RingCache | Paged | UnrolledCache | IndexedCache  # the last: of layers built on this one
QK_NORM_WEIGHTS = ("plain", "zero_centred", "none")


class Scores(TypedDict):
    """How scores are made: arguments of every attention operation."""

    scale: float
    softcap: float | None
    sinks: Array | None


class Inputs(NamedTuple):
    """What a call's tokens bring to attention: query `[b t h k]`, key `[b t g k]`, value `[b t g v]`, and where there are any sinks `[h]`
    and the gate `[b t h v]`."""

    query: Array
    key: Array
    value: Array
    sinks: Array | None
    gate: Array | None


class GQA(Layer, kw_only=True):
    """`q_h = x Wq_h, k_g = x Wk_g, v_g = x Wv_g; o_h = softmax(scale q_h k_g^T + mask) v_g; y = concat_h(o_h) Wo`.

    num_kv_heads: null = num_heads (MHA), 1 = MQA; must divide num_heads. head_dim: null = d_model / num_heads. value_dim: null =
    head_dim (MiMo: 192 and 128). rope: null = NoPE. qkv_bias, out_bias: biases (Qwen2, GPT-2).

    What is seen, by position in the document (`jaxllm.ops.mask`): window, W keys including self; chunk, blocks of C; dilation, every
    so many-th key; global_tokens, a prefix that every later token sees.

    Scores: scale, null = head_dim^-0.5; or query_pre_attn_scalar^-0.5 (Gemma 2). softcap: `s <- c tanh(s / c)` on scaled scores
    before the mask (Gemma 2). sinks: one more logit per head, with value 0 (gpt-oss, arXiv 2309.17453).

    qk_norm: RMSNorm over each head of q and k (Qwen3), or with qk_norm_all_heads over all heads at once (OLMo 2), before RoPE or with
    qk_norm_after_rope behind it (nanochat). qk_norm_weight: plain, zero_centred (multiplies by 1 + w: Qwen3-Next) or none.

    value_scale: multiplies v before it is cached (MiMo). gate: `o_h <- o_h * sigmoid(x Wg_h)`, elementwise (Qwen3-Next).

    kernel: of whole sequences, by name (`jaxllm.ops.kernels`); auto = the fastest that can do it here.

    Cache: keys and values, `g (k + v)` elements a token; under a window or chunk a ring of its span.
    """

    unrolls: ClassVar[bool] = True

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    rope: RoPE | None = RoPE()
    window: int | None = None
    chunk: int | None = None
    dilation: int = 1
    global_tokens: int = 0
    sinks: bool = False
    softcap: float | None = None
    scale: float | None = None
    query_pre_attn_scalar: float | None = None
    qk_norm: bool = False
    qk_norm_all_heads: bool = False
    qk_norm_weight: str = "plain"
    qk_norm_after_rope: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    value_scale: float | None = None
    gate: bool = False
    kernel: str = "auto"

    def __post_init__(self) -> None:
        if self.num_heads < 1:
            raise UserError(f"num_heads: {self.num_heads} must be at least 1")
        if self.kv_heads < 1 or self.num_heads % self.kv_heads:
            raise UserError(f"num_kv_heads: {self.num_kv_heads} must divide num_heads={self.num_heads}")
        if self.head_dim is None and self.d_model % self.num_heads:
            raise UserError(
                f"num_heads: {self.num_heads} does not divide d_model={self.d_model}; set head_dim or change one"
            )
        if self.key_dim < 1 or self.val_dim < 1:
            raise UserError(f"head_dim: {self.key_dim} and value_dim: {self.val_dim} must be at least 1")
        if self.scale is not None and self.query_pre_attn_scalar is not None:
            raise UserError(
                f"scale: {self.scale} and query_pre_attn_scalar: {self.query_pre_attn_scalar} say the same thing; set one"
            )
        if self.query_pre_attn_scalar is not None and self.query_pre_attn_scalar <= 0:
            raise UserError(f"query_pre_attn_scalar: {self.query_pre_attn_scalar} must be > 0")
        if self.qk_norm_weight not in QK_NORM_WEIGHTS:
            raise UserError(f"qk_norm_weight: {self.qk_norm_weight!r} is not one of {', '.join(QK_NORM_WEIGHTS)}")
        if not self.qk_norm and (self.qk_norm_all_heads or self.qk_norm_after_rope or self.qk_norm_weight != "plain"):
            raise UserError("qk_norm: false, so qk_norm_all_heads, qk_norm_weight and qk_norm_after_rope mean nothing")
        if self.rope is not None:
            self.rope.dim(self.key_dim)
        check_kernel(self.kernel)
        _ = self.mask  # checks its own fields
        super().__post_init__()

    # ---- what the fields mean ------------------------------------------------------------------------------------

    @property
    def in_dim(self) -> int:
        """Width of what is projected to queries, keys and values; a draft layer reads two halves of d_model at once."""
        return self.d_model

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def key_dim(self) -> int:
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def val_dim(self) -> int:
        return self.key_dim if self.value_dim is None else self.value_dim

    @property
    def mask(self) -> Mask:
        return Mask(window=self.window, chunk=self.chunk, dilation=self.dilation, global_tokens=self.global_tokens)

    @property
    def reads_pages(self) -> bool:
        return self.mask.span is None

    @property
    def _held(self) -> int:
        """Tokens that a ring must hold to be complete."""
        return (self.mask.span or 0) + self.global_tokens

    @property
    def score_scale(self) -> float:
        if self.scale is not None:
            return self.scale
        return (self.key_dim if self.query_pre_attn_scalar is None else self.query_pre_attn_scalar) ** -0.5

    @property
    def _widths(self) -> dict[str, tuple[int, int, str]]:
        """(heads, width, logical axis of the heads) of each projection of x; the one kv head of MQA is held by every device."""
        h, g, k, v = self.num_heads, self.kv_heads, self.key_dim, self.val_dim
        kv = {"k": (g, k, "kv_heads"), "v": (g, v, "kv_heads")}
        return {"q": (h, k, "heads"), **kv, **({"gate": (h, v, "heads")} if self.gate else {})}

    # ---- the forward pass ----------------------------------------------------------------------------------------

    def _scores(self, sinks: Array | None) -> Scores:
        return {"scale": self.score_scale, "softcap": self.softcap, "sinks": sinks}

    def _project(self, x: Array) -> dict[str, Array]:
        """`x [b t d]` -> `q [b t h k]`, `k [b t g k]`, `v [b t g v]` and `gate [b t h v]` where there is one."""
        if self.has_variable("params", "qkv_proj"):  # made by `prepare`
            y = linear(x, self.get_variable("params", "qkv_proj").astype(self.dtype))
            if self.qkv_bias:
                y = y + self.get_variable("params", "qkv_bias").astype(self.dtype)
            return self._unfuse(y)

        def one(name: str, heads: int, width: int, axis: str) -> Array:
            split = axis if heads > 1 else None
            w = param(self, f"{name}_proj", fan_in(self.in_dim), (self.in_dim, heads, width), ("embed", split, "head"))
            y = linear(x, w.astype(self.dtype))
            if self.qkv_bias and name != "gate":
                y = y + param(self, f"{name}_bias", Constant(0.0), (heads, width), (split, "head")).astype(self.dtype)
            return shard(y, "batch", "length", "act_heads" if heads > 1 else None, None)

        return {name: one(name, *sizes) for name, sizes in self._widths.items()}

    def _unfuse(self, y: Array) -> dict[str, Array]:
        parts, start = {}, 0
        for name, (heads, width, _) in self._widths.items():
            parts[name] = y[..., start : start + heads * width].reshape(*y.shape[:2], heads, width)
            start += heads * width
        return parts

    def _norm(self, x: Array, name: str) -> Array:
        """QK-norm of `[b t h k]`."""
        norm = RMSNorm(
            eps=self.norm_eps,
            param_dtype=self.param_dtype,
            zero_centred=self.qk_norm_weight == "zero_centred",
            weightless=self.qk_norm_weight == "none",
            name=name,
        )
        return norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape) if self.qk_norm_all_heads else norm(x)

    def _place(self, query: Array, key: Array, positions: Array) -> tuple[Array, Array]:
        """Norm and turn queries and keys, in the order of the fields."""
        if self.qk_norm and not self.qk_norm_after_rope:
            query, key = self._norm(query, "q_norm"), self._norm(key, "k_norm")
        if self.rope is not None:
            angles = self.rope.angles(positions, self.key_dim)
            query, key = self.rope(query, angles), self.rope(key, angles)
        if self.qk_norm and self.qk_norm_after_rope:
            query, key = self._norm(query, "q_norm"), self._norm(key, "k_norm")
        return query, key

    def _inputs(self, x: Array, positions: Array) -> Inputs:
        """All that attention needs, of `x [b t d]`."""
        parts = self._project(x)
        query, key = self._place(parts["q"], parts["k"], positions)
        value = parts["v"] if self.value_scale is None else parts["v"] * jnp.asarray(self.value_scale, self.dtype)
        sinks = None
        if self.sinks:
            sinks = param(self, "sinks", Normal(0.02), (self.num_heads,), ("heads",)).astype(jnp.float32)
        return Inputs(query, key, value, sinks, parts.get("gate"))

    def _output(self, out: Array, gate: Array | None) -> Array:
        """`y [b t d]` from the heads' outputs `[b t h v]`."""
        d, h, v = self.d_model, self.num_heads, self.val_dim
        if gate is not None:
            out = out * jax.nn.sigmoid(gate)
        w = param(self, "o_proj", fan_in(h * v, RESIDUAL_SCALE), (h, v, d), ("heads", "head", "embed"))
        y = linear(shard(out, "batch", "length", "act_heads", None), w.astype(self.dtype), 2)
        if self.out_bias:
            y = y + param(self, "o_bias", Constant(0.0), (d,), ("norm",)).astype(self.dtype)
        return y

    @nn.compact
    def __call__(
        self, x: Array, ctx: Context, cache: Cache | None = None, shared: Mapping[str, Array] | None = None
    ) -> tuple[Array, Cache | None, Mapping[str, Array], Aux]:
        inputs = self._inputs(x, ctx.positions)
        aux: Aux = {}
        if cache is None:
            out = self._whole(inputs, ctx)
            if "attention" in ctx.capture:
                aux["capture/attention"] = self._map(inputs, ctx)
        elif isinstance(cache, UnrolledCache):
            out, cache = self._unrolled(inputs, ctx, cache)
        elif isinstance(cache, Paged):
            out, cache = self._on_pages(inputs, ctx, cache)
        else:
            assert not isinstance(cache, IndexedCache)
            out, cache = self._cached(*inputs[:4], ctx, cache)
        return self._output(out, inputs.gate), cache, {} if shared is None else shared, aux

    def _map(self, i: Inputs, ctx: Context, index: Array | None = None) -> Array:
        """The weights `[b h t s]` of whole sequences, for whoever looks; on keys of a choice `index [b t n]` alone where there is one."""
        seen = visible(ctx.positions, ctx.positions, ctx.segments, ctx.segments, self.mask)
        seen = seen if index is None else seen & chosen_mask(index, seen.shape[-1])
        return attention_weights(i.query, i.key, seen, **self._scores(i.sinks))

    def _whole(self, i: Inputs, ctx: Context) -> Array:
        """Whole sequences on themselves, `[b t h v]`."""
        scores, kernel = self._scores(i.sinks), self.kernel
        return attention(i.query, i.key, i.value, ctx.positions, ctx.segments, self.mask, kernel=kernel, **scores)

    def _unrolled(self, i: Inputs, ctx: Context, cache: UnrolledCache) -> tuple[Array, UnrolledCache]:
        """One more step of a draft layer's unroll; `ctx` is that of the tokens it reads."""
        first, cache = ctx.positions - cache.steps, cache.add(i.key, i.value, ctx.segments)
        if cache.steps == 1:
            return self._whole(i, ctx), cache
        held, scores = (cache.keys, cache.values), self._scores(i.sinks)
        return unrolled_attention(i.query, *held, first, ctx.segments, cache.segments, self.mask, **scores), cache

    def _on_pages(self, i: Inputs, ctx: Context, cache: Paged) -> tuple[Array, Paged]:
        """Write into the rows' pages, then attend where they lie."""
        rows = ctx.rows
        assert rows is not None
        key, value = (x[:, :, 0] if self.kv_heads == 1 else x.transpose(0, 2, 1, 3) for x in (i.key, i.value))
        cache = cache.append(KVCache(key, value), ctx)
        pages, valid = PagedKV(cache.pool.k, cache.pool.v, rows.tables[PAGES]), ctx.segments > 0
        scores = self._scores(i.sinks)
        return paged_attention(i.query, pages, ctx.positions, valid, self.mask, kernel=cache.kernel, **scores), cache

    def _cached(
        self, query: Array, key: Array, value: Array, sinks: Array | None, ctx: Context, cache: KVCache | RingCache
    ) -> tuple[Array, KVCache | RingCache]:
        """Write first, then read: the token sees itself. Slots beyond a row's last token hold nothing a mask lets through.

        A call of more new tokens than a ring has room for beyond its span would write over keys that its own first queries need, so
        it reads the old ring and its new keys first, and writes then.
        """
        b, t, h, k = query.shape
        valid, scores = ctx.segments > 0, self._scores(sinks)
        new_k, new_v = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
        if isinstance(cache, RingCache):
            rows = ctx.rows
            assert rows is not None
            written = cache.write(new_k, new_v, ctx.positions, valid, rows.lengths + rows.new, self.global_tokens)
            if not self._fits(cache.capacity, t):
                old = jnp.where(cache.positions < rows.lengths[:, None], cache.positions, EMPTY)
                heads = (lambda x: x[:, 0]) if self.kv_heads == 1 else (lambda x: x)
                fresh = Source(heads(new_k), heads(new_v), jnp.where(valid, ctx.positions, EMPTY), local=True)
                sources = Source(cache.k, cache.v, old), fresh
                return blockwise_sources(query, sources, ctx.positions, valid, self.mask, **scores), written
            cache, held = written, written.positions
        else:
            cache = KVCache(write(cache.k, new_k, ctx.positions, valid), write(cache.v, new_v, ctx.positions, valid))
            held = jnp.broadcast_to(jnp.arange(cache.capacity, dtype=jnp.int32), (b, cache.capacity))
        if t >= BLOCK:
            source = Source(cache.k, cache.v, held, ordered=isinstance(cache, KVCache))
            return blockwise_sources(query, (source,), ctx.positions, valid, self.mask, **scores), cache
        seen = self.mask.sees(ctx.positions[:, :, None], held[:, None]) & valid[:, :, None]
        q = query.reshape(b, t, self.kv_heads, -1, k).transpose(0, 2, 3, 1, 4)
        out = attend_cache(q, cache.k.astype(q.dtype), cache.v.astype(q.dtype), seen, **scores)
        return out.transpose(0, 3, 1, 2, 4).reshape(b, t, h, -1), cache

    def _fits(self, capacity: int, t: int) -> bool:
        """Can t tokens be written into a ring before its old keys are read? A ring cut to the length of the context never wraps."""
        room = capacity - self._held
        return room < 0 or t <= room + 1

    # ---- unbound: what callers ask without arrays ----------------------------------------------------------------

    @nn.nowrap
    def init_cache(self, batch: int, length: int, dtype: Any, *, draft: int = 0) -> Cache:
        """Room for `length` tokens a row, tentative ones included. A ring, where local attention bounds what is read, holds the span,
        the global tokens and `draft` more, and never more than `length`."""
        if self.rope is not None:
            self.rope.check_cache(length)
        if self.mask.span is None:
            return KVCache.zeros(batch, self.kv_heads, length, self.key_dim, self.val_dim, dtype)
        held = min(length, self._held + draft)
        return RingCache.zeros(batch, self.kv_heads, held, self.key_dim, self.val_dim, dtype)

    @nn.nowrap
    def prepare(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Fuse all projections of x into one matrix `[d, n]`: decoding is bound by reading weights, and one dot reads faster than three."""
        params, names = matrices_as(params, self.dtype), list(self._widths)
        fused = {"qkv_proj": jnp.concatenate([params[f"{n}_proj"].reshape(self.in_dim, -1) for n in names], axis=1)}
        if self.qkv_bias:
            biases = [params[f"{n}_bias"].reshape(-1) for n in names if n != "gate"]
            biases += [jnp.zeros(self.num_heads * self.val_dim, biases[0].dtype)] if self.gate else []
            fused["qkv_bias"] = jnp.concatenate(biases)
        gone = {f"{n}_{kind}" for n in names for kind in ("proj", "bias")}
        return {**{name: value for name, value in params.items() if name not in gone}, **fused}

    @nn.nowrap
    def cost(self, batch: int, t: int, s: float, dtype: Any) -> Cost:
        """FLOPs `2 b t d (h + g) (k + v) + 2 b t s h (k + v)`, and `2 b t d h v` for a gate; cache `g (k + v)` a token.

        Under local attention s is at most the span plus the global tokens, and the cache is a constant: so many slots, each with the
        4 bytes of its position. A dilated window meets, and holds, all of the span.
        """
        d, h, g, k, v = self.d_model, self.num_heads, self.kv_heads, self.key_dim, self.val_dim
        size = jnp.dtype(dtype).itemsize
        weights = self.in_dim * sum(heads * width for heads, width, _ in self._widths.values()) + d * h * v
        params = weights + (h if self.sinks else 0) + (d if self.out_bias else 0)
        params += (h * k + g * (k + v)) if self.qkv_bias else 0
        if self.qk_norm and self.qk_norm_weight != "none":
            params += (h + g) * k if self.qk_norm_all_heads else 2 * k
        ring = self.mask.span is not None
        met = min(s, self._held) if ring else s
        slot = g * (k + v) * size + (4 if ring else 0)
        return Cost(
            flops=2 * batch * t * weights + 2 * batch * t * met * h * (k + v),
            params=params,
            params_active=params,
            cache_per_token=0 if ring else slot,
            cache_constant=met * slot if ring else 0,
            cache_read=batch * met * slot,
            activation_bytes=batch * t * (d + (h + g) * (k + v)) * size + batch * h * t * met * 4,
            collective_bytes=batch * t * d * size,
        )
