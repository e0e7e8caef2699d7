"""`source=`: a run folder, one checkpoint of it, a Hugging Face folder or a GGUF file, turned into a model that can run.

A checkpoint of ours needs nothing beside itself: its meta holds the whole configuration and the tokenizer's files, so a
checkpoint copied alone works. It may come from anybody: it is data, only the parts named in `targets.SAVED_TARGETS` are built from
its configuration, and its shapes are compared with the model's before anything runs. Foreign checkpoints are read by `jaxllm.weights`.
"""

import math
import re
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxllm.checkpoint import Checkpoints, read_meta
from jaxllm.config import Config, set_key
from jaxllm.data.tokenizer import Tokenizer, load_tokenizer
from jaxllm.errors import UserError
from jaxllm.layers.added import without
from jaxllm.mesh import Rules
from jaxllm.model import LanguageModel
from jaxllm.params import declare, is_declared, path_name, plain
from jaxllm.targets import SAVED_TARGETS
from jaxllm.weights.load import read_node, read_params
from jaxllm.weights.open import is_foreign, open_tensors
from jaxllm.weights.tensors import TensorSource, widest_dtype

CHECKPOINTS, TOKENIZER = "checkpoints", "tokenizer"  # folders inside a run folder
UNFINISHED = ".orbax-checkpoint-tmp"
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Source:
    """A trained model. params: the stacked tree, numpy arrays in the dtypes of the checkpoint, or on devices where a mesh was given.

    config: of the run that made it; of a foreign checkpoint, its model alone. tokenizer: None where a foreign one has none. step:
    optimiser steps it has seen. folder: the checkpoint. meta: all it says; `meta["hf"]` is where it came from, if from elsewhere: the
    `config` of its config.json, and the `dtype` of its tensors.
    """

    config: Config
    model: LanguageModel
    params: dict[str, Any]
    tokenizer: Tokenizer | None
    step: int
    folder: Path
    meta: dict[str, Any]


def open_source(
    source: str | Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    allow_targets: tuple[str, ...] = (),
    warn: Callable[[str], None] | None = None,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
) -> Source:
    """Open a run folder (its newest whole checkpoint), its `checkpoints` folder, one checkpoint, a Hugging Face folder or a GGUF file.

    A checkpoint of adapters comes merged with its base, as a model like any other; one of a draft head together with its trunk.

    Args:
        overrides: dotted keys of the saved configuration to set anew (`{"model.logit_softcap": 30.0}`). One that
            changes the shape of a parameter is refused.
        allow_targets: prefixes of targets that may be built besides `SAVED_TARGETS`.
        warn: told in one line of damaged checkpoints that were passed over.
        mesh, rules: where the parameters of a foreign checkpoint go, shard by shard; without, one device.

    Raises:
        UserError: nothing there, nothing whole, or not a model of this program; the line starts with the source.
    """
    path = Path(source)
    try:
        if is_foreign(path):
            return _open_foreign(path, overrides or {}, allow_targets, warn, mesh, rules)
        params, meta, step, folder = _read(path, warn)
        tokenizer = _tokenizer(meta, folder)
        if not isinstance(text := meta.get("config"), str):
            raise UserError(f"checkpoint {folder.name} holds no configuration")
        config = staged(Config.from_yaml(text, overrides, allow_targets), step, overrides or {})
        model = build_model(config, tokenizer)
        if (model.lora is not None or model.draft is not None) and "embed" not in params:
            params = add_base(model, params, meta.get("base"), allow_targets, warn)
        _check_shapes(model, params)
        if model.lora is not None:
            model, params = plain(model, params)
            config = config.replace({"model.lora": None})
    except UserError as error:
        raise UserError(f"source={source}: {str(error).removeprefix(f'{path}: ')}") from error
    return Source(config, model, params, tokenizer, step, folder, meta)


def has_of_its_own(path: Path, name: str, allow_targets: tuple[str, ...] = ()) -> bool:
    """Whether the newest checkpoint at `path` is one of `model.<name>` (adapters, a draft head), by what it says of itself."""
    folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    if folder.name == CHECKPOINTS:
        folder = folder / str(Checkpoints(folder).latest())
    if is_foreign(path) or not folder.is_dir():
        return False
    text = read_meta(folder).get("config")
    return isinstance(text, str) and Config.from_yaml(text, {}, allow_targets).get(f"model.{name}") is not None


