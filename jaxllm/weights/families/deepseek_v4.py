"""DeepSeek-V4: compressed attention in two densities beside a window, hyper-connections, experts by hash in the first layers.

Released files name tensors in their own way, and the class saves most of them so too. `compress_ratios` says what each layer is: 0 a
window alone, 4 entries of a choice, 128 all entries. Layers with entries turn by tables of their own (`compress`), whose YaRN never
scales cos and sin.
"""

import dataclasses
from typing import Any

from jaxllm.layers.csa import CompressedAttention
from jaxllm.layers.hyper_connections import HyperConnections
from jaxllm.layers.moe import MoE
from jaxllm.layers.rope import RoPE, YaRN
from jaxllm.layers.router import HashRouter, SqrtSoftplusRouter
from jaxllm.model import LanguageModel
from jaxllm.weights.config_json import ConfigJson
from jaxllm.weights.families.common import attention_of, ffns_of, model_node, partial, top_keys
from jaxllm.weights.families.deepseek import DRAFT_LAYERS
from jaxllm.weights.families.experts import compute_router, experts, shared_count
from jaxllm.weights.family import Family, Node, NoPlace, Rule
from jaxllm.weights.forms import Blocks, Linear, Rows, Same, Table
from jaxllm.weights.rope import TARGET

WINDOW, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
ROLES = {WINDOW: "swa", SPARSE: "csa", HEAVY: "hca"}
RATIOS = {0: WINDOW, 4: SPARSE, 128: HEAVY}
YARN_KEYS = {
    "factor": "factor",
    "original_max_position": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}

# ---- from config.json ---------------------------------------------------------------------------------------------------------------


def _kinds(c: ConfigJson) -> list[str]:
    count, types, ratios = c.whole("num_hidden_layers"), c.get("layer_types"), c.get("compress_ratios")
    if types is None and ratios is not None:
        types = [RATIOS.get(ratio, str(ratio)) for ratio in ratios[:count]]
    if types is None:
        raise c.error(
            "compress_ratios or layer_types must say what each layer is: classes and released models differ in the default"
        )
    if not isinstance(types, list) or len(types) != count or not set(types) <= ROLES.keys():
        raise c.error(f"layer_types={types!r}: expected {count} entries, {', '.join(ROLES)}")
    return types


def _ffns(c: ConfigJson, count: int) -> list[str]:
    types, hashed = c.get("mlp_layer_types"), c.get("num_hash_layers", 3)
    if types is None:
        types = ["hash_moe" if i < hashed else "moe" for i in range(count)]
    if not isinstance(types, list) or len(types) != count or not set(types) <= {"hash_moe", "moe"}:
        raise c.error(f"mlp_layer_types={types!r}: expected {count} entries, hash_moe or moe")
    return ["hash" if kind == "hash_moe" else "moe" for kind in types]


def _ropes(c: ConfigJson) -> tuple[Node, Node]:
    """Of layers of a window alone, and of layers with entries."""
    table = c.get("rope_parameters") or c.get("rope_scaling") or {}
    c.get("rope_scaling")
    main, compress = (table.get(key, {} if "main" in table else table) for key in ("main", "compress"))
    thetas = c.number("rope_theta", 1e4), c.number("compress_rope_theta", 1.6e5)
    nested = "main" in table
    theta, far = (t.get("rope_theta", own) if nested else own for t, own in zip((main, compress), thetas, strict=True))
    near = {"_target_": f"{TARGET}RoPE", "theta": float(theta), "interleaved": True}
    kind = compress.get("rope_type", compress.get("type", "default"))
    if kind not in ("default", "yarn") or compress.get("attention_factor", 1.0) != 1.0:
        raise c.error(
            f"rope_parameters: {kind!r} with attention_factor={compress.get('attention_factor')} is not available"
        )
    node = {"_target_": f"{TARGET}RoPE", "theta": float(far), "interleaved": True}
    if kind == "yarn":
        node |= {"_target_": f"{TARGET}YaRN", "attention_factor": 1.0}
        node |= {ours: compress[key] for ours, key in YARN_KEYS.items() if compress.get(key) is not None}
    return near, node


def _mixers(c: ConfigJson) -> Node:
    near, far = _ropes(c)
    c.only("num_key_value_heads", 1)
    c.only("attention_bias", False)
    k = c.whole("head_dim", 512)
    turned = c.get("qk_rope_head_dim")
    share = c.get("partial_rotary_factor")
    base = partial(
        "csa.CompressedAttention",
        num_heads=c.whole("num_attention_heads", 64),
        head_dim=k,
        q_lora_rank=c.whole("q_lora_rank", 1024),
        rope_head_dim=int(turned if turned is not None else k * (64 / 512 if share is None else share)),
        window=c.whole("sliding_window", 128),
        out_groups=c.whole("o_groups", 8),
        out_lora_rank=c.whole("o_lora_rank", 1024),
    )
    rates = {SPARSE: 4, HEAVY: 128} | (c.get("compress_rates") or {})
    indexer = {"top_k": c.whole("index_topk", 512), "index_heads": c.whole("index_n_heads", 64)}
    indexer["index_head_dim"] = c.whole("index_head_dim", 128)
    csa = {"rope": far, "compress_rate": c.get("compress_rate_csa", rates[SPARSE]), "overlap": True, **indexer}
    return {
        "swa": base | {"rope": near},
        "csa": base | csa,
        "hca": base | {"rope": far, "compress_rate": c.get("compress_rate_hca", rates[HEAVY])},
    }


