"""Forward and backward of a block of experts beside the dense block of the same active size, on CPU. One JSON line each.

    python experiments/moe_speed/ours.py [repeats] [experts,experts,...] [tokens] [draw]

2,048 tokens where no number is given, d 256, experts of width 512, 2 of them a token, float32; the gradient goes to input and weights.
The dense block is one SwiGLU of width 1,024. All blocks are timed in turn, `repeats` times, so that what else the machine does falls on
all alike: `ratio` is the median over turns of a block's speed against the dense block of the same turn.

A block twice: `experts_E` with a softmax router of random weights, as in the peer's script, whose busiest expert has up to 1.6 times its
share, and how many experts have more than theirs hangs on the `draw` of the weights (a number, 0 by default); `balanced_E` with a sigmoid
router of random weights whose bias the quantile rule has set on this very input: as even as the rule makes it; training sets it by the
batches before. `load_max` says how even the load was.
"""

import functools
import json
import statistics
import sys
import time

D, F, K = 256, 512, 2
UPDATES = 20  # of a bias before its router is timed


def main(repeats: int = 9, numbers: str = "8,16,32,64", tokens: int = 2048, draw: int = 0) -> None:
    from jaxllm.backend import prepare
    from jaxllm.config import Common

    prepare(Common(platform="cpu"))
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxllm.layers.base import Context
    from jaxllm.layers.mlp import MLP
    from jaxllm.layers.moe import MoE
    from jaxllm.layers.router import SigmoidRouter

    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, tokens, D)), jnp.float32)
    ctx = Context.whole(jnp.zeros((1, tokens), jnp.int32), train=True)

    def prepared(layer):
        rng = np.random.default_rng((draw, getattr(layer, "num_experts", 1)))
        boxes = jax.eval_shape(lambda: layer.init(jax.random.key(0), x[:, :2], Context.whole(ctx.tokens[:, :2])))[
            "params"
        ]
        leaves, tree = jax.tree.flatten(boxes, is_leaf=lambda b: hasattr(b, "names"))
        params = jax.tree.unflatten(
            tree, [jnp.asarray(0.05 * rng.standard_normal(b.value.shape), jnp.float32) for b in leaves]
        )

        def loss(x, params):
            y, aux = layer.apply({"params": params}, x, ctx)
            return jnp.mean(y**2), aux

        if isinstance(layer, MoE) and layer.router is not MoE.router:
            rule, router = layer.router_layer()._rule(), params["router"]
            observe = jax.jit(lambda x, p: loss(x, p)[1]["state/router/bias"])
            router["bias"] = jnp.zeros_like(router["bias"])
            for _ in range(UPDATES):
                router["bias"] = rule(router["bias"], observe(x, params))
        call = jax.jit(
            jax.grad(lambda *a: (lambda y, aux: (y, aux.get("metric/load_max", 1.0)))(*loss(*a)), (0, 1), has_aux=True)
        )
        start = time.perf_counter()
        call = call.lower(x, params).compile()
        compiled = time.perf_counter() - start
        _, load = jax.block_until_ready(call(x, params))
        return functools.partial(call, x, params), compiled, float(load)

    blocks = {"dense": MLP(d_model=D, d_ff=K * F)}
    for name, router in (("experts", MoE.router), ("balanced", functools.partial(SigmoidRouter, balance="quantile"))):
        for e in map(int, numbers.split(",")):
            blocks[f"{name}_{e}"] = MoE(d_model=D, num_experts=e, top_k=K, d_expert=F, router=router)
    calls = {name: prepared(layer) for name, layer in blocks.items()}
    times = {name: [] for name in blocks}
    for _ in range(repeats):
        for name, (call, _, _) in calls.items():
            start = time.perf_counter()
            for _ in range(3):
                jax.block_until_ready(call())
            times[name].append((time.perf_counter() - start) / 3)
    for name, (_, compiled, load) in calls.items():
        ratio = statistics.median(d / t for d, t in zip(times["dense"], times[name], strict=True))
        print(
            json.dumps(
                {
                    "block": name,
                    "tokens_per_s": round(tokens / statistics.median(times[name])),
                    "best": round(tokens / min(times[name])),
                    "ratio": round(ratio, 3),
                    "load_max": round(load, 2),
                    "compile_s": round(compiled, 2),
                    "jax": jax.__version__,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    words = sys.argv[1:5]
    main(*(kind(word) for kind, word in zip((int, str, int, int), words, strict=False)))
