"""`task=generate` and `source=`: from a checkpoint to text, and one line for everything that can be wrong."""

import functools
import io
import json
import shutil
from unittest import mock

import jax
import numpy as np
import pytest

from jaxllm.checkpoint import Checkpoints
from jaxllm.compose import compose
from jaxllm.data.tokenizer import BPE, Bytes
from jaxllm.errors import UserError
from jaxllm.inference.generate import Generator
from jaxllm.params import init_params
from jaxllm.tasks import TaskIO, generate
from jaxllm.tasks.source import build_model, open_source, pack_tokenizer, unpack_tokenizer

LENGTH = 64


def make_run(folder, *, tokenizer=None, pack=True, steps=(1, 2)):
    """A run folder as training leaves it, with random weights."""
    tokenizer = Bytes() if tokenizer is None else tokenizer
    cfg = compose(["model=tiny", "model.layers=global/dense", f"model.max_seq_len={LENGTH}", "track=none"])
    model = build_model(cfg, tokenizer)
    params = init_params(model, jax.random.key(0))
    meta = {"config": cfg.to_yaml()} | ({"tokenizer": pack_tokenizer(tokenizer)} if pack else {})
    tokenizer.save(folder / "tokenizer")
    checkpoints = Checkpoints(folder / "checkpoints")
    for step in steps:
        scaled = jax.tree.map(lambda leaf, step=step: leaf * (1 + step / 10), params)
        checkpoints.save(step, {"params": scaled, "count": np.int32(step)}, meta | {"step": step})
    checkpoints.close()
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "trained")


GENERATORS = {}
BASE = {"max_new_tokens": 6, "temperature": 0.0}


def shared(model, tokenizer):
    """One generator for all runs here, which have models of one shape: what a test costs is compilation."""
    return GENERATORS.setdefault(tokenizer.vocab_size, Generator(model, tokenizer))


@functools.cache
def base():
    return compose(["task=generate", "model=tiny", "track=none"])


def call(source, run_dir=None, make=shared, **keys):
    """(result, stderr) of the task."""
    cfg = base().replace({"source": None if source is None else str(source), **BASE, **keys})
    err, out = io.StringIO(), io.StringIO()
    with mock.patch.object(generate, "Generator", make):
        result = generate.run(cfg, TaskIO(run_dir=run_dir, out=out, err=err))
    assert out.getvalue() == ""  # stdout belongs to the JSON line
    return json.loads(json.dumps(result)), err.getvalue()


def refused(source, **keys):
    """The line of the UserError that the task raises."""
    with pytest.raises(UserError) as caught:
        call(source, **keys)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_the_newest_checkpoint_speaks_and_the_text_is_shown(trained):
    result, shown = call(trained, make=Generator, prompt="hello")
    assert result["step"] == 2 and result["checkpoint"].endswith("checkpoints/2")
    assert len(result["tokens"]) == result["new_tokens"] == 6 or result["finish"] == "stop"
    assert result["prompt_tokens"] == 6  # bos and five bytes
    assert result["tokens_processed"] == 6 + len(result["tokens"]) - 1
    assert result["ttft_s"] > 0 and result["tokens_per_s"] > 0 and result["compile_s"] > 0
    assert result["text"] == Bytes().decode(t for t in result["tokens"] if t != Bytes().eos_id)
    assert "hello" + generate.printable(result["text"]) in shown
    assert "comparison" not in result


def test_a_checkpoint_copied_alone_gives_the_same_text(trained, tmp_path):
    whole, _ = call(trained, prompt="hello")
    for name in ("2", "a copy"):
        shutil.copytree(trained / "checkpoints" / "2", tmp_path / name)
        alone, _ = call(tmp_path / name, prompt="hello")
        assert alone["tokens"] == whole["tokens"] and alone["step"] == 2
    inside, _ = call(trained / "checkpoints" / "1", prompt="hello")
    assert inside["step"] == 1
    folder, _ = call(trained / "checkpoints", prompt="hello")
    assert folder["tokens"] == whole["tokens"]


def test_prompt_ids_are_taken_as_they_are(trained):
    text, _ = call(trained, prompt="hi")
    ids, _ = call(trained, prompt_ids=[256, 104, 105])
    assert ids["tokens"] == text["tokens"] and ids["prompt_tokens"] == 3


def test_an_empty_prompt_starts_a_document(trained):
    bos, _ = call(trained, prompt_ids=[256])
    for empty in ({"prompt": ""}, {"prompt_ids": []}, {}):
        assert call(trained, **empty)[0]["tokens"] == bos["tokens"]


