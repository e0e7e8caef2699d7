"""What a token costs behind a context of 4k to 1M tokens: attention of every kind at one size, and released models at theirs.

    python experiments/long_context_costs/costs.py [OUT]

From configurations alone; nothing is allocated or run, and no accelerator is needed. Writes into OUT (default: beside this file)
table.md, claims.md, costs.png and results.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from jaxllm.compose import compose
from jaxllm.layers.indexer import Indexer
from jaxllm.model import LanguageModel

CONTEXTS = tuple(2**n for n in range(12, 21))
# One layer stack of V3's width and depth, so that only the mechanism differs: (mixer, its fields, layer string).
LAYERS, D = 60, 7168
HEADS = {"num_heads": 128}
GQA = {**HEADS, "head_dim": 128}
MLA = {
    **HEADS,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
DSA = {**MLA, "top_k": 2048, "index_heads": 64, "index_head_dim": 128}
V4 = {
    **HEADS,
    "head_dim": 512,
    "q_lora_rank": 1536,
    "rope_head_dim": 64,
    "window": 128,
    "out_groups": 16,
    "out_lora_rank": 1024,
}
KINDS: dict[str, tuple[dict[str, tuple[str, dict[str, Any]]], str]] = {
    "MHA": ({"a": ("mha", GQA)}, f"{LAYERS}* a/dense"),
    "GQA-8": ({"a": ("gqa", {**GQA, "num_kv_heads": 8})}, f"{LAYERS}* a/dense"),
    "MQA": ({"a": ("mqa", GQA)}, f"{LAYERS}* a/dense"),
    "MLA": ({"a": ("mla", MLA)}, f"{LAYERS}* a/dense"),
    "DSA": ({"a": ("dsa", DSA)}, f"{LAYERS}* a/dense"),
    "CSA/HCA": (
        {
            "a": ("csa", {**V4, "compress_rate": 4, "top_k": 1024, "index_heads": 64, "index_head_dim": 128}),
            "b": ("hca", {**V4, "compress_rate": 128}),
        },
        f"{LAYERS // 2}* a/dense b/dense",
    ),
    "KDA:MLA 3:1": (
        {"a": ("kda", {**HEADS, "head_dim": 128}), "b": ("mla", {**MLA, "rope": None})},
        f"{LAYERS // 4}* a/dense*3 b/dense",
    ),
}
RELEASED = ("deepseek_v32", "deepseek_v4_pro", "deepseek_v4_flash", "glm_5_2")


def model(*settings: str) -> LanguageModel:
    built = compose(["task=count", *settings]).build("model")
    assert isinstance(built, LanguageModel)
    return built


def stack(kind: str) -> LanguageModel:
    """The mechanism in a model whose feed-forward layers are of no size to speak of."""
    mixers, layers = KINDS[kind]
    settings = [
        "model=tiny",
        f"model.d_model={D}",
        f"model.layers='{layers}'",
        "model.dtype=bfloat16",
        "model.vocab_size=8",
    ]
    settings += ["model.ffns.dense.d_ff=1", "~model.mixers.global"]
    for role, (mixer, fields) in mixers.items():
        settings.append(f"+mixer@model.mixers.{role}={mixer}")
        settings += [f"model.mixers.{role}.{name}={'null' if v is None else v}" for name, v in fields.items()]
    return model(*settings)


def decode(built: LanguageModel, context: int) -> dict[str, float]:
    """Of one more token behind `context`: FLOPs, and bytes of cache held and read."""
    cost = built.cost(1, 1, context)
    return {"flops": cost.flops, "held": cost.cache_per_token * context + cost.cache_constant, "read": cost.cache_read}


def core(built: LanguageModel, context: int) -> float:
    """FLOPs that come with the context: those of the token alone taken away."""
    return built.cost(1, 1, context).flops - built.cost(1, 1, 0).flops


def active(built: LanguageModel) -> int:
    return built.cost(1, 1, 1).params_active


def v32_parts(built: LanguageModel, context: int) -> tuple[float, float]:
    """(indexer, attention) of V3.2."""
    mixer = built.mixer("full")
    scored = 2.0 * built.num_layers * context * mixer.index_heads * mixer.index_width
    return scored, core(built, context) - scored


def v4_parts(built: LanguageModel, context: int) -> tuple[float, float]:
    """(indexer, attention) of a V4."""
    csa = built.mixer("csa")
    layers = sum(group.repeats * [m for m, _ in group.period].count("csa") for group in built.groups)
    scored = 2.0 * layers * (context // csa.compress_rate) * csa.index_heads * 128
    return scored, core(built, context) - scored


def claims(context: int = 2**20) -> dict[str, float]:
    """The published comparisons, by plain count and weighed by precision.

    Weighed: FP8 products count 1, attention cores in bfloat16 2, V4's indexer in FP4 0.5. Bytes: V3.2 holds 656 + 132 a token and
    layer (FP8 latents with scales, bfloat16 keys, FP8 index keys with their scale), V4 576 an entry and 64 an index key in FP4.
    """
    v32, pro, flash, glm = (model(f"model={name}") for name in RELEASED)
    out: dict[str, float] = {}
    (i_32, a_32), weights_32 = v32_parts(v32, context), 2.0 * active(v32)
    bytes_32 = v32.num_layers * (656 + 132.0)
    for name, built in (("v4_pro", pro), ("v4_flash", flash)):
        (i, a), weights = v4_parts(built, context), 2.0 * active(built)
        out[f"{name}_flops"] = (weights + i + a) / (weights_32 + i_32 + a_32)
        out[f"{name}_flops_weighed"] = (weights + 0.5 * i + 2 * a) / (weights_32 + i_32 + 2 * a_32)
        kinds = [m for group in built.groups for m, _ in group.period * group.repeats]
        held = kinds.count("csa") * (576 + 64) / 4 + kinds.count("hca") * 576 / 128
        out[f"{name}_bytes"] = held / bytes_32
        out[f"{name}_elements"] = built.cost(1, 1, 1).cache_per_token / v32.cost(1, 1, 1).cache_per_token
    every = glm.clone(
        layers=" | ".join(f"{g.repeats}* " + " ".join(f"full/{f}" for _, f in g.period) for g in glm.groups)
    )
    mixer = glm.mixer("full")
    own = Indexer.weights(glm.d_model, mixer.q_lora_rank, mixer.index_heads, mixer.index_width, mixer.index_pool)
    scored = 2.0 * context * mixer.index_heads * mixer.index_width
    shared, whole = (built.cost(1, 1, context).flops for built in (glm, every))
    per_layer = scored + 2.0 * own
    out["index_share"] = whole / shared
    out["index_share_quarter"] = whole / (whole - 0.75 * glm.num_layers * per_layer)
    out["index_share_expanded"] = _expanded(glm, whole, context) / _expanded(glm, shared, context)
    return out


def _expanded(built: LanguageModel, flops: float, context: int) -> float:
    """FLOPs with the attention core counted as keys and values of each head instead of latents."""
    mixer = built.mixer("full")
    r, n, o, v = mixer.sizes
    less = 2.0 * built.num_layers * min(context, mixer.top_k) * mixer.num_heads * (2 * r + o - (n + o + v))
    return flops - less


def table(results: dict[str, dict[int, dict[str, float]]]) -> str:
    lines = [
        "Per decoded token, 60 layers of d 7168 and 128 heads in bfloat16, attention and its projections alone.",
        "",
    ]
    for field, title, unit in (
        ("flops", "GFLOP", 1e9),
        ("held", "GiB of cache held", 2**30),
        ("read", "GiB of cache read", 2**30),
    ):
        lines += [
            f"| {title} | " + " | ".join(f"{c // 1024}k" for c in CONTEXTS) + " |",
            "| --- |" + " ---: |" * len(CONTEXTS),
        ]
        for kind, by_context in results.items():
            lines.append(f"| {kind} | " + " | ".join(f"{by_context[c][field] / unit:,.2f}" for c in CONTEXTS) + " |")
        lines.append("")
    return "\n".join(lines)


def claims_table(found: dict[str, float]) -> str:
    rows = [
        (
            "V4-Pro / V3.2, FLOPs a token",
            "27 %",
            f"{found['v4_pro_flops']:.1%}; weighed {found['v4_pro_flops_weighed']:.1%}",
        ),
        ("V4-Pro / V3.2, cache", "10 %", f"{found['v4_pro_bytes']:.1%}; elements {found['v4_pro_elements']:.1%}"),
        (
            "V4-Flash / V3.2, FLOPs a token",
            "10 %",
            f"{found['v4_flash_flops']:.1%}; weighed {found['v4_flash_flops_weighed']:.1%}",
        ),
        ("V4-Flash / V3.2, cache", "7 %", f"{found['v4_flash_bytes']:.1%}; elements {found['v4_flash_elements']:.1%}"),
        (
            "GLM-5.2 with IndexShare, times fewer FLOPs",
            "2.9",
            f"{found['index_share']:.2f}; core expanded {found['index_share_expanded']:.2f};"
            f" every 4th layer {found['index_share_quarter']:.2f}",
        ),
    ]
    lines = ["| at 1,048,576 tokens | published | from the configurations |", "| --- | ---: | ---: |"]
    return "\n".join([*lines, *(f"| {a} | {b} | {c} |" for a, b, c in rows), ""])


def plot(results: dict[str, dict[int, dict[str, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5))
    for axis, field, unit, title in (
        (axes[0], "flops", 1e9, "GFLOP a token"),
        (axes[1], "held", 2**30, "GiB of cache a row"),
    ):
        for kind, by_context in results.items():
            axis.plot(CONTEXTS, [by_context[c][field] / unit for c in CONTEXTS], marker="o", markersize=3, label=kind)
        axis.set(xscale="log", yscale="log", xlabel="tokens of context", title=title)
        axis.set_xticks([4096, 32768, 262144, 1048576], ["4k", "32k", "256k", "1M"])
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent
    out.mkdir(parents=True, exist_ok=True)
    built = {kind: stack(kind) for kind in KINDS}
    results = {kind: {c: decode(m, c) for c in CONTEXTS} for kind, m in built.items()}
    found = claims()
    (out / "table.md").write_text(table(results))
    (out / "claims.md").write_text(claims_table(found))
    (out / "results.json").write_text(json.dumps({"costs": results, "claims": found}, indent=1) + "\n")
    plot(results, out / "costs.png")
    print((out / "claims.md").read_text())


if __name__ == "__main__":
    main()
