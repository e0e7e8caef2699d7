"""Heads that predict several tokens ahead: chained modules (DeepSeek-V3) and parallel ones (Gloeckle et al.).

Chained, module k = 1..depth, at position i of a document, with e the token embeddings and h^0 the trunk's hidden states:

    h'_i = [norm_e(e_{i+k}) ; norm_h(h^{k-1}_i)] M_k        h^k = Block_k(h')        logits_k = Head(norm_k(h^k_i)), of token i + k + 1

DeepSeek-V3, arXiv 2412.19437, section 2.2; order of the halves as in its released weights (`eh_proj`). Parallel: h^k = Block_k(h^0)
without an embedding, each alone (arXiv 2404.19737). Embedding and head are the trunk's. On streams, as DeepSeek-V4's: `StreamsMTP`.

Tokens are taken from the same document only; a position whose token k ahead lies beyond its document is padding to module k.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jaxllm.errors import UserError
from jaxllm.layers.base import Aux, Context, fan_in, merged, named, param


def ahead(a: Array, k: int) -> Array:
    """`[b t ..]`: the entry k positions later, 0 beyond the end."""
    return jnp.pad(a[:, k:], [(0, 0), (0, k)] + [(0, 0)] * (a.ndim - 2))


def within(segments: Array, k: int) -> Array:
    """`[b t]` boolean: does the token k positions later belong to the same document?"""
    return (segments > 0) & (segments == ahead(segments, k))


class Module(nn.Module, kw_only=True):
    """One module: the join of both halves (chained), the block, the norm before the head. Returns stream, its norm, cache, aux."""

    d_model: int
    param_dtype: Any
    block: Callable[..., nn.Module]
    norm_layer: Callable[..., nn.Module]

    @nn.compact
    def __call__(
        self, h: Array, e: Array | None, ctx: Context, shared: Mapping[str, Array], cache: Any = None
    ) -> tuple[Array, Array, Any, Aux]:
        if e is not None:
            d = self.d_model
            halves = jnp.stack([self.norm_layer(name="enorm")(e), self.norm_layer(name="hnorm")(h)])
            w = param(self, "eh_proj", fan_in(2 * d), (2, d, d), (None, "embed", "latent"))
            h = jnp.einsum("nbtd,nde->bte", halves, w.astype(h.dtype))
        h, cache, _, aux = self.block(name="block")(h, ctx, cache, shared)
        return h, self.norm_layer(name="norm")(h), cache, named(aux, "block")


class MultiToken(nn.Module, kw_only=True):
    """Base. depth: modules. mixer, ffn: the roles of the model that their blocks have. hidden: what of the trunk they see, `post_norm`
    (after the final norm, as released engines do) or `pre_norm`. Parameters `d<k>/block/..`, the residual scheme being the plain one.
    """

    supplied: ClassVar[tuple[str, ...]] = ("d_model", "dtype", "param_dtype", "block", "norm_layer")  # by the model

    d_model: int
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    block: Callable[..., nn.Module]
    norm_layer: Callable[..., nn.Module]
    depth: int = 1
    mixer: str
    ffn: str
    hidden: str = "post_norm"

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise UserError(f"mtp.depth: {self.depth} must be at least 1")
        sides = ("streams",) if self.on_streams else ("post_norm", "pre_norm")
        if self.hidden not in sides:
            raise UserError(f"mtp.hidden: {self.hidden!r} is not {' or '.join(sides)}")
        super().__post_init__()

    on_streams: ClassVar[bool] = False  # sees what the trunk's residual scheme holds, and its blocks have that scheme

    @nn.nowrap
    def context(self, ctx: Context, k: int) -> Context:
        """What module k sees of the call: the tokens it consumes, k later."""
        segments = jnp.where(within(ctx.segments, k), ctx.segments, 0)
        return dataclasses.replace(ctx, tokens=ahead(ctx.tokens, k), positions=ctx.positions + k, segments=segments)

    @nn.nowrap
    def _module(self, k: int) -> Module:
        parts = {"d_model": self.d_model, "param_dtype": self.param_dtype}
        return Module(block=self.block, norm_layer=self.norm_layer, name=f"d{k}", **parts)

    @nn.nowrap
    def extra_params(self) -> int:
        """Parameters beside those of the blocks and norms."""
        return 0


class ChainedMTP(MultiToken, kw_only=True):
    """See the module. `eh_proj [2 d d]`: the embedding's half, then the hidden state's."""

    @nn.compact
    def __call__(
        self, trunk: Array, embed: Callable[[Context], Array], ctx: Context, shared: Mapping[str, Array]
    ) -> tuple[Array, Aux]:
        h, heads = trunk, []
        aux: Aux = {}
        for k in range(1, self.depth + 1):
            seen = self.context(ctx, k)
            stream, normed, _, more = self._module(k)(h, embed(seen), seen, shared)
            h = normed if self.hidden == "post_norm" else stream
            heads.append(normed)
            aux = merged(aux, named(more, f"d{k}"))
        return jnp.stack(heads), aux

    @nn.nowrap
    def extra_params(self) -> int:
        return self.depth * 2 * self.d_model**2


class ParallelMTP(MultiToken, kw_only=True):
    """See the module: one block a head, all on the trunk's hidden states."""

    hidden: str = "pre_norm"

    @nn.compact
    def __call__(
        self, trunk: Array, embed: Callable[[Context], Array], ctx: Context, shared: Mapping[str, Array]
    ) -> tuple[Array, Aux]:
        del embed
        heads = []
        aux: Aux = {}
        for k in range(1, self.depth + 1):
            _, normed, _, more = self._module(k)(trunk, None, ctx, shared)
            heads.append(normed)
            aux = merged(aux, named(more, f"d{k}"))
        return jnp.stack(heads), aux


