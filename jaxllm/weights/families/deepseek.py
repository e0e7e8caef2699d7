"""DeepSeek V2 and V3: multi-head latent attention; after some dense layers, fine-grained experts beside shared ones.

The norms of both latents always have eps 1e-6, whatever rms_norm_eps says. V2 and (with `rope_interleave`) V3 pair even and odd channels.
V2 chooses by softmax, within the groups of the best single expert, and does not renormalise; V3 by sigmoid and a bias, within the
groups of the best two. Draft layers behind the last one (multi-token prediction) become the model's `mtp`, where the file has them; of V2,
and copies of embedding and head in them, they are left aside.
"""

from collections.abc import Mapping
from typing import Any

from jaxllm.layers.mla import MLA
from jaxllm.layers.mlp import MLP
from jaxllm.layers.moe import MoE
from jaxllm.layers.router import SoftmaxRouter
from jaxllm.model import LanguageModel
from jaxllm.weights.config_json import ConfigJson
from jaxllm.weights.families.common import (
    GATED_MLP,
    OUTSIDE,
    PRE_NORMS,
    attention_of,
    dense_keys,
    ffns_of,
    linears,
    mlp,
    model_node,
    norms,
    partial,
    top_keys,
    vectors,
)
from jaxllm.weights.families.experts import (
    expert_rules,
    experts,
    router,
    routing_of,
    shared_count,
    shared_rules,
    sigmoid_keys,
    sigmoid_router,
)
from jaxllm.weights.family import Family, Node, NoPlace, Rule
from jaxllm.weights.forms import Linear, PerHead
from jaxllm.weights.rope import rope_keys, rope_node

LATENT_EPS = 1e-6
DRAFT_LAYERS = ("num_mtp_layers", "num_nextn_predict_layers")


def latent_attention(c: ConfigJson, rope: Node | None, *, q_rank: int | None = 1536) -> Node:
    """A node of multi-head latent attention. q_rank: what the class takes where config.json has none."""
    bias = c.flag("attention_bias")
    for key in ("num_key_value_heads", "head_dim", "qk_head_dim"):  # follow from the others
        c.get(key)
    return partial(
        "mla.MLA",
        num_heads=c.whole("num_attention_heads"),
        q_lora_rank=None if c.get("q_lora_rank", q_rank) is None else c.whole("q_lora_rank", q_rank),
        kv_lora_rank=c.whole("kv_lora_rank", 512),
        qk_nope_head_dim=c.whole("qk_nope_head_dim", 128),
        qk_rope_head_dim=c.whole("qk_rope_head_dim", 64),
        v_head_dim=c.whole("v_head_dim", 128),
        rope=rope,
        latent_norm_eps=LATENT_EPS,
        qkv_bias=bias,
        out_bias=bias,
    )


def draft_layers(config: Mapping[str, Any], tensors: str = ".*") -> tuple[str, ...]:
    """Patterns of the tensors of draft layers, numbered on from the last layer: all, or those whose rest of the name is `tensors`."""
    count = max(n if isinstance(n := config.get(key), int) else 0 for key in DRAFT_LAYERS)
    first = config.get("num_hidden_layers", 0)
    return tuple(rf"model\.layers\.{first + n}\.{tensors}" for n in range(count))