def staged(config: Config, step: int, overrides: Mapping[str, Any]) -> Config:
    """The configuration with the model as the stage that made `step` had it; what is set by `overrides` stays so."""
    start = 0.0
    for stage in config.get("stages") or []:
        end = start + (stage.get("steps") or math.inf)
        if start < step <= end:
            fields = {f"model.{name}": value for name, value in (stage.get("model") or {}).items()}
            return config.replace({**fields, **overrides})
        start = end
    return config


def add_base(
    model: LanguageModel,
    params: Mapping[str, Any],
    checksum: str | None,
    allow_targets: tuple[str, ...],
    warn: Callable[[str], None] | None,
) -> dict[str, Any]:
    """A checkpoint of adapters or of a draft head and the parameters of the model that it names, in one tree. checksum: of that model."""
    what, key, path = named_base(model)
    if path is None or not Path(path).exists():
        raise UserError(
            f"{key}={path}: {what} need the model they were trained on and it is not there; say where it is with {key}=PATH"
        )
    base = open_source(path, allow_targets=allow_targets, warn=warn)
    under = without(base.params)
    _check_shapes(model.clone(lora=None, draft=None), under)
    if checksum is not None and checksum != checksum_of(under):
        raise UserError(f"{key}={path}: holds other parameters than {what} were trained on")
    return overlay(under, params)


def named_base(model: LanguageModel) -> tuple[str, str, str | None]:
    """(what was added, the key that names the model it was added to, and that name) of a model with adapters or a draft head."""
    if model.lora is not None:
        return "these adapters", "model.lora.base", model.lora.base
    head = model.draft_head()
    assert head is not None
    return "the weights of this draft head", "model.draft.trunk", head.trunk


