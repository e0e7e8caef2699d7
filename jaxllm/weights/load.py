"""A foreign checkpoint as a model of ours: its node, and its parameters straight into their shardings.

Everything is compared before the first number is read: each tensor of the file must be the one that a parameter asks for, of the
expected shape, and none may be left over. Then the parameters are made one by one. A stacked one is filled layer by layer from its
tensors, so that beside the model itself no more than one parameter's local shards and one tensor are in memory.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from jaxllm.checkpoint_files import nest
from jaxllm.errors import UserError
from jaxllm.mesh import Rules, param_shardings
from jaxllm.model import LanguageModel
from jaxllm.nodes import Nodes
from jaxllm.params import Params, declare
from jaxllm.weights.config_json import ConfigJson, Warn
from jaxllm.weights.families import family_of
from jaxllm.weights.family import Family, Node, NoPlace, Placed, leaves, plan
from jaxllm.weights.forms import Table
from jaxllm.weights.tensors import TABLE_DTYPES, WEIGHT_DTYPES, TensorSource

ALIGNED = 64  # bytes
Bounds = tuple[tuple[int, int], ...]  # of a shard: (start, stop) on each axis
Progress = Callable[[int, int], None]  # tensors read, of how many


def read_node(source: TensorSource, warn: Warn | None = None) -> Node:
    """The model node that config.json means. Raises UserError for what is unknown or not available."""
    family = family_of(source.config, source.where)
    config = ConfigJson(source.config, source.where, frozenset(source.names()))
    node = family.to_model(config)
    config.finish(warn)
    return node


def build(node: Mapping[str, Any]) -> LanguageModel:
    """The model of a node that a family made."""
    model: LanguageModel = Nodes(("jaxllm",), build=True).node(node, "model")
    return model


def read_model(
    source: TensorSource, mesh: Mesh | None = None, rules: Rules | None = None, warn: Warn | None = None
) -> tuple[Node, Params]:
    """(model node, stacked parameters) of a checkpoint."""
    node = read_node(source, warn)
    return node, read_params(source, build(node), mesh=mesh, rules=rules)


def read_params(
    source: TensorSource,
    model: LanguageModel,
    *,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
    progress: Progress | None = None,
) -> Params:
    """The stacked parameters of `model` from `source`, in the model's `param_dtype`, each shard straight onto its device.

    Raises UserError, before anything is read, naming the first tensor that is missing, left over or of another shape.
    """
    family = family_of(source.config, source.where)
    declared = declare(model)
    places = plan_of(family, model, declared, source)
    _check(places, family, model, source)
    boxes = leaves(declared)
    one = SingleDeviceSharding(jax.local_devices()[0])
    shardings = {path: one for path in boxes} if mesh is None else leaves(param_shardings(declared, mesh, rules))
    made: dict[str, jax.Array] = {}
    done, total = 0, sum(len(place.names) for place in places)
    for place in places:
        made |= _fill(place, source, boxes, shardings)
        done += len(place.names)
        if progress is not None:
            progress(done, total)
    return nest({tuple(path.split("/")): made[path] for path in boxes})


def plan_of(family: Family, model: LanguageModel, declared: Mapping[str, Any], source: TensorSource) -> list[Placed]:
    """Where a file holds the parameters, under the shorter names of one that holds the backbone alone, where it does."""
    there = set(source.names())
    bare = bool(family.prefix) and not any(name.startswith(family.prefix) for name in there)
    try:
        places = plan(family, model, declared, {family.prefix + name for name in there} if bare else there)
    except NoPlace as error:
        raise UserError(f"{source.where}: {error}") from None
    if not bare:
        return places
    return [
        dataclasses.replace(place, names=tuple(name.removeprefix(family.prefix) for name in place.names))
        for place in places
    ]


def _check(places: Iterable[Placed], family: Family, model: LanguageModel, source: TensorSource) -> None:
    """Missing, mis-shaped, of no weight's type, left over: one line that names the tensor."""
    there = set(source.names())
    wanted: dict[str, tuple[int, ...]] = {}
    whole: set[str] = set()
    for place in places:
        shape = place.rule.form.shape(place.shapes)
        wanted |= {name: shape for name in place.names}
        whole.update(place.names if isinstance(place.rule.form, Table) else ())
    for name, shape in wanted.items():
        if name not in there:
            raise UserError(f"{source.where}: tensor {name} is missing; expected one of shape {list(shape)}")
        if source.shape(name) != shape:
            raise UserError(
                f"{source.where}: tensor {name}: expected shape {list(shape)}, found {list(source.shape(name))}"
            )
        if source.dtype(name).name not in (TABLE_DTYPES if name in whole else WEIGHT_DTYPES):
            kind = "table" if name in whole else "weight"
            found = source.dtype(name).name
            raise UserError(f"{source.where}: tensor {name} is of type {found}, which is no {kind}'s")
    patterns = (*family.ignore, *family.aside(source.config))
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or r"(?!)")
    for name in sorted(there - set(wanted)):
        if model.tie_embeddings and name == "lm_head.weight":
            _check_tied(name, wanted, places, source)
        elif not ignored.fullmatch(name):
            raise UserError(
                f"{source.where}: tensor {name} of shape {list(source.shape(name))} belongs to no parameter of this"
                f" {family.model_types[0]} model; config.json and the weights do not fit together"
            )


