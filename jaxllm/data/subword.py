"""Subword tokenizers through the `tokenizers` library: a byte-level BPE trained on the corpus; any tokenizer.json."""

import functools
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Tokenizer as Library

from jaxllm.data.checks import Log, megabytes, say, whole, word
from jaxllm.data.pieces import byte_pieces
from jaxllm.data.vocabulary import Tokenizer, TokenizerSpec, read_json, read_text, utf8, write_sidecar
from jaxllm.errors import UserError

BOS, EOS = "<|bos|>", "<|eos|>"
TRAIN_CHUNK = 4096  # characters: the trainer counts words chunk by chunk in parallel

# Names that publishers give to the end and the start of a document, tried in this order when nothing names them.
EOS_NAMES = (
    "<|eos|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|im_end|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "[SEP]",
    "[EOS]",
)
BOS_NAMES = (
    "<|bos|>",
    "<|begin_of_text|>",
    "<s>",
    "<bos>",
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    "[CLS]",
    "[BOS]",
)


COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")


class JsonTokenizer(Tokenizer):
    """A tokenizer held by the `tokenizers` library in its own JSON format.

    bos_id: of the token that starts every document, None where none does. companions: the texts of files that travel with it.
    """

    def __init__(
        self,
        library: Library,
        eos_id: int,
        bos_id: int | None = None,
        pad_id: int | None = None,
        companions: Mapping[str, str] | None = None,
    ):
        library.no_padding()
        library.no_truncation()  # published files often truncate at the length of their model
        library.encode_special_tokens = True  # text that spells a special token is text
        self.library = library
        self.pieces, self.strip_space = byte_pieces(library)
        self.eos_id, self.bos_id, self.pad_id = eos_id, bos_id, pad_id
        self.companions = dict(companions or {})
        for name, value in (("eos_id", eos_id), ("bos_id", bos_id), ("pad_id", pad_id)):
            if value is None and name != "eos_id":
                continue
            if not self._is_id(value):
                raise UserError(
                    f"tokenizer {name}={value!r}: must be an id of the vocabulary (0..{len(self.pieces) - 1})"
                )
        self._stop_ids = self._read_stop_ids()

    def _is_id(self, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(self.pieces)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._stop_ids

    def _read_stop_ids(self) -> tuple[int, ...]:
        """`eos_id`, then the `eos_token_id` of generation_config.json: one id, or a list of them.

        Ids beyond the vocabulary are left out: what has no text is never drawn.
        """
        named = parsed(self.companions.get("generation_config.json")).get("eos_token_id")
        more = named if isinstance(named, list) else [] if named is None else [named]
        if not all(isinstance(value, int) and not isinstance(value, bool) for value in more):
            raise UserError(f"generation_config.json: eos_token_id={named!r} is no token id, and no list of them")
        return tuple(dict.fromkeys([self.eos_id, *filter(self._is_id, more)]))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            return [e.ids for e in self.library.encode_batch_fast(list(texts), add_special_tokens=False)]
        except (TypeError, UnicodeEncodeError):
            for text in texts:
                utf8(text)  # names the character
            raise

    @functools.cached_property
    def special_tokens(self) -> dict[str, int]:
        """Special tokens and their ids."""
        return {t.content: i for i, t in self.library.get_added_tokens_decoder().items() if t.special}

    def encode_marked(self, text: str) -> list[int]:
        """Ids of a text in which special tokens stand for themselves: what a chat template wrote, never what a user did."""
        return self.encode_located(text)[0]

    def encode_located(self, text: str) -> tuple[list[int], list[int]]:
        """`encode_marked`, and the character of the text where each of its tokens begins."""
        found = self._marked.encode(text, add_special_tokens=False)
        return list(found.ids), [begin for begin, _ in found.offsets]

    @functools.cached_property
    def _marked(self) -> Library:
        library = Library.from_str(self.library.to_str())
        library.encode_special_tokens = False
        return library

    def save(self, folder: str | os.PathLike[str]) -> None:
        write_sidecar(folder, {"kind": "json", "eos_id": self.eos_id, "bos_id": self.bos_id, "pad_id": self.pad_id})
        (Path(folder) / "tokenizer.json").write_text(self.library.to_str(pretty=True), encoding="utf-8")
        for name, text in self.companions.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: Path, eos_id: Any, bos_id: Any = None, pad_id: Any = None) -> "JsonTokenizer":
        """Reads a tokenizer.json. Raises UserError when the file is missing, broken or lacks an id."""
        return cls(open_library(path), eos_id, bos_id, pad_id, read_companions(path.parent))


def read_companions(folder: Path) -> dict[str, str]:
    """The files that travel with a tokenizer.json."""
    return {name: read_text(folder / name) for name in COMPANIONS if (folder / name).is_file()}


def parsed(text: str | None) -> dict[str, Any]:
    """A companion's JSON object; empty where there is none."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        raise UserError("a JSON file beside the tokenizer is not valid JSON") from None
    return value if isinstance(value, dict) else {}


def open_library(path: Path) -> Library:
    """The library's object for a tokenizer.json; one clear line when the file is none."""
    text = read_text(path)
    try:
        return Library.from_str(text)
    except BaseException as error:  # the library raises bare Exception, and its own panic class for worse files
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{path}: is not a tokenizer.json that `tokenizers` {tokenizers.__version__} reads ({reason})"
        ) from None