class StreamModule(nn.Module, kw_only=True):
    """One module on several residual streams X `[b t n d]`: the embedding goes to all of them, each keeps its own.

    X'_i = norm_e(e) W_e + norm_h(X_i) W_h,     X <- Block(X'),     logits = Head(norm(end(X)))
    """

    d_model: int
    param_dtype: Any
    block: Callable[..., nn.Module]
    norm_layer: Callable[..., nn.Module]
    residual: Callable[..., Any]

    @nn.compact
    def __call__(self, X: Array, e: Array, ctx: Context, shared: Mapping[str, Array]) -> tuple[Array, Array, Aux]:
        d = self.d_model

        def joined(name: str, norm: str, x: Array) -> Array:
            w = param(self, name, fan_in(2 * d), (d, d), ("embed", "latent"))
            return self.norm_layer(name=norm)(x) @ w.astype(x.dtype)

        X = joined("e_proj", "enorm", e)[:, :, None] + joined("h_proj", "hnorm", X)
        X, _, _, aux = self.block(name="block")(X, ctx, None, shared)
        end = self.residual(site="out", name="residual_out").finish(X)
        return X, self.norm_layer(name="norm")(end), named(aux, "block")


class StreamsMTP(MultiToken, kw_only=True):
    """DeepSeek-V4's modules (arXiv 2606.19348 and its released code): a chain on the streams of hyper-connections as they are before the
    trunk adds them up, with blocks and an end of that scheme. `e_proj`, `h_proj [d d]` instead of one `eh_proj`. hidden: `streams`.
    """

    supplied: ClassVar[tuple[str, ...]] = (*MultiToken.supplied, "residual")
    on_streams: ClassVar[bool] = True

    residual: Callable[..., Any]
    hidden: str = "streams"

    @nn.compact
    def __call__(
        self, trunk: Array, embed: Callable[[Context], Array], ctx: Context, shared: Mapping[str, Array]
    ) -> tuple[Array, Aux]:
        if getattr(trunk, "ndim", 0) != 4:
            raise UserError(
                "model.mtp: StreamsMTP reads the streams of hyper-connections; set model.residual=mhc, or take another"
            )
        X, heads = trunk, []
        aux: Aux = {}
        for k in range(1, self.depth + 1):
            seen = self.context(ctx, k)
            parts = {"d_model": self.d_model, "param_dtype": self.param_dtype, "residual": self.residual}
            module = StreamModule(block=self.block, norm_layer=self.norm_layer, name=f"d{k}", **parts)
            X, normed, more = module(X, embed(seen), seen, shared)
            heads.append(normed)
            aux = merged(aux, named(more, f"d{k}"))
        return jnp.stack(heads), aux

    @nn.nowrap
    def extra_params(self) -> int:
        return self.depth * 2 * self.d_model**2
