"""transformers' block of experts, forward and backward on CPU, at the size of ours.py. One JSON line each.

    python experiments/moe_speed/peer_torch.py [repeats]

In an environment with the extra `parity`. Mixtral's and Qwen3-MoE's blocks with the implementation `grouped_mm`, and one SwiGLU of the
active size.
"""

import json
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional
from transformers import MixtralConfig, Qwen3MoeConfig, __version__
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

TOKENS, D, F, K, E = 2048, 256, 512, 2, 16


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(D, K * F, bias=False), nn.Linear(D, K * F, bias=False)
        self.down = nn.Linear(K * F, D, bias=False)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def blocks() -> dict[str, nn.Module]:
    mixtral = MixtralConfig(hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=K)
    qwen = Qwen3MoeConfig(hidden_size=D, moe_intermediate_size=F, num_experts=E, num_experts_per_tok=K)
    for config in (mixtral, qwen):
        config._experts_implementation = "grouped_mm"
    made = {"dense": Dense(), "mixtral": MixtralSparseMoeBlock(mixtral), "qwen3_moe": Qwen3MoeSparseMoeBlock(qwen)}
    for parameter in (p for block in made.values() for p in block.parameters()):
        nn.init.normal_(parameter, std=0.05)
    return made


def main(repeats: int = 9) -> None:
    torch.manual_seed(0)
    made, x = blocks(), torch.randn(1, TOKENS, D).requires_grad_()
    times: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(repeats + 1):
        for name, block in made.items():
            start = time.perf_counter()
            for _ in range(3):
                block.zero_grad(set_to_none=True)
                x.grad = None
                block(x).square().mean().backward()
            if turn:
                times[name].append((time.perf_counter() - start) / 3)
    for name, taken in times.items():
        speed = {"tokens_per_s": round(TOKENS / statistics.median(taken)), "best": round(TOKENS / min(taken))}
        print(json.dumps({"block": name, **speed, "torch": torch.__version__, "transformers": __version__}), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
