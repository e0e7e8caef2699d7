"""What the documentation says is true: its commands run, its yaml composes, its worked layer keeps the contract.

Every line of a ```bash block in README.md and docs/*.md is a command. Those of a page run in order, in one folder, with
the overrides of `toy` behind them, and all pages share one trained run, `runs/RUN`. A block of code or yaml whose first
line is a comment with a path is a file: it is written there first.
"""

import contextlib
import importlib
import importlib.util
import io
import json
import logging
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import contract
import jax
import numpy as np
import pytest
from golden_models import with_text
from safetensors.numpy import save_file

import jaxllm.compose
import jaxllm.config
import jaxllm.layers
from jaxllm import __version__
from jaxllm.compose import compose
from jaxllm.run import main
from jaxllm.tasks import TASKS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LISTED = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "experiments").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
RUNS = ("python -m jaxllm.run", "jaxllm")

# What makes a command small. A key that the command sets itself stays, but for those that decide how long it takes.
MODEL = {"model.d_model": "32", "model.layers": "1* global/dense", "model.mixers.global.num_heads": "2"}
DATA = {"data.path": "books", "data.tokenizer.vocab_size": "300"}
TRAIN = {"train.batch_size": "8", "train.seq_len": "16", "train.eval_batches": "1", "train.sample_tokens": "0"}

SERVER = {"rows": "2", "max_len": "64", "row_buckets": "[2]", "token_buckets": "[32]", "prompt_logprobs": "false"}
BENCH = {"requests": "3", "warm_up": "1", "prompt_max": "16", "output_min": "2", "output_max": "4"}


class Command(NamedTuple):
    page: str
    line: str
    env: dict[str, str]
    words: list[str]

    @property
    def keys(self) -> dict[str, str]:
        return dict(word.lstrip("+").split("=", 1) for word in self.words if "=" in word and not word.startswith("-"))


def blocks(page: Path) -> list[tuple[str, str]]:
    return FENCE.findall(page.read_text(encoding="utf-8"))


def files(page: Path) -> dict[str, str]:
    """Blocks that say where they belong: {path: text}."""
    found = {}
    for language, text in blocks(page):
        first = re.match(r"# ([\w./-]+\.(?:py|yaml))\n", text)
        if first and language in ("python", "yaml"):
            found[first[1]] = text[first.end() :]
    return found


def commands(page: Path) -> list[Command]:
    out = []
    for language, text in blocks(page):
        for line in text.replace("\\\n", " ").splitlines() if language == "bash" else ():
            words = shlex.split(line, comments=True)
            env = {}
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                name, _, value = words.pop(0).partition("=")
                env[name] = value
            if words:
                out.append(Command(page.name, line, env, words))
    return out


def toy(command: Command, arguments: list[str]) -> list[str]:
    """The same command, small."""
    keys = command.keys
    task, resumes = keys.get("task", "train"), keys.get("resume") == "true"
    more: dict[str, str] = {}
    if task == "train":
        more = {"train.steps": "4" if resumes and "train.steps" in keys else "2"}
    if task == "train" and not resumes:
        small = {**TRAIN, **DATA} | ({} if "source" in keys else MODEL)  # a source brings its own model
        if "mixer@model.mixers.global" in keys and "source" not in keys:  # another mixer may not have heads
            del small["model.mixers.global.num_heads"]
        if "data/tokenizer" in keys:
            del small["data.tokenizer.vocab_size"]
        if not any(key.startswith("mesh") for key in keys):
            small["mesh"] = "single"
        if not command.env and not any(key.startswith("track") for key in keys):
            small["track"] = "none"
        if keys.get("data") == "mix":  # its sources have paths
            del small["data.path"]
        if "draft@model.draft" in keys:
            small["model.draft.unroll"] = "2"
        more |= {key: value for key, value in small.items() if key not in keys}
    if task == "generate":
        more = {"max_new_tokens": "4"}
    if task == "time":  # a decode step of one short row, and the smallest products
        more = {"time.context": "16", "time.what": "decode", "time.repeats": "2", "time.sizes": "[16]", "track": "none"}
    if task == "eval":
        more = {"mesh": "single"}
    if task in ("serve", "bench_serve") or (task == "generate" and "out" in keys):
        more |= {f"server.{key}": value for key, value in SERVER.items() if f"server.{key}" not in keys}
    if task == "serve":
        more["server.port"] = str(free_port())
    if task == "bench_serve":
        more |= {f"bench.{key}": value for key, value in BENCH.items() if f"bench.{key}" not in keys} | {
            "track": "none"
        }
    return arguments + [f"{key}={value}" for key, value in more.items()]


