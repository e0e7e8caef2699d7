"""How fast the gated delta rule is: our forms in turn with transformers', at one length; ours alone over lengths; decode at positions.

    python experiments/linear_attention/speed.py [--peer PYTHON] [--rounds 7] [--only rule,length,decode] [--out DIR]

rule: B=1, H=4, d=64, T=1024, float32, forward and forward + backward, KDA and GDN. --peer: a Python with torch and transformers; its
chunk forms are then timed on inputs like ours, round by round with ours, so that a busy moment meets all. length: 512 .. 32,768 tokens of
one layer of softmax attention, GDN and KDA. decode: their steps behind 100, 4,096 and 32,768 tokens. Prints min and median ms; with --out
it writes speed.json and the crossover plot.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HEADS, DIM = 4, 64
PEER = """
import sys, time, json, os
os.environ["HF_HUB_OFFLINE"] = "1"
import numpy as np, torch
from transformers.models.kimi_linear import modeling_kimi_linear as KL
from transformers.models.qwen3_next import modeling_qwen3_next as QN
torch.set_num_threads(os.cpu_count())
forms = {"kda": KL.chunk_kimi_delta_attention, "gdn": QN.torch_chunk_gated_delta_rule}
given = {kind: [torch.tensor(x) for x in np.load(sys.argv[1] + f"/{kind}.npz").values()] for kind in forms}
for line in sys.stdin:
    kind, phase = line.split()
    x = [t.detach().clone().requires_grad_(phase == "both") for t in given[kind]]
    start = time.perf_counter()
    if phase == "both":
        forms[kind](*x)[0].square().sum().backward()
    else:
        with torch.no_grad():
            forms[kind](*x)
    print(json.dumps(1e3 * (time.perf_counter() - start)), flush=True)
"""


def inputs(kind: str, t: int) -> list[np.ndarray]:
    """q, k of norm 1, v, decays near 0.93, beta in (0, 1)."""
    rng = np.random.default_rng(0)

    def unit(x: np.ndarray) -> np.ndarray:
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    x = [rng.standard_normal((1, t, HEADS, DIM)) for _ in range(3)]
    z = rng.standard_normal((1, t, HEADS, DIM) if kind == "kda" else (1, t, HEADS))
    parts = [
        unit(x[0]),
        unit(x[1]),
        x[2],
        -0.1 * np.log1p(np.exp(z)),
        1 / (1 + np.exp(-rng.standard_normal((1, t, HEADS)))),
    ]
    return [p.astype(np.float32) for p in parts]


def timed(call: Callable[[], Any]) -> float:
    import jax

    start = time.perf_counter()
    jax.block_until_ready(call())
    return 1e3 * (time.perf_counter() - start)


def both_ways(form: Callable[..., Any], args: list[Any]) -> dict[str, Callable[[], Any]]:
    """Compiled forward, and forward with the gradients of all inputs."""
    import jax
    import jax.numpy as jnp

    forward = jax.jit(form)
    grad = jax.jit(jax.value_and_grad(lambda *a: jnp.sum(jnp.square(form(*a))), argnums=range(len(args))))
    calls = {"forward": lambda: forward(*args), "both": lambda: grad(*args)}
    for call in calls.values():
        jax.block_until_ready(call())
    return calls


def rounds(calls: dict[str, Callable[[], float]], count: int) -> dict[str, dict[str, float]]:
    """{name: min and median ms}, every call once a round."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(count):
        for name, call in calls.items():
            taken[name].append(call())
    return {name: {"min": min(ms), "median": statistics.median(ms)} for name, ms in taken.items()}


def rule(count: int, peer: str | None, folder: Path) -> dict[str, dict[str, float]]:
    import jax.numpy as jnp

    from jaxllm.ops.delta import delta_rule

    calls: dict[str, Callable[[], float]] = {}
    child: subprocess.Popen[str] | None = None
    if peer is not None:
        for kind in ("kda", "gdn"):
            np.savez(folder / f"{kind}.npz", *inputs(kind, 1024))
        pipe = subprocess.PIPE
        child = subprocess.Popen(
            [peer, "-c", PEER, str(folder)], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )

    def ask(kind: str, phase: str) -> float:
        assert child is not None and child.stdin is not None and child.stdout is not None
        child.stdin.write(f"{kind} {phase}\n")
        child.stdin.flush()
        return float(child.stdout.readline())

    for kind, bounded in (("kda", True), ("kda", False), ("gdn", False)):
        q, *rest = (jnp.asarray(x) for x in inputs(kind, 1024))

        def form(q: Any, *rest: Any, bounded: bool = bounded) -> Any:
            return delta_rule(q * DIM**-0.5, *rest, bounded=bounded)[0]

        name = f"{kind}{' bounded' if bounded else ' softplus' if kind == 'kda' else ''}"
        for phase, call in both_ways(form, [q, *rest]).items():
            calls[f"ours {name} {phase}"] = lambda call=call: timed(call)
        if child is not None and not bounded:
            for phase in ("forward", "both"):
                ask(kind, phase)
                calls[f"transformers {kind} {phase}"] = lambda kind=kind, phase=phase: ask(kind, phase)
    result = rounds(calls, count)
    if child is not None:
        child.communicate()
    return result