def test_without_a_cache_both_ways_are_reported(trained):
    result, shown = call(trained, prompt="abc", cache=False)
    new = len(result["tokens"])
    both = result["comparison"]
    assert both["uncached"]["tokens_processed"] == result["tokens_processed"] == sum(4 + i for i in range(new))
    assert both["cached"]["tokens_processed"] == 4 + new - 1
    assert both["same_tokens"] is True
    assert both["cached"]["generate_s"] > 0 and both["uncached"]["generate_s"] == result["generate_s"]
    assert "cache=true" in shown and "cache=false" in shown and "times as many tokens" in shown
    assert result["tokens"] == call(trained, prompt="abc")[0]["tokens"]


def test_seed_decides_the_text(trained):
    same = [call(trained, prompt="x", temperature=1.5, seed=seed)[0]["tokens"] for seed in (1, 1, 2)]
    assert same[0] == same[1] != same[2]


def test_a_file_of_prompts(trained, tmp_path):
    prompts, run_dir = tmp_path / "prompts.jsonl", tmp_path / "out"
    run_dir.mkdir()
    rows = [{"prompt": "hi"}, {"prompt_ids": [256, 104, 105]}, {"prompt": ""}, {"prompt": "xy"}, {"prompt": "xy"}]
    prompts.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    with mock.patch.object(generate, "ROWS", 2):  # three batches, the last one smaller
        result, shown = call(trained, prompts=str(prompts), temperature=1.5, seed=3, run_dir=run_dir)
    assert len(result["text"]) == len(result["tokens"]) == len(result["finish"]) == 5
    lines = [json.loads(line) for line in (run_dir / "generations.jsonl").read_text().splitlines()]
    assert [line["tokens"] for line in lines] == result["tokens"] and result["generations"].endswith(".jsonl")
    assert result["new_tokens"] == sum(map(len, result["tokens"]))
    for row, alone in ((1, {"prompt": "hi", "seed": 4}), (4, {"prompt": "xy", "seed": 7})):
        assert call(trained, **alone, temperature=1.5)[0]["tokens"] == result["tokens"][row]
    assert "[0]" in shown and "[4]" in shown


def test_wrong_requests_are_one_line(trained, tmp_path):
    assert "temperature=-1.0" in refused(trained, temperature=-1.0)
    assert "top_p=0.0" in refused(trained, top_p=0.0) and "top_p=1.5" in refused(trained, top_p=1.5)
    assert "top_k=-1" in refused(trained, top_k=-1)
    assert "max_new_tokens=0" in refused(trained, max_new_tokens=0)
    assert "prompt and prompt_ids: give only one" in refused(trained, prompt="a", prompt_ids=[1])
    assert "prompt_ids[1]=258: outside the vocabulary of 258" in refused(trained, prompt_ids=[1, 258])
    assert f"max_seq_len={LENGTH}; use max_new_tokens=23" in refused(trained, prompt="a" * 40, max_new_tokens=60)
    assert "shorten the prompt" in refused(trained, prompt="a" * 80)
    assert "source: missing" in refused(None, prompt="a")
    missing = tmp_path / "none.jsonl"
    assert f"prompts={missing}: no such file" in refused(trained, prompts=str(missing))
    for content, named in (
        ("", "holds no prompt"),
        ('{"prompt": "a"}\nnot json\n', "line 2: expected"),
        ('{"prompt": "a", "seed": 1}\n', "line 1: expected"),
        ('{"prompt": "a", "prompt_ids": [1]}\n', "line 1: expected"),
        ('{"prompt_ids": [true]}\n', "line 1: expected"),
        ('{"prompt": "a"}\n\n{"prompt_ids": [1, 999]}\n', r"line 3: prompt_ids[1]=999"),
    ):
        file = tmp_path / "prompts.jsonl"
        file.write_text(content, encoding="utf-8")
        assert named in refused(trained, prompts=str(file))


def test_wrong_sources_are_one_line(trained, tmp_path):
    gone, empty, file = tmp_path / "gone", tmp_path / "empty", tmp_path / "file"
    empty.mkdir()
    file.write_text("x")
    assert f"source={gone}: no such folder" in refused(gone)
    assert "is neither a run folder (it has no checkpoints), a checkpoint, nor a Hugging Face folder" in refused(empty)
    assert "is a file" in refused(file)
    (empty / "checkpoints").mkdir()
    assert "holds no checkpoint yet" in refused(empty)
    unfinished = empty / "checkpoints" / "5.orbax-checkpoint-tmp-1"
    unfinished.mkdir()
    assert "never finished" in refused(unfinished)
    assert "holds no checkpoint yet" in refused(empty)


