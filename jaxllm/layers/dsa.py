"""DeepSeek Sparse Attention: latent attention on the keys that a lightning indexer chooses (DeepSeek-V3.2, arXiv 2512.02556)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jaxllm.cache import IndexedCache, LatentCache
from jaxllm.layers.base import Aux, Context, Cost
from jaxllm.layers.choosing import Choosing, Scorer, Shared, sampled
from jaxllm.layers.mla import MLA, Cache, Inputs
from jaxllm.ops.latent import absorb, expand, unabsorb
from jaxllm.ops.sparse_attention import attend_gathered, attend_masked, gathered_is_cheaper
from jaxllm.ops.topk import DIRECT


class DSA(Choosing, MLA, kw_only=True):
    """`o_h[t] = softmax over the top_k keys s of the largest I[t, s]`, else as MLA; I: see `Indexer`, whose z is the queries' latent.

    Fields are those of `MLA` and of `Choosing`; the index heads' first `qk_rope_head_dim` channels turn as the attention's do.
    index_head_dim: null = twice as many. Where no more than top_k keys exist, it is MLA.

    Gathered, the absorbed form attends to latents as they are cached. Cache: MLA's, and `index_head_dim / index_pool` elements a token
    where the layer has an indexer.
    """

    unrolls: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice(0 if self.rope is None else self.rope.dim(self.sizes[2]))

    @property
    def index_width(self) -> int:
        return 2 * self.sizes[2] if self.index_head_dim is None else self.index_head_dim

    @nn.compact
    def __call__(
        self, x: Array, ctx: Context, cache: Cache | None = None, shared: Mapping[str, Array] | None = None
    ) -> tuple[Array, Cache | None, Shared, Aux]:
        inputs = self._inputs(x, ctx)
        angles = None if self.rope is None else self.rope.angles(ctx.positions, self.sizes[2])
        scorer, cache = self._score(x, inputs.latent, angles, ctx, cache, shared)
        if cache is None:
            out, index, aux = self._whole(inputs, scorer, ctx, shared)
        else:
            out, index, cache = self._with_cache(inputs, scorer, ctx, cache, shared)
            aux = {}
        if "selected" in ctx.capture and index is not None:
            aux["capture/selected"] = index
        if "attention" in ctx.capture and cache is None:
            aux["capture/attention"] = self._map(inputs, ctx, index)
        given, aux = self._publish(shared, index, scorer, aux)
        return self._output(out, inputs.gate), cache, given, aux

    def _whole(
        self, i: Inputs, scorer: Scorer | None, ctx: Context, shared: Shared | None
    ) -> tuple[Array, Array | None, Aux]:
        """Whole sequences: output `[b t h v]`, the choice, and in training what the indexer learns."""
        t = ctx.tokens.shape[1]
        index = None if self.attend == "dense" else self._choose(scorer, ctx, shared)
        if index is None or t <= self.top_k:
            aux = {}
            if ctx.train and scorer is not None:
                query, key, _ = self._keys_values(i)
                aux = self._learn_dense(scorer, query, key.transpose(0, 2, 1, 3), ctx, self.score_scale)
            return self._expanded(i, ctx), index, aux
        learn = ctx.train and scorer is not None
        if self._gathers(t, t / 2):
            out, mass = self._gathered(i, i.c, i.k_r[:, :, 0], index, learn)
        else:
            query, key, value = self._keys_values(i)
            key, value = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
            out, mass = attend_masked(query, key, value, index, scale=self.score_scale, want_mass=learn, causal=True)
        if scorer is None or mass is None:
            return out, index, {}
        aux = self._learn_chosen(scorer, index, mass, ctx)
        if (at := sampled(self.recall_queries, t)).size:
            absorbed = absorb(i.q_n[:, at], i.up_k).transpose(0, 2, 1, 3)
            query = jnp.concatenate([absorbed, i.q_r[:, at]], axis=-1)
            key = jnp.concatenate([i.c, i.k_r[:, :, 0]], axis=-1)
            aux |= self._recall(scorer, at, query, key[:, None], ctx, self.score_scale)
        return out, index, aux

    def _with_cache(
        self, i: Inputs, scorer: Scorer | None, ctx: Context, cache: Cache, shared: Shared | None
    ) -> tuple[Array, Array | None, Cache]:
        """Write latents, choose among all that is cached, attend."""
        before = cache.held if isinstance(cache, IndexedCache) else cache
        assert isinstance(before, LatentCache)
        held = self._written(i, ctx, before)
        new: Cache = dataclasses.replace(cache, held=held) if isinstance(cache, IndexedCache) else held
        if self.attend == "dense":
            return self._cached(i, ctx, held), None, new
        index, s = self._choose(scorer, ctx, shared), held.capacity
        if s <= self.top_k:
            return self._cached(i, ctx, held), index, new
        latent, key = held.latent.astype(self.dtype), held.key.astype(self.dtype)
        if self._gathers(ctx.tokens.shape[1], s):
            return self._gathered(i, latent, key, index, False)[0], index, new
        keys_all, value = expand(latent, key, i.up_k, i.up_v)
        query = jnp.concatenate([i.q_n, i.q_r], axis=-1)
        return attend_masked(query, keys_all, value, index, scale=self.score_scale)[0], index, new

    @nn.nowrap
    def _gathers(self, t: int, s: float) -> bool:
        """Whether t queries, which see s keys, gather them."""
        if self.gather is not None:
            return self.gather
        r, n, o, v = self.sizes
        return t <= DIRECT or gathered_is_cheaper(s, self.chosen, 2 * r + o, n + o + v)

    def _gathered(self, i: Inputs, c: Array, k_r: Array, index: Array, want_mass: bool) -> tuple[Array, Array | None]:
        """Absorbed attention on latents `c [b s r]` and keys `k_r [b s o]`, each query's own."""
        q = absorb(i.q_n, i.up_k).transpose(0, 2, 1, 3)
        z, mass = attend_gathered((q, i.q_r), (c, k_r), None, index, scale=self.score_scale, want_mass=want_mass)
        return unabsorb(z.transpose(0, 2, 1, 3), i.up_v), mass

    # ---- unbound: what callers ask without arrays ----------------------------------------------------------------

    @nn.nowrap
    def init_cache(self, batch: int, length: int, dtype: Any, *, draft: int = 0) -> Cache:
        """MLA's, and the index keys beside it; what is rejected is written over."""
        held = MLA.init_cache(self, batch, length, dtype, draft=draft)
        if not self.owns_indexer or not isinstance(held, LatentCache):
            return held
        return self.index_cache(held, batch, length, draft, dtype)

    @nn.nowrap
    def cost(self, batch: int, t: int, s: float, dtype: Any) -> Cost:
        """MLA's weights; the indexer's: see `index_cost`; and attention on n = top_k keys, and `index_pool - 1` more, twice:

        gathered `t n h (2 r + o)`, or under a mask `t s h (n + o + v)`, whichever the layer takes; all of it MLA's where s <= top_k.

        Cache: `r + o` a token, and the indexer's; n latents and the index keys are read.
        """
        dense = MLA.cost(self, batch, t, s, dtype)
        r, n, o, v = self.sizes
        h = self.num_heads
        size = jnp.dtype(dtype).itemsize
        sparse = self.attend == "sparse" and s > self.top_k
        extra = self.index_cost(batch, t, s if sparse else 0, self.q_lora_rank or self.d_model, dtype)
        if not sparse:
            return dense + extra
        none = MLA.cost(self, batch, t, 0, dtype)  # without attention
        met = float(self.chosen)
        if self._gathers(t, s):
            attention = t * met * h * (2 * r + o)
        else:
            attention = t * s * h * (n + o + v) + (max(s - t, 0) * r * h * (n + v))
        return extra + Cost(
            flops=none.flops + 2 * batch * attention,
            params=none.params,
            params_active=none.params_active,
            cache_per_token=none.cache_per_token,
            cache_read=batch * t * met * (2 * r + o) * size,
            activation_bytes=none.activation_bytes + batch * t * met * 4,
            collective_bytes=none.collective_bytes,
        )
