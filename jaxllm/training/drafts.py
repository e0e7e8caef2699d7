"""How a draft head begins: which ids it can draft, and what it takes over from its trunk. See `jaxllm.layers.draft`."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.data.store import TokenStore
from jaxllm.errors import UserError
from jaxllm.layers.draft import NAME, Draft, ModuleDraft
from jaxllm.layers.mtp import ChainedMTP
from jaxllm.model import LanguageModel
from jaxllm.training import objectives as terms

LOOKED_AT = 50_000_000  # tokens of a text that are counted to choose ids
PIECE = 1 << 22


def check_objectives(model: LanguageModel, objectives: Mapping[str, terms.Objective]) -> None:
    """With a draft head the trunk stands still, so it is what must be trained; and without one there is nothing to draft with."""
    drafting = {name: o for name, o in objectives.items() if isinstance(o, terms.Draft)}
    head = model.draft_head()
    for name, objective in drafting.items():
        if head is not None and objective.steps != head.unroll:
            raise UserError(
                f"objective.{name}.steps: {objective.steps}, but model.draft.unroll is {head.unroll}; they must be equal"
            )
    if head is not None and not drafting:
        raise UserError(
            "model.draft: the trunk of a draft head is frozen, so only the head can be trained; add objective=draft"
        )
    if drafting and head is None:
        raise UserError("objective=draft: the model has no draft head; give source=RUN +draft@model.draft=eagle3")


def begin_draft(model: LanguageModel, params: Mapping[str, Any], text: TokenStore | None) -> dict[str, Any]:
    """Parameters with the draft head as it begins: the chosen ids and the trunk's rows of the head for them; with `start=mtp`, the trunk's
    MTP module of depth 1 behind a fusion that takes the last feature alone. Each leaf stays where it is."""
    head = model.draft_head()
    assert head is not None
    own = dict(params[NAME])
    if head.vocab is not None:
        if head.vocab > model.vocab_size:
            raise UserError(f"model.draft.vocab: {head.vocab} is more than the {model.vocab_size} ids of the trunk")
        if text is None:
            raise UserError("model.draft.vocab: needs a text to choose ids by")
        ids = frequent_ids(text, head.vocab, model.vocab_size)
        own["ids"] = like(jnp.asarray(ids), own["ids"])
        own["head"] = like(jnp.take(model.head_weight(params), ids, axis=1), own["head"])
    if head.start == "mtp":
        own |= from_mtp(model, head, params, own)
    return {**params, NAME: own}


def from_mtp(model: LanguageModel, head: Draft, params: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The module's parameters and the fusion [0 .. 0 I], as Kimi K3 converts its own."""
    trained = model.mtp_heads()
    if not isinstance(head, ModuleDraft) or not isinstance(trained, ChainedMTP):
        raise UserError("model.draft.start: mtp needs a trunk with chained MTP modules; take start=scratch")
    same = ("mixer", "ffn", "hidden")
    for name in same:
        if getattr(head, name) != (there := getattr(trained, name)):
            raise UserError(f"model.draft.{name}: {getattr(head, name)!r}, but the trunk's MTP module has {there!r}")
    if head.ids_of_features[-1] != model.num_layers:
        raise UserError(
            f"model.draft.features: {list(head.ids_of_features)} must end with {model.num_layers}, all layers, which is what"
            " an MTP module reads"
        )
    fuse = np.zeros(own["fuse"].shape, np.float32)
    fuse[-1] = np.eye(model.d_model)
    module = jax.tree.map(lambda a, b: like(jnp.array(a), b), params["mtp"]["d1"], own["module"])
    return {"fuse": like(jnp.asarray(fuse), own["fuse"]), "module": module}


def like(value: jax.Array, old: jax.Array) -> jax.Array:
    """In the dtype and the place of a parameter that is there."""
    return jax.device_put(value.astype(old.dtype), old.sharding)


def frequent_ids(text: TokenStore, count: int, vocab_size: int) -> np.ndarray:
    """int32 `[count]`, rising: the ids that occur most often in (the first `LOOKED_AT` tokens of) a text; of equals the lower ones."""
    seen = np.zeros(vocab_size, np.int64)
    for start in range(0, min(len(text.tokens), LOOKED_AT), PIECE):
        seen += np.bincount(text.tokens[start : start + PIECE], minlength=vocab_size)[:vocab_size]
    return np.sort(np.argsort(-seen, kind="stable")[:count]).astype(np.int32)


def to_offsets(ids: np.ndarray) -> np.ndarray:
    """How EAGLE-3 checkpoints store a draft vocabulary (`d2t`): draft id i stands for the trunk's id `i + d2t[i]`."""
    return (ids - np.arange(len(ids))).astype(np.int64)


def from_offsets(offsets: np.ndarray) -> np.ndarray:
    """The inverse of `to_offsets`."""
    return (offsets + np.arange(len(offsets))).astype(np.int32)
