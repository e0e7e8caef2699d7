"""The default corpus: the source of the running Python's standard library. No download, about 11 MB of real code.

Rule: walk the standard library's folder in sorted order, take every UTF-8 `*.py`, leave out tests and what pip put
there. The text depends on the interpreter, so its version, byte count and sha256 are recorded with every run. A
stripped or zipped library (some minimal distributions) falls back to the help topics of `pydoc` and the source of
the installed packages.
"""

import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxllm.data.checks import Log, say
from jaxllm.errors import UserError

SKIP = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"})
LEAST_BYTES = 2_000_000  # fewer than this and the library has been stripped
FALLBACK_BYTES = 16_000_000  # of installed packages' source: as much as the real thing, not gigabytes


def python_files(root: Path) -> list[Path]:
    """Every `*.py` below `root` by the rule above, in sorted walk order."""
    files: list[Path] = []
    for place, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in SKIP)
        files += [Path(place, n) for n in sorted(names) if n.endswith(".py")]
    return files


def read_source(path: Path) -> str | None:
    """The file's text, or None where it is unreadable or not UTF-8 (a few files test other encodings)."""
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def topics() -> dict[str, str]:
    """pydoc's help topics: English reference prose that ships with the interpreter."""
    try:
        from pydoc_data.topics import topics as found
    except ImportError:
        return {}
    return {str(name): text for name, text in sorted(found.items())}


def library_files(log: Log = None) -> tuple[list[tuple[str, Path]], dict[str, Any], dict[str, str]]:
    """`[(relative name, path)]`, facts, and extra texts by name (only where the library itself is too small)."""
    facts: dict[str, Any] = {
        "source": "python-stdlib",
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
    }
    root = Path(sysconfig.get_path("stdlib"))
    files = [(f.relative_to(root).as_posix(), f) for f in python_files(root)]
    if total(files) >= LEAST_BYTES:
        return files, facts, {}
    site = Path(sysconfig.get_path("purelib"))
    packages = [(f"site/{f.relative_to(site).as_posix()}", f) for f in python_files(site)]
    files += within(packages, FALLBACK_BYTES)
    extra = topics()
    if not files and not extra:
        raise UserError("data.path=null: this Python has no source text to train on; name a text by data.path=FILE")
    say(
        log,
        f"data: the standard library's source is missing or stripped in {root}; using pydoc's topics and the "
        "installed packages' source instead (data.path=FILE trains on a text of yours)",
    )
    return files, facts | {"source": "pydoc+packages"}, extra


def total(files: list[tuple[str, Path]]) -> int:
    return sum(os.path.getsize(path) for _, path in files if path.is_file())


def within(files: list[tuple[str, Path]], budget: int) -> list[tuple[str, Path]]:
    """The first files that fit into `budget` bytes."""
    taken = []
    for name, path in files:
        budget -= path.stat().st_size if path.is_file() else 0
        if budget < 0:
            break
        taken.append((name, path))
    return taken


def texts(files: list[tuple[str, Path]], extra: dict[str, str]) -> Iterator[str]:
    """The documents: help topics first, then each file."""
    yield from extra.values()
    for _, path in files:
        text = read_source(path)
        if text is not None:
            yield text
