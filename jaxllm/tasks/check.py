"""`task=check source=... reference=FILE`: how far a model's numbers are from a reference, and where they begin to differ."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from jaxllm.config import Config
from jaxllm.errors import UserError
from jaxllm.tasks import TaskIO
from jaxllm.tasks.logits import check_ids
from jaxllm.tasks.source import Source, open_source
from jaxllm.weights.logits import divergence, full_logits, greedy
from jaxllm.weights.settings import CheckSettings

HIDDEN = re.compile(r"hidden_(\d+)")


def run(cfg: Config, io: TaskIO) -> dict[str, Any]:
    """`max_abs, kl, first_bad_layer, greedy_equal`, `hidden_max_abs` by layer, and whether all is within `tolerance`.

    `first_bad_layer`: the first layer whose output differs, counted from 0; -1 = the embedding already does; null = none, or the
    reference holds no hidden states. The last layer's output is seen through the final norm, so the two are not told apart.
    """
    settings: CheckSettings = cfg.section("check")
    if cfg.source is None or settings.reference is None:
        raise UserError("source and reference: both are needed; source=<model> reference=<safetensors file>")
    reference = read_reference(cfg.path(settings.reference))
    overrides = {key: value for key, value in cfg.explicit.items() if key.startswith("model.")}
    source = open_source(cfg.path(cfg.source), overrides=overrides, allow_targets=cfg.allow_targets, warn=io.log)
    result = compare(source, reference, settings.tolerance)
    for line in report(result, source.model.num_layers):
        io.log(line)
    return result


def compare(source: Source, reference: dict[str, np.ndarray], tolerance: float) -> dict[str, Any]:
    """The numbers of the check."""
    model, tokens = source.model, reference["input_ids"]
    check_ids(tokens, model)
    wanted = reference["logits"]
    logits, hidden = full_logits(model, source.params, tokens)
    if logits.shape != wanted.shape:
        raise UserError(f"reference: logits of shape {list(wanted.shape)}, the model gives {list(logits.shape)}")
    given = sorted(int(m[1]) for key in reference if (m := HIDDEN.fullmatch(key)))
    apart: dict[int, float] = {}
    bad: int | None = None
    for i in given:
        want = reference[f"hidden_{i}"]
        if i >= len(hidden) or want.shape != hidden[i].shape:
            raise UserError(
                f"reference: hidden_{i} of shape {list(want.shape)} is no hidden state of a model of {model.num_layers} layers"
            )
        apart[i] = float(np.abs(hidden[i] - want).max())
        if bad is None and not _equal(hidden[i], want, tolerance):
            bad = i - 1
    result = {
        "max_abs": float(np.abs(logits - wanted).max()),
        "kl": divergence(wanted, logits),
        "first_bad_layer": bad,
        "greedy_equal": _greedy_equal(source, reference),
        "hidden_max_abs": apart,
        "tolerance": tolerance,
        "dtype": str(model.compute_dtype),
    }
    within = _equal(logits, wanted, tolerance) and bad is None and result["greedy_equal"] is not False
    return {**result, "ok": bool(within)}


def _equal(found: np.ndarray, wanted: np.ndarray, tolerance: float) -> bool:
    size = max(1.0, float(np.abs(wanted).max()))
    return bool(np.abs(found - wanted).max() <= tolerance * size)  # false where anything is NaN


def _greedy_equal(source: Source, reference: dict[str, np.ndarray]) -> bool | None:
    """Whether the most likely continuation is the reference's; null where it holds none, or this model cannot be cached."""
    if "greedy_tokens" in reference and "greedy_prompt" in reference:
        prompt, wanted = reference["greedy_prompt"], reference["greedy_tokens"]
    elif "greedy" in reference:
        wanted = reference["greedy"]
        prompt = reference["input_ids"][:, : reference["input_ids"].shape[1] - wanted.shape[1]]
    else:
        return None
    check_ids(prompt, source.model)
    try:
        return bool(np.array_equal(greedy(source.model, source.params, prompt, wanted.shape[1]), wanted))
    except UserError:  # rotary settings that follow the length of each call have no cache
        return None


def read_reference(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a reference file. Raises UserError for one that is missing, broken or lacks what is needed."""
    try:
        arrays = load_file(path)
    except FileNotFoundError:
        raise UserError(f"reference={path}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"reference={path}: is not a safetensors file ({' '.join(str(error).split())[:120]})") from None
    for name, axes in (("input_ids", 2), ("logits", 3)):
        if name not in arrays or arrays[name].ndim != axes:
            raise UserError(
                f"reference={path}: needs {name} with {axes} axes; it holds {', '.join(sorted(arrays)) or 'nothing'}"
            )
    return {name: a.astype(np.float32) if a.dtype.kind not in "iub" else a for name, a in arrays.items()}


def report(result: dict[str, Any], layers: int) -> list[str]:
    """The result in words."""
    where = {
        None: "no layer differs",
        -1: "the embedding differs",
        layers - 1: "the last layer or the final norm differs",
    }
    bad = result["first_bad_layer"]
    lines = [f"hidden {i:3d}   {value:.2e}" for i, value in result["hidden_max_abs"].items()]
    lines.append(f"logits       {result['max_abs']:.2e}   KL {max(result['kl'], 0.0):.2e} nats")
    lines.append(
        where.get(bad, f"layer {bad} is the first that differs")
        if result["hidden_max_abs"]
        else "no hidden states to compare"
    )
    if result["greedy_equal"] is not None:
        lines.append("greedy tokens are equal" if result["greedy_equal"] else "greedy tokens differ")
    if math.isnan(result["max_abs"]):
        lines.append("the logits are not numbers")
    return lines