class Ran(NamedTuple):
    code: int
    out: str
    err: str


class Place:
    """The folder that the commands are typed in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, arguments: list[str]) -> Ran:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
        return Ran(code, out.getvalue(), err.getvalue())

    def program(self, command: Command, arguments: list[str]) -> None:
        """One `python -m jaxllm.run` line: exit code 0, and the last line is the JSON of its task."""
        arguments = toy(command, arguments)
        stopper = stops_when_ready(arguments) if command.keys.get("task") == "serve" else contextlib.nullcontext()
        if "--config-dir" not in arguments and (self.folder / "conf").is_dir():
            arguments = ["--config-dir", "conf", *arguments]  # a page that adds to conf/ did it here
        with stopper:
            ran = self.run(arguments)
        assert ran.code == 0, f"{command.page}: {command.line}\n-> {shlex.join(arguments)}\n{ran.err[-3000:]}"
        result = json.loads(ran.out.splitlines()[-1])
        assert result["task"] == command.keys.get("task", "train") and "error" not in result, command.line
        if result["task"] == "eval":
            assert 0 < result["tokens"] < 2_000, f"{command.line}: not the little text that the run held out"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


class Elsewhere(logging.Handler):
    """Somebody else's log, which a server has to leave open: some handlers close the stream they write to with them."""

    closed = False

    def close(self) -> None:
        self.closed = True
        super().close()


