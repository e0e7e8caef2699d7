"""Grouped-query attention on the keys that a lightning indexer chooses: DSA's choice (arXiv 2512.02556) without its latents."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jaxllm.cache import IndexedCache, KVCache, write
from jaxllm.errors import UserError
from jaxllm.layers.base import Aux, Context, Cost
from jaxllm.layers.choosing import Choosing, Scorer, Shared, sampled
from jaxllm.layers.gqa import GQA, Cache, Inputs
from jaxllm.ops.attention import per_group
from jaxllm.ops.sparse_attention import attend_gathered, attend_masked, gathered_is_cheaper
from jaxllm.ops.topk import DIRECT


class SparseGQA(Choosing, GQA, kw_only=True):
    """`o_h[t] = softmax over the top_k keys s of the largest I[t, s]`, else as GQA; I: see `Indexer`, whose z is x.

    Fields are those of `GQA`, without local attention, and of `Choosing`. The choice is one for all heads. index_head_dim: null = the
    attention's; its first channels turn as the attention's do. Cache: GQA's, and `index_head_dim / index_pool` elements a token for an
    indexer.
    """

    unrolls: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask.span is not None or self.dilation > 1:
            raise UserError(
                "window, chunk, dilation: an indexer chooses among all keys; leave them out or take another mixer"
            )
        self.check_choice(0 if self.rope is None else self.rope.dim(self.key_dim))

    @property
    def reads_pages(self) -> bool:
        return False

    @property
    def index_width(self) -> int:
        return self.key_dim if self.index_head_dim is None else self.index_head_dim

    @nn.compact
    def __call__(
        self, x: Array, ctx: Context, cache: Cache | None = None, shared: Mapping[str, Array] | None = None
    ) -> tuple[Array, Cache | None, Shared, Aux]:
        inputs = self._inputs(x, ctx.positions)
        angles = None if self.rope is None else self.rope.angles(ctx.positions, self.key_dim)
        scorer, cache = self._score(x, None, angles, ctx, cache, shared)
        if cache is None:
            out, index, aux = self._chosen(inputs, scorer, ctx, shared)
        else:
            out, index, cache = self._with_cache(inputs, scorer, ctx, cache, shared)
            aux = {}
        if "selected" in ctx.capture and index is not None:
            aux["capture/selected"] = index
        if "attention" in ctx.capture and cache is None:
            aux["capture/attention"] = self._map(inputs, ctx, index)
        given, aux = self._publish(shared, index, scorer, aux)
        return self._output(out, inputs.gate), cache, given, aux

    def _chosen(
        self, i: Inputs, scorer: Scorer | None, ctx: Context, shared: Shared | None
    ) -> tuple[Array, Array | None, Aux]:
        """Whole sequences: output `[b t h v]`, the choice, and in training what the indexer learns."""
        t = ctx.tokens.shape[1]
        index = None if self.attend == "dense" else self._choose(scorer, ctx, shared)
        learn = ctx.train and scorer is not None
        key, value = i.key.transpose(0, 2, 1, 3), i.value.transpose(0, 2, 1, 3)
        if index is None or t <= self.top_k:
            aux = {}
            if learn and scorer is not None:
                scores = self._scores(per_group(i.sinks, self.kv_heads))
                aux = self._learn_dense(scorer, i.query, key, ctx, **scores)
            return self._whole(i, ctx), index, aux
        if self._gathers(t, t / 2):
            out, mass = self._gathered(i, key, value, index, learn)
        else:
            scores = self._scores(per_group(i.sinks, self.kv_heads))
            out, mass = attend_masked(i.query, key, value, index, want_mass=learn, causal=True, **scores)
        if scorer is None or mass is None:
            return out, index, {}
        aux = self._learn_chosen(scorer, index, mass, ctx)
        if (at := sampled(self.recall_queries, t)).size:
            scores = self._scores(per_group(i.sinks, self.kv_heads))
            aux |= self._recall(scorer, at, i.query[:, at], key, ctx, **scores)
        return out, index, aux

    def _with_cache(
        self, i: Inputs, scorer: Scorer | None, ctx: Context, cache: Cache, shared: Shared | None
    ) -> tuple[Array, Array | None, Cache]:
        """Write keys and values, choose among all that is cached, attend."""
        held = cache.held if isinstance(cache, IndexedCache) else cache
        assert isinstance(held, KVCache)
        s = held.capacity

        def with_index(held: Cache) -> Cache:
            if isinstance(cache, IndexedCache) and isinstance(held, KVCache):
                return dataclasses.replace(cache, held=held)
            return held

        index = None if self.attend == "dense" else self._choose(scorer, ctx, shared)
        if index is None or s <= self.top_k:
            out, new = self._cached(*i[:4], ctx, held)
            return out, index, with_index(new)
        valid = ctx.segments > 0
        held = KVCache(
            write(held.k, i.key.transpose(0, 2, 1, 3), ctx.positions, valid),
            write(held.v, i.value.transpose(0, 2, 1, 3), ctx.positions, valid),
        )
        key, value = (x.astype(self.dtype) for x in (held.k, held.v))
        if self._gathers(ctx.tokens.shape[1], s):
            return self._gathered(i, key, value, index, False)[0], index, with_index(held)
        if self.kv_heads == 1:
            key, value = key[:, None], value[:, None]
        scores = self._scores(per_group(i.sinks, self.kv_heads))
        return attend_masked(i.query, key, value, index, **scores)[0], index, with_index(held)

    @nn.nowrap
    def _gathers(self, t: int, s: float) -> bool:
        """Whether t queries, which see s keys, gather them."""
        if self.gather is not None:
            return self.gather
        return t <= DIRECT or gathered_is_cheaper(s, self.chosen, 1, 1)

    def _gathered(
        self, i: Inputs, key: Array, value: Array, index: Array, want_mass: bool
    ) -> tuple[Array, Array | None]:
        """Attention on keys `[b (g) s k]`, values `[b (g) s v]`: each group is a row with the same choice."""
        b, t, h, k = i.query.shape
        g = self.kv_heads
        query = i.query.reshape(b, t, g, h // g, k).transpose(0, 2, 1, 3, 4).reshape(b * g, t, h // g, k)
        sinks = None if i.sinks is None else jnp.tile(i.sinks.reshape(g, 1, 1, h // g), (b, 1, 1, 1))
        key, value = (x.reshape(b * g, *x.shape[-2:]) for x in (key, value))
        places = jnp.repeat(index, g, axis=0)
        out, mass = attend_gathered((query,), (key,), value, places, want_mass=want_mass, **self._scores(sinks))
        out = out.reshape(b, g, t, h // g, -1).transpose(0, 2, 1, 3, 4).reshape(b, t, h, -1)
        return out, None if mass is None else jnp.sum(mass.reshape(b, g, t, -1), axis=1)

    # ---- unbound: what callers ask without arrays ----------------------------------------------------------------

    @nn.nowrap
    def init_cache(self, batch: int, length: int, dtype: Any, *, draft: int = 0) -> Cache:
        """GQA's, and the index keys beside it; what is rejected is written over."""
        held = GQA.init_cache(self, batch, length, dtype, draft=draft)
        if not self.owns_indexer or not isinstance(held, KVCache):
            return held
        return self.index_cache(held, batch, length, draft, dtype)

    @nn.nowrap
    def cost(self, batch: int, t: int, s: float, dtype: Any) -> Cost:
        """GQA's of top_k keys, and `index_pool - 1` more, where they are gathered, else of s; and the indexer's: see `index_cost`.

        Cache: GQA's `g (k + v)` a token, and the indexer's; what is gathered is read for each query anew.
        """
        sparse = self.attend == "sparse" and s > self.top_k
        gathers = sparse and self._gathers(t, s)
        cost = GQA.cost(self, batch, t, self.chosen if gathers else s, dtype)
        if gathers:
            cost = cost + Cost(cache_read=(t - 1) * cost.cache_read)
        return cost + self.index_cost(batch, t, s if sparse else 0, self.d_model, dtype)