def _deepseek_v4(c: ConfigJson) -> Node:
    kinds = _kinds(c)
    ffns = _ffns(c, len(kinds))
    c.only("scoring_func", "sqrtsoftplus")
    c.only("norm_topk_prob", True)
    c.only("mlp_bias", False)
    c.only("router_jitter_noise", 0.0)
    for key in ("topk_method", "expert_dtype", "n_group", "topk_group", "intermediate_size"):
        c.get(key)
    for key in DRAFT_LAYERS:
        if c.get(key):
            c.note(f"{key}={c.get(key)}: layers that draft tokens are not read")
    scale, limit = c.number("routed_scaling_factor", 1.5), c.number("swiglu_limit", 10.0)

    def moe(router: Node) -> Node:
        sizes = {"count": c.whole("n_routed_experts", 256), "used": c.whole("num_experts_per_tok", 6)}
        sizes["width"] = c.whole("moe_intermediate_size", 2048)
        shared = c.get("n_shared_experts", 1) or 0
        return experts(c, router, **sizes, shared_experts=shared, glu="clamped", glu_limit=limit)

    hashed = compute_router("HashRouter", vocab_size=c.whole("vocab_size"), scale=scale)
    chosen = compute_router("SqrtSoftplusRouter", scale=scale, balance=None)
    streams = partial(
        "hyper_connections.HyperConnections",
        streams=c.whole("hc_mult", 4),
        sinkhorn_iterations=c.whole("hc_sinkhorn_iters", 20),
        hc_eps=c.number("hc_eps", 1e-6),
    )
    return model_node(
        c,
        list(zip([ROLES[kind] for kind in kinds], ffns, strict=True)),
        _mixers(c),
        {"hash": moe(hashed), "moe": moe(chosen)},
        residual=streams,
        norm=partial("norm.RMSNorm", round_first=False),
        max_seq_len=c.whole("max_position_embeddings", 1048576),
    )


# ---- to config.json -----------------------------------------------------------------------------------------------------------------


def _kind(mixer: CompressedAttention) -> str:
    if mixer.compress_rate is None:
        return WINDOW
    if mixer.overlap != (mixer.top_k is not None):
        raise NoPlace("entries overlap (overlap) where an indexer chooses among them (top_k), and only there")
    return SPARSE if mixer.overlap else HEAVY


def _rope_keys(mixers: list[CompressedAttention], kinds: list[str]) -> Node:
    k, _, turned = mixers[0].widths
    tables: dict[str, Any] = {}
    for name, of_kind in (("main", {WINDOW}), ("compress", {SPARSE, HEAVY})):
        ropes = [m.rope for m, kind in zip(mixers, kinds, strict=True) if kind in of_kind]
        one = ropes[0] if ropes else RoPE(interleaved=True)
        if type(one) not in (RoPE, YaRN) or (name == "main" and type(one) is YaRN):
            raise NoPlace(f"layers of {' and '.join(sorted(of_kind))} have a {type(one).__name__}")
        table = {"rope_type": "default", "rope_theta": one.theta, "partial_rotary_factor": turned / k}
        if isinstance(one, YaRN):
            table |= {"rope_type": "yarn", "attention_factor": 1.0}
            table |= {key: getattr(one, ours) for ours, key in YARN_KEYS.items()}
        tables[name] = table
    return {"rope_parameters": tables, "partial_rotary_factor": turned / k, "qk_rope_head_dim": turned}


def _deepseek_v4_keys(model: LanguageModel) -> Node:
    mixers = attention_of(model, CompressedAttention)
    kinds = [_kind(mixer) for mixer in mixers]
    by_kind = dict(zip(kinds, mixers, strict=True))
    one, csa, hca = mixers[0], by_kind.get(SPARSE), by_kind.get(HEAVY)
    streams = model.residual_site("out")
    if not isinstance(streams, HyperConnections) or streams.ends != "weighted":
        raise NoPlace("its residual is hyper-connections with a weighted end")
    moes = ffns_of(model, MoE)
    moe, routers = moes[0], [layer.router_layer() for layer in moes]
    if any(type(router) not in (HashRouter, SqrtSoftplusRouter) for router in routers):
        raise NoPlace("experts are chosen by hash or by sqrt(softplus)")
    rates = {} if csa is None else {SPARSE: csa.compress_rate}
    rates |= {} if hca is None else {HEAVY: hca.compress_rate}
    indexer = {}
    if csa is not None:
        indexer = {"index_topk": csa.top_k, "index_n_heads": csa.index_heads, "index_head_dim": csa.widths[1]}
    return {
        **top_keys(model),
        "num_attention_heads": one.num_heads,
        "num_key_value_heads": 1,
        "head_dim": one.widths[0],
        "q_lora_rank": one.q_lora_rank,
        "sliding_window": one.window,
        "o_groups": one.out_groups,
        "o_lora_rank": one.out_lora_rank,
        "layer_types": kinds,
        "compress_rates": {SPARSE: 4, HEAVY: 128} | rates,
        **indexer,
        **_rope_keys(mixers, kinds),
        "mlp_layer_types": ["hash_moe" if type(router) is HashRouter else "moe" for router in routers],
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.d_expert,
        "n_shared_experts": shared_count(moe),
        "routed_scaling_factor": routers[0].scale,
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "swiglu_limit": moe.glu_limit,
        "hidden_act": "silu",
        "hc_mult": streams.streams,
        "hc_sinkhorn_iters": streams.sinkhorn_iterations,
        "hc_eps": streams.hc_eps,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": model.max_seq_len or 1048576,
    }


