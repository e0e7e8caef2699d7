"""Does compiling grow with depth? HLO lines and compile seconds of the train step with 4 and with 24 scanned layers. One JSON line.

python experiments/train_speed/depth.py [repeats]
"""

import json
import statistics
import sys
import time

from jaxllm.backend import prepare
from jaxllm.compose import compose


def main(repeats: int = 5) -> None:
    base = ["+experiment=quickstart", "compile_cache=false", "model.vocab_size=2048"]
    prepare(compose(base).common)
    import jax
    import jax.numpy as jnp

    from jaxllm.training.state import abstract_state
    from jaxllm.training.step import make_train_step

    seconds: dict[int, list[float]] = {4: [], 24: []}
    lines = {}
    for _ in range(repeats):
        for depth, times in seconds.items():
            cfg = compose([*base, f"model.layers={depth}* global/dense"])
            model, optimiser = cfg.build("model"), cfg.build("optim")
            state = abstract_state(model, optimiser)
            batch = {
                k: jax.ShapeDtypeStruct((4, 256), jnp.float32 if k == "weights" else jnp.int32)
                for k in ("tokens", "labels", "segments", "positions", "weights")
            }
            step = make_train_step(model, cfg.build("objective"), optimiser)
            lowered = jax.jit(step, donate_argnums=0).lower(state, batch, jax.ShapeDtypeStruct((), jnp.int32))
            start = time.perf_counter()
            compiled = lowered.compile()
            times.append(round(time.perf_counter() - start, 2))
            lines[depth] = len(compiled.as_text().splitlines())
    medians = {depth: statistics.median(times) for depth, times in seconds.items()}
    print(
        json.dumps(
            {
                "hlo_lines": lines,
                "hlo_ratio": round(lines[24] / lines[4], 3),
                "compile_s": seconds,
                "median_s": medians,
                "compile_ratio": round(medians[24] / medians[4], 3),
                "jax": jax.__version__,
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
