"""Targets: what a dotted name in yaml stands for, what arguments it takes, and who may name it.

Also the words of every configuration error: the value as typed, the nearest valid names.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import importlib
import inspect
import pkgutil
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.errors import UserError

# What a model hands to the layers, norms (`eps`) and residual schemes (`site`) it constructs: refused in their nodes.
# A class may name more in a class variable `supplied`.
SUPPLIED = ("d_model", "dtype", "param_dtype", "norm_eps", "eps", "site")
LINEN_OWN = ("parent", "name")
UNRESOLVED = (NameError, AttributeError, TypeError, SyntaxError)  # what reading a type hint raises
# What a saved configuration may name: the building blocks, and of jaxllm only classes, never a function that acts.
SAVED_TARGETS = (
    "jaxllm.model",
    "jaxllm.layers",
    "jaxllm.data.text",
    "jaxllm.data.synthetic",
    "jaxllm.data.hf",
    "jaxllm.data.conversations",
    "jaxllm.data.mix",
    "jaxllm.data.tokenizer",
    "jaxllm.data.tiktoken",
    "jaxllm.data.vocabulary",
    "jaxllm.data.subword",
    "jaxllm.training.objectives",
    "jaxllm.training.optimisers",
    "jaxllm.training.schedules",
    "jaxllm.measure.trackers",
    "jaxllm.measure.chips",
    "optax",
)


def show(value: Any) -> str:
    """A value as the user would type it, short enough for one line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = value if isinstance(value, str) else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= 80 else text[:77] + "..."


def nearest(name: str, valid: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """The closest of `valid`, best first: at most three, and only those about as close as the best."""
    scores = {other: _likeness(name.lower(), other.lower()) for other in sorted(set(valid))}
    best = max(scores.values(), default=0.0)
    near = [other for other in sorted(scores, key=lambda o: -scores[o]) if scores[other] >= max(cutoff, best - 0.08)]
    return near[:3]


def _likeness(name: str, other: str) -> float:
    """Between 0 and 1. Letters that only changed places are the likeliest slip: `modle` is `model`, not `mode`."""
    if sorted(name) == sorted(other):
        return 1.0
    return difflib.SequenceMatcher(None, name, other).ratio()


def suggest(name: str, valid: Iterable[str], prefix: str = "", suffix: str = "") -> str:
    """`; did you mean x?` when something is near, else the list of valid names (cut at 20)."""
    names = sorted(set(valid))
    near = nearest(name, names)
    if near:
        return "; did you mean " + " or ".join(prefix + n + suffix for n in near) + "?"
    if not names:
        return ""
    more = f", ... ({len(names)} in all)" if len(names) > 20 else ""
    return "; valid: " + ", ".join(names[:20]) + more


def matching(globs: Iterable[str], names: Iterable[str], key: str, kind: str = "parameter") -> set[str]:
    """The names that some glob names (`*` spans slashes); a glob that names nothing is an error with the nearest ones."""
    names, found = list(names), set()
    for glob in globs:
        hits = {name for name in names if fnmatch.fnmatchcase(name, glob)}
        if not hits:
            near = sorted(names, key=lambda n: -difflib.SequenceMatcher(None, glob.replace("*", ""), n).ratio())[:3]
            raise UserError(f"{key}: {glob!r} names no {kind}; nearest: {', '.join(near) or 'none'}")
        found |= hits
    return found


def is_node(value: Any) -> bool:
    return isinstance(value, Mapping) and "_target_" in value


def first_leaf(key: str, value: Any) -> tuple[str, Any]:
    """The full key and value of the first leaf below `key`: what the user typed as `a.b.c=v`."""
    while isinstance(value, Mapping) and len(value) == 1 and not is_node(value):
        name, value = next(iter(value.items()))
        key = f"{key}.{name}"
    return key, value


def unknown_key(key: str, value: Any, valid: Iterable[str], owner: str = "") -> UserError:
    parent, _, name = key.rpartition(".")
    full, leaf = first_leaf(key, value)
    of = f" of {owner}" if owner else ""
    hint = suggest(name, valid, f"{parent}." if parent else "", full.removeprefix(key))
    return UserError(f"{full}={show(leaf)}: unknown key{of}{hint}")


# ---------------------------------------------------------------------------------------------- finding the target


def locate(path: Any, key: str) -> Any:
    """The class or function `path` names. A missing name and a failing import are told apart."""
    if not isinstance(path, str) or not all(part.isidentifier() for part in path.split(".")) or "." not in path:
        raise UserError(f"{key}={show(path)}: expected the dotted name of a class or function, like optax.adamw")
    parts = path.split(".")
    for split in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:split])
        module = _import(module_name, path, key)
        if module is not None:
            return _walk(module, parts[split:], path, key)
    raise UserError(f"{key}={path}: no module named {parts[0]}; is it installed?")


