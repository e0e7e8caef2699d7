"""Where a metric stands on a dashboard: `train/`, `eval/`, `time/`, `moe/`, `attn/` and `infer/`, and nothing beside them.

Dashboards make a panel of what stands before a name's first `/`. `metrics.jsonl` keeps the names that the code uses; trackers with a
dashboard of their own pass them through `panel`. What a layer reports (`train/metric/g0/b1/ffn/load_max/0`) comes to the panel of its
kind, the name first, so that one chart is one number over the layers: `moe/load_max/g0/b1/0`.
"""

from __future__ import annotations

PANELS = ("train", "eval", "time", "moe", "attn", "infer")
SPEEDS = ("tokens_per_s", "step_ms", "mfu", "compile_s")
HEADS = {"val": "eval", "samples": "eval/samples", "params": "train/params", "serve": "infer", "bench": "infer"}

# What the summary keeps of a curve, beside its last value: what a sweep is sorted by. W&B shows it as `eval/loss.min`.
SUMMARIES = {
    "train/loss": "min,last",
    "eval/loss": "min,last",
    "eval/bpb": "min,last",
    "eval/perplexity": "min,last",
    "eval/accuracy": "max,last",
    "time/tokens_per_s": "mean,last",
    "time/step_ms": "mean,last",
    "time/mfu": "mean,last",
}


def panel(name: str) -> str:
    """The name on a dashboard."""
    head, _, rest = name.partition("/")
    if head == "train":
        first, _, path = rest.partition("/")
        if first in SPEEDS:
            return f"time/{rest}"
        return _of_layer(path.split("/")) if first == "metric" else name
    if head in PANELS:
        return name
    place = HEADS.get(head, f"train/{head}")
    return f"{place}/{rest}" if rest else place


def _of_layer(path: list[str]) -> str:
    """`[g0, b1, ffn, load_max, 0]` -> `moe/load_max/g0/b1/0`. Heads that look further ahead have a block of their own."""
    for part, kind in (("ffn", "moe"), ("mixer", "attn")):
        if part in path[:-1]:
            at = path.index(part)
            return "/".join([kind, path[at + 1], *path[:at], *path[at + 2 :]])
    return "/".join(["train", *path])
