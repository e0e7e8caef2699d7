"""A Hugging Face folder: config.json, safetensors (one file, or shards behind an index), tokenizer files.

It may come from anybody, so it is data and never code: pickles are not opened, the index may only name plain files of the same
folder, a link may not lead out of it (but for the hub's own cache, whose snapshots link to the blobs beside them), and the headers
are checked by the safetensors library before any of their numbers is believed.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxllm.errors import UserError
from jaxllm.weights.tensors import DTYPES, TOKENIZER_FILES

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
QUANTISED = ("mxfp4",)
OLD_TOKENIZERS = (
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)  # SentencePiece, and files before tokenizer.json
MAX_CONFIG_BYTES = 16 * 2**20
MAX_INDEX_BYTES = 128 * 2**20
MAX_TOKENIZER_BYTES = 512 * 2**20


def is_hf_folder(path: Path) -> bool:
    """Whether a folder looks like one: it has a config.json, which no run folder has."""
    return path.is_dir() and (path / CONFIG).is_file()


class HFFolder:
    """See `TensorSource`. Opening reads config.json, the index and the headers of all shards; raises UserError in one line.

    quantised: how config.json says that weights are packed, one of `QUANTISED`; None = they are not. Tensors are given as they lie.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.where = str(self.path)
        if not self.path.is_dir():
            raise UserError(f"{self.path}: no such folder")
        self.config = self._json(CONFIG, MAX_CONFIG_BYTES)
        self.quantised = self._quantised()
        self._files: dict[str, Path] = {}  # tensor -> its file
        self._facts: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        for file in self._shards():
            self._open(file)

    # ---- TensorSource ---------------------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._facts[name][0]

    def dtype(self, name: str) -> np.dtype[Any]:
        return self._facts[name][1]

    def read(self, name: str) -> np.ndarray:
        # Opened anew each time: the library maps the file, and pages of a mapping that stays count as this process's memory.
        file = self._files[name]
        try:
            with safe_open(file, framework="numpy") as tensors:
                return np.asarray(tensors.get_tensor(name))
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file}: tensor {name} cannot be read ({error})") from None

    def tokenizer_files(self) -> dict[str, bytes]:
        old = next((name for name in OLD_TOKENIZERS if (self.path / name).is_file()), None)
        if old is not None and not (self.path / TOKENIZER_FILES[0]).is_file():
            raise UserError(
                f"holds its tokenizer as {old} and not as {TOKENIZER_FILES[0]}; transformers writes it anew:"
                " AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        return {
            name: self._bytes(name, MAX_TOKENIZER_BYTES) for name in TOKENIZER_FILES if (self.path / name).is_file()
        }

    def _quantised(self) -> str | None:
        """How the weights are stored, if not as numbers. Raises UserError for what cannot be read."""
        settings = self.config.get("quantization_config")
        if not settings:
            return None
        method = str(settings.get("quant_method", "unknown") if isinstance(settings, dict) else settings)
        if method not in QUANTISED:
            raise UserError(
                f"{self.path / CONFIG}: the weights are quantised ({method}), which is not read (known: {', '.join(QUANTISED)});"
                " use the full ones"
            )
        return method

    # ---- the files ------------------------------------------------------------------------------------------------------------------

    def _shards(self) -> list[Path]:
        if (self.path / INDEX).is_file():
            table = self._json(INDEX, MAX_INDEX_BYTES).get("weight_map")
            if not isinstance(table, dict) or not table or not all(isinstance(f, str) for f in table.values()):
                raise UserError(f"{self.path / INDEX}: has no weight_map from tensors to files")
            self._listed = table
            return [self._inside(name, f"{INDEX} names") for name in sorted(set(table.values()))]
        self._listed = {}
        if (self.path / SINGLE).is_file() or (self.path / SINGLE).is_symlink():
            return [self._inside(SINGLE, "the folder holds")]
        pickled = sorted(p.name for p in self.path.iterdir() if p.suffix in PICKLES)
        if pickled:
            raise UserError(
                f"{self.path}: holds its weights as {pickled[0]} only; pickled files can run code and are not opened: save them as"
                " safetensors (save_pretrained does)"
            )
        raise UserError(f"{self.path}: holds no weights ({SINGLE} or {INDEX})")

    def _inside(self, name: str, who: str) -> Path:
        """The path of a plain file name of this folder."""
        if Path(name).name != name or "\\" in name or name in ("", ".", ".."):
            raise UserError(f"{self.path}: {who} {name!r}; only plain file names of the same folder are opened")
        if not name.endswith(".safetensors"):
            raise UserError(f"{self.path}: {who} {name!r}, which is not a .safetensors file")
        file = self.path / name
        if not file.is_file():
            raise UserError(f"{self.path}: {who} {name}, which is not there; fetch the folder again")
        self._check_link(file)
        return file

    def _check_link(self, file: Path) -> None:
        target, home = file.resolve(), self.path.resolve()
        allowed = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
        if target.parent not in allowed:
            raise UserError(f"{file}: is a link to {target}, outside the folder; copy the file here")

    def _open(self, file: Path) -> None:
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # not a dict
                    if name in self._files:
                        raise UserError(
                            f"{file}: tensor {name} is in {self._files[name].name} too; it must be in one file"
                        )
                    part = tensors.get_slice(name)
                    self._files[name] = file
                    kind = part.get_dtype()
                    if kind not in DTYPES:
                        raise UserError(
                            f"{file}: tensor {name} is of type {kind}, which is not read (known: {', '.join(DTYPES)})"
                        )
                    self._facts[name] = (tuple(part.get_shape()), DTYPES[kind])
        except SafetensorError as error:
            raise UserError(f"{file}: is not a whole safetensors file ({_one_line(error)})") from None
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror or error})") from None
        for name, listed in self._listed.items():
            if listed == file.name and name not in self._files:
                raise UserError(f"{file}: tensor {name} is missing, though {INDEX} says it is here")

    def _bytes(self, name: str, limit: int) -> bytes:
        file = self.path / name
        self._check_link(file)
        try:
            if (size := file.stat().st_size) > limit:
                raise UserError(f"{file}: {size} bytes is too large for such a file (at most {limit})")
            return file.read_bytes()
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror or error})") from None

    def _json(self, name: str, limit: int) -> dict[str, Any]:
        if not (self.path / name).is_file():
            raise UserError(f"{self.path}: holds no {name}")
        try:
            value = json.loads(self._bytes(name, limit))
        except (ValueError, RecursionError):
            raise UserError(f"{self.path / name}: is not valid JSON") from None
        if not isinstance(value, dict):
            raise UserError(f"{self.path / name}: must hold a JSON object")
        return value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).removeprefix("Error while deserializing header: ")[:200]
