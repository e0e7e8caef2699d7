"""What a module that predicts further ahead adds to a training step: `model=llama_24m` with and without one, in turn. One JSON line.

    python experiments/train_speed/ahead.py [rounds] [key=value ...]

The budget: a step with one module takes at most `1 + 1.5 / L` of the plain step (L layers: the module's block, its join and half a block
for what hangs on it), plus what the head takes once more. The head alone, loss and gradients, is the third program. Both sides of every
ratio come from the same round; `spread` is the lowest and highest round.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxllm.backend import prepare
from jaxllm.compose import compose
from jaxllm.report.study import in_turn

ROWS, LENGTH = 8, 256


def batch_of(vocab: int, rows: int = ROWS, length: int = LENGTH) -> dict[str, np.ndarray]:
    """Random tokens: speed does not depend on them."""
    ids = np.random.default_rng(0).integers(0, vocab, (rows, length + 1), dtype=np.int32)
    ones = np.ones((rows, length), np.int32)
    batch = {"tokens": ids[:, :-1], "labels": ids[:, 1:], "segments": ones, "weights": ones.astype(np.float32)}
    return batch | {"positions": np.cumsum(ones, axis=1, dtype=np.int32) - 1}


def step_of(cfg: Any, batch: dict[str, np.ndarray]) -> Callable[[], object]:
    """A train step that runs and waits."""
    import jax

    from jaxllm.training.state import new_state
    from jaxllm.training.step import compile_step, make_train_step

    model, optimiser = cfg.build("model"), cfg.build("optim")
    held = {"state": new_state(model, optimiser, 0)}
    compiled, _ = compile_step(make_train_step(model, cfg.build("objective"), optimiser), held["state"], batch)

    def run() -> None:
        held["state"], metrics = compiled(held["state"], batch, np.int32(10**6))
        jax.block_until_ready(metrics)

    return run


def head_of(cfg: Any, batch: dict[str, np.ndarray]) -> Callable[[], object]:
    """The head's loss of given hidden states, with its gradients for them and for its weight."""
    import jax
    import jax.numpy as jnp

    from jaxllm.params import init_params
    from jaxllm.training.losses import next_token

    model = cfg.build("model")
    params = init_params(model, jax.random.key(0))
    tables = {name: params[name] for name in ("embed", "head") if name in params}
    rest = {name: value for name, value in params.items() if name not in tables}
    hidden = jax.random.normal(jax.random.key(1), (*batch["tokens"].shape, model.d_model), jnp.float32)

    @jax.jit
    def both(hidden: Any, tables: Any) -> Any:
        return jax.grad(lambda h, w: next_token(model, rest | w, h, batch)[0], argnums=(0, 1))(hidden, tables)

    return lambda: jax.block_until_ready(both(hidden, tables))


def main(rounds: int, words: list[str]) -> None:
    base = ["model=llama_24m", "optim.clip_norm=null", "optim.lr=1e-4", *words]
    plain = compose(base)
    ahead = compose([*base, "objective=mtp", "+mtp@model.mtp=chained"])
    prepare(plain.common)
    import jax

    model = plain.build("model")
    batch = batch_of(model.vocab_size)
    calls = {"plain": step_of(plain, batch), "ahead": step_of(ahead, batch), "head": head_of(plain, batch)}
    taken = in_turn(calls, rounds)
    layers = sum(group.repeats * len(group.period) for group in model.groups)
    budget = 1 + 1.5 / layers
    shares = [(a - h) / p for p, a, h in zip(taken["plain"], taken["ahead"], taken["head"], strict=True)]
    middle = {name: round(1e3 * statistics.median(values), 1) for name, values in taken.items()}
    print(
        json.dumps(
            {
                "layers": layers,
                "median_ms": middle,
                "share": round(statistics.median(shares), 3),
                "spread": [round(min(shares), 3), round(max(shares), 3)],
                "budget": round(budget, 3),
                "met": statistics.median(shares) <= budget,
                "rounds": rounds,
                "jax": jax.__version__,
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 7, sys.argv[2:])
