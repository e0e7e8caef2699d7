"""Qwen 2 MoE (biases on q, k and v, a gated shared expert) and Qwen 3 MoE (norms on each head of q and k).

Layers of experts and dense layers by setting. Weights of the chosen experts sum to 1 only under `norm_topk_prob`.
"""

from jaxllm.layers.router import SoftmaxRouter
from jaxllm.model import LanguageModel
from jaxllm.weights.config_json import ConfigJson
from jaxllm.weights.families.common import (
    LLAMA_RULES,
    attention_keys,
    attention_of,
    dense_keys,
    gqa,
    layer_types,
    linears,
    mlp,
    model_node,
    sliding_keys,
)
from jaxllm.weights.families.experts import (
    compute_router,
    expert_rules,
    experts,
    routing_of,
    shared_rules,
    shared_width,
    sparse_layers,
    split_ffns,
)
from jaxllm.weights.family import Family, Node, NoPlace
from jaxllm.weights.rope import rope_node


def qwen_experts(c: ConfigJson, *, count: int, used: int, width: int, shared: int = 0, renormalise: bool) -> Node:
    """Experts of any Qwen; the arguments are what its class takes where config.json has none. shared: 0 = never a shared expert."""
    fields = {}
    if shared:
        fields = {
            "shared_experts": 1,
            "d_shared": c.whole("shared_expert_intermediate_size", shared),
            "shared_gate": True,
        }
    return experts(
        c,
        compute_router("SoftmaxRouter", renormalise=c.flag("norm_topk_prob", renormalise)),
        count=c.whole("num_experts", c.whole("num_local_experts", count)),  # transformers 5 writes the second
        used=c.whole("num_experts_per_tok", used),
        width=c.whole("moe_intermediate_size", width),
        **fields,
    )


def qwen_expert_keys(model: LanguageModel, *, shared: bool) -> Node:
    """What `qwen_experts` and `sparse_layers` read."""
    sparse, dense, moe = split_ffns(model)
    width = shared_width(moe)
    if bool(width) != shared or (shared and not moe.shared_gate):
        raise NoPlace("its experts have a gated shared expert" if shared else "its experts have no shared expert")
    return {
        "intermediate_size": moe.d_expert,  # of dense layers, where there are any
        "hidden_act": "silu",
        **({} if dense is None else dense_keys(dense)),
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.d_expert,
        "norm_topk_prob": routing_of(moe, SoftmaxRouter).renormalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, with_experts in enumerate(sparse) if not with_experts],
        **({"shared_expert_intermediate_size": width} if shared else {}),
    }


def _qwen2_moe(c: ConfigJson) -> Node:
    narrow = c.flag("use_sliding_window")
    window, first = c.get("sliding_window", 4096), c.get("max_window_layers", 28)
    count = c.whole("num_hidden_layers")
    default = ["sliding_attention" if narrow and i < first and not i % 2 else "full_attention" for i in range(count)]
    roles = ["local" if kind == "sliding_attention" else "global" for kind in layer_types(c, default)]
    if "local" in roles and not (narrow and window):
        raise c.error("layer_types: sliding_attention needs use_sliding_window and sliding_window")
    mixer = gqa(c, rope=rope_node(c), qkv_bias=c.flag("qkv_bias", True))
    moe = qwen_experts(c, count=60, used=4, width=1408, shared=5632, renormalise=False)
    mixers = {"global": mixer, "local": mixer | {"window": window}}
    pairs = list(zip(roles, sparse_layers(c), strict=True))
    return model_node(c, pairs, mixers, {"dense": mlp(c), "moe": moe})


def _qwen2_moe_keys(model: LanguageModel) -> Node:
    keys = {**attention_keys(model), **qwen_expert_keys(model, shared=True), **sliding_keys(model)}
    narrow = keys["sliding_window"] is not None
    keys["qkv_bias"] = keys.pop("attention_bias")
    return {**keys, "use_sliding_window": narrow, "sliding_window": keys["sliding_window"] or 0}


_SHARED = (*shared_rules("mlp.shared_expert"), *linears(("ffn/shared_gate", "mlp.shared_expert_gate")))
QWEN_EXPERTS = (*expert_rules(), *_SHARED)

QWEN2_MOE = Family(("qwen2_moe",), ("Qwen2MoeForCausalLM",), _qwen2_moe, _qwen2_moe_keys, (*LLAMA_RULES, *QWEN_EXPERTS))


def _qwen3_moe(c: ConfigJson) -> Node:
    window = c.get("sliding_window", 4096) if c.flag("use_sliding_window") else None
    c.get("max_window_layers")  # the class has a window on all layers or on none
    bias = c.flag("attention_bias")
    narrow = {} if window is None else {"window": window}
    mixer = gqa(c, rope=rope_node(c), qk_norm=True, qkv_bias=bias, out_bias=bias, **narrow)
    moe = qwen_experts(c, count=128, used=8, width=768, renormalise=False)
    layers = [("global", role) for role in sparse_layers(c)]
    return model_node(c, layers, {"global": mixer}, {"dense": mlp(c), "moe": moe})


def _qwen3_moe_keys(model: LanguageModel) -> Node:
    if any(mixer.window != attention_of(model)[0].window for mixer in attention_of(model)):
        raise NoPlace("it has the same window on all layers, or none")
    window = sliding_keys(model)["sliding_window"]
    return {
        **attention_keys(model),
        **qwen_expert_keys(model, shared=False),
        "sliding_window": window,
        "use_sliding_window": window is not None,
    }


QWEN3_MOE = Family(
    ("qwen3_moe",), ("Qwen3MoeForCausalLM",), _qwen3_moe, _qwen3_moe_keys, (*LLAMA_RULES, *expert_rules())
)
