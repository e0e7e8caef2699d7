"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 whose latent attention looks its keys up; in GLM-5.2 some layers share the choice of another.

Attention pairs even and odd channels in both. The indexer's heads turn half-split in V3.2 and pair neighbours in GLM. Released
indexers turn queries and keys by a Hadamard matrix before they round them, which changes no score; nothing of it is stored.
"""

from typing import Any

from jaxllm.layers.dsa import DSA
from jaxllm.model import LanguageModel
from jaxllm.weights.config_json import ConfigJson
from jaxllm.weights.families.common import (
    GATED_MLP,
    OUTSIDE,
    PRE_NORMS,
    attention_of,
    dense_keys,
    linears,
    mlp,
    model_node,
    top_keys,
)
from jaxllm.weights.families.deepseek import (
    DRAFT_LAYERS,
    LATENT_ATTENTION,
    dense_first,
    draft_layers,
    latent_attention,
    latent_keys,
)
from jaxllm.weights.families.experts import (
    expert_rules,
    experts,
    named_layers,
    shared_count,
    shared_rules,
    sigmoid_keys,
    sigmoid_router,
    split_ffns,
)
from jaxllm.weights.family import Family, Node, NoPlace, Rule
from jaxllm.weights.forms import Same
from jaxllm.weights.rope import rope_keys, rope_node

LETTERS = {"F": "full", "S": "shared"}


def indexer_types(c: ConfigJson) -> list[str]:
    """full or shared, a layer each: a list, a string of F and S, or every `index_topk_freq`-th from an offset on."""
    count = c.whole("num_hidden_layers")
    types, pattern = c.get("indexer_types"), c.get("index_topk_pattern")
    freq, offset = c.get("index_topk_freq") or 1, c.get("index_skip_topk_offset", 2)
    if types is None and pattern is not None:
        types = [LETTERS.get(letter, letter) for letter in pattern]
    if types is None:
        types = ["shared" if max(i - offset + 1, 0) % freq else "full" for i in range(count)]
    if not isinstance(types, list) or len(types) != count or not set(types) <= set(LETTERS.values()):
        raise c.error(f"indexer_types={types!r}: expected {count} entries, full or shared")
    return types


def _model(c: ConfigJson, kinds: list[str], *, interleaved: bool, **defaults: Any) -> Node:
    """defaults: what the class takes where config.json has none."""
    c.only("scoring_func", "sigmoid")
    c.only("topk_method", "noaux_tc")
    for key in ("ep_size", "indexer_types", "layer_types"):
        c.get(key)
    for key in DRAFT_LAYERS:
        if c.get(key):
            c.note(f"{key}={c.get(key)}: layers that draft tokens are not read")
    ffns = named_layers(c, dense_first(c, 3))
    heads = c.whole("index_n_heads", defaults["index_heads"])
    mixer = latent_attention(c, rope_node(c, interleaved=True), q_rank=defaults["q_rank"]) | {
        "_target_": "jaxllm.layers.dsa.DSA",
        "top_k": c.whole("index_topk", 2048),
        "index_heads": heads,
        "index_head_dim": c.whole("index_head_dim", 128),
        "index_interleaved": interleaved,
    }
    moe = experts(
        c,
        sigmoid_router(c, groups=defaults["groups"], top=defaults["top"], scale=2.5),
        count=c.whole("n_routed_experts", 256),
        used=c.whole("num_experts_per_tok", 8),
        width=c.whole("moe_intermediate_size", 2048),
        shared_experts=c.get("n_shared_experts", 1) or 0,
    )
    mixers = {"full": mixer, "shared": mixer | {"indexer": "shared"}}
    layers = list(zip(kinds, ffns, strict=True))
    return model_node(
        c, layers, mixers, {"dense": mlp(c, bias=c.flag("mlp_bias")), "moe": moe}, norm_eps=defaults["eps"]
    )


def _deepseek_v32(c: ConfigJson) -> Node:
    kinds = ["full"] * c.whole("num_hidden_layers")
    eps = c.number("rms_norm_eps", 1e-6)
    return _model(c, kinds, interleaved=False, index_heads=64, q_rank=1536, groups=8, top=4, eps=eps)


def _glm_moe_dsa(c: ConfigJson) -> Node:
    kinds, turned = indexer_types(c), c.flag("indexer_rope_interleave", True)
    eps = c.number("rms_norm_eps", 1e-5)
    c.get("index_share_for_mtp_iteration")  # of draft layers
    return _model(c, kinds, interleaved=turned, index_heads=32, q_rank=2048, groups=1, top=1, eps=eps)


def _keys(model: LanguageModel, interleaved: bool) -> tuple[Node, list[DSA]]:
    mixers = attention_of(model, DSA)
    one = mixers[0]
    if one.rope is None or (rope := rope_keys(one.rope, model.max_seq_len)) is None:
        raise NoPlace("its class always has a rotary embedding of a known kind")
    if one.index_interleaved != interleaved:
        raise NoPlace(f"index_interleaved: {one.index_interleaved}, and its class has {interleaved}")
    sparse, dense, moe = split_ffns(model)
    keys = {
        **top_keys(model),
        **latent_keys(one),
        "index_topk": one.top_k,
        "index_n_heads": one.index_heads,
        "index_head_dim": one.index_width,
        "intermediate_size": moe.d_expert,
        "hidden_act": "silu",
        **({} if dense is None else dense_keys(dense)),
        "mlp_layer_types": ["sparse" if with_experts else "dense" for with_experts in sparse],
        "first_k_dense_replace": sparse.index(True),
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.d_expert,
        "n_shared_experts": shared_count(moe),
        **sigmoid_keys(moe),
        "num_nextn_predict_layers": 0,
        **rope,
    }
    return keys, mixers


def _deepseek_v32_keys(model: LanguageModel) -> Node:
    keys, mixers = _keys(model, False)
    if not all(mixer.owns_indexer for mixer in mixers):
        raise NoPlace("a layer shares the choice of another, and its class has an indexer in each")
    return keys


def _glm_moe_dsa_keys(model: LanguageModel) -> Node:
    keys, mixers = _keys(model, True)
    return {**keys, "indexer_types": [mixer.indexer for mixer in mixers]}


RULES = (
    *OUTSIDE,
    *LATENT_ATTENTION,
    *linears(
        ("mixer/index/q_proj", "self_attn.indexer.wq_b"),
        ("mixer/index/k_proj", "self_attn.indexer.wk"),
        ("mixer/index/head_proj", "self_attn.indexer.weights_proj"),
    ),
    Rule(("mixer/index/k_norm/scale",), "model.layers.{i}.self_attn.indexer.k_norm.weight", Same()),
    Rule(("mixer/index/k_norm/bias",), "model.layers.{i}.self_attn.indexer.k_norm.bias", Same()),
    *GATED_MLP,
    *expert_rules(),
    *shared_rules("mlp.shared_experts"),
    *PRE_NORMS,
)
DEEPSEEK_V32 = Family(
    ("deepseek_v32",), ("DeepseekV32ForCausalLM",), _deepseek_v32, _deepseek_v32_keys, RULES, aside=draft_layers
)
GLM_MOE_DSA = Family(
    ("glm_moe_dsa",), ("GlmMoeDsaForCausalLM",), _glm_moe_dsa, _glm_moe_dsa_keys, RULES, aside=draft_layers
)
