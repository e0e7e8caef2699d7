"""The device mesh, the one table from logical axes to mesh axes, and the checks that speak before XLA would.

Parameters carry logical axes from their declaration; activations get theirs from `shard(x, *axes)` inside layers. Activation axes
have names of their own (`batch`, `act_heads`, ...), because a parameter's `embed` axis is split over `fsdp` while the stream's is not.
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxllm.errors import UserError

Rules = Mapping[str, str | Sequence[str] | None]

AXES = ("data", "fsdp", "expert", "context", "tensor")
RULES: dict[str, str | tuple[str, ...] | None] = {
    # parameters
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head": None,
    "mlp": "tensor",
    "vocab": "tensor",
    "expert": "expert",
    "latent": None,
    "norm": None,
    "layers": None,
    # activations
    "batch": ("data", "fsdp", "expert"),  # experts live on devices that otherwise split the batch
    "length": "context",  # recurrences compose their states over it; for the rest XLA gathers what it needs
    "act_embed": None,
    "act_heads": "tensor",
    "act_mlp": "tensor",
    "act_vocab": "tensor",
}

# The mesh in force is JAX's own (`jax.set_mesh`); the rules in force belong to it and live beside it.
_RULES: contextvars.ContextVar[Rules] = contextvars.ContextVar("jaxllm_rules", default=RULES)


def mesh_sizes(axes: Mapping[str, int] | None, devices: int) -> dict[str, int]:
    """Sizes of all axes; one may be -1: what is left of `devices`."""
    sizes = {name: int((axes or {}).get(name, 1)) for name in dict.fromkeys([*AXES, *(axes or {})])}
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise UserError(f"mesh.axes: {sizes} needs sizes of at least 1, and -1 (what is left) at most once")
    if free:
        fixed = math.prod(size for size in sizes.values() if size != -1)
        if devices % fixed:
            raise UserError(
                f"mesh.axes: {fixed} does not divide the {devices} devices present, so {free[0]}=-1 has no size"
            )
        sizes[free[0]] = devices // fixed
    return sizes


def build_mesh(
    axes: Mapping[str, int] | None = None, *, axis_type: str = "auto", devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh over the devices; the axis type of the whole program is chosen here alone."""
    devices = jax.devices() if devices is None else list(devices)
    sizes = mesh_sizes(axes, len(devices))
    count = math.prod(sizes.values())
    if count > len(devices):
        raise UserError(
            f"mesh.axes: {sizes} needs {count} devices, {len(devices)} are present; lower an axis or set one to -1"
        )
    kinds = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
    if axis_type not in kinds:
        raise UserError(f"mesh.axis_type: {axis_type!r} is not one of {', '.join(kinds)}")
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(kinds[axis_type],) * len(sizes), devices=devices[:count]
    )


def abstract_mesh(axes: Mapping[str, int] | None = None) -> AbstractMesh:
    """A mesh without devices, to plan for a machine that is not here: only a -1 asks how many there are."""
    sizes = mesh_sizes(axes, jax.device_count() if -1 in (axes or {}).values() else 1)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


@contextlib.contextmanager
def use_mesh(mesh: Mesh, rules: Rules | None = None) -> Iterator[Mesh]:
    """Run a block under `mesh`; `rules` adds to or replaces lines of the table."""
    token = _RULES.set({**RULES, **(rules or {})})
    try:
        with jax.set_mesh(mesh):
            yield mesh
    finally:
        _RULES.reset(token)


