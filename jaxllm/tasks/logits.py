"""`task=logits source=... tokens=IDS.npy out=LOGITS.npy`: a model's logits as they are, for anybody to compare with their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.config import Config
from jaxllm.errors import UserError
from jaxllm.model import LanguageModel
from jaxllm.tasks import TaskIO
from jaxllm.tasks.source import open_source
from jaxllm.weights.logits import cached_logits, full_logits
from jaxllm.weights.settings import LogitsSettings


def run(cfg: Config, io: TaskIO) -> dict[str, Any]:
    """Writes float32 logits [b t v]; returns their `shape` and where they are."""
    settings: LogitsSettings = cfg.section("logits")
    if cfg.source is None:
        raise UserError("source: missing; give source=<run folder, checkpoint, Hugging Face folder or GGUF file>")
    if settings.tokens is None or settings.out is None:
        raise UserError("tokens and out: both are needed; tokens=<.npy of int32 [b t]> out=<.npy to write>")
    tokens = read_tokens(cfg.path(settings.tokens))
    split = _split(settings, tokens.shape[1])
    out = cfg.path(settings.out)
    overrides = {key: value for key, value in cfg.explicit.items() if key.startswith("model.")}
    source = open_source(cfg.path(cfg.source), overrides=overrides, allow_targets=cfg.allow_targets, warn=io.log)
    check_ids(tokens, source.model)
    if split is None:
        logits = full_logits(source.model, source.params, tokens)[0]
    else:
        logits = cached_logits(source.model, source.params, tokens, split)
    write_npy(out, logits)
    io.log(f"logits {list(logits.shape)} in {out}")
    return {
        "shape": list(logits.shape),
        "mode": settings.mode,
        "out": str(out),
        "dtype": str(source.model.compute_dtype),
    }


def _split(settings: LogitsSettings, length: int) -> int | None:
    if settings.mode == "full":
        if settings.split is not None:
            raise UserError(f"split={settings.split}: belongs to mode=cached")
        return None
    split = 1 if settings.split is None else settings.split
    if not 1 <= split <= length:
        raise UserError(f"split={split}: must be within 1..{length}, the tokens of a row")
    return split


def read_tokens(path: Path) -> np.ndarray:
    """int32 [b t] from a .npy file. Raises UserError for anything else; object arrays, which can run code, included."""
    try:
        tokens = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise UserError(f"tokens={path}: no such file") from None
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"tokens={path}: is not a .npy file of numbers ({str(error).splitlines()[0][:120]})") from None
    if (
        not isinstance(tokens, np.ndarray)
        or tokens.ndim != 2
        or not tokens.size
        or not np.issubdtype(tokens.dtype, np.integer)
    ):
        what = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, np.ndarray) else "an archive"
        raise UserError(f"tokens={path}: holds {what}; expected int32 [rows, tokens]")
    return tokens


def check_ids(tokens: np.ndarray, model: LanguageModel) -> None:
    """Refuse ids outside the vocabulary, and rows longer than the model allows."""
    bad = np.argwhere((tokens < 0) | (tokens >= model.vocab_size))
    if len(bad):
        row, column = bad[0]
        raise UserError(
            f"tokens[{row}, {column}]={tokens[row, column]}: outside the vocabulary of {model.vocab_size} ids (0..{model.vocab_size - 1})"
        )
    if model.max_seq_len is not None and tokens.shape[1] > model.max_seq_len:
        raise UserError(f"tokens: rows of {tokens.shape[1]} are longer than model.max_seq_len={model.max_seq_len}")


def write_npy(path: Path, array: np.ndarray) -> None:
    """In one step, as everything that others may be waiting for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with open(part, "wb") as file:
        np.save(file, array)
    os.replace(part, path)
