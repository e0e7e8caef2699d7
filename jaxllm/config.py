"""The configuration: one plain tree, every key of it checked, its nodes turned into objects on request.

The schema is the code: the fields of `Common` and of the settings dataclasses that live beside their consumers, and the
fields of whatever a `_target_` names. A key or a type none of them knows is refused before anything runs, in one line.

Hydra composes the tree (`jaxllm.compose`); a saved one is read back here, without Hydra.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import yaml

from jaxllm.errors import UserError
from jaxllm.nodes import Nodes
from jaxllm.targets import SAVED_TARGETS, first_leaf, is_node, locate, nearest, parameters, show, suggest, unknown_key
from jaxllm.tasks import TASKS

PACKAGE = Path(__file__).resolve().parent
CONF = next((p for p in (PACKAGE / "conf", PACKAGE.parent / "conf") if p.is_dir()), PACKAGE / "conf")
MAX_YAML_BYTES, MAX_DEPTH = 1 << 20, 50


@dataclass(frozen=True)
class Common:
    """Keys every task knows. Documented, with their defaults, in conf/config.yaml."""

    task: str = "train"
    seed: int = 0
    name: str | None = None
    run_dir: str | None = None
    resume: bool = False
    scale: int = 1
    source: str | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    platform: Literal["cpu", "gpu", "tpu"] | None = None
    cpu_devices: int | None = None
    compile_cache: str | bool = True
    allow_targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise UserError(f"task={self.task}: no such task{suggest(self.task, TASKS)}")
        if self.cpu_devices is not None and self.cpu_devices < 1:
            raise UserError(f"cpu_devices={self.cpu_devices}: expected at least 1")
        if self.seed < 0:
            raise UserError(f"seed={self.seed}: expected 0 or more")
        if self.scale < 1:
            raise UserError(f"scale={self.scale}: expected at least 1")


def common_keys(tree: Mapping[str, Any]) -> Common:
    """The common keys alone: needed before JAX is imported, and so before the rest can be checked."""
    return Nodes().fields({k: v for k, v in tree.items() if k in Common.__dataclass_fields__}, Common)


@dataclass(frozen=True)
class MeshSettings:
    """axes: sizes of the mesh axes, one may be -1 (what is left). rules: changes to the table in jaxllm/mesh.py.

    axis_type: how shardings travel, `auto` (the compiler's choice between constraints) or `explicit` (in types)."""

    axes: dict[str, int] = field(default_factory=dict)
    rules: dict[str, str | list[str] | None] | None = None
    axis_type: Literal["auto", "explicit"] = "auto"

    def __post_init__(self) -> None:
        from jaxllm.mesh import AXES, RULES

        for name, size in self.axes.items():
            if name not in AXES:
                raise UserError(f"mesh.axes.{name}={size}: unknown mesh axis{suggest(name, AXES, 'mesh.axes.')}")
        for name, axes in (self.rules or {}).items():
            if name not in RULES:
                raise UserError(
                    f"mesh.rules.{name}={show(axes)}: unknown logical axis{suggest(name, RULES, 'mesh.rules.')}"
                )
            for axis in [axes] if isinstance(axes, str) else axes or []:
                if axis not in AXES:
                    raise UserError(f"mesh.rules.{name}={axis}: unknown mesh axis{suggest(axis, AXES)}")


SECTIONS = {
    "train": "jaxllm.training.settings.TrainSettings",
    "eval": "jaxllm.training.settings.EvalSettings",
    "label": "jaxllm.training.settings.LabelSettings",
    "count": "jaxllm.tasks.count.CountSettings",
    "read": "jaxllm.inference.settings.ReadSettings",
    "time": "jaxllm.measure.settings.TimeSettings",
    "server": "jaxllm.inference.settings.ServeSettings",
    "bench": "jaxllm.inference.settings.BenchSettings",
    "mesh": "jaxllm.config.MeshSettings",
}
ROOT_SECTIONS = {  # their fields are root keys
    "generate": "jaxllm.inference.settings.GenerateSettings",
    "convert": "jaxllm.weights.settings.ConvertSettings",
    "logits": "jaxllm.weights.settings.LogitsSettings",
    "check": "jaxllm.weights.settings.CheckSettings",
    "report": "jaxllm.report.settings.ReportSettings",
    "inspect": "jaxllm.report.settings.InspectSettings",
}
STAGES = "jaxllm.training.settings.StageSettings"
GROUPS = ("model", "data", "optim", "objective", "track", "chip")  # roots of target nodes


def options(group: str, conf: Path = CONF) -> list[str]:
    """The names a config group offers: the yaml files of its folder."""
    return sorted(file.stem for file in (conf / group).glob("*.yaml"))


# ---------------------------------------------------------------------------------------------- the tree


class Config:
    """A checked configuration. Root keys are attributes; `cfg["train.steps"]` reads any plain value.

    explicit: value keys typed on the command line. choices: group choices (`{"model": "hybrid_tiny"}`).
    groups: the texts that made them on the command line (`+experiment=smoke`, `data/tokenizer=bytes`), in order.
    original_cwd: the folder the command was typed in; `path()` resolves against it.
    """

    def __init__(
        self,
        tree: Mapping[str, Any],
        *,
        allow: tuple[str, ...] | None = None,
        explicit: Mapping[str, Any] | None = None,
        choices: Mapping[str, str] | None = None,
        groups: Iterable[str] = (),
        original_cwd: Path | None = None,
    ) -> None:
        self._tree = _copy(tree)
        self._allow = allow
        self.explicit = dict(explicit or {})
        self.choices = dict(choices or {})
        self.groups = list(groups)
        self.original_cwd = Path(os.getcwd()) if original_cwd is None else original_cwd
        self.common: Common = self._check()

    # ---- reading

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in Common.__dataclass_fields__:
            return getattr(self.common, name)
        if name in self._tree:
            return _copy(self._tree[name])
        raise AttributeError(f"the configuration has no key {name}")

    def __getitem__(self, key: str) -> Any:
        value: Any = self._tree
        for part in key.split("."):
            if isinstance(value, Mapping) and part in value:
                value = value[part]
            elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
                value = value[int(part)]
            else:
                raise KeyError(key)
        return _copy(value)

    def __contains__(self, key: str) -> bool:
        try:
            self[key]
        except KeyError:
            return False
        return True

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default

    def path(self, path: str | os.PathLike[str]) -> Path:
        """`path` as the user meant it: relative to where the command was typed, `~` expanded."""
        return (self.original_cwd / Path(path).expanduser()).absolute()

    def to_dict(self) -> dict[str, Any]:
        return _copy(self._tree)

    def to_yaml(self) -> str:
        return yaml.dump(self._tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)

    # ---- objects

    def section(self, name: str) -> Any:
        """The settings dataclass of a section; for `stages`, a list of them."""
        if name == "stages":
            return self._stages()
        if name in ROOT_SECTIONS:
            cls = locate(ROOT_SECTIONS[name], name)
            return Nodes(self._allow).fields({k: v for k, v in self._tree.items() if k in parameters(cls)[0]}, cls)
        return Nodes(self._allow).fields(self._tree.get(name) or {}, locate(SECTIONS[name], name), name)

    def _stages(self) -> list[Any]:
        stages = self._tree.get("stages") or []
        if not isinstance(stages, list):
            raise UserError(f"stages={show(stages)}: expected a list of stages")
        if not stages:
            return []
        cls = locate(STAGES, "stages")
        made = []
        for i, stage in enumerate(stages):
            if not isinstance(stage, Mapping):
                raise UserError(f"stages.{i}={show(stage)}: expected a mapping of a stage's keys")
            for key in ("data", "schedule"):
                if stage.get(key) and not is_node(stage[key]):
                    raise UserError(
                        f"stages.{i}.{key}={show(stage[key])}: has no _target_; write out the whole of it, not only what differs"
                    )
            made.append(Nodes(self._allow).fields(stage, cls, f"stages.{i}"))
        return made

    def build(self, key: str, **extra: Any) -> Any:
        """The object of a node (`model`, `data`, `optim`, ...); a mapping of nodes gives a mapping of objects."""
        return self.build_node(self[key], key, **extra)

    def build_node(self, node: Any, key: str, **extra: Any) -> Any:
        walk = Nodes(self._allow, build=True)
        return walk.node(node, key, extra) if is_node(node) else walk.value(node, Any, key)

    # ---- checking

    def _check(self) -> Common:
        """Refuse any unknown key, wrong type, bad target. Cheap parts first, parts that import JAX last."""
        own = {f.name for f in fields(Common)}
        known = own | set(SECTIONS) | set(GROUPS) | {"stages"}
        common = common_keys(self._tree)
        for path in ROOT_SECTIONS.values():
            known |= set(parameters(locate(path, "config"))[0])
        for name, value in self._tree.items():
            if name not in known:
                full, leaf = first_leaf(name, value)
                raise UserError(f"{full}={show(leaf)}: unknown key{_suggest_path(full, known, self._tree)}")
        for name in (*SECTIONS, *ROOT_SECTIONS, "stages"):
            self.section(name)
        walk = Nodes(self._allow)
        for name in GROUPS:
            value = self._tree.get(name)
            if name == "model" and self._tree.get("source") is not None:
                continue  # a source brings its own: keys of `model` are meant for that one, and judged with it
            if is_node(value):
                walk.node(value, name)
            elif isinstance(value, Mapping) and name == "objective":
                for child, node in value.items():
                    if not is_node(node):
                        raise unknown_key(f"{name}.{child}", node, [n for n, v in value.items() if is_node(v)])
                    walk.node(node, f"{name}.{child}")
            elif value is not None:
                full, leaf = first_leaf(name, value)
                names = "|".join(options(name))
                raise UserError(f"{full}={show(leaf)}: {name} has no _target_; choose one with {name}={names}")
        return common

    # ---- other configs from this one

    def replace(self, overrides: Mapping[str, Any]) -> Config:
        """A copy with some dotted keys set anew, checked again."""
        tree = self.to_dict()
        for key, value in overrides.items():
            set_key(tree, key, value)
        return Config(
            tree,
            allow=self._allow,
            explicit=self.explicit,
            choices=self.choices,
            groups=self.groups,
            original_cwd=self.original_cwd,
        )

    @classmethod
    def from_yaml(
        cls,
        text: str,
        overrides: Mapping[str, Any] | None = None,
        allow_targets: Iterable[str] = (),
        original_cwd: Path | None = None,
    ) -> Config:
        """A saved configuration: data from anybody, so only `SAVED_TARGETS` and `allow_targets` may be built."""
        tree = read_tree(text)
        for key, value in (overrides or {}).items():
            set_key(tree, key, value)
        return cls(tree, allow=(*SAVED_TARGETS, *allow_targets), explicit=overrides, original_cwd=original_cwd)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        overrides: Mapping[str, Any] | None = None,
        allow_targets: Iterable[str] = (),
        original_cwd: Path | None = None,
    ) -> Config:
        """The configuration saved in a run folder (or in a yaml file)."""
        file = Path(path)
        file = file / "config.yaml" if file.is_dir() else file
        try:
            text = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise UserError(f"{file}: no such file; is {file.parent} a run folder?") from None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file}: cannot be read: {error}") from error
        return cls.from_yaml(text, overrides, allow_targets, original_cwd)


