"""`task=convert`, `logits` and `check`, and training from a source: from one folder to the next and back."""

import io
import json

import numpy as np
import pytest
from golden_models import GOLDEN, arrays, with_text
from safetensors.numpy import load_file, save_file

from jaxllm.checkpoint import Checkpoints
from jaxllm.compose import compose
from jaxllm.errors import UserError
from jaxllm.tasks import TaskIO, check, convert, generate, logits, train
from jaxllm.tasks.source import open_source

NAME = "qwen3"


def run(task, *overrides, run_dir=None, resume=False):
    """(JSON fields, what was said on stderr)."""
    err = io.StringIO()
    cfg = compose(["mesh=single", "track=none", *overrides]).replace(
        {"resume": resume, "run_dir": run_dir and str(run_dir)}
    )
    result = task.run(cfg, TaskIO(run_dir=run_dir, resume=resume, out=io.StringIO(), err=err))
    return json.loads(json.dumps(result, allow_nan=False)), err.getvalue()


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A Hugging Face folder with a tokenizer."""
    return with_text(tmp_path_factory.mktemp("theirs"), NAME)


@pytest.fixture(scope="module")
def ours(theirs, tmp_path_factory):
    """The same as a run folder."""
    out = tmp_path_factory.mktemp("ours") / "run"
    result, _ = run(convert, "task=convert", f"source={theirs}", "format=run", f"out={out}")
    assert result["tensors"] == 13 and result["bytes"] == 4 * result["params"] and result["out"] == str(out)
    return out


def test_a_run_folder_stands_alone_and_leads_back_to_the_same_folder(theirs, ours, tmp_path):
    assert sorted(p.name for p in ours.iterdir()) == ["checkpoints", "config.yaml", "tokenizer"]
    a, b = open_source(theirs), open_source(ours)
    assert b.step == 0 and b.tokenizer.stop_ids == a.tokenizer.stop_ids == (257, 10)
    np.testing.assert_array_equal(a.params["g0"]["b0"]["mixer"]["q_proj"], b.params["g0"]["b0"]["mixer"]["q_proj"])
    out = tmp_path / "hf"
    result, _ = run(convert, "task=convert", f"source={ours}", "format=hf", f"out={out}", "shard_size=60KB")
    assert result["architecture"] == "Qwen3ForCausalLM" and len(list(out.glob("model-*-of-*.safetensors"))) > 1
    before, after = load_file(theirs / "model.safetensors"), {}
    for file in out.glob("*.safetensors"):
        after |= load_file(file)
    assert before.keys() == after.keys() and all(np.array_equal(before[k], after[k]) for k in before)
    for name in ("generation_config.json", "tokenizer_config.json"):
        assert json.loads((out / name).read_text()) == json.loads((theirs / name).read_text())
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 257  # as it came


def test_what_convert_refuses(theirs, ours, tmp_path):
    for words, line in (
        (["format=run", f"out={tmp_path}/a"], "source: missing"),
        ([f"source={theirs}", f"out={tmp_path}/a"], "format: missing"),
        ([f"source={theirs}", "format=hf"], "out: missing"),
        ([f"source={theirs}", "format=run", f"out={ours}"], "exists and is not an empty folder"),
        ([f"source={tmp_path}/none", "format=run", f"out={tmp_path}/a"], "no such folder"),
    ):
        with pytest.raises(UserError, match=line):
            run(convert, "task=convert", *words)
    with pytest.raises(UserError, match="shard_size=5 apples: expected a size such as 500MB"):
        run(convert, "task=convert", f"source={theirs}", "format=hf", f"out={tmp_path}/a", "shard_size='5 apples'")
    assert list(tmp_path.iterdir()) == []  # nothing half-made stays


def test_logits_of_both_modes_are_those_of_the_reference(tmp_path):
    ref = arrays(NAME)
    np.save(tmp_path / "ids.npy", ref["input_ids"])
    for words in (["mode=full"], ["mode=cached", "split=7"]):
        out = tmp_path / "out.npy"
        words = [f"source={GOLDEN / NAME}", f"tokens={tmp_path}/ids.npy", f"out={out}", *words]
        result, _ = run(logits, "task=logits", *words)
        assert result["shape"] == [2, 24, 64]
        got = np.load(out)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, ref["logits"], atol=1e-4, rtol=0)


def test_what_logits_refuses(tmp_path):
    source = f"source={GOLDEN / NAME}"
    bad = tmp_path / "bad.npy"
    np.save(bad, np.array([[1, 64]]))
    with pytest.raises(UserError, match=r"tokens\[0, 1\]=64: outside the vocabulary of 64 ids"):
        run(logits, "task=logits", source, f"tokens={bad}", f"out={tmp_path}/o.npy")
    np.save(bad, np.zeros((1, 65), np.int32))
    with pytest.raises(UserError, match="rows of 65 are longer than model.max_seq_len=64"):
        run(logits, "task=logits", source, f"tokens={bad}", f"out={tmp_path}/o.npy")
    np.save(bad, np.array([1, 2]))
    with pytest.raises(UserError, match=r"holds int64 \[2\]; expected int32"):
        run(logits, "task=logits", source, f"tokens={bad}", f"out={tmp_path}/o.npy")
    np.save(bad, np.array([{}], object), allow_pickle=True)
    with pytest.raises(UserError, match="is not a .npy file of numbers"):
        run(logits, "task=logits", source, f"tokens={bad}", f"out={tmp_path}/o.npy")
    np.save(bad, np.zeros((1, 4), np.int32))
    with pytest.raises(UserError, match="split=5: must be within 1..4"):
        run(logits, "task=logits", source, f"tokens={bad}", f"out={tmp_path}/o.npy", "mode=cached", "split=5")


def test_check_finds_the_layer_that_is_wrong(tmp_path):
    reference = f"reference={GOLDEN / NAME}/reference.safetensors"
    result, said = run(check, "task=check", f"source={GOLDEN / NAME}", reference)
    assert result["ok"] and result["greedy_equal"] and result["first_bad_layer"] is None
    assert result["max_abs"] < 1e-4 and abs(result["kl"]) < 1e-8 and "no layer differs" in said
    tensors = load_file(GOLDEN / NAME / "model.safetensors")
    tensors["model.layers.1.self_attn.k_norm.weight"] *= 1.1
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((GOLDEN / NAME / "config.json").read_text())
    result, said = run(check, "task=check", f"source={tmp_path}", reference)
    assert result["first_bad_layer"] == 1 and not result["ok"] and result["max_abs"] > 1e-3 and result["kl"] > 0
    assert "the last layer or the final norm differs" in said
    save_file({"input_ids": np.zeros((1, 4), np.int32)}, tmp_path / "r.safetensors")
    with pytest.raises(UserError, match="needs logits with 3 axes; it holds input_ids"):
        run(check, "task=check", f"source={tmp_path}", f"reference={tmp_path}/r.safetensors")


def test_text_comes_from_a_foreign_folder_as_it_is(theirs):
    result, _ = run(generate, "task=generate", f"source={theirs}", "prompt=ab", "max_new_tokens=4", "temperature=0")
    assert len(result["tokens"]) == 4 or result["finish"] == "stop"
    assert result["prompt_tokens"] == 3  # bos, a, b


def test_training_starts_from_a_source_and_goes_on_without_it(theirs, tmp_path):
    small = ["+experiment=smoke", "data=synthetic", "data.documents=200", "data.length=4", "train.batch_size=2"]
    small += ["train.seq_len=16", "train.eval_every=0", "train.sample_tokens=0", "mesh=single", f"source={theirs}"]
    folder = tmp_path / "run"
    folder.mkdir()
    fields, said = run(train, *small, "train.steps=1", "optim.lr=1e-12", run_dir=folder)
    assert fields["steps"] == 1 and "training starts from" in said
    start, after = open_source(theirs), open_source(folder)
    assert after.model.mixers["global"].keywords["qk_norm"] and after.tokenizer.vocab_size == 258
    np.testing.assert_allclose(after.params["embed"], start.params["embed"], atol=1e-6)
    assert Checkpoints(folder / "checkpoints").latest() == 1
    gone = compose([*small[:-1], f"source={tmp_path}/gone", "model.remat=full"])
    cfg, tokenizer, params, _ = train._given(gone, TaskIO(run_dir=folder, resume=True), None, None)
    assert params is None and tokenizer.vocab_size == 258  # the state comes from the run's own checkpoint
    assert cfg["model.vocab_size"] == 260 and cfg["model.remat"] == "full" and cfg["model.mixers.global.qk_norm"]
