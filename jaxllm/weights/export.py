"""A model of ours as a Hugging Face folder: config.json, safetensors (in shards of a size), tokenizer files, generation settings.

Tensors are made and written one by one. The folder is made whole under another name and then renamed, so that nobody ever
meets half of one.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import UserError
from jaxllm.weights.choose import Choice
from jaxllm.weights.family import Placed, leaves
from jaxllm.weights.forms import Table
from jaxllm.weights.hf_folder import CONFIG, INDEX, SINGLE
from jaxllm.weights.safetensors_file import write_safetensors
from jaxllm.weights.tensors import WEIGHT_DTYPES

Progress = Callable[[int, int], None]


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `out` when the block ends well and vanishes when it does not. `out` must be absent or empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"out={out}: exists and is not an empty folder; choose another or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        yield part
        try:
            os.rename(part, out)  # onto nothing or an empty folder; whatever came in between is not overwritten
        except OSError as error:
            raise UserError(f"out={out}: cannot be put in place ({error.strerror}); choose another folder") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_folder(
    folder: Path,
    choice: Choice,
    params: Mapping[str, Any],
    *,
    dtype: str,
    shard_bytes: int,
    files: Mapping[str, str],
    progress: Progress | None = None,
) -> dict[str, int]:
    """Fill `folder`; returns the numbers of `tensors`, `params` and `bytes` of weights.

    params: of `choice.model`, stacked. dtype: of all tensors that are trained. files: texts to put beside them, by name.
    """
    kind = _numpy_dtype(dtype)
    names = [(name, place, at) for place in choice.places for name, at in zip(place.names, place.at, strict=True)]
    shapes = {name: tuple(place.rule.form.shape(place.shapes)) for name, place, _ in names}
    sizes = {name: int(np.prod(shape, dtype=np.int64)) for name, shape in shapes.items()}
    others = {
        name: np.dtype(np.int64 if isinstance(place.rule.form, Table) else np.float32)
        for name, place, _ in names
        if not place.trained
    }
    held_bytes = {name: size * others.get(name, kind).itemsize for name, size in sizes.items()}
    shards = _shards(held_bytes, shard_bytes)
    found, held = leaves(params), dict[str, np.ndarray]()
    index: dict[str, str] = {}
    where = {name: (place, at) for name, place, at in names}

    def made(members: list[str]) -> Iterator[tuple[str, np.ndarray]]:
        for done, name in enumerate(members, len(index) + 1):
            if progress is not None:
                progress(done, len(names))
            yield name, _tensor(*where[name], found, held).astype(others.get(name, kind), copy=False)

    for number, members in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / file, {name: shapes[name] for name in members}, kind, made(members), others)
        index |= dict.fromkeys(members, file)
    total = {"tensors": len(names), "params": sum(sizes.values()), "bytes": sum(held_bytes.values())}
    if len(shards) > 1:
        metadata = {"total_size": total["bytes"], "total_parameters": total["params"]}
        _write_json(folder / INDEX, {"metadata": metadata, "weight_map": dict(sorted(index.items()))})
    _write_json(folder / CONFIG, {**choice.config, "dtype": dtype, "torch_dtype": dtype})
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return total


def _tensor(place: Placed, at: tuple[int, ...], params: Mapping[str, Any], held: dict[str, np.ndarray]) -> np.ndarray:
    """One foreign tensor. held: the parameters of the last rule on the host, fetched once for all its tensors."""
    if not held.keys() >= set(place.paths):
        held.clear()
        held |= {path: np.asarray(params[path]) for path in place.paths}
    arrays = [held[path][at] for path in place.paths]
    # Rows of a padded vocabulary are ours alone.
    trimmed = [a[tuple(slice(0, size) for size in shape)] for a, shape in zip(arrays, place.shapes, strict=True)]
    return place.rule.form.join(trimmed)


def _shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in order, cut where the next tensor would pass `limit` bytes; a larger tensor stands alone."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _numpy_dtype(name: str) -> np.dtype[Any]:
    import ml_dtypes

    if name not in WEIGHT_DTYPES:
        raise UserError(f"dtype={name}: is not one of {', '.join(WEIGHT_DTYPES)}")
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
