"""Reading files: every packing gives the same text, and every fault is one line that names the file."""

import gzip
import json
from pathlib import Path

import pytest
import zstandard

from jaxllm.data.files import Reading, find_files, read_documents
from jaxllm.errors import UserError

TEXT = "first line\nsecond: naïve 😀\r\n\nlast without end"


def write(path: Path, raw: bytes) -> Path:
    """Writes `raw` packed as the suffix says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    packed = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}.get(path.suffix, lambda b: b)(raw)
    path.write_bytes(packed)
    return path


def documents(paths, base, **how):
    return [d for f in find_files(paths, base) for d in read_documents(f, Reading(**how))]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_text_file_is_one_document_to_the_byte(suffix, tmp_path):
    write(tmp_path / f"a.txt{suffix}", TEXT.encode())
    assert documents(f"a.txt{suffix}", tmp_path) == [TEXT]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_each_jsonl_line_is_one_document(suffix, tmp_path):
    lines = [{"text": TEXT}, {"n": 1, "text": "two"}]
    write(tmp_path / f"a.jsonl{suffix}", ("\n\n".join(map(json.dumps, lines)) + "\n").encode())
    assert documents(f"a.jsonl{suffix}", tmp_path) == [TEXT, "two"]
    write(tmp_path / f"b.jsonl{suffix}", json.dumps({"body": "x"}).encode())
    assert documents(f"b.jsonl{suffix}", tmp_path, text_key="body") == ["x"]


def test_several_members_and_frames(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one ") + gzip.compress(b"two"))
    pack = zstandard.ZstdCompressor().compress
    (tmp_path / "b.txt.zst").write_bytes(pack(b"one ") + pack(b"") + pack(b"two" * 100_000))
    assert documents("a.txt.gz", tmp_path) == ["one two"]
    assert documents("b.txt.zst", tmp_path) == ["one " + "two" * 100_000]


def test_folder_glob_list_and_base(tmp_path, monkeypatch):
    for name in ("b/two.txt", "a/one.txt", "three.jsonl", ".hidden.txt", "b/.git/x.txt", "picture.png"):
        write(tmp_path / "corpus" / name, json.dumps({"text": name}).encode())
    told = []
    names = [f.path.relative_to(tmp_path / "corpus").as_posix() for f in find_files("corpus", tmp_path, told.append)]
    assert names == ["three.jsonl", "a/one.txt", "b/two.txt"]
    assert len(told) == 1 and "1 x .png" in told[0]
    assert len(find_files("corpus/**/*.txt", tmp_path)) == 2
    assert len(find_files(["corpus/a", "corpus/a/one.txt", "corpus/b/*"], tmp_path)) == 2  # each file once
    assert len(find_files(str(tmp_path / "corpus/a/one.txt"), Path("/"))) == 1  # absolute paths stand alone
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(find_files("~/corpus/a", Path("/"))) == 1
    assert find_files("corpus/picture.png", tmp_path)[0].size > 0  # named by itself, it is taken


@pytest.mark.parametrize("path", ["no/such/file.txt", "nothing*.txt"])
def test_a_missing_path_is_named(path, tmp_path):
    with pytest.raises(UserError, match="data.path=") as error:
        find_files(path, tmp_path)
    assert path in str(error.value) and str(tmp_path) in str(error.value)


def test_a_folder_without_text_says_what_it_holds(tmp_path):
    write(tmp_path / "only" / "a.png", b"x")
    with pytest.raises(UserError, match="no text files.*1 x .png"):
        find_files("only", tmp_path)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_wrong_encoding_is_one_clear_line(suffix, tmp_path):
    path = write(tmp_path / f"latin.txt{suffix}", b"a" * 300_000 + "naïve".encode("latin-1"))
    with pytest.raises(UserError, match="not utf-8 text .byte 0xef near offset 300002.") as error:
        documents(path.name, tmp_path)
    assert str(path) in str(error.value) and "data.encoding" in str(error.value)
    assert documents(path.name, tmp_path, encoding="latin-1")[0].endswith("naïve")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["truncated", "garbage", "flipped"])
def test_damaged_archives_are_named(suffix, damage, tmp_path):
    path = write(tmp_path / f"a.txt{suffix}", bytes(range(97, 123)) * 5000)
    raw = path.read_bytes()
    path.write_bytes({"truncated": raw[:-6], "garbage": b"not an archive at all", "flipped": b"\0" + raw[1:]}[damage])
    with pytest.raises(UserError) as error:
        documents(path.name, tmp_path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_decompression_bomb_is_stopped(suffix, tmp_path):
    path = write(tmp_path / f"bomb.txt{suffix}", b"\0" * (80 * 2**20))
    seen = 0
    with pytest.raises(UserError, match="decompression bomb.*data.max_expansion"):
        for piece in read_documents(find_files(path.name, tmp_path)[0], Reading()):
            seen += len(piece)
    assert 0 < seen <= 64 * 2**20
    honest = Reading(max_expansion=10**6)
    assert sum(map(len, read_documents(find_files(path.name, tmp_path)[0], honest))) == 80 * 2**20


@pytest.mark.parametrize(
    "line, reason",
    [
        ("{bad", "not valid JSON"),
        ("[1]", "no JSON object"),
        ('{"body": "x"}', "keys of this line: body"),
        ('{"text": 3}', "no text under"),
        (r'{"text": "\ud800"}', "lone surrogate"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_bad_jsonl_lines_are_named(line, reason, tmp_path):
    path = write(tmp_path / "a.jsonl", ('{"text": "fine"}\n' + line + "\n").encode())
    with pytest.raises(UserError, match=reason) as error:
        documents("a.jsonl", tmp_path)
    assert f"{path}:2" in str(error.value)


def test_a_line_without_end_is_refused_not_read(tmp_path):
    write(tmp_path / "a.jsonl", b'{"text": "' + b"x" * 1000)
    with pytest.raises(UserError, match="a.jsonl:1: the line is longer than 640 characters"):
        documents("a.jsonl", tmp_path, max_document_chars=10)


def test_long_files_are_cut_at_line_ends_and_lose_nothing(tmp_path):
    text = "".join(f"line {i} é\n" for i in range(1000))
    write(tmp_path / "a.txt", text.encode())
    parts = documents("a.txt", tmp_path, max_document_chars=500)
    assert "".join(parts) == text and len(parts) > 10
    assert all(p.endswith("\n") and len(p) < 520 for p in parts)
    write(tmp_path / "b.txt", b"x" * 2500)  # no line ends to cut at
    assert [len(p) for p in documents("b.txt", tmp_path, max_document_chars=500)] == [1000, 1000, 500]


def test_an_unreadable_path_is_named(tmp_path):
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match="dangling.txt"):
        documents("dangling.txt", tmp_path)
    with pytest.raises(UserError, match="dangling.txt: cannot be read"):
        documents(".", tmp_path)