def _mesh_axes(rule: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if rule is None else (rule,) if isinstance(rule, str) else tuple(rule)


def partition_spec(axes: Sequence[str | None], mesh: Any, rules: Rules, *, name: str = "array") -> PartitionSpec:
    """Logical axes to mesh axes. Two logical axes of one array on one mesh axis are refused; mesh axes of size 1 are left out."""
    used: dict[str, str] = {}
    entries: list[Any] = []
    for axis in axes:
        if axis is not None and axis not in rules:
            raise UserError(
                f"{name}: logical axis {axis!r} has no rule; add it to mesh.rules (known: {', '.join(rules)})"
            )
        chosen = [m for m in _mesh_axes(rules[axis] if axis is not None else None) if mesh.shape.get(m, 1) > 1]
        for m in chosen:
            if m in used:
                raise UserError(
                    f"{name}: logical axes {used[m]!r} and {axis!r} both map to mesh axis {m!r}; change one in mesh.rules"
                )
            used[m] = str(axis)
        entries.append(None if not chosen else chosen[0] if len(chosen) == 1 else tuple(chosen))
    return PartitionSpec(*entries)


def axes_in_force(axis: str) -> tuple[str, ...]:
    """The axes, of more than one device, of the mesh in force that split a logical axis."""
    mesh = jax.sharding.get_abstract_mesh()
    return () if mesh.empty else tuple(m for m in _mesh_axes(_RULES.get()[axis]) if mesh.shape.get(m, 1) > 1)


def shard(x: jax.Array, *axes: str | None) -> jax.Array:
    """Say where an activation lives, by logical axis. Without a mesh, or on one device, nothing happens."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or math.prod(mesh.shape.values()) == 1:
        return x
    spec = partition_spec(axes, mesh, _RULES.get(), name="activation")
    if AxisType.Explicit in mesh.axis_types:
        return jax.sharding.reshard(x, spec)
    return jax.lax.with_sharding_constraint(x, spec)


def shard_map_over(fn: Any, in_axes: Any, out_axes: Any, **kwargs: Any) -> Any:
    """`jax.shard_map` of `fn` over the mesh in force, with logical axes (tuples of names) for the specs."""
    mesh = jax.sharding.get_abstract_mesh()
    rules = _RULES.get()

    def spec(axes: Any) -> PartitionSpec:
        return partition_spec(axes, mesh, rules, name="shard_map argument")

    def is_axes(a: Any) -> bool:
        return isinstance(a, tuple) and all(n is None or isinstance(n, str) for n in a)

    return jax.shard_map(
        fn,
        in_specs=jax.tree.map(spec, in_axes, is_leaf=is_axes),
        out_specs=jax.tree.map(spec, out_axes, is_leaf=is_axes),
        **kwargs,
    )


def param_shardings(declared: Any, mesh: Mesh, rules: Rules | None = None) -> Any:
    """A `NamedSharding` for each declared parameter. Refuses, before any compilation, a dimension that does not divide."""
    table = {**RULES, **(rules or {})}

    def is_box(leaf: Any) -> bool:
        return hasattr(leaf, "names")

    def one(path: Any, leaf: Any) -> NamedSharding:
        name = "parameter " + jax.tree_util.keystr(path, simple=True, separator="/")
        spec = partition_spec(leaf.names, mesh, table, name=name)
        for size, axis, entry in zip(leaf.value.shape, leaf.names, spec, strict=True):
            ways = math.prod(mesh.shape[m] for m in _mesh_axes(entry))
            if size % ways:
                where = "*".join(_mesh_axes(entry))
                raise UserError(
                    f"{name}: axis {axis!r} of size {size} does not divide by mesh axis {where!r} of size {ways}"
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(one, declared, is_leaf=is_box)


def batch_sharding(mesh: Mesh, rules: Rules | None = None) -> NamedSharding:
    """Where `[b, t]` arrays of a batch live."""
    return NamedSharding(mesh, partition_spec(("batch", "length"), mesh, {**RULES, **(rules or {})}, name="batch"))


def check_batch(batch_size: int, seq_len: int, mesh: Mesh, rules: Rules | None = None) -> None:
    """A batch (of one micro-step) must divide, rows and tokens, over the mesh axes that split it; each process has whole rows."""
    table = {**RULES, **(rules or {})}
    for key, size, what, axis in (
        ("batch_size", batch_size, "rows", "batch"),
        ("seq_len", seq_len, "tokens of a row", "length"),
    ):
        axes = _mesh_axes(table[axis])
        ways = math.prod(mesh.shape.get(m, 1) for m in axes)
        if size % ways:
            raise UserError(f"train.{key}: {size} {what} do not divide by mesh axes {'*'.join(axes)} of size {ways}")
        if axis == "length" and any(mesh.local_mesh.shape.get(m, 1) != mesh.shape.get(m, 1) for m in axes):
            raise UserError(
                f"mesh.axes: {'*'.join(axes)} of size {ways}, which splits rows, goes beyond one process; make it smaller"
            )