def overlay(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of both trees; those of `over` win."""
    out = dict(under)
    for key, value in over.items():
        out[key] = overlay(out.get(key, {}), value) if isinstance(value, Mapping) else value
    return out


def checksum_of(params: Mapping[str, Any]) -> str | None:
    """CRC-32 over all parameters in the order of the tree; None where other processes hold some of them."""
    total = 0
    for path, leaf in jax.tree_util.tree_flatten_with_path(dict(params))[0]:
        if not getattr(leaf, "is_fully_addressable", True):
            return None
        total = zlib.crc32(path_name(path).encode(), total)
        total = zlib.crc32(np.ascontiguousarray(np.asarray(leaf)).view(np.uint8), total)
    return f"{total:08x}"


def _open_foreign(
    path: Path,
    overrides: Mapping[str, Any],
    allow_targets: tuple[str, ...],
    warn: Callable[[str], None] | None,
    mesh: Mesh | None,
    rules: Rules | None,
) -> Source:
    tensors = open_tensors(path)
    tree: dict[str, Any] = {"model": read_node(tensors, warn)}
    for key, value in overrides.items():
        set_key(tree, key, value)
    config = Config(tree, allow=(*SAVED_TARGETS, *allow_targets), explicit=overrides)
    model = config.build("model")
    params = read_params(tensors, model, mesh=mesh, rules=rules)
    meta = {"hf": {"config": tensors.config, "dtype": widest_dtype(tensors)}}
    return Source(config, model, params, foreign_tokenizer(tensors, warn), 0, path, meta)


def foreign_tokenizer(tensors: TensorSource, warn: Callable[[str], None] | None = None) -> Tokenizer | None:
    """The tokenizer of a foreign checkpoint; None, and a line that says why, where there is none that can be read."""
    try:
        files = {name: data.decode("utf-8") for name, data in tensors.tokenizer_files().items()}
        if "tokenizer.json" in files:
            return unpack_tokenizer(files)
        reason = "holds no tokenizer.json"
    except (UserError, UnicodeDecodeError) as error:
        reason = str(error)
    if warn is not None:
        warn(f"{tensors.where}: {reason}, so text cannot be read or written, only token ids")
    return None


def build_model(config: Config, tokenizer: Tokenizer | None) -> LanguageModel:
    """The model of a configuration. Its vocabulary is the tokenizer's unless the configuration sets a larger one."""
    ids = 0 if tokenizer is None else tokenizer.vocab_size
    size = config.get("model.vocab_size") or ids
    if size < ids:
        raise UserError(f"model.vocab_size={size}: smaller than the tokenizer's {ids} ids; leave it out or raise it")
    return config.build("model", vocab_size=size)


def pack_tokenizer(tokenizer: Tokenizer) -> dict[str, str]:
    """The files of a tokenizer as {name: text}: what a checkpoint's meta holds under "tokenizer"."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        return {file.name: file.read_text(encoding="utf-8") for file in sorted(Path(folder).iterdir())}


def unpack_tokenizer(files: Any) -> Tokenizer:
    """The inverse of `pack_tokenizer`. The names and texts may be a stranger's."""
    if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
        raise UserError("the tokenizer in the checkpoint is not a table of files")
    for name in files:
        if not PLAIN_NAME.fullmatch(name):
            raise UserError(f"the tokenizer in the checkpoint has a file named {name!r}; only plain names are taken")
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        return load_tokenizer(folder)


def _read(path: Path, warn: Callable[[str], None] | None) -> tuple[dict[str, Any], dict[str, Any], int, Path]:
    """(params, meta, step, checkpoint folder) of whatever `path` is."""
    if not path.exists():
        raise UserError(
            "no such folder; give a run folder, a checkpoint inside one, a Hugging Face folder or a GGUF file"
        )
    if not path.is_dir():
        raise UserError(
            "is a file, and no GGUF file; give a run folder, a checkpoint inside one, a Hugging Face folder or a GGUF file"
        )
    if UNFINISHED in path.name:
        raise UserError("this checkpoint was never finished; give the run folder to use the newest whole one")
    if (path / CHECKPOINTS).is_dir() or path.name == CHECKPOINTS:
        runs = Checkpoints(path if path.name == CHECKPOINTS else path / CHECKPOINTS)
        if not any(child.is_dir() and child.name.isdecimal() for child in runs.folder.iterdir()):
            raise UserError("holds no checkpoint yet; train longer or give another folder")
        params, meta, step = runs.restore_params(warn=warn)
        return params, meta, step, runs.path(step)
    if not any((path / part).exists() for part in ("state", "meta")):
        raise UserError(
            "is neither a run folder (it has no checkpoints), a checkpoint, nor a Hugging Face folder (no config.json)"
        )
    meta = read_meta(path)
    if path.name.isdecimal():
        params, meta, step = Checkpoints(path.parent).restore_params(int(path.name), warn=warn)
        return params, meta, step, path
    # A copy under another name: the reader finds checkpoints by step, so show it under one.
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "0").symlink_to(path.resolve(), target_is_directory=True)
        params, meta, _ = Checkpoints(folder).restore_params(0, warn=warn)
    return params, meta, int(meta.get("step", 0)), path


def _tokenizer(meta: Mapping[str, Any], folder: Path) -> Tokenizer | None:
    """From the checkpoint, or from the run folder around it. A converted checkpoint may say that there is none."""
    if "tokenizer" in meta:
        return None if meta["tokenizer"] is None and "hf" in meta else unpack_tokenizer(meta["tokenizer"])
    beside = folder.parent.parent / TOKENIZER
    if folder.parent.name == CHECKPOINTS and beside.is_dir():
        return load_tokenizer(beside)
    raise UserError(f"checkpoint {folder.name} holds no tokenizer and there is none in its run folder")


def _check_shapes(model: LanguageModel, params: Mapping[str, Any]) -> None:
    """Refuse parameters that are not this model's, naming the first that differs."""
    declared = jax.tree_util.tree_flatten_with_path(declare(model), is_leaf=is_declared)[0]
    wanted = {path_name(path): tuple(box.value.shape) for path, box in declared}
    found = {path_name(path): tuple(leaf.shape) for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}
    for name in [*wanted, *found]:
        want, have = wanted.get(name, "none"), found.get(name, "none")
        if want != have:
            raise UserError(
                f"parameter {name}: the configuration makes it {want}, the checkpoint holds {have};"
                " fields that change shapes cannot be changed here"
            )
