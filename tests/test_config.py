"""Composition is strict: whatever is wrong with a configuration is one line that names the key, the value, the fix."""

import functools

import pytest
import yaml

from jaxllm.compose import component, compose, lift
from jaxllm.config import CONF, Config, MeshSettings, options
from jaxllm.errors import UserError
from jaxllm.tasks import TASKS
from jaxllm.training.settings import StageSettings, TrainSettings


@pytest.fixture(scope="module")
def smoke():
    return compose(["+experiment=smoke"])


# ---- what composes


@pytest.mark.parametrize("group", ["model", "data", "mesh", "optim", "objective", "track", "experiment"])
def test_every_yaml_of_every_group_composes(group):
    extra = {
        ("data", "hf"): ["data.name=some/set"],
        ("data", "file"): ["data.path=x.json"],
        ("objective", "distill"): ["objective.distill.teacher=runs/RUN"],
    }
    assert options(group)
    for name in options(group):
        cfg = compose([f"{group}={name}", *extra.get((group, name), [])])
        assert cfg.choices[group] == name
        assert Config.from_yaml(cfg.to_yaml()).to_dict() == cfg.to_dict()


def test_the_root_lists_only_keys_of_the_schema_and_their_defaults(smoke):
    plain = compose()
    assert plain.section("train") == TrainSettings(steps=1000, batch_size=8, seq_len=256)
    assert plain.section("stages") == []
    generate = type(plain.section("generate"))()
    assert plain.section("generate") == generate
    assert plain.common.task == "train" and plain.common == type(plain.common)()
    assert smoke.name == "smoke" and smoke.section("train").steps < 10


def test_experiments_stay_short():
    for name in options("experiment"):
        lines = (CONF / "experiment" / f"{name}.yaml").read_text().splitlines()
        assert len(lines) <= 60 and lines[0] == "# @package _global_"


def test_sections_are_typed(smoke):
    cfg = compose(
        [
            "+experiment=smoke",
            "train.sample_prompts=[a, b]",
            "mesh=cube",
            "stages=[{steps: 3, freeze: [embed]}, {weights: {next_token: 2}}]",
        ]
    )
    assert cfg.section("train").sample_prompts == ("a", "b")
    assert cfg.section("mesh") == MeshSettings(axes={"data": 2, "fsdp": 2, "expert": 1, "context": 1, "tensor": 2})
    stages = [StageSettings(steps=3, freeze=("embed",)), StageSettings(weights={"next_token": 2.0})]
    assert cfg.section("stages") == stages
    assert isinstance(cfg.section("stages")[1].weights["next_token"], float)


def test_keys_no_yaml_lists_need_no_plus():
    cfg = compose(["train.accumulate=2", "model.mixers.global.softcap=30", "train.batch_size=4"])
    assert cfg.section("train").accumulate == 2
    assert cfg.build("model", vocab_size=10).mixers["global"].keywords["softcap"] == 30.0
    assert cfg.explicit == {"train.accumulate": 2, "model.mixers.global.softcap": 30, "train.batch_size": 4}


def test_keys_of_a_model_are_meant_for_the_source_where_there_is_one():
    """The composed model has no such role; what opens the source checks them beside its own configuration."""
    typed = "model.mixers.csa.top_k=2"
    assert compose(["task=eval", "source=runs/RUN", typed]).explicit["model.mixers.csa.top_k"] == 2
    with pytest.raises(UserError, match=r"model\.mixers\.csa\.top_k=2: unknown key"):
        compose(["task=eval", typed])
    with pytest.raises(UserError, match=r"model\.mixers\.csa\.top_k=2: unknown key"):
        Config.from_yaml(compose(["model=tiny"]).to_yaml(), {"model.mixers.csa.top_k": 2})


def test_mixers_are_swapped_by_role():
    cfg = compose(
        [
            "model=tiny",
            "mixer@model.mixers.global=mqa",
            "+mixer@model.mixers.local=mha",
            "model.layers=global/dense | 2* local/dense*2 global/dense",
        ]
    )
    model = cfg.build("model", vocab_size=64)
    assert isinstance(model.mixers["global"], functools.partial)
    assert model.mixers["global"].keywords["num_kv_heads"] == 1
    assert model.num_layers == 7


@pytest.mark.parametrize("name", options("mixer"))
def test_a_component_stands_alone(name):
    heads = "num_v_heads" if name == "gdn" else "num_heads"
    made = component("mixer", name, **{heads: 4})
    assert isinstance(made, functools.partial) and made.keywords[heads] == 4
    with pytest.raises(UserError, match=rf"mixer/{name}\.num_heds=4: unknown key"):
        component("mixer", name, num_heds=4)


def test_objects_are_built(smoke):
    assert smoke.build("optim").lr == smoke["optim.lr"]
    assert list(smoke.build("objective")) == ["next_token"]
    assert smoke.build("model", vocab_size=99).vocab_size == 99
    assert smoke.build("data").val_every == smoke["data.val_every"]
    assert smoke.build("optim", lr=0.5).lr == 0.5


