"""Draft heads: one decoder layer that guesses what a frozen trunk will say next, from what the trunk's layers hold (EAGLE-3, arXiv
2503.01840; started from a trained MTP module, as Kimi K3 does).

    g_i = [s_a,i ; s_b,i ; s_c,i] W_f                 s_k: residual stream of the trunk after k layers; low, middle and high
    a_i, own_i = Layer(g_i, e(x_{i+1}))               own_i takes the place of g where the trunk has not been yet
    q_i = softmax(Head(norm(own_i)))                  of token i + 2

Decoding, a draft of n tokens is n calls: the first reads g of the tokens that the trunk has seen, each further one the last call's `own`
and the token just drafted. Training does the same (training-time test): step j of the unroll reads `own` of step j - 1 and the true token
j further on, and what it sees is what the cache would hold then (`jaxllm.ops.unroll`). Nothing flows back into the trunk.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax.numpy as jnp
from jax import Array, lax

from jaxllm.cache import UnrolledCache
from jaxllm.errors import UserError
from jaxllm.layers.base import Aux, Context, Cost, fan_in, merged, named, param
from jaxllm.layers.gqa import GQA
from jaxllm.layers.mtp import Module, ahead, within

NAME = "draft"  # of the head's parameters in the tree of its model
Start = Literal["scratch", "mtp"]


@dataclasses.dataclass(frozen=True)
class Ramp:
    """Initialiser 0, 1, 2 ...: the ids of a draft vocabulary before any are chosen."""

    def __call__(self, key: Any, shape: tuple[int, ...], dtype: Any) -> Array:
        del key
        return jnp.arange(shape[0], dtype=dtype)


class Draft(nn.Module, kw_only=True):
    """Base. mixer, ffn: the roles of the model that the layer has. trunk: the checkpoint that is drafted for; training fills it in.

    features: which of the trunk's streams are fused, by the number of layers before them: 0 = embeddings, L = all. null = after 1, half
    and all but 3 layers. hidden: what stands for the whole trunk, and for the head's own output: the stream (`pre_norm`) or what the norm
    before the head makes of it (`post_norm`). unroll: steps trained. vocab: so many ids can be drafted, the most frequent of the text,
    with a head of their own; null = all ids, with the trunk's head. start: `scratch`, or the trunk's `mtp` module with g = s_L.
    """

    supplied: ClassVar[tuple[str, ...]] = (
        "d_model",
        "dtype",
        "param_dtype",
        "norm_eps",
        "num_layers",
        "block",
        "norm_layer",
        "role",
        "ffn_layer",
    )

    d_model: int
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    norm_eps: float = 1e-6
    num_layers: int
    block: Callable[..., nn.Module]  # the roles' block, with the plain residual scheme
    norm_layer: Callable[..., nn.Module]
    role: Callable[..., nn.Module]  # the mixer's recipe
    ffn_layer: Callable[..., nn.Module]
    mixer: str
    ffn: str
    features: tuple[int, ...] | None = None
    hidden: str = "pre_norm"
    unroll: int = 7
    vocab: int | None = None
    start: Start = "scratch"
    trunk: str | None = None

    def __post_init__(self) -> None:
        if self.unroll < 1:
            raise UserError(f"draft.unroll: {self.unroll} must be at least 1")
        if self.hidden not in ("post_norm", "pre_norm"):
            raise UserError(f"draft.hidden: {self.hidden!r} is not post_norm or pre_norm")
        if self.start not in ("scratch", "mtp"):
            raise UserError(f"draft.start: {self.start!r} is not scratch or mtp")
        if self.features is not None and not self.features:
            raise UserError("draft.features: empty; name at least one layer, or leave it out")
        bad = [k for k in self.ids_of_features if not 0 <= k <= self.num_layers]
        if bad:
            raise UserError(f"draft.features: {bad[0]} is not within 0..{self.num_layers}, the layers of the trunk")
        if self.vocab is not None and self.vocab < 1:
            raise UserError(f"draft.vocab: {self.vocab} must be at least 1, or null for all ids")
        super().__post_init__()

    @property
    def ids_of_features(self) -> tuple[int, ...]:
        """Numbers of layers before each of the fused streams."""
        n = self.num_layers
        return (min(1, n), n // 2, max(n - 3, 0)) if self.features is None else tuple(self.features)

    # ---- the forward pass ----------------------------------------------------------------------------------------

    def setup(self) -> None:
        d, n = self.d_model, len(self.ids_of_features)
        self.fuse = param(self, "fuse", fan_in(n * d), (n, d, d), (None, "embed", "latent"))
        if self.vocab is not None:
            self.head = param(self, "head", fan_in(d), (d, self.vocab), ("embed", "vocab"))
            self.ids = param(self, "ids", Ramp(), (self.vocab,), (None,), dtype=jnp.int32, trainable=False)
        self.make_layer()

    def make_layer(self) -> None:
        """Set up the layer's parts."""
        raise NotImplementedError

    def layer(self, g: Array, e: Array, ctx: Context, cache: Any, shared: Mapping[str, Array]) -> Any:
        """(stream, its norm, the cache, aux) of features `g` and the next tokens' embeddings `e`, both `[b t d]`."""
        raise NotImplementedError

    def fused(self, stream: Array, last: Array, hidden: Array) -> Array:
        """g `[b t d]` from the trunk's streams `[L + 1, b, t, d]`, from what its final norm reads (of a residual scheme with an end of
        its own another array than the last stream) and from its `hidden`, after that norm. No gradient passes."""
        end = hidden if self.hidden == "post_norm" else last
        parts = jnp.stack([end if k == self.num_layers else stream[k] for k in self.ids_of_features])
        w = self.fuse.astype(self.dtype)
        return jnp.einsum("nbtd,nde->bte", lax.stop_gradient(parts).astype(self.dtype), w)

    def step(
        self, g: Array, e: Array, ctx: Context, cache: Any, shared: Mapping[str, Array]
    ) -> tuple[Any, Array, Array, Aux]:
        """(cache, own features, hidden states ready for the head, aux). ctx: of the tokens that `e` embeds, at the places of `g`."""
        stream, normed, cache, aux = self.layer(g, lax.stop_gradient(e), ctx, cache, shared)
        return cache, normed if self.hidden == "post_norm" else stream, normed, aux

    def __call__(
        self, g: Array, embed: Callable[[Context], Array], ctx: Context, shared: Mapping[str, Array]
    ) -> tuple[Array, Aux]:
        """The unroll on whole sequences: hidden states `[unroll, b, t, d]`, and aux. ctx: of the trunk's call."""
        cache: Any = UnrolledCache()
        found: list[Array] = []
        aux: Aux = {}
        for j in range(self.unroll):
            seen = reading(ctx, j + 1)
            cache, g, normed, more = self.step(g, embed(after(seen)), seen, cache, shared)
            found.append(normed)
            aux = merged(aux, {k.replace("metric/", f"metric/s{j}/", 1): v for k, v in more.items()})
        return jnp.stack(found), aux

    # ---- unbound: what callers ask without arrays ----------------------------------------------------------------

    @nn.nowrap
    def attention(self) -> Any:
        """The layer's mixer by itself, unbound."""
        return self.role(parent=None)

    @nn.nowrap
    def init_cache(self, batch: int, length: int, dtype: Any, *, draft: int = 0) -> Any:
        """Of the layer: room for `length` tokens a row, drafted ones included; `draft` of them may be rejected."""
        return self.attention().init_cache(batch, length, dtype, draft=draft)

    @nn.nowrap
    def prepare(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters for decoding: the layer's mixer and ffn fuse their own. Pure."""
        out = dict(params)
        for name, part in (("mixer", self.attention()), ("ffn", self.ffn_layer(parent=None))):
            out[name] = part.prepare(params[name])
        return out

    @nn.nowrap
    def cost(self, batch: int, t: int, s: float, dtype: Any) -> Cost:
        """Of one call with features: the fusion, the layer, its own head. The trunk's head is the trunk's."""
        d, n = self.d_model, len(self.ids_of_features)
        own = n * d * d + d * (self.vocab or 0) + self.join_params
        layer = self.attention().cost(batch, t, s, dtype) + self.ffn_layer(parent=None).cost(batch, t, s, dtype)
        return layer + Cost(flops=2 * batch * t * own, params=own + (self.vocab or 0), params_active=own)

    @property
    def join_params(self) -> int:
        """Weights that join features and embedding outside the mixer."""
        return 0


def reading(ctx: Context, k: int) -> Context:
    """The call as the head sees it at step k = 1, 2 ...: the tokens it reads, k later, at its own places, which are k - 1 later than
    those of the features it started from. 0 in `segments` where that token lies beyond its document."""
    segments = jnp.where(within(ctx.segments, k), ctx.segments, 0)
    return dataclasses.replace(ctx, tokens=ahead(ctx.tokens, k), positions=ctx.positions + (k - 1), segments=segments)


def after(ctx: Context) -> Context:
    """The same call at the places of its tokens in their documents: one later than those of the features before them."""
    return dataclasses.replace(ctx, positions=ctx.positions + 1)


class TwoHalves(GQA, kw_only=True):
    """Grouped-query attention whose queries, keys and values are made of `[embedding ; features]`, 2 d wide."""

    @property
    def in_dim(self) -> int:
        return 2 * self.d_model


class Eagle3(Draft, kw_only=True):
    """The layer of EAGLE-3: attention reads the normed embedding and the normed features side by side, the stream is that of the
    features alone.

        h = g + Attn([norm_e(e) ; norm_h(g)]);    own = h + Ffn(norm_f(h))

    Its role must be plain grouped-query attention.
    """

    def __post_init__(self) -> None:
        if self.start != "scratch":
            raise UserError("draft.start: an MTP module has another layer than Eagle3; take +draft@model.draft=module")
        super().__post_init__()
        if getattr(self.role, "func", None) is not GQA:
            raise UserError(
                f"draft.mixer: {self.mixer!r} is no plain GQA, which Eagle3 needs; name another role or take"
                " +draft@model.draft=module"
            )

    @nn.nowrap
    def attention(self, **kwargs: Any) -> TwoHalves:
        made: Any = self.role
        supplied = {n: getattr(self, n) for n in ("d_model", "dtype", "param_dtype", "norm_eps")}
        return TwoHalves(**made.keywords | supplied, **(kwargs or {"parent": None}))

    def make_layer(self) -> None:
        self.enorm, self.hnorm = self.norm_layer(name="enorm"), self.norm_layer(name="hnorm")
        self.mix, self.transform = self.attention(name="mixer"), self.ffn_layer(name="ffn")
        self.norm_ffn, self.norm = self.norm_layer(name="norm_ffn"), self.norm_layer(name="norm")

    def layer(self, g: Array, e: Array, ctx: Context, cache: Any, shared: Mapping[str, Array]) -> Any:
        halves = jnp.concatenate([self.enorm(e), self.hnorm(g)], axis=-1)
        y, cache, _, aux = self.mix(halves, ctx, cache, shared)
        h = g + y
        y, more = self.transform(self.norm_ffn(h), ctx)
        h = h + y
        return h, self.norm(h), cache, merged(named(aux, "mixer"), named(more, "ffn"))


class ModuleDraft(Draft, kw_only=True):
    """The layer of an MTP module (`jaxllm.layers.mtp`): `own = Block([norm_e(e) ; norm_h(g)] M)`, with any mixer that unrolls."""

    hidden: str = "post_norm"

    def __post_init__(self) -> None:
        super().__post_init__()
        made: Any = self.role
        if not getattr(getattr(made, "func", made), "unrolls", False):
            raise UserError(f"draft.mixer: {self.mixer!r} cannot be unrolled; take a role of GQA or MLA")

    @nn.nowrap
    def attention(self) -> Any:
        supplied = {n: getattr(self, n) for n in ("d_model", "dtype", "param_dtype", "norm_eps")}
        return self.role(**supplied, parent=None)

    @property
    def join_params(self) -> int:
        return 2 * self.d_model**2

    def make_layer(self) -> None:
        parts: dict[str, Any] = {"d_model": self.d_model, "param_dtype": self.param_dtype}
        self.module = Module(block=self.block, norm_layer=self.norm_layer, name="module", **parts)

    def layer(self, g: Array, e: Array, ctx: Context, cache: Any, shared: Mapping[str, Array]) -> Any:
        stream, normed, cache, aux = self.module(g, e, ctx, shared, cache)
        return stream, normed, cache, named(aux, "module")

    @nn.nowrap
    def prepare(self, params: Mapping[str, Any]) -> dict[str, Any]:
        block = super().prepare(params["module"]["block"])
        return {**params, "module": {**params["module"], "block": block}}
