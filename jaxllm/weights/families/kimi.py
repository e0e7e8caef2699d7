"""Kimi Linear: three layers of Kimi Delta Attention to one of latent attention without rotation; experts as in DeepSeek-V3.

Released files call a layer of experts `block_sparse_moe` and a dense one `mlp`; transformers saves both under the first name.
"""

from typing import Any

from jaxllm.layers.kda import KDA
from jaxllm.layers.mla import MLA
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
    norms,
    partial,
    top_keys,
    vectors,
)
from jaxllm.weights.families.deepseek import LATENT_ATTENTION, dense_first, latent_attention, latent_keys
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
from jaxllm.weights.forms import Padded, Taps

SPELLINGS = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_local_experts": "num_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
KINDS = {"linear_attention": "linear", "full_attention": "global"}


def mixer_roles(c: ConfigJson, told: dict[str, Any]) -> list[str]:
    """The mixer role of each layer, by `layer_types` or by the lists of layers, counted from 1, of `linear_attn_config`."""
    count, types = c.whole("num_hidden_layers"), c.get("layer_types")
    if types is None and {"full_attn_layers", "kda_layers"} <= told.keys():
        full, linear = (told[key] for key in ("full_attn_layers", "kda_layers"))
        if sorted([*full, *linear]) != list(range(1, count + 1)):
            raise c.error(f"linear_attn_config: full_attn_layers and kda_layers must name each of 1 to {count} once")
        types = ["full_attention" if i + 1 in full else "linear_attention" for i in range(count)]
    if types is None:
        types = ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(count)]
    if not isinstance(types, list) or len(types) != count or not set(types) <= KINDS.keys():
        raise c.error(f"layer_types={types!r}: expected {count} entries, {' or '.join(KINDS)}")
    return [KINDS[kind] for kind in types]


def _kimi(c: ConfigJson) -> Node:
    c.rename(SPELLINGS)
    for key, value in (("mla_use_nope", True), ("use_grouped_topk", True), ("moe_router_activation_func", "sigmoid")):
        c.only(key, value)
    for key in ("rope_theta", "rope_scaling", "rope_parameters"):  # nothing turns
        c.get(key)
    told = c.get("linear_attn_config") or {}
    mixers = mixer_roles(c, told)
    ffns = named_layers(c, dense_first(c, 1))
    linear = partial(
        "kda.KDA",
        num_heads=told.get("num_heads", c.whole("linear_num_heads", 32)),
        head_dim=told.get("head_dim", c.whole("linear_head_dim", 128)),
        conv_size=told.get("short_conv_kernel_size", c.whole("linear_conv_kernel_dim", 4)),
        gate_form="softplus",
    )
    moe = experts(
        c,
        sigmoid_router(c, scale=2.446),
        count=c.whole("num_experts", 256),
        used=c.whole("num_experts_per_tok", 8),
        width=c.whole("moe_intermediate_size", 1024),
        shared_experts=c.whole("n_shared_experts", 1),
    )
    return model_node(
        c,
        list(zip(mixers, ffns, strict=True)),
        {"linear": linear, "global": latent_attention(c, None, q_rank=None)},
        {"dense": mlp(c), "moe": moe},
        norm_eps=c.number("rms_norm_eps", 1e-5),
        max_seq_len=c.whole("max_position_embeddings", 1048576),
    )


def _kimi_keys(model: LanguageModel) -> Node:
    mixers = attention_of(model, KDA, MLA)
    linear = next((m for m in mixers if isinstance(m, KDA)), None)
    full = next((m for m in mixers if isinstance(m, MLA)), None)
    if linear is None or full is None:
        raise NoPlace("it has both linear and latent attention")
    sparse, dense, moe = split_ffns(model)
    chosen = sigmoid_keys(moe)
    return {
        **top_keys(model),
        **latent_keys(full),
        "linear_num_heads": linear.num_heads,
        "linear_head_dim": linear.state_sizes[1],
        "linear_conv_kernel_dim": linear.conv_size,
        "layer_types": ["linear_attention" if isinstance(m, KDA) else "full_attention" for m in mixers],
        "intermediate_size": moe.d_expert,  # of dense layers, where there are any
        "hidden_act": "silu",
        **({} if dense is None else dense_keys(dense)),
        "mlp_layer_types": ["sparse" if with_experts else "dense" for with_experts in sparse],
        "num_experts": moe.num_experts,
        "num_experts_per_token": moe.top_k,
        "moe_intermediate_size": moe.d_expert,
        "num_shared_experts": shared_count(moe),
        "moe_renormalize": chosen["norm_topk_prob"],
        "routed_scaling_factor": chosen["routed_scaling_factor"],
        "num_expert_group": chosen["n_group"],
        "topk_group": chosen["topk_group"],
        "model_max_length": model.max_seq_len or 1048576,
    }


def _taps(name: str) -> Rule:
    return Rule((f"mixer/{name}_conv",), f"model.layers.{{i}}.self_attn.{name}_conv1d.weight", Taps())


LINEAR_ATTENTION = (
    *linears(*((f"mixer/{name}", f"self_attn.{name}") for name in ("q_proj", "k_proj", "v_proj", "b_proj"))),
    *linears(*((f"mixer/{name}", f"self_attn.{name}") for name in ("f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"))),
    _taps("q"),
    _taps("k"),
    _taps("v"),
    Rule(("mixer/A_log",), "model.layers.{i}.self_attn.A_log", Padded(2, 1)),
    *vectors(("mixer/dt_bias", "self_attn.dt_bias")),
    *norms(("mixer/o_norm", "self_attn.o_norm")),
)
_DENSE = ("gate_proj", "up_proj", "down_proj")
KIMI_LINEAR = Family(
    ("kimi_linear",),
    ("KimiLinearForCausalLM",),
    _kimi,
    _kimi_keys,
    (
        *OUTSIDE,
        *LINEAR_ATTENTION,
        *LATENT_ATTENTION,
        *GATED_MLP,
        *linears(*((f"ffn/{name}", f"block_sparse_moe.{name}") for name in _DENSE)),
        *expert_rules("block_sparse_moe", "w1", "w3", "w2"),
        *shared_rules("block_sparse_moe.shared_experts"),
        *PRE_NORMS,
    ),
)
