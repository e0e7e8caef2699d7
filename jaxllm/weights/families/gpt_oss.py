"""gpt-oss: its attention (sinks everywhere, alternating windows, biases, YaRN).

Its feed-forward layers are all mixtures of experts, which are refused by name.
"""

from jaxllm.model import LanguageModel
from jaxllm.weights.config_json import ConfigJson
from jaxllm.weights.families.common import ATTENTION, OUTSIDE, PRE_NORMS, gqa, layer_types
from jaxllm.weights.family import Family, Node, NoPlace, Rule
from jaxllm.weights.forms import Same
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
    raise c.error(
        f"layer 0 is a mixture of {c.get('num_local_experts', 128)} experts, which is not available yet; only gpt-oss attention is"
    )


def _gpt_oss_keys(model: LanguageModel) -> Node:
    raise NoPlace("its feed-forward layers are all mixtures of experts")


GPT_OSS = Family(
    ("gpt_oss",),
    ("GptOssForCausalLM",),
    _gpt_oss,
    _gpt_oss_keys,
    (*OUTSIDE, *ATTENTION, Rule(("mixer/sinks",), "model.layers.{i}.self_attn.sinks", Same()), *PRE_NORMS),
)
