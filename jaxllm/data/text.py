"""Text from files: the running Python's standard library by default, or any text and jsonl files."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxllm.data import checks, stdlib
from jaxllm.data.checks import Log
from jaxllm.data.corpus import Documents, Source
from jaxllm.data.files import Reading, find_files, read_documents
from jaxllm.errors import UserError


@dataclass
class Text(Source):
    """Plain text and jsonl, packed or not.

    path: null = the source of the running Python's standard library (see `stdlib.py`); else a file, a folder, a glob
        such as `books/**/*.txt`, or a list of them; relative to where the command was typed. A text file is one
        document; a line of a `.jsonl`/`.ndjson` file is one. `.gz` and `.zst` are unpacked on the way.
    text_key: where the text is in a jsonl line.
    encoding: of the files; a file in another one is refused, never guessed.
    max_document_chars: longer text files become several documents, cut at line ends, so that one huge file neither
        fills the memory nor escapes shuffling and the split.
    max_expansion: packed files that unpack to more than this many times their size (and 64 MiB) are refused.
    """

    path: str | Sequence[str] | None = None
    text_key: str = "text"
    encoding: str = "utf-8"
    max_document_chars: int = 2**20
    max_expansion: int = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path is not None and not isinstance(self.path, str):
            try:
                self.path = [str(p) for p in self.path]
            except TypeError:
                raise UserError(f"data.path={self.path!r}: must be a path, a list of paths or null") from None
        if self.path is not None and not self.path or isinstance(self.path, list) and not all(self.path):
            raise UserError(f"data.path={self.path!r}: must be a path, a list of paths or null")
        checks.word("data.text_key", self.text_key)
        checks.word("data.encoding", self.encoding)
        try:
            "".encode(self.encoding)
        except LookupError:
            raise UserError(
                f"data.encoding={self.encoding!r}: Python knows no such text encoding; try utf-8 or latin-1"
            ) from None
        checks.whole("data.max_document_chars", self.max_document_chars, least=1)
        checks.whole("data.max_expansion", self.max_expansion, least=1)

    def open(self, base: Path, log: Log) -> Documents:
        return library(log) if self.path is None else self._files(self.path, base, log)

    def _files(self, path: str | Sequence[str], base: Path, log: Log) -> Documents:
        files = find_files(path, base, log)
        how = Reading(self.text_key, self.encoding, self.max_document_chars, self.max_expansion)

        def read() -> Iterator[str]:
            for file in files:
                yield from read_documents(file, how)

        identity = {"files": [[f.path.as_posix(), f.size, f.mtime_ns] for f in files], "how": asdict(how)}
        facts = {"source": "files", "path": path, "files": len(files)}
        return Documents(identity, facts, read, size=sum(f.size for f in files))


def library(log: Log) -> Documents:
    """The standard library's source as documents."""
    files, facts, extra = stdlib.library_files(log)
    states: list[list[str | int]] = []
    for name, path in files:
        try:
            now = path.stat()
        except OSError:  # a dangling link: it has no text either
            continue
        states.append([name, now.st_size, now.st_mtime_ns])
    identity = {"library": states, "extra": extra, **facts}
    return Documents(
        identity,
        facts | {"files": len(states)},
        lambda: stdlib.texts(files, extra),
        size=sum(int(s[1]) for s in states),
    )
