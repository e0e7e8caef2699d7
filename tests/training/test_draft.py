"""A draft head in training: checkpoints hold the head alone and name its trunk, an MTP module goes on as it was, mistakes are one line."""

import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.checkpoint import Checkpoints, read_meta
from jaxllm.compose import compose
from jaxllm.data.store import TokenStore
from jaxllm.errors import UserError
from jaxllm.layers.added import additions
from jaxllm.layers.base import Context
from jaxllm.layers.draft import Eagle3, ModuleDraft
from jaxllm.measure.jsonl import read_metrics
from jaxllm.params import declare, init_params
from jaxllm.tasks import TaskIO, convert, evaluate, train
from jaxllm.tasks.source import has_of_its_own, open_source, overlay
from jaxllm.training.drafts import begin_draft, check_objectives, frequent_ids, from_offsets, to_offsets
from jaxllm.training.evaluation import Evaluator
from jaxllm.training.objectives import Draft, NextToken
from jaxllm.training.state import leaves_by_path, new_state

SMALL = ["+experiment=smoke", "data=synthetic", "data.documents=300", "data.length=4", "train.batch_size=2"]
SMALL += ["train.seq_len=16", "train.eval_batches=2", "train.sample_tokens=0", "mesh=single", "optim.lr=0.02"]
SMALL += ["optim.schedule.final=1", "optim.schedule.warmup_steps=0"]
TRUNK = ["model.layers=1* global/dense", "model.d_model=32", "+mtp@model.mtp=chained", "objective=mtp", "train.steps=2"]
HEAD = ["objective=draft", "+draft@model.draft=module", "model.draft.start=mtp", "model.draft.features=[0,1]"]
HEAD += ["model.draft.unroll=2", "train.steps=4", "train.eval_every=0"]


def run(folder, *overrides, task=train, resume=False):
    folder.mkdir(exist_ok=True, parents=True)
    err = io.StringIO()
    cfg = compose(list(overrides)).replace({"run_dir": str(folder), "resume": resume})
    return task.run(cfg, TaskIO(run_dir=folder, resume=resume, out=io.StringIO(), err=err)), err.getvalue()


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A trunk with an MTP module, the head made of it at once and in two pieces."""
    folder = tmp_path_factory.mktemp("draft")
    jax.config.update("jax_disable_most_optimizations", True)  # nobody waits for these steps
    try:
        run(folder / "trunk", *SMALL, *TRUNK, "train.save_every=1")
        tuned = [f"source={folder / 'trunk'}", *SMALL, *HEAD]
        fields, _ = run(folder / "head", *tuned)
        run(folder / "stopped", *tuned, "train.steps=2")
        second, said = run(folder / "stopped", *tuned, resume=True)
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    return folder, fields, second, said


def params_of(folder):
    return leaves_by_path(Checkpoints(folder / "checkpoints").restore_params()[0])


def test_a_checkpoint_holds_the_head_alone_names_its_trunk_and_goes_on_exactly(done):
    folder, fields, second, said = done
    kept, trunk = params_of(folder / "head"), params_of(folder / "trunk")
    assert kept and all(name.startswith("draft/") for name in kept)
    meta = read_meta(folder / "head" / "checkpoints" / "4")
    assert f"trunk: {folder / 'trunk'}" in meta["config"] and meta["base"]
    assert "resume: from step 2" in said and second["loss"] == fields["loss"]
    for name, leaf in params_of(folder / "stopped").items():
        np.testing.assert_array_equal(kept[name], leaf)
    got = leaves_by_path(open_source(folder / "head").params)
    for name, leaf in trunk.items():
        np.testing.assert_array_equal(got[name], leaf, err_msg=name)
    moved = [n for n, leaf in kept.items() if n.startswith("draft/module/")]
    assert moved and not any(np.array_equal(kept[n], trunk[n.replace("draft/module", "mtp/d1")]) for n in moved)


def test_the_unroll_is_reported_step_by_step_in_training_and_in_validation(done, tmp_path):
    folder, *_ = done
    rows = {row["step"]: row for row in read_metrics(folder / "head")}
    assert {f"train/draft/{k}/{j}" for k in ("loss", "agreement") for j in (0, 1)} <= rows[4].keys()
    assert rows[4]["train/loss"] == pytest.approx(rows[4]["train/draft/loss/0"] + 0.8 * rows[4]["train/draft/loss/1"])
    assert {f"val/draft_{j}/{k}" for k in ("loss", "agreement", "accepted") for j in (1, 2)} <= rows[4].keys()
    result, _ = run(tmp_path / "e", f"source={folder / 'head'}", "train.eval_batches=2", "mesh=single", task=evaluate)
    assert result["draft_2/accepted"] == pytest.approx(rows[4]["val/draft_2/accepted"])
    assert result["mtp_1/loss"] > 0 and result["loss"] == pytest.approx(rows[4]["val/loss"], rel=1e-5)


def test_a_head_needs_its_own_trunk(done, tmp_path):
    folder, *_ = done
    with pytest.raises(UserError, match="the weights of this draft head need the model .* with model.draft.trunk=PATH"):
        open_source(folder / "head", overrides={"model.draft.trunk": str(tmp_path / "nowhere")})
    with pytest.raises(UserError, match="model.draft.trunk=.* holds other parameters than the weights of this draft"):
        open_source(folder / "head", overrides={"model.draft.trunk": str(folder / "trunk" / "checkpoints" / "1")})


def test_it_goes_out_whole_or_as_the_trunk_alone(done, tmp_path):
    """A run of its own needs no trunk any more; a Hugging Face folder holds the model, and says that the head stays behind."""
    folder, *_ = done
    how = [f"source={folder / 'head'}", "mesh=single"]
    run(tmp_path / "c", *how, "format=run", f"out={tmp_path / 'whole'}", task=convert)
    whole, there = (
        open_source(tmp_path / "whole", overrides={"model.draft.trunk": "nowhere"}),
        params_of(folder / "head"),
    )
    for name, leaf in leaves_by_path(whole.params["draft"]).items():
        np.testing.assert_array_equal(leaf, there[f"draft/{name}"])
    said = []
    for name in (
        "head",
        "trunk",
    ):  # a head changes nothing of what can be said of its trunk, which has an MTP module no class takes
        with pytest.raises(UserError, match="no Hugging Face class holds this model") as error:
            run(
                tmp_path / "c",
                f"source={folder / name}",
                "mesh=single",
                "format=hf",
                f"out={tmp_path / 'hf'}",
                task=convert,
            )
        said.append(str(error.value))
    assert said[0] == said[1]


def begun(folder, kind, text=None, **fields):
    """The trunk with a head as it begins, without a run."""
    source = open_source(folder / "trunk")
    fields = {"mixer": "global", "ffn": "dense", "unroll": 2} | fields
    model = source.model.clone(draft=functools.partial(kind, **fields))
    drawn = init_params(model, jax.random.key(1), declared=additions(declare(model)))
    return model, begin_draft(model, overlay(source.params, drawn), text)


def test_an_mtp_module_goes_on_as_it_was(done):
    """Step 0 of the unroll is the module's own output, to rounding: its rotary positions are all one lower."""
    model, params = begun(done[0], ModuleDraft, start="mtp", features=(0, 1))
    ctx = Context.whole(np.arange(12)[None], capture=("mtp", "draft"))
    out = jax.jit(lambda p: model.apply({"params": p}, ctx, method="backbone")[1])(params)
    np.testing.assert_allclose(out.capture["draft"][0, :, :-1], out.capture["mtp"][0, :, :-1], atol=2e-5)
    assert not np.allclose(out.capture["draft"][1], out.capture["draft"][0], atol=1e-2)