def test_lift_speaks_hydra():
    cases = {
        "model=tiny": "model=tiny",
        "+model=tiny": "model=tiny",
        "experiment=x": "+experiment=x",
        "train.steps=3": "++train.steps=3",
        "+seed=1": "++seed=1",
        "hydra.sweep.dir=x": "hydra.sweep.dir=x",
        "~optim.lr": "~optim.lr",
        "mixer@model.mixers.global=mqa": "mixer@model.mixers.global=mqa",
        "data/tokenizer=bytes": "data/tokenizer=bytes",
    }
    assert {text: lift(text, [CONF]) for text in cases} == cases


# ---- what does not


MISTAKES = {
    "steps=5": "steps=5: unknown key; did you mean train.steps?",
    "trian.steps=5": "trian.steps=5: unknown key; did you mean train.steps?",
    "foo.bar.baz=1": "foo.bar.baz=1: unknown key",
    "train.stepz=5": "train.stepz=5: unknown key; did you mean train.steps?",
    "train.steps=1.5": "train.steps=1.5: expected a whole number",
    "train.steps=-1": "train.steps: -1 must be at least 1",
    "train.nonfinite=skp": "train.nonfinite=skp: expected one of skip, stop, dump; did you mean skip?",
    "train=5": "train=5: expected keys below it",
    "model.mixers.global.num_heads=x": "model.mixers.global.num_heads=x: expected a whole number (got the text 'x')",
    "model.mixers.global.num_heds=3": "model.mixers.global.num_heds=3: unknown key of GQA; "
    "did you mean model.mixers.global.num_heads?",
    "model.mixers.golbal.num_heads=3": "did you mean model.mixers.global.num_heads?",
    "model.mixers.global.num_kv_heads=3": "model.mixers.global: num_kv_heads: 3 must divide",
    "model.mixers.global._partial_=false": "add model.mixers.global._partial_=true",
    "model.mixers.global.d_model=32": "model.mixers.global.d_model=32: the model supplies d_model",
    "model.mixers.global.rope.thet=1": "model.mixers.global.rope.thet=1: unknown key of RoPE; "
    "did you mean model.mixers.global.rope.theta?",
    "model.d_modle=3": "model.d_modle=3: unknown key of LanguageModel; did you mean model.d_model?",
    "model._target_=jaxllm.model.LanguageModle": "did you mean jaxllm.model.LanguageModel?",
    "~model.layers": "model.layers: missing",
    "optim.lr=abc": "optim.lr=abc: expected a number (got the text 'abc')",
    "optim.lr=true": "optim.lr=true: expected a number",
    "optim.schedule=cosine": "optim.schedule=cosine: expected a _target_ node of Schedule",
    "optim.schedule._partial_=true": "optim.schedule._partial_=true: expected a made Schedule",
    "objective.next_token.wieght=2": "did you mean objective.next_token.weight?",
    "objective.next_tokn.weight=2": "did you mean objective.next_token.weight?",
    "stages=[{frezee: [a]}]": "stages.0.frezee=['a']: unknown key; did you mean stages.0.freeze?",
    "stages=[{steps: 1, data: {length: 8}}]": "stages.0.data={'length': 8}: has no _target_; write out the whole of it",
    "stages=3": "stages=3: expected a list of stages",
    "mesh.axes.fdsp=2": "mesh.axes.fdsp=2: unknown mesh axis; did you mean mesh.axes.fsdp?",
    "mesh.rules.embedd=fsdp": "mesh.rules.embedd=fsdp: unknown logical axis; did you mean mesh.rules.embed?",
    "mesh.rules.embed=fdsp": "mesh.rules.embed=fdsp: unknown mesh axis; did you mean fsdp?",
    "mesh.axes.data=two": "mesh.axes.data=two: expected a whole number",
    "task=coutn": "task=coutn: no such task; did you mean count?",
    "top_p=x": "top_p=x: expected a number",
    "seed=-1": "seed=-1: expected 0 or more",
    "log_level=inf": "log_level=inf: expected one of debug, info, warning, error; did you mean info?",
    "model=tinny": "model=tinny: no such option; did you mean tiny?",
    "+experiment=quikstart": "experiment=quikstart: no such option; did you mean quickstart?",
    "mixer@model.mixers.global=mqq": "mixer@model.mixers.global=mqq: no such option; did you mean mqa?",
    "mixer@model.mixers.globl=mqa": "Did you mean to override mixer@model.mixers.global?",
    "modle=tiny": "modle=tiny: unknown key; did you mean model?",
    "train.steps=${nope}": "train.steps: Interpolation key 'nope' not found",
    "seed=(1": "seed=(1: cannot be read",
    "seed=1,2": "seed=1,2: several values need -m",
}


@pytest.mark.parametrize("override", MISTAKES)
def test_a_mistake_is_one_clear_line(override):
    with pytest.raises(UserError) as caught:
        compose([override])
    text = str(caught.value)
    assert MISTAKES[override] in text
    assert "\n" not in text


