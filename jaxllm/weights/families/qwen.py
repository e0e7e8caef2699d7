"""Qwen 2 (biases on q, k and v) and Qwen 3 (norms on each head of q and k). Windows on the last layers, by setting."""

from jaxllm.model import LanguageModel
from jaxllm.weights.config_json import ConfigJson
from jaxllm.weights.families.common import (
    LLAMA_RULES,
    common_keys,
    gqa,
    layer_types,
    mlp,
    model_node,
    sliding_keys,
    sliding_layers,
)
from jaxllm.weights.family import Family, Node
from jaxllm.weights.rope import rope_node


def _qwen(c: ConfigJson, **fields: object) -> Node:
    count = c.whole("num_hidden_layers")
    window = c.get("sliding_window", 4096) if c.flag("use_sliding_window") else None
    first = c.get("max_window_layers", 28)
    default = ["sliding_attention" if window is not None and i >= first else "full_attention" for i in range(count)]
    layers, mixers = sliding_layers(c, gqa(c, rope=rope_node(c), **fields), layer_types(c, default), window)
    return model_node(c, layers, mixers, {"dense": mlp(c)})


def _window_keys(model: LanguageModel) -> Node:
    sliding = sliding_keys(model)
    narrow = sliding["sliding_window"] is not None
    return {**sliding, "use_sliding_window": narrow, "max_window_layers": model.num_layers if not narrow else 0}


def _qwen2(c: ConfigJson) -> Node:
    c.only("attention_bias", True, why=" (Qwen 2 always has them on q, k and v)")
    return _qwen(c, qkv_bias=True)


def _qwen2_keys(model: LanguageModel) -> Node:
    keys = common_keys(model)
    keys.pop("attention_bias")
    return {**keys, **_window_keys(model)}


QWEN2 = Family(("qwen2",), ("Qwen2ForCausalLM",), _qwen2, _qwen2_keys, LLAMA_RULES)


def _qwen3(c: ConfigJson) -> Node:
    bias = c.flag("attention_bias")
    node = _qwen(c, qk_norm=True, qkv_bias=bias, out_bias=bias)
    for mixer in node["mixers"].values():
        mixer.setdefault("head_dim", 128)  # the class does not divide hidden_size
    return node


def _qwen3_keys(model: LanguageModel) -> Node:
    return {**common_keys(model), **_window_keys(model)}


QWEN3 = Family(("qwen3",), ("Qwen3ForCausalLM",), _qwen3, _qwen3_keys, LLAMA_RULES)