def read_tree(text: str) -> dict[str, Any]:
    """The plain tree of a saved configuration's text, which may be anybody's: no aliases, no depth, no size without end."""
    if len(text) > MAX_YAML_BYTES:
        raise UserError(f"config.yaml: {len(text)} characters, more than the {MAX_YAML_BYTES} that are read")
    try:
        tree = _load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UserError(f"config.yaml: cannot be read: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(tree, dict) or not all(isinstance(k, str) for k in tree):
        raise UserError("config.yaml: expected a mapping of keys to values")
    return tree


def differences(before: str, after: Config) -> list[tuple[str, str, str]]:
    """The leaves that differ between a saved configuration's text and a configuration: (key, old value, new value)."""
    absent = object()
    old, new = dict(leaves(_load(before))), dict(leaves(after.to_dict()))
    changed = [k for k in {**old, **new} if old.get(k, absent) != new.get(k, absent)]
    return [(k, show(old[k]) if k in old else "-", show(new[k]) if k in new else "-") for k in changed]


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted keys of a tree and their values; lists are values."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from leaves(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _copy(v) for k, v in value.items()}
    return [_copy(v) for v in value] if isinstance(value, list | tuple) else value


def set_key(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key, making the mappings on its way; digits index into lists."""
    *parents, last = key.split(".")
    node: Any = tree
    for depth, part in enumerate(parents):
        below = node.get(part) if isinstance(node, dict) else _item(node, part)
        if below is None and isinstance(node, dict):
            below = node[part] = {}
        if not isinstance(below, dict | list):
            raise UserError(f"{key}={show(value)}: there are no keys below {'.'.join(parents[: depth + 1])}")
        node = below
    if isinstance(node, dict):
        node[last] = _copy(value)
    elif _item(node, last) is not None:
        node[int(last)] = _copy(value)
    else:
        raise UserError(f"{key}={show(value)}: the list has {len(node)} items")


def _item(items: list[Any], index: str) -> Any:
    return items[int(index)] if index.isdigit() and int(index) < len(items) else None


def _suggest_path(name: str, roots: Iterable[str], tree: Mapping[str, Any]) -> str:
    """Near misses for an unknown root key: among full keys, and by the last part alone (`steps` -> `train.steps`)."""
    full = set(roots)
    for section, path in SECTIONS.items():
        full |= {f"{section}.{n}" for n in parameters(locate(path, section))[0]}

    for group in GROUPS:
        paths = [key.split(".") for key, _ in leaves(tree.get(group), group)]
        full |= {".".join(path[: n + 1]) for path in paths for n in range(len(path)) if not path[n].startswith("_")}
    last = name.rpartition(".")[2]
    exact = sorted(k for k in full if k.rpartition(".")[2] == last)
    near = exact or nearest(name, full - {name})
    if not near:
        tails = {k.rpartition(".")[2]: k for k in sorted(full, reverse=True)}
        near = [tails[t] for t in nearest(last, tails, cutoff=0.7)]
    return f"; did you mean {' or '.join(near[:3])}?" if near else f"; valid: {', '.join(sorted(roots))}"


# ---------------------------------------------------------------------------------------------- yaml


class _Dumper(yaml.SafeDumper):
    """No anchors: every value is written where it stands."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


# libyaml's reader, several times faster, is not in every build of PyYAML. mypy cannot follow a base that is chosen at run time.
class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Plain values only; `1e-3` is a number."""


def _load(text: str) -> Any:
    """Aliases (a few lines of them expand to gigabytes) and deep nesting are refused before anything is built."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not allowed in a saved configuration")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise yaml.YAMLError(f"nested more than {MAX_DEPTH} deep")
    return yaml.load(text, Loader=_Loader)


_EXPONENT = re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$")
for _kind in (_Loader, _Dumper):  # what reads as a number must be quoted when it is text
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))