def draft_copies(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Patterns of what draft layers hold of the trunk's once more: its embedding and head."""
    return draft_layers(config, r"(?:embed_tokens|shared_head\.head)\.weight")


def dense_first(c: ConfigJson, default: int) -> list[str]:
    """The ffn role of each layer: dense ones first, then every `moe_layer_freq`-th with experts."""
    first, every = c.get("first_k_dense_replace"), c.whole("moe_layer_freq", 1)
    first = default if first is None else first
    if not isinstance(first, int):
        raise c.error(f"first_k_dense_replace={first!r}: expected a whole number")
    return ["moe" if i >= first and not i % every else "dense" for i in range(c.whole("num_hidden_layers"))]


def draft_modules(c: ConfigJson, ffn: str) -> Node:
    """`{"mtp": ..}` where the file holds draft layers: modules in a chain that see the trunk after its final norm."""
    counts = {key: c.whole(key) for key in DRAFT_LAYERS if c.get(key)}
    c.only("mtp_hidden_states_first", False)
    if len(set(counts.values())) > 1:
        raise c.error(" and ".join(f"{key}={n}" for key, n in counts.items()) + " contradict each other")
    if not counts or not c.has(f"model.layers.{c.whole('num_hidden_layers')}.eh_proj.weight"):
        return {}
    depth = next(iter(counts.values()))
    return {"mtp": partial("mtp.ChainedMTP", depth=depth, mixer="global", ffn=ffn, hidden="post_norm")}


def _model(c: ConfigJson, interleaved: bool, layers: list[str], moe: Node | None, mlp_bias: bool = False) -> Node:
    c.get("ep_size")
    mixer = latent_attention(c, rope_node(c, interleaved=interleaved))
    ffns = {"dense": mlp(c, bias=mlp_bias)} | ({} if moe is None else {"moe": moe})
    return model_node(c, [("global", role) for role in layers], {"global": mixer}, ffns, **draft_modules(c, layers[-1]))


def _experts(
    c: ConfigJson, layers: list[str], router: Node, *, count: int, used: int, width: int, shared: int
) -> Node | None:
    """The arguments are what the class takes where config.json has none; keys of experts that are not there are left unread."""
    fields = {
        "count": c.whole("n_routed_experts", count),
        "used": c.whole("num_experts_per_tok", used),
        "width": c.whole("moe_intermediate_size", width),
        "shared_experts": c.get("n_shared_experts", shared) or 0,
    }
    return experts(c, router, **fields) if "moe" in layers else None


def _deepseek_v3(c: ConfigJson) -> Node:
    layers = dense_first(c, 3)
    c.only("scoring_func", "sigmoid")
    c.only("topk_method", "noaux_tc")
    router = sigmoid_router(c, groups=8, top=4, scale=2.5)
    moe = _experts(c, layers, router, count=256, used=8, width=2048, shared=1)
    return _model(c, c.flag("rope_interleave", True), layers, moe)


def _deepseek_v2(c: ConfigJson) -> Node:
    layers = dense_first(c, 0)
    c.only("scoring_func", "softmax")
    c.only("norm_topk_prob", False, why=": the class ignores it, the authors' code does not")
    c.only("topk_method", "greedy", "group_limited_greedy")
    groups = {}
    if c.get("topk_method") == "group_limited_greedy":
        groups = {"num_groups": c.whole("n_group"), "top_groups": c.whole("topk_group")}
    for key in ("n_group", "topk_group"):
        c.get(key)
    chosen = router("SoftmaxRouter", renormalise=False, scale=c.number("routed_scaling_factor", 1.0), **groups)
    moe = _experts(c, layers, chosen, count=64, used=6, width=1407, shared=2)
    return _model(c, interleaved=True, layers=layers, moe=moe, mlp_bias=c.flag("mlp_bias"))


def latent_keys(mixer: MLA) -> Node:
    """Of multi-head latent attention."""
    r, n, o, v = mixer.sizes
    return {
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_heads,
        "q_lora_rank": mixer.q_lora_rank,
        "kv_lora_rank": r,
        "qk_nope_head_dim": n,
        "qk_rope_head_dim": o,
        "v_head_dim": v,
        "attention_bias": mixer.qkv_bias,
    }


def _keys(model: LanguageModel) -> tuple[Node, MoE | None]:
    """(all but how experts are chosen, the experts)."""
    mixer = attention_of(model, MLA)[0]
    if mixer.rope is None:
        raise NoPlace("no layer has a rotary embedding (rope: null), which its class always has")
    rope = rope_keys(mixer.rope, model.max_seq_len)
    if rope is None:
        raise NoPlace(f"{type(mixer.rope).__name__} has no rope_type")
    layers = ffns_of(model, MLP, MoE)
    dense = next((layer for layer in layers if isinstance(layer, MLP)), None)
    moe = next((layer for layer in layers if isinstance(layer, MoE)), None)
    first = model.num_layers if moe is None else layers.index(moe)
    keys = {
        **top_keys(model),
        **latent_keys(mixer),
        "intermediate_size": 1 if moe is None else moe.d_expert,
        "hidden_act": "silu",
        **({} if dense is None else dense_keys(dense)),
        "first_k_dense_replace": first,
        **rope,
    }
    if moe is not None:
        keys |= {
            "n_routed_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.d_expert,
            "n_shared_experts": shared_count(moe),
            "moe_layer_freq": 1,
        }
    return keys, moe


def draft_keys(model: LanguageModel) -> Node:
    """How many draft layers there are, by both names; whether they are of this kind is seen when the answer is read back."""
    heads = model.mtp_heads()
    return dict.fromkeys(DRAFT_LAYERS, 0 if heads is None else heads.depth)


def _deepseek_v3_keys(model: LanguageModel) -> Node:
    keys, moe = _keys(model)
    rope = attention_of(model, MLA)[0].rope
    chosen = {} if moe is None else sigmoid_keys(moe)
    return {**keys, **chosen, "rope_interleave": rope is not None and rope.interleaved, **draft_keys(model)}


def _deepseek_v2_keys(model: LanguageModel) -> Node:
    keys, moe = _keys(model)
    dense = next((layer for layer in ffns_of(model, MLP, MoE) if isinstance(layer, MLP)), None)
    keys["mlp_bias"] = dense is not None and dense.bias
    if moe is None:
        return keys
    chosen = routing_of(moe, SoftmaxRouter)
    if chosen.renormalise:
        raise NoPlace("it does not renormalise the weights of experts (router.renormalise: true)")
    grouped = (chosen.num_groups or 1) > 1
    return {
        **keys,
        "routed_scaling_factor": chosen.scale,
        "topk_method": "group_limited_greedy" if grouped else "greedy",
        "n_group": chosen.num_groups,
        "topk_group": chosen.top_groups,
    }


LATENT_ATTENTION = (
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
)
RULES = (
    *OUTSIDE,
    *LATENT_ATTENTION,
    *GATED_MLP,
    *expert_rules(),
    *shared_rules("mlp.shared_experts"),
    *PRE_NORMS,
)
# A draft layer's join and the norm before the head; its copies of embedding and head are the trunk's and are not read.
DRAFT = (
    *norms(("enorm", "enorm"), ("hnorm", "hnorm"), ("norm", "shared_head.norm")),
    Rule(("eh_proj",), "model.layers.{i}.eh_proj.weight", Linear(inputs=2)),
)
DEEPSEEK_V3 = Family(
    ("deepseek_v3",),
    ("DeepseekV3ForCausalLM",),
    _deepseek_v3,
    _deepseek_v3_keys,
    RULES,
    aside=draft_copies,
    draft=DRAFT,
)
DEEPSEEK_V2 = Family(("deepseek_v2",), ("DeepseekV2ForCausalLM",), _deepseek_v2, _deepseek_v2_keys, RULES)
