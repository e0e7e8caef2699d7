"""Text out of files: which files a path means, and their documents, whatever they are packed in.

A path is a file, a folder or a glob (`**` allowed); relative ones start at the folder where the command was typed.
Plain files are read as they are; `.gz` and `.zst` are unpacked on the way, in constant memory, and refused when they
swell beyond any honest text. Every fault of a file is one `UserError` line that names the file.
"""

import glob
import gzip
import io
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from jaxllm.data.checks import Log, say
from jaxllm.errors import UserError

T = TypeVar("T")
JSONL = frozenset({".jsonl", ".ndjson"})
PACKED = frozenset({".gz", ".zst"})
# What is taken from a folder; a glob or the file's own name takes anything.
TEXT = frozenset(
    {
        ".txt",
        ".text",
        ".md",
        ".markdown",
        ".rst",
        ".tex",
        ".org",
        ".html",
        ".xml",
        ".srt",
        ".po",
        ".css",
        ".sql",
        ".py",
        ".pyi",
        ".js",
        ".mjs",
        ".ts",
        ".tsx",
        ".c",
        ".h",
        ".cc",
        ".cpp",
        ".hpp",
        ".cu",
        ".java",
        ".kt",
        ".scala",
        ".go",
        ".rs",
        ".rb",
        ".php",
        ".pl",
        ".lua",
        ".jl",
        ".r",
        ".m",
        ".swift",
        ".hs",
        ".ml",
        ".el",
        ".sh",
        ".f90",
    }
)

FREE_EXPANSION = 64 * 2**20  # bytes: below this no packed file is suspect


@dataclass(frozen=True)
class TextFile:
    """One file of a corpus, with what tells whether it changed."""

    path: Path
    size: int
    mtime_ns: int

    @property
    def suffixes(self) -> tuple[str, str]:
        """(kind, packing): `a.jsonl.gz` -> (".jsonl", ".gz"), `a.txt` -> (".txt", "")."""
        packing = self.path.suffix.lower()
        if packing in PACKED:
            return self.path.with_suffix("").suffix.lower(), packing
        return packing, ""


@dataclass(frozen=True)
class Reading:
    """How the files of a corpus are read; the fields are explained at `jaxllm.data.text.Text`."""

    text_key: str = "text"
    encoding: str = "utf-8"
    max_document_chars: int = 2**20
    max_expansion: int = 200


def find_files(paths: str | Sequence[str], base: Path, log: Log = None) -> list[TextFile]:
    """The files that `paths` mean, each once, sorted within each path. Raises UserError for a path without any."""
    found: dict[Path, TextFile] = {}
    for asked in [paths] if isinstance(paths, str) else paths:
        full = os.path.join(base, os.path.expanduser(asked))
        if os.path.isdir(full):
            members = folder_files(Path(full), asked, log)
        elif os.path.exists(full):
            members = [Path(full)]
        else:
            members = [Path(p) for p in sorted(glob.glob(full, recursive=True)) if os.path.isfile(p)]
            if not members:
                kind = "matches no file" if glob.has_magic(asked) else "no such file or folder"
                raise UserError(f"data.path={asked}: {kind} (looked for {full})")
        for member in members:
            path = Path(os.path.abspath(member))
            if path not in found:
                found[path] = describe(path)
    return list(found.values())


def describe(path: Path) -> TextFile:
    try:
        facts = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    return TextFile(path, facts.st_size, facts.st_mtime_ns)


def folder_files(folder: Path, asked: str, log: Log) -> list[Path]:
    """Text files below a folder, in sorted order, hidden ones left out. What is left out is said, not hidden."""
    taken: list[Path] = []
    others: Counter[str] = Counter()

    def unreadable(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror})")

    for place, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for name in sorted(n for n in names if not n.startswith(".")):
            file = TextFile(Path(place, name), 0, 0)
            if file.suffixes[0] in TEXT | JSONL:
                taken.append(file.path)
            else:
                others["".join(file.suffixes) or "no suffix"] += 1
    left = ", ".join(f"{n} x {s}" for s, n in others.most_common(5))
    if not taken:
        raise UserError(
            f"data.path={asked}: the folder holds no text files"
            + (f" (only {left}); name them by a glob such as '{asked}/*'" if left else "")
        )
    if others:
        say(log, f"data: left out of {asked}: {left} (name them by a glob to include them)")
    return taken


def read_documents(file: TextFile, how: Reading) -> Iterator[str]:
    """The documents of one file: `text_key` of each jsonl line, or the whole text, cut at line ends if too long."""
    yield from reading(file, how, json_lines if file.suffixes[0] in JSONL else cut)


