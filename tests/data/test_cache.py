"""The token cache: built once, found again, never trusted half-made or damaged, never in the way."""

import errno
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from jaxllm.data import cache, tokenise
from jaxllm.data.cache import cache_root
from jaxllm.data.text import Text
from jaxllm.data.tokenizer import BPE, Bytes, TokenizerFile
from jaxllm.errors import UserError


@pytest.fixture
def corpus_files(tmp_path):
    Path(tmp_path, "corpus").mkdir()
    for i in range(8):
        Path(tmp_path, "corpus", f"{i}.txt").write_text(f"document {i}: some text é\n" * (i + 1), encoding="utf-8")
    return tmp_path


def text(**fields):
    return Text(**({"path": "corpus", "tokenizer": Bytes(), "val_every": 4, "cache_dir": "cache"} | fields))


def entries(folder):
    return sorted(p.name for p in Path(folder, "cache").iterdir())


def contents(corpus):
    return [corpus.tokenizer.decode(corpus.train.document(i)) for i in range(len(corpus.train))]


def test_documents_facts_and_split(corpus_files):
    corpus = text().prepare(base=corpus_files)
    assert len(corpus.train) == 6 and len(corpus.val) == 2
    assert corpus.tokenizer.decode(corpus.val.document(0)) == "document 3: some text é\n" * 4
    first = corpus.train.document(0).tolist()
    assert first[0] == corpus.tokenizer.bos_id and first[-1] == corpus.tokenizer.eos_id
    raw = [p.read_bytes() for p in sorted((corpus_files / "corpus").iterdir())]
    assert corpus.facts["sha256"] == hashlib.sha256(b"".join(r + b"\0" for r in raw)).hexdigest()
    assert corpus.facts["bytes"] == sum(map(len, raw)) and corpus.facts["documents"] == 8
    assert corpus.facts["tokens"] == corpus.train.size + corpus.val.size == sum(map(len, raw)) + 2 * 8
    assert corpus.facts["train_tokens"] == corpus.train.size and corpus.facts["path"] == "corpus"
    assert isinstance(corpus.train.tokens, np.memmap) and not corpus.train.tokens.flags.writeable
    assert corpus.train.tokens.dtype == np.uint16


@pytest.mark.parametrize("tokenizer", [Bytes(), BPE(vocab_size=300)])
def test_the_second_time_nothing_is_tokenised(tokenizer, corpus_files, monkeypatch):
    told = []
    first = text(tokenizer=tokenizer).prepare(base=corpus_files)
    monkeypatch.setattr(cache, "write_tokens", None)
    again = text(tokenizer=tokenizer).prepare(told.append, corpus_files)
    assert contents(again) == contents(first) and again.facts == first.facts
    assert "from the cache" in told[-1]
    assert len(entries(corpus_files)) == 1


def test_whatever_decides_the_tokens_makes_another_entry(corpus_files):
    made = {
        text(**fields).prepare(base=corpus_files).folder
        for fields in (
            {},
            {"tokenizer": BPE(vocab_size=300)},
            {"tokenizer": BPE(vocab_size=301)},
            {"val_every": 3},
            {"path": "corpus/*"},
            {"max_document_chars": 50},
            {"path": "corpus/1.txt"},
        )
    }
    assert len(made) == 6  # the glob means the same files as the folder
    changed = corpus_files / "corpus" / "1.txt"
    changed.write_text("other\n")
    corpus = text().prepare(base=corpus_files)
    assert corpus.folder not in made and "other\n" in contents(corpus)
    changed.write_text("OTHER\n")  # as long as before
    assert "OTHER\n" in contents(text().prepare(base=corpus_files))


def test_a_tokenizer_file_is_part_of_the_fingerprint(corpus_files):
    BPE(vocab_size=300).fit(["some text " * 30], corpus_files).library.save(str(corpus_files / "tokenizer.json"))
    spec = {"tokenizer": TokenizerFile("tokenizer.json")}
    first = text(**spec).prepare(base=corpus_files)
    BPE(vocab_size=290).fit(["document " * 30], corpus_files).library.save(str(corpus_files / "tokenizer.json"))
    second = text(**spec).prepare(base=corpus_files)
    assert first.folder != second.folder and contents(first) == contents(second)


def test_the_tokenizer_is_trained_on_training_documents_only(corpus_files):
    (corpus_files / "corpus" / "3.txt").write_text("qzqzqzqz" * 50)
    corpus = text(tokenizer=BPE(vocab_size=300)).prepare(base=corpus_files)
    assert not any(b"qz" in p for p in corpus.tokenizer.pieces)


def damage(name, how):
    def do(entry):
        path = entry / name
        if how == "gone":
            path.unlink()
        elif how == "short":
            path.write_bytes(path.read_bytes()[:-1])
        elif how == "long":
            path.write_bytes(path.read_bytes() + b"\0\0")
        else:
            path.write_bytes(b"\xff" * path.stat().st_size)

    return pytest.param(do, id=f"{name}-{how}")


