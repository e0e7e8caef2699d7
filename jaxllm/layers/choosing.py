"""What mixers that look keys up have in common: whose indexer chooses, what it learns from, what they hand on to later layers."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxllm.cache import IndexedCache, KVCache, LatentCache, read_recent, recent_slots, write, write_recent
from jaxllm.errors import UserError
from jaxllm.layers.base import Aux, Context, Cost, Layer
from jaxllm.layers.indexer import Indexer
from jaxllm.ops.compress import pools_of, tokens_of, touched_windows, whole_windows
from jaxllm.ops.index_loss import Keys, Queries, beside_all, imitate_all, imitate_chosen, recall_of, sight
from jaxllm.ops.topk import Docs, select

Shared = Mapping[str, Array]


class Scorer(NamedTuple):
    """An indexer's queries `q [b t h k]` and `w [b t h]` of a call's tokens; its keys `k [b s k]`, these tokens' or all in a cache."""

    q: Array
    w: Array
    k: Array


def sampled(count: int, t: int) -> np.ndarray:
    """`count` places of t tokens at even distances, the last token among them; all if there are not more."""
    n = min(count, t)
    return np.arange(1, n + 1) * t // max(n, 1) - 1


def mean_recall(recall: Array, free: Array) -> Array:
    """Over the queries that have a choice."""
    return jnp.sum(recall) / jnp.maximum(jnp.sum(free), 1)


