"""What training holds on one device: parameters, gradients, optimiser state, and what one micro-batch keeps for its backward.

Everything is read off shapes. Tracing a layer with its backward takes about a second, so each kind of layer is traced once, however often
it stands in the model:

    kept(model) = kept(ends) + sum over layers of each(kind) + sum over positions of once(kind)
    kept(ends)  = kept(a model of one layer that writes nothing) - each(of that) - once(of that)

each: what depends on the stream or on parameters, so every repeat keeps its own. once: what depends on positions and document ids alone
(masks, angles), which a loop over repeats keeps once.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.config import Config
from jaxllm.layers.base import Aux, Context, Layer
from jaxllm.measure.memory import saved_by_layer, saved_for_backward, shard_bytes, tree_bytes
from jaxllm.model import LanguageModel
from jaxllm.params import declare, is_declared
from jaxllm.training.losses import backbone
from jaxllm.training.objectives import Forward, total_loss
from jaxllm.training.settings import TrainSettings
from jaxllm.training.state import abstract_state


def training_memory(
    cfg: Config,
    model: LanguageModel,
    declared: Any,
    mesh: Any,
    *,
    activations: bool,
    rows: int | None = None,
    length: int | None = None,
) -> dict[str, Any]:
    """Bytes a device holds in training: parameters, gradients, optimiser state, and what one micro-batch keeps for its backward.

    activations: also the last of these, which traces each kind of layer with its backward: seconds for a model of many kinds.
    """
    train: TrainSettings = cfg.section("train")
    place = cfg.section("mesh")
    state = abstract_state(model, cfg.build("optim"), mesh=mesh, rules=place.rules, declared=declared)
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding), state.params)
    rows = rows or max(1, train.batch_size // train.accumulate)
    length = length or train.seq_len
    ways = mesh.shape.get("data", 1) * mesh.shape.get("fsdp", 1) * mesh.shape.get("expert", 1)
    per_device = {
        "params": shard_bytes(state.params),
        "grads": shard_bytes(grads),
        "optimiser": shard_bytes((state.opt_state, state.master)),
    }
    if activations:
        # Each device keeps its rows whole; what tensor parallelism also splits is left out, so this is an upper bound there.
        per_device["activations"] = activation_bytes(cfg, model, state.params, -(-rows // ways), length)
    return {"per_device": per_device, "rows": rows, "length": length}


def activation_bytes(cfg: Config, model: LanguageModel, params: Any, rows: int, length: int) -> int:
    """What the backward of this configuration's loss keeps, for `rows` sequences of `length` tokens.

    With remat, adapters, or a stream that grows in a group, layers cannot be looked at one by one: the whole loss is traced.
    """
    positions = [pair for group in model.groups for pair in group.period]
    if model.remat != "none" or model.residual_site("out").grows or len(positions) == 1 or model.lora is not None:
        return _of_loss(cfg, model, params, rows, length)
    layers = _single_layers(model, params, rows, length)
    empty = model.clone(
        layers="empty/empty",
        mixers={**model.mixers, "empty": _EmptyMixer},
        ffns={**model.ffns, "empty": _EmptyFfn},
    )
    shapes = _shapes(declare(empty))
    (nothing,) = _single_layers(empty, shapes, rows, length).values()
    total = _of_loss(cfg, empty, shapes, rows, length) - sum(nothing)
    for group in model.groups:
        for each, once in (layers[pair] for pair in group.period):
            total += group.repeats * each + once
    return total + _sources(model, rows, length)


def _of_loss(cfg: Config, model: LanguageModel, params: Any, rows: int, length: int) -> int:
    objectives = cfg.build("objective")
    spec = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    batch = {name: spec for name in ("tokens", "labels", "positions", "segments")}
    batch["weights"] = jax.ShapeDtypeStruct((rows, length), jnp.float32)

    def loss(params: Any, batch: Any) -> jax.Array:
        ctx = Context.whole(batch["tokens"], batch["segments"], batch["positions"], train=True)
        out = backbone(model, params, ctx, {"dropout": jax.random.key(0)})
        counts = {name: o.count(batch) for name, o in objectives.items()} | {"valid": jnp.sum(batch["weights"])}
        weights = {name: jnp.float32(1.0) for name in objectives}
        return total_loss(objectives, Forward(model, params, batch, ctx, out, 1, jax.random.key(0)), counts, weights)[0]

    return saved_for_backward(loss, params, batch)


def _shapes(declared: Any) -> Any:
    return jax.tree.map(lambda box: box.value, declared, is_leaf=is_declared)


def _single_layers(model: LanguageModel, params: Any, rows: int, length: int) -> dict[tuple[str, str], tuple[int, int]]:
    """Bytes that one layer of each kind keeps: (each, once), see the module.

    What a layer hands to later ones (a choice of keys) and what a residual scheme only reads (the finished blocks of attention residuals)
    is kept by whoever made it, and a site keeps nothing that grows with their number: so a layer is looked at behind the first stream.
    """
    spec = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    ctx = jax.eval_shape(lambda *ids: Context.whole(*ids, train=True), spec, spec, spec)
    begin = functools.partial(model.init_with_output, method=LanguageModel.declare_ends)
    started: Any = jax.eval_shape(lambda ctx: begin(jax.random.key(0), ctx), ctx)
    stream, shared = started[0]
    scheme = model.residual_site("period")
    carry, fixed = jax.eval_shape(scheme.split, stream)

    def look(pair: tuple[str, str]) -> tuple[int, int]:
        block, weights = model.block(*pair), _first_of(model, params, pair)

        def call(own: Any, carry: Any, still: Any) -> Any:
            (params, shared), (ctx, fixed) = own, still
            rngs = {"dropout": jax.random.key(0)}
            result: Any = block.apply({"params": params}, scheme.merge(carry, fixed), ctx, None, shared, rngs=rngs)
            R, _, shared, aux = result
            return scheme.split(R)[0], shared, {k: v for k, v in aux.items() if k.startswith("loss/")}

        return saved_by_layer(call, (weights, shared), carry, (ctx, fixed))

    return {pair: look(pair) for pair in dict.fromkeys(pair for group in model.groups for pair in group.period)}


def _first_of(model: LanguageModel, params: Any, pair: tuple[str, str]) -> Any:
    """The parameters' shapes of the first layer of that kind, without the axis of repeats."""
    i, j = next((i, group.period.index(pair)) for i, group in enumerate(model.groups) if pair in group.period)
    if not model.scan:
        return params.get(f"g{i}_0", {}).get(f"b{j}", {})
    stacked = params.get(f"g{i}", {}).get(f"b{j}", {})
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked)


class _EmptyMixer(Layer, kw_only=True):
    """Writes zeros, so that what is left of a model is its ends."""

    def __call__(self, x: Array, ctx: Context, cache: Any = None, shared: Any = None) -> tuple[Array, Any, Any, Aux]:
        return jnp.zeros_like(x), cache, {} if shared is None else shared, {}


class _EmptyFfn(Layer, kw_only=True):
    """Writes zeros too."""

    def __call__(self, x: Array, ctx: Context) -> tuple[Array, Aux]:
        return jnp.zeros_like(x), {}


def _sources(model: LanguageModel, rows: int, length: int) -> int:
    """Bytes of what groups leave behind for later ones to read."""
    scheme, done = model.residual_site("out"), 0
    e = jax.ShapeDtypeStruct((rows, length, model.d_model), model.compute_dtype)
    R = first = jax.eval_shape(scheme.start, e)
    for group in model.groups[:-1]:
        done += group.layers
        R = jax.eval_shape(lambda R, done=done: scheme.boundary(R, done), R)
    return sum(sign * tree_bytes(jax.eval_shape(scheme.split, r)[1]) for sign, r in ((1, R), (-1, first)))
