"""A whole train step of a model of experts beside the dense model of equal active size, on CPU. One JSON line each.

    python experiments/moe_speed/model.py [repeats] [steps before] [rows]

The models are `moe_dense/dense_active` and `moe_dense/coarse` made wider: four layers, d 256, ffn 1,024 at work, 16 experts of 512, two a
token, vocabulary 1,024; 8 rows, or as many as are named, of 256 random tokens, AdamW. Steps are taken in turn; `slower` is the median over
turns of the ratio of their times. A new router sends some experts several times their share, which takes a loop longer; `steps before`
gives balancing the time to mend that first. The experts are there twice: kept busy by the Switch loss, and by the quantile rule.
"""

import json
import statistics
import sys
import time

SMALL = ["+experiment=moe_dense", "model.vocab_size=1024", "model.d_model=256", "model.mixers.global.num_heads=8"]
EXPERTS = ["model=moe_dense/coarse", "model.ffns.experts.num_experts=16", "model.ffns.experts.d_expert=512"]
QUANTILE = ["router._target_=jaxllm.layers.router.SigmoidRouter", "+router.balance=quantile", "switch_loss=0"]
MODELS = {
    "dense": ["model=moe_dense/dense_active", "model.ffns.dense.d_ff=1024"],
    "switch": EXPERTS,
    "quantile": [
        *EXPERTS,
        *(f"{'+' * word.startswith('+')}model.ffns.experts.{word.lstrip('+')}" for word in QUANTILE),
    ],
}
LENGTH = 256


def main(repeats: int = 7, before: int = 40, rows: int = 8) -> None:
    import numpy as np

    from jaxllm.backend import prepare
    from jaxllm.compose import compose
    from jaxllm.config import Common

    prepare(Common(platform="cpu"))
    import jax

    from jaxllm.training.state import new_state
    from jaxllm.training.step import compile_step, make_train_step

    ids = np.random.default_rng(0).integers(0, 1024, (rows, LENGTH + 1), dtype=np.int32)
    ones = np.ones((rows, LENGTH), np.int32)
    batch = {"tokens": ids[:, :-1], "labels": ids[:, 1:], "segments": ones, "weights": ones.astype(np.float32)}
    batch["positions"] = np.cumsum(ones, axis=1, dtype=np.int32) - 1
    steps, states, facts, loads = {}, {}, {}, {name: [] for name in MODELS}
    for name, overrides in MODELS.items():
        cfg = compose([*SMALL, *overrides])
        model, optimiser = cfg.build("model"), cfg.build("optim")
        states[name] = new_state(model, optimiser, 0)
        step = make_train_step(model, cfg.build("objective"), optimiser)
        steps[name], compiled = compile_step(step, states[name], batch)
        total, cost = sum(p.size for p in jax.tree.leaves(states[name].params)), model.cost()
        facts[name] = {
            "params": total,
            "active": total - cost.params + cost.params_active,
            "compile_s": round(compiled, 1),
        }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(before + repeats + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            states[name], metrics = step(states[name], batch, np.int32(10**6))
            jax.block_until_ready(metrics)
            if turn > before:
                times[name].append(time.perf_counter() - start)
            load = [float(np.max(v)) for key, v in metrics.items() if key.endswith("load_max")]
            loads[name].append(max(load, default=1.0))
    for name in MODELS:
        slower = [e / d for e, d in zip(times[name], times["dense"], strict=True)]
        row = {
            "model": name,
            "slower": round(statistics.median(slower), 3),
            "range": [round(min(slower), 3), round(max(slower), 3)],
            "tokens_per_s": round(rows * LENGTH / statistics.median(times[name])),
            "load_max": {"at first": round(loads[name][0], 2), "while timed": round(max(loads[name][-repeats:]), 2)},
        }
        print(json.dumps(row | facts[name] | {"jax": jax.__version__}), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
