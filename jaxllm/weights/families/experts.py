"""Layers of experts, as families share them: nodes made from config.json, tensors in every layout they are found in, keys made of a model.

Released checkpoints hold a tensor for each expert and matrix; files of the classes' own parameters hold all experts of a layer in one
tensor, gate and up side by side. Both are read, and the first is written.
"""

from collections.abc import Sequence
from typing import Any

from jaxllm.layers.mlp import MLP
from jaxllm.layers.moe import MoE
from jaxllm.layers.router import Router, SigmoidRouter
from jaxllm.model import LanguageModel
from jaxllm.weights.config_json import ConfigJson
from jaxllm.weights.families.common import ffns_of, linears, partial
from jaxllm.weights.family import Node, NoPlace, Rule
from jaxllm.weights.forms import Experts, Linear, Same

# ---- from config.json ---------------------------------------------------------------------------------------------------------------


def router(kind: str, **fields: Any) -> Node:
    """A node of one of `jaxllm.layers.router`."""
    return partial(f"router.{kind}", **fields)


def compute_router(kind: str, **fields: Any) -> Node:
    """A router whose logits are made in the model's dtype, as Mixtral's, Qwen's and gpt-oss's are."""
    return router(kind, router_dtype="compute", **fields)


def experts(c: ConfigJson, router: Node, *, count: int, used: int, width: int, **fields: Any) -> Node:
    """A node of `count` gated experts with a hidden layer of `width`, `used` of them a token."""
    if used > count:
        raise c.error(f"num_experts_per_tok={used} is more than there are experts, {count}")
    c.only("hidden_act", "silu", "swish", why=" for experts")
    return partial("moe.MoE", num_experts=count, top_k=used, d_expert=width, router=router, **fields)


def sigmoid_router(c: ConfigJson, *, groups: int = 1, top: int = 1, scale: float = 1.0) -> Node:
    """The router of DeepSeek-V3 and its heirs; the arguments are what the class takes where config.json has none.

    Its bias stays as it was released: training on may ask for `balance: sign`.
    """
    return router(
        "SigmoidRouter",
        renormalise=c.flag("norm_topk_prob", True),
        scale=c.number("routed_scaling_factor", scale),
        num_groups=c.whole("n_group", groups),
        top_groups=c.whole("topk_group", top),
        balance=None,
    )


def sparse_layers(c: ConfigJson) -> list[str]:
    """The ffn role of each layer of a Qwen: experts in every `decoder_sparse_step`-th, but for `mlp_only_layers`."""
    step, only = c.whole("decoder_sparse_step", 1), c.get("mlp_only_layers") or []
    if not isinstance(only, list):
        raise c.error(f"mlp_only_layers={only!r}: expected a list of layers")
    return ["dense" if i in only or (i + 1) % step else "moe" for i in range(c.whole("num_hidden_layers"))]


def named_layers(c: ConfigJson, default: Sequence[str]) -> list[str]:
    """The ffn role of each layer by `mlp_layer_types`, one of dense and sparse a layer."""
    kinds = c.get("mlp_layer_types")
    if kinds is None:
        return list(default)
    if not isinstance(kinds, list) or len(kinds) != len(default) or not set(kinds) <= {"dense", "sparse"}:
        raise c.error(f"mlp_layer_types={kinds!r}: expected {len(default)} entries, dense or sparse")
    return ["moe" if kind == "sparse" else "dense" for kind in kinds]


# ---- the tensors --------------------------------------------------------------------------------------------------------------------


def expert_rules(
    stem: str = "mlp", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Rule, ...]:
    """A tensor an expert under `stem` and these names, or all experts in two tensors."""
    each = f"model.layers.{{i}}.{stem}.experts.{{e}}."
    # Files of the classes' own parameters call the layer mlp, whatever it is called in released ones.
    own = () if stem == "mlp" else linears(("ffn/router/kernel", "mlp.gate"))
    return (
        Rule(("ffn/gate_proj",), f"{each}{gate}.weight", Linear()),
        Rule(("ffn/up_proj",), f"{each}{up}.weight", Linear()),
        Rule(("ffn/down_proj",), f"{each}{down}.weight", Linear()),
        Rule(("ffn/gate_proj", "ffn/up_proj"), "model.layers.{i}.mlp.experts.gate_up_proj", Experts()),
        Rule(("ffn/down_proj",), "model.layers.{i}.mlp.experts.down_proj", Experts()),
        *linears(("ffn/router/kernel", f"{stem}.gate")),
        *own,
        Rule(("ffn/router/bias",), f"model.layers.{{i}}.{stem}.gate.e_score_correction_bias", Same()),
    )


def shared_rules(stem: str) -> tuple[Rule, ...]:
    """The expert that every token uses."""
    names = ("gate_proj", "up_proj", "down_proj")
    return linears(*((f"ffn/shared/{name}", f"{stem}.{name}") for name in names))


# ---- to config.json -----------------------------------------------------------------------------------------------------------------


def split_ffns(model: LanguageModel) -> tuple[list[bool], MLP | None, MoE]:
    """(whether each layer has experts, the first dense layer, the first of experts); NoPlace where there are no experts."""
    layers = ffns_of(model, MLP, MoE)
    sparse = [isinstance(layer, MoE) for layer in layers]
    if True not in sparse:
        raise NoPlace("no layer has experts")
    dense = next((layer for layer in layers if isinstance(layer, MLP)), None)
    return sparse, dense, layers[sparse.index(True)]


def routing_of(moe: MoE, kind: type[Router]) -> Any:
    """The router of a layer of experts, if it is of a kind."""
    found = moe.router_layer()
    if type(found) is not kind:
        raise NoPlace(f"experts are chosen by a {type(found).__name__}, not a {kind.__name__}")
    return found


def shared_width(moe: MoE) -> int:
    """Of the hidden layer of the expert that every token uses; 0 = there is none."""
    return (moe.d_shared or moe.shared_experts * moe.d_expert) if moe.shared_experts else 0


def shared_count(moe: MoE) -> int:
    """How many experts of the usual width the shared one is as wide as."""
    width = shared_width(moe)
    if width % moe.d_expert:
        raise NoPlace(f"the shared expert's width {width} is not a multiple of d_expert={moe.d_expert}")
    return width // moe.d_expert


def sigmoid_keys(moe: MoE) -> Node:
    """What `sigmoid_router` reads."""
    found = routing_of(moe, SigmoidRouter)
    if not found.use_bias:
        raise NoPlace("router.use_bias: false, and its class always has a bias")
    return {
        "norm_topk_prob": found.renormalise,
        "routed_scaling_factor": found.scale,
        "n_group": found.num_groups or 1,
        "topk_group": found.top_groups or 1,
    }
