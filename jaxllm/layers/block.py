"""One layer, and one period of layers: what a model repeats."""

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
from jax import Array

from jaxllm.layers.base import Aux, Context, merged, named
from jaxllm.layers.residual import Residual
from jaxllm.pages import Paged


class Block(nn.Module, kw_only=True):
    """One layer: a mixer and an ffn, each read from and written to the residual scheme.

    Norms stand before each of the two (`pre_norms`), after each (`post_norms`, on what is written to the stream), or both.
    """

    mixer: Callable[..., nn.Module]
    ffn: Callable[..., nn.Module]
    residual: Callable[..., Residual]
    norm: Callable[..., nn.Module]
    pre_norms: bool = True
    post_norms: bool = False
    dropout: float = 0.0

    @nn.compact
    def __call__(
        self, R: Any, ctx: Context, cache: Any, shared: Mapping[str, Array]
    ) -> tuple[Any, Any, Mapping[str, Array], Aux]:
        drop = nn.Dropout(self.dropout, deterministic=not ctx.train) if self.dropout else lambda y: y

        def before(x: Array, name: str) -> Array:
            return self.norm(name=name)(x) if self.pre_norms else x

        def after(y: Array, name: str) -> Array:
            return drop(self.norm(name=name)(y) if self.post_norms else y)

        site = self.residual(site="mixer", name="residual_mixer")
        with jax.named_scope("mixer"):
            x = before(site.read(R), "norm_mixer")
            mixer = self.mixer(name="mixer")
            viewed = isinstance(cache, Paged) and not mixer.reads_pages
            y, new, shared, aux_mixer = mixer(x, ctx, cache.view(ctx) if viewed else cache, shared)
            cache = cache.store(new, ctx) if viewed else new
            R = site.write(R, after(y, "norm_mixer_out"))
        site = self.residual(site="ffn", name="residual_ffn")
        with jax.named_scope("ffn"):
            y, aux_ffn = self.ffn(name="ffn")(before(site.read(R), "norm_ffn"), ctx)
            R = site.write(R, after(y, "norm_ffn_out"))
        return R, cache, shared, merged(named(aux_mixer, "mixer"), named(aux_ffn, "ffn"))


class Period(nn.Module, kw_only=True):
    """The layers of one period of a group, in order: the body of the scan."""

    blocks: tuple[Callable[..., Block], ...]
    residual: Callable[..., Residual]

    @nn.compact
    def __call__(
        self, carry: tuple[Any, Mapping[str, Array]], ctx: Context, caches: Any, fixed: Any
    ) -> tuple[Any, tuple[Any, Aux]]:
        stream, shared = carry
        scheme = self.residual(site="period", parent=None)
        R = scheme.merge(stream, fixed)
        aux: Aux = {}
        new_caches = {}
        for j, block in enumerate(self.blocks):
            name = f"b{j}"
            R, cache, shared, more = block(name=name)(R, ctx, None if caches is None else caches[name], shared)
            new_caches[name] = cache
            aux = merged(aux, named(more, name))
            if "stream" in ctx.capture:
                aux[f"capture/{name}/stream"] = scheme.view(R)
        return (scheme.split(R)[0], shared), (None if caches is None else new_caches, aux)
