"""GGUF spellings to Hugging Face spellings: one small table an architecture, so that the family tables exist once.

llama.cpp's converter renames tensors and metadata, and changes some numbers on the way; reading undoes it:

- its "normal" rotary form turns neighbouring channels, so the rows of q and k of those architectures are stored pairwise interleaved
  (`paired_rope`); Hugging Face turns channel i with i + dim/2;
- Gemma's norms are stored as the factor 1 + w (`shifted_norms`);
- GPT-2's matrices are stored as [out, in], its Conv1D layers hold [in, out] (`transposed`);
- the frequency divisors of Llama 3 come as a tensor `rope_freqs.weight` instead of the numbers they were made from.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxllm.errors import UserError

_MATRICES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_LLAMA = _MATRICES | {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_GEMMA = _MATRICES | _POST_NORMS | {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_TIED = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_OUTER = _TIED | {"output": "lm_head"}
_OUTER_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}

# Metadata after "<architecture>." -> config.json. None: says nothing that the tensors do not say.
_KEYS: dict[str, str | None] = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": None,
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "rope.dimension_count": None,
    "vocab_size": None,
}
_GPT2_KEYS: dict[str, str | None] = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.head_count_kv": None,
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "rope.dimension_count": None,
    "vocab_size": None,
}
_ROPE_SCALING = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.finetuned": None,
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_GRANITE_KEYS: dict[str, str | None] = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_GEMMA_KEYS: dict[str, str | None] = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
}


@dataclass(frozen=True)
class Architecture:
    """How one GGUF architecture is spelled in Hugging Face's files. The flags are explained in the module's docstring.

    fixed: entries of config.json that the architecture implies. blocks, outer: tensor names without `.weight`.
    """

    model_type: str
    hf_class: str
    blocks: Mapping[str, str] = field(default_factory=lambda: _LLAMA)
    outer: Mapping[str, str] = field(default_factory=lambda: _OUTER)
    prefix: str = "model.layers."
    keys: Mapping[str, str | None] = field(default_factory=lambda: _KEYS)
    fixed: Mapping[str, Any] = field(default_factory=lambda: {"hidden_act": "silu"})
    paired_rope: bool = False
    shifted_norms: bool = False
    transposed: bool = False


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", paired_rope=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", blocks=_LLAMA | _QK_NORM),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", paired_rope=True),
    "granite": Architecture("granite", "GraniteForCausalLM", keys=_KEYS | _GRANITE_KEYS, paired_rope=True),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", blocks=_MATRICES | _POST_NORMS | _QK_NORM),
    "gemma2": Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        blocks=_GEMMA,
        outer=_TIED,
        keys=_KEYS | _GEMMA_KEYS,
        fixed={"hidden_activation": "gelu_pytorch_tanh"},
        shifted_norms=True,
    ),
    "gpt2": Architecture(
        "gpt2",
        "GPT2LMHeadModel",
        blocks=_GPT2,
        outer=_OUTER_GPT2,
        prefix="transformer.h.",
        keys=_GPT2_KEYS,
        fixed={"activation_function": "gelu_new"},
        transposed=True,
    ),
}
ROPE_FREQUENCIES = "rope_freqs.weight"


def architecture(metadata: Mapping[str, Any]) -> Architecture:
    """The table of the architecture that the file names. Raises UserError for one that has none."""
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise UserError(f"general.architecture={name!r} is not one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def hf_name(arch: Architecture, name: str) -> str:
    """The Hugging Face name of a tensor. Raises UserError for one that the architecture does not have."""
    stem, _, suffix = name.rpartition(".")
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if suffix in ("weight", "bias"):
        if block and block[2] in arch.blocks:
            return f"{arch.prefix}{int(block[1])}.{arch.blocks[block[2]]}.{suffix}"
        if stem in arch.outer:
            return f"{arch.outer[stem]}.{suffix}"
    raise UserError(f"tensor {name} has no place in a {arch.model_type} model that is known here")


def decoder(arch: Architecture, name: str, config: Mapping[str, Any]) -> Callable[[np.ndarray], np.ndarray] | None:
    """What undoes the converter's change to the numbers of a tensor (a GGUF name), or None where it made none."""
    part = name.split(".")[-2]
    if arch.paired_rope and part in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        return lambda x: unpair(x, heads)
    if arch.shifted_norms and part.endswith("norm"):
        return lambda x: (x.astype(np.float32) - 1).astype(x.dtype)
    if arch.transposed and part in ("attn_qkv", "attn_output", "ffn_up", "ffn_down") and name.endswith(".weight"):
        return lambda x: x.T
    return None


