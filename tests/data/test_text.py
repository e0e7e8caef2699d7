"""The text source: files by path, the standard library by default, and mistakes in the fields."""

import dataclasses
import gzip
import importlib
import platform
import sysconfig
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from jaxllm.data import stdlib
from jaxllm.data.loader import Loader
from jaxllm.data.text import Text
from jaxllm.data.tokenizer import BPE, Bytes
from jaxllm.errors import UserError


def prepared(base, log=None, **fields):
    return Text(**({"tokenizer": Bytes(), "cache_dir": str(base / "cache")} | fields)).prepare(log, base)


def texts(store, tokenizer):
    return [tokenizer.decode(store.document(i)) for i in range(len(store))]


def fake_library(root, size=25_000):
    """A small standard library with everything the rule leaves out."""
    for name in (
        "b.py",
        "a.py",
        "pkg/z.py",
        "pkg/a.py",
        "test/t.py",
        "pkg/tests/t.py",
        "site-packages/s.py",
        "dist-packages/s.py",
        "__pycache__/c.py",
        "idlelib/idle_test/t.py",
        "lib2to3/l.py",
        "note.txt",
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
    (root / "latin.py").write_bytes("# -*- coding: latin-1 -*-\n# naïve\n".encode("latin-1"))
    (root / "a.py").write_text("# a.py\n" + "x = 1\n" * (size // 6))
    (root / "gone.py").symlink_to(root / "nowhere")


def use_library(monkeypatch, root, site):
    places = {"stdlib": str(root), "purelib": str(site)}
    monkeypatch.setattr(sysconfig, "get_path", places.__getitem__)
    monkeypatch.setattr(stdlib, "LEAST_BYTES", 20_000)


def test_the_rule_for_the_standard_library(tmp_path, monkeypatch):
    fake_library(tmp_path / "lib")
    use_library(monkeypatch, tmp_path / "lib", tmp_path / "none")
    corpus = prepared(tmp_path, val_every=0)
    first_lines = [t.split("\n")[0] for t in texts(corpus.train, corpus.tokenizer)]
    assert first_lines == ["# a.py", "# b.py", "# pkg/a.py", "# pkg/z.py"]  # walk order: a folder's files, then below
    facts = corpus.facts
    assert facts["source"] == "python-stdlib" and facts["python"] == platform.python_version()
    assert facts["bytes"] > 20_000 and len(facts["sha256"]) == 64
    (tmp_path / "lib" / "b.py").write_text("# B.py\n")  # as long as before
    assert prepared(tmp_path, val_every=0).facts["sha256"] != facts["sha256"]


def test_the_real_standard_library_is_large_and_clean():
    files, facts, extra = stdlib.library_files()
    if extra:
        pytest.skip("this interpreter's standard library is stripped")
    names = [name for name, _ in files]
    assert len(names) > 300 and "json/decoder.py" in names
    assert not any(part in stdlib.SKIP for name in names for part in name.split("/"))
    assert 8e6 < stdlib.total(files) < 30e6 and facts["python"] == platform.python_version()


def test_a_stripped_library_falls_back(tmp_path, monkeypatch):
    fake_library(tmp_path / "site")
    use_library(monkeypatch, tmp_path / "zipped", tmp_path / "site")
    told = []
    corpus = prepared(tmp_path, told.append)
    assert corpus.facts["source"] == "pydoc+packages"
    assert any("stripped" in line and "data.path=FILE" in line for line in told)
    held = texts(corpus.train, corpus.tokenizer) + texts(corpus.val, corpus.tokenizer)
    assert any(t.startswith("# pkg/z.py") for t in held) and len(held) > 50  # pydoc's topics too
    monkeypatch.setattr(stdlib, "topics", dict)
    use_library(monkeypatch, tmp_path / "zipped", tmp_path / "none")
    with pytest.raises(UserError, match="data.path=FILE"):
        prepared(tmp_path)


def test_paths_start_where_the_command_was_typed(tmp_path, monkeypatch):
    (tmp_path / "typed").mkdir()
    (tmp_path / "typed" / "my.txt").write_text("mine\n" * 10)
    monkeypatch.chdir(tmp_path)
    assert texts(prepared(tmp_path / "typed", path="my.txt", val_every=0).train, Bytes()) == ["mine\n" * 10]
    monkeypatch.chdir(tmp_path / "typed")  # without a base, the current folder
    corpus = Text("my.txt", tokenizer=Bytes(), cache_dir="c").prepare()
    assert corpus.folder.parent == tmp_path / "typed" / "c"
    with pytest.raises(UserError, match="data.path=my.txt: no such file or folder"):
        prepared(tmp_path, path="my.txt")


def test_one_text_file_still_has_a_validation_part(tmp_path):
    (tmp_path / "one.txt").write_text("0123456789" * 400)
    corpus = prepared(tmp_path, path="one.txt")
    assert corpus.val.size == (4000 + 2) // 20 and corpus.train.size + corpus.val.size == 4002
    joined = texts(corpus.train, corpus.tokenizer)[0] + texts(corpus.val, corpus.tokenizer)[0]
    assert joined == "0123456789" * 400


def test_mixed_packings_load_as_one_corpus(tmp_path):
    (tmp_path / "a.txt").write_text("plain")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n{"text": ""}\n{"text": "two"}\n'))
    corpus = prepared(tmp_path, path=["a.txt", "b.jsonl*"], val_every=0)
    assert texts(corpus.train, corpus.tokenizer) == ["plain", "one", "two"]  # an empty document is none
    loader = Loader(corpus.train, 2, 4, seed=1)
    seen = [b for s in range(2 * loader.rows_per_epoch) for b in loader.batch(s)["tokens"].ravel()]
    assert seen.count(corpus.tokenizer.eos_id) == 4 * 3  # each document in each of four epochs


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"path": ""}, "data.path=''"),
        ({"path": []}, "data.path="),
        ({"path": 3}, "data.path=3"),
        ({"path": ["a", ""]}, "data.path="),
        ({"text_key": ""}, "data.text_key"),
        ({"encoding": "utf-9"}, "utf-9"),
        ({"encoding": "base64"}, "base64"),
        ({"max_document_chars": 0}, "data.max_document_chars=0"),
        ({"max_expansion": None}, "data.max_expansion=None"),
        ({"val_every": "abc"}, "data.val_every='abc'"),
        ({"val_every": 1}, "every document"),
        ({"tokenizer": "bytes"}, "data.tokenizer='bytes'"),
        ({"cache_dir": 3}, "data.cache_dir=3"),
    ],
)
def test_mistakes_in_the_fields_are_one_line(fields, message):
    with pytest.raises(UserError, match=message) as error:
        Text(**fields)
    assert "\n" not in str(error.value)


