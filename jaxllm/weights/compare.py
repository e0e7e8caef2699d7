"""Do two models compute the same? Compared field by field, with every default written out: what an export is judged by."""

import dataclasses
import math
from typing import Any

import flax.linen as nn

from jaxllm.layers.csa import CompressedAttention
from jaxllm.layers.dsa import DSA
from jaxllm.layers.gdn import GatedDeltaNet
from jaxllm.layers.gqa import GQA
from jaxllm.layers.kda import KDA
from jaxllm.layers.mla import MLA
from jaxllm.layers.mlp import MLP
from jaxllm.layers.moe import MoE
from jaxllm.layers.router import Router
from jaxllm.model import LanguageModel

# Of the model itself, what decides its function. Layers are compared one by one, so neither role names nor groups matter.
TOP = (
    "vocab_size",
    "d_model",
    "norm_eps",
    "tie_embeddings",
    "embed_norm",
    "learned_positions",
    "pre_norms",
    "post_norms",
    "logit_softcap",
)
# Of a layer: where it stands, how it runs and how it is trained, not what it computes.
ASIDE = {"parent", "name", "dtype", "param_dtype", "d_model", "kernel", "site", "chunk_size", "dispatch", "capacity_factor",
         "switch_loss", "sequence_loss", "z_loss", "gather", "index_dtype", "jitter", "bias_rate", "balance", "router_dtype"}  # fmt: skip


def differences(one: LanguageModel, other: LanguageModel) -> list[str]:
    """Where two models differ, a line each: `layer 3, mixer.window: 5, not null`."""
    a, b = describe(one), describe(other)
    return [
        f"{key}: {_show(a.get(key, _ABSENT))}, not {_show(b.get(key, _ABSENT))}"
        for key in [*a, *(k for k in b if k not in a)]
        if not _same(a.get(key, _ABSENT), b.get(key, _ABSENT))
    ]


def describe(model: LanguageModel) -> dict[str, Any]:
    """Every fact that decides what a model computes, by a name for messages."""
    facts: dict[str, Any] = {name: getattr(model, name) for name in TOP}
    facts["embed_scale"] = 1.0 if model.embed_scale is None else model.embed_scale
    facts["logit_scale"] = 1.0 if model.logit_scale is None else model.logit_scale
    facts |= _fields("norm", model.norm_layer())
    facts |= _fields("residual", model.residual_site("out"))
    number = 0
    for group in model.groups:
        for mixer, ffn in group.period * group.repeats:
            facts |= _fields(f"layer {number}, mixer", model.mixer(mixer))
            facts |= _fields(f"layer {number}, ffn", model.ffn(ffn))
            number += 1
    if (heads := model.mtp_heads()) is not None:
        facts |= {"mtp": type(heads).__name__, "mtp.depth": heads.depth, "mtp.hidden": heads.hidden}
        facts |= _fields("mtp, mixer", model.mixer(heads.mixer)) | _fields("mtp, ffn", model.ffn(heads.ffn))
    return {**facts, "layers": number}


def _fields(stem: str, layer: nn.Module) -> dict[str, Any]:
    values = {f.name: getattr(layer, f.name) for f in dataclasses.fields(layer) if f.name not in ASIDE}
    values |= _resolved(layer, values)
    rope, router = values.pop("rope", None), values.pop("router", None)
    facts = {f"{stem}": type(layer).__name__} | {
        f"{stem}.{name}": value for name, value in values.items() if value is not _ABSENT
    }
    if router is not None:
        facts |= _fields(f"{stem}.router", router)
    if rope is not None:
        facts[f"{stem}.rope"] = type(rope).__name__
        facts |= {
            f"{stem}.rope.{f.name}": getattr(rope, f.name) for f in dataclasses.fields(rope) if f.name != "length"
        }
    return facts


def _resolved(layer: nn.Module, values: dict[str, Any]) -> dict[str, Any]:
    """Fields whose null means another value, with that value; fields that another one makes idle, left out."""
    if isinstance(layer, GQA):
        idle = {} if layer.qk_norm else {name: _ABSENT for name in values if name.startswith("qk_norm_")}
        return {
            "num_kv_heads": layer.kv_heads,
            "head_dim": layer.key_dim,
            "value_dim": layer.value_dim or layer.key_dim,
            "scale": layer.score_scale,
            "query_pre_attn_scalar": _ABSENT,
            "value_scale": 1.0 if layer.value_scale is None else layer.value_scale,
            **idle,
        }
    if isinstance(layer, MLA):
        names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        eps = layer.norm_eps if layer.latent_norm_eps is None else layer.latent_norm_eps
        index = {"index_head_dim": layer.index_width} if isinstance(layer, DSA) else {}
        sizes = dict(zip(names, layer.sizes, strict=True))
        return {**sizes, **index, "scale": layer.score_scale, "latent_norm_eps": eps}
    if isinstance(layer, CompressedAttention):
        idle = {} if layer.top_k is not None else dict.fromkeys(("attend", "index_heads", "index_head_dim"), _ABSENT)
        return {**dict(zip(("head_dim", "index_head_dim", "rope_head_dim"), layer.widths, strict=True)), **idle}
    if isinstance(layer, KDA):
        _, k, v = layer.state_sizes
        sizes = {"head_dim": k, "value_dim": v, "gate_rank": layer.decay_rank, "output_gate_rank": layer.out_rank}
        return sizes | ({} if layer.bounded else {"gate_lower_bound": _ABSENT})
    if isinstance(layer, GatedDeltaNet):
        _, k, v = layer.state_sizes
        return {"num_k_heads": layer.key_heads, "head_k_dim": k, "head_v_dim": v}
    if isinstance(layer, MoE):
        shared = (layer.d_shared or layer.shared_experts * layer.d_expert) if layer.shared_experts else 0
        return {"router": layer.router_layer(), "shared_experts": int(shared > 0), "d_shared": shared}
    if isinstance(layer, Router):
        one = getattr(layer, "num_groups", None) in (None, 1)
        return {"num_groups": 1, "top_groups": 1} if one else {}
    return {"d_ff": layer.width} if isinstance(layer, MLP) else {}


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()


def _same(a: Any, b: Any) -> bool:
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (a, b))
    return math.isclose(a, b, rel_tol=1e-9) if numbers else a == b


def _show(value: Any) -> str:
    return "null" if value is None else str(value)
