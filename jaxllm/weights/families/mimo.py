"""MiMo-V2-Flash: windows with sinks and twice the kv heads on most layers, full attention without sinks on the others.

Keys are wider than values, part of each head turns, and values are scaled before they are cached. A dense layer, then experts as in
DeepSeek-V3, without a shared one. The published draft layers (`model.mtp`) are left aside.
"""

from jaxllm.model import LanguageModel
from jaxllm.weights.config_json import ConfigJson
from jaxllm.weights.families.common import (
    ATTENTION,
    GATED_MLP,
    OUTSIDE,
    PRE_NORMS,
    attention_of,
    dense_keys,
    gqa,
    layer_types,
    mlp,
    model_node,
    top_keys,
)
from jaxllm.weights.families.experts import (
    expert_rules,
    experts,
    named_layers,
    sigmoid_keys,
    sigmoid_router,
    split_ffns,
)
from jaxllm.weights.family import Family, Node, NoPlace, Rule
from jaxllm.weights.forms import Same
from jaxllm.weights.rope import rope_keys, rope_node

THETA = {"full_attention": 5e6, "sliding_attention": 1e4}
PARTIAL = 0.334  # of the published model, where config.json says nothing


def attention(c: ConfigJson) -> tuple[list[str], Node]:
    """(the role of each layer, the mixers)."""
    count = c.whole("num_hidden_layers")
    default = ["full_attention" if i == 0 or not (i + 1) % 6 else "sliding_attention" for i in range(count)]
    window = c.whole("sliding_window", 129)
    if c.get("sliding_window_size") is not None:  # published as tokens before the query; ours counts the query too
        window = c.whole("sliding_window_size") + 1

    def mixer(kind: str, **fields: object) -> Node:
        rope = rope_node(c, kind=kind, theta=THETA[kind])
        if c.get("rope_parameters") is None and c.get("rope_scaling") is None:
            rope.setdefault("partial", PARTIAL)
        return gqa(
            c,
            rope=rope,
            value_dim=c.whole("v_head_dim", 128),
            value_scale=c.get("attention_value_scale", 0.707),
            qkv_bias=c.flag("attention_bias"),
            **fields,
        )

    full = mixer("full_attention")
    local = mixer("sliding_attention", window=window, sinks=True)
    for node in (full, local):
        node.setdefault("head_dim", 192)
    local["num_kv_heads"] = 2 * full["num_kv_heads"]
    roles = ["local" if kind == "sliding_attention" else "global" for kind in layer_types(c, default)]
    return roles, {"global": full, "local": local}


def _mimo(c: ConfigJson) -> Node:
    roles, mixers = attention(c)
    ffns = named_layers(c, ["dense"] + ["moe"] * (len(roles) - 1))
    moe = experts(
        c,
        sigmoid_router(c),
        count=c.whole("n_routed_experts", 256),
        used=c.whole("num_experts_per_tok", 8),
        width=c.whole("moe_intermediate_size", 2048),
    )
    layers = list(zip(roles, ffns, strict=True))
    return model_node(c, layers, mixers, {"dense": mlp(c), "moe": moe}, norm_eps=c.number("rms_norm_eps", 1e-5))


def _mimo_keys(model: LanguageModel) -> Node:
    mixers = attention_of(model)
    sparse, dense, moe = split_ffns(model)
    if moe.shared_experts:
        raise NoPlace("its experts have no shared expert")
    ropes, longest = {}, None
    for mixer in mixers:
        if mixer.rope is None or (keys := rope_keys(mixer.rope, model.max_seq_len)) is None:
            raise NoPlace("every layer needs a rotary embedding that has a rope_type")
        kind = "full_attention" if mixer.window is None else "sliding_attention"
        ropes[kind], longest = keys["rope_parameters"], keys["max_position_embeddings"]
    full = next((m for m in mixers if m.window is None), None)
    local = next((m for m in mixers if m.window is not None), None)
    if full is None or local is None:
        raise NoPlace("it has both full and sliding layers")
    return {
        **top_keys(model),
        "intermediate_size": moe.d_expert,  # of dense layers, where there are any
        "hidden_act": "silu",
        **({} if dense is None else dense_keys(dense)),
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.d_expert,
        **sigmoid_keys(moe),
        "num_attention_heads": full.num_heads,
        "num_key_value_heads": full.kv_heads,
        "head_dim": full.key_dim,
        "v_head_dim": full.value_dim or full.key_dim,
        "attention_value_scale": full.value_scale,
        "attention_bias": full.qkv_bias,
        "sliding_window": local.window,
        "layer_types": ["full_attention" if m.window is None else "sliding_attention" for m in mixers],
        "mlp_layer_types": ["sparse" if with_experts else "dense" for with_experts in sparse],
        "rope_parameters": ropes,
        "max_position_embeddings": longest,
    }


MIMO_V2_FLASH = Family(
    ("mimo_v2_flash",),
    ("MiMoV2FlashForCausalLM",),
    _mimo,
    _mimo_keys,
    (
        *OUTSIDE,
        *ATTENTION,
        Rule(("mixer/sinks",), "model.layers.{i}.self_attn.attention_sink_bias", Same()),
        *GATED_MLP,
        *expert_rules(),
        *PRE_NORMS,
    ),
    ignore=(r"model\.mtp\..*", r".*\.rotary_emb\.inv_freq"),
)