def _import(name: str, path: str, key: str) -> types.ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            return None  # this module is not there; a module that *it* imports missing is another matter
        raise _import_failed(name, path, key, error) from error
    except Exception as error:
        raise _import_failed(name, path, key, error) from error


def _import_failed(name: str, path: str, key: str, error: Exception) -> UserError:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else ""
    if isinstance(error, SyntaxError) and error.filename:
        where = f" at {error.filename}:{error.lineno}"
    elif trace is not None and "importlib" in trace.tb_frame.f_code.co_filename:
        where = ""
    detail = " ".join(str(error).split())
    return UserError(f"{key}={path}: importing {name} failed{where}: {type(error).__name__}: {detail}")


def _walk(module: types.ModuleType, names: list[str], path: str, key: str) -> Any:
    found: Any = module
    for name in names:
        if not hasattr(found, name):
            valid = [n for n, v in vars(found).items() if not n.startswith("_") and callable(v)]
            if isinstance(found, types.ModuleType) and hasattr(found, "__path__"):
                valid += [m.name for m in pkgutil.iter_modules(found.__path__)]
            owner = getattr(found, "__name__", path)
            raise UserError(f"{key}={path}: {owner} has no {name}{suggest(name, valid, owner + '.')}")
        found = getattr(found, name)
    if not callable(found) or isinstance(found, types.ModuleType):
        raise UserError(f"{key}={path}: names a {type(found).__name__}, expected a class or function")
    return found


def locate_allowed(path: Any, allow: tuple[str, ...] | None, key: str) -> Any:
    """`locate` for a saved config, which is data from somebody: nothing outside `allow` is even imported, and what is found must be
    defined there too. allow: module prefixes; None = any, for what the user typed."""
    if allow is None:
        return locate(path, key)
    if isinstance(path, str):
        _check_allowed(path, path, allow, key)
    target = locate(path, key)
    home = getattr(target, "__module__", "") or ""
    _check_allowed(home, path, allow, key)
    if home.split(".")[0] == "jaxllm" and not isinstance(target, type):
        raise UserError(f"{key}={path}: a saved config may build objects, not call the function {path.split('.')[-1]}")
    return target


def _check_allowed(name: str, path: str, allow: tuple[str, ...], key: str) -> None:
    if not any(name == prefix or name.startswith(prefix + ".") for prefix in allow):
        roots = dict.fromkeys(prefix.split(".")[0] for prefix in allow)
        raise UserError(
            f"{key}={path}: a saved config may build only the model, data and training parts of {', '.join(roots)}; "
            f"if you trust this file, add allow_targets=[{path.split('.')[0]}]"
        )


# ---------------------------------------------------------------------------------------------- what it takes


@dataclass(frozen=True)
class Parameter:
    hint: Any
    required: bool


def parameters(target: Any) -> tuple[dict[str, Parameter], bool]:
    """The keys a target takes, and whether it takes any others (`**kwargs`)."""
    if isinstance(target, type) and dataclasses.is_dataclass(target):
        hidden = LINEN_OWN if is_linen(target) else ()
        missing = dataclasses.MISSING
        return {
            f.name: Parameter(_field_hint(target, f), f.default is missing and f.default_factory is missing)
            for f in dataclasses.fields(target)
            if f.init and f.name not in hidden
        }, False
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return {}, True
    function = inspect.getattr_static(target, "__init__") if isinstance(target, type) else target
    try:
        hints = typing.get_type_hints(function)
    except UNRESOLVED as error:
        _ours_resolve(function, error)
        hints = {}
    found, is_open = {}, False
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            is_open = True
        elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            found[name] = Parameter(hints.get(name, Any), parameter.default is parameter.empty)
    return found, is_open


def _field_hint(cls: type, field: dataclasses.Field[Any]) -> Any:
    """One field's hint, resolved where the class that declares it lives; unresolvable means unchecked."""
    for base in cls.__mro__:
        if field.name in vars(base).get("__annotations__", {}):
            holder = types.SimpleNamespace(__annotations__={field.name: field.type})
            try:
                return typing.get_type_hints(holder, vars(sys.modules[base.__module__]))[field.name]
            except UNRESOLVED as error:
                _ours_resolve(base, error)
                return Any
    return field.type


def _ours_resolve(owner: Any, error: Exception) -> None:
    """A hint of another package that cannot be resolved (a name only type checkers import) leaves its key unchecked. Ours are all
    resolvable, so there it is a fault to be seen."""
    if (getattr(owner, "__module__", "") or "").split(".")[0] == "jaxllm":
        raise error


def is_linen(target: Any) -> bool:
    """Whether `target` is a Linen module class, without importing flax for it."""
    linen = sys.modules.get("flax.linen")
    return linen is not None and isinstance(target, type) and issubclass(target, linen.Module)
