"""Text from a Hugging Face data set, through the optional package `datasets`."""

import glob
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.data import checks
from jaxllm.data.checks import Log, say
from jaxllm.data.corpus import Documents, Source
from jaxllm.errors import UserError


@dataclass
class HF(Source):
    """One split of a data set; each row's `text_key` is one document. Data sets that need their own code are refused.

    name: as on the hub (`roneneldan/TinyStories`), a local folder, or a format (`json`, `parquet`) with `data_files`.
    subset: the data set's configuration. revision: a commit or tag; name one for a run that others should repeat.
    max_documents: only the first so many rows; null takes all.
    """

    name: str = ""
    subset: str | None = None
    split: str = "train"
    text_key: str = "text"
    revision: str | None = None
    data_files: str | None = None
    max_documents: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name or not isinstance(self.name, str):
            raise UserError(
                f"data.name={self.name!r}: name a Hugging Face data set, e.g. data.name=roneneldan/TinyStories"
            )
        for key in ("subset", "revision", "data_files"):
            checks.word(f"data.{key}", getattr(self, key), optional=True)
        checks.word("data.split", self.split)
        checks.word("data.text_key", self.text_key)
        checks.whole("data.max_documents", self.max_documents, least=1, optional=True)

    def open(self, base: Path, log: Log) -> Documents:
        try:
            library: Any = importlib.import_module("datasets")
        except ImportError:
            raise UserError(
                "data=hf needs the package datasets: pip install 'jaxllm[hf]' (or datasets alone)"
            ) from None
        say(log, f"data: opening {self.name} with datasets {library.__version__} (it may download)")
        rows = self._load(library, base)
        columns = list(rows.column_names)
        if self.text_key not in columns:
            raise UserError(f"data.text_key={self.text_key!r}: {self.name} has the columns {', '.join(columns)}")
        count = len(rows) if self.max_documents is None else min(len(rows), self.max_documents)
        info = rows.info
        identity = {
            "name": self.name,
            "subset": self.subset,
            "split": self.split,
            "text_key": self.text_key,
            "revision": self.revision,
            "data_files": self.data_files,
            "documents": count,
            "rows": len(rows),
            "version": str(info.version),
            "checksums": str(info.download_checksums),
            "size": info.dataset_size,
            "files": [str(f["filename"]) for f in rows.cache_files],
        }  # their names hash the files they are of
        facts = {
            "source": "datasets",
            "name": self.name,
            "subset": self.subset,
            "split": self.split,
            "revision": self.revision,
            "rows": count,
            "datasets": library.__version__,
        }
        return Documents(identity, facts, lambda: self._read(rows, count))

    def _load(self, library: Any, base: Path) -> Any:
        """The rows. Whatever the library or the network raises becomes one line."""
        files = self.data_files  # local where there is such a file, else inside the data set's own repository
        if files and glob.glob(str(base / Path(files).expanduser())):
            files = str(base / Path(files).expanduser())
        name = str(base / self.name) if (base / self.name).is_dir() else self.name
        try:
            return library.load_dataset(name, self.subset, split=self.split, revision=self.revision, data_files=files)
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise UserError(f"data.name={self.name}: datasets cannot load it ({reason})") from None

    def _read(self, rows: Any, count: int) -> Iterator[str]:
        column = rows.select_columns([self.text_key])
        for index in range(0, count, 1000):
            for offset, text in enumerate(column[index : min(index + 1000, count)][self.text_key]):
                if not isinstance(text, str):
                    raise UserError(
                        f"data.text_key={self.text_key!r}: row {index + offset} of {self.name} holds "
                        f"{type(text).__name__}, not text"
                    )
                yield text
