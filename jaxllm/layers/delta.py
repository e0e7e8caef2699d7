"""What Kimi Delta Attention and Gated DeltaNet share: short convolutions, the state's cache and its replay, costs."""

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.cache import RecurrentCache, keep_pending, replay
from jaxllm.errors import UserError
from jaxllm.layers.base import RESIDUAL_SCALE, Aux, Context, Cost, Layer, Normal, fan_in, matrices_as, param
from jaxllm.mesh import shard
from jaxllm.ops.delta import check_delta_kernel, chunk_flops, delta_rule
from jaxllm.ops.delta_rule import still
from jaxllm.ops.delta_step import FEW, few_tokens
from jaxllm.ops.linear import linear
from jaxllm.ops.short_conv import next_window, short_conv

L2_EPS = 1e-6  # inside the root, as released models have it
Shape = tuple[tuple[int, ...], tuple[str | None, ...]]  # of a projection of x: sizes and logical axes without d


def l2_norm(x: Array) -> Array:
    """`x / sqrt(sum(x^2) + 1e-6)` over the last axis, fp32."""
    u = x.astype(jnp.float32)
    return u * jax.lax.rsqrt(jnp.sum(u * u, axis=-1, keepdims=True) + L2_EPS)


class DeltaMixer(Layer, kw_only=True):
    """The frame of a gated delta rule layer; `KDA` and `GatedDeltaNet` say how x becomes decays and how outputs are normed.

        q, k, v = silu(conv(x W_q)), silu(conv(x W_k)), silu(conv(x W_v));   q <- l2norm(q) k^-1/2;   k <- l2norm(k)
        o = delta rule(q, k, v, g(x), beta(x));   y = concat_h(norm(o_h, gate(x)_h)) W_o

    conv_size: taps of the causal depthwise convolutions. chunk_size: tokens that the chunked form does at once, a power of two.
    kernel: of whole sequences and long chunks of a prompt, by name (`jaxllm.ops.delta`). allow_neg_eigval: beta in (0, 2), so that a
    write may turn a direction of the state around (arXiv 2411.12537).

    Cache: the state `h k v` in fp32, `conv_size - 1` inputs of the convolutions and the projections of `draft` tokens; no size grows
    with the context.
    """

    conv_size: int = 4
    chunk_size: int = 64
    kernel: str = "auto"
    allow_neg_eigval: bool = False

    def __post_init__(self) -> None:
        check_delta_kernel(self.kernel)
        for name, value in {"conv_size": self.conv_size, "chunk_size": self.chunk_size, **self.sizes_checked}.items():
            if value < 1:
                raise UserError(f"{name}: {value} must be at least 1")
        if self.chunk_size & (self.chunk_size - 1):
            raise UserError(f"chunk_size: {self.chunk_size} must be a power of two")
        super().__post_init__()

    # ---- what a layer says of itself -----------------------------------------------------------------------------

    @property
    def sizes_checked(self) -> dict[str, int]:
        """Fields that must be at least 1, by name."""
        raise NotImplementedError

    @property
    def state_sizes(self) -> tuple[int, int, int]:
        """`h, k, v`: heads of the state and its two widths."""
        raise NotImplementedError

    @property
    def key_heads(self) -> int:
        """Heads of q and k: divides h, consecutive heads of the state share one."""
        raise NotImplementedError

    @property
    def recurrent_projections(self) -> dict[str, Shape]:
        """Products with x that the recurrence needs besides q, k and v, by name: what is replayed."""
        raise NotImplementedError

    @property
    def gate_projections(self) -> dict[str, Shape]:
        """Products with x that the output's gate needs."""
        raise NotImplementedError

    def decays(self, parts: Mapping[str, Array]) -> tuple[Array, Array]:
        """Log-decays g `[b t h (k)]` and beta `[b t h]`, fp32."""
        raise NotImplementedError

    def gated_norm(self, out: Array, parts: Mapping[str, Array]) -> Array:
        """`[b t h v]` normed and gated."""
        raise NotImplementedError

    @property
    def bounded(self) -> bool:
        """No log-decay is below -5: the chunked form may take shortcuts."""
        return False

    @property
    def inner_weights(self) -> tuple[int, int]:
        """Weights behind the projections of x: those of tokens replayed too (decays), those of new tokens alone (output gate)."""
        raise NotImplementedError

    @property
    def vectors(self) -> int:
        """Parameters that are no matrices: biases, norms."""
        raise NotImplementedError

    @property
    def chunk_flops(self) -> int:
        """Of one chunk of one head."""
        return chunk_flops(self.chunk_size, *self.state_sizes[1:], scalar=False, bounded=self.bounded)

    # ---- the projections of x ------------------------------------------------------------------------------------

    @property
    def conv_widths(self) -> dict[str, tuple[int, int]]:
        """(heads, width) of each convolved projection."""
        h, k, v = self.state_sizes
        return {"q": (self.key_heads, k), "k": (self.key_heads, k), "v": (h, v)}

    @property
    def channels(self) -> int:
        """Of the convolutions."""
        return sum(heads * width for heads, width in self.conv_widths.values())

    @property
    def projections(self) -> dict[str, Shape]:
        convolved: dict[str, Shape] = {n: (size, ("heads", "head")) for n, size in self.conv_widths.items()}
        return {**convolved, **self.recurrent_projections, **self.gate_projections}

    @property
    def replayed(self) -> int:
        """Numbers a token whose projections wait in `pending`."""
        return self.channels + sum(_flat(shape) for shape, _ in self.recurrent_projections.values())

    def _project(self, x: Array) -> dict[str, Array]:
        """Every product with `x [b t d]`, each `[b t ..]`."""
        if self.has_variable("params", "x_proj"):  # made by `prepare`
            return self._split(linear(x, self.get_variable("params", "x_proj").astype(self.dtype)), self.projections)
        out = {}
        for name, (shape, axes) in self.projections.items():
            w = param(self, f"{name}_proj", fan_in(self.d_model), (self.d_model, *shape), ("embed", *axes))
            activation = ["act_heads" if a == "heads" else None for a in axes]
            out[name] = shard(linear(x, w.astype(self.dtype)), "batch", "length", *activation)
        return out

    def _split(self, y: Array, shapes: Mapping[str, Shape]) -> dict[str, Array]:
        parts, start = {}, 0
        for name, (shape, _) in shapes.items():
            parts[name] = y[..., start : start + _flat(shape)].reshape(*y.shape[:2], *shape)
            start += _flat(shape)
        return parts

    def _taps(self) -> Array:
        """Taps of all convolutions `[n c]`, q before k before v."""
        if self.has_variable("params", "conv"):  # made by `prepare`
            return self.get_variable("params", "conv")
        n = self.conv_size
        taps = {
            name: param(self, f"{name}_conv", Normal(n**-0.5), (n, *size), (None, "heads", "head"))
            for name, size in self.conv_widths.items()
        }
        return jnp.concatenate([w.reshape(n, -1) for w in taps.values()], axis=1)

    def _heads(self, mixed: Array) -> tuple[Array, Array, Array]:
        """q, k `[b t h k]` and v `[b t h v]` from the convolved channels `[b t c]`, fp32."""
        h, width, _ = self.state_sizes
        parts = self._split(jax.nn.silu(mixed), {n: (size, ()) for n, size in self.conv_widths.items()})
        query, key = l2_norm(parts["q"]) * width**-0.5, l2_norm(parts["k"])
        repeats = h // self.key_heads
        if repeats > 1:
            query, key = (jnp.repeat(x, repeats, axis=2) for x in (query, key))
        query, key, value = (
            shard(x.astype(self.dtype), "batch", "length", "act_heads", None) for x in (query, key, parts["v"])
        )
        return query, key, value

    def _beta(self, logits: Array) -> Array:
        beta = jax.nn.sigmoid(logits.astype(jnp.float32))
        return 2.0 * beta if self.allow_neg_eigval else beta

    # ---- the forward pass ----------------------------------------------------------------------------------------

    @nn.compact
    def __call__(
        self, x: Array, ctx: Context, cache: RecurrentCache | None = None, shared: Mapping[str, Array] | None = None
    ) -> tuple[Array, RecurrentCache | None, Mapping[str, Array], Aux]:
        h, _, v = self.state_sizes
        aux: Aux = {}
        parts, taps = self._project(x), self._taps()
        if cache is None:
            out = self._whole(parts, taps, ctx, aux)
        else:
            out, cache = self._cached(parts, taps, ctx, cache)
        out = self.gated_norm(shard(out, "batch", "length", "act_heads", None), parts)
        w = param(self, "o_proj", fan_in(h * v, RESIDUAL_SCALE), (h, v, self.d_model), ("heads", "head", "embed"))
        return linear(out, w.astype(self.dtype), 2), cache, {} if shared is None else shared, aux

    def _whole(self, parts: Mapping[str, Array], taps: Array, ctx: Context, aux: Aux) -> Array:
        """Whole sequences, packed or not: state and convolutions begin anew at each document."""
        valid, segments = ctx.segments > 0, ctx.segments
        first = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        index = jnp.arange(segments.shape[1], dtype=jnp.int32)[None]
        reach = index - jax.lax.cummax(jnp.where(first, index, 0), axis=1)
        mixed = short_conv(_joined(parts, self.conv_widths), taps, reach)
        query, key, value = self._heads(mixed)
        g, beta = still(*self.decays(parts), valid)
        if "decay" in ctx.capture:
            aux["capture/decay"], aux["capture/beta"] = jnp.exp(g), beta
        out, _ = delta_rule(
            query, key, value, g, beta, first, kernel=self.kernel, chunk=self.chunk_size, bounded=self.bounded
        )
        return out

    def _cached(
        self, parts: Mapping[str, Array], taps: Array, ctx: Context, cache: RecurrentCache
    ) -> tuple[Array, RecurrentCache]:
        """Run the drafts that were accepted once more, then the new tokens; keep state and window at the commit point."""
        rows = ctx.rows
        assert rows is not None
        names = [*self.conv_widths, *self.recurrent_projections]
        run = replay(cache.pending, _joined(parts, names), rows.accepted, rows.new, rows.tentative)
        fresh = rows.lengths == 0  # a new row in an old row's place
        window = jnp.where(fresh[:, None, None], 0.0, cache.window)
        mixed = run.inputs[..., : self.channels].astype(self.dtype)
        query, key, value = self._heads(short_conv(mixed, taps, window=window))
        rest = self._split(run.inputs[..., self.channels :].astype(self.dtype), self.recurrent_projections)
        g, beta = still(*self.decays(rest), run.valid)
        draft = cache.pending.shape[1]
        out, state = self._advance((query, key, value, g, beta), cache.state, fresh, run.commit, draft)
        if draft:
            out = jnp.take_along_axis(out, run.output[:, :, None, None], axis=1)
        pending = keep_pending(run, draft)
        return out, RecurrentCache(state, next_window(mixed, window, run.commit), pending)

    def _advance(
        self, parts: tuple[Array, ...], state: Array, fresh: Array, commit: Array, draft: int
    ) -> tuple[Array, Array]:
        """Outputs of all n tokens of q, k, v, g, beta and the state after the first `commit` of them; the rest are at most `draft`."""
        q, k, v, g, beta = parts
        n = k.shape[1]
        if n <= FEW:
            return few_tokens(q, k, v, g, beta, state, commit, fresh)
        rule = functools.partial(delta_rule, kernel=self.kernel, chunk=self.chunk_size, bounded=self.bounded)
        certain = jnp.arange(n)[None] < commit[:, None]
        start = jnp.where(fresh[:, None, None, None], 0.0, state)
        out, state = rule(q, k, v, *still(g, beta, certain), state=start)
        if draft == 0:
            return out, state
        # What comes after the commit point is looked at from the state there and leaves nothing behind.
        index = jnp.minimum(commit[:, None] + jnp.arange(draft)[None], n - 1)
        q, k, v, g, beta = (
            jnp.take_along_axis(x, index.reshape(index.shape + (1,) * (x.ndim - 2)), axis=1) for x in parts
        )
        later, _ = rule(q, k, v, g, beta, state=state)
        place = jnp.clip(jnp.arange(n)[None] - commit[:, None], 0, draft - 1)
        later = jnp.take_along_axis(later, place[:, :, None, None], axis=1)
        return jnp.where(certain[:, :, None, None], out, later), state

    # ---- unbound: what callers ask without arrays ----------------------------------------------------------------

    @nn.nowrap
    def _kept_dtype(self, dtype: Any) -> Any:
        """Of window and pending projections: a cache narrower than the computation must not round what is replayed."""
        return jnp.promote_types(dtype, self.dtype)

    @nn.nowrap
    def init_cache(self, batch: int, length: int, dtype: Any, *, draft: int = 0) -> RecurrentCache:
        """Room for any number of tokens a row, of which `draft` may be tentative."""
        del length
        if draft < 0:
            raise UserError(f"draft: {draft} tentative tokens; must be at least 0")
        shape = (batch, *self.state_sizes)
        kept = self._kept_dtype(dtype)
        return RecurrentCache.zeros(shape, self.conv_size - 1, self.channels, self.replayed, draft, kept)

    @nn.nowrap
    def prepare(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Fuse all products with x into one matrix `[d, m]` and all convolutions into one."""
        params, names = matrices_as(params, self.dtype), list(self.projections)
        x_proj = jnp.concatenate([params[f"{n}_proj"].reshape(self.d_model, -1) for n in names], axis=1)
        conv = jnp.concatenate([params[f"{n}_conv"].reshape(self.conv_size, -1) for n in self.conv_widths], axis=1)
        gone = {f"{n}_proj" for n in names} | {f"{n}_conv" for n in self.conv_widths}
        return {**{n: value for n, value in params.items() if n not in gone}, "x_proj": x_proj, "conv": conv}

    @nn.nowrap
    def cost(self, batch: int, t: int, s: float, dtype: Any) -> Cost:
        """FLOPs: 2 b t times the weights; the recurrence `4 b t h k v` for a few tokens, else that of the chunked form, linear in t."""
        del s
        h, k, v = self.state_sizes
        d, size = self.d_model, jnp.dtype(dtype).itemsize
        kept = self._kept_dtype(dtype).itemsize
        x_weights = d * sum(_flat(shape) for shape, _ in self.projections.values())
        weights = x_weights + sum(self.inner_weights) + h * v * d
        params = weights + self.conv_size * self.channels + self.vectors
        rule = 4 * t * h * k * v if t <= FEW else t / self.chunk_size * h * self.chunk_flops
        constant = 4 * h * k * v + (self.conv_size - 1) * self.channels * kept
        return Cost(
            flops=2 * batch * t * weights + batch * rule,
            params=params,
            params_active=params,
            cache_constant=constant,
            cache_read=batch * constant,
            activation_bytes=batch * t * ((d + self.replayed + self.channels + 2 * h * v) * size + 4 * h * (k + 1)),
            collective_bytes=batch * t * d * size,
        )


def _flat(shape: tuple[int, ...]) -> int:
    out = 1
    for size in shape:
        out *= size
    return out


def _joined(parts: Mapping[str, Array], names: Any) -> Array:
    """Parts `[b t ..]` side by side, `[b t m]`."""
    return jnp.concatenate([parts[n].reshape(*parts[n].shape[:2], -1) for n in names], axis=-1)
