"""Hydra: from group choices and `key=value` texts to a checked `Config`. Only this module and `jaxllm.run` know it.

Hydra's own words are turned into one line each, and `key=value` works for every key the schema knows, also those that
no yaml file lists (Hydra alone would ask for a `+` before them).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from jaxllm.config import CONF, Config, options, set_key
from jaxllm.errors import UserError
from jaxllm.nodes import Nodes
from jaxllm.targets import is_node, suggest

CONFIG_NAME = "config"


def _scaled(size: Any, _root_: Any) -> int:
    return round(float(size) * int(_root_.get("scale", 1)))


# In a study's yaml: `d_model: ${scaled:64}` grows with the command line's scale=N.
OmegaConf.register_new_resolver("scaled", _scaled, replace=True)
_VALUE_KEY = re.compile(r"^(\+{0,2})([A-Za-z_][\w.-]*)=")


def compose(overrides: Sequence[str] = (), conf_dir: str | os.PathLike[str] | None = None) -> Config:
    """The configuration of a command line, for scripts and tests: `compose(["model=tiny", "train.steps=3"])`."""
    conf = Path(conf_dir).absolute() if conf_dir is not None else CONF
    lifted = [lift(text, [conf]) for text in overrides]
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(version_base="1.3", config_dir=str(conf)):
            raw = hydra.compose(CONFIG_NAME, overrides=lifted, return_hydra_config=True)
            typed, choices = asked(raw.hydra)
            values, groups = split_overrides(typed, [conf])
            return Config(plain(raw), explicit=values, choices=choices, groups=groups)
    except (HydraException, OmegaConfBaseException) as error:
        raise translate(error, [conf], overrides) from error


def component(group: str, name: str, **overrides: Any) -> Any:
    """One yaml of a group, on its own, as an object (a partial where it says so), with some keys set: for tests."""
    file = CONF / group / f"{name}.yaml"
    if not file.is_file():
        raise UserError(f"{group}={name}: no such option{suggest(name, options(group))}")
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        raw = hydra.compose(f"{group}/{name}")
        for key in overrides:
            if OmegaConf.is_missing(raw[group], key):
                raw[group][key] = None
        node = plain(raw)[group] | overrides
    walk, key = Nodes(build=True), f"{group}/{name}"
    return walk.node(node, key) if is_node(node) else walk.value(node, Any, key)


def plain(raw: DictConfig, literal: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What Hydra composed, as plain values. `literal`: dotted keys whose text was kept from Hydra's grammar."""
    ours = OmegaConf.masked_copy(raw, [str(key) for key in raw if key != "hydra"])
    try:
        tree = OmegaConf.to_container(ours, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise UserError(f"{error.full_key}=???: this key has no default; give it a value") from error
    assert isinstance(tree, dict)
    named = {str(key): value for key, value in tree.items()}
    for key, value in (literal or {}).items():
        set_key(named, key, value)
    return named


def asked(hydra_node: DictConfig) -> tuple[list[str], dict[str, str]]:
    """What Hydra was asked for: the texts of the command line, and the choice made in each group."""
    typed = OmegaConf.to_container(hydra_node.overrides.task, resolve=False)
    assert isinstance(typed, list)
    choices = {str(k): str(v) for k, v in hydra_node.runtime.choices.items() if not str(k).startswith("hydra")}
    return [str(text) for text in typed], choices


def split_overrides(overrides: Iterable[str], conf_dirs: Sequence[Path]) -> tuple[dict[str, Any], list[str]]:
    """Command-line texts -> the value keys they set, and the texts that choose groups."""
    parser = OverridesParser.create()
    values: dict[str, Any] = {}
    groups = []
    for text in overrides:
        override: Override = parser.parse_override(text)
        if override.package is not None or is_group(override.key_or_group, conf_dirs):
            groups.append(text)
        elif not override.is_delete() and not override.is_sweep_override():
            values[override.key_or_group] = override.value()
    return values, groups


def is_group(key: str, conf_dirs: Sequence[Path]) -> bool:
    return any((conf / key).is_dir() for conf in conf_dirs)


def default_groups(conf_dirs: Sequence[Path]) -> set[str]:
    """The groups that the root configuration already chooses from."""
    for conf in conf_dirs:
        if (conf / f"{CONFIG_NAME}.yaml").is_file():
            root = OmegaConf.to_container(OmegaConf.load(conf / f"{CONFIG_NAME}.yaml"), resolve=False)
            assert isinstance(root, dict)
            return {str(key) for entry in root["defaults"] if isinstance(entry, dict) for key in entry}
    return set()


def lift(text: str, conf_dirs: Sequence[Path]) -> str:
    """The text with the plus signs that Hydra wants: none before a group chosen by default, one before another
    (`experiment=x`), two before a value (`train.accumulate=2`: set it, listed in yaml or not; the schema judges it)."""
    match = _VALUE_KEY.match(text)
    if match is None or match[2].split(".")[0] == "hydra":
        return text
    bare = text[len(match[1]) :]
    if is_group(match[2], conf_dirs):
        return bare if match[2] in default_groups(conf_dirs) else f"+{bare}"
    return f"++{bare}"


# ---------------------------------------------------------------------------------------------- Hydra's errors


def translate(error: Exception, conf_dirs: Sequence[Path], typed: Sequence[str] = ()) -> UserError:
    """Any complaint of Hydra or OmegaConf as one line with the key, the value and the nearest names."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _missing_option(str(error.missing_cfg_file), error.options or (), conf_dirs, typed)
    if isinstance(error, OverrideParseException):
        reason = str(error.message or error).split("\n")[0].rstrip(".")
        return UserError(f"{error.override}: cannot be read ({reason}); put the value in quotes, like \"key='a, b'\"")
    text = " ".join(str(error).split())
    several = re.match(r"Ambiguous value for argument '\+*(.*?)' 1\. ", text)
    if several:
        return UserError(f"{several[1]}: several values need -m (a sweep), brackets (a list) or quotes (a text)")
    if isinstance(error, ConfigCompositionException):
        cause = " ".join(str(error.__cause__).split("\n")[0].split()) if error.__cause__ is not None else ""
        text = text.replace("override ++", "override ").partition(" To append to your default list")[0]
        return UserError(f"{text} ({cause})" if cause and cause not in text else text)
    key, first = getattr(error, "full_key", None), " ".join(str(error).split("\n")[0].split())
    return UserError(f"{key}: {first}" if key and key not in first else first)


def _missing_option(file: str, known: Sequence[str], conf_dirs: Sequence[Path], typed: Sequence[str]) -> UserError:
    group, _, name = file.removesuffix(".yaml").lstrip("/").rpartition("/")
    names = list(known) or [option for conf in conf_dirs for option in options(group or ".", conf)]
    asked = re.compile(rf"\+*({re.escape(group)}(@[\w.]+)?)={re.escape(name)}")
    key = next((found[1] for text in typed if (found := asked.fullmatch(text))), group or "config")
    return UserError(f"{key}={name}: no such option{suggest(name, names)}")
