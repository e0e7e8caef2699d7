"""Stages: who is frozen, what changes, and which stage a step belongs to."""

import dataclasses
import functools
import io
import json

import pytest

from jaxllm.checkpoint import read_meta
from jaxllm.compose import compose
from jaxllm.config import Config
from jaxllm.errors import UserError
from jaxllm.measure.jsonl import read_metrics
from jaxllm.measure.plots import loss, series, stage_starts
from jaxllm.params import declare
from jaxllm.report import compare
from jaxllm.report.runs import Run
from jaxllm.tasks import Stop, TaskIO, train
from jaxllm.tasks.report import read_curves
from jaxllm.tasks.source import staged
from jaxllm.training.schedules import Constant
from jaxllm.training.settings import StageSettings, TrainSettings
from jaxllm.training.stages import free_parameters, override, plan, stage_at
from jaxllm.training.state import leaves_by_path


def make_plan(tiny, *entries, steps=10, schedules=None, **fields):
    settings = TrainSettings(steps=steps, batch_size=4, seq_len=12)
    return plan(settings, entries, tiny.model(**fields), tiny.optimiser(), tiny.objectives, schedules)


def test_no_list_is_one_stage_of_everything(tiny):
    (stage,) = make_plan(tiny)
    assert (stage.start, stage.end, stage.seq_len, stage.batch_size, stage.frozen) == (0, 10, 12, 4, [])
    assert not stage.reset_optimizer


def test_a_stage_keeps_what_it_does_not_change(tiny):
    first, second, third = make_plan(
        tiny,
        StageSettings(steps=4),
        StageSettings(steps=3, seq_len=24, batch_size=2, lr=5e-4, weights={"next_token": 0.5}, freeze=("embed",)),
        StageSettings(model={"remat": "full"}),
        schedules={2: Constant(warmup_steps=2)},
    )
    assert [(s.start, s.end) for s in (first, second, third)] == [(0, 4), (4, 7), (7, 10)]
    assert (second.seq_len, second.batch_size, second.optimiser.lr) == (24, 2, 5e-4)
    assert second.objectives["next_token"].weight == 0.5 and third.objectives["next_token"].weight == 1.0
    assert second.frozen == ["embed"] and third.frozen == []
    assert (third.model.remat, first.model.remat) == ("full", "none")
    assert third.optimiser.schedule == Constant(warmup_steps=2) and third.optimiser.lr == first.optimiser.lr
    # moments start anew exactly where another set of parameters is trained
    assert [s.reset_optimizer for s in (first, second, third)] == [False, True, True]
    assert [stage_at([first, second, third], n).index for n in (0, 3, 4, 6, 7, 9, 10, 99)] == [0, 0, 1, 1, 2, 2, 2, 2]


def test_globs_choose_parameters(tiny):
    declared = declare(tiny.model())

    def free(**fields):
        return {n for n, f in leaves_by_path(free_parameters(declared, StageSettings(**fields))).items() if f}

    everything = free()
    assert free(freeze=("g0/*/mixer/*",)) == {n for n in everything if "/mixer/" not in n}
    assert free(train_only=("*mixer*",)) == {n for n in everything if "mixer" in n}
    assert free(train_only=("*mixer*",), freeze=("*norm*",)) == {"g0/b0/mixer/proj"}


@pytest.mark.parametrize(
    "entry, message",
    [
        (
            StageSettings(freeze=("g0/b0/mixr/*",)),
            r"stages.0.freeze: 'g0/b0/mixr/\*' names no parameter; nearest: g0/b0/mixer",
        ),
        (StageSettings(train_only=("head",)), "stages.0.train_only: 'head' names no parameter"),
        (StageSettings(freeze=("*",)), "nothing is left to train"),
        (StageSettings(weights={"next_tokn": 1.0}), "stages.0.weights.next_tokn: no objective of that name"),
        (StageSettings(accumulate=3), "stages.0.accumulate: 3 does not divide"),
        (
            StageSettings(model={"remt": "full"}),
            "stages.0.model.remt: LanguageModel has no field 'remt'; nearest: remat",
        ),
        (StageSettings(model={"mixers.local.x": 1}), "no entry 'local'; there are global"),
        (StageSettings(model={"d_model": 32}), "would change parameter .* a stage may not change shapes"),
    ],
)
def test_mistakes_are_named(tiny, entry, message):
    with pytest.raises(UserError, match=message):
        make_plan(tiny, entry)


def test_only_the_last_stage_may_be_open_and_it_needs_a_step(tiny):
    with pytest.raises(UserError, match="stages.0.steps: only the last"):
        make_plan(tiny, StageSettings(), StageSettings(steps=1))
    with pytest.raises(UserError, match="stages.1.steps: train.steps=10 leaves no step"):
        make_plan(tiny, StageSettings(steps=10), StageSettings())


def test_fields_inside_partials_can_be_set(tiny):
    model = tiny.model(mixer="gqa", ffn="mlp")
    new = override(model, {"mixers.global.softcap": 5.0, "logit_softcap": 30.0}, "stages.1.model")
    assert new.mixer("global").softcap == 5.0 and new.mixer("global").num_kv_heads == 2
    assert new.logit_softcap == 30.0 and model.logit_softcap is None
    assert isinstance(model.mixers["global"], functools.partial) and model.mixer("global").softcap is None
    with pytest.raises(UserError, match="would change parameter g0/b0/mixer"):
        override(model, {"mixers.global.num_heads": 2}, "stages.1.model")


