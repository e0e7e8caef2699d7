"""What a checkpoint folder holds, whether it is whole, and whether it fits: everything about checkpoints but Orbax.

The table of leaves (names, shape, dtype) that every checkpoint carries is the truth a restore is compared with before
any array is read. `damage` says why a folder is not whole; `compare` refuses a state of another structure.
"""

from __future__ import annotations

import errno
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import UserError

FORMAT = 1
COMMIT = "commit_success.txt"
SIZES = "files.json"

Keys = tuple[str, ...]
V = TypeVar("V")


class Leaf(NamedTuple):
    """One stored array: its nested names, shape, dtype ("float32", "key<fry>") and, of a random key, the generator."""

    keys: Keys
    shape: tuple[int, ...]
    dtype: str
    impl: str | None = None

    @property
    def name(self) -> str:
        return "/".join(self.keys)

    @property
    def stored(self) -> bool:
        """Whether it has a file: arrays without elements live in the table alone."""
        return math.prod(self.shape) > 0


# --- the folder ---------------------------------------------------------------------------------------------------


def damage(folder: Path) -> str | None:
    """Why this checkpoint folder is not whole, or None. Looks at the marker, the JSON files and the file sizes."""
    if not folder.is_dir():
        return "there is no such folder"
    if not (folder / COMMIT).is_file():
        return f"{COMMIT} is missing"
    try:
        for name in ("_CHECKPOINT_METADATA", "state/_METADATA"):
            json.loads((folder / name).read_bytes())
        envelope = read_envelope(folder)
        if envelope["format"] != FORMAT:
            return f"its format {envelope['format']} is unknown to this version of jaxllm"
        read_table(envelope)
        actual = file_sizes(folder / "state")
        for name, (size, _) in _seal(folder).items():
            if name not in actual:
                return f"state/{name} is missing"
            if actual[name] != size:
                return f"state/{name} has {actual[name]} bytes, not {size}"
    except FileNotFoundError as error:
        return f"{os.path.relpath(error.filename, folder)} is missing"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its JSON is not readable: {one_line(error)}"
    return None


def corruption(folder: Path) -> str | None:
    """Which file of a checkpoint that `damage` finds whole does not hold what was written, or None. Reads every byte once.

    Needed because arrays are compressed without a checksum: flipped bits can be expanded to other numbers without any error.
    """
    for name, (_, crc) in _seal(folder).items():
        if crc is not None and file_crc(folder / "state" / name) != crc:
            return f"state/{name} does not hold what was written (its CRC-32 differs)"
    return None


def _seal(folder: Path) -> dict[str, tuple[int, int | None]]:
    """{file below state/: (bytes, CRC-32)} as noted when it was written; nothing where the note is lost. The first ones had sizes only."""
    noted = json.loads((folder / SIZES).read_bytes()) if (folder / SIZES).exists() else {}
    return {name: (entry, None) if isinstance(entry, int) else (entry[0], entry[1]) for name, entry in noted.items()}


def seal(folder: Path) -> dict[str, tuple[int, int]]:
    """What `SIZES` notes of the files below `folder`."""
    return {name: (size, file_crc(folder / name)) for name, size in file_sizes(folder).items()}


def file_crc(path: Path) -> int:
    """CRC-32 of a file, in pieces."""
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            crc = zlib.crc32(piece, crc)
    return crc


def read_envelope(folder: Path) -> dict[str, Any]:
    """The JSON beside the arrays: format, step, metric, meta (the caller's) and leaves (the table)."""
    envelope = json.loads((folder / "meta" / "metadata").read_bytes())
    return {name: envelope[name] for name in ("format", "step", "metric", "meta", "leaves")}


def read_table(envelope: Mapping[str, Any]) -> dict[Keys, Leaf]:
    entries = envelope["leaves"]
    leaves = [Leaf(tuple(e["keys"]), tuple(map(int, e["shape"])), str(e["dtype"]), e["impl"]) for e in entries]
    return {leaf.keys: leaf for leaf in leaves}


def file_sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file below `folder`, by relative path."""
    return {p.relative_to(folder).as_posix(): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}


# --- trees and arrays ---------------------------------------------------------------------------------------------


def key_names(path: tuple[Any, ...]) -> Keys:
    """A JAX key path as plain names: field name, dict key or index."""

    def one(entry: Any) -> str:
        for field in ("name", "key", "idx"):
            if hasattr(entry, field):
                return str(getattr(entry, field))
        return str(entry)

    return tuple(map(one, path))


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[Keys, Any]:
    """Leaves by their names, in tree order. Raises ValueError if two leaves would share a stored name."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    flat = {key_names(path): leaf for path, leaf in pairs}
    if len({".".join(keys) for keys in flat}) != len(pairs):
        raise ValueError("two leaves of the tree have the same name once joined by dots")
    return flat


