"""What a student learns from: models that are there, or what one of them said of this text, written down by `task=label`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from jaxllm.config import Config
from jaxllm.data.soft_labels import SoftLabels
from jaxllm.data.tokenizer import Tokenizer
from jaxllm.errors import UserError
from jaxllm.mesh import param_shardings
from jaxllm.model import LanguageModel
from jaxllm.params import declare
from jaxllm.tasks import TaskIO
from jaxllm.tasks.source import open_source
from jaxllm.training.objectives import Distill, Objective


def teachers_of(
    cfg: Config, io: TaskIO, objectives: Mapping[str, Objective], tokenizer: Tokenizer | None, mesh: Any, rules: Any
) -> tuple[dict[str, tuple[LanguageModel, dict[str, Any]]], Tokenizer | None]:
    """The models that objectives learn from, on the run's devices, and the tokenizer that all must share: the given one, else theirs."""
    found = {}
    for name, objective in objectives.items():
        if isinstance(objective, Distill) and objective.labels:
            key = f"objective.{name}.labels={objective.labels}"
            tokenizer = _shared(tokenizer, labels_of(cfg, objectives, key).tokenizer, key)
        if not isinstance(objective, Distill) or not objective.teacher or objective.teacher in found:
            continue
        key, path = f"objective.{name}.teacher={objective.teacher}", cfg.path(objective.teacher)
        try:
            given = open_source(path, allow_targets=cfg.allow_targets, warn=io.log, mesh=mesh, rules=rules)
        except UserError as error:
            raise UserError(f"{key}: {str(error).removeprefix(f'source={path}: ')}") from None
        if given.tokenizer is None:
            raise UserError(f"{key}: has no tokenizer, so it cannot be known to read the same tokens")
        tokenizer = _shared(tokenizer, given.tokenizer, key)
        places = param_shardings(declare(given.model), mesh, rules)
        found[objective.teacher] = (given.model, jax.device_put(given.params, places))
        io.log(f"teacher: {given.folder}, {given.model.num_layers} layers")
    return found, tokenizer


def _shared(tokenizer: Tokenizer | None, theirs: Tokenizer, key: str) -> Tokenizer:
    """The student's tokenizer, which must be the teacher's; a student without one takes over the teacher's."""
    tokenizer = tokenizer or theirs
    if list(theirs.pieces) != list(tokenizer.pieces) or theirs.eos_id != tokenizer.eos_id:
        raise UserError(f"{key}: has another tokenizer than the student, so their predictions cannot be compared")
    return tokenizer


def labels_of(cfg: Config, objectives: Mapping[str, Objective], key: str) -> SoftLabels:
    """The labels of the one objective that reads some, as its fields need them."""
    (objective, *more) = [o for o in objectives.values() if isinstance(o, Distill) and o.labels]
    if more:
        raise UserError(f"{key}: one objective can read labels, and another reads {more[0].labels}")
    labels = SoftLabels.open(cfg.path(str(objective.labels)), key)
    if labels.meta["temperature"] != objective.temperature:
        raise UserError(
            f"{key}: were taken at temperature {labels.meta['temperature']:g}, the objective has"
            f" {objective.temperature:g}; set its temperature, or make labels anew with task=label"
        )
    if (objective.top_k or 0) > labels.top_k:
        raise UserError(f"{key}: hold {labels.top_k} ids a token, fewer than top_k={objective.top_k}")
    return labels


def check_vocabulary(cfg: Config, objectives: Mapping[str, Objective], size: int) -> None:
    """Labels may only name ids that the student, of `size` ids, has."""
    for name, objective in objectives.items():
        if isinstance(objective, Distill) and objective.labels:
            key = f"objective.{name}.labels={objective.labels}"
            theirs = labels_of(cfg, objectives, key).meta["vocab_size"]
            if theirs > size:
                raise UserError(
                    f"{key}: name ids below {theirs:,}, the student has {size:,}; make them anew with task=label"
                )
