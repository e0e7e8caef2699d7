"""Compressed attention (DeepSeek-V4, arXiv 2606.19348): near tokens exactly, the rest as entries of m tokens: CSA and HCA."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.cache import CompressedCache, read_recent, recent_slots, write, write_recent
from jaxllm.errors import UserError
from jaxllm.layers.base import RESIDUAL_SCALE, Aux, Context, Cost, Layer, Normal, fan_in, param
from jaxllm.layers.choosing import mean_recall, sampled
from jaxllm.layers.compressor import Compressor, EntryIndexer, turn_tail
from jaxllm.layers.norm import RMSNorm
from jaxllm.layers.rope import RoPE
from jaxllm.mesh import shard
from jaxllm.ops.compress import Windows, touched_windows, whole_windows
from jaxllm.ops.compressed_attention import Far, Near, attend_compressed, mass_on_entries, weights_naive
from jaxllm.ops.index_loss import imitate_chosen, recall_of
from jaxllm.ops.linear import linear
from jaxllm.ops.topk import DIRECT, Docs, index_scores, select

Shared = Mapping[str, Array]


class CompressedAttention(Layer, kw_only=True):
    """One kv head whose key is its value, over the window and over entries:

        c = norm(x W_qa);   q_h = R norm_1(c W_qb,h);   kv = R norm(x W_kv);   keys = [kv of the last `window` tokens | entries]
        o_h = R^-1 sum_j softmax_j([q_h . key_j head_dim^-0.5, sink_h]) key_j;   y = concat_g(o_g A_g) B

    R turns the last `rope_head_dim` channels by the token's position (an entry's: of its first token); as keys are values, R^-1 takes
    the query's position out of the output again. norm_1 has no weight. A_g, B: the output projection, in `out_groups` groups of heads of
    rank `out_lora_rank` each.

    compress_rate m: tokens of an entry; null = the window alone. overlap: entries of 2 m tokens (CSA), or of their own m (HCA). top_k:
    entries of a query, of an indexer's choice (`index_heads`, `index_head_dim`); null = all that are complete, without an indexer.
    attend: "dense" = all entries, while the indexer only learns. In training a layer with an indexer reports `loss/indexer`: see
    `jaxllm.ops.index_loss`; its target is attention's weight on the entries. recall_queries: queries of a row, evenly spread, for which
    it also reports `metric/recall`, the share of that weight that the best top_k entries hold and the choice finds; 0 = none.

    Windows are counted from a document's first valid token, wherever it lies in a row, so packed rows need no alignment. Cache: `k / m`
    elements a token, `index_head_dim / m` for an indexer, and a constant for the window and for windows not yet complete.
    """

    num_heads: int
    head_dim: int | None = None
    q_lora_rank: int = 64
    rope_head_dim: int | None = None
    rope: RoPE = RoPE(interleaved=True)
    window: int = 128
    compress_rate: int | None = None
    overlap: bool = False
    top_k: int | None = None
    attend: str = "sparse"
    index_heads: int = 16
    index_head_dim: int | None = None
    recall_queries: int = 0
    out_groups: int = 2
    out_lora_rank: int = 64
    gather: bool | None = None

    def __post_init__(self) -> None:
        if self.num_heads < 1 or (self.head_dim is None and self.d_model % self.num_heads):
            raise UserError(
                f"num_heads: {self.num_heads} does not divide d_model={self.d_model}; set head_dim or change one"
            )
        if self.out_groups < 1 or self.num_heads % self.out_groups:
            raise UserError(f"out_groups: {self.out_groups} must divide num_heads={self.num_heads}")
        for name in ("q_lora_rank", "out_lora_rank", "window", "index_heads"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: {getattr(self, name)} must be at least 1")
        k, i, o = self.widths
        if not (0 < o <= k and o <= i) or o % 2:
            raise UserError(
                f"rope_head_dim: {o} must be even and at most head_dim={k} and index_head_dim={i}, whose last channels turn"
            )
        if self.rope.partial != 1 or not self.rope.interleaved:
            raise UserError(
                f"rope: partial={self.rope.partial} must be 1, as rope_head_dim says how many channels turn, and interleaved true"
            )
        if self.compress_rate is None and (self.overlap or self.top_k is not None):
            raise UserError("compress_rate: null leaves no entries, so overlap and top_k mean nothing")
        if self.compress_rate is not None and self.compress_rate < 1:
            raise UserError(f"compress_rate: {self.compress_rate} must be at least 1, the tokens of an entry")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k: {self.top_k} must be at least 1; null = all entries")
        if self.recall_queries < 0:
            raise UserError(f"recall_queries: {self.recall_queries} must be 0 (none) or more")
        if self.attend not in ("sparse", "dense"):
            raise UserError(f"attend: {self.attend!r} is not one of sparse, dense")
        super().__post_init__()

    # ---- what the fields mean ------------------------------------------------------------------------------------

    @property
    def widths(self) -> tuple[int, int, int]:
        """Channels of a head, of an index head, and those of either that turn, with what null means filled in."""
        k = self.d_model // self.num_heads if self.head_dim is None else self.head_dim
        i = k if self.index_head_dim is None else self.index_head_dim
        return k, i, (k // 2 if self.rope_head_dim is None else self.rope_head_dim)

    @nn.nowrap
    def _compressor(self, dim: int, **kwargs: Any) -> Compressor:
        return Compressor(
            rate=self.compress_rate or 1,
            dim=dim,
            overlap=self.overlap,
            rope=self.rope,
            rope_dim=self.widths[2],
            eps=self.norm_eps,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            **({"parent": None} | kwargs),
        )

    @nn.nowrap
    def _entry_indexer(self, **kwargs: Any) -> EntryIndexer:
        compressor = self._compressor(self.widths[1])
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        return EntryIndexer(num_heads=self.index_heads, compressor=compressor, **types, **({"parent": None} | kwargs))

    @property
    def _before(self) -> tuple[int, int]:
        """Tokens before a call that its window, and its entries, need."""
        return self.window - 1, 0 if self.compress_rate is None else self._compressor(1).span - 1

    # ---- the forward pass ----------------------------------------------------------------------------------------

    def _norm(self, name: str, x: Array) -> Array:
        return RMSNorm(eps=self.norm_eps, param_dtype=self.param_dtype, round_first=False, name=name)(x)

    def _project(self, x: Array, angles: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """`c [b t r]`, `q [b t h k]` and `kv [b t k]` of `x [b t d]`."""
        d, h, r, k = self.d_model, self.num_heads, self.q_lora_rank, self.widths[0]
        w_a = param(self, "q_a_proj", fan_in(d), (d, r), ("embed", "latent")).astype(self.dtype)
        w_b = param(self, "q_b_proj", fan_in(r), (r, h, k), ("latent", "heads", "head")).astype(self.dtype)
        w_kv = param(self, "kv_proj", fan_in(d), (d, k), ("embed", "head")).astype(self.dtype)
        c = self._norm("q_a_norm", linear(x, w_a))
        q = RMSNorm(eps=self.norm_eps, weightless=True, name="q_norm")(
            shard(linear(c, w_b), "batch", "length", "act_heads", None)
        )
        kv = self._norm("kv_norm", linear(x, w_kv))
        return c, turn_tail(q, angles), turn_tail(kv[:, :, None], angles)[:, :, 0]

    def _output(self, out: Array, angles: tuple[Array, Array]) -> Array:
        """`y [b t d]` from the heads' outputs `[b t h k]`."""
        d, h, g, r, k = self.d_model, self.num_heads, self.out_groups, self.out_lora_rank, self.widths[0]
        out = turn_tail(out, angles, back=True)
        axes = ("heads", None, "head", "latent")
        w_a = param(self, "o_a_proj", fan_in(h // g * k), (g, h // g, k, r), axes).astype(self.dtype)
        w_b = param(self, "o_b_proj", fan_in(g * r, RESIDUAL_SCALE), (g, r, d), ("heads", "latent", "embed"))
        grouped = shard(out.reshape(*out.shape[:2], g, h // g, k), "batch", "length", "act_heads", None, None)
        u = jnp.einsum("btghk,ghkr->btgr", grouped, w_a)
        return linear(u, w_b.astype(self.dtype), 2)

    @nn.compact
    def __call__(
        self, x: Array, ctx: Context, cache: CompressedCache | None = None, shared: Shared | None = None
    ) -> tuple[Array, CompressedCache | None, Shared, Aux]:
        angles = self.rope.angles(ctx.positions, self.widths[2])
        c, q, kv = self._project(x, angles)
        sinks = param(self, "sinks", Normal(0.02), (self.num_heads,), ("heads",)).astype(jnp.float32)
        near, cache = self._near(kv, ctx, cache)
        far, scorer, cache = (None, None, cache) if self.compress_rate is None else self._far(x, c, angles, ctx, cache)
        learn = ctx.train and scorer is not None
        scale = self.widths[0] ** -0.5
        out, mass = attend_compressed(q, near, far, sinks, window=self.window, scale=scale, want_mass=learn)
        aux: Aux = {}
        if learn and scorer is not None and far is not None and mass is not None:
            loss = imitate_chosen(*scorer[:3], scorer[3], mass, scale=self._index_scale)
            aux["loss/indexer"] = jnp.sum(jnp.where(ctx.segments > 0, loss, 0.0))
            if (at := sampled(self.recall_queries, x.shape[1])).size:
                there, seen = mass_on_entries(q[:, at], at, near, far, sinks, window=self.window, scale=scale)
                scores = index_scores(scorer[0][:, at], scorer[1][:, at], scorer[2], self._index_scale)
                aux["metric/recall"] = mean_recall(*recall_of(scores, there, seen, self.top_k or 1))
        if "attention" in ctx.capture and cache is None:
            weights, _ = weights_naive(q, near, far, sinks, window=self.window, scale=scale)
            maps, end = jnp.swapaxes(weights, 1, 2), near.keys.shape[1]
            aux["capture/attention"] = maps[..., end - x.shape[1] : end]  # before the call there is nothing
            if far is not None:
                aux["capture/entries"] = maps[..., end:]
        if "selected" in ctx.capture and scorer is not None:
            aux["capture/selected"] = scorer[3]
        return self._output(out, angles), cache, {} if shared is None else shared, aux

    def _near(self, kv: Array, ctx: Context, cache: CompressedCache | None) -> tuple[Near, CompressedCache | None]:
        """The window's keys: those of the call behind the ones that went before, with a cache that holds them too."""
        n = self._before[0]
        if cache is None:
            ahead = ((0, 0), (n, 0))
            return Near(
                jnp.pad(kv, (*ahead, (0, 0))), jnp.pad(ctx.positions, ahead), jnp.pad(ctx.segments, ahead)
            ), None
        rows = ctx.rows
        assert rows is not None
        old = read_recent(cache.window, rows.lengths, n).astype(kv.dtype)
        places = rows.lengths[:, None] - n + jnp.arange(n, dtype=jnp.int32)
        near = Near(
            jnp.concatenate([old, kv], axis=1),
            jnp.concatenate([places, ctx.positions], axis=1),
            jnp.concatenate([(places >= 0).astype(jnp.int32), ctx.segments], axis=1),
        )
        end = rows.lengths + rows.new
        return near, dataclasses.replace(
            cache, window=write_recent(cache.window, kv, ctx.positions, ctx.segments > 0, end)
        )

    @property
    def _index_scale(self) -> float:
        return self.widths[1] ** -0.5

    def _far(
        self, x: Array, c: Array, angles: tuple[Array, Array], ctx: Context, cache: CompressedCache | None
    ) -> tuple[Far, tuple[Array, Array, Array, Array] | None, CompressedCache | None]:
        """Entries and which of them are met; the scores' parts `q, w, k` and choice of an indexer; the cache with all that is new."""
        m, before, index_before = self.compress_rate or 1, None, None
        compressor = self._compressor(self.widths[0], parent=self, name="compress")
        docs: Docs | None = None
        if cache is None:
            windows, reach = whole_windows(ctx.positions, ctx.segments, m)
            docs = (ctx.segments, windows.docs)
        else:
            rows = ctx.rows
            assert rows is not None and cache.recent is not None
            windows = touched_windows(rows.lengths, rows.new, x.shape[1], m, self._before[1])
            reach = jnp.where(ctx.segments > 0, (ctx.positions + 1) // m, 0)
            recent = read_recent(cache.recent, rows.lengths, self._before[1])
            before, index_before = recent[..., : 2 * compressor.width], recent[..., 2 * compressor.width :]
        entries, fresh = compressor(x, before, windows)
        index = None
        if self.top_k is not None:
            x, c = jax.lax.stop_gradient((x, c))
            indexer = self._entry_indexer(parent=self, name="index")
            q_i, w_i, k_i, fresh_i = indexer(x, c, angles, index_before, windows)
            fresh = jnp.concatenate([fresh, fresh_i], axis=-1)
            index = (q_i, w_i, k_i)
        if cache is not None:
            entries, index, cache = self._stored(entries, index, fresh, windows, ctx, cache)
        e = entries.shape[1]
        if index is None:
            return Far(entries, reach, docs, None), None, cache
        most = e if self.attend == "dense" else min(self.top_k or e, e)
        fixed = jax.lax.stop_gradient(index)
        chosen = select(*fixed, reach, most, scale=self._index_scale, docs=docs)
        gather = x.shape[1] <= DIRECT or most * 4 < e if self.gather is None else self.gather
        return Far(entries, reach, docs, None if most == e else chosen, gather), (*index, chosen), cache

    def _stored(
        self,
        entries: Array,
        index: tuple[Array, Array, Array] | None,
        fresh: Array,
        windows: Windows,
        ctx: Context,
        cache: CompressedCache,
    ) -> tuple[Array, tuple[Array, Array, Array] | None, CompressedCache]:
        """All entries and index keys, this call's among them, and the cache that holds them and its tokens."""
        rows, done = ctx.rows, windows.docs > 0
        assert rows is not None and cache.entries is not None and cache.recent is not None
        kept = write(cache.entries, entries[:, None], windows.number, done)
        keys = cache.index
        if index is not None and keys is not None:
            keys = write(keys, index[2][:, None], windows.number, done)
            index = (index[0], index[1], keys.astype(self.dtype))
        end = rows.lengths + rows.new
        recent = write_recent(cache.recent, fresh, ctx.positions, ctx.segments > 0, end)
        return kept.astype(self.dtype), index, dataclasses.replace(cache, recent=recent, entries=kept, index=keys)

    # ---- unbound: what callers ask without arrays ----------------------------------------------------------------

    @nn.nowrap
    def init_cache(self, batch: int, length: int, dtype: Any, *, draft: int = 0) -> CompressedCache:
        """Rings of the window and of windows not yet complete, with room for `draft` tokens more, and `length // m` entries."""
        self.rope.check_cache(length)
        k, i, _ = self.widths
        near, far = (recent_slots(n, draft) for n in self._before)
        window = jnp.zeros((batch, near, k), dtype)
        if self.compress_rate is None:
            return CompressedCache(window, None, None, None)
        e = max(length // self.compress_rate, 1)
        width = self._recent_width
        index = None if self.top_k is None else jnp.zeros((batch, e, i), dtype)
        return CompressedCache(window, jnp.zeros((batch, far, width), dtype), jnp.zeros((batch, e, k), dtype), index)

    @property
    def _recent_width(self) -> int:
        """Elements that a token brings to the windows it is part of."""
        k, i, _ = self.widths
        return 2 * self._compressor(k).width + (0 if self.top_k is None else 2 * self._compressor(i).width)

    @nn.nowrap
    def cost(self, batch: int, t: int, s: float, dtype: Any) -> Cost:
        """FLOPs, twice: t times the weights; `2 t h k W` on the window, `2 t h k min(top_k, s / m)` on entries; and `t (s / m) i k_i`
        of the indexer where there are more entries than it may choose.

        Cache: `(k + k_i) / m` elements a token; `(W - 1) k`, and `span - 1` times what a token brings, whatever the context.
        """
        k, i, _ = self.widths
        d, h, g, r, r_o = self.d_model, self.num_heads, self.out_groups, self.q_lora_rank, self.out_lora_rank
        size = jnp.dtype(dtype).itemsize
        weights = d * r + r * h * k + d * k + h * k * r_o + g * r_o * d
        params = weights + r + k + h
        near, far = (recent_slots(n, 0) for n in self._before)
        met: float = self.window if s > t else min(s, self.window)
        constant, per_token, scored = near * k, 0.0, 0.0
        read: float = near * k
        if self.compress_rate is not None:
            e = s // self.compress_rate if s > t else s / self.compress_rate
            compressor = self._compressor(k)
            weights, params = weights + compressor.weights(d), params + compressor.weights(d) + compressor.small
            chosen = e if self.top_k is None or self.attend == "dense" else min(self.top_k, e)
            met, read, per_token = met + chosen, read + chosen * k, k / self.compress_rate
            constant += far * self._recent_width
            if self.top_k is not None:
                indexer = self._entry_indexer()
                weights += indexer.weights(d, r)
                params += indexer.weights(d, r) + indexer.compressor.small
                per_token += i / self.compress_rate
                if chosen < e:
                    scored, read = e * self.index_heads * i, read + e * i
        return Cost(
            flops=2 * batch * t * (weights + 2 * h * k * met + scored),
            params=params,
            params_active=params,
            cache_per_token=per_token * size,
            cache_constant=constant * size,
            cache_read=batch * read * size,
            activation_bytes=batch * t * (d + 2 * r + 2 * h * k + 2 * k + self._recent_width + g * r_o) * size,
            collective_bytes=batch * t * d * size,
        )
