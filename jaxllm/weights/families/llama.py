"""Llama and its near kin: the same tensors, and a few fields apart.

Llama (and SmolLM2, Yi, ...): RMSNorm, RoPE of any kind, GQA, SwiGLU; biases and a tied head by setting. Mistral: a window on all layers.
SmolLM3: no rotation in every fourth layer. Granite: four multipliers. OLMo 2: norms after the layers, and q/k norms over all heads.
"""

from jaxllm.model import LanguageModel
from jaxllm.weights.config_json import ConfigJson
from jaxllm.weights.families.common import (
    ATTENTION,
    GATED_MLP,
    LLAMA_RULES,
    OUTSIDE,
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


def _plain(c: ConfigJson, **fields: object) -> Node:
    """A model of `global` layers with biases by setting."""
    bias = c.flag("attention_bias")
    mixer = gqa(c, rope=rope_node(c), qkv_bias=bias, out_bias=bias)
    ffn = mlp(c, bias=c.flag("mlp_bias"))
    return model_node(
        c, [("global", "dense")] * c.whole("num_hidden_layers"), {"global": mixer}, {"dense": ffn}, **fields
    )


def _plain_keys(model: LanguageModel) -> Node:
    return {**common_keys(model), "mlp_bias": ffns_of(model)[0].bias}


LLAMA = Family(("llama",), ("LlamaForCausalLM",), _plain, _plain_keys, LLAMA_RULES)


def _mistral(c: ConfigJson) -> Node:
    count, window = c.whole("num_hidden_layers"), c.get("sliding_window", 4096)
    types = layer_types(c, ["full_attention" if window is None else "sliding_attention"] * count)
    layers, mixers = sliding_layers(c, gqa(c, rope=rope_node(c)), types, window)
    return model_node(c, layers, mixers, {"dense": mlp(c)}, norm_eps=c.number("rms_norm_eps", 1e-6))


def _mistral_keys(model: LanguageModel) -> Node:
    return {**common_keys(model), "sliding_window": sliding_keys(model)["sliding_window"]}


MISTRAL = Family(("mistral",), ("MistralForCausalLM",), _mistral, _mistral_keys, LLAMA_RULES)


def _smollm3(c: ConfigJson) -> Node:
    count, every = c.whole("num_hidden_layers"), c.whole("no_rope_layer_interval", 4)
    turns = c.get("no_rope_layers")
    turns = [int((i + 1) % every != 0) for i in range(count)] if turns is None else turns
    if not isinstance(turns, list) or len(turns) != count:
        raise c.error(f"no_rope_layers: expected {count} entries, one a layer")
    window = c.get("sliding_window") if c.flag("use_sliding_window") else None
    default = ["full_attention" if window is None or turn else "sliding_attention" for turn in turns]
    types = layer_types(c, default)
    bias = c.flag("attention_bias")
    mixer = gqa(c, rope=rope_node(c, theta=2e6), qkv_bias=bias, out_bias=bias)
    mixers = {
        "global": mixer,
        "nope": mixer | {"rope": None},
        "local": mixer | {"window": window},
        "local_nope": mixer | {"rope": None, "window": window},
    }
    roles = {
        (True, False): "global",
        (False, False): "nope",
        (True, True): "local",
        (False, True): "local_nope",
    }
    windowed = [kind == "sliding_attention" and window is not None for kind in types]
    layers = [(roles[bool(turn), narrow], "dense") for turn, narrow in zip(turns, windowed, strict=True)]
    tied = c.flag("tie_word_embeddings", True)
    return model_node(c, layers, mixers, {"dense": mlp(c, bias=c.flag("mlp_bias"))}, tie_embeddings=tied)


def _smollm3_keys(model: LanguageModel) -> Node:
    turns = [int(mixer.rope is not None) for mixer in attention_of(model)]
    sliding = sliding_keys(model)
    return {
        **_plain_keys(model),
        **sliding,
        "no_rope_layers": turns,
        "use_sliding_window": sliding["sliding_window"] is not None,
    }


SMOLLM3 = Family(("smollm3",), ("SmolLM3ForCausalLM",), _smollm3, _smollm3_keys, LLAMA_RULES)


def _granite(c: ConfigJson) -> Node:
    node = _plain(
        c,
        embed_scale=c.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / c.number("logits_scaling", 1.0),
        residual=partial("residual.Residual", scale=c.number("residual_multiplier", 1.0)),
    )
    node["mixers"]["global"]["scale"] = c.number("attention_multiplier", 1.0)
    return node


def _granite_keys(model: LanguageModel) -> Node:
    mixer = attention_of(model)[0]
    return {
        **_plain_keys(model),
        "embedding_multiplier": 1.0 if model.embed_scale is None else model.embed_scale,
        "logits_scaling": 1.0 if model.logit_scale is None else 1.0 / model.logit_scale,
        "residual_multiplier": model.residual_site("out").scale,
        "attention_multiplier": mixer.key_dim**-0.5 if mixer.scale is None else mixer.scale,
    }


GRANITE = Family(("granite",), ("GraniteForCausalLM",), _granite, _granite_keys, LLAMA_RULES)


def _olmo2(c: ConfigJson) -> Node:
    bias = c.flag("attention_bias")
    mixer = gqa(c, rope=rope_node(c), qkv_bias=bias, out_bias=bias, qk_norm=True, qk_norm_all_heads=True)
    fields = {"pre_norms": False, "post_norms": True, "norm_eps": c.number("rms_norm_eps", 1e-5)}
    # The class multiplies by the weight in float32 and rounds once; see RMSNorm.
    norm = partial("norm.RMSNorm", round_first=False)
    layers = [("global", "dense")] * c.whole("num_hidden_layers")
    return model_node(c, layers, {"global": mixer}, {"dense": mlp(c)}, norm=norm, **fields)


OLMO2 = Family(
    ("olmo2",),
    ("Olmo2ForCausalLM",),
    _olmo2,
    common_keys,
    (
        *OUTSIDE,
        *ATTENTION,
        *GATED_MLP,
        *norms(("norm_mixer_out", "post_attention_layernorm"), ("norm_ffn_out", "post_feedforward_layernorm")),
    ),
)
