"""Golden numbers of rotary embeddings, computed by transformers: writes rope.json beside this file.

    python tests/golden/make_rope.py        # needs the `parity` extra (torch, transformers)

For every kind: transformers' settings, our settings, the frequencies, the factor on cos and sin, MLA's factor on the softmax scale, and
scores of rotated queries and keys in DeepSeek's two interleaved layouts.
"""

import json
from pathlib import Path

import torch
from transformers import DeepseekV2Config, DeepseekV3Config, PhiConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

HEAD = 32
LONG = [1.0 + 0.7 * i for i in range(HEAD // 2)]
SHORT = [1.0 + 0.05 * i for i in range(HEAD // 2)]

V2 = {"factor": 40.0, "original_max_position": 4096, "mscale": 0.707, "mscale_all_dim": 0.707}
PHI = {"factor": 4.0, "original_max_position": 64, "short_factor": SHORT, "long_factor": LONG}

# name: (our kind, our fields, length of the call)
CASES = {
    "default": ("RoPE", {"theta": 1e4}, 8),
    "partial": ("RoPE", {"theta": 5e6, "partial": 0.334}, 8),
    "linear": ("LinearRoPE", {"theta": 1e4, "factor": 4.0}, 8),
    "dynamic_short": ("DynamicNTKRoPE", {"theta": 1e4, "factor": 2.0, "max_position": 64}, 40),
    "dynamic_long": ("DynamicNTKRoPE", {"theta": 1e4, "factor": 2.0, "max_position": 64}, 150),
    "yarn_deepseek_v2": ("YaRN", {"theta": 1e4, **V2}, 8),
    "yarn_deepseek_v3": ("YaRN", {"theta": 1e4, **V2, "mscale": 1.0, "mscale_all_dim": 1.0}, 8),
    "yarn_two_mscales": ("YaRN", {"theta": 1e4, **V2, "mscale": 1.2, "mscale_all_dim": 0.4}, 8),
    "yarn_qwen": ("YaRN", {"theta": 1e6, "factor": 4.0, "original_max_position": 32768}, 8),
    "yarn_gpt_oss": ("YaRN", {"theta": 1.5e5, "factor": 32.0, "original_max_position": 4096, "truncate": False}, 8),
    "yarn_given": (
        "YaRN",
        {"theta": 1e4, "factor": 4.0, "original_max_position": 64, "attention_factor": 1.25, "beta_fast": 16.0},
        8,
    ),
    "llama3": (
        "Llama3RoPE",
        {"theta": 5e5, "factor": 8.0, "original_max_position": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        8,
    ),
    "longrope_short": ("LongRoPE", {"theta": 1e4, **PHI}, 64),
    "longrope_long": ("LongRoPE", {"theta": 1e4, **PHI}, 65),
    "proportional": ("ProportionalRoPE", {"theta": 1e6, "partial": 0.25, "factor": 2.0}, 8),
}
TYPES = {
    "RoPE": "default",
    "LinearRoPE": "linear",
    "DynamicNTKRoPE": "dynamic",
    "YaRN": "yarn",
    "Llama3RoPE": "llama3",
    "LongRoPE": "longrope",
    "ProportionalRoPE": "proportional",
}
NAMES = {
    "theta": "rope_theta",
    "partial": "partial_rotary_factor",
    "original_max_position": "original_max_position_embeddings",
}


def settings(kind, ours):
    """Our fields in transformers' words; `max_position` belongs to the model's configuration there."""
    named = {NAMES.get(name, name): value for name, value in ours.items() if name != "max_position"}
    return {"rope_type": TYPES[kind], "partial_rotary_factor": 1.0, **named}


def frequencies(theirs, max_position, length):
    config = PhiConfig(
        hidden_size=4 * HEAD,
        num_attention_heads=4,
        head_dim=HEAD,
        max_position_embeddings=max_position,
        rope_parameters=dict(theirs),
    )
    if theirs["rope_type"] == "default":
        return PhiRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[theirs["rope_type"]](config, seq_len=length)


def interleaved_scores(seed=0):
    """q k^T of 4 queries and keys at positions 3.. in a head of 8 channels, by DeepSeek-V2's and V3's rotation."""
    torch.manual_seed(seed)
    q, k = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8)
    positions = torch.arange(3, 7)[None]
    rope = {"rope_type": "default", "rope_theta": 100.0}
    small = {"hidden_size": 32, "num_attention_heads": 4, "qk_rope_head_dim": 8, "head_dim": 8}
    freqs = v2.DeepseekV2RotaryEmbedding(DeepseekV2Config(**small, rope_parameters=dict(rope)))(q, positions)
    q2, k2 = v2.apply_rotary_emb(q, k, freqs)
    cos, sin = v3.DeepseekV3RotaryEmbedding(DeepseekV3Config(**small, rope_parameters=dict(rope)))(q, positions)
    q3, k3 = v3.apply_rotary_pos_emb_interleave(q, k, cos, sin)
    return {
        "theta": 100.0,
        "positions": positions[0].tolist(),
        "q": q[0, 0].tolist(),
        "k": k[0, 0].tolist(),
        "rotated_q_v2": q2[0, 0].tolist(),
        "scores_v2": (q2 @ k2.transpose(2, 3))[0, 0].tolist(),
        "scores_v3": (q3 @ k3.transpose(2, 3))[0, 0].tolist(),
    }


def rounded(value):
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return {k: rounded(v) for k, v in value.items()} if isinstance(value, dict) else value


def main():
    out = {"head_dim": HEAD, "kinds": {}, "interleaved": interleaved_scores()}
    for name, (kind, ours, length) in CASES.items():
        theirs = settings(kind, ours)
        f, magnitude = frequencies(theirs, ours.get("max_position", 64), length)
        out["kinds"][name] = {
            "kind": kind,
            "fields": ours,
            "length": length,
            "frequencies": f.tolist(),
            "magnitude": float(magnitude),
            "attention_scale": float(v3.yarn_apply_mscale(theirs, 1.0)),
        }
    path = Path(__file__).with_name("rope.json")
    path.write_text(json.dumps(rounded(out), separators=(",", ":")).replace('},"', '},\n"') + "\n")
    print(f"{path.name}: {len(out['kinds'])} kinds, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