@contextlib.contextmanager
def stops_when_ready(arguments: list[str]) -> Iterator[None]:
    """A server runs until it is told to stop: by the signal that anybody would send, as soon as it says that it is healthy."""
    port = next(word.split("=")[1] for word in arguments if word.startswith("server.port="))
    over, log = threading.Event(), Elsewhere()

    def watch() -> None:
        while not over.wait(0.1):
            with contextlib.suppress(OSError):
                if urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200:
                    os.kill(os.getpid(), signal.SIGTERM)
                    return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not log.closed


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a little text, the files that the pages tell the reader to write, and the one trained run."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "books" / "old").mkdir(parents=True)
    for n in range(30):
        text = "".join(f"def add_{n}_{k}(x, y):\n    return x + {k} * y\n\n" for k in range(30))
        (folder / "books" / ("old" if n % 2 else "") / f"{n}.txt").write_text(text)
    notes = [json.dumps({"body": f"note {n}: water the plants"}) + "\n" for n in range(60)]
    (folder / "notes.jsonl").write_text("".join(notes))
    talk = [{"role": "user", "content": "Water?"}, {"role": "assistant", "content": "Yes."}]
    sums = [{"prompt": f"{n}+1=", "choices": [str(n + 1), str(n)], "answer": 0} for n in range(3)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in sums))
    (folder / "talks.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 20)
    (folder / "prompts.jsonl").write_text('{"prompt": "def add"}\n{"prompt": "return "}\n')
    (folder / "FOLDER").mkdir()
    with_text(folder / "FOLDER")
    ids = np.arange(4, dtype=np.int32)[None]
    np.save(folder / "ids.npy", ids)
    save_file({"input_ids": ids, "logits": np.zeros((1, 4, 260), np.float32)}, folder / "reference.safetensors")
    for page in PAGES:
        for name, text in files(page).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    shutil.copy(folder / "jaxllm" / "layers" / "ema.py", folder / "my_layers.py")
    jaxllm.layers.__path__.append(str(folder / "jaxllm" / "layers"))
    sys.path.insert(0, str(folder))
    here = os.getcwd()
    os.chdir(folder)
    # These runs are not looked at for speed, so compiling them well would be time lost.
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        place = Place(folder)
        made = place.run(toy(Command("", "", {}, []), ["+experiment=quickstart", "run_dir=runs/RUN"]))
        assert made.code == 0, made.err
        yield place
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
        os.chdir(here)
        sys.path.remove(str(folder))
        jaxllm.layers.__path__.remove(str(folder / "jaxllm" / "layers"))
        for name in ("jaxllm.layers.ema", "my_layers"):
            sys.modules.pop(name, None)


# ---- commands


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_run(page, place, monkeypatch):
    for command in commands(page):
        with monkeypatch.context() as patch:
            for name, value in command.env.items():
                patch.setenv(name, value)
            line = shlex.join(command.words)
            prefix = next((p for p in RUNS if line == p or line.startswith(p + " ")), None)
            if prefix is not None and "hydra/launcher=" in line:
                check_launched(command)
            elif prefix is not None:
                place.program(command, command.words[len(prefix.split()) :])
            elif command.words[0] == "tail":
                subprocess.run(command.words, check=True, cwd=place.folder, stdout=subprocess.DEVNULL)
            else:
                check_what_cannot_run_here(command)


def check_what_cannot_run_here(command: Command) -> None:
    """The short list of commands that set up, build, upload or open a terminal: what they name exists."""
    words = command.words
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    if words[0] == "make":
        done = subprocess.run(["make", "-n", "-C", str(ROOT), *words[1:]], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert {e for e in command.env.get("EXTRAS", "dev").split(",")} <= extras.keys()
    elif words[:2] == ["pip", "install"]:
        extra = re.fullmatch(r"\.\[([\w-]+)\]", words[2])
        assert extra and extra[1] in extras or words[2] == f"dist/jaxllm-{__version__}-py3-none-any.whl", command.line
    elif words[0] == "wandb":
        cli: Any = importlib.import_module("wandb.cli.cli").cli
        assert words[1] in cli.commands
    elif words[:3] == ["python", "-m", "build"]:
        assert words[3:] == ["--wheel"] and any(d.startswith("build") for d in extras["dev"])
    elif words[:3] == ["python", "-m", "pytest"]:
        named = [word for word in words[3:] if word.startswith("tests/")]
        written = {name for page in PAGES for name in files(page)}
        assert named and all((ROOT / name).exists() or name in written for name in named), command.line
    else:
        raise AssertionError(f"{command.page}: {command.line}\nis no command that this test knows")


def check_launched(command: Command) -> None:
    """A launcher starts other processes, on a cluster maybe: it comes with an extra, and its first job composes."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    kind = command.keys["hydra/launcher"].split("_")[0]
    assert any(kind in dependency for dependency in extras["launchers"]), command.line
    jobs = {k: v.split(",")[0] for k, v in command.keys.items() if not k.startswith("hydra")}
    assert compose([f"{k}={v}" for k, v in jobs.items()]).task == "train"


def test_make_commands_of_the_contributing_page_exist():
    found = commands(ROOT / "CONTRIBUTING.md")
    assert any(command.words == ["make", "test"] for command in found)
    for command in found:
        check_what_cannot_run_here(command)


# ---- code and yaml


def test_the_python_of_the_readme_runs(place, capsys):
    code = [text for language, text in blocks(ROOT / "README.md") if language == "python"]
    for text in code:
        exec(compile(text, "README.md", "exec"), {})
    difference, *text = capsys.readouterr().out.splitlines()
    assert float(difference) < 1e-4 and len(code) == 2
    assert len(code[0].splitlines()) <= 18


def test_every_yaml_of_the_pages_is_a_file_that_a_command_uses():
    for page in PAGES:
        unnamed = [text for language, text in blocks(page) if language == "yaml"]
        assert len(unnamed) == sum(name.endswith(".yaml") for name in files(page))


def test_the_stages_of_the_runs_page_are_a_plan(place):
    from jaxllm.training.stages import plan

    cfg = compose(["+experiment=staged"], conf_dir=with_conf(place, "my_conf"))
    entries = cfg.section("stages")
    schedules = {i: cfg.build_node(s.schedule, "schedule") for i, s in enumerate(entries) if s.schedule}
    model = cfg.build("model", vocab_size=64)
    stages = plan(cfg.section("train"), entries, model, cfg.build("optim"), cfg.build("objective"), schedules)
    found = [(s.name, s.start, s.end, s.seq_len, s.batch_size) for s in stages]
    assert found == [("short", 0, 30, 64, 8), ("long", 30, 40, 128, 4)]
    assert stages[1].frozen == ["embed"] and stages[1].optimiser.lr == 3e-4 and stages[1].reset_optimizer


def with_conf(place: Place, name: str) -> Path:
    """The project's conf/ and a folder of the pages laid over it, as `--config-dir` and a new file in conf/ both do."""
    both = place.folder / f"{name}-and-conf"
    if not both.exists():
        shutil.copytree(jaxllm.config.CONF, both)
        shutil.copytree(place.folder / name, both, dirs_exist_ok=True)
    return both


# ---- the worked layer of docs/add-a-layer.md


@pytest.fixture
def collected(place, monkeypatch):
    """tests/test_contract.py as it is collected when the page's yaml lies in conf/mixer."""
    conf = with_conf(place, "conf")
    monkeypatch.setattr(jaxllm.compose, "CONF", conf)
    listed = jaxllm.config.options
    monkeypatch.setattr(jaxllm.config, "options", lambda group: listed(group, conf))
    spec = importlib.util.spec_from_file_location("contract_with_the_new_layer", ROOT / "tests" / "test_contract.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_contract_picks_up_the_new_layer(collected):
    found = {check.__name__ for kind, check in collected.CASES if kind == "mixer/ema"}
    assert found == {name for name in dir(contract) if name.startswith("check_")}


def test_the_new_layer_keeps_the_contract(collected):
    """The checks that compile little; all of them were run when the page was written."""
    subject = collected.subject("mixer/ema")
    for name in ("packed", "splits", "draft_verify", "cost", "flops"):
        getattr(contract, f"check_{name}")(subject)


def test_the_test_of_the_new_layer_passes(place):
    spec = importlib.util.spec_from_file_location("the_page's_test", place.folder / "tests" / "layers" / "test_ema.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tests = [value for name, value in vars(module).items() if name.startswith("test_")]
    assert len(tests) == 1
    tests[0]()


# ---- what the pages claim


@pytest.mark.parametrize("model", ["llama_24m", "tiny"])
def test_a_swapped_mixer_changes_the_model(model):
    """What `mixer@model.mixers.global=mqa` promises: nothing in the model's yaml may undo it."""
    cfg = compose([f"model={model}", "mixer@model.mixers.global=mqa"])
    assert cfg.build("model", vocab_size=64).mixer("global").kv_heads == 1


def test_tasks_and_settings_of_the_pages_are_the_codes():
    numbers = (ROOT / "docs" / "numbers.md").read_text()
    for task in TASKS:
        assert re.search(rf"^\| {task} \|", numbers, re.M)
    from jaxllm.tasks.count import CountSettings
    from jaxllm.training.settings import StageSettings, TrainSettings

    text = "".join(page.read_text() for page in PAGES)
    for prefix, settings in (("train", TrainSettings), ("count", CountSettings)):
        for name in set(re.findall(rf"\b{prefix}\.([a-z_]+)\b", text)) - {"py"}:
            assert name in settings.__dataclass_fields__, f"{prefix}.{name}"
    for name in ("freeze", "train_only", "reset_optimizer", "seq_len", "weights", "schedule", "data", "model"):
        assert name in StageSettings.__dataclass_fields__


def test_the_logged_keys_of_the_numbers_page_are_logged(place):
    rows = [json.loads(line) for line in (place.folder / "runs" / "RUN" / "metrics.jsonl").read_text().splitlines()]
    logged = {key for row in rows for key in row if "/" in key}
    page = (ROOT / "docs" / "numbers.md").read_text()
    table = page[page.index("| Key | Meaning |") : page.index("The progress line")]
    written = set(re.findall(r"`((?:train|val)/[\w/]+)`", table)) - {"train/metric/"}
    assert written - logged == set()
    assert {key for key in logged if key.count("/") == 1} - written == set()


def test_links_and_files_exist():
    for page in LISTED:
        text = FENCE.sub("", page.read_text())
        for target in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", text):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"
        for name in re.findall(r"`((?:jaxllm|conf|tests|docs|experiments)/[\w./-]+\.\w+)`", text):
            assert (ROOT / name).exists() or name in {n for p in PAGES for n in files(p)}, f"{page.name}: {name}"


def test_the_picture_is_well_formed():
    import xml.etree.ElementTree as ElementTree

    picture = ElementTree.parse(ROOT / "docs" / "architecture.svg")
    words = " ".join(picture.getroot().itertext())
    for room in (p.stem for p in (ROOT / "jaxllm").iterdir() if p.is_dir() and (p / "__init__.py").exists()):
        assert room in words, room


def test_no_page_names_a_place_of_one_machine():
    for page in LISTED:
        assert not re.search(r"/(?:root|home|work|tmp|Users)/|localhost|pypi\.", page.read_text()), page.name


def test_the_versions_agree():
    cite = (ROOT / "CITATION.cff").read_text()
    assert f"version: {__version__}" in cite
    assert __version__ in (ROOT / "CHANGELOG.md").read_text()
