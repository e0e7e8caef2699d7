"""Target nodes: plain yaml values -> checked and built Python objects, by the type hints of what they name.

A node is a mapping with `_target_: dotted.name`; its other keys are the arguments. `_partial_: true` asks for a
`functools.partial` instead of the object. One walk does both jobs: with `build=False` every key, type and target is
checked and nothing is constructed; with `build=True` the same walk also constructs.

Every mistake is a `UserError` of one line: the full dotted key, the value, what was expected, the nearest valid names.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.errors import UserError
from jaxllm.targets import (
    SUPPLIED,
    Parameter,
    first_leaf,
    is_linen,
    is_node,
    locate_allowed,
    nearest,
    parameters,
    show,
    unknown_key,
)

SPECIAL = ("_target_", "_partial_")

Node = Mapping[str, Any]


@dataclass(frozen=True)
class Inside:
    """The node that holds the one being looked at."""

    target: Any
    node: Node


@dataclass(frozen=True)
class Nodes:
    """The walk. `allow`: package prefixes targets may come from, None = any. `build`: construct, or only check."""

    allow: tuple[str, ...] | None = None
    build: bool = False

    def node(self, node: Node, key: str, extra: Node | None = None, inside: Inside | None = None) -> Any:
        """Check one node and, if building, return the object (or the partial). `extra` wins over the node's keys."""
        extra = dict(extra or {})
        outer = inside.target if inside is not None else None
        target = locate_allowed(node["_target_"], self.allow, f"{key}._target_")
        partial = node.get("_partial_", False)
        if not isinstance(partial, bool):
            raise UserError(f"{key}._partial_={show(partial)}: expected true or false")
        if is_linen(outer) and is_linen(target) and not partial:
            raise UserError(
                f"{key}: a layer inside a model must be a recipe, not a made layer (its weights would be "
                f"shared by all blocks); add {key}._partial_=true"
            )
        takes, is_open = parameters(target)
        name = getattr(target, "__name__", str(node["_target_"]))
        arguments = {}
        for field, value in node.items():
            if field in SPECIAL:
                continue
            full = f"{key}.{field}"
            if partial and is_linen(target) and field in self._supplied(target):
                raise UserError(f"{full}={show(value)}: the model supplies {field} to its layers; remove it here")
            if field not in takes and not is_open:
                raise unknown_key(full, value, takes, name)
            if value is None and inside is None and field in takes and takes[field].required:
                continue  # `vocab_size: null` in a group's own node: known when it is built
            if field not in extra:
                hint = takes[field].hint if field in takes else Any
                arguments[field] = self.value(value, hint, full, Inside(target, node))
        late = self._supplied(target) if partial else () if self.build else [f for f, v in node.items() if v is None]
        for field, parameter in takes.items():
            if parameter.required and field not in arguments and field not in extra and field not in late:
                raise UserError(f"{key}.{field}: missing; {name} needs it")
        if partial and inside is not None and is_linen(target) and is_linen(outer):
            self._try_layer(target, arguments, takes, key, inside)
        if not self.build:
            return node
        return self._construct(target, {**arguments, **extra}, key, partial)

    @staticmethod
    def _supplied(target: Any) -> tuple[str, ...]:
        return SUPPLIED + tuple(getattr(target, "supplied", ()))

    def _try_layer(
        self, target: Any, arguments: Node, takes: Mapping[str, Parameter], key: str, inside: Inside
    ) -> None:
        """Let a layer's own checks (`num_heads % num_kv_heads`) speak now, with the full key, not during tracing."""
        supplied = {n: inside.node[n] for n in ("d_model", "norm_eps") if n in inside.node and n in takes}
        walk = Nodes(self.allow, build=True)  # a layer asks its own parts (a rope) things that a node cannot answer
        made = {n: walk.node(v, f"{key}.{n}", inside=inside) if is_node(v) else v for n, v in arguments.items()}
        try:
            target(**supplied, **made, parent=None)
        except UserError as error:
            raise UserError(f"{key}: {error}") from error
        except TypeError:  # a layer that needs more than the model's node tells is checked when the model makes it
            return

    @staticmethod
    def _construct(target: Any, arguments: dict[str, Any], key: str, partial: bool) -> Any:
        if partial:
            return functools.partial(target, **arguments)
        try:
            return target(**arguments)
        except UserError as error:
            text = str(error)
            raise UserError(text if text.startswith(key) else f"{key}: {text}") from error
        except Exception as error:
            error.add_note(f"while building {key} with {', '.join(f'{k}={show(v)}' for k, v in arguments.items())}")
            raise

    def value(self, value: Any, hint: Any, key: str, inside: Inside | None = None) -> Any:
        """`value` as `hint` asks (lists become tuples, nodes become objects), or a UserError."""
        if hint is typing.Any or isinstance(hint, (typing.TypeVar, str)):
            return self._free(value, key, inside)
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin is typing.Annotated:
            return self.value(value, arguments[0], key, inside)
        if origin in (typing.Union, types.UnionType):
            return self._union(value, arguments, hint, key, inside)
        if origin is typing.Literal:
            return self._literal(value, arguments, key)
        if _is_recipe(hint):
            return self._callable(value, hint, key, inside)
        if is_node(value):
            return self._object(value, hint, origin, key, inside)
        if hint in SCALARS:
            return _scalar(value, hint, key)
        kind = origin or hint
        if isinstance(kind, type) and issubclass(kind, collections.abc.Mapping):
            return self._mapping(value, arguments, hint, key, inside)
        if isinstance(kind, type) and issubclass(kind, list | tuple | set | frozenset | collections.abc.Sequence):
            return self._sequence(value, kind, hint, key, inside)
        return self._class(value, hint, key, inside)

    def fields(self, value: Mapping[str, Any], cls: type, key: str = "") -> Any:
        """A plain settings dataclass from a mapping: unknown keys and wrong types are refused."""
        takes, _ = parameters(cls)
        prefix = f"{key}." if key else ""
        if not isinstance(value, Mapping):
            raise UserError(f"{key}={show(value)}: expected keys below it, like {prefix}{next(iter(takes), 'key')}=...")
        for name, item in value.items():
            if name not in takes:
                raise unknown_key(prefix + str(name), item, takes, "" if key else cls.__name__)
        arguments = {n: self.value(v, takes[n].hint, prefix + n) for n, v in value.items()}
        for name, parameter in takes.items():
            if parameter.required and name not in arguments:
                raise UserError(f"{prefix}{name}: missing; it has no default")
        try:
            return cls(**arguments)
        except UserError as error:
            text = str(error)
            raise UserError(text if not key or text.startswith(key) else f"{key}.{text}") from error

    def _free(self, value: Any, key: str, inside: Inside | None) -> Any:
        """A value nobody typed: nodes below it are still checked and built."""
        if is_node(value):
            return self.node(value, key, inside=inside)
        if isinstance(value, Mapping):
            return {name: self._free(item, f"{key}.{name}", inside) for name, item in value.items()}
        if isinstance(value, list):
            return [self._free(item, f"{key}.{i}", inside) for i, item in enumerate(value)]
        return value

    def _union(self, value: Any, arms: tuple[Any, ...], hint: Any, key: str, inside: Inside | None) -> Any:
        if value is None and type(None) in arms:
            return None
        real = [arm for arm in arms if arm is not type(None)]
        # A whole number stays one where both are allowed; hence int before float, exact types first.
        real.sort(key=lambda arm: 0 if arm in SCALARS and type(value) is arm else 1)
        failures = []
        for arm in real:
            try:
                return self.value(value, arm, key, inside)
            except UserError as error:
                failures.append(error)
        deep = [e for e, arm in zip(failures, real, strict=True) if arm not in SCALARS]
        if isinstance(value, Mapping | list) and len(deep) == 1:
            raise deep[0]
        raise failures[0] if len(real) == 1 and real[0] not in SCALARS else mismatch(value, hint, key)

    def _literal(self, value: Any, choices: tuple[Any, ...], key: str) -> Any:
        for choice in choices:
            if type(choice) is type(value) and choice == value:
                return choice
        near = nearest(str(value), [str(c) for c in choices])
        tail = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{key}={show(value)}: expected one of {', '.join(show(c) for c in choices)}{tail}")

    def _callable(self, value: Any, hint: Any, key: str, inside: Inside | None) -> Any:
        if is_node(value):
            return self.node(value, key, inside=inside)
        if isinstance(value, Mapping) and value:
            full, leaf = first_leaf(key, value)
            raise UserError(f"{full}={show(leaf)}: {key} has no _target_, so nothing is known by that name there")
        raise mismatch(value, hint, key)

    def _object(self, value: Mapping[str, Any], hint: Any, origin: Any, key: str, inside: Inside | None) -> Any:
        kind = origin or hint
        if kind in SCALARS:
            raise mismatch(value["_target_"], hint, key)
        target = locate_allowed(value["_target_"], self.allow, f"{key}._target_")
        known = isinstance(kind, type) and kind is not object and not getattr(kind, "_is_protocol", False)
        if known and isinstance(target, type) and not issubclass(kind, Mapping) and not issubclass(target, kind):
            raise UserError(f"{key}._target_={value['_target_']}: expected a {kind.__name__}")
        if known and value.get("_partial_") and kind.__module__.split(".")[0] == "jaxllm":
            raise UserError(f"{key}._partial_=true: expected a made {kind.__name__}; remove _partial_")
        return self.node(value, key, inside=inside)

    def _mapping(self, value: Any, arguments: tuple[Any, ...], hint: Any, key: str, inside: Inside | None) -> Any:
        if not isinstance(value, Mapping):
            raise mismatch(value, hint, key)
        name_hint, item_hint = arguments if len(arguments) == 2 else (Any, Any)
        known = [n for n, v in value.items() if is_node(v)]
        made = {}
        for name, item in value.items():
            full = f"{key}.{name}"
            if _is_recipe(item_hint) and not is_node(item):
                raise unknown_key(full, item, known)
            made[self.value(name, name_hint, full)] = self.value(item, item_hint, full, inside)
        return made

    def _sequence(self, value: Any, kind: type, hint: Any, key: str, inside: Inside | None) -> Any:
        arguments = typing.get_args(hint)
        if not isinstance(value, list | tuple):
            raise mismatch(value, hint, key)
        if kind is tuple and arguments and arguments[-1] is not Ellipsis:
            if len(arguments) != len(value):
                raise UserError(f"{key}={show(value)}: expected {len(arguments)} values, got {len(value)}")
            hints = list(arguments)
        else:
            hints = [arguments[0] if arguments else Any] * len(value)
        items = [self.value(v, h, f"{key}.{i}", inside) for i, (v, h) in enumerate(zip(value, hints, strict=True))]
        return kind(items) if kind in (tuple, set, frozenset) else items

    def _class(self, value: Any, hint: Any, key: str, inside: Inside | None) -> Any:
        if hint is type(None):
            if value is None:
                return None
            raise mismatch(value, hint, key)
        if not isinstance(hint, type):
            return self._free(value, key, inside)
        if issubclass(hint, enum.Enum):
            return self._literal(value, tuple(m.value for m in hint), key) and hint(value)
        if issubclass(hint, Path):
            return Path(_scalar(value, str, key))
        if dataclasses.is_dataclass(hint) and isinstance(value, Mapping) and not is_linen(hint):
            return self.fields(value, hint, key)
        if hint.__module__.split(".")[0] == "jaxllm":
            raise UserError(f"{key}={show(value)}: expected a _target_ node of {hint.__name__}")
        return self._free(value, key, inside)