@dataclass(frozen=True)
class BPE(TokenizerSpec):
    """Byte-level byte-pair encoding trained on the training documents (Sennrich et al. 2016; GPT-2's word split).

    All 256 bytes are in the vocabulary, so every text can be written. `vocab_size` counts the two special tokens too; a
    small corpus may give fewer. Only the first `train_bytes` of the corpus are read for training.
    """

    vocab_size: int = 4096
    train_bytes: int = 50_000_000
    min_frequency: int = 2

    def __post_init__(self) -> None:
        whole("data.tokenizer.vocab_size", self.vocab_size, least=258)
        whole("data.tokenizer.train_bytes", self.train_bytes, least=1)
        whole("data.tokenizer.min_frequency", self.min_frequency, least=1)

    def identity(self, base: Path) -> dict[str, Any]:
        return {
            "kind": "bpe",
            "vocab_size": self.vocab_size,
            "train_bytes": self.train_bytes,
            "min_frequency": self.min_frequency,
            "tokenizers": tokenizers.__version__,
        }

    def fit(self, texts: Iterable[str], base: Path, log: Log = None) -> JsonTokenizer:
        begun = time.perf_counter()
        library = Library(tokenizers.models.BPE())
        library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=self.vocab_size,
            min_frequency=self.min_frequency,
            special_tokens=[BOS, EOS],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        budget = Budget(self.train_bytes)
        library.train_from_iterator(budget.chunks(texts), trainer)
        made = JsonTokenizer(library, eos_id=library.get_vocab()[EOS], bos_id=library.get_vocab()[BOS])
        say(
            log,
            f"data: trained a byte-level BPE of {made.vocab_size} tokens on {megabytes(budget.used)} "
            f"in {time.perf_counter() - begun:.1f} s",
        )
        if made.vocab_size < self.vocab_size:
            say(
                log,
                f"data: the corpus is too small for data.tokenizer.vocab_size={self.vocab_size}; "
                f"the vocabulary has {made.vocab_size} tokens",
            )
        return made


class Budget:
    """Hands texts to the trainer in chunks cut at line ends, until so many bytes were used."""

    def __init__(self, limit: int):
        self.limit, self.used = limit, 0

    def chunks(self, texts: Iterable[str]) -> Iterator[str]:
        for text in texts:
            start = 0
            while start < len(text):
                if self.used >= self.limit:
                    return
                end = len(text)
                if end - start > TRAIN_CHUNK:
                    newline = text.rfind("\n", start, start + TRAIN_CHUNK)
                    end = newline + 1 if newline >= start else start + TRAIN_CHUNK
                chunk, start = text[start:end], end
                self.used += len(utf8(chunk))
                yield chunk


@dataclass(frozen=True)
class TokenizerFile(TokenizerSpec):
    """Any `tokenizer.json` (or the folder that holds one).

    `eos` and `bos` name the tokens that end and start a document. Unset, they come from the `tokenizer_config.json`
    beside the file, else from the usual names; a file without any end token is refused. `bos` is optional.
    """

    path: str
    eos: str | None = None
    bos: str | None = None

    def __post_init__(self) -> None:
        word("data.tokenizer.path", self.path)
        word("data.tokenizer.eos", self.eos, optional=True)
        word("data.tokenizer.bos", self.bos, optional=True)

    def _file(self, base: Path) -> Path:
        path = base / Path(self.path).expanduser()
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.is_file():
            raise UserError(f"data.tokenizer.path={self.path}: no file {path}")
        return path

    def identity(self, base: Path) -> dict[str, Any]:
        digest = hashlib.sha256()
        path = self._file(base)
        for part in (path, *map(path.with_name, COMPANIONS)):
            digest.update(part.read_bytes() if part.is_file() else b"")
        return {
            "kind": "json",
            "sha256": digest.hexdigest(),
            "eos": self.eos,
            "bos": self.bos,
            "tokenizers": tokenizers.__version__,
        }

    def fit(self, texts: Iterable[str], base: Path, log: Log = None) -> JsonTokenizer:
        path = self._file(base)
        library = open_library(path)
        companions = read_companions(path.parent)
        beside = path.with_name("tokenizer_config.json")
        declared = read_json(beside) if beside.is_file() else {}
        declared = declared if isinstance(declared, dict) else {}
        eos = find_special(library, "eos", self.eos, declared, EOS_NAMES, path)
        if eos is None:
            raise UserError(f"{path}: no end-of-document token found; name one with data.tokenizer.eos=TOKEN")
        bos = find_special(library, "bos", self.bos, declared, BOS_NAMES, path)
        if self.bos is None and bos is not None and not starts_with(library, bos, declared):
            bos = None
        return JsonTokenizer(
            library,
            eos_id=eos,
            bos_id=bos,
            pad_id=find_special(library, "pad", None, declared, (), path),
            companions=companions,
        )


def starts_with(library: Library, bos: int, declared: dict[str, Any]) -> bool:
    """Whether this tokenizer begins its texts with `bos`. Many files declare such a token and never write it.

    What the folder says (`add_bos_token`) counts first, then what the tokenizer's own last step does; a bare file without either has
    the token for a reason.
    """
    if isinstance(said := declared.get("add_bos_token"), bool):
        return said
    if library.post_processor is not None:
        return library.encode("", add_special_tokens=True).ids[:1] == [bos]
    return not declared


def find_special(
    library: Library, role: str, asked: str | None, declared: dict[str, Any], usual: Sequence[str], path: Path
) -> int | None:
    """Id of a special token: as asked, as the folder declares (null there means none), or by its usual names."""
    if asked is not None:
        found = library.token_to_id(asked)
        if found is None:
            raise UserError(f"data.tokenizer.{role}={asked!r}: {path} has no such token")
        return found
    key = f"{role}_token"
    if key in declared:
        value = declared[key]
        value = value.get("content") if isinstance(value, dict) else value
        found = library.token_to_id(value) if isinstance(value, str) else None
        if found is not None or role != "eos":
            return found
    return next((i for i in map(library.token_to_id, usual) if i is not None), None)
