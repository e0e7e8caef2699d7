"""gpt-oss: sinks everywhere, alternating windows, biases, YaRN; experts in every layer, clamped, with biases, chosen by biased logits.

Its files hold the experts of a layer as `[e in out]`, gate and up of each channel next to each other.
"""

from jaxllm.layers.router import TopKSoftmaxRouter
from jaxllm.model import LanguageModel
from jaxllm.ops.glu import GPT_OSS_ALPHA
from jaxllm.weights.config_json import ConfigJson
from jaxllm.weights.families.common import (
    ATTENTION,
    OUTSIDE,
    PRE_NORMS,
    attention_keys,
    gqa,
    layer_types,
    linears,
    model_node,
    partial,
    sliding_keys,
)
from jaxllm.weights.families.experts import compute_router, experts, routing_of, split_ffns
from jaxllm.weights.family import Family, Node, NoPlace, Rule
from jaxllm.weights.forms import Experts, Same
from jaxllm.weights.rope import rope_node

# What the class takes where config.json has no rotary settings.
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096}  # fmt: skip


def attention(c: ConfigJson) -> tuple[list[str], Node]:
    """(the role of each layer, the mixers)."""
    count, bias = c.whole("num_hidden_layers"), c.flag("attention_bias", True)
    spoken = c
    if c.get("rope_parameters") is None and c.get("rope_scaling") is None:
        spoken = ConfigJson({**c.config, "rope_parameters": YARN}, c.where)
    mixer = gqa(c, rope=rope_node(spoken, theta=150000.0), qkv_bias=bias, out_bias=bias, sinks=True)
    mixer.setdefault("head_dim", 64)
    types = layer_types(c, ["full_attention" if i % 2 else "sliding_attention" for i in range(count)])
    roles = ["local" if kind == "sliding_attention" else "global" for kind in types]
    return roles, {"global": mixer, "local": mixer | {"window": c.whole("sliding_window", 128)}}


def _gpt_oss(c: ConfigJson) -> Node:
    c.only("swiglu_alpha", GPT_OSS_ALPHA)
    roles, mixers = attention(c)
    moe = experts(
        c,
        compute_router("TopKSoftmaxRouter", logit_bias=True),
        count=c.whole("num_local_experts", 128),
        used=c.whole("num_experts_per_tok", c.get("experts_per_token") or 4),
        width=c.whole("intermediate_size", 2880),
        glu="gpt_oss",
        glu_limit=c.number("swiglu_limit", 7.0),
        expert_bias=True,
    )
    # The class multiplies by the weight in float32 and rounds once; see RMSNorm.
    norm = partial("norm.RMSNorm", round_first=False)
    layers = [(role, "moe") for role in roles]
    return model_node(c, layers, mixers, {"moe": moe}, norm=norm, norm_eps=c.number("rms_norm_eps", 1e-5))


def _gpt_oss_keys(model: LanguageModel) -> Node:
    sparse, _, moe = split_ffns(model)
    if not all(sparse):
        raise NoPlace("it has experts in every layer")
    if not routing_of(moe, TopKSoftmaxRouter).logit_bias:
        raise NoPlace("its router has a bias (router.logit_bias: true)")
    sliding = sliding_keys(model)
    if sliding["sliding_window"] is None:
        raise NoPlace("some of its layers have a window")
    return {
        **attention_keys(model),
        **sliding,
        "intermediate_size": moe.d_expert,
        "hidden_act": "silu",
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "swiglu_limit": moe.glu_limit,
    }


def _gpt_oss_expert_rules() -> tuple[Rule, ...]:
    stem, form = "model.layers.{i}.mlp.experts.", Experts(outputs_first=False, interleaved=True)
    return (
        Rule(("ffn/gate_proj", "ffn/up_proj"), f"{stem}gate_up_proj", form),
        Rule(("ffn/gate_bias", "ffn/up_bias"), f"{stem}gate_up_proj_bias", form),
        Rule(("ffn/down_proj",), f"{stem}down_proj", Experts(outputs_first=False)),
        Rule(("ffn/down_bias",), f"{stem}down_proj_bias", Experts(outputs_first=False)),
        *linears(("ffn/router/kernel", "mlp.router")),
        Rule(("ffn/router/logit_bias",), "model.layers.{i}.mlp.router.bias", Same()),
    )


SINKS = Rule(("mixer/sinks",), "model.layers.{i}.self_attn.sinks", Same())
GPT_OSS = Family(
    ("gpt_oss",),
    ("GptOssForCausalLM",),
    _gpt_oss,
    _gpt_oss_keys,
    (*OUTSIDE, *ATTENTION, SINKS, *_gpt_oss_expert_rules(), *PRE_NORMS),
)
