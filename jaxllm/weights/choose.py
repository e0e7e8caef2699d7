"""Which Hugging Face class holds a model of ours: found by what the model is, and proved by reading the answer back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxllm.errors import UserError
from jaxllm.layers.gdn import GatedDeltaNet
from jaxllm.layers.gqa import GQA
from jaxllm.layers.kda import KDA
from jaxllm.layers.mla import MLA
from jaxllm.layers.mlp import MLP
from jaxllm.layers.moe import MoE
from jaxllm.model import LanguageModel
from jaxllm.params import declare
from jaxllm.weights.compare import differences
from jaxllm.weights.config_json import ConfigJson
from jaxllm.weights.families import BY_TYPE, FAMILIES
from jaxllm.weights.family import Differs, Family, NoClass, NoPlace, Placed, plan
from jaxllm.weights.load import build

KNOWN = (GQA, MLA, KDA, GatedDeltaNet, MLP, MoE)


@dataclass(frozen=True)
class Choice:
    """A class that holds the model. config: for config.json. folded: factors were moved into the weights; `model` is without them."""

    family: Family
    config: dict[str, Any]
    model: LanguageModel
    places: list[Placed]
    folded: bool

    def fold(self, model: LanguageModel, params: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters of `self.model`, from those of the model it was made of."""
        if not self.folded:
            return dict(params)
        scale = 1.0 if model.embed_scale is None else model.embed_scale
        head = model.head_weight(params)  # times logit_scale
        return {**params, "embed": params["embed"] * jnp.asarray(scale, params["embed"].dtype), "lm_head": head}


def choose(model: LanguageModel, original: Mapping[str, Any] | None = None) -> Choice:
    """The class for a model. original: the config.json it came with, if any; its class is tried first, and what it says beside the
    mathematics is kept.

    A factor on embeddings or logits that no class has is folded into the weights, which unties the head: the same function.
    Raises UserError that names the layers or settings that stand in the way.
    """
    families = list(FAMILIES)
    first = BY_TYPE.get(str((original or {}).get("model_type")))
    if first is not None:
        families.remove(first)
        families.insert(0, first)
    nearest: tuple[NoPlace, Family] | None = None
    plain = model.clone(embed_scale=None, logit_scale=None, tie_embeddings=False)
    factors = model.embed_scale is not None or model.logit_scale is not None
    for candidate, folded in ((model, False), *(((plain, True),) if factors else ())):
        for family in families:
            base = original if original is not None and family is first else None
            try:
                return _try(family, candidate, base, folded)
            except NoPlace as reasons:
                if nearest is None or _distance(reasons) < _distance(nearest[0]):
                    nearest = reasons, family
    assert nearest is not None
    raise UserError(_explain(model, list(map(str, nearest[0].args)), nearest[1]))


def _distance(reasons: NoPlace) -> int:
    """Fields that differ, whatever the number of layers they differ in; a family that refuses a model before they are compared is as far
    as ten of them, and one without a class for some of its layers farther."""
    if isinstance(reasons, Differs):
        return len({reason.partition(":")[0].rpartition(", ")[2] for reason in reasons.args})
    return 20 if isinstance(reasons, NoClass) else 10


def _try(family: Family, model: LanguageModel, original: Mapping[str, Any] | None, folded: bool) -> Choice:
    """The family's proposal, if it means this very model; else NoPlace with every reason."""
    named = {"architectures": [family.architectures[0]], "model_type": family.model_types[0]}
    config = {**(original or {}), **family.to_config(model), **named}
    try:
        again = build(family.to_model(ConfigJson(config, family.model_types[0])))
    except UserError as error:
        raise NoPlace(str(error)) from None
    if found := differences(model, again):
        raise Differs(*found)
    return Choice(family, config, model, plan(family, model, declare(model)), folded)


def _explain(model: LanguageModel, reasons: list[str], family: Family) -> str:
    strange = {}
    for group in model.groups:
        for pair in group.period:
            for role, layer in zip(pair, (model.mixer(pair[0]), model.ffn(pair[1])), strict=True):
                if type(layer) not in KNOWN:
                    strange[role] = type(layer).__name__
    if strange:
        named = ", ".join(f"{role} ({kind})" for role, kind in strange.items())
        return f"format=hf: no Hugging Face class has the layers {named}"
    shown = "; ".join(reasons[:3]) + (f" (and {len(reasons) - 3} more)" if len(reasons) > 3 else "")
    return (
        f"format=hf: no Hugging Face class holds this model; the nearest, {family.architectures[0]}, does not: {shown}"
    )
