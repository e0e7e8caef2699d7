"""What most families share: pieces of a model node made from config.json, and pieces of a config.json made from a model."""

from collections.abc import Sequence
from typing import Any

from jaxllm.layers.gqa import GQA
from jaxllm.layers.mlp import MLP
from jaxllm.model import LanguageModel
from jaxllm.weights.config_json import ConfigJson
from jaxllm.weights.family import NoClass, Node, NoPlace, Rule
from jaxllm.weights.forms import Flat, Linear, Same
from jaxllm.weights.layer_string import Pair, layer_string
from jaxllm.weights.rope import rope_keys, rope_node

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
WRITTEN = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "relu2": "relu2"}

# ---- from config.json ---------------------------------------------------------------------------------------------------------------


def partial(target: str, **fields: Any) -> Node:
    return {"_target_": f"jaxllm.layers.{target}", "_partial_": True, **fields}


def model_node(c: ConfigJson, layers: Sequence[Pair], mixers: Node, ffns: Node, **fields: Any) -> Node:
    """A LanguageModel node. Its norm is RMSNorm, its vocabulary and width under the usual keys, unless `fields` says otherwise."""
    used = {role for pair in layers for role in pair}
    return {
        "_target_": "jaxllm.model.LanguageModel",
        "vocab_size": c.whole("vocab_size"),
        "d_model": c.whole("hidden_size"),
        "layers": layer_string(layers),
        "mixers": {role: node for role, node in mixers.items() if role in used},
        "ffns": {role: node for role, node in ffns.items() if role in used},
        "residual": partial("residual.Residual"),
        "norm": partial("norm.RMSNorm"),
        "norm_eps": c.number("rms_norm_eps", 1e-6),
        "tie_embeddings": c.flag("tie_word_embeddings"),
        "max_seq_len": longest(c),
    } | fields


def longest(c: ConfigJson) -> int:
    """The longest sequence a checkpoint is meant for: its own limit, or what its rope scaling stretches that to."""
    limit = c.whole("max_position_embeddings", 2048)
    table = c.get("rope_scaling") or c.get("rope_parameters") or {}
    kind, factor = (table.get(key, table.get(old)) for key, old in (("rope_type", "type"), ("factor", "")))
    if not isinstance(factor, int | float) or kind not in ("yarn", "dynamic", "linear"):
        return limit
    original = c.get("original_max_position_embeddings") or table.get("original_max_position_embeddings") or limit
    return max(limit, int(factor * original))


def heads(c: ConfigJson) -> Node:
    """num_heads, num_kv_heads, head_dim of grouped-query attention."""
    count = c.whole("num_attention_heads")
    node = {"num_heads": count, "num_kv_heads": c.whole("num_key_value_heads", count)}
    return node | ({"head_dim": c.whole("head_dim")} if c.get("head_dim") is not None else {})


def gqa(c: ConfigJson, *, rope: Node | None, **fields: Any) -> Node:
    return partial("gqa.GQA", **heads(c), rope=rope, **fields)


def mlp(c: ConfigJson, *, act_key: str = "hidden_act", width_key: str = "intermediate_size", **fields: Any) -> Node:
    act = c.get(act_key, "silu")
    if act not in ACTIVATIONS:
        raise c.error(f"{act_key}={act!r} is not available; known: {', '.join(ACTIVATIONS)}")
    return partial("mlp.MLP", d_ff=c.whole(width_key), activation=ACTIVATIONS[act], **fields)


def layer_types(c: ConfigJson, default: Sequence[str]) -> list[str]:
    """`layer_types`, one of full_attention and sliding_attention a layer."""
    types = c.get("layer_types")
    types = list(default) if types is None else types
    if not isinstance(types, list) or len(types) != len(default):
        raise c.error(f"layer_types: expected {len(default)} entries, one a layer")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise c.error(f"layer_types: {kind!r} is not available in this family")
    return types


def sliding_layers(c: ConfigJson, node: Node, types: Sequence[str], window: int | None) -> tuple[list[Pair], Node]:
    """Layers and mixers where some layers see only a window: the roles `global` and `local`."""
    if window is None and "sliding_attention" in types:
        raise c.error("sliding_window: null, though some layer_types are sliding_attention")
    pairs = [("local" if kind == "sliding_attention" else "global", "dense") for kind in types]
    return pairs, {"global": node, "local": node | {"window": window}}


def default_rope(c: ConfigJson, **kwargs: Any) -> Node:
    return rope_node(c, **kwargs)


# ---- the tensors of a Llama-like layer ----------------------------------------------------------------------------------------------


def linears(*pairs: tuple[str, str], inputs: int = 1) -> tuple[Rule, ...]:
    return tuple(Rule((ours,), f"model.layers.{{i}}.{theirs}.weight", Linear(inputs)) for ours, theirs in pairs)


