"""Documents to token files and back: what lies in one entry of the token cache.

tokens.bin    uint16 or uint32, little endian, all documents end to end: `bos` (where there is one), text, `eos`
trained.bin   uint8 per token, only where some tokens are context and no labels
lengths.bin   int64 per document
tokenizer/    the tokenizer, as `load_tokenizer` reads it
meta.json     the number formats and the corpus' facts
"""

import hashlib
import itertools
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from jaxllm.data.chat import ASSISTANT
from jaxllm.data.checks import Log, megabytes, say
from jaxllm.data.corpus import Conversation, Document, Documents, Encoder
from jaxllm.data.store import TokenStore, is_validation, starts_of
from jaxllm.data.tokenizer import Tokenizer, load_tokenizer
from jaxllm.data.vocabulary import utf8
from jaxllm.errors import UserError

BATCH_CHARS = 4_000_000  # text that is tokenised at once, on all cores
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

Pieces = list[tuple[str, bool]]
Ids = list[tuple[list[int], bool]]


def pieces(document: Document) -> Pieces:
    """A document as (text, trained) pieces, empty ones dropped."""
    if isinstance(document, Conversation):
        document = [(m.get("content") or "", m.get("role") == ASSISTANT) for m in document.messages]
    return [p for p in ([(document, True)] if isinstance(document, str) else document) if p[0]]


def training_texts(documents: Documents, val_every: int) -> Iterator[str]:
    """Texts a tokenizer may be trained on: those of the training documents, also where `divide` must cut one."""
    if documents.parts:
        for part in documents.parts.values():
            yield from training_texts(part, val_every)
        return
    cut, kept = _held_tail(documents, val_every)
    for index, document in enumerate(filter(None, map(pieces, documents.read()))):
        text = "".join(text for text, _ in document)
        if index == cut:
            yield text[:kept]
        elif cut is not None or not is_validation(index, val_every):
            yield text


