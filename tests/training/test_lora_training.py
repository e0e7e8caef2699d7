"""Adapters in training: only A and B move, checkpoints are small and resume exactly, merged models go out."""

import io

import jax
import numpy as np
import pytest

from jaxllm.checkpoint import Checkpoints
from jaxllm.compose import compose
from jaxllm.errors import UserError
from jaxllm.layers.lora import LoRA
from jaxllm.params import declare, is_declared
from jaxllm.tasks import TaskIO, convert, evaluate, train
from jaxllm.tasks.source import open_source
from jaxllm.training.optimisers import AdamW
from jaxllm.training.schedules import Constant
from jaxllm.training.state import leaves_by_path, new_state

SMALL = [
    "+experiment=smoke",
    "data=synthetic",
    "data.documents=300",
    "data.length=4",
    "train.batch_size=2",
    "train.seq_len=16",
]
SMALL += [
    "train.eval_batches=null",
    "train.sample_tokens=0",
    "mesh=single",
    "model.layers=1* global/dense",
    "model.d_model=32",
]
LORA = [*SMALL, "+lora@model.lora=all", "model.lora.rank=2", "optim.lr=0.02", "train.steps=4"]
LORA += [
    "optim.schedule.final=1",
    "optim.schedule.warmup_steps=0",
]  # a shorter run is then the beginning of a longer one


def run(folder, *overrides, task=train, resume=False):
    folder.mkdir(exist_ok=True, parents=True)
    err = io.StringIO()
    cfg = compose(list(overrides)).replace({"run_dir": str(folder), "resume": resume})
    return task.run(cfg, TaskIO(run_dir=folder, resume=resume, out=io.StringIO(), err=err)), err.getvalue()


def params_of(folder):
    return leaves_by_path(Checkpoints(folder / "checkpoints").restore_params()[0])


def test_only_adapters_move_and_any_split_gives_the_same_step(tiny):
    model = tiny.model("gqa", "mlp", lora=LoRA(rank=2, targets=("*_proj",)))
    options = {"optimiser": AdamW(lr=0.05, schedule=Constant())}
    declared = leaves_by_path(declare(model), is_leaf=is_declared)
    start = leaves_by_path(new_state(model, options["optimiser"], 0).params)
    state, metrics = tiny.run(model, [tiny.batch()] * 6, **options)
    moved = {name for name, leaf in leaves_by_path(state.params).items() if not np.array_equal(leaf, start[name])}
    assert moved == {name for name, box in declared.items() if box.trainable}
    assert moved == {name for name in declared if name.endswith(("_lora_a", "_lora_b"))}
    assert metrics[-1]["next_token"] < metrics[0]["next_token"]
    assert not [name for name in leaves_by_path(state.opt_state) if name.endswith("q_proj")]  # no moments of the base
    _, split = tiny.run(model, [tiny.batch()] * 6, accumulate=2, **options)
    for one, two in zip(metrics, split, strict=True):  # Adam turns rounding of tiny gradients into steps, so 1e-4
        np.testing.assert_allclose(one["next_token"], two["next_token"], rtol=1e-4)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A base, its adapters trained at once and in two pieces, and the model that the adapters come to."""
    folder = tmp_path_factory.mktemp("lora")
    jax.config.update("jax_disable_most_optimizations", True)  # nobody waits for these steps
    try:
        run(folder / "base", *SMALL, "train.steps=2")
        tuned = [f"source={folder / 'base'}", *LORA]
        fields, _ = run(folder / "tuned", *tuned)
        run(folder / "stopped", *tuned, "train.steps=2")
        resumed = run(folder / "stopped", *tuned, resume=True)
        run(folder / "c", f"source={folder / 'tuned'}", "format=run", f"out={folder / 'whole'}", task=convert)
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    return folder, fields, *resumed


def test_a_checkpoint_of_adapters_is_small_and_opens_as_a_model(done, tmp_path):
    folder, fields, *_ = done
    base, kept = params_of(folder / "base"), params_of(folder / "tuned")
    assert kept and all("_lora_" in name for name in kept)
    assert sum(leaf.size for leaf in kept.values()) < 0.4 * sum(leaf.size for leaf in base.values())
    tuned = open_source(folder / "tuned")
    assert tuned.model.lora is None and tuned.config["model.lora"] is None
    got = leaves_by_path(tuned.params)
    assert set(got) == set(base) and not np.array_equal(got["g0/b0/mixer/q_proj"], base["g0/b0/mixer/q_proj"])
    np.testing.assert_array_equal(got["embed"], base["embed"])
    result, _ = run(tmp_path / "e", f"source={folder / 'tuned'}", "mesh=single", task=evaluate)
    assert result["loss"] == pytest.approx(fields["val_loss"], rel=1e-5)  # merged here, unmerged in training
    result, _ = run(
        tmp_path / "c", f"source={folder / 'tuned'}", "format=run", f"out={tmp_path / 'whole'}", task=convert
    )
    again = leaves_by_path(open_source(tmp_path / "whole").params)  # needs no base any more
    for name, leaf in got.items():
        np.testing.assert_array_equal(again[name], leaf)
    result, _ = run(tmp_path / "h", f"source={folder / 'tuned'}", "format=hf", f"out={tmp_path / 'hf'}", task=convert)
    assert result["architecture"] == "LlamaForCausalLM"


def test_adapters_resume_exactly(done):
    folder, fields, second, said = done
    assert "resume: from step 2" in said and second["loss"] == fields["loss"]
    one, two = params_of(folder / "tuned"), params_of(folder / "stopped")
    for name, leaf in one.items():
        np.testing.assert_array_equal(two[name], leaf)


def test_adapters_need_the_base_they_were_trained_on(done, tmp_path):
    folder, *_ = done
    with pytest.raises(UserError, match="model.lora: is for a model that is there; give source="):
        run(tmp_path / "a", *LORA)
    with pytest.raises(UserError, match="say where it is with model.lora.base=PATH"):
        open_source(folder / "tuned", overrides={"model.lora.base": str(tmp_path / "nowhere")})
    with pytest.raises(UserError, match="holds other parameters than these adapters were trained on"):
        open_source(folder / "tuned", overrides={"model.lora.base": str(folder / "whole")})
    with pytest.raises(UserError, match="choose it by .lora@model.lora=attention"):
        run(tmp_path / "b", f"source={folder / 'base'}", *SMALL, "model.lora.rank=2")
