"""The byte string that each token of a `tokenizers` vocabulary stands for.

Three ways of writing bytes in a vocabulary are known, told apart by the file's decoder: the byte-level alphabet
(GPT-2 and its heirs: each byte is one printable character), SentencePiece (`\u2581` is a space, `<0x0A>` a byte) and
word pieces (`##` continues a word, otherwise a space comes first). The first two give text back exactly; word pieces
usually lower-case and lose spacing, so their text is readable, not equal.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from tokenizers import Tokenizer as Library

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "\u2581"


def byte_pieces(library: Library) -> tuple[list[bytes], bool]:
    """`pieces[id]` for every id (empty for special tokens and unused ids), and whether decoding drops a first space."""
    spec = json.loads(library.to_str())
    added = {t["id"]: t for t in spec.get("added_tokens") or ()}
    vocab = library.get_vocab(with_added_tokens=True)
    kinds = list(decoders(spec.get("decoder")))
    names = {k["type"] for k in kinds}
    write: Callable[[str], bytes]
    if "ByteLevel" in names:
        write, strip = byte_level, False
    elif names & {"Metaspace", "ByteFallback"}:
        write, strip = sentencepiece, drops_space(kinds)
    elif "WordPiece" in names:
        prefix = next(k for k in kinds if k["type"] == "WordPiece").get("prefix", "##")
        write, strip = word_piece(prefix), True
    elif (spec.get("model") or {}).get("type") == "BPE":
        write, strip = plain, False
    else:
        write, strip = word_piece(None), True
    pieces = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, index in vocab.items():
        if index in added:
            pieces[index] = b"" if added[index].get("special") else token.encode()
        else:
            pieces[index] = write(token)
    return pieces, strip


def decoders(node: Any) -> Iterator[dict[str, Any]]:
    """The decoder's parts, sequences flattened."""
    if isinstance(node, dict):
        if node.get("type") == "Sequence":
            for part in node.get("decoders", ()):
                yield from decoders(part)
        else:
            yield node


def drops_space(kinds: list[dict[str, Any]]) -> bool:
    """SentencePiece files say in one of two ways that the first space was put there by the encoder."""
    for kind in kinds:
        if kind["type"] == "Metaspace" and kind.get("prepend_scheme", "always") != "never":
            return True
        if kind["type"] == "Strip" and kind.get("content") == " " and kind.get("start", 0) >= 1:
            return True
    return False


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's alphabet: printable bytes are themselves, the others follow from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in printable}
    for offset, byte in enumerate(b for b in range(256) if b not in set(printable)):
        table[chr(256 + offset)] = byte
    return table


ALPHABET = byte_alphabet()


def byte_level(token: str) -> bytes:
    try:
        return bytes(ALPHABET[c] for c in token)
    except KeyError:  # a token added as plain text
        return token.encode()


def sentencepiece(token: str) -> bytes:
    byte = BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE, " ").encode()


def plain(token: str) -> bytes:
    return token.encode()


def word_piece(prefix: str | None) -> Callable[[str], bytes]:
    """Writer for whole words: a space before each, unless the token continues one."""

    def write(token: str) -> bytes:
        if prefix and token.startswith(prefix):
            return token[len(prefix) :].encode()
        return b" " + token.encode()

    return write
