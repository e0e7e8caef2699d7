"""`task=serve` as a process: ready after its warm-up, drained by SIGTERM, one JSON line at the end; and keys, ports and hosts."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading

import httpx
import jax
import numpy as np
import pytest

from jaxllm.checkpoint import Checkpoints
from jaxllm.compose import compose
from jaxllm.data.tokenizer import Bytes
from jaxllm.errors import UserError
from jaxllm.inference.settings import EngineSettings, ServeSettings
from jaxllm.params import init_params
from jaxllm.tasks import TaskIO, bench_serve
from jaxllm.tasks.serve import opened, read_keys
from jaxllm.tasks.source import build_model, pack_tokenizer


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "trained"
    cfg = compose(["model=tiny", "model.layers=global/dense", "model.max_seq_len=512", "track=none"])
    model = build_model(cfg, Bytes())
    meta = {"config": cfg.to_yaml(), "tokenizer": pack_tokenizer(Bytes()), "step": 1}
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.save(1, {"params": init_params(model, jax.random.key(0)), "count": np.int32(1)}, meta)
    checkpoints.close()
    return folder


def test_a_running_stream_is_finished_before_the_server_ends(trained):
    command = [
        sys.executable,
        "-m",
        "jaxllm.run",
        "task=serve",
        f"source={trained}",
        "platform=cpu",
        "server.port=0",
        "server.rows=2",
    ]
    command += [
        "server.row_buckets=[2]",
        "server.token_buckets=[16]",
        "server.width_buckets=[32]",
        "server.prompt_logprobs=false",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )
    watchdog = threading.Timer(240, process.kill)
    watchdog.start()
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"at (http://127\.0\.0\.1:\d+)", line):
                break
        else:
            raise AssertionError("".join(lines))
        url, text = found.group(1), ""
        body = {"prompt": "a", "max_tokens": 300, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as reply:
            for part in reply.iter_text():
                if not text:
                    process.send_signal(signal.SIGTERM)
                text += part
        assert text.endswith("data: [DONE]\n\n") and "error" not in text and text.count("data: ") == 302
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        result = json.loads(out.splitlines()[-1])
        assert result["task"] == "serve" and result["requests"] == 1 and result["new_tokens"] == 300
    finally:
        watchdog.cancel()
        process.kill()


def test_keys_come_from_the_environment_or_a_file(tmp_path, monkeypatch):
    cfg = compose(["task=serve", "model=tiny", "track=none"])
    monkeypatch.setenv("A_KEY", "from-the-environment")
    (tmp_path / "keys").write_text("first-of-two\nsecond-of-two\n")
    settings = ServeSettings(api_key_env="A_KEY", api_key_file=str(tmp_path / "keys"))
    assert read_keys(cfg, settings) == ["from-the-environment", "first-of-two", "second-of-two"]
    for settings, match in (
        (ServeSettings(api_key_env="NOT_SET"), "NOT_SET"),
        (ServeSettings(api_key_file=str(tmp_path / "none")), "cannot be read"),
    ):
        with pytest.raises(UserError, match=match):
            read_keys(cfg, settings)
    monkeypatch.setenv("A_KEY", "short")
    with pytest.raises(UserError, match="can be guessed"):
        read_keys(cfg, ServeSettings(api_key_env="A_KEY"))


def test_settings_that_cannot_be_meant():
    for fields, match in (
        ({"host": "0.0.0.0"}, "server.public=true"),
        ({"port": 70000}, "port"),
        ({"step_tokens": 8}, "must exceed rows=8"),
        ({"policy": "hope"}, "policy"),
        ({"cache": "heap"}, "cache"),
        ({"row_buckets": [4, 2]}, "row_buckets"),
    ):
        with pytest.raises(UserError, match=match):
            ServeSettings(**fields)
    assert ServeSettings(host="0.0.0.0", public=True).host == "0.0.0.0"
    assert EngineSettings().rows == 8


def test_a_context_tier_sets_fields_of_the_model(trained):
    tiers = {32: {"logit_softcap": 20.0}, 512: {"logit_softcap": 30.0, "mixers.global.rope.theta": 5e5}}
    cfg = compose(["task=serve", "model=tiny", "track=none"])
    for length, cap, theta in ((32, 20.0, 1e4), (33, 30.0, 5e5)):
        given = cfg.replace({"source": str(trained), "server": {"max_len": length, "modes": tiers}})
        model = opened(given, given.section("server")).model
        assert model.logit_softcap == cap and model.mixer("global").rope.theta == theta
    for fields, match in (
        ({"modes": tiers}, "server.max_len: null, so no tier"),
        ({"modes": tiers, "max_len": 513}, r"\[32, 512\] has no tier for server.max_len=513"),
    ):
        with pytest.raises(UserError, match=match):
            ServeSettings(**fields)
    shapes = cfg.replace({"source": str(trained), "server": {"max_len": 8, "modes": {8: {"d_model": 32}}}})
    with pytest.raises(UserError, match="shape"):
        opened(shapes, shapes.section("server"))


@pytest.mark.parametrize("rate", [None, 200.0])
def test_a_benchmark_of_the_engine_in_this_process(trained, tmp_path, rate):
    shapes = {
        "rows": 2,
        "page_size": 16,
        "row_buckets": [2],
        "token_buckets": [32],
        "width_buckets": [32],
        "prompt_logprobs": False,
    }
    load = {
        "rate": rate,
        "requests": 6,
        "prompt_min": 4,
        "prompt_max": 40,
        "output_min": 2,
        "output_max": 9,
        "concurrency": 3,
    }
    cfg = compose(["task=bench_serve", "model=tiny", "track=none"])
    cfg = cfg.replace({"source": str(trained), "server": shapes, "bench": load})
    result = bench_serve.run(cfg, TaskIO(run_dir=tmp_path, err=io.StringIO()))
    assert result["failed"] == 0 and result["requests"] == 6 and result["ideal_ratio"] >= 1
    assert 0 < result["ttft_p50"] <= result["ttft_p99"] and 0 <= result["cache_max"] <= 1
    saved = json.loads((tmp_path / "bench.json").read_text())
    shown = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {"infer/running", "infer/waiting", "infer/cache", "infer/sample"} <= set(shown[0])
    assert json.loads((tmp_path / "summary.json").read_text())["infer/throughput"] == result["throughput"]
    assert sum(row["tokens"] for row in saved["rows"]) == result["new_tokens"] == saved["new_tokens"]
    assert (tmp_path / "bench.png").stat().st_size > 1000
