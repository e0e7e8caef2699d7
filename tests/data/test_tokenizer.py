"""Tokenizers: exact round trips, special tokens that text cannot forge, saving, and files from elsewhere."""

import json
import random

import numpy as np
import pytest
import tokenizers
from tokenizers import Tokenizer as Library

from jaxllm.data.tokenizer import BPE, Bytes, JsonTokenizer, TokenizerFile, load_tokenizer
from jaxllm.errors import UserError

TEXT = "def hello(name):\n    return f'hello {name}'\r\n\n# naïve 中文 😀 and <|eos|> <|bos|>\n"


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    words = [f"{a}{b} = function_{a}(value, {b})\n" for a in "abcdefgh" for b in ("one", "two", "three")]
    return BPE(vocab_size=400).fit(words * 3, tmp_path_factory.mktemp("bpe"))


def all_kinds(bpe):
    return {"bytes": Bytes(), "bpe": bpe}


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_round_trip_and_byte_counts(kind, bpe):
    tokenizer = all_kinds(bpe)[kind]
    for text in (TEXT, "", " leading", "\n\n  \t", "\x00\x7f"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
    counts = tokenizer.token_bytes()
    assert counts.dtype == np.int32 and counts.shape == (tokenizer.vocab_size,)
    assert counts[tokenizer.eos_id] == counts[tokenizer.bos_id] == 0
    assert (counts == 0).sum() == 2


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_text_cannot_spell_a_special_token(kind, bpe):
    tokenizer = all_kinds(bpe)[kind]
    ids = tokenizer.encode("a<|eos|>b<|bos|>")
    assert tokenizer.eos_id not in ids and tokenizer.bos_id not in ids
    assert tokenizer.decode(ids) == "a<|eos|>b<|bos|>"
    assert tokenizer.decode([tokenizer.bos_id, *tokenizer.encode("x"), tokenizer.eos_id]) == "x"


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_document_and_prompt_agree(kind, bpe):
    tokenizer = all_kinds(bpe)[kind]
    assert tokenizer.document("ab") == [*tokenizer.prompt("ab"), tokenizer.eos_id]
    assert tokenizer.prompt("ab") == [tokenizer.bos_id, *tokenizer.encode("ab")]


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_save_and_load(kind, bpe, tmp_path):
    tokenizer = all_kinds(bpe)[kind]
    tokenizer.save(tmp_path / "t")
    again = load_tokenizer(tmp_path / "t")
    assert again.encode(TEXT) == tokenizer.encode(TEXT)
    assert (again.vocab_size, again.eos_id, again.bos_id, again.pad_id) == (
        tokenizer.vocab_size,
        tokenizer.eos_id,
        tokenizer.bos_id,
        tokenizer.pad_id,
    )
    assert list(again.pieces) == list(tokenizer.pieces)
    for file in (tmp_path / "t").iterdir():
        json.loads(file.read_text(encoding="utf-8"))  # JSON only


def test_bpe_compresses_and_is_deterministic(bpe, tmp_path):
    text = "aone = function_a(value, one)\n"
    assert len(bpe.encode(text)) < len(text) / 2
    lines = [f"line {i} of text\n" for i in range(50)]
    first, second = (BPE(vocab_size=300).fit(lines, tmp_path) for _ in range(2))
    assert list(first.pieces) == list(second.pieces)


def test_bpe_on_a_small_corpus_says_so(tmp_path):
    told = []
    made = BPE(vocab_size=5000).fit(["tiny text, tiny text"], tmp_path, told.append)
    assert 258 <= made.vocab_size < 5000
    assert any("too small" in line and str(made.vocab_size) in line for line in told)


def test_bpe_reads_no_more_than_its_budget(tmp_path):
    taken = []

    def texts():
        for i in range(1000):
            taken.append(i)
            yield "x" * 999 + "\n"

    BPE(vocab_size=258, train_bytes=10_000).fit(texts(), tmp_path)
    assert 10 <= len(taken) < 300  # the library may draw a little ahead


def test_decode_equals_the_library_for_any_ids(bpe):
    draw = random.Random(0)
    for _ in range(200):
        ids = [draw.randrange(bpe.vocab_size) for _ in range(draw.randrange(12))]
        assert bpe.decode(ids) == bpe.library.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("token", [-1, 258, 10**6])
def test_an_id_outside_the_vocabulary_is_named(token):
    with pytest.raises(UserError, match=f"token id {token} is outside the vocabulary"):
        Bytes().decode([token])


def test_a_lone_surrogate_is_refused_in_one_line(bpe):
    for tokenizer in (Bytes(), bpe):
        with pytest.raises(UserError, match="lone surrogate .U.D800 at character 2"):
            tokenizer.encode("ab\ud800")


@pytest.mark.parametrize(
    "fields, key",
    [
        ({"vocab_size": 257}, "vocab_size"),
        ({"vocab_size": "abc"}, "vocab_size"),
        ({"train_bytes": 0}, "train_bytes"),
        ({"vocab_size": True}, "vocab_size"),
    ],
)
def test_bad_fields_are_named(fields, key):
    with pytest.raises(UserError, match=f"data.tokenizer.{key}="):
        BPE(**fields)


def test_sentencepiece_file(tmp_path, sentencepiece):
    sentencepiece(tmp_path / "tokenizer.json")
    told = TokenizerFile("tokenizer.json").fit([], tmp_path)
    assert (told.eos_id, told.bos_id) == (2, 1)
    for text in ("hi hi", "  hi", "😀 hi </s>", "hi hi hi hi hi hi hi"):  # nothing truncated, nothing padded
        ids = told.encode(text)
        assert told.decode(ids) == text == told.library.decode(ids)
        assert 2 not in ids
    assert told.token_bytes()[told.encode("hi hi")].sum() == 1 + len("hi hi")  # the prepended space counts
    told.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again.decode(again.encode("hi 😀")) == "hi 😀" and again.eos_id == 2


def test_word_pieces_read_well(tmp_path):
    words = ["[UNK]", "[CLS]", "[SEP]", "play", "##ing", "now"]
    library = Library(tokenizers.models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.decoder = tokenizers.decoders.WordPiece()
    library.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    library.save(str(tmp_path / "tokenizer.json"))
    made = TokenizerFile(".").fit([], tmp_path)  # the folder will do
    assert made.decode(made.encode("playing now")) == "playing now"
    assert (made.bos_id, made.eos_id) == (1, 2)


def test_special_tokens_by_request_by_folder_and_by_name(bpe, tmp_path):
    bpe.library.save(str(tmp_path / "tokenizer.json"))
    assert TokenizerFile("tokenizer.json").fit([], tmp_path).eos_id == bpe.eos_id
    assert TokenizerFile("tokenizer.json", eos="<|bos|>").fit([], tmp_path).eos_id == bpe.bos_id
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|bos|>"}, "bos_token": None, "pad_token": "<|eos|>"})
    )
    made = TokenizerFile("tokenizer.json").fit([], tmp_path)
    assert (made.eos_id, made.bos_id, made.pad_id) == (bpe.bos_id, None, bpe.eos_id)
    assert made.document("a") == [*made.encode("a"), made.eos_id]
    assert load_tokenizer(tmp_path).eos_id == bpe.bos_id  # a Hugging Face folder as it is
    with pytest.raises(UserError, match=r"data.tokenizer.eos='<end>': .*tokenizer.json has no such token"):
        TokenizerFile("tokenizer.json", eos="<end>").fit([], tmp_path)


def test_a_file_without_an_end_token_is_refused(tmp_path):
    library = Library(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="data.tokenizer.eos=TOKEN"):
        TokenizerFile("tokenizer.json").fit([], tmp_path)


def test_identity_follows_the_file(bpe, tmp_path):
    bpe.library.save(str(tmp_path / "tokenizer.json"))
    spec = TokenizerFile("tokenizer.json")
    before = spec.identity(tmp_path)
    assert before == spec.identity(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|bos|>"}')
    assert spec.identity(tmp_path) != before


@pytest.mark.parametrize(
    "content, reason",
    [
        ("{", "not valid JSON|reads"),
        ("[]", "reads"),
        ("{}", "reads"),
        ('{"model": {"type": "BPE", "vocab": 3}}', "reads"),
    ],
)
def test_broken_files_are_one_line(content, reason, tmp_path):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=reason) as error:
        TokenizerFile("tokenizer.json").fit([], tmp_path)
    assert "\n" not in str(error.value) and "tokenizer.json" in str(error.value)


def test_missing_and_strange_folders(bpe, tmp_path):
    with pytest.raises(UserError, match="no tokenizer folder"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(UserError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="data.tokenizer.path=nowhere.json: no file"):
        TokenizerFile("nowhere.json").fit([], tmp_path)
    (tmp_path / "jaxllm_tokenizer.json").write_text('{"kind": "pickle"}')
    with pytest.raises(UserError, match="kind"):
        load_tokenizer(tmp_path)
    bpe.save(tmp_path)
    for bad in (10**6, -1, "0", None, True):
        (tmp_path / "jaxllm_tokenizer.json").write_text(json.dumps({"kind": "json", "eos_id": bad}))
        with pytest.raises(UserError, match="eos_id"):
            load_tokenizer(tmp_path)


def test_byte_level_file_with_plain_added_tokens(tmp_path):
    """Added tokens are written as they are, not in the byte alphabet; unused ids have no bytes."""
    library = Library(tokenizers.models.BPE({"a": 0, "\u0120": 1, "\u00c3": 2, "\u00a9": 3, "<|endoftext|>": 9}, []))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_tokens(["  ", "é中"])
    library.add_special_tokens(["<|endoftext|>"])
    library.save(str(tmp_path / "tokenizer.json"))
    made = TokenizerFile("tokenizer.json").fit([], tmp_path)
    assert isinstance(made, JsonTokenizer) and made.eos_id == 9
    spelled = "a  é中 aé"
    assert made.decode(made.encode(spelled)) == spelled
    assert made.pieces[8] == b"" and made.vocab_size == 10