def _check_tied(name: str, wanted: Mapping[str, Any], places: Iterable[Placed], source: TensorSource) -> None:
    """A head that is tied may be in the file too, but only as the embedding once more."""
    embed = next(place.names[0] for place in places if place.paths == ("embed",))
    if source.shape(name) != wanted[embed] or not np.array_equal(source.read(name), source.read(embed)):
        raise UserError(
            f"{source.where}: tensor {name} differs from {embed}, though config.json ties them; set tie_word_embeddings to false"
        )


def _fill(
    place: Placed, source: TensorSource, boxes: Mapping[str, Any], shardings: Mapping[str, Sharding]
) -> dict[str, jax.Array]:
    """The parameters of one rule. Each tensor is read once, whatever number of local shards it goes to."""
    targets: dict[str, dict[Bounds, np.ndarray]] = {}
    for path in place.paths:
        shape, dtype = boxes[path].value.shape, boxes[path].value.dtype
        local = {_bounds(index, shape) for index in shardings[path].addressable_devices_indices_map(shape).values()}
        targets[path] = {bounds: _zeros([stop - start for start, stop in bounds], dtype) for bounds in local}
    for name, at in zip(place.names, place.at, strict=True):
        parts = place.rule.form.split(source.read(name), place.shapes)
        for path, part in zip(place.paths, parts, strict=True):
            for bounds, shard in targets[path].items():
                outer = list(zip(at, bounds, strict=False))
                if all(start <= n < stop for n, (start, stop) in outer):
                    _copy(part, shard[tuple(n - start for n, (start, _) in outer)], bounds[len(at) :])
    return {path: _placed(targets.pop(path), boxes[path].value.shape, shardings[path]) for path in place.paths}


def _zeros(shape: list[int], dtype: Any) -> np.ndarray:
    """Zeros (for the rows of a padded vocabulary that no tensor holds), at an address that JAX takes over on CPU without a copy."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.zeros(size + ALIGNED, np.uint8)
    start = -raw.ctypes.data % ALIGNED
    return raw[start : start + size].view(dtype).reshape(shape)


def _placed(shards: Mapping[Bounds, np.ndarray], shape: tuple[int, ...], sharding: Sharding) -> jax.Array:
    return jax.make_array_from_callback(shape, sharding, lambda index: shards[_bounds(index, shape)])


def _bounds(index: Any, shape: tuple[int, ...]) -> Bounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _copy(part: np.ndarray, shard: np.ndarray, bounds: Bounds) -> None:
    """Write the region of `part` that lies within `bounds`; it may end before the shard does (a padded vocabulary)."""
    region = part[tuple(slice(start, stop) for start, stop in bounds)]
    shard[tuple(slice(0, size) for size in region.shape)] = region
