"""Training speed of `model=llama_24m` on random tokens: 8 x 256 a step, AdamW, float32 on CPU. One JSON line.

    python experiments/train_speed/ours.py [repeats]

A figure is the median of `repeats` groups; a group is the median of 3 steps, after 2 warm-up steps. `matmul_gflops` is what this
machine's float32 matmul reaches in the same process (1024^3, best of 10), `share` the step's 6 x parameters x tokens against it.
"""

import json
import platform
import statistics
import sys
import time

import numpy as np

from jaxllm.backend import prepare
from jaxllm.compose import compose

ROWS, LENGTH = 8, 256


def matmul_gflops(jax, n: int = 1024) -> float:
    """Best of ten."""
    a = jax.random.normal(jax.random.key(0), (n, n))
    call = jax.jit(lambda a: a @ a)
    call(a).block_until_ready()
    times = []
    for _ in range(10):
        start = time.perf_counter()
        call(a).block_until_ready()
        times.append(time.perf_counter() - start)
    return 2 * n**3 / min(times) / 1e9


def main(repeats: int = 3) -> None:
    cfg = compose(["model=llama_24m", "optim.clip_norm=null", "optim.lr=1e-4", *sys.argv[2:]])
    prepare(cfg.common)
    import jax

    from jaxllm.training.state import new_state
    from jaxllm.training.step import compile_step, make_train_step

    model, optimiser = cfg.build("model"), cfg.build("optim")
    state = new_state(model, optimiser, 0)
    params = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    ids = np.random.default_rng(0).integers(0, model.vocab_size, (ROWS, LENGTH + 1), dtype=np.int32)
    ones = np.ones((ROWS, LENGTH), np.int32)
    batch = {
        "tokens": ids[:, :-1],
        "labels": ids[:, 1:],
        "segments": ones,
        "positions": np.cumsum(ones, axis=1, dtype=np.int32) - 1,
        "weights": ones.astype(np.float32),
    }
    step, compile_s = compile_step(make_train_step(model, cfg.build("objective"), optimiser), state, batch)
    losses, groups = [], []
    for group in range(repeats + 1):
        times = []
        for _ in range(3 if group else 2):
            start = time.perf_counter()
            state, metrics = step(state, batch, np.int32(10**6))
            losses.append(float(metrics["loss"]))
            times.append(time.perf_counter() - start)
        if group:
            groups.append(ROWS * LENGTH / statistics.median(times))
    assert losses[-1] < losses[0], losses
    speed, peak = statistics.median(groups), matmul_gflops(jax)
    print(
        json.dumps(
            {
                "impl": "jaxllm",
                "tokens_per_s": round(speed, 1),
                "groups": [round(g, 1) for g in groups],
                "params": params,
                "compile_s": round(compile_s, 1),
                "first_loss": round(losses[0], 3),
                "last_loss": round(losses[-1], 3),
                "matmul_gflops": round(peak, 1),
                "share": round(6 * params * speed / peak / 1e9, 3),
                "jax": jax.__version__,
                "python": platform.python_version(),
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
