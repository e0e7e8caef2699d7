"""Is the time of a decode step on CPU what the roofline says? Fitted on one model, predicted for four others, all measured in turn.

    python experiments/decode_prediction/predict.py [--context 256] [--repeats 30] [--models gqa,deep,mla,hybrid] [--out DIR]

The processor is probed anew in the same minute. `overhead`: seconds a layer, so that the prediction for `time/fit` is exact; it may be
put into conf/chip/cpu.yaml as `layer_overhead`. Prints one JSON line; with --out it writes results.json too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax

from jaxllm.backend import prepare
from jaxllm.compose import compose
from jaxllm.config import CONF
from jaxllm.measure.chips import Chip, detect
from jaxllm.measure.probe import probe
from jaxllm.measure.roofline import Prediction, predict
from jaxllm.measure.timing import time_calls
from jaxllm.params import init_params
from jaxllm.tasks.timing_subjects import Subject, whole_model

FIT, MODELS, ALLOWED = "fit", "gqa,deep,mla,hybrid", 0.3


def measured_chip() -> tuple[Chip, dict[str, Any]]:
    facts = probe()
    cpu = detect("cpu", CONF / "chip")
    return dataclasses.replace(cpu, matmul=facts["matmul"], bandwidth=facts["bandwidth"], layer_overhead=0.0), facts


def subject(name: str, context: int) -> Subject:
    """A decode step of one row behind `context` tokens, as generation makes it; it holds the weights and nothing else of the model."""
    model = compose([f"model=time/{name}", "task=time"]).build("model")
    params = init_params(model, jax.random.key(0))
    return whole_model(model, params, "decode", 1, context, chunk=context, optimiser=None, objectives={})


def least(works: list[Any], chip: Chip) -> Prediction:
    found = predict(works, chip, "float32")
    assert found is not None, "a probed processor has all numbers"
    return found


def layers_of(works: list[Any]) -> int:
    return sum(w.layers * w.repeats for w in works)


def study(names: list[str], context: int, repeats: int) -> dict[str, Any]:
    """JSON: the processor, the fitted overhead, and for each model measured and predicted ms and their ratio."""
    subjects = {name: subject(name, context) for name in [FIT, *names]}
    before = measured_chip()
    timings = time_calls({name: s.call for name, s in subjects.items()}, repeats)
    after = measured_chip()
    chip, facts = max(before, after, key=lambda pair: pair[1]["bandwidth"])
    fit = subjects[FIT].works
    overhead = max(0.0, (timings[FIT].median_ms / 1e3 - least(fit, chip).seconds) / layers_of(fit))
    fitted = dataclasses.replace(chip, layer_overhead=overhead)
    rows = []
    for name, one in subjects.items():
        found = least(one.works, fitted)
        ratio = 1e3 * found.seconds / timings[name].median_ms
        rows.append(
            {
                "model": name,
                "measured_ms": timings[name].median_ms,
                "spread_ms": timings[name].spread_ms,
                "predicted_ms": 1e3 * found.seconds,
                "without_overhead_ms": 1e3 * least(one.works, chip).seconds,
                "limit": found.limit,
                "ratio": ratio,
                "ok": abs(ratio - 1) <= ALLOWED,
            }
        )
    good = all(row["ok"] for row in rows if row["model"] != FIT)
    return {
        "context": context,
        "layer_overhead_s": overhead,
        "processor": facts,
        "rows": rows,
        "ok": good,
        "jax": jax.__version__,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    prepare(compose([]).common)
    result = study(args.models.split(","), args.context, args.repeats)
    for row in result["rows"]:
        print(
            f"{row['model']:8} measured {row['measured_ms']:7.2f} ms (spread {row['spread_ms']:.2f}), predicted"
            f" {row['predicted_ms']:7.2f}, of which overhead {row['predicted_ms'] - row['without_overhead_ms']:.2f}: {row['ratio']:.2f}",
            file=sys.stderr,
        )
    print(json.dumps(result))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "results.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
