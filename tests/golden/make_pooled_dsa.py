"""What sparse attention of GLM-5.3-Flash (DSA over pools of tokens, no rotation) computes, in dsa_pooled.safetensors beside this file.

    python tests/golden/make_pooled_dsa.py              (needs the `parity` extra: torch, transformers, safetensors)

x [b t d] and y [b t d], and the layer's tensors by the names of released files. Pools of 4 tokens, 3 of them chosen among up to 7; the
last row ends in padding, which y says nothing about. Values are rounded to 12 bits, so that files are the same everywhere.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextAttention

OUT = Path(__file__).resolve().with_name("dsa_pooled.safetensors")
SEED, ROWS, LENGTH, SHORT, WIDTH = 11, 2, 30, 25, 24
POOL, TOP = 4, 12


def rounded(value: torch.Tensor) -> torch.Tensor:
    return (value * 4096).round() / 4096


def main() -> None:
    torch.set_num_threads(1)
    config = Glm5NextTextConfig(
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=3,
        q_lora_rank=12,
        kv_lora_rank=10,
        qk_nope_head_dim=6,
        qk_rope_head_dim=0,
        v_head_dim=5,
        index_topk=TOP,
        index_kpool=POOL,
        index_n_heads=16,
        index_head_dim=8,
        rms_norm_eps=1e-5,
        layer_types=["indexed_attention"],
        indexer_types=["full"],
    )
    config._attn_implementation = "eager"
    layer = Glm5NextTextAttention(config, 0).float().eval()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            scale = 0.5 if p.ndim == 1 or name.endswith("ape") else 1.3 / p.shape[-1] ** 0.5
            p.copy_(rounded(1.0 + 0.25 * noise if "norm.weight" in name else scale * noise))
        x = rounded(torch.randn(ROWS, LENGTH, WIDTH, generator=generator))
        mask = torch.ones(ROWS, LENGTH, dtype=torch.bool)
        mask[1, SHORT:] = False
        y = layer(x, mask)[0]
    tensors = {name: p.detach().clone().contiguous() for name, p in layer.named_parameters()}
    y[1, SHORT:] = 0.0
    save_file({"x": x, "y": y.contiguous(), **tensors}, OUT, metadata={"rms_norm_eps": "1e-5"})
    print(OUT.name, OUT.stat().st_size, float(y.abs().max()))


if __name__ == "__main__":
    main()