def layers() -> dict[str, Any]:
    """One layer of each kind, about equally large."""
    from jaxllm.layers.gdn import GatedDeltaNet
    from jaxllm.layers.gqa import GQA
    from jaxllm.layers.kda import KDA

    width = HEADS * DIM
    return {
        "softmax": GQA(num_heads=HEADS, d_model=width),
        "gdn": GatedDeltaNet(num_v_heads=HEADS, d_model=width),
        "kda": KDA(num_heads=HEADS, d_model=width),
    }


def drawn(layer: Any) -> Any:
    """Parameters of one layer by its declaration."""
    import jax
    import jax.numpy as jnp

    from jaxllm.layers.base import Context
    from jaxllm.params import is_declared

    x, ctx = jnp.zeros((1, 4, layer.d_model)), Context.whole(jnp.zeros((1, 4), jnp.int32))
    boxes = jax.eval_shape(layer.init, jax.random.key(0), x, ctx)["params"]
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda b: jnp.asarray(b.init.draw(rng, b.value.shape)), boxes, is_leaf=is_declared)


def length(count: int, longest: int) -> dict[str, dict[str, float]]:
    """ms of a whole layer over lengths; attention stops where a step would take minutes."""
    import jax.numpy as jnp

    from jaxllm.layers.base import Context

    result = {}
    for t in (2**n for n in range(9, longest.bit_length())):
        calls = {}
        for name, layer in layers().items():
            params, ctx = drawn(layer), Context.whole(jnp.zeros((1, t), jnp.int32))
            x = jnp.asarray(np.random.default_rng(1).standard_normal((1, t, layer.d_model)), jnp.float32)

            def form(x: Any, layer: Any = layer, params: Any = params, ctx: Any = ctx) -> Any:
                return layer.apply({"params": params}, x, ctx)[0]

            for phase, call in both_ways(form, [x]).items():
                calls[f"{name} {phase} {t}"] = lambda call=call: timed(call)
        result |= rounds(calls, max(2, count // 2) if t > 4096 else count)
        print(json.dumps({k: v for k, v in result.items() if k.endswith(f" {t}")}), flush=True)
    return result


def decode(count: int) -> dict[str, dict[str, float]]:
    """ms of one token behind so many others, the cache donated."""
    import jax
    import jax.numpy as jnp

    from jaxllm.layers.base import Context

    calls = {}
    for name, layer in layers().items():
        params, width = layer.prepare(drawn(layer)), layer.d_model
        for behind in (100, 4096, 32768):
            cache = layer.init_cache(1, behind + 1, jnp.float32)
            step = jax.jit(
                lambda cache, x, ctx, layer=layer, params=params: layer.apply({"params": params}, x, ctx, cache)[:2],
                donate_argnums=0,
            )
            held = {"cache": cache}
            args = jnp.ones((1, 1, width)), Context.step(jnp.zeros((1, 1), jnp.int32), jnp.array([behind]))

            def call(step: Any = step, held: Any = held, args: Any = args) -> float:
                start = time.perf_counter()
                for _ in range(20):
                    y, held["cache"] = step(held["cache"], *args)
                jax.block_until_ready(y)
                return 1e3 * (time.perf_counter() - start) / 20

            call()
            calls[f"{name} decode {behind}"] = call
    return rounds(calls, count)


def plot(result: dict[str, dict[str, float]], path: Path) -> None:
    """Time against context, one picture for each of forward, forward + backward and decode."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 4))
    for axis, phase, title in zip(
        axes, ("forward", "both", "decode"), ("forward", "forward + backward", "one decoded token"), strict=True
    ):
        for name in layers():
            points = sorted(
                (int(k.split()[2]), v["median"]) for k, v in result.items() if k.startswith(f"{name} {phase} ")
            )
            if points:
                axis.loglog(*zip(*points, strict=True), marker="o", label=name)
        axis.set(title=title, xlabel="tokens", ylabel="ms")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--longest", type=int, default=32768)
    parser.add_argument("--only", default="rule,length,decode")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    import tempfile

    result: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        if "rule" in args.only:
            result |= rule(args.rounds, args.peer, Path(folder))
    if "length" in args.only:
        result |= length(args.rounds, args.longest)
    if "decode" in args.only:
        result |= decode(args.rounds)
    for name, ms in result.items():
        print(f"{name:32s} min {ms['min']:9.2f} ms   median {ms['median']:9.2f} ms")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "speed.json").write_text(json.dumps(result, indent=1))
        plot(result, args.out / "crossover.png")


if __name__ == "__main__":
    sys.exit(main())
