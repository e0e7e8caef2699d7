"""Text and code for the routing study, from the running Python alone: nothing is downloaded.

    python experiments/moe_routing/corpus.py FOLDER

Writes FOLDER/mixed with one file a document: the standard library's modules, and as prose what people wrote inside them, their
docstrings, together with the help topics of pydoc. And FOLDER/heldout/{code,prose}.txt, of documents that are not in FOLDER/mixed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

EVERY = 20  # each so many-th document is held out
LEAST = 600  # characters of docstrings that make a document


def docstrings(source: str) -> str:
    """All docstrings of a module, in order, separated by empty lines; "" where it cannot be read."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    return "\n\n".join(text for text in found if text)


def documents() -> Iterator[tuple[str, str, str]]:
    """(kind, name, text): `code` of each module, `prose` of its docstrings, and the help topics."""
    from jaxllm.data import stdlib

    files, _, extra = stdlib.library_files()
    for name, path in files:
        source = stdlib.read_source(path)
        if source is None or not source.strip():
            continue
        flat = name.replace("/", "_").removesuffix(".py")
        yield "code", flat, source
        if len(text := docstrings(source)) >= LEAST:
            yield "prose", flat, text
    for name, text in (extra or stdlib.topics()).items():
        if text.strip():
            yield "prose", f"topic_{name}", text


def write(folder: Path) -> dict[str, int]:
    """Writes the corpus; characters of each part."""
    mixed, heldout = folder / "mixed", folder / "heldout"
    for place in (mixed, heldout):
        place.mkdir(parents=True, exist_ok=True)
    kept: dict[str, list[str]] = {"code": [], "prose": []}
    seen, sizes = {"code": 0, "prose": 0}, {"code": 0, "prose": 0}
    for kind, name, text in documents():
        seen[kind] += 1
        if seen[kind] % EVERY == 0:
            kept[kind].append(text)
            continue
        (mixed / f"{kind}_{name}.txt").write_text(text, encoding="utf-8")
        sizes[kind] += len(text)
    for kind, texts in kept.items():
        (heldout / f"{kind}.txt").write_text("\n\n".join(texts), encoding="utf-8")
    return sizes


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("error: give the folder to write to: corpus.py FOLDER")
    print(write(Path(sys.argv[1])))
