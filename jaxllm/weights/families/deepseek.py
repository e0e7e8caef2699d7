"""DeepSeek V2 and V3: multi-head latent attention. Layers of experts are refused by name; a model of dense layers is whole.

The norms of both latents always have eps 1e-6, whatever rms_norm_eps says. V2 and (with `rope_interleave`) V3 pair even and odd channels.
"""

from jaxllm.layers.mla import MLA
from jaxllm.model import LanguageModel
from jaxllm.weights.config_json import ConfigJson
from jaxllm.weights.families.common import (
    GATED_MLP,
    OUTSIDE,
    PRE_NORMS,
    WRITTEN,
    attention_of,
    ffns_of,
    linears,
    mlp,
    model_node,
    norms,
    partial,
    vectors,
)
from jaxllm.weights.family import Family, Node, NoPlace, Rule
from jaxllm.weights.forms import PerHead
from jaxllm.weights.rope import rope_keys, rope_node

# Of the layers of experts, which are not there when all layers are dense.
EXPERTS = (
    "aux_loss_alpha",
    "ep_size",
    "moe_intermediate_size",
    "moe_layer_freq",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "scoring_func",
    "seq_aux",
    "topk_group",
    "topk_method",
)
LATENT_EPS = 1e-6


def _mla(c: ConfigJson, interleaved: bool) -> Node:
    bias = c.flag("attention_bias")
    for key in ("num_key_value_heads", "head_dim", "qk_head_dim"):  # follow from the others
        c.get(key)
    return partial(
        "mla.MLA",
        num_heads=c.whole("num_attention_heads"),
        q_lora_rank=None if c.get("q_lora_rank", 1536) is None else c.whole("q_lora_rank", 1536),
        kv_lora_rank=c.whole("kv_lora_rank", 512),
        qk_nope_head_dim=c.whole("qk_nope_head_dim", 128),
        qk_rope_head_dim=c.whole("qk_rope_head_dim", 64),
        v_head_dim=c.whole("v_head_dim", 128),
        rope=rope_node(c, interleaved=interleaved),
        latent_norm_eps=LATENT_EPS,
        qkv_bias=bias,
        out_bias=bias,
    )


def _model(c: ConfigJson, interleaved: bool, dense_first: int, mlp_bias: bool = False) -> Node:
    count = c.whole("num_hidden_layers")
    dense = c.get("first_k_dense_replace", dense_first)
    if dense < count:
        raise c.error(
            f"layer {dense} is a mixture of {c.get('n_routed_experts')} experts, which is not available yet; only its dense layers are"
        )
    for key in (*EXPERTS, "num_mtp_layers", "num_nextn_predict_layers"):
        c.get(key)
    layers = [("global", "dense")] * count
    return model_node(c, layers, {"global": _mla(c, interleaved)}, {"dense": mlp(c, bias=mlp_bias)})


def _deepseek_v3(c: ConfigJson) -> Node:
    return _model(c, c.flag("rope_interleave", True), dense_first=3)


def _deepseek_v2(c: ConfigJson) -> Node:
    return _model(c, interleaved=True, dense_first=0, mlp_bias=c.flag("mlp_bias"))


def _keys(model: LanguageModel) -> Node:
    mixer, ffn = attention_of(model, MLA)[0], ffns_of(model)[0]
    if mixer.rope is None:
        raise NoPlace("no layer has a rotary embedding (rope: null), which its class always has")
    rope = rope_keys(mixer.rope, model.max_seq_len)
    if rope is None:
        raise NoPlace(f"{type(mixer.rope).__name__} has no rope_type")
    r, n, o, v = mixer.sizes
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": ffn.width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_heads,
        "q_lora_rank": mixer.q_lora_rank,
        "kv_lora_rank": r,
        "qk_nope_head_dim": n,
        "qk_rope_head_dim": o,
        "v_head_dim": v,
        "first_k_dense_replace": model.num_layers,
        "hidden_act": WRITTEN[ffn.activation],
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "attention_bias": mixer.qkv_bias,
        **rope,
    }


def _deepseek_v3_keys(model: LanguageModel) -> Node:
    rope = attention_of(model, MLA)[0].rope
    return {**_keys(model), "rope_interleave": rope is not None and rope.interleaved, "num_mtp_layers": 0}


def _deepseek_v2_keys(model: LanguageModel) -> Node:
    return {**_keys(model), "mlp_bias": ffns_of(model)[0].bias}


RULES = (
    *OUTSIDE,
    *linears(
        ("mixer/q_proj", "self_attn.q_proj"),
        ("mixer/q_a_proj", "self_attn.q_a_proj"),
        ("mixer/q_b_proj", "self_attn.q_b_proj"),
        ("mixer/kv_a_proj", "self_attn.kv_a_proj_with_mqa"),
    ),
    *linears(("mixer/o_proj", "self_attn.o_proj"), inputs=2),
    Rule(("mixer/k_b_proj", "mixer/v_b_proj"), "model.layers.{i}.self_attn.kv_b_proj.weight", PerHead()),
    *vectors(
        ("mixer/q_a_bias", "self_attn.q_a_proj.bias"),
        ("mixer/kv_a_bias", "self_attn.kv_a_proj_with_mqa.bias"),
        ("mixer/o_bias", "self_attn.o_proj.bias"),
    ),
    *norms(("mixer/q_a_norm", "self_attn.q_a_layernorm"), ("mixer/kv_a_norm", "self_attn.kv_a_layernorm")),
    *GATED_MLP,
    *PRE_NORMS,
)
DEEPSEEK_V3 = Family(("deepseek_v3",), ("DeepseekV3ForCausalLM",), _deepseek_v3, _deepseek_v3_keys, RULES)
DEEPSEEK_V2 = Family(("deepseek_v2",), ("DeepseekV2ForCausalLM",), _deepseek_v2, _deepseek_v2_keys, RULES)
