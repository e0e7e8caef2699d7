"""`tools.html`: the calculators of `formulas` with sliders, on one page that needs no network. Its JavaScript is made from the Python."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxllm.report import formulas, page
from jaxllm.report.formulas import Formula


@dataclasses.dataclass(frozen=True)
class Slider:
    """What one argument of a formula may be; log: the slider moves by factors. whole: it stops at whole numbers."""

    words: str
    low: float
    high: float
    value: float
    log: bool = False
    whole: bool = True


@dataclasses.dataclass(frozen=True)
class Calculator:
    """sliders: by argument, in order. examples: settings a button sets."""

    formula: Formula
    title: str
    sliders: Mapping[str, Slider]
    examples: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)


_BYTES = Slider("bytes of an element", 1, 4, 2, whole=False)
CALCULATORS: Sequence[Calculator] = (
    Calculator(
        formulas.cache,
        "How many users fit? Caches by kind of attention",
        {
            "layers": Slider("layers", 1, 160, 61),
            "heads": Slider("heads", 1, 256, 128, log=True),
            "kv_heads": Slider("kv heads of GQA", 1, 64, 8, log=True),
            "head_dim": Slider("head dimension", 16, 512, 128, log=True),
            "latent": Slider("latent (MLA), entry (CSA)", 32, 2048, 512, log=True),
            "rope_dim": Slider("rotated key (MLA)", 0, 128, 64),
            "index_dim": Slider("index key (DSA, CSA)", 0, 256, 128),
            "rate": Slider("tokens of an entry (CSA)", 1, 128, 4, log=True),
            "window": Slider("window", 1, 1e6, 128, log=True),
            "context": Slider("tokens of context", 1, 1e7, 32768, log=True),
            "batch": Slider("rows", 1, 4096, 1, log=True),
            "bytes_each": _BYTES,
            "memory_gb": Slider("memory, GB", 1, 20000, 141, log=True),
            "weights_gb": Slider("weights, GB", 0, 2000, 0),
        },
        {
            "70 B, 8-way H200": {
                "layers": 80,
                "heads": 64,
                "kv_heads": 8,
                "head_dim": 128,
                "memory_gb": 1128,
                "weights_gb": 141,
            },
            "DeepSeek-V3": {
                "layers": 61,
                "heads": 128,
                "latent": 512,
                "rope_dim": 64,
                "memory_gb": 1128,
                "weights_gb": 671,
            },
        },
    ),
    Calculator(
        formulas.training,
        "What training holds: parallelism and ZeRO",
        {
            "params_b": Slider("parameters, billions", 0.01, 2000, 7, log=True, whole=False),
            "layers": Slider("layers", 1, 160, 32),
            "d_model": Slider("d_model", 64, 16384, 4096, log=True),
            "length": Slider("tokens of a sequence", 128, 1e6, 4096, log=True),
            "rows": Slider("sequences of a device", 1, 64, 1),
            "devices": Slider("devices", 1, 16384, 8, log=True),
            "tensor": Slider("of which tensor-parallel", 1, 64, 1, log=True),
            "zero": Slider("ZeRO stage", 0, 3, 3),
            "param_bytes": Slider("bytes of a parameter", 2, 4, 4),
            "recompute": Slider("recompute (0 or 1)", 0, 1, 0),
        },
    ),
    Calculator(
        formulas.experts,
        "Mixtures of experts: total and active",
        {
            "layers": Slider("layers", 1, 160, 61),
            "dense_layers": Slider("of which dense", 0, 160, 3),
            "d_model": Slider("d_model", 64, 16384, 7168, log=True),
            "attention_m": Slider("attention, million a layer", 1, 1000, 187, log=True),
            "d_ff": Slider("d_ff of dense layers", 64, 65536, 18432, log=True),
            "d_expert": Slider("d_expert", 16, 32768, 2048, log=True),
            "number": Slider("experts", 1, 1024, 256, log=True),
            "top_k": Slider("of a token", 1, 64, 8),
            "shared": Slider("shared", 0, 8, 1),
            "vocab": Slider("vocabulary", 256, 300000, 129280, log=True),
        },
        {
            "DeepSeek-V3": {},
            "Mixtral 8x7B": {
                "layers": 32,
                "dense_layers": 0,
                "d_model": 4096,
                "attention_m": 42,
                "d_expert": 14336,
                "number": 8,
                "top_k": 2,
                "shared": 0,
                "vocab": 32000,
            },
        },
    ),
    Calculator(
        formulas.attention_matrix,
        "The attention matrix, if it were written down",
        {
            "n": Slider("tokens", 128, 1e7, 1e6, log=True),
            "heads": Slider("heads", 1, 256, 32, log=True),
            "layers": Slider("layers", 1, 160, 32),
            "bytes_each": _BYTES,
        },
    ),
    Calculator(
        formulas.speculative,
        "Speculation: expected tokens a step",
        {
            "accept": Slider("probability that a draft is kept", 0, 1, 0.8, whole=False),
            "draft": Slider("drafted tokens", 0, 32, 4),
            "cost": Slider("cost of a drafted token, in steps", 0, 1, 0.05, whole=False),
        },
    ),
)


def script() -> str:
    """The formulas, the sliders and what binds them to the page; without a document, `calculate(name, {argument: value})` alone."""
    names = [c.formula.__name__ for c in CALCULATORS]
    specs = {c.formula.__name__: {k: dataclasses.asdict(s) for k, s in c.sliders.items()} for c in CALCULATORS}
    functions = "\n".join(formulas.to_js(c.formula) for c in CALCULATORS)
    return f"'use strict';\n{functions}\nconst FORMULAS={{{','.join(names)}}},SPECS={json.dumps(specs)};\n{_beside('tools.js')}"


def _beside(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def report() -> str:
    """HTML of the page."""
    style = f"<style>{_beside('tools.css')}</style>"
    intro = style + page.paragraph(
        "Every number is the same formula as in Python (jaxllm.report.formulas). GB are 10^9 bytes.", "note"
    )
    return page.page("Calculators", {c.title: _tool(c) for c in CALCULATORS}, intro=intro, script=script())


def _tool(c: Calculator) -> str:
    rows = []
    for name, s in c.sliders.items():
        step = "1" if s.whole else "any"
        words = page.escape(s.words)
        number = f'<input type="number" aria-label="{words}" min="{s.low:g}" max="{s.high:.12g}" step="{step}">'
        slide = f'<input type="range" aria-label="{words}, slider" min="0" max="1000">'
        rows.append(f'<div class="in" data-in="{name}"><span>{words}</span>{number}{slide}</div>')
    results = c.formula(**{name: s.value for name, s in c.sliders.items()})
    outs = "".join(
        f'<div class="out" data-out="{page.escape(name)}"><span>{page.escape(name)}</span><output></output><span><i></i></span></div>'
        for name in results
    )
    buttons = "".join(
        f'<button data-set="{page.escape(json.dumps(dict(values)))}">{page.escape(name)}</button>'
        for name, values in c.examples.items()
    )
    words = page.paragraph(" ".join((inspect.getdoc(c.formula) or "").split()), "note")
    inside = f'<div>{buttons}{"".join(rows)}</div><div aria-live="polite">{outs}</div>'
    return f'{words}<div class="tool" id="{c.formula.__name__}">{inside}</div>'