def test_a_vocabulary_of_its_own(done):
    """Ids by frequency, the trunk's rows of the head for them, and nothing else can be drafted."""
    text = TokenStore.of([[5] * 4 + [9] * 3, [11] * 3 + [20] * 2 + [1]])
    model, params = begun(done[0], Eagle3, text, vocab=4)
    ids = np.asarray(params["draft"]["ids"])
    assert ids.tolist() == [5, 9, 11, 20]
    np.testing.assert_array_equal(params["draft"]["head"], np.asarray(model.head_weight(params))[:, ids])
    g = jnp.ones((1, 5, model.d_model))
    step, cache = Context.step(np.arange(1, 6)[None], np.zeros(1)), model.init_draft_cache(1, 8)
    _, logits, own = jax.jit(lambda p: model.apply({"params": p}, g, step, cache, method="draft_step"))(params)
    assert logits.shape == (1, 5, model.padded_vocab) and own.shape == g.shape
    assert np.flatnonzero(np.asarray(logits[0, 0]) > -1e29).tolist() == ids.tolist()


def test_the_loss_of_validation_is_of_the_tokens_that_can_be_drafted(done):
    model, params = begun(done[0], Eagle3, TokenStore.of([[5, 5, 9]]), vocab=2)
    line = np.array([[5, 9, 7, 5, 9, 5, 8, 9, 5]])
    batch = {
        "tokens": line[:, :-1],
        "labels": line[:, 1:],
        "segments": np.ones((1, 8)),
        "positions": np.arange(8)[None],
    }
    batch = {name: value.astype(np.int32) for name, value in batch.items()} | {"weights": np.ones((1, 8), np.float32)}
    got = Evaluator(model)(params, [batch])
    ctx = Context.whole(batch["tokens"], batch["segments"], capture=("draft",))
    hidden = jax.jit(lambda p: model.apply({"params": p}, ctx, method="backbone")[1])(params).capture["draft"][0, 0]
    logits = np.asarray(hidden @ params["draft"]["head"], np.float64)
    nll = np.log(np.exp(logits[:7]).sum(-1)) - np.where(line[0, 2:, None] == 5, logits[:7, :1], logits[:7, 1:])[:, 0]
    said = np.isin(line[0, 2:], [5, 9])  # 7 and 8 cannot be drafted and do not count
    assert said.sum() == 5
    np.testing.assert_allclose(got["draft_1/loss"], nll[said].mean(), rtol=1e-5)


