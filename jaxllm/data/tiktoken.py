"""Vocabularies in tiktoken's format: a line a token, its bytes in base64 and its rank (GPT-4, gpt-oss, Llama 3, Qwen 1 publish these).

The ranks say in which order pairs are merged, not which pairs: a token's two parts are what the ranks below its own make of its
bytes. With them the vocabulary becomes a byte-level BPE of the `tokenizers` library, and ids are the same.
"""

import base64
import binascii
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from jaxllm.data.checks import Log, word
from jaxllm.data.pieces import ALPHABET
from jaxllm.data.subword import EOS_NAMES, JsonTokenizer
from jaxllm.data.vocabulary import TokenizerSpec, read_text
from jaxllm.errors import UserError

# How texts are split before merging; the file does not say, so it is a setting.
PATTERNS = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "o200k": "|".join((
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )),
}  # fmt: skip
LETTERS = {byte: letter for letter, byte in ALPHABET.items()}


@dataclass(frozen=True)
class TiktokenFile(TokenizerSpec):
    """A tiktoken vocabulary: `path` to the file of ranks.

    pattern: how its texts are split, one of gpt2, cl100k (GPT-4, Llama 3), qwen, o200k (gpt-oss), or a regular expression. special:
    names of the special tokens, whose ids follow the ranks in this order. eos, bos: which of them end and start a document; eos null
    = the first that has a usual name.
    """

    path: str
    pattern: str = "cl100k"
    special: tuple[str, ...] = ("<|endoftext|>",)
    eos: str | None = None
    bos: str | None = None

    def __post_init__(self) -> None:
        word("data.tokenizer.path", self.path)
        word("data.tokenizer.pattern", self.pattern)
        for role, name in (("eos", self.eos), ("bos", self.bos)):
            if name is not None and name not in self.special:
                raise UserError(
                    f"data.tokenizer.{role}={name!r}: is not among data.tokenizer.special ({', '.join(self.special)})"
                )

    def _file(self, base: Path) -> Path:
        path = base / Path(self.path).expanduser()
        if not path.is_file():
            raise UserError(f"data.tokenizer.path={self.path}: no file {path}")
        return path

    def identity(self, base: Path) -> dict[str, Any]:
        digest = hashlib.sha256(self._file(base).read_bytes()).hexdigest()
        return {
            "kind": "tiktoken",
            "sha256": digest,
            "pattern": self.pattern,
            "special": list(self.special),
            "eos": self.eos,
            "bos": self.bos,
            "tokenizers": tokenizers.__version__,
        }

    def fit(self, texts: Iterable[str], base: Path, log: Log = None) -> JsonTokenizer:
        path = self._file(base)
        eos = self.eos or next((name for name in EOS_NAMES if name in self.special), None)
        if eos is None:
            raise UserError(
                f"{path}: no end-of-document token; name one of data.tokenizer.special with data.tokenizer.eos=TOKEN"
            )
        ranks = read_ranks(path)
        library = build(ranks, PATTERNS.get(self.pattern, self.pattern))
        library.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in self.special])
        ids = library.get_vocab(with_added_tokens=True)
        return JsonTokenizer(library, eos_id=ids[eos], bos_id=None if self.bos is None else ids[self.bos])


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token -> rank. Raises UserError for a line that is no pair, and for ranks that are not 0, 1, 2, ... or lack a byte."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise UserError(f"{path}:{number}: expected a token in base64 and its rank") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise UserError(f"{path}: {len(ranks)} tokens, whose ranks are not 0..{len(ranks) - 1}, each once")
    missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing is not None:
        raise UserError(f"{path}: has no token for the byte 0x{missing:02x}, so not every text can be written")
    return ranks


def build(ranks: dict[bytes, int], pattern: str) -> Library:
    """The library's byte-level BPE with the same ids."""
    spelled = {token: "".join(LETTERS[byte] for byte in token) for token in ranks}
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda pair: pair[1]):
        parts = merged(token, ranks, rank)
        if len(parts) == 2:
            merges.append((spelled[parts[0]], spelled[parts[1]]))
    vocab = {spelled[token]: rank for token, rank in ranks.items()}
    # A token that no pair makes is still a whole word: tiktoken looks words up before it merges.
    library = Library(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    try:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception as error:  # the library's own error type is Exception
        raise UserError(f"data.tokenizer.pattern: is no regular expression ({str(error).splitlines()[0]})") from None
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    library.decoder = decoders.ByteLevel()
    return library


def merged(token: bytes, ranks: dict[bytes, int], limit: int) -> list[bytes]:
    """What merging makes of a token's bytes with the ranks below `limit`: its two parts, the last step before the token itself."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 1:
        pairs = [ranks.get(parts[i] + parts[i + 1], limit) for i in range(len(parts) - 1)]
        lowest = min(pairs)
        if lowest >= limit:
            break
        at = pairs.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
