"""nanochat: weightless norms (also right after the embedding, and on q and k after the rotation), relu^2, a softcapped head.

Its rotation turns by the negative angle; see `forms.Linear`.
"""

from jaxllm.model import LanguageModel
from jaxllm.weights.config_json import ConfigJson
from jaxllm.weights.families.common import OUTSIDE, common_keys, gqa, linears, mlp, model_node, partial
from jaxllm.weights.family import Family, Node, NoPlace, Rule
from jaxllm.weights.forms import Linear
from jaxllm.weights.rope import rope_node


def _nanochat(c: ConfigJson) -> Node:
    c.only("attention_bias", False)
    mixer = gqa(c, rope=rope_node(c), qk_norm=True, qk_norm_weight="none", qk_norm_after_rope=True)
    ffn = mlp(c, gated=False)
    return model_node(
        c,
        [("global", "dense")] * c.whole("num_hidden_layers"),
        {"global": mixer},
        {"dense": ffn},
        norm=partial("norm.RMSNorm", weightless=True),
        embed_norm=True,
        logit_softcap=c.get("final_logit_softcapping", 15.0),
    )


def _nanochat_keys(model: LanguageModel) -> Node:
    keys = common_keys(model)
    if keys.get("partial_rotary_factor", 1.0) != 1.0:
        raise NoPlace("its rotation turns whole heads; rope.partial must be 1")
    return {**keys, "final_logit_softcapping": model.logit_softcap}


NANOCHAT = Family(
    ("nanochat",),
    ("NanoChatForCausalLM",),
    _nanochat,
    _nanochat_keys,
    (
        *OUTSIDE,
        Rule(("mixer/q_proj",), "model.layers.{i}.self_attn.q_proj.weight", Linear(swap_halves=True)),
        Rule(("mixer/k_proj",), "model.layers.{i}.self_attn.k_proj.weight", Linear(swap_halves=True)),
        *linears(("mixer/v_proj", "self_attn.v_proj")),
        *linears(("mixer/o_proj", "self_attn.o_proj"), inputs=2),
        *linears(("ffn/up_proj", "mlp.fc1"), ("ffn/down_proj", "mlp.fc2")),
    ),
)