def test_a_half_written_newest_checkpoint_is_named_and_passed_over(trained, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    (copy / "checkpoints" / "2" / "commit_success.txt").unlink()
    result, shown = call(copy, prompt="a")
    assert result["step"] == 1 and "checkpoint 2" in shown
    assert "2 is not a whole checkpoint" in refused(copy / "checkpoints" / "2", prompt="a")
    (copy / "checkpoints" / "1" / "commit_success.txt").unlink()
    assert "no whole checkpoint" in refused(copy, prompt="a")


def test_fields_that_change_no_shape_may_be_overridden(trained):
    plain, _ = call(trained, prompt="a")
    source = open_source(trained, overrides={"model.logit_softcap": 0.5})
    assert source.model.logit_softcap == 0.5
    assert plain["step"] == source.step == 2
    with pytest.raises(UserError, match="parameter .* the configuration makes it .* the checkpoint holds"):
        open_source(trained, overrides={"model.d_model": 32})


def test_a_strangers_configuration_builds_nothing_else(trained, tmp_path):
    model = open_source(trained)
    evil = model.config.to_yaml().replace("_target_: jaxllm.layers.mlp.MLP", "_target_: os.system")
    assert "os.system" in evil
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    meta = {"config": evil, "tokenizer": pack_tokenizer(Bytes())}
    checkpoints.save(1, {"params": model.params}, meta)
    checkpoints.close()
    assert "os.system" in refused(tmp_path, prompt="a")


def test_tokenizers_survive_the_way_through_a_checkpoint(tmp_path):
    trained = BPE(vocab_size=300).fit(["the cat sat on the mat and the rat"] * 50, tmp_path)
    for tokenizer in (Bytes(), trained):
        again = unpack_tokenizer(json.loads(json.dumps(pack_tokenizer(tokenizer))))
        assert again.encode("the cat \u20ac") == tokenizer.encode("the cat \u20ac")
        assert again.vocab_size == tokenizer.vocab_size and again.eos_id == tokenizer.eos_id
    for name in ("../x", "/x", "", ".hidden", "a/b"):
        with pytest.raises(UserError, match="only plain names"):
            unpack_tokenizer({name: "{}"})
    with pytest.raises(UserError, match="not a table"):
        unpack_tokenizer([1])


def test_the_tokenizer_of_the_run_folder_serves_older_checkpoints(tmp_path):
    run = make_run(tmp_path / "run", pack=False, steps=(1,))
    assert call(run, prompt="a")[0]["step"] == 1
    shutil.rmtree(run / "tokenizer")
    assert "holds no tokenizer" in refused(run, prompt="a")


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused():
    cfg = compose(["model=tiny"]).replace({"model.vocab_size": 100})
    with pytest.raises(UserError, match="model.vocab_size=100: smaller than the tokenizer's 258"):
        build_model(cfg, Bytes())
    assert build_model(compose(["model=tiny"]).replace({"model.vocab_size": 512}), Bytes()).vocab_size == 512


def test_control_characters_do_not_reach_the_terminal():
    assert generate.printable("a\x1b[2Jb\r\nc\td\x07\u20ac") == "a\ufffd[2Jb\nc\td\ufffd\u20ac"


def test_a_file_of_prompts_goes_on_where_it_was_interrupted(trained, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    texts = ["hello", "hi", "hello there", "x"]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    keys = {"prompts": str(prompts), "out": str(out), "temperature": 1.0, "server": SMALL_SERVER}
    result, _ = call(trained, **keys)
    assert (result["answered"], result["found"], result["interrupted"]) == (4, 0, False)
    lines = out.read_text().splitlines()
    rows = {json.loads(line)["index"]: json.loads(line) for line in lines}
    for i, text in enumerate(texts):  # each is what it would be alone
        alone, _ = call(trained, prompt=text, temperature=1.0, seed=i)
        assert rows[i]["tokens"] == alone["tokens"] and rows[i]["text"] == alone["text"]
    out.write_text("\n".join(lines[:2]) + "\n" + lines[2][:20])  # the third was being written
    again, said = call(trained, **keys)
    assert (again["answered"], again["found"]) == (2, 2) and "2 of 4 prompts are answered" in said
    assert {json.loads(line)["index"]: json.loads(line) for line in out.read_text().splitlines()} == rows
    assert call(trained, **keys)[0]["answered"] == 0
    prompts.write_text(json.dumps({"prompt": "another"}) + "\n")
    assert "answers another prompt" in refused(trained, **keys)
    assert "out" in refused(trained, prompt="a", out=str(out))


SMALL_SERVER = {"rows": 2, "page_size": 16, "row_buckets": [2], "token_buckets": [16], "width_buckets": [4]}
