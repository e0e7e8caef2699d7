"""What a linear attention layer of GLM-5.3-Flash (Kimi Delta Attention, bounded decays) computes, in kda_bounded.safetensors beside
this file.

    python tests/golden/make_kda.py              (needs the `parity` extra: torch, transformers, safetensors)

x [b t d] and y [b t d], longer than the reference's chunks of 64 tokens, and the layer's tensors by the names of released files, which hold
the convolutions of q, k and v apart. Values are rounded to 12 bits, so that files are the same everywhere.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextLinearAttention

OUT = Path(__file__).resolve().with_name("kda_bounded.safetensors")
SEED, ROWS, LENGTH, WIDTH, HEADS, DIM = 7, 2, 72, 24, 2, 8


def rounded(value: torch.Tensor) -> torch.Tensor:
    return (value * 4096).round() / 4096


def released(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if name == "conv1d.weight":
        return {f"{part}_conv1d.weight": t for part, t in zip("qkv", tensor.chunk(3), strict=True)}
    return {name.removeprefix("forget_gate."): tensor}


def main() -> None:
    torch.set_num_threads(1)
    config = Glm5NextTextConfig(
        hidden_size=WIDTH,
        num_hidden_layers=1,
        linear_num_heads=HEADS,
        linear_head_dim=DIM,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-5,
        layer_types=["linear_attention"],
    )
    layer = Glm5NextTextLinearAttention(config, 0).float().eval()
    generator = torch.Generator().manual_seed(SEED)
    tensors = {}
    with torch.no_grad():
        for name, p in layer.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            scale = 1.3 / p.shape[-1] ** 0.5 if p.ndim > 1 else 0.5
            # Decays over the whole of (-5, 0); A_log of 0 is where the bounded gate starts.
            p.copy_(rounded(1.0 + 0.25 * noise if "norm" in name else scale * noise))
            tensors |= released(name, p.detach().clone().contiguous())
        x = rounded(torch.randn(ROWS, LENGTH, WIDTH, generator=generator))
        y = layer(x)
    save_file({"x": x, "y": y.contiguous(), **tensors}, OUT, metadata={"rms_norm_eps": "1e-5"})
    print(OUT.name, OUT.stat().st_size, float(y.abs().max()))


if __name__ == "__main__":
    main()