def read_records(file: TextFile, how: Reading) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, object) of each line of a jsonl file."""
    yield from reading(file, how, json_records)


def reading(
    file: TextFile, how: Reading, parse: Callable[[io.TextIOWrapper, TextFile, Reading], Iterator[T]]
) -> Iterator[T]:
    """What `parse` makes of a file, unpacked, decoded and bounded on the way; every fault is a line that names the file."""
    with ExitStack() as stack:
        try:
            raw = Bounded(stack.enter_context(unpacked(file)), file, how.max_expansion)
            text = io.TextIOWrapper(io.BufferedReader(raw, 2**18), encoding=how.encoding, newline="\n")
            stack.callback(text.detach)  # closing belongs to the opener, whatever state the decoder is in
            yield from parse(text, file, how)
        except UnicodeDecodeError as error:
            at = raw.count - len(error.object) + error.start
            raise UserError(
                f"{file.path}: not {how.encoding} text (byte 0x{error.object[error.start]:02x} near offset "
                f"{max(at, 0)}): convert it, leave it out by a glob, or set data.encoding"
            ) from None
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"{file.path}: damaged or not a gzip file ({error})") from None
        except OSError as error:
            raise UserError(f"{file.path}: cannot be read ({error.strerror or error})") from None


def cut(text: io.TextIOWrapper, file: TextFile, how: Reading) -> Iterator[str]:
    """A plain text as one document, or as several that end at line ends when it is longer than allowed."""
    while piece := text.read(how.max_document_chars):
        if len(piece) == how.max_document_chars and not piece.endswith("\n"):
            piece += text.readline(how.max_document_chars)
        yield piece


def json_lines(text: io.TextIOWrapper, file: TextFile, how: Reading) -> Iterator[str]:
    """The text of each line's object."""
    for where, record in json_records(text, file, how):
        value = record.get(how.text_key)
        if not isinstance(value, str):
            raise UserError(
                f"{where}: no text under data.text_key={how.text_key!r} (keys of this line: {keys(record)})"
            )
        yield unicode(value, where)


def unicode(text: str, where: str) -> str:
    """`text`, if it can be written as UTF-8: JSON can smuggle in lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{where}: the text holds a lone surrogate, which is not valid Unicode") from None
    return text


def keys(record: dict[str, Any]) -> str:
    return ", ".join(sorted(map(str, record))[:8])


def json_records(text: io.TextIOWrapper, file: TextFile, how: Reading) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line's object and where it stands. Blank lines are passed over; anything else names file and line."""
    limit = 64 * how.max_document_chars  # of one line: a document with its escapes and its other fields
    number = 0
    while line := text.readline(limit):
        number += 1
        where = f"{file.path}:{number}"
        if len(line) == limit and not line.endswith("\n"):
            raise UserError(f"{where}: the line is longer than {limit} characters; is this jsonl?")
        if not line.strip():
            continue
        try:
            record: Any = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(f"{where}: not valid JSON") from None
        if not isinstance(record, dict):
            raise UserError(f"{where}: is no JSON object, so it has no keys such as data.text_key={how.text_key!r}")
        yield where, record


def unpacked(file: TextFile) -> IO[bytes]:
    """The file's bytes as a stream, unpacked by its suffix."""
    packing = file.suffixes[1]
    if packing == ".gz":
        return cast(IO[bytes], gzip.open(file.path, "rb"))
    if packing == ".zst":
        return zstd(file.path)
    return open(file.path, "rb")


def zstd(path: Path) -> IO[bytes]:
    """A .zst stream. The library's own errors become OSError, so that one place words them."""
    try:
        import zstandard
    except ImportError:
        raise UserError(f"{path}: reading .zst needs the package zstandard: pip install zstandard") from None

    class Stream(io.RawIOBase):
        """One or more frames. Input goes in by small pieces, since 4 kB can unpack to 128 MB; a cut end is an error,
        which the library's own reader passes over in silence."""

        def __init__(self) -> None:
            self.file, self.out = open(path, "rb"), memoryview(b"")
            self.frame, self.rest, self.open = zstandard.ZstdDecompressor().decompressobj(), b"", True

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            while not self.out:
                data = self.rest or self.file.read(4096)
                if not data:
                    if self.open:
                        raise OSError("damaged or not a zstd file: it ends within a frame")
                    return 0
                if not self.open:
                    self.frame = zstandard.ZstdDecompressor().decompressobj()
                try:
                    self.out = memoryview(self.frame.decompress(data))
                except zstandard.ZstdError as error:
                    raise OSError(f"damaged or not a zstd file: {error}") from None
                self.open, self.rest = not self.frame.eof, self.frame.unused_data
            size = min(len(buffer), len(self.out))
            buffer[:size], self.out = self.out[:size], self.out[size:]
            return size

        def close(self) -> None:
            self.file.close()
            super().close()

    return cast(IO[bytes], Stream())


class Bounded(io.RawIOBase):
    """Counts what comes out of a file and stops a packed one that swells like a decompression bomb."""

    def __init__(self, inner: IO[bytes], file: TextFile, max_expansion: int):
        self.inner, self.file, self.ratio, self.count = inner, file, max_expansion, 0
        self.limit = max(FREE_EXPANSION, max_expansion * file.size) if file.suffixes[1] else None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.inner.read(len(buffer))
        got = len(data)
        buffer[:got] = data
        self.count += got
        if self.limit is not None and self.count > self.limit:
            raise UserError(
                f"{self.file.path}: unpacks to more than {self.ratio} times its size and looks like a "
                "decompression bomb; raise data.max_expansion if it is honest"
            )
        return got