def unpair(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from (0, n/2, 1, n/2 + 1, ...) back to (0, 1, ..., n - 1); `x [heads * n, ...]`."""
    if x.shape[0] % (2 * heads):
        raise UserError(f"{x.shape[0]} rows do not divide into {heads} heads of pairs")
    return x.reshape(heads, x.shape[0] // heads // 2, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def hf_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], divisors: np.ndarray | None
) -> dict[str, Any]:
    """What config.json of the same model would say.

    Args:
        shapes: of the tensors, by their GGUF names. divisors: `rope_freqs.weight`, where there is one.

    Raises:
        UserError: a key that is missing, or one whose meaning is not known here: it might change the mathematics.
    """
    arch = architecture(metadata)
    own = {k: v for k, v in metadata.items() if k.startswith(f"{metadata['general.architecture']}.")}
    config: dict[str, Any] = {"model_type": arch.model_type, "architectures": [arch.hf_class], **arch.fixed}
    scaling: dict[str, Any] = {}
    for key, value in own.items():
        short = key.partition(".")[2]
        if short not in arch.keys and short not in _ROPE_SCALING:
            raise UserError(f"{key}={value!r}: what this key does to a {arch.model_type} model is not known here")
        if not isinstance(value, int | float | str):
            raise UserError(f"{key}: differs from layer to layer, which is not supported")
        into, target = (scaling, _ROPE_SCALING[short]) if short in _ROPE_SCALING else (config, arch.keys[short])
        if target is not None:
            into[target] = shortest(value)
    for short, target in arch.keys.items():
        if target is not None and target not in config and short in _REQUIRED:
            raise UserError(f"{metadata['general.architecture']}.{short}: missing")
    config["vocab_size"] = shapes["token_embd.weight"][0] if "token_embd.weight" in shapes else 0
    config["tie_word_embeddings"] = "output.weight" not in shapes
    if arch.keys is not _GPT2_KEYS:
        _finish_rotary(config, scaling, divisors)
        config["attention_bias"] = "blk.0.attn_q.bias" in shapes
        config["mlp_bias"] = "blk.0.ffn_up.bias" in shapes
    for name in ("bos", "eos", "padding"):
        if isinstance(token := metadata.get(f"tokenizer.ggml.{name}_token_id"), int):
            config[f"{name.replace('padding', 'pad')}_token_id"] = token
    return config


_REQUIRED = {"context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"}


def _finish_rotary(config: dict[str, Any], scaling: dict[str, Any], divisors: np.ndarray | None) -> None:
    heads = config["num_attention_heads"]
    config.setdefault("num_key_value_heads", heads)
    config.setdefault("head_dim", config["hidden_size"] // heads)
    config.setdefault("rope_theta", 10000.0)
    if divisors is not None:
        # The divisors are all that Llama 3's rule makes of its four numbers; LongRoPE takes divisors as they are.
        factors = [shortest(x) for x in divisors.astype(np.float64)]
        config["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": config["max_position_embeddings"],
        }
    elif scaling.get("rope_type", "none") != "none":
        config["rope_scaling"] = scaling


def shortest(value: Any) -> Any:
    """A float of the file, which is 32 bits wide, as the shortest decimal number that rounds to it: 1e-05, not 9.99999974e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
