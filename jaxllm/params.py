"""Parameters outside the layers: their declaration, their creation, and the two layouts. All pure functions of the model."""

import functools
import zlib
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxllm.layers.added import frozen
from jaxllm.layers.base import Context, Declared
from jaxllm.layers.lora import merge
from jaxllm.mesh import Rules, param_shardings
from jaxllm.model import LanguageModel

Params = dict[str, Any]


def is_declared(leaf: Any) -> bool:
    """For `is_leaf=` of tree functions over a declaration."""
    return isinstance(leaf, Declared)


def declare(model: LanguageModel) -> Params:
    """The tree of `Declared` boxes (shapes, logical axes, flags) in the model's layout. Nothing is allocated.

    It is what `model.init` would declare, but each kind of layer is traced once, however often it stands in `model.layers`: what a layer
    declares depends on its fields alone.
    """
    key = jax.eval_shape(
        lambda: jax.random.key(0)
    )  # shapes from the start: an array, however small, takes a compiled program
    ctx = jax.eval_shape(Context.whole, jax.ShapeDtypeStruct((1, 2), jnp.int32))
    begin = functools.partial(model.init_with_output, method=LanguageModel.declare_ends)
    (stream, shared), variables = jax.eval_shape(begin, key, ctx)
    params = dict(variables.get("params", {}))
    kinds: dict[tuple[str, str], Params] = {}
    for i, group in enumerate(model.groups):
        for pair in group.period:
            if pair not in kinds:
                block = model.block(*pair)
                made = jax.eval_shape(
                    lambda key, R, ctx, s, block=block: block.init(key, R, ctx, None, s), key, stream, ctx, shared
                )
                kinds[pair] = dict(made.get("params", {}))
        period = {f"b{j}": blocks for j, pair in enumerate(group.period) if (blocks := kinds[pair])}
        if model.scan:
            params[f"g{i}"] = jax.tree.map(functools.partial(_stacked, group.repeats), period, is_leaf=is_declared)
        else:
            params |= {f"g{i}_{n}": period for n in range(group.repeats)}
    params = jax.tree.map(lambda box: box, params, is_leaf=is_declared)
    if model.draft is not None:
        params = frozen(params)
    return params if model.lora is None else model.lora.declare(params)


def _stacked(repeats: int, box: Declared) -> Declared:
    """As `nn.scan` declares it: with an axis of repeats in front."""
    value = jax.ShapeDtypeStruct((repeats, *box.value.shape), box.value.dtype)
    stacked: Any = box.replace(value=value)
    return stacked.add_axis(0, {nn.PARTITION_NAME: "layers"})


def plain(model: LanguageModel, params: Mapping[str, Any]) -> tuple[LanguageModel, Params]:
    """The model without adapters, and its parameters with theirs added in: the same function. Pure."""
    if model.lora is None:
        return model, dict(params)
    model = model.clone(lora=None)
    return model, merge(params, declare(model))


def path_name(path: Any) -> str:
    """`g0/b1/mixer/q_proj`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def init_params(
    model: LanguageModel,
    key: Array,
    *,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
    declared: Params | None = None,
) -> Params:
    """Draw the parameters from their declaration, each shard straight onto its device.

    The model is never run or compiled for it: on CPU XLA spends 0.3 s on every distinct shape of a random generator. Numbers come
    from numpy's counter-based Philox, one stream for each entry of a leaf's first axis (each repeat of a stacked one), keyed by
    `key`, the leaf's path and that index. So they are the same on every mesh, and a host draws only what its own devices hold.
    Initialisers see the shape without the axis of repeats.
    """
    declared = declare(model) if declared is None else declared
    leaves, tree = jax.tree_util.tree_flatten_with_path(declared, is_leaf=is_declared)
    shardings: list[Any] = [None] * len(leaves)
    if mesh is not None:
        shardings = jax.tree.leaves(param_shardings(declared, mesh, rules))
    seed = int.from_bytes(np.asarray(jax.random.key_data(key)).tobytes(), "little")
    return jax.tree.unflatten(
        tree, [_draw(path_name(path), box, seed, place) for (path, box), place in zip(leaves, shardings, strict=True)]
    )


def _draw(name: str, box: Declared, seed: int, sharding: jax.sharding.Sharding | None) -> Array:
    init: Any = box.init
    shape, dtype = box.value.shape, box.value.dtype
    stacked = bool(box.names) and box.names[0] == "layers"
    stream = zlib.crc32(name.encode())

    def row(i: int) -> np.ndarray:
        if hasattr(init, "draw"):
            rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, stream, i])))
            return init.draw(rng, shape[1:])
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed % 2**32), stream), i)
        return np.asarray(init(key, shape[1:], dtype))

    def whole() -> np.ndarray:  # a layer's own initialiser may need the whole unstacked shape (an identity, a ramp)
        return np.asarray(init(jax.random.fold_in(jax.random.key(seed % 2**32), stream), shape, dtype))

    @functools.lru_cache(maxsize=1)
    def piece(bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
        index = tuple(slice(a, b) for a, b in bounds)
        if not shape or not (stacked or hasattr(init, "draw")):
            return whole()[index].astype(dtype)
        return np.stack([row(i)[index[1:]] for i in range(*bounds[0])]).astype(dtype)

    def shard(index: Any) -> np.ndarray:
        return piece(tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True)))

    if sharding is None:
        # Bound to no device, as what a program makes of it is: otherwise the second step would be compiled anew.
        return jax.device_put(shard((slice(None),) * len(shape)))
    return jax.make_array_from_callback(shape, sharding, shard)


def unstack(model: LanguageModel, params: Mapping[str, Any]) -> Params:
    """Stacked to unstacked layout: `g0` with repeats on axis 0 becomes `g0_0, g0_1, ...`."""
    out = dict(params)
    for i, group in enumerate(model.groups):
        stacked = out.pop(f"g{i}")
        for n in range(group.repeats):
            out[f"g{i}_{n}"] = jax.tree.map(lambda a, n=n: a[n], stacked)
    return out


def restack(model: LanguageModel, params: Mapping[str, Any]) -> Params:
    """The inverse of `unstack`."""
    out = dict(params)
    for i, group in enumerate(model.groups):
        repeats = [out.pop(f"g{i}_{n}") for n in range(group.repeats)]
        out[f"g{i}"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *repeats)
    return out