def test_four_stages_from_text_to_answers():
    """conf/experiment/four_stages.yaml as a plan, and how its checkpoints are opened."""
    cfg = compose(
        ["+experiment=four_stages", "stages.3.data.path=talks.jsonl", "model.layers=1* global/dense", "track=none"]
    )
    entries = cfg.section("stages")
    entries = [dataclasses.replace(e, model={k: train._field(cfg, v, k) for k, v in e.model.items()}) for e in entries]
    schedules = {i: cfg.build_node(e.schedule, "schedule") for i, e in enumerate(entries) if e.schedule}
    model, objectives = cfg.build("model", vocab_size=64), cfg.build("objective")
    stages = plan(cfg.section("train"), entries, model, cfg.build("optim"), objectives, schedules)
    found = [(s.name, s.start, s.end, s.seq_len, s.batch_size, s.optimiser.lr) for s in stages]
    assert found == [
        ("pretrain", 0, 400, 256, 8, 3e-3),
        ("anneal", 400, 500, 256, 8, 3e-3),
        ("long_context", 500, 600, 1024, 2, 3e-4),
        ("sft", 600, 700, 512, 4, 1e-4),
    ]
    ropes = [type(s.model.mixers["global"].keywords["rope"]).__name__ for s in stages]
    assert ropes == ["RoPE", "RoPE", "YaRN", "YaRN"] and stages[3].frozen == ["embed"]
    saved = Config.from_yaml(cfg.to_yaml())
    for step, name in ((0, "RoPE"), (500, "RoPE"), (501, "YaRN"), (600, "YaRN"), (700, "YaRN")):
        assert staged(saved, step, {})["model.mixers.global.rope._target_"].endswith(f".{name}"), step
    typed = {"model.mixers.global.rope": saved["model.mixers.global.rope"]}
    assert staged(saved, 700, typed)["model.mixers.global.rope._target_"].endswith(".RoPE")


SMALL = [
    "model.layers=1* global/dense",
    "model.d_model=32",
    "model.mixers.global.num_heads=2",
    "model.ffns.dense.d_ff=32",
]
SMALL += ["data.tokenizer.vocab_size=300", "track=none", "mesh=single", "train.eval_every=0", "train.eval_batches=1"]
SMALL += ["train.seq_len=16", "train.batch_size=4", "train.steps=7", "stages.0.steps=2", "stages.1.steps=2"]
SMALL += ["stages.2.steps=2", "stages.2.seq_len=32", "stages.2.data.sources.far.filler=20", "stages.3.seq_len=24"]


def test_four_stages_run_through_and_go_on_in_the_middle(tmp_path):
    """Stopped inside the third stage and gone on with: every stage's own text, mixes counted in the checkpoint, boundaries drawn."""
    (tmp_path / "book.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    talk = [{"role": "user", "content": "Water?"}, {"role": "assistant", "content": "Yes."}]
    (tmp_path / "talks.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 20)
    typed = [
        "+experiment=four_stages",
        f"stages.3.data.path={tmp_path / 'talks.jsonl'}",
        f"data.path={tmp_path / 'book.txt'}",
    ]
    folder = tmp_path / "run"
    folder.mkdir()

    def run(resume, polls=99):
        class Soon(Stop):
            def is_set(self):
                nonlocal polls
                polls -= 1
                return polls <= 0

        err = io.StringIO()
        cfg = compose([*typed, *SMALL]).replace({"run_dir": str(folder), "resume": resume})
        where = TaskIO(run_dir=folder, resume=resume, out=io.StringIO(), err=err, stop=Soon())
        return train.run(cfg, where), err.getvalue()

    fields, said = run(False, polls=5)
    assert fields["interrupted"] and fields["steps"] == 5 and "stage anneal: steps 2 to 4" in said
    position = read_meta(fields["checkpoint"])["data_position"]
    assert (position["stage"], position["step"]) == ("long_context", 1)
    assert {name: part["rows"] for name, part in position["taken"].items()} == {"text": 2, "far": 0}
    fields, said = run(True)
    assert fields["steps"] == 7 and "resume: from step 5" in said and "stage sft: steps 6 to 7, 1 parameters" in said
    rows = read_metrics(folder)
    assert [int(row["train/stage"]) for row in rows if "train/stage" in row] == [0, 0, 1, 1, 2, 2, 3]
    assert {"val/loss", "val/bpb"} <= rows[-1].keys()
    starts = [json.loads(line)["start"] for line in (folder / "stages.jsonl").read_text().splitlines()]
    assert starts == [0, 2, 4, 6]
    assert stage_starts(*series(rows, "train/stage")) == [(2, 1), (4, 2), (6, 3)]
    figure = loss(rows)
    drawn = [text.get_text().strip() for text in figure.axes[0].texts]
    assert [text for text in drawn if text.startswith("stage")] == ["stage 1", "stage 2", "stage 3"]
    (one,) = compare.curves([Run("r", folder, "train", "done", {}, {}, read_curves(folder))], {"r": 0})[:1]
    assert one.count("<title>stage ") == 3 and "stage 2 from step 4" in one