def test_a_failing_import_inside_a_target_is_named(tmp_path, monkeypatch):
    (tmp_path / "my_layers.py").write_text("import jax\n\nimport not_installed_here\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError) as caught:
        compose(["model.mixers.global._target_=my_layers.Mixer"])
    text = str(caught.value)
    assert text.startswith("model.mixers.global._target_=my_layers.Mixer: importing my_layers failed at ")
    assert text.endswith("my_layers.py:3: ModuleNotFoundError: No module named 'not_installed_here'")


def test_a_users_own_layer_composes_and_is_refused_in_a_strangers_file(tmp_path, monkeypatch):
    (tmp_path / "own_layers.py").write_text(
        "from jaxllm.layers.gqa import GQA\nclass Mine(GQA, kw_only=True):\n    extra: int = 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    cfg = compose(["model=tiny", "model.mixers.global._target_=own_layers.Mine", "model.mixers.global.extra=2"])
    assert cfg.build("model", vocab_size=9).mixers["global"].keywords["extra"] == 2
    with pytest.raises(UserError, match=r"global\._target_=own_layers\.Mine: a saved config may build only"):
        Config.from_yaml(cfg.to_yaml())
    assert Config.from_yaml(cfg.to_yaml(), allow_targets=["own_layers"]).to_dict() == cfg.to_dict()


# ---- saved configurations


def test_a_saved_config_takes_overrides_and_checks_them(smoke, tmp_path):
    (tmp_path / "config.yaml").write_text(smoke.to_yaml())
    cfg = Config.load(tmp_path, {"train.steps": 7, "model.mixers.global.qk_norm": True})
    assert cfg.section("train").steps == 7 and cfg["model.mixers.global.qk_norm"] is True
    with pytest.raises(UserError, match=r"train\.stepz=7: unknown key"):
        Config.load(tmp_path, {"train.stepz": 7})
    with pytest.raises(UserError, match=r"seed\.x=1: there are no keys below seed"):
        Config.load(tmp_path, {"seed.x": 1})
    with pytest.raises(UserError, match="no such file; is .* a run folder"):
        Config.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: &x [1]\nb: *x\n", "aliases"),
        ("a: !!python/object/apply:os.system ['true']\n", "cannot be read"),
        ("[" * 5000, "cannot be read"),
        ("- 1\n", "expected a mapping"),
        ("a: 1\n" * 300_000, "characters, more than"),
        ("task: train\nmodel: {_target_: os.system, command: 'true'}\n", "a saved config may build only"),
        ("task: train\nfoo: 1\n", "foo=1: unknown key"),
        ("\x00", "cannot be read"),
    ],
)
def test_a_strangers_file_is_data(text, words):
    with pytest.raises(UserError) as caught:
        Config.from_yaml(text)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_interpolations_in_a_saved_config_stay_text(monkeypatch):
    monkeypatch.setenv("SECRET", "hunter2")
    assert Config.from_yaml("task: train\nname: ${oc.env:SECRET}\n").name == "${oc.env:SECRET}"


def test_numbers_survive_saving(smoke):
    cfg = smoke.replace({"optim.lr": 1e-5, "optim.eps": 3e-20, "train.sample_prompts": ["1e3", "null", "ä: 'b'\n"]})
    again = Config.from_yaml(cfg.to_yaml())
    assert again.to_dict() == cfg.to_dict()
    assert yaml.safe_load(cfg.to_yaml())["optim"]["lr"] == 1e-5
    by_hand = "task: train\noptim: {_target_: jaxllm.training.optimisers.AdamW, lr: 1e-3}"
    assert Config.from_yaml(by_hand)["optim.lr"] == 1e-3


def test_the_tree_is_read_only(smoke):
    tree = smoke.to_dict()
    tree["train"]["steps"] = -1
    smoke.train["steps"] = -1
    assert smoke["train.steps"] > 0
    assert smoke.get("nowhere.at.all", 3) == 3 and "train.steps" in smoke and "train.stepz" not in smoke
    with pytest.raises(AttributeError, match="no key nowhere"):
        smoke.nowhere  # noqa: B018


def test_paths_resolve_where_the_command_was_typed(smoke, tmp_path, monkeypatch):
    here = compose(["+experiment=smoke"])
    monkeypatch.chdir(tmp_path)
    assert here.path("x.txt") == here.original_cwd / "x.txt" != tmp_path / "x.txt"
    assert here.path(tmp_path / "y") == tmp_path / "y"


def test_every_task_exists_as_a_file():
    for module in TASKS.values():
        assert (CONF.parent / (module.replace(".", "/") + ".py")).is_file()


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("model.mixers.global.num_heads=0", "model.mixers.global: num_heads: 0 must be at least 1"),
        ("model.mixers.global.num_heads=7", "model.mixers.global: num_kv_heads: 2 must divide num_heads=7"),
        ("model.mixers.global.head_dim=7", "model.mixers.global: rope.partial: 1.0 of head_dim 7 gives 7 channels"),
    ],
)
def test_a_layer_checks_its_fields_before_anything_is_built(typed, words):
    with pytest.raises(UserError) as caught:
        compose(["model=tiny", typed])
    assert str(caught.value).startswith(words)
