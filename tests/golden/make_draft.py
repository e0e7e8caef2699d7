"""What DeepSeek-V3's draft layer (multi-token prediction) computes, in deepseek_v3_draft.safetensors beside this file.

    python tests/golden/make_draft.py              (needs the `parity` extra: torch, transformers, safetensors)

tokens int32 `[b t]` and hidden `[b, t - 1, d]`, the layer's output behind the trunk of deepseek_v3/, and the layer's tensors by the
names of released files. Values are rounded to 12 bits, so that files are the same everywhere.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

HERE = Path(__file__).resolve().parent
OUT = HERE / "deepseek_v3_draft.safetensors"
SEED, ROWS, LENGTH = 17, 2, 12


def rounded(value: torch.Tensor) -> torch.Tensor:
    return (value * 4096).round() / 4096


def released(name: str, layer: int) -> str:
    """The name in released files of a parameter of transformers' draft layer."""
    name = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
    return f"model.layers.{layer}.{name}"


def main() -> None:
    torch.set_num_threads(1)
    trunk = AutoModelForCausalLM.from_pretrained(HERE / "deepseek_v3", dtype=torch.float32).eval()
    trunk.set_attn_implementation("eager")
    draft = MtpModel(trunk, 1)
    draft.config._attn_implementation = "eager"
    layer = draft.layers[0].float().eval()
    generator = torch.Generator().manual_seed(SEED)
    number = trunk.config.num_hidden_layers
    with torch.no_grad():
        for name, p in layer.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(rounded(1.0 + 0.25 * noise if "norm" in name else 1.3 * noise / p.shape[-1] ** 0.5))
        for name, b in layer.named_buffers():
            if name.endswith("e_score_correction_bias"):
                b.copy_(rounded(0.1 * torch.randn(b.shape, generator=generator)))
        tokens = torch.randint(0, trunk.config.vocab_size, (ROWS, LENGTH), generator=generator)
        seen = trunk.model(tokens).last_hidden_state[:, :-1]
        ahead = trunk.get_input_embeddings()(tokens[:, 1:])
        positions = torch.arange(1, LENGTH)[None].expand(ROWS, -1)
        mask = torch.full((LENGTH - 1, LENGTH - 1), -torch.inf).triu(1)[None, None]
        hidden = layer(ahead, seen, trunk.model.rotary_emb(ahead, positions), mask, positions, None)
    tensors = {
        released(name, number): value.detach().clone().contiguous() for name, value in layer.state_dict().items()
    }
    save_file({"tokens": tokens.int(), "hidden": hidden.contiguous(), **tensors}, OUT)
    print(OUT.name, OUT.stat().st_size, float(hidden.abs().max()), sorted(tensors))


if __name__ == "__main__":
    main()
