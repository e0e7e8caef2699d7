"""Qwen3-Next: three layers of gated DeltaNet to one of gated attention; experts with a gated shared one; every norm is (1 + w).

One tensor holds all that linear attention projects, key head by key head; queries and their gates share one, head by head.
"""

from jaxllm.layers.gdn import GatedDeltaNet
from jaxllm.layers.gqa import GQA
from jaxllm.model import LanguageModel
from jaxllm.weights.config_json import ConfigJson
from jaxllm.weights.families.common import (
    LLAMA_RULES,
    attention_of,
    gqa,
    mlp,
    model_node,
    norms,
    partial,
    top_keys,
    vectors,
)
from jaxllm.weights.families.experts import sparse_layers
from jaxllm.weights.families.kimi import KINDS
from jaxllm.weights.families.qwen_moe import QWEN_EXPERTS, qwen_expert_keys, qwen_experts
from jaxllm.weights.family import Family, Node, NoPlace, Rule
from jaxllm.weights.forms import Grouped, Linear, Same, Taps
from jaxllm.weights.rope import rope_keys, rope_node

PARTIAL = 0.25  # of each head turns, where config.json says nothing


def _mixer_roles(c: ConfigJson) -> list[str]:
    count, every = c.whole("num_hidden_layers"), c.whole("full_attention_interval", 4)
    types = c.get("layer_types")
    if types is None:
        types = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)]
    if not isinstance(types, list) or len(types) != count or not set(types) <= KINDS.keys():
        raise c.error(f"layer_types={types!r}: expected {count} entries, {' or '.join(KINDS)}")
    return [KINDS[kind] for kind in types]


def _qwen3_next(c: ConfigJson) -> Node:
    c.only("attention_bias", False)
    rope = rope_node(c)
    rope.setdefault("partial", PARTIAL)
    full = gqa(c, rope=rope, qk_norm=True, qk_norm_weight="zero_centred", gate=True)
    full.setdefault("head_dim", 256)
    linear = partial(
        "gdn.GatedDeltaNet",
        num_k_heads=c.whole("linear_num_key_heads", 16),
        num_v_heads=c.whole("linear_num_value_heads", 32),
        head_k_dim=c.whole("linear_key_head_dim", 128),
        head_v_dim=c.whole("linear_value_head_dim", 128),
        conv_size=c.whole("linear_conv_kernel_dim", 4),
    )
    moe = qwen_experts(c, count=512, used=10, width=512, shared=512, renormalise=True)
    layers = list(zip(_mixer_roles(c), sparse_layers(c), strict=True))
    ffns = {"dense": mlp(c), "moe": moe}
    norm = partial("norm.RMSNorm", zero_centred=True)
    return model_node(c, layers, {"linear": linear, "global": full}, ffns, norm=norm)


def _split(model: LanguageModel) -> tuple[GatedDeltaNet | None, GQA | None]:
    """The first layer of each kind."""
    mixers = attention_of(model, GatedDeltaNet, GQA)
    linear = next((m for m in mixers if isinstance(m, GatedDeltaNet)), None)
    return linear, next((m for m in mixers if isinstance(m, GQA)), None)


def _qwen3_next_keys(model: LanguageModel) -> Node:
    linear, full = _split(model)
    if linear is None or full is None:
        raise NoPlace("it has both linear and full attention")
    rope = None if full.rope is None else rope_keys(full.rope, model.max_seq_len)
    if rope is None:
        raise NoPlace("full attention needs a rotary embedding that has a rope_type")
    _, k, v = linear.state_sizes
    mixers = attention_of(model, GatedDeltaNet, GQA)
    return {
        **top_keys(model),
        "num_attention_heads": full.num_heads,
        "num_key_value_heads": full.kv_heads,
        "head_dim": full.key_dim,
        "attention_bias": False,
        "linear_num_key_heads": linear.key_heads,
        "linear_num_value_heads": linear.num_v_heads,
        "linear_key_head_dim": k,
        "linear_value_head_dim": v,
        "linear_conv_kernel_dim": linear.conv_size,
        "layer_types": ["full_attention" if isinstance(m, GQA) else "linear_attention" for m in mixers],
        **qwen_expert_keys(model, shared=True),
        "partial_rotary_factor": 1.0,
        **rope,
    }


def _grouped(model: LanguageModel) -> tuple[Rule, ...]:
    linear, full = _split(model)
    rules = []
    if full is not None:
        query = ("mixer/q_proj", "mixer/gate_proj")
        rules += [Rule(query, "model.layers.{i}.self_attn.q_proj.weight", Grouped(full.num_heads))]
    if linear is not None:
        form = Grouped(linear.key_heads)
        wide = ("mixer/q_proj", "mixer/k_proj", "mixer/v_proj", "mixer/g_proj")
        narrow = ("mixer/b_proj", "mixer/a_proj")
        rules += [Rule(wide, "model.layers.{i}.linear_attn.in_proj_qkvz.weight", form)]
        rules += [Rule(narrow, "model.layers.{i}.linear_attn.in_proj_ba.weight", form)]
    return tuple(rules)


_CONV = ("mixer/q_conv", "mixer/k_conv", "mixer/v_conv")
LINEAR_ATTENTION = (
    Rule(_CONV, "model.layers.{i}.linear_attn.conv1d.weight", Taps()),
    Rule(("mixer/A_log",), "model.layers.{i}.linear_attn.A_log", Same()),
    *vectors(("mixer/dt_bias", "linear_attn.dt_bias")),
    *norms(("mixer/o_norm", "linear_attn.norm")),
    Rule(("mixer/o_proj",), "model.layers.{i}.linear_attn.out_proj.weight", Linear(2), beside="mixer/A_log"),
)
QWEN3_NEXT = Family(
    ("qwen3_next",),
    ("Qwen3NextForCausalLM",),
    _qwen3_next,
    _qwen3_next_keys,
    (*LINEAR_ATTENTION, *LLAMA_RULES, *QWEN_EXPERTS),
    ignore=(r"mtp\..*", r".*\.rotary_emb\.inv_freq"),
    by_size=_grouped,
)
