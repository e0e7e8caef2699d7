"""The same model, sizes and optimiser in transformers on torch, eager, float32 (extra `parity`). One JSON line.

python experiments/train_speed/peer_torch.py [repeats]
"""

import json
import platform
import statistics
import sys
import time

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

ROWS, LENGTH, VOCAB = 8, 256, 4096


def matmul_gflops(n: int = 1024) -> float:
    a = torch.randn(n, n)
    a @ a
    times = []
    for _ in range(10):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    return 2 * n**3 / min(times) / 1e9


def main(repeats: int = 3) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(2)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=12,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH + 1))
    losses: list[float] = []

    def step() -> float:
        start = time.perf_counter()
        logits = model(ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB).float(), ids[:, 1:].reshape(-1))
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        losses.append(loss.item())
        return time.perf_counter() - start

    for _ in range(2):
        step()
    groups = [ROWS * LENGTH / statistics.median([step() for _ in range(3)]) for _ in range(repeats)]
    assert losses[-1] < losses[0], losses
    params, speed, peak = sum(p.numel() for p in model.parameters()), statistics.median(groups), matmul_gflops()
    print(
        json.dumps(
            {
                "impl": "transformers",
                "tokens_per_s": round(speed, 1),
                "groups": [round(g, 1) for g in groups],
                "params": params,
                "first_loss": round(losses[0], 3),
                "last_loss": round(losses[-1], 3),
                "matmul_gflops": round(peak, 1),
                "share": round(6 * params * speed / peak / 1e9, 3),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
