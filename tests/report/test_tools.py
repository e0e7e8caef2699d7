"""Calculators: right where the answer is known, equal to the layers' own costs, and the same in JavaScript as in Python."""

import json
import re
import subprocess

import numpy as np
import pytest
from pages import NODE, check_self_contained, chromium, seen

from jaxllm.compose import compose
from jaxllm.report import formulas, tools
from jaxllm.report.tools import CALCULATORS

BY_NAME = {c.formula.__name__: c for c in CALCULATORS}


def defaults(name, **changed):
    return {key: slider.value for key, slider in BY_NAME[name].sliders.items()} | changed


def test_a_million_tokens_is_two_terabytes():
    assert formulas.attention_matrix(n=1e6, heads=1, layers=1, bytes_each=2)["one head bytes"] == 2e12


def test_speculation_by_simulation():
    rng, accept, draft = np.random.default_rng(0), 0.7, 5
    kept = np.cumprod(rng.random((200_000, draft)) < accept, axis=1).sum(axis=1) + 1  # and the large model's own token
    got = formulas.speculative(accept, draft, 0.1)
    assert got["tokens a step"] == pytest.approx(kept.mean(), rel=0.01)
    assert got["times as fast"] == pytest.approx(kept.mean() / 1.5, rel=0.01)
    assert (
        formulas.speculative(1.0, 5, 0)["tokens a step"] == 6 and formulas.speculative(0.0, 5, 0)["tokens a step"] == 1
    )


def test_published_models():
    v3 = formulas.experts(**defaults("experts"))
    assert v3["total parameters"] == pytest.approx(671e9, rel=0.01) and v3["active parameters"] == pytest.approx(
        37e9, rel=0.02
    )
    mixtral = formulas.experts(**defaults("experts", **BY_NAME["experts"].examples["Mixtral 8x7B"]))
    assert mixtral["total parameters"] == pytest.approx(46.7e9, rel=0.01)
    assert formulas.cache(**defaults("cache"))["MLA bytes"] == 61 * 576 * 2 * 32768  # DeepSeek-V3: 70 kB a token


def test_zero_stages():
    whole = formulas.training(**defaults("training", zero=0))
    assert whole["total bytes"] - whole["activations bytes"] == 7e9 * 16
    third = formulas.training(**defaults("training", zero=3))
    assert third["parameters bytes"] + third["gradients bytes"] + third["optimiser bytes"] == 7e9 * 16 / 8
    order = [formulas.training(**defaults("training", zero=z))["total bytes"] for z in range(4)]
    assert order == sorted(order, reverse=True) and len(set(order)) == 4
    assert formulas.zero_stage(4, 4, 8, 1, devices=4, zero=2)["total bytes"] == 4 + 1 + 2 + 1


@pytest.mark.parametrize(
    "mixer, kind, numbers",
    [
        ("mha", "MHA", {}), ("gqa", "GQA", {"kv_heads": 2}), ("mqa", "MQA", {}), ("swa", "window", {"kv_heads": 2, "window": 8}),
        ("mla", "MLA", {"latent": 64, "rope_dim": 8}), ("dsa", "DSA", {"latent": 64, "rope_dim": 8, "index_dim": 16}),
        ("kda", "KDA", {}), ("csa", "CSA", {"latent": 16, "index_dim": 16, "rate": 4, "window": 1}),
    ],
)  # fmt: skip
def test_equals_the_layers_own_cost(mixer, kind, numbers):
    """Exactly, but for CSA's constant: besides the window there are windows that are not complete yet."""
    cfg = compose(["model=tiny", "model.vocab_size=64", "model.layers=3* global/dense", f"mixer@model.mixers.global={mixer}",
                   "model.mixers.global.num_heads=4", "model.dtype=float32" ])  # fmt: skip
    context = 4096
    cost = cfg.build("model").cost(1, 1, context)
    held = cost.cache_per_token * context + (3 * 16 * 4 if kind == "CSA" else cost.cache_constant)
    values = defaults("cache", layers=3, heads=4, head_dim=16, context=context, batch=1, bytes_each=4) | numbers
    got = formulas.cache(**values)
    assert got[f"{kind} bytes"] == pytest.approx(held, rel=1e-12)
    assert got[f"{kind} users"] == np.floor(141e9 / held)


def cases():
    """Random settings of every calculator, the sliders' ends among them."""
    rng = np.random.default_rng(0)
    out = []
    for name, c in BY_NAME.items():
        for n in range(40):
            u = rng.random(len(c.sliders)) if n > 1 else np.full(len(c.sliders), n)
            values = {k: s.low + x * (s.high - s.low) for (k, s), x in zip(c.sliders.items(), u, strict=True)}
            values = {k: float(round(v)) if c.sliders[k].whole else float(v) for k, v in values.items()}
            out.append([name, values])
    return out


@pytest.mark.skipif(NODE is None, reason="there is no Node.js here")
def test_the_page_calculates_what_python_does():
    asked = cases()
    ask = f"console.log(JSON.stringify({json.dumps(asked)}.map(([f,v])=>calculate(f,v))))"
    done = subprocess.run([NODE, "-"], input=f"{tools.script()};{ask}", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for (name, values), got in zip(asked, json.loads(done.stdout), strict=True):
        want = dict(BY_NAME[name].formula(**values))
        assert got.keys() == want.keys() and all(got[k] == pytest.approx(want[k], rel=1e-12) for k in want), (
            name,
            values,
        )


def test_what_is_no_arithmetic_is_refused():
    def loops(a):
        for _ in a:
            a = a + 1
        return {"a": a}

    def opens(a):
        return {"a": open(a)}

    for formula in (loops, opens):
        with pytest.raises(ValueError, match="no arithmetic"):
            formulas.to_js(formula)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("tools") / "tools.html"
    path.write_text(tools.report())
    return path


def test_every_argument_has_a_slider_and_every_input_a_name(written):
    page = check_self_contained(written.read_text())
    inputs = page.all("input")
    assert inputs and all(a.get("aria-label") for a in inputs)
    for c in CALCULATORS:
        assert list(c.sliders) == list(c.formula.__code__.co_varnames[: c.formula.__code__.co_argcount])
        assert all(example.keys() <= c.sliders.keys() for example in c.examples.values())


def test_in_a_browser(written, tmp_path):
    """The script runs under the page's own policy, shows the default results, and fits a phone."""
    dom = chromium(
        "--window-size=390,900", "--virtual-time-budget=2000", "--dump-dom", written.as_uri(), folder=tmp_path
    )
    shown = dict(re.findall(r'data-out="([^"]+)"><span>[^<]*</span><output>([^<]*)</output>', dom))
    assert shown["one head bytes"] == "2 TB" and shown["MLA bytes"] == "2.303 GB"
    assert float(shown["tokens a step"]) == pytest.approx(formulas.speculative(0.8, 4, 0.05)["tokens a step"], rel=1e-3)
    found = seen(written, tmp_path)
    assert found["bad"] == [] and found["scroll"] <= found["width"]
