"""Mixtral: Mistral's attention, and experts in every layer; weights of the chosen ones always sum to 1."""

from jaxllm.layers.router import SoftmaxRouter
from jaxllm.model import LanguageModel
from jaxllm.weights.config_json import ConfigJson
from jaxllm.weights.families.common import ATTENTION, OUTSIDE, PRE_NORMS, attention_keys, gqa, model_node, sliding_keys
from jaxllm.weights.families.experts import compute_router, expert_rules, experts, routing_of, split_ffns
from jaxllm.weights.family import Family, Node, NoPlace
from jaxllm.weights.rope import rope_node


def _mixtral(c: ConfigJson) -> Node:
    moe = experts(
        c,
        compute_router("SoftmaxRouter", renormalise=True, jitter=c.number("router_jitter_noise", 0.0)),
        count=c.whole("num_local_experts", 8),
        used=c.whole("num_experts_per_tok", 2),
        width=c.whole("intermediate_size", 14336),
    )
    window = c.get("sliding_window")
    mixer = gqa(c, rope=rope_node(c, theta=1e6), **({} if window is None else {"window": window}))
    layers = [("global", "moe")] * c.whole("num_hidden_layers")
    return model_node(c, layers, {"global": mixer}, {"moe": moe}, norm_eps=c.number("rms_norm_eps", 1e-5))


def _mixtral_keys(model: LanguageModel) -> Node:
    sparse, _, moe = split_ffns(model)
    if not all(sparse):
        raise NoPlace("it has experts in every layer")
    keys = attention_keys(model)
    keys.pop("attention_bias")
    return {
        **keys,
        "intermediate_size": moe.d_expert,
        "hidden_act": "silu",
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "router_jitter_noise": routing_of(moe, SoftmaxRouter).jitter,
        "sliding_window": sliding_keys(model)["sliding_window"],
    }


MIXTRAL = Family(
    ("mixtral",),
    ("MixtralForCausalLM",),
    _mixtral,
    _mixtral_keys,
    (*OUTSIDE, *ATTENTION, *expert_rules("block_sparse_moe", "w1", "w3", "w2"), *PRE_NORMS),
)
