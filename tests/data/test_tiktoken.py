"""Vocabularies in tiktoken's format: the same ids as merging by rank gives, and one line for a file that is none."""

import base64
import random

import pytest

from jaxllm.data.tiktoken import PATTERNS, TiktokenFile, merged, read_ranks
from jaxllm.data.tokenizer import load_tokenizer
from jaxllm.errors import UserError

WORDS = [
    b"th",
    b"the",
    b" the",
    b"er",
    b"her",
    b"there",
    b" t",
    b"in",
    b"ing",
    b"  ",
    b"\xc3\xa9",
    b"12",
    b"123",
    b"qzx",
]
TEXT = "the there  her\u00e9ring 12345 \U0001f600 the\n\n"


def write(path, tokens):
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)))
    return path


@pytest.fixture
def file(tmp_path):
    """All bytes in a mixed order, as published files have them, and then words; `qzx` has no pair that makes it."""
    order = [bytes([b]) for b in range(256)]
    random.Random(0).shuffle(order)
    return write(tmp_path / "a.tiktoken", [*order, *WORDS])


def by_rank(word, ranks):
    return [ranks[word]] if word in ranks else [ranks[part] for part in merged(word, ranks, len(ranks))]


def test_ids_are_those_of_merging_by_rank(file, tmp_path):
    import tokenizers

    ranks = read_ranks(file)
    made = TiktokenFile(str(file), special=("<|bos|>", "<|endoftext|>"), bos="<|bos|>").fit([], tmp_path)
    assert (made.bos_id, made.eos_id, made.vocab_size) == (270, 271, 272)
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERNS["cl100k"]), "isolated")
    for text in (TEXT, "qzx qzxa", "", "a<|endoftext|>b"):
        words = [word.encode() for word, _ in split.pre_tokenize_str(text)]
        assert made.encode(text) == [i for word in words for i in by_rank(word, ranks)]
        assert made.decode(made.encode(text)) == text
    assert ranks[b" the"] in made.encode("x the") and made.encode("qzx") == [ranks[b"qzx"]]
    made.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").encode(TEXT) == made.encode(TEXT)


def test_the_split_is_a_setting(file, tmp_path):
    """Qwen cuts digits apart, GPT-4 keeps three of them."""
    ranks = read_ranks(file)

    def fit(pattern):
        return TiktokenFile(str(file), pattern=pattern).fit([], tmp_path).encode("123")

    assert fit("cl100k") == [ranks[b"123"]] and fit("qwen") == [ranks[b"1"], ranks[b"2"], ranks[b"3"]]
    assert fit("[0-9]{2}|.") == [ranks[b"12"], ranks[b"3"]] and fit("o200k") == fit("gpt2") == [ranks[b"123"]]
    with pytest.raises(UserError, match="data.tokenizer.pattern: is no regular expression"):
        fit("(")


def test_what_is_refused(file, tmp_path):
    def line(text):
        (tmp_path / "bad").write_text(text)
        with pytest.raises(UserError) as caught:
            TiktokenFile(str(tmp_path / "bad")).fit([], tmp_path)
        return str(caught.value)

    assert "bad:1: expected a token in base64 and its rank" in line("hello\n")
    assert "bad:2: expected" in line("YQ== 0\n!!!! 1\n")
    assert "ranks are not 0..1, each once" in line("YQ== 0\nYg== 7\n")
    assert "has no token for the byte 0x00" in line("YQ== 0\nYg== 1\n")
    with pytest.raises(UserError, match="no file"):
        TiktokenFile("none").fit([], tmp_path)
    with pytest.raises(UserError, match="data.tokenizer.eos='<e>': is not among data.tokenizer.special"):
        TiktokenFile(str(file), eos="<e>")
    with pytest.raises(UserError, match="no end-of-document token"):
        TiktokenFile(str(file), special=("<odd>",)).fit([], tmp_path)
    assert TiktokenFile(str(file)).identity(tmp_path) != TiktokenFile(str(file), pattern="gpt2").identity(tmp_path)