def nest(flat: Mapping[Keys, V]) -> dict[str, Any]:
    """Nested dicts from leaves by names."""
    tree: dict[str, Any] = {}
    for keys, value in flat.items():
        node = tree
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = value
    return tree


def pack(state: Any) -> tuple[list[Leaf], dict[str, Any]]:
    """The leaf table, and the nested dict of arrays to store: random keys as raw uint32, empty arrays left out."""
    leaves: list[Leaf] = []
    arrays: dict[Keys, Any] = {}
    for keys, value in flatten(state).items():
        impl: str | None = None
        stored: Any
        if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            impl, stored = str(jax.random.key_impl(value)), jax.random.key_data(value)
        elif isinstance(value, jax.Array):
            stored = value
        else:  # numpy and Python numbers are copied: the caller may change them while they are being written
            stored = value = np.array(value, dtype=None if hasattr(value, "dtype") else jnp.result_type(value))
        leaf = Leaf(keys, tuple(value.shape), str(value.dtype), impl)
        leaves.append(leaf)
        if leaf.stored:
            arrays[keys] = stored
    return leaves, nest(arrays)


def unpack(leaf: Leaf, array: Any) -> Any:
    """A read array as the leaf that was saved: a typed random key, or a JAX array."""
    if leaf.impl is not None:
        return jax.random.wrap_key_data(jnp.asarray(array), impl=leaf.impl)
    if isinstance(array, jax.Array) or jnp.result_type(array) != array.dtype:
        return array  # a 64-bit numpy leaf stays numpy: jnp would halve it
    return jnp.asarray(array)


# --- does it fit --------------------------------------------------------------------------------------------------


def compare(folder: Path, wanted: Mapping[Keys, Any], stored: Mapping[Keys, Leaf]) -> None:
    """Refuse (UserError) a restore whose leaves differ from the table in name, shape or dtype, naming the leaf."""
    compare_names(folder, wanted, stored)
    pairs = [(stored[keys], leaf) for keys, leaf in wanted.items()]
    shapes = [
        f"{s.name} has shape {list(s.shape)} there and {list(w.shape)} here"
        for s, w in pairs
        if s.shape != tuple(w.shape)
    ]
    _refuse(folder, shapes, "use the model settings saved with the checkpoint")
    dtypes = [f"{s.name} is {s.dtype} there and {w.dtype} here" for s, w in pairs if s.dtype != str(w.dtype)]
    _refuse(folder, dtypes, "a dtype is never cast on restore, use the dtypes saved with the checkpoint")


def compare_names(folder: Path, wanted: Iterable[Keys], stored: Iterable[Keys]) -> None:
    """Refuse (UserError) two sets of leaf names that differ."""
    missing = [f"{'/'.join(keys)} is missing there" for keys in sorted(set(wanted) - set(stored))]
    extra = [f"{'/'.join(keys)} is there but not wanted here" for keys in sorted(set(stored) - set(wanted))]
    # One of each kind first: a renamed leaf is both, and it is the pair that explains it.
    problems = [*missing[:1], *extra[:1], *missing[1:], *extra[1:]]
    _refuse(folder, problems, "use the model and optimiser settings saved with the checkpoint")


def check_placement(folder: Path, leaf: Leaf, sharding: Any) -> None:
    """Refuse (UserError) a sharding that the leaf's shape does not divide into."""
    if leaf.impl is None and sharding is not None:
        try:
            sharding.shard_shape(leaf.shape)
        except ValueError as error:
            _refuse(folder, [f"{leaf.name}: {one_line(error)}"], "use mesh axes that divide it")


def _refuse(folder: Path, problems: list[str], fix: str, shown: int = 3) -> None:
    if problems:
        more = f" (and {len(problems) - shown} more)" if len(problems) > shown else ""
        raise UserError(f"checkpoint {folder} does not fit: {'; '.join(problems[:shown])}{more}; {fix}")


# --- errors -------------------------------------------------------------------------------------------------------


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what led to it, outermost first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def one_line(error: BaseException, limit: int = 200) -> str:
    """Of the innermost cause, which knows the file; the outer ones of Orbax only point at it."""
    text = next((t for e in reversed([*causes(error)]) if (t := " ".join(str(e).split()))), type(error).__name__)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def disk_full(error: BaseException | None) -> bool:
    """Whether a full disk (or quota) is behind an error. TensorStore reports it as text only."""
    full = (errno.ENOSPC, errno.EDQUOT)
    return any(getattr(e, "errno", None) in full or "No space left" in str(e) for e in causes(error))


def not_damage(error: Exception) -> bool:
    """Rights, memory and the like: the checkpoint may be fine, so an older one must not quietly take its place."""
    passing = ("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAVAILABLE")
    return any(isinstance(e, PermissionError | MemoryError) or str(e).startswith(passing) for e in causes(error))
