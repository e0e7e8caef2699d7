"""What training carries from step to step: one pytree, the whole of what a checkpoint must hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.layers.added import own
from jaxllm.layers.base import Declared
from jaxllm.mesh import Rules, param_shardings
from jaxllm.model import LanguageModel
from jaxllm.params import declare, init_params, is_declared, path_name
from jaxllm.training.optimisers import Optimiser

Tree = Any


@struct.dataclass
class TrainState:
    """All int32 scalars but the trees. `step`: batches consumed, the data position and the source of random keys.
    `updates`: optimiser updates made in this stage, what schedules see. `skipped`: steps whose loss was not finite.
    `master`: float32 copies of trained parameters kept in fewer bits (None for the others, and for all where the
    optimiser keeps none). `key`: raw key data.
    `ema`: float32 running averages of trained parameters (None for the others, and all None where none are kept).
    """

    params: Tree
    opt_state: Tree
    master: Tree
    step: jax.Array
    updates: jax.Array
    skipped: jax.Array
    key: jax.Array
    ema: Tree = None

    @property
    def averaged(self) -> Tree:
        """The parameters to be judged: running averages where they are kept, in the parameters' dtypes."""
        if self.ema is None:
            return self.params
        return jax.tree.map(
            lambda e, p: p if e is None else e.astype(p.dtype), self.ema, self.params, is_leaf=lambda x: x is None
        )


def pick(tree: Tree, mask: Tree) -> Tree:
    """`tree` with None wherever `mask` is false: trees of what is trained, without a place for the rest."""
    return jax.tree.map(lambda m, x: x if m else None, mask, tree)


def fill(part: Tree, whole: Tree) -> Tree:
    """`whole` with the leaves that `part` has."""
    return jax.tree.map(lambda p, w: w if p is None else p, part, whole, is_leaf=lambda x: x is None)


def trained(declared: Tree) -> Tree:
    """Tree of booleans: which parameters have a gradient at all."""
    return jax.tree.map(lambda d: d.trainable, declared, is_leaf=is_declared)


def wide(x: jax.Array) -> bool:
    """Is the leaf precise enough to add small updates to? bfloat16 loses steps of 1e-3 at 1 (and of 4e-3 at 2)."""
    return jnp.finfo(x.dtype).bits >= 32


def make_master(params: Tree, mask: Tree) -> Tree:
    """Float32 copies of trained leaves of fewer bits; None elsewhere, so float32 models pay nothing."""
    return jax.tree.map(lambda m, p: p.astype(jnp.float32) if m and not wide(p) else None, mask, params)


def key_data(seed: int) -> jax.Array:
    """Raw key of a run. Threefry, whatever the session's default: checkpoints must mean the same everywhere."""
    return jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))


def step_key(key: jax.Array, step: jax.Array) -> jax.Array:
    """The key of one step: a function of the run's key and the data position alone, so a resumed run draws the same."""
    return jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), step)


def new_state(
    model: LanguageModel,
    optimiser: Optimiser,
    seed: int,
    *,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
    declared: Tree | None = None,
    params: Tree | None = None,
    ema: bool = False,
) -> TrainState:
    """A fresh state, every leaf created straight on its devices. params: to start from, in their places; null = drawn. ema: keep
    running averages, which start as the parameters do."""
    declared = declare(model) if declared is None else declared
    if params is None:
        key = jax.random.key(seed, impl="threefry2x32")
        params = init_params(model, key, mesh=mesh, rules=rules, declared=declared)
    rest = _rest(declared, optimiser, seed, ema)
    shardings = None
    if mesh is not None:
        abstract = jax.eval_shape(rest, params)
        shardings = _shardings_like(abstract, declared, mesh, rules)
    return dataclasses.replace(jax.jit(rest, out_shardings=shardings)(params), params=params)


def abstract_state(
    model: LanguageModel,
    optimiser: Optimiser,
    *,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
    declared: Tree | None = None,
    ema: bool = False,
) -> TrainState:
    """The state as `ShapeDtypeStruct`s with shardings: what a checkpoint is restored into. Allocates nothing."""
    declared = declare(model) if declared is None else declared
    params = jax.tree.map(lambda d: jax.ShapeDtypeStruct(d.value.shape, d.value.dtype), declared, is_leaf=is_declared)
    state = dataclasses.replace(jax.eval_shape(_rest(declared, optimiser, 0, ema), params), params=params)
    if mesh is None:
        return state
    shardings = _shardings_like(state, declared, mesh, rules)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)


def stored(state: TrainState, model: LanguageModel, declared: Tree) -> TrainState:
    """What of a state is written down: all of it, but of a model with adapters or a draft head no parameter of its base."""
    return (
        state
        if model.lora is None and model.draft is None
        else dataclasses.replace(state, params=pick(state.params, own(declared)))
    )


def fresh_moments(state: TrainState, tx: optax.GradientTransformation, mask: Tree) -> TrainState:
    """The same parameters with an optimiser that has seen nothing, in the same places."""
    places = jax.tree.map(lambda x: x.sharding, state.opt_state)
    start = jax.jit(lambda p: tx.init(_float32(pick(p, mask))), out_shardings=places)
    opt_state = start(fill(state.master, state.params))
    return dataclasses.replace(state, opt_state=opt_state)


def _float32(tree: Tree) -> Tree:
    """Moments are made like what they are told of: in float32, whatever the parameters are kept in."""
    return jax.tree.map(lambda p: p.astype(jnp.float32), tree)


def _rest(declared: Tree, optimiser: Optimiser, seed: int, ema: bool) -> Callable[[Tree], TrainState]:
    tx, mask = optimiser.transform(declared), trained(declared)
    kept = mask if optimiser.master else jax.tree.map(lambda _: False, mask)

    def build(params: Tree) -> TrainState:
        zero = jnp.int32(0)
        master = make_master(params, kept)
        moments = tx.init(_float32(pick(fill(master, params), mask)))
        # The parameters themselves are not returned: they exist already and would be copied.
        averages = _float32(pick(params, mask)) if ema else None
        return TrainState(None, moments, master, zero, zero, zero, key_data(seed), averages)

    return build


def _shardings_like(state: TrainState, declared: Tree, mesh: Mesh, rules: Rules | None) -> TrainState:
    """Leaves that mirror a parameter (same path end, same shape) live where it lives; all others on every device."""
    boxes: dict[str, Declared] = leaves_by_path(declared, is_leaf=is_declared)
    places: dict[str, NamedSharding] = leaves_by_path(param_shardings(declared, mesh, rules))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def one(path: Any, leaf: Any) -> NamedSharding:
        name = owner(path_name(path), boxes)
        return places[name] if name is not None and boxes[name].value.shape == leaf.shape else everywhere

    return jax.tree_util.tree_map_with_path(one, state)


def owner(path: str, names: Mapping[str, Any]) -> str | None:
    """The parameter that a leaf of the optimiser's state belongs to: the longest parameter path that ends its own."""
    parts = path.split("/")
    for start in range(len(parts)):
        if (name := "/".join(parts[start:])) in names:
            return name
    return None


def leaves_by_path(tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """`{"g0/b0/mixer/q_proj": leaf}` in tree order."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]}


def host_int(x: jax.Array) -> int:
    """A replicated scalar as a Python number (blocks)."""
    return int(np.asarray(x))