def vectors(*pairs: tuple[str, str]) -> tuple[Rule, ...]:
    return tuple(Rule((ours,), f"model.layers.{{i}}.{theirs}", Flat()) for ours, theirs in pairs)


def norms(*pairs: tuple[str, str]) -> tuple[Rule, ...]:
    return tuple(Rule((f"{ours}/scale",), f"model.layers.{{i}}.{theirs}.weight", Same()) for ours, theirs in pairs)


OUTSIDE = (
    Rule(("embed",), "model.embed_tokens.weight", Same()),
    Rule(("final_norm/scale",), "model.norm.weight", Same()),
    Rule(("lm_head",), "lm_head.weight", Linear()),
)
ATTENTION = (
    *linears(
        ("mixer/q_proj", "self_attn.q_proj"), ("mixer/k_proj", "self_attn.k_proj"), ("mixer/v_proj", "self_attn.v_proj")
    ),
    *linears(("mixer/o_proj", "self_attn.o_proj"), inputs=2),
    *vectors(
        ("mixer/q_bias", "self_attn.q_proj.bias"),
        ("mixer/k_bias", "self_attn.k_proj.bias"),
        ("mixer/v_bias", "self_attn.v_proj.bias"),
        ("mixer/o_bias", "self_attn.o_proj.bias"),
    ),
    *norms(("mixer/q_norm", "self_attn.q_norm"), ("mixer/k_norm", "self_attn.k_norm")),
)
GATED_MLP = (
    *linears(("ffn/gate_proj", "mlp.gate_proj"), ("ffn/up_proj", "mlp.up_proj"), ("ffn/down_proj", "mlp.down_proj")),
    *vectors(
        ("ffn/gate_bias", "mlp.gate_proj.bias"),
        ("ffn/up_bias", "mlp.up_proj.bias"),
        ("ffn/down_bias", "mlp.down_proj.bias"),
    ),
)
PRE_NORMS = norms(("norm_mixer", "input_layernorm"), ("norm_ffn", "post_attention_layernorm"))
LLAMA_RULES = (*OUTSIDE, *ATTENTION, *GATED_MLP, *PRE_NORMS)

# ---- to config.json -----------------------------------------------------------------------------------------------------------------


def layers_of(model: LanguageModel) -> list[Pair]:
    """The roles of every layer, in order."""
    return [pair for group in model.groups for pair in group.period * group.repeats]


def attention_of(model: LanguageModel, *kinds: type) -> list[Any]:
    """The mixer of every layer; NoPlace names the first that is none of `kinds`, by default GQA."""
    return _all(model, 0, model.mixer, *(kinds or (GQA,)))


def ffns_of(model: LanguageModel, *kinds: type) -> list[Any]:
    """The ffn of every layer; NoPlace names the first that is none of `kinds`, by default MLP."""
    return _all(model, 1, model.ffn, *(kinds or (MLP,)))


def _all(model: LanguageModel, side: int, make: Any, *kinds: type) -> list[Any]:
    made = {role: make(role) for role in dict.fromkeys(pair[side] for pair in layers_of(model))}
    for role, layer in made.items():
        if type(layer) not in kinds:
            raise NoClass(f"layers of role {role!r} are {type(layer).__name__}, for which it has no class")
    return [made[pair[side]] for pair in layers_of(model)]


def common_keys(model: LanguageModel) -> Node:
    """The keys every Llama-like class of dense layers shares."""
    return {**attention_keys(model), **dense_keys(ffns_of(model)[0])}


def dense_keys(ffn: MLP) -> Node:
    """Of a gated feed-forward layer."""
    if ffn.activation not in WRITTEN:
        raise NoPlace(f"its feed-forward layers have no activation {ffn.activation}")
    return {"intermediate_size": ffn.width, "hidden_act": WRITTEN[ffn.activation]}


def attention_keys(model: LanguageModel) -> Node:
    """The keys of all but the feed-forward layers."""
    mixer = attention_of(model)[0]
    turning = next((m.rope for m in attention_of(model) if m.rope is not None), None)
    if turning is None:
        raise NoPlace("no layer has a rotary embedding (rope: null), which its class always has")
    keys = rope_keys(turning, model.max_seq_len)
    if keys is None:
        raise NoPlace(f"{type(turning).__name__} has no rope_type")
    return {
        **top_keys(model),
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.kv_heads,
        "head_dim": mixer.key_dim,
        "attention_bias": mixer.qkv_bias,
        **keys,
    }


def top_keys(model: LanguageModel) -> Node:
    """Of the model itself."""
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "num_hidden_layers": model.num_layers,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
    }


def sliding_keys(model: LanguageModel) -> Node:
    """sliding_window and layer_types of a model some of whose layers see only a window."""
    windows = [mixer.window for mixer in attention_of(model)]
    return {
        "sliding_window": next((w for w in windows if w is not None), None),
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
    }