class Choosing(Layer, kw_only=True):
    """Base of mixers whose queries attend to `top_k` keys of an indexer's choice (DSA) instead of all.

    top_k: keys of a query; not a shape, so that it may be set anew for a built model. indexer: "full" = a layer of its own choice;
    "shared" = no indexer and no index keys, but the choice of the nearest full layer before (IndexShare, arXiv 2603.12201).

    attend: "sparse", or "dense" = to all keys, while the indexer only learns (warm-up). In training each layer reports `loss/indexer`,
    the sum over tokens of `KL(attention || indexer)`; its gradient reaches the indexer alone. Layers that share an indexer report the mean
    of theirs together, which has the gradient of one KL to their mean attention.

    recall_queries: queries of a row, evenly spread, whose attention to all keys is computed as well while attention is sparse, in
    training, so that `metric/recall` keeps saying which share of it the choice finds; 0 = none. Dense attention always says it.

    index_heads, index_head_dim, index_interleaved: see `Indexer`. gather: how keys are met, null = the cheaper way: true, each query
    gathers its own; false, all keys under a mask.

    index_dtype: what queries and keys of the scores are rounded to, and the keys cached in; null = the layer's and the cache's. Products
    are summed in fp32 all the same. bfloat16 halves the index keys that a decode step reads from a float32 cache (V3.2's own kernels keep
    eight bits). What one shape of call rounds up another may round down, so a choice between near equals is not always that of another.

    index_pool m: tokens of an index key (GLM-5.3-Flash). With more than 1, a query chooses `top_k / m` pools of m tokens, complete ones,
    counted from its document's first token, and has the tokens of its own pool besides while that is not complete. Index heads then
    take no rotation. Index keys cost 1/m of a cache and of their scores; what a pool not yet complete is made of waits in a ring.
    """

    top_k: int
    indexer: str = "full"
    attend: str = "sparse"
    index_heads: int = 16
    index_head_dim: int | None = None
    index_interleaved: bool = False
    index_dtype: str | None = None
    index_pool: int = 1
    recall_queries: int = 0
    gather: bool | None = None

    def check_choice(self, turned: int) -> None:
        """Refuse wrong fields; `turned`: channels of an index head that rotate."""
        for name, known in (("indexer", ("full", "shared")), ("attend", ("sparse", "dense"))):
            if (value := getattr(self, name)) not in known:
                raise UserError(f"{name}: {value!r} is not one of {', '.join(known)}")
        if self.recall_queries < 0:
            raise UserError(f"recall_queries: {self.recall_queries} must be 0 (none) or more")
        if self.index_dtype not in (None, "bfloat16", "float32"):
            raise UserError(f"index_dtype: {self.index_dtype!r} is not bfloat16 or float32; null = the cache's")
        if self.index_pool > 1 and self.index_interleaved:
            raise UserError("index_interleaved: true turns nothing where index_pool is more than 1; leave it at false")
        turned = turned if self.index_pool == 1 else 0
        Indexer.check(self.index_heads, self.index_width, turned, self.top_k, self.index_pool)

    @property
    def index_width(self) -> int:
        """Channels of an index head."""
        raise NotImplementedError

    @nn.nowrap
    def _index_dtype(self, dtype: Any) -> Any:
        """Of index keys where all else is in `dtype`."""
        return dtype if self.index_dtype is None else jnp.dtype(self.index_dtype)

    @property
    def chosen(self) -> int:
        """Places of a query's choice."""
        return self.top_k + self.index_pool - 1

    # ---- what is handed on -----------------------------------------------------------------------------------------

    @property
    def owns_indexer(self) -> bool:
        return self.indexer == "full"

    @property
    def takes(self) -> tuple[str, ...]:
        return () if self.owns_indexer else ("topk",)

    @property
    def gives(self) -> tuple[str, ...]:
        return ("topk",)

    @nn.nowrap
    def shared_spec(self, b: int, t: int, train: bool, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Of a layer that takes: the choice, and in training the scores' parts, for every layer that an indexer serves teaches it."""
        if self.owns_indexer:
            return {}
        h, k = self.index_heads, self.index_width
        spec = {"topk": jax.ShapeDtypeStruct((b, t, self.chosen), jnp.int32)}
        if train:
            spec["index_q"] = jax.ShapeDtypeStruct((b, t, h, k), dtype)
            spec["index_w"] = jax.ShapeDtypeStruct((b, t, h), jnp.float32)
            spec["index_k"] = jax.ShapeDtypeStruct((b, max(t // self.index_pool, 1), k), dtype)
            spec["index_loss"] = jax.ShapeDtypeStruct((2,), jnp.float32)
        return spec

    def _publish(
        self, shared: Shared | None, index: Array | None, scorer: Scorer | None, aux: Aux
    ) -> tuple[Shared, Aux]:
        """What later layers find, only what one of them asked for; and aux with this layer's part of a loss that several share.

        The loss of an indexer is the mean over all layers it serves, and no layer knows how many will follow. So each adds what the mean
        changes by: with S the sum of the n losses so far, `S_n / n - S_(n-1) / (n-1)`, which come to `S_N / N`.
        """
        out = dict(shared or {})
        if index is not None and "topk" in out:
            if out["topk"].shape != index.shape:
                name, here = ("top_k", self.top_k) if self.index_pool == 1 else ("top_k + index_pool - 1", self.chosen)
                raise UserError(
                    f"{name}: {here} here, {out['topk'].shape[-1]} in a layer that shares it; make them equal"
                )
            out["topk"] = index
        if scorer is not None and "index_q" in out:
            out |= {"index_q": scorer.q, "index_w": scorer.w, "index_k": scorer.k}
        if "index_loss" in out and "loss/indexer" in aux:
            before = jnp.zeros(2) if self.owns_indexer else out["index_loss"]
            out["index_loss"] = after = before + jnp.stack([aux["loss/indexer"], jnp.ones(())])
            aux = aux | {"loss/indexer": after[0] / after[1] - before[0] / jnp.maximum(before[1], 1)}
        return out, aux

    # ---- choosing and learning --------------------------------------------------------------------------------------

    def _score(
        self,
        x: Array,
        latent: Array | None,
        angles: tuple[Array, Array] | None,
        ctx: Context,
        cache: Any,
        shared: Shared | None,
    ) -> tuple[Scorer | None, Any]:
        """The parts of the scores, and the cache with this call's index keys in it.

        Made here from inputs that no gradient enters, or in training those of the layer that chose.
        """
        if not self.owns_indexer:
            keys = ("index_q", "index_w", "index_k")
            return (Scorer(*(shared[key] for key in keys)) if ctx.train and shared else None), cache
        make = Indexer(
            num_heads=self.index_heads,
            head_dim=self.index_width,
            interleaved=self.index_interleaved,
            pool=self.index_pool,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            name="index",
        )
        x, latent = jax.lax.stop_gradient((x, latent))
        m, rows = self.index_pool, ctx.rows

        def scorer(q: Array, w: Array, k: Array) -> Scorer:
            narrow = self._index_dtype(q.dtype)
            # gradients to a key that many queries chose are summed in what holds it
            held = q.dtype if ctx.train else narrow
            return Scorer(q.astype(narrow).astype(held), w, k.astype(narrow).astype(held))

        if cache is None:
            windows = whole_windows(ctx.positions, ctx.segments, m)[0] if m > 1 else None
            return scorer(*make(x, latent, angles if m == 1 else None, windows)[:3]), None
        assert rows is not None and isinstance(cache, IndexedCache)
        if cache.recent is None:
            q, w, k, _ = make(x, latent, angles)
            index = write(cache.index, k[:, None], ctx.positions, ctx.segments > 0)
            return scorer(q, w, index), dataclasses.replace(cache, index=index)
        touched = touched_windows(rows.lengths, rows.new, x.shape[1], m, m - 1)
        q, w, k, fresh = make(x, latent, None, touched, read_recent(cache.recent, rows.lengths, m - 1))
        assert fresh is not None
        index = write(cache.index, k[:, None], touched.number, touched.docs > 0)
        recent = write_recent(cache.recent, fresh, ctx.positions, ctx.segments > 0, rows.lengths + rows.new)
        return scorer(q, w, index), dataclasses.replace(cache, index=index, recent=recent)

    def _choose(self, scorer: Scorer | None, ctx: Context, shared: Shared | None) -> Array:
        """Places of the chosen keys, int32 `[b t chosen]`, among this call's tokens or in a cache."""
        if not self.owns_indexer:
            assert shared is not None
            return shared["topk"]
        assert scorer is not None
        q, w, k = jax.lax.stop_gradient(scorer)
        m, places, valid = self.index_pool, ctx.positions, ctx.segments > 0
        docs: Docs | None = None
        last = None
        if ctx.rows is not None:
            reach = jnp.where(valid, (places + 1) // m, 0)
        else:
            places = jnp.broadcast_to(jnp.arange(places.shape[1], dtype=jnp.int32), places.shape)
            reach, docs = places + 1, (ctx.segments, ctx.segments)
            if m > 1:
                windows, reach = whole_windows(ctx.positions, ctx.segments, m)
                docs, last = (ctx.segments, windows.docs), windows.last
        index = select(q, w, k, reach, self.top_k // m, scale=self._index_scale, docs=docs)
        return index if m == 1 else tokens_of(index, m, places, ctx.positions, valid, last)

    @property
    def _index_scale(self) -> float:
        return self.index_width**-0.5

    def _learn_dense(
        self,
        scorer: Scorer,
        query: Array,
        key: Array,
        ctx: Context,
        scale: float,
        softcap: float | None = None,
        sinks: Array | None = None,
    ) -> Aux:
        """From attention over all keys, `query [b t h k]` on `key [b g s k]`."""
        loss, recall, free = imitate_all(
            scorer,
            (query, key),
            *self._who(ctx),
            self.top_k // self.index_pool,
            index_scale=self._index_scale,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )
        loss = jnp.sum(jnp.where(ctx.segments > 0, loss, 0.0))
        return {"loss/indexer": loss, "metric/recall": mean_recall(recall, free)}

    def _who(self, ctx: Context) -> tuple[Queries, Keys]:
        """The tokens of whole sequences as queries and as keys, and with pools, what these are of."""
        positions, segments, m = ctx.positions, ctx.segments, self.index_pool
        if m == 1:
            return Queries(positions, segments), Keys(positions, segments)
        windows, reach = whole_windows(positions, segments, m)
        tokens = windows.last[..., None] + jnp.arange(1 - m, 1, dtype=jnp.int32)
        return Queries(positions, segments, reach), Keys(positions, segments, tokens, windows.docs)

    def _recall(
        self,
        scorer: Scorer,
        at: np.ndarray,
        query: Array,
        key: Array,
        ctx: Context,
        scale: float,
        softcap: float | None = None,
        sinks: Array | None = None,
    ) -> Aux:
        """Of the queries `at`, whose attention is `query [b n h k]` on all of `key [b g s k]`."""
        queries, keys = self._who(ctx)
        seen, pools = sight(jax.tree.map(lambda x: x[:, at], queries), keys)
        q, w, k, query, key = jax.lax.stop_gradient((*scorer, query, key))
        arrays = beside_all(
            (q[:, at], w[:, at], k),
            (query, key),
            seen,
            index_scale=self._index_scale,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            pools=pools,
        )
        return {"metric/recall": mean_recall(*recall_of(*arrays, self.top_k // self.index_pool))}

    def _learn_chosen(self, scorer: Scorer, index: Array, mass: Array, ctx: Context) -> Aux:
        """From attention over the chosen keys, whose weights summed over heads are `mass [b t chosen]`."""
        if (m := self.index_pool) > 1:  # the query's own pool is there without having been chosen
            _, reach = whole_windows(ctx.positions, ctx.segments, m)
            index = pools_of(index[..., : self.top_k : m], reach)
            mass = jnp.sum(mass[..., : self.top_k].reshape(*index.shape, m), axis=-1)
        loss = imitate_chosen(*scorer, index, mass, scale=self._index_scale)
        return {"loss/indexer": jnp.sum(jnp.where(ctx.segments > 0, loss, 0.0))}

    # ---- unbound ----------------------------------------------------------------------------------------------------

    @nn.nowrap
    def index_cache(self, held: KVCache | LatentCache, batch: int, length: int, draft: int, dtype: Any) -> IndexedCache:
        """Index keys beside what the mixer caches by itself; with pools, room for what the next are made of and `draft` tokens more."""
        k, m = self.index_width, self.index_pool
        index = jnp.zeros((batch, max(length // m, 1), k), self._index_dtype(dtype))
        recent = None if m == 1 else jnp.zeros((batch, recent_slots(m - 1, draft), 2 * k), dtype)
        return IndexedCache(held, index, recent)

    @nn.nowrap
    def index_cost(self, batch: int, t: int, s: float, r: int, dtype: Any) -> Cost:
        """The indexer's share, r being the width of z: FLOPs `2 t (r i k + d (k + i) + e i k)`, cache `k / m` a token, of which e are read.

        e: index keys, `s / m`, where there are more than may be chosen, else 0. Pools: `d k` more a token, and `2 (m - 1) k` cached.
        """
        if not self.owns_indexer:
            return Cost()
        i, k, m = self.index_heads, self.index_width, self.index_pool
        size, narrow = jnp.dtype(dtype).itemsize, jnp.dtype(self._index_dtype(dtype)).itemsize
        weights, small = Indexer.weights(self.d_model, r, i, k, m), Indexer.small(k, m)
        e = s if m == 1 else s // m if s > t else s / m
        e = e if e > self.top_k // m else 0
        return Cost(
            flops=2 * batch * t * (weights + e * i * k),
            params=weights + small,
            params_active=weights + small,
            cache_per_token=k / m * narrow,
            cache_constant=2 * (m - 1) * k * size,
            cache_read=batch * (e * narrow + 2 * (m - 1) * size) * k,
            activation_bytes=batch * t * (i * k + k) * size,
        )
