"""What Muon costs: its update against the time that its Newton-Schulz products need here, and against a step's tokens. One JSON line.

    python experiments/train_speed/muon.py [rounds] [key=value ...]

A matrix `[m, n]`, m <= n, takes `2 m^2 n + 2 m^3 + 2 m^2 n` FLOPs an iteration (Jordan et al. 2024). `rate` is that of a float32 product
1024^3 taken in the same rounds, `own_rate` that of products of the matrices' own shapes, one after another. `over` is the update's time
less AdamW's of the same parameters (momentum, decay and the AdamW half are no Newton-Schulz) over what the FLOPs need: 1.3 is the budget.
`overhead`: what Muon adds to a step of so many tokens with AdamW. Every ratio is of one round; `spread` is its lowest and highest.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ahead import batch_of, step_of

from jaxllm.backend import prepare
from jaxllm.compose import compose
from jaxllm.report.study import in_turn

PROBE = 1024
ROWS = (2, 8, 32)  # of 256 tokens


def matrices(model: Any, per_head: bool) -> list[tuple[int, int, int]]:
    """(how many, m, n) of all that Muon makes orthogonal, m <= n."""
    import jax

    from jaxllm.params import declare, is_declared
    from jaxllm.training.optimisers import muon_axes

    found = []
    for box in jax.tree.leaves(declare(model), is_leaf=is_declared):
        if box.trainable and (axes := muon_axes(box, per_head)) is not None:
            sides = [math.prod(box.value.shape[i] for i in side) for side in (axes.reduction_axis, axes.output_axis)]
            found.append((box.value.size // math.prod(sides), min(sides), max(sides)))
    return found


def newton_schulz_flops(shapes: Sequence[tuple[int, int, int]], steps: int) -> float:
    return float(sum(count * steps * (4 * m * m * n + 2 * m**3) for count, m, n in shapes))


def update_of(cfg: Any, kind: str) -> Callable[[], object]:
    """An optimiser's update of the model's parameters, from fixed gradients, that runs and waits."""
    import jax

    from jaxllm.params import declare
    from jaxllm.training.state import new_state, pick, trained

    model, optimiser = cfg.build("model"), compose_optimiser(kind)
    declared = declare(model)
    state = new_state(model, optimiser, 0, declared=declared)
    part = pick(state.params, trained(declared))
    tx = optimiser.transform(declared)
    grads = jax.tree.map(lambda p: 1e-3 * p, part)
    held = {"moments": state.opt_state}
    update = jax.jit(tx.update, donate_argnums=1)

    def run() -> None:
        updates, held["moments"] = update(grads, held["moments"], part)
        jax.block_until_ready(updates)

    return run


def compose_optimiser(kind: str) -> Any:
    return compose([f"optim={kind}", "optim.clip_norm=null"]).build("optim")


def products_of(shapes: Sequence[tuple[int, int, int]], steps: int) -> Callable[[], object]:
    """The same products alone, for every distinct shape in a batch as large as its stack."""
    import jax
    import jax.numpy as jnp

    inputs = [jax.random.normal(jax.random.key(i), (count, m, n)) / n for i, (count, m, n) in enumerate(shapes)]

    @jax.jit
    def all_of(inputs: Any) -> Any:
        out = []
        for x in inputs:
            for _ in range(steps):
                a = jnp.einsum("cmn,ckn->cmk", x, x)
                x = jnp.einsum("cmk,ckn->cmn", jnp.einsum("cmk,ckl->cml", a, a), x)
            out.append(x)
        return out

    return lambda: jax.block_until_ready(all_of(inputs))


def main(rounds: int, words: list[str]) -> None:
    base = ["model=llama_24m", "model.layers=4* global/dense", "optim.clip_norm=null", *words]
    cfg = compose(base)
    prepare(cfg.common)
    import jax

    model, muon = cfg.build("model"), compose_optimiser("muon")
    shapes = matrices(model, muon.per_head)
    flops = newton_schulz_flops(shapes, muon.ns_steps)
    a = jax.random.normal(jax.random.key(0), (PROBE, PROBE))
    square = jax.jit(lambda a: a @ a)
    calls = {
        "probe": lambda: jax.block_until_ready(square(a)),
        "products": products_of(shapes, muon.ns_steps),
        "adamw": update_of(cfg, "adamw"),
        "muon": update_of(cfg, "muon"),
    }
    calls |= {f"step_{256 * rows}": step_of(cfg, batch_of(model.vocab_size, rows)) for rows in ROWS}
    taken = in_turn(calls, rounds)
    extra = [m - d for m, d in zip(taken["muon"], taken["adamw"], strict=True)]
    needed = {
        "rate": [flops / (2 * PROBE**3 / t) for t in taken["probe"]],
        "own_rate": taken["products"],
    }
    over = {name: [e / n for e, n in zip(extra, times, strict=True)] for name, times in needed.items()}
    overhead = {
        256 * rows: statistics.median(e / s for e, s in zip(extra, taken[f"step_{256 * rows}"], strict=True))
        for rows in ROWS
    }
    print(
        json.dumps(
            {
                "flops": flops,
                "median_ms": {name: round(1e3 * statistics.median(values), 1) for name, values in taken.items()},
                "gflops": round(2 * PROBE**3 / statistics.median(taken["probe"]) / 1e9, 1),
                "over": {name: round(statistics.median(values), 3) for name, values in over.items()},
                "spread": {name: [round(min(v), 3), round(max(v), 3)] for name, v in over.items()},
                "met": statistics.median(over["rate"]) <= 1.3,
                "overhead": {tokens: round(share, 3) for tokens, share in overhead.items()},
                "rounds": rounds,
                "jax": jax.__version__,
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 7, sys.argv[2:])