# ---- the tensors --------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Names:
    """Rules of parameters under `ours` whose tensors lie under `layers.i.theirs`."""

    ours: str
    theirs: str

    def rules(self, form: Any, *pairs: tuple[str, str]) -> tuple[Rule, ...]:
        return tuple(Rule((f"{self.ours}{a}",), f"layers.{{i}}.{self.theirs}{b}", form) for a, b in pairs)


def _compressor(ours: str, theirs: str) -> tuple[Rule, ...]:
    names = _Names(ours, theirs)
    products = names.rules(Linear(), ("kv_proj", "wkv.weight"), ("gate_proj", "wgate.weight"))
    return (*products, *names.rules(Same(), ("bias", "ape"), ("norm/scale", "norm.weight")))


def _streams(ours: str, theirs: str) -> tuple[Rule, ...]:
    names = _Names(ours, theirs)
    return (*names.rules(Rows(), ("fn", "fn")), *names.rules(Same(), ("base", "base"), ("gains", "scale")))


UNITS = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
ATTENTION, FFN, EACH = _Names("mixer/", "attn."), _Names("ffn/", "ffn."), "ffn.experts.{e}."
RELEASED = (
    Rule(("embed",), "embed.weight", Same()),
    Rule(("final_norm/scale",), "norm.weight", Same()),
    Rule(("lm_head",), "head.weight", Linear()),
    Rule(("residual_out/fn",), "hc_head_fn", Rows()),
    Rule(("residual_out/base",), "hc_head_base", Same()),
    Rule(("residual_out/gains",), "hc_head_scale", Same()),
    *ATTENTION.rules(Linear(), ("q_a_proj", "wq_a.weight"), ("q_b_proj", "wq_b.weight"), ("kv_proj", "wkv.weight")),
    *ATTENTION.rules(Same(), ("q_a_norm/scale", "q_norm.weight"), ("kv_norm/scale", "kv_norm.weight"), ("sinks", "attn_sink")),
    *ATTENTION.rules(Blocks(), ("o_a_proj", "wo_a.weight")),
    *ATTENTION.rules(Linear(2), ("o_b_proj", "wo_b.weight")),
    *_compressor("mixer/compress/", "attn.compressor."),
    *_compressor("mixer/index/compress/", "attn.indexer.compressor."),
    *ATTENTION.rules(Linear(), ("index/q_proj", "indexer.wq_b.weight"), ("index/head_proj", "indexer.weights_proj.weight")),
    *FFN.rules(Linear(), ("router/kernel", "gate.weight")),
    *FFN.rules(Same(), ("router/bias", "gate.bias")),
    *FFN.rules(Table(), ("router/table", "gate.tid2eid")),
    *(Rule((f"ffn/{a}",), f"layers.{{i}}.{EACH}{b}.weight", Linear()) for a, b in UNITS),
    *FFN.rules(Linear(), *((f"shared/{a}", f"shared_experts.{b}.weight") for a, b in UNITS)),
    *_Names("", "").rules(Same(), ("norm_mixer/scale", "attn_norm.weight"), ("norm_ffn/scale", "ffn_norm.weight")),
    *_streams("residual_mixer/", "hc_attn_"),
    *_streams("residual_ffn/", "hc_ffn_"),
)  # fmt: skip
# The class saves some under other names, and what is not the head's behind "model.".
SAVED = {
    "embed.weight": "embed_tokens.weight",
    "hc_head_fn": "hc_head.hc_fn",
    "hc_head_base": "hc_head.hc_base",
    "hc_head_scale": "hc_head.hc_scale",
    "layers.{i}.attn.kv_norm.weight": "layers.{i}.attn.norm.weight",
}
RULES = RELEASED + tuple(
    dataclasses.replace(rule, theirs="model." + SAVED.get(rule.theirs, rule.theirs))
    for rule in RELEASED
    if rule.theirs != "head.weight"
)
DEEPSEEK_V4 = Family(
    ("deepseek_v4",),
    ("DeepseekV4ForCausalLM",),
    _deepseek_v4,
    _deepseek_v4_keys,
    RULES,
    prefix="",
    ignore=(r"mtp\..*",),
)
