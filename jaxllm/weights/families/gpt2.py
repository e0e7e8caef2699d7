"""GPT-2: LayerNorm blocks, learned positions, fused q, k, v with biases, tanh GELU, a tied head. Its Conv1D stores weights `[in, out]`."""

from jaxllm.model import LanguageModel
from jaxllm.weights.config_json import ConfigJson
from jaxllm.weights.families.common import WRITTEN, attention_of, ffns_of, mlp, partial
from jaxllm.weights.family import Family, Node, Rule
from jaxllm.weights.forms import Flat, InOut, Same, Side
from jaxllm.weights.layer_string import layer_string


def _gpt2(c: ConfigJson) -> Node:
    d, heads, positions = c.whole("n_embd"), c.whole("n_head"), c.whole("n_positions")
    c.only("scale_attn_weights", True)
    width = c.whole("n_inner", 4 * d)
    ffn = (
        mlp(c, act_key="activation_function", width_key="n_inner", gated=False, bias=True) if c.get("n_inner") else None
    )
    if ffn is None:
        ffn = _widened(c, width)
    mixer = partial("gqa.GQA", num_heads=heads, num_kv_heads=heads, rope=None, qkv_bias=True, out_bias=True)
    return {
        "_target_": "jaxllm.model.LanguageModel",
        "vocab_size": c.whole("vocab_size"),
        "d_model": d,
        "layers": layer_string([("global", "dense")] * c.whole("n_layer")),
        "mixers": {"global": mixer},
        "ffns": {"dense": ffn},
        "residual": partial("residual.Residual"),
        "norm": partial("norm.LayerNorm"),
        "norm_eps": c.number("layer_norm_epsilon", 1e-5),
        "tie_embeddings": c.flag("tie_word_embeddings", True),
        "learned_positions": positions,
        "max_seq_len": positions,
    }


def _widened(c: ConfigJson, width: int) -> Node:
    """The usual ffn, four times as wide as the model, which config.json leaves unsaid."""
    spoken = ConfigJson({**c.config, "n_inner": width}, c.where)
    c.get("activation_function")
    return mlp(spoken, act_key="activation_function", width_key="n_inner", gated=False, bias=True)


def _gpt2_keys(model: LanguageModel) -> Node:
    mixer, ffn = attention_of(model)[0], ffns_of(model)[0]
    return {
        "vocab_size": model.vocab_size,
        "n_embd": model.d_model,
        "n_head": mixer.num_heads,
        "n_layer": model.num_layers,
        "n_inner": ffn.width,
        "n_positions": model.learned_positions or 1,
        "activation_function": "gelu_new" if ffn.activation == "gelu_tanh" else WRITTEN[ffn.activation],
        "layer_norm_epsilon": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
    }


def _layer(ours: tuple[str, ...], theirs: str, form: InOut | Flat | Side | Same) -> Rule:
    return Rule(ours, f"transformer.h.{{i}}.{theirs}", form)


def _norm(ours: str, theirs: str) -> tuple[Rule, Rule]:
    return Rule((f"{ours}/scale",), f"transformer.{theirs}.weight", Same()), Rule(
        (f"{ours}/bias",), f"transformer.{theirs}.bias", Same()
    )


GPT2 = Family(
    ("gpt2",),
    ("GPT2LMHeadModel",),
    _gpt2,
    _gpt2_keys,
    (
        Rule(("embed",), "transformer.wte.weight", Same()),
        Rule(("positions",), "transformer.wpe.weight", Same()),
        *_norm("final_norm", "ln_f"),
        *_norm("norm_mixer", "h.{i}.ln_1"),
        *_norm("norm_ffn", "h.{i}.ln_2"),
        _layer(("mixer/q_proj", "mixer/k_proj", "mixer/v_proj"), "attn.c_attn.weight", Side(InOut())),
        _layer(("mixer/q_bias", "mixer/k_bias", "mixer/v_bias"), "attn.c_attn.bias", Side(Flat())),
        _layer(("mixer/o_proj",), "attn.c_proj.weight", InOut(2)),
        _layer(("mixer/o_bias",), "attn.c_proj.bias", Flat()),
        _layer(("ffn/up_proj",), "mlp.c_fc.weight", InOut()),
        _layer(("ffn/up_bias",), "mlp.c_fc.bias", Flat()),
        _layer(("ffn/down_proj",), "mlp.c_proj.weight", InOut()),
        _layer(("ffn/down_bias",), "mlp.c_proj.bias", Flat()),
    ),
    prefix="transformer.",
    ignore=(r".*\.attn\.(masked_)?bias",),
)
