"""The tokenizer inside a GGUF file as the files that Hugging Face keeps beside a model.

GGUF holds tokens, merges and the *name* of a way to split text; `PRE_TOKENIZERS` says what each name means. Splitting is where two
tokenizers with the same vocabulary differ, so a name that is not in the table is refused, never guessed.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jaxllm.errors import UserError

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # llama.cpp's kinds of tokens
# How Llama 3, Qwen 2 and their kin split; `digits` says how long a run of digits stays together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits() -> Any:
    """GPT-2's split, with every digit alone."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _words(digits: str) -> Any:
    split = pre_tokenizers.Split(Regex(_WORDS.format(digits=digits)), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": _gpt2,
    "olmo": _gpt2,
    "dolma12": _gpt2,
    "phi-2": _gpt2,
    "smollm": _digits,
    "starcoder": _digits,
    "refact": _digits,
    "command-r": _digits,
    "llama-bpe": lambda: _words("{1,3}"),
    "llama3": lambda: _words("{1,3}"),
    "dbrx": lambda: _words("{1,3}"),
    "qwen2": lambda: _words(""),
}
NORMALIZERS: dict[str, Callable[[], Any]] = {"qwen2": normalizers.NFC}


def tokenizer_files(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, bytes]:
    """File name -> content. Raises UserError for a kind of tokenizer or a split that is not known here."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise UserError("holds no tokenizer (tokenizer.ggml.tokens)")
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UserError(f"tokenizer.ggml.model={kind!r}: only byte-level BPE (gpt2) is read from GGUF files")
    library = _byte_level(metadata, tokens)
    files = {"tokenizer.json": library.to_str(pretty=False).encode()}
    files["tokenizer_config.json"] = _json(_settings(metadata, config, tokens))
    ids = {
        f"{role}_token_id": config[f"{role}_token_id"] for role in ("bos", "eos", "pad") if f"{role}_token_id" in config
    }
    files["generation_config.json"] = _json(ids)
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        files["chat_template.jinja"] = template.encode()
    return files


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        raise UserError(
            f"tokenizer.ggml.pre={pre!r}: how it splits text is not known here; known: {', '.join(PRE_TOKENIZERS)}"
        )
    merges = metadata.get("tokenizer.ggml.merges", [])
    pairs = [tuple(merge.split(" ")) for merge in merges]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise UserError("tokenizer.ggml.tokens holds a token twice")
    for pair in pairs:
        if len(pair) != 2 or not all(part in vocabulary for part in (*pair, "".join(pair))):
            raise UserError(f"tokenizer.ggml.merges: {' '.join(pair)!r} does not join two tokens to a third")
    library = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    library.pre_tokenizer = PRE_TOKENIZERS[pre]()
    if pre in NORMALIZERS:
        library.normalizer = NORMALIZERS[pre]()
    library.decoder = decoders.ByteLevel()
    kinds = np.asarray(metadata.get("tokenizer.ggml.token_type", np.full(len(tokens), NORMAL)))
    if kinds.shape != (len(tokens),):
        raise UserError(f"tokenizer.ggml.token_type has {kinds.size} entries for {len(tokens)} tokens")

    def named(kind: int) -> list[str]:
        return [tokens[i] for i in np.flatnonzero(kinds == kind)]

    library.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in named(CONTROL)])
    library.add_tokens([AddedToken(token, special=False, normalized=False) for token in named(USER)])
    return library


def _settings(metadata: Mapping[str, Any], config: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    """tokenizer_config.json: the special tokens by name, and whether a text begins with one."""
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        i = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if i is not None and not (isinstance(i, int) and 0 <= i < len(tokens)):
            raise UserError(f"tokenizer.ggml.{name}_token_id={i!r}: not one of {len(tokens)} tokens")
        settings[f"{role}_token"] = None if i is None else tokens[i]
    settings["add_bos_token"] = bool(metadata.get("tokenizer.ggml.add_bos_token", False))
    settings["add_eos_token"] = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    if "max_position_embeddings" in config:
        settings["model_max_length"] = config["max_position_embeddings"]
    return settings