@pytest.mark.parametrize(
    "spoil",
    [
        damage("tokens.bin", "short"),
        damage("tokens.bin", "long"),
        damage("tokens.bin", "gone"),
        damage("lengths.bin", "gone"),
        damage("lengths.bin", "garbage"),
        damage("meta.json", "gone"),
        damage("meta.json", "garbage"),
        damage("tokenizer/jaxllm_tokenizer.json", "gone"),
        damage("tokenizer/jaxllm_tokenizer.json", "garbage"),
    ],
)
def test_a_damaged_entry_is_named_and_built_again(spoil, corpus_files):
    first = text().prepare(base=corpus_files)
    expected = contents(first)
    spoil(first.folder)
    told = []
    again = text().prepare(told.append, corpus_files)
    assert contents(again) == expected and again.folder == first.folder
    assert "unreadable" in told[0] and str(first.folder) in told[0] and "\n" not in told[0]
    assert entries(corpus_files) == [first.folder.name]
    told.clear()
    text().prepare(told.append, corpus_files)
    assert "from the cache" in told[-1]


def test_an_interrupted_build_leaves_nothing_that_counts(corpus_files, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenise, "flushed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        text().prepare(base=corpus_files)
    assert entries(corpus_files) == []
    monkeypatch.undo()
    assert len(text().prepare(base=corpus_files).train) == 6


KILLED = """
import sys, time
from jaxllm.data.text import Text
from jaxllm.data.tokenizer import Bytes

def stop(*_):  # all tokens are written, the entry is not finished
    print("writing", flush=True)
    time.sleep(60)

Bytes.save = stop
Text("corpus", tokenizer=Bytes(), val_every=4, cache_dir="cache").prepare(base=sys.argv[1])
"""


def test_kill_minus_nine_during_a_build(corpus_files):
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(corpus_files)], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"writing\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    left = entries(corpus_files)
    assert len(left) == 1 and left[0].startswith(".")
    corpus = text().prepare(base=corpus_files)
    assert len(corpus.train) == 6 and corpus.folder.name in entries(corpus_files)
    old = time.time() - 2 * 24 * 3600  # what was left is swept away once it is surely dead
    os.utime(corpus_files / "cache" / left[0], (old, old))
    (corpus.folder / "meta.json").unlink()
    text().prepare(base=corpus_files)
    assert entries(corpus_files) == [corpus.folder.name]


def test_concurrent_builds_agree(corpus_files, monkeypatch):
    meet = threading.Barrier(3)
    made, write = [], cache.write_tokens

    def together(*arguments):
        write(*arguments)
        meet.wait(timeout=20)  # all three have a whole build of their own

    def build():
        made.append(text().prepare(base=corpus_files))

    monkeypatch.setattr(cache, "write_tokens", together)
    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 3 and len({c.folder for c in made}) == 1
    assert contents(made[0]) == contents(made[1]) == contents(made[2])
    assert entries(corpus_files) == [made[0].folder.name]


def full_disk(root):
    """Writing fails below `root` as on a full disk; reading works."""

    def write(documents, tokenizer, place, log):
        if Path(place).is_relative_to(root):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return tokenise.write_tokens(documents, tokenizer, place, log)

    return write


def test_a_full_disk_under_a_named_folder_is_one_line(corpus_files, monkeypatch):
    monkeypatch.setattr(cache, "write_tokens", full_disk(corpus_files))
    with pytest.raises(UserError, match="data.cache_dir=cache: the disk is full") as error:
        text().prepare(base=corpus_files)
    assert str(corpus_files / "cache") in str(error.value)
    assert entries(corpus_files) == []


def test_a_full_disk_under_the_default_folder_falls_back(corpus_files, monkeypatch, tmp_path_factory):
    monkeypatch.setenv("XDG_CACHE_HOME", str(corpus_files / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(cache, "write_tokens", full_disk(corpus_files / "home"))
    told = []
    corpus = text(cache_dir=None).prepare(told.append, corpus_files)
    assert len(contents(corpus)) == 6
    assert any("the disk is full" in line and "temporary folder" in line for line in told)
    folder = corpus.folder
    assert folder.is_dir()
    corpus.keep.cleanup()
    assert not folder.exists()
    monkeypatch.setattr(cache, "write_tokens", full_disk("/"))
    with pytest.raises(UserError, match="disk is full.*data.cache_dir=FOLDER"):
        text(cache_dir=None).prepare(base=corpus_files)


def test_a_folder_that_cannot_be_made(corpus_files, monkeypatch):
    (corpus_files / "file").write_text("")
    with pytest.raises(UserError, match="data.cache_dir=file/sub: cannot write tokens"):
        text(cache_dir="file/sub").prepare(base=corpus_files)
    monkeypatch.setenv("XDG_CACHE_HOME", str(corpus_files / "file"))
    told = []
    corpus = text(cache_dir=None).prepare(told.append, corpus_files)
    assert len(contents(corpus)) == 6 and any("temporary folder" in line for line in told)


def test_where_the_cache_lies(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root(None, tmp_path) == tmp_path / "xdg" / "jaxllm" / "data"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative is invalid")
    assert cache_root(None, tmp_path) == tmp_path / "home" / ".cache" / "jaxllm" / "data"
    assert cache_root("here", tmp_path) == tmp_path / "here"
    assert cache_root("~/there", tmp_path) == tmp_path / "home" / "there"


def test_a_corpus_without_text_is_refused(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "empty.txt").write_text("")
    with pytest.raises(UserError, match="holds no text"):
        text().prepare(base=tmp_path)
    assert entries(tmp_path) == []
