"""What mixers that look keys up have in common: whose indexer chooses, what it learns from, what they hand on to later layers."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.errors import UserError
from jaxllm.layers.base import Aux, Context, Cost, Layer
from jaxllm.layers.indexer import Indexer
from jaxllm.ops.index_loss import imitate_all, imitate_chosen
from jaxllm.ops.mask import visible
from jaxllm.ops.topk import select

Shared = Mapping[str, Array]


class Scorer(NamedTuple):
    """An indexer's work on the tokens of a call: `q [b t h k]`, `w [b t h]`, `k [b t k]`."""

    q: Array
    w: Array
    k: Array


class Choosing(Layer, kw_only=True):
    """Base of mixers whose queries attend to `top_k` keys of an indexer's choice (DSA) instead of all.

    top_k: keys of a query; not a shape, so that it may be set anew for a built model. indexer: "full" = a layer of its own choice;
    "shared" = no indexer and no index keys, but the choice of the nearest full layer before (IndexShare, arXiv 2603.12201).

    attend: "sparse", or "dense" = to all keys, while the indexer only learns (warm-up). In training each layer reports `loss/indexer`,
    the sum over tokens of `KL(attention || indexer)`; its gradient reaches the indexer alone. served: layers that share the indexer;
    each divides its loss by that, so that together they are as far from the indexer as their mean attention is.

    index_heads, index_head_dim, index_interleaved: see `Indexer`. gather: how keys are met, null = the cheaper way: true, each query
    gathers its own; false, all keys under a mask.
    """

    top_k: int
    indexer: str = "full"
    attend: str = "sparse"
    served: int = 1
    index_heads: int = 16
    index_head_dim: int | None = None
    index_interleaved: bool = False
    gather: bool | None = None

    def check_choice(self, turned: int) -> None:
        """Refuse wrong fields; `turned`: channels of an index head that rotate."""
        for name, known in (("indexer", ("full", "shared")), ("attend", ("sparse", "dense"))):
            if (value := getattr(self, name)) not in known:
                raise UserError(f"{name}: {value!r} is not one of {', '.join(known)}")
        if self.served < 1:
            raise UserError(f"served: {self.served} must be at least 1, the layers that one indexer chooses for")
        Indexer.check(self.index_heads, self.index_width, turned, self.top_k)

    @property
    def index_width(self) -> int:
        """Channels of an index head."""
        raise NotImplementedError

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
        spec = {"topk": jax.ShapeDtypeStruct((b, t, self.top_k), jnp.int32)}
        if train:
            spec["index_q"] = jax.ShapeDtypeStruct((b, t, h, k), dtype)
            spec["index_w"] = jax.ShapeDtypeStruct((b, t, h), jnp.float32)
            spec["index_k"] = jax.ShapeDtypeStruct((b, t, k), dtype)
        return spec

    def _publish(self, shared: Shared | None, index: Array | None, scorer: Scorer | None) -> Shared:
        """What later layers find: only what one of them asked for."""
        out = dict(shared or {})
        if index is not None and "topk" in out:
            if out["topk"].shape != index.shape:
                raise UserError(
                    f"top_k: {index.shape[-1]} here, {out['topk'].shape[-1]} in a layer that shares it; make them equal"
                )
            out["topk"] = index
        if scorer is not None and "index_q" in out:
            out |= {"index_q": scorer.q, "index_w": scorer.w, "index_k": scorer.k}
        return out

    # ---- choosing and learning --------------------------------------------------------------------------------------

    def _score(
        self, x: Array, latent: Array | None, angles: tuple[Array, Array] | None, shared: Shared | None, train: bool
    ) -> Scorer | None:
        """The parts of the scores: made here from inputs that no gradient enters, or in training those of the layer that chose."""
        if not self.owns_indexer:
            keys = ("index_q", "index_w", "index_k")
            return Scorer(*(shared[key] for key in keys)) if train and shared else None
        make = Indexer(
            num_heads=self.index_heads,
            head_dim=self.index_width,
            interleaved=self.index_interleaved,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            name="index",
        )
        return Scorer(*make(jax.lax.stop_gradient(x), jax.lax.stop_gradient(latent), angles))

    def _choose(self, scorer: Scorer | None, keys: Array | None, ctx: Context, shared: Shared | None) -> Array:
        """Places of the chosen keys, int32 `[b t top_k]`, among this call's tokens or, with `keys [b s k]`, in a cache."""
        if not self.owns_indexer:
            assert shared is not None
            return shared["topk"]
        assert scorer is not None
        q, w, k = jax.lax.stop_gradient(scorer)
        if keys is None:
            t = ctx.tokens.shape[1]
            reach = jnp.broadcast_to(jnp.arange(1, t + 1, dtype=jnp.int32), ctx.tokens.shape)
            return select(q, w, k, reach, self.top_k, scale=self._index_scale, docs=(ctx.segments, ctx.segments))
        reach = jnp.where(ctx.segments > 0, ctx.positions + 1, 0)
        return select(q, w, keys.astype(q.dtype), reach, self.top_k, scale=self._index_scale)

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
        seen = visible(ctx.positions, ctx.positions, ctx.segments, ctx.segments)
        loss, recall, free = imitate_all(
            scorer,
            (query, key),
            seen,
            self.top_k,
            index_scale=self._index_scale,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )
        valid = ctx.segments > 0
        return {
            "loss/indexer": jnp.sum(jnp.where(valid, loss, 0.0)) / self.served,
            "metric/recall": jnp.sum(recall) / jnp.maximum(jnp.sum(free & valid), 1),
        }

    def _learn_chosen(self, scorer: Scorer, index: Array, mass: Array, ctx: Context) -> Aux:
        """From attention over the chosen keys, whose weights summed over heads are `mass [b t top_k]`."""
        loss = imitate_chosen(*scorer, index, mass, scale=self._index_scale)
        return {"loss/indexer": jnp.sum(jnp.where(ctx.segments > 0, loss, 0.0)) / self.served}

    # ---- unbound ----------------------------------------------------------------------------------------------------

    @nn.nowrap
    def index_cost(self, batch: int, t: int, s: float, r: int, dtype: Any) -> Cost:
        """The indexer's share, r being the width of z: FLOPs `2 t (r i k + d (k + i) + s i k)`, cache k a token, of which s are read."""
        if not self.owns_indexer:
            return Cost()
        i, k, size = self.index_heads, self.index_width, jnp.dtype(dtype).itemsize
        weights = Indexer.weights(self.d_model, r, i, k)
        return Cost(
            flops=2 * batch * t * (weights + s * i * k),
            params=weights + 2 * k,
            params_active=weights + 2 * k,
            cache_per_token=k * size,
            cache_read=batch * s * k * size,
            activation_bytes=batch * t * (i * k + k) * size,
        )
