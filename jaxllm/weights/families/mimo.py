"""MiMo-V2-Flash: windows with sinks and twice the kv heads on most layers, full attention without sinks on the others.

Keys are wider than values, part of each head turns, and values are scaled before they are cached. Layers of experts are refused by name.
"""

from jaxllm.model import LanguageModel
from jaxllm.weights.config_json import ConfigJson
from jaxllm.weights.families.common import (
    ATTENTION,
    GATED_MLP,
    OUTSIDE,
    PRE_NORMS,
    WRITTEN,
    attention_of,
    ffns_of,
    gqa,
    layer_types,
    mlp,
    model_node,
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
    count = c.whole("num_hidden_layers")
    kinds = c.get("mlp_layer_types") or ["dense"] + ["sparse"] * (count - 1)
    if "sparse" in kinds:
        raise c.error(
            f"layer {kinds.index('sparse')} is a mixture of {c.get('n_routed_experts')} experts, which is not available yet; only its"
            " attention and its dense layers are"
        )
    for key in ("moe_intermediate_size", "n_group", "n_routed_experts", "norm_topk_prob", "num_experts_per_tok", "routed_scaling_factor",
                "topk_group", "num_local_experts"):  # fmt: skip
        c.get(key)
    roles, mixers = attention(c)
    layers = [(role, "dense") for role in roles]
    return model_node(c, layers, mixers, {"dense": mlp(c)}, norm_eps=c.number("rms_norm_eps", 1e-5))


def _mimo_keys(model: LanguageModel) -> Node:
    mixers, ffn = attention_of(model), ffns_of(model)[0]
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
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": ffn.width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": full.num_heads,
        "num_key_value_heads": full.kv_heads,
        "head_dim": full.key_dim,
        "v_head_dim": full.value_dim or full.key_dim,
        "attention_value_scale": full.value_scale,
        "attention_bias": full.qkv_bias,
        "sliding_window": local.window,
        "layer_types": ["full_attention" if m.window is None else "sliding_attention" for m in mixers],
        "mlp_layer_types": ["dense"] * model.num_layers,
        "hidden_act": WRITTEN[ffn.activation],
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
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
        *PRE_NORMS,
    ),
    ignore=(r"model\.mtp\..*", r".*\.rotary_emb\.inv_freq"),
)
