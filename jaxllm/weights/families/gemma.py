"""Gemma 2: four (1 + w) norms a block, alternating windows, two softcaps, a scaled embedding, GeGLU, scores scaled by a setting."""

from jaxllm.model import LanguageModel
from jaxllm.weights.config_json import ConfigJson
from jaxllm.weights.families.common import (
    ATTENTION,
    GATED_MLP,
    OUTSIDE,
    WRITTEN,
    attention_of,
    common_keys,
    ffns_of,
    gqa,
    layer_types,
    mlp,
    model_node,
    norms,
    partial,
    sliding_keys,
    sliding_layers,
)
from jaxllm.weights.family import Family, Node
from jaxllm.weights.rope import rope_node


def _gemma2(c: ConfigJson) -> Node:
    count, bias = c.whole("num_hidden_layers"), c.flag("attention_bias")
    c.get("hidden_act")  # the class reads hidden_activation alone; the files carry both
    mixer = gqa(
        c,
        rope=rope_node(c),
        qkv_bias=bias,
        out_bias=bias,
        softcap=c.get("attn_logit_softcapping", 50.0),
        query_pre_attn_scalar=c.number("query_pre_attn_scalar", 256),
    )
    mixer.setdefault("head_dim", 256)
    default = ["full_attention" if i % 2 else "sliding_attention" for i in range(count)]
    layers, mixers = sliding_layers(c, mixer, layer_types(c, default), c.get("sliding_window", 4096))
    ffn = mlp(c, act_key="hidden_activation") if c.get("hidden_activation") else mlp(c, activation="gelu_tanh")
    return model_node(
        c,
        layers,
        mixers,
        {"dense": ffn},
        norm=partial("norm.RMSNorm", zero_centred=True),
        post_norms=True,
        embed_scale=c.whole("hidden_size") ** 0.5,
        logit_softcap=c.get("final_logit_softcapping", 30.0),
        tie_embeddings=c.flag("tie_word_embeddings", True),
    )


def _gemma2_keys(model: LanguageModel) -> Node:
    mixer = attention_of(model)[0]
    scalar = mixer.query_pre_attn_scalar
    if scalar is None:
        scalar = mixer.key_dim if mixer.scale is None else mixer.scale**-2
    return {
        **common_keys(model),
        **sliding_keys(model),
        "hidden_activation": WRITTEN[ffns_of(model)[0].activation],
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": mixer.softcap,
        "final_logit_softcapping": model.logit_softcap,
    }


GEMMA2 = Family(
    ("gemma2",),
    ("Gemma2ForCausalLM",),
    _gemma2,
    _gemma2_keys,
    (
        *OUTSIDE,
        *ATTENTION,
        *GATED_MLP,
        *norms(
            ("norm_mixer", "input_layernorm"),
            ("norm_mixer_out", "post_attention_layernorm"),
            ("norm_ffn", "pre_feedforward_layernorm"),
            ("norm_ffn_out", "post_feedforward_layernorm"),
        ),
    ),
)
