"""The token cache: a corpus is tokenised once into a folder named by the fingerprint of all that decides its tokens.

An entry is built under another name and renamed when whole and flushed, so an interrupted build never counts and two
processes that build the same entry cannot harm each other: the first to finish wins, the other uses it. What cannot be
read is built again; where nothing can be written, the tokens live in a temporary folder for one run.
"""

import dataclasses
import errno
import hashlib
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.data.checks import Log, say
from jaxllm.data.corpus import Corpus, Documents, Part, Source
from jaxllm.data.store import TokenStore, divide
from jaxllm.data.tokenise import read_tokens, training_texts, write_tokens
from jaxllm.errors import UserError

FORMAT = 1  # raise when the files or the meaning of a token stream change
STALE_SECONDS = 24 * 3600


class Damaged(Exception):
    """An entry is there but cannot be used."""


def prepare(source: Source, base: Path, log: Log) -> Corpus:
    """The corpus of `source`, from the cache where it is there. See `Source.prepare`."""
    documents = source.open(base, log)
    name = type(source).__name__.lower() + "-" + fingerprint(source, documents, base)
    root = cache_root(source.cache_dir, base)
    try:
        corpus = open_entry(root / name, source.val_every)
        say(log, f"data: {corpus.facts['tokens']:,} tokens of {corpus.facts['documents']:,} documents from the cache")
        return corpus
    except FileNotFoundError:
        pass
    except Damaged as error:
        say(log, f"data: the token cache {root / name} is unreadable ({error}); building it again")
    try:
        return build(source, documents, base, root, name, log)
    except OSError as error:  # sources word their own read errors, so this one is about writing
        if source.cache_dir is not None:
            raise UserError(
                f"data.cache_dir={source.cache_dir}: {explain(error, root)}; name a folder with free "
                "space that you may write to"
            ) from None
        say(
            log,
            f"data: {explain(error, root)}; keeping the tokens in a temporary folder for this run only "
            "(data.cache_dir=FOLDER names a lasting one)",
        )
    return build_temporary(source, documents, base, name, log)


def build_temporary(source: Source, documents: Documents, base: Path, name: str, log: Log) -> Corpus:
    """A cache that lives as long as the corpus: a fresh private folder, since a shared one could hold anything."""
    try:
        keep = tempfile.TemporaryDirectory(prefix="jaxllm-")
        corpus = build(source, documents, base, Path(keep.name), name, log)
    except OSError as error:
        raise UserError(
            f"data: {explain(error, Path(tempfile.gettempdir()))}; "
            "set data.cache_dir=FOLDER to a folder with free space that you may write to"
        ) from None
    return dataclasses.replace(corpus, keep=keep)


def explain(error: OSError, root: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full while writing tokens to {root}"
    return f"cannot write tokens to {root} ({error.strerror or error})"


def cache_root(cache_dir: str | None, base: Path) -> Path:
    """The folder of all entries: as asked, else the user's cache folder."""
    if cache_dir is not None:
        return base / Path(cache_dir).expanduser()
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path(os.path.expanduser("~"), ".cache")) / "jaxllm" / "data"


def fingerprint(source: Source, documents: Documents, base: Path) -> str:
    """Hash of all that decides the tokens: the text's identity, the tokenizer and the split it is trained on."""
    decides = {
        "format": FORMAT,
        "documents": documents.identity,
        "tokenizer": source.tokenizer.identity(base),
        "val_every": source.val_every,
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:20]


def open_entry(entry: Path, val_every: int) -> Corpus:
    """A whole entry. Raises FileNotFoundError where there is none and Damaged where it cannot be used."""
    if not entry.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(entry))
    try:
        tokenizer, store, facts = read_tokens(entry)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(str(error) or type(error).__name__) from error
    parts = {name: Part(*divide(part, val_every)) for name, part in parts_of(store, facts).items()}
    train, val = joined(list(parts.values())) if parts else divide(store, val_every)
    facts |= {
        "fingerprint": entry.name,
        "train_documents": len(train),
        "train_tokens": train.size,
        "val_documents": len(val),
        "val_tokens": val.size,
    }
    return Corpus(tokenizer, train, val, facts, entry, parts=parts)


def parts_of(store: TokenStore, facts: Mapping[str, Any]) -> dict[str, TokenStore]:
    """The documents of each source of a mix, which lie one after another; of any other corpus, nothing."""
    ends = np.cumsum([0, *facts.get("parts", {}).values()])
    return {
        name: store.select(np.arange(first, last))
        for name, first, last in zip(facts.get("parts", {}), ends, ends[1:], strict=False)
    }


def joined(parts: list[Part]) -> Part:
    """The documents of all sources."""

    def join(stores: list[TokenStore]) -> TokenStore:
        starts, lengths = (np.concatenate([getattr(s, name) for s in stores]) for name in ("starts", "lengths"))
        return TokenStore(stores[0].tokens, starts, lengths, stores[0].trained)

    return Part(join([p.train for p in parts]), join([p.val for p in parts]))


def build(source: Source, documents: Documents, base: Path, root: Path, name: str, log: Log) -> Corpus:
    """Tokenises everything into `root/name`. Raises OSError where that cannot be written."""
    root.mkdir(parents=True, exist_ok=True)
    drop_stale(root, name)
    with workplace(root, name) as place:
        tokenizer = source.tokenizer.fit(training_texts(documents, source.val_every), base, log)
        tokenizer = source.outfit(tokenizer, base)
        write_tokens(documents, tokenizer, place, log)
        publish(place, root / name)
    return open_entry(root / name, source.val_every)


@contextmanager
def workplace(root: Path, name: str) -> Iterator[Path]:
    """A folder of one's own beside the entries; whatever is left in it is removed."""
    place = root / f".{name}.{secrets.token_hex(6)}"
    place.mkdir()
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def publish(place: Path, entry: Path) -> None:
    """Gives a finished folder its name. An entry already there is either damaged or of a process that was faster."""
    for _ in range(3):
        try:
            place.rename(entry)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        try:
            open_entry(entry, 0)
            return
        except Damaged:
            with workplace(entry.parent, entry.name) as grave:
                entry.rename(grave / "damaged")
        except FileNotFoundError:  # another process has just buried it
            continue
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(entry))


def drop_stale(root: Path, name: str) -> None:
    """Removes what killed builds of this entry left, once no living one can be using it."""
    for left in root.glob(f".{name}.*"):
        try:
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
        except OSError:
            continue