def _held_tail(documents: Documents, val_every: int) -> tuple[int | None, int]:
    """(index of the document whose end is held out, characters before that), or None where whole documents are.

    Tokens are not known yet, so twice the share is left out: text differs in how well it compresses.
    """
    few = itertools.islice(filter(None, map(pieces, documents.read())), val_every)
    sizes = [sum(len(text) for text, _ in document) for document in few]
    if not sizes or len(sizes) >= val_every:
        return None, 0
    longest = max(range(len(sizes)), key=sizes.__getitem__)
    return longest, sizes[longest] - min(2 * sum(sizes) // val_every, sizes[longest] // 2)


def batches(documents: Documents) -> Iterator[list[tuple[Document, Pieces]]]:
    """Non-empty documents and their pieces, by about `BATCH_CHARS` characters."""
    batch: list[tuple[Document, Pieces]] = []
    chars = 0
    for document in documents.read():
        if not (parts := pieces(document)):
            continue
        batch.append((document, parts))
        chars += sum(len(text) for text, _ in parts)
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def parted(documents: Documents) -> Iterator[tuple[str, list[tuple[Document, Pieces]]]]:
    """The batches of each source of a mix, with its name; of any other source, under an empty one."""
    for part, source in (documents.parts or {"": documents}).items():
        for batch in batches(source):
            yield part, batch


def rows(
    tokenizer: Tokenizer, batch: list[tuple[Document, Pieces]], encode: Encoder | None, dtype: np.dtype[Any]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens of each document, and which of them may be labels. A conversation's are its template's, `eos` included."""
    if encode is None:
        ids = iter(tokenizer.encode_batch([text for _, parts in batch for text, _ in parts]))
        for _, parts in batch:
            yield join(tokenizer, [(next(ids), flag) for _, flag in parts], dtype)
        return
    for document, _ in batch:
        assert isinstance(document, Conversation), "an encoder is for conversations"
        row, mask = encode(document)
        yield np.array(row, dtype), np.array(mask, np.uint8)


def join(tokenizer: Tokenizer, parts: Ids, dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
    """A document's tokens, `bos` (where there is one) before and `eos` after, and which of them may be labels."""
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    whole = [(begin, True), *parts, ([tokenizer.eos_id], True)]
    return (
        np.concatenate([np.array(ids, dtype) for ids, _ in whole]),
        np.concatenate([np.full(len(ids), flag, np.uint8) for ids, flag in whole]),
    )


def write_tokens(documents: Documents, tokenizer: Tokenizer, place: Path, log: Log) -> None:
    """Writes an entry's files into `place`, flushed to disk. Raises UserError when there is no text."""
    name = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    lengths: list[int] = []
    counts: dict[str, int] = {}
    size, begun, digest = 0, time.monotonic(), hashlib.sha256()
    told = begun
    with ExitStack() as stack:
        tokens = stack.enter_context(flushed(place / "tokens.bin"))
        trained = stack.enter_context(flushed(place / "trained.bin")) if documents.masked else None
        for part, batch in parted(documents):
            source = documents.parts.get(part, documents)
            encode = None if source.encoder is None else source.encoder(tokenizer)
            counts[part] = counts.get(part, 0) + len(batch)
            for (_, texts), (row, mask) in zip(batch, rows(tokenizer, batch, encode, DTYPES[name]), strict=True):
                tokens.write(row.tobytes())
                if trained is not None:
                    trained.write(mask.tobytes())
                lengths.append(len(row))
                raw = utf8("".join(text for text, _ in texts))
                size += len(raw)
                digest.update(raw + b"\0")
            if time.monotonic() - told > 2:
                told = time.monotonic()
                of = f" of about {megabytes(documents.size)}" if documents.size else ""
                say(log, f"data: tokenised {megabytes(size)}{of}")
    if not lengths:
        raise UserError(f"data: the source holds no text ({json.dumps(documents.facts)})")
    with flushed(place / "lengths.bin") as out:
        out.write(np.array(lengths, "<i8").tobytes())
    tokenizer.save(place / "tokenizer")
    facts = documents.facts | {
        "documents": len(lengths),
        "bytes": size,
        "sha256": digest.hexdigest(),
        "tokens": sum(lengths),
        "vocab_size": tokenizer.vocab_size,
    }
    if documents.parts:
        if empty := [part for part in documents.parts if not counts.get(part)]:
            raise UserError(f"data.sources.{empty[0]}: holds no text ({json.dumps(documents.parts[empty[0]].facts)})")
        facts["parts"] = counts
    with flushed(place / "meta.json") as out:
        out.write(json.dumps({"dtype": name, "masked": documents.masked, "facts": facts}, indent=1).encode())
    say(
        log,
        f"data: {len(lengths):,} documents, {megabytes(size)}, {sum(lengths):,} tokens "
        f"({size / sum(lengths):.2f} bytes a token) in {time.monotonic() - begun:.1f} s",
    )


def read_tokens(entry: Path) -> tuple[Tokenizer, TokenStore, dict[str, Any]]:
    """(tokenizer, all documents, facts) of an entry. Raises OSError, ValueError, KeyError or TypeError if damaged."""
    meta = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
    facts, count = dict(meta["facts"]), int(meta["facts"]["tokens"])
    lengths = np.array(mapped(entry / "lengths.bin", np.dtype("<i8"), int(facts["documents"])))
    if (lengths <= 0).any() or lengths.sum() != count:
        raise ValueError("lengths.bin does not add up")
    tokens = mapped(entry / "tokens.bin", DTYPES[meta["dtype"]], count)
    trained = mapped(entry / "trained.bin", np.dtype("u1"), count) if meta["masked"] else None
    return load_tokenizer(entry / "tokenizer"), TokenStore(tokens, starts_of(lengths), lengths, trained), facts


def mapped(path: Path, dtype: np.dtype[Any], count: int) -> np.ndarray:
    """A read-only memory map, after checking that the file is as long as it should be."""
    if path.stat().st_size != count * dtype.itemsize or count == 0:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes, not {count * dtype.itemsize}")
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,))


@contextmanager
def flushed(path: Path) -> Iterator[IO[bytes]]:
    """A file that is on the disk, not only in memory, when the block ends: a rename must not outrun its bytes."""
    with open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
