"""Streamed text: no half characters, and the same text as decoding the whole."""

import random

import pytest

from jaxllm.data.tokenizer import BPE, Bytes, StreamDecoder, TokenizerFile

REPLACEMENT = "\ufffd"


def pushed(tokenizer, ids):
    decoder = StreamDecoder(tokenizer)
    return [decoder.push(i) for i in ids] + [decoder.finish()]


def test_an_emoji_byte_by_byte():
    deltas = pushed(Bytes(), [0xF0, 0x9F, 0x98, 0x80])
    assert deltas == ["", "", "", "😀", ""]


def test_a_truncated_end_gives_one_replacement_at_finish():
    deltas = pushed(Bytes(), [0x61, 0xF0, 0x9F, 0x98])
    assert deltas == ["a", "", "", "", REPLACEMENT]


def test_a_wrong_byte_is_shown_as_decoding_the_whole_shows_it():
    ids = [0xF0, 0x9F, 0x61, 0xFF, 0xC3, 0xA9]
    assert "".join(pushed(Bytes(), ids)) == Bytes().decode(ids) == f"{REPLACEMENT}a{REPLACEMENT}é"


def test_special_tokens_do_not_break_a_character():
    tokenizer = Bytes()
    assert "".join(pushed(tokenizer, [0xC3, tokenizer.eos_id, 0xA9])) == "é"


def test_a_decoder_can_be_used_again():
    decoder = StreamDecoder(Bytes())
    decoder.push(0xF0)
    assert decoder.finish() == REPLACEMENT
    assert decoder.push(0x61) + decoder.finish() == "a"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory, sentencepiece):
    folder = tmp_path_factory.mktemp("stream")
    sentencepiece(folder / "tokenizer.json")
    return {
        "bytes": Bytes(),
        "bpe": BPE(vocab_size=300).fit(["naïve 😀 中文 text\n" * 20], folder),
        "sentencepiece": TokenizerFile("tokenizer.json").fit([], folder),
    }


@pytest.mark.parametrize("kind", ["bytes", "bpe", "sentencepiece"])
def test_joined_stream_is_the_decoded_whole(kind, tokenizers):
    tokenizer = tokenizers[kind]
    draw = random.Random(1)
    for _ in range(300):
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(draw.randrange(1, 30))]
        assert "".join(pushed(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["bytes", "bpe", "sentencepiece"])
def test_real_text_streams_without_replacements(kind, tokenizers):
    tokenizer = tokenizers[kind]
    text = " leading space, naïve 😀😀 中文\n  indented"
    deltas = pushed(tokenizer, tokenizer.encode(text))
    assert not any(REPLACEMENT in d for d in deltas)
    assert "".join(deltas) == text