def test_every_data_yaml_names_the_fields_of_its_class():
    """The yaml shows every field, at the default of the class."""
    folder = Path(__file__).parents[2] / "conf" / "data"
    seen = []
    for path in [*folder.glob("*.yaml"), *folder.glob("tokenizer/*.yaml")]:
        node = dict(OmegaConf.to_container(OmegaConf.load(path)))
        node.pop("defaults", None)
        if not node:  # bytes.yaml only picks another tokenizer
            continue
        if "_target_" not in node:  # a variant: another yaml of the folder with some of its fields changed
            assert set(node) <= {f.name for f in dataclasses.fields(BPE)}, path
            continue
        module, name = node.pop("_target_").rsplit(".", 1)
        cls = getattr(importlib.import_module(module), name)
        fields = {f.name: f.default for f in dataclasses.fields(cls) if f.name != "tokenizer"}
        assert set(node) == set(fields), path
        if name == "Mix":  # a mix of nothing is none: what is mixed, and how, is an example
            assert node.pop("sources") and node.pop("weights").keys()
        plain = {k: tuple(v) if isinstance(v, list) else v for k, v in node.items()}
        assert all(plain[k] in (fields[k], "???") for k in plain), path
        seen.append(name)
    assert sorted(seen) == ["BPE", "Bytes", "Chat", "HF", "Mix", "Synthetic", "Text", "TiktokenFile", "TokenizerFile"]


@pytest.mark.parametrize("documents", [1, 3])
def test_a_tokenizer_never_sees_the_end_that_is_held_out(tmp_path, documents):
    """Fewer documents than `val_every`: the end of the longest is held out, so its words may not become tokens."""
    for i in range(documents):
        tail = "zebra zebra " * 40 if i == 0 else ""
        (tmp_path / f"{i}.txt").write_text("some plain words here " * (400 - 100 * bool(i)) + tail)
    tokenizer = BPE(vocab_size=300, min_frequency=2)
    corpus = prepared(tmp_path, path="*.txt", tokenizer=tokenizer, val_every=20)
    held = corpus.tokenizer.decode(corpus.val.document(0))
    assert "zebra" in held
    assert len(corpus.tokenizer.encode("zebra")) == 5  # letter by letter: no merge was learned from it
    assert len(corpus.tokenizer.encode("words")) < 5