# ---------------------------------------------------------------------------------------------- plain values

SCALARS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _scalar(value: Any, hint: Any, key: str) -> Any:
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, str):
        return value
    if hint in (int, float) and isinstance(value, int | float) and not isinstance(value, bool):
        if hint is float:
            return float(value)
        if isinstance(value, int) or (math.isfinite(value) and value == int(value)):
            return int(value)
    raise mismatch(value, hint, key)


def mismatch(value: Any, hint: Any, key: str) -> UserError:
    got = f" (got the text '{show(value)}')" if isinstance(value, str) and _wants_number(hint) else ""
    return UserError(f"{key}={show(value)}: expected {describe(hint)}{got}")


def _wants_number(hint: Any) -> bool:
    return hint in (int, float, bool) or any(_wants_number(arm) for arm in typing.get_args(hint))


def _is_recipe(hint: Any) -> bool:
    """Whether the hint is `Callable`: a field that takes a `_partial_` node."""
    return hint is collections.abc.Callable or typing.get_origin(hint) is collections.abc.Callable


def describe(hint: Any) -> str:
    """A type hint in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in SCALARS:
        return SCALARS[hint]
    if hint is type(None):
        return "null"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(arm) for arm in arguments)
    if origin is typing.Literal:
        return "one of " + ", ".join(show(c) for c in arguments)
    if _is_recipe(hint):
        return "a _target_ node with _partial_: true"
    kind = origin or hint
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return "a mapping {name: value}"
    if isinstance(kind, type) and issubclass(kind, list | tuple | set | frozenset | collections.abc.Sequence):
        return f"a list of {describe(arguments[0])}" if arguments else "a list"
    return getattr(hint, "__name__", str(hint))