def test_draft_vocabularies_as_they_are_stored():
    """EAGLE-3 checkpoints hold offsets, which read as ids would draft other tokens."""
    ids = np.array([5, 9, 11, 20])
    assert to_offsets(ids).tolist() == [5, 8, 9, 17] and from_offsets(to_offsets(ids)).tolist() == ids.tolist()
    assert from_offsets(to_offsets(ids))[2] == 11
    assert frequent_ids(TokenStore.of([[3, 3, 2, 2, 1]]), 2, 8).tolist() == [2, 3]


def test_mistakes_are_one_line(done, tmp_path):
    folder, *_ = done
    for kind, fields, message in (
        (ModuleDraft, {"start": "mtp", "features": (0,)}, r"features: \[0\] must end with 1, all layers"),
        (ModuleDraft, {"start": "mtp", "features": (1,), "hidden": "pre_norm"}, "'pre_norm', but the trunk's MTP"),
        (Eagle3, {"start": "mtp"}, "an MTP module has another layer than Eagle3; take"),
        (Eagle3, {"features": (3,)}, "draft.features: 3 is not within 0..1"),
        (Eagle3, {"features": ()}, "draft.features: empty"),
        (Eagle3, {"unroll": 0}, "draft.unroll: 0 must be at least 1"),
        (Eagle3, {"vocab": 9999}, "model.draft.vocab: 9999 is more than the 258 ids"),
        (Eagle3, {"mixer": "local"}, "model.draft: role 'local'"),
    ):
        with pytest.raises(UserError, match=message):
            begun(folder, kind, **fields)
    assert has_of_its_own(folder / "head", "draft") and not has_of_its_own(folder / "trunk", "draft")
    with_head, without = begun(folder, Eagle3)[0], open_source(folder / "trunk").model
    with pytest.raises(UserError, match="only the head can be trained; add objective=draft"):
        check_objectives(with_head, {"next_token": NextToken()})
    with pytest.raises(UserError, match="the model has no draft head; give source=RUN"):
        check_objectives(without, {"draft": Draft()})
    with pytest.raises(UserError, match="steps: 3, but model.draft.unroll is 2"):
        check_objectives(with_head, {"draft": Draft(steps=3)})
    with pytest.raises(UserError, match="model.draft: is for a model that is there; give source="):
        run(tmp_path / "m", *SMALL, *HEAD)
    with pytest.raises(UserError, match="choose it by .draft@model.draft=eagle3 or"):
        run(tmp_path / "m", f"source={folder / 'trunk'}", *SMALL, "objective=draft", "+model.draft.unroll=2")


def test_a_trained_pair_agrees(tiny):
    """A trunk that has learned to count by steps and a head that has watched it: both steps of the unroll say what the trunk will."""
    batch = {name: np.zeros((8, 16), np.int32) for name in ("tokens", "labels", "positions", "segments")}
    steps = np.arange(17)[None] * np.arange(1, 9)[:, None] % 31
    batch |= {"tokens": steps[:, :-1].astype(np.int32), "labels": steps[:, 1:].astype(np.int32)}
    batch |= {"segments": batch["segments"] + 1, "weights": np.ones((8, 16), np.float32)}
    batch["positions"] += np.arange(16, dtype=np.int32)
    trunk = tiny.model("gqa", "mlp", "1* global/dense", d_model=32)
    learned, metrics = tiny.run(trunk, [batch] * 60, optimiser=tiny.optimiser(lr=2e-2))
    assert metrics[-1]["next_token/accuracy"] > 0.9
    head = functools.partial(Eagle3, mixer="global", ffn="dense", unroll=2)
    model = trunk.clone(draft=head)
    params = overlay(learned.params, init_params(model, jax.random.key(1), declared=additions(declare(model))))
    state = new_state(model, tiny.optimiser(lr=2e-2), 0, params=params)
    how = {"objectives": {"draft": Draft(steps=2, chunk=64)}, "optimiser": tiny.optimiser(lr=2e-2), "state": state}
    done, metrics = tiny.run(model, [batch] * 80, **how)
    assert (metrics[-1]["draft/agreement"] > 0.9).all() and not (metrics[0]["draft/agreement"] > 0.9).any()
    for a, b in zip(jax.tree.leaves(done.params["g0"]), jax.tree.leaves(learned.params["g0"]), strict=True):
        np.testing.assert_array_equal(a, b)
