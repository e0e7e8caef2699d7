"""A tokenizer of ours as the files that other programs read: tokenizer.json and what stands beside it."""

import json
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from jaxllm.data.pieces import ALPHABET
from jaxllm.data.subword import BOS, EOS, JsonTokenizer
from jaxllm.data.tokenizer import Bytes
from jaxllm.data.vocabulary import Tokenizer


def hf_files(tokenizer: Tokenizer, longest: int | None) -> dict[str, str]:
    """Name -> text. A tokenizer that came with such files keeps them as they were; for one of ours they are made.

    The bos that ours puts before every text becomes the last step of tokenizer.json, so that others put it there too.
    """
    library = bytes_library() if isinstance(tokenizer, Bytes) else _copy(tokenizer)
    if library is None:
        return {}
    files = dict(tokenizer.companions)
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
    named = {role: library.id_to_token(i) for role, i in ids.items() if i is not None}
    if tokenizer.bos_id is not None and library.encode("", add_special_tokens=True).ids[:1] != [tokenizer.bos_id]:
        template = [named["bos"], "$A"]
        library.post_processor = processors.TemplateProcessing(
            single=template, pair=[*template, "$B:1"], special_tokens=[(named["bos"], tokenizer.bos_id)]
        )
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": longest or 2**30,
        **{f"{role}_token": token for role, token in named.items()},
    }
    files.setdefault("tokenizer_config.json", json.dumps(settings, indent=2) + "\n")
    files.setdefault("generation_config.json", json.dumps(generation_settings(tokenizer), indent=2) + "\n")
    return {**files, "tokenizer.json": library.to_str(pretty=True)}


def generation_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    """The token ids that a generation needs to know."""
    stops = list(tokenizer.stop_ids)
    ids = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": stops[0] if len(stops) == 1 else stops,
        "pad_token_id": tokenizer.pad_id,
    }
    return {key: value for key, value in ids.items() if value is not None}


def _copy(tokenizer: Tokenizer) -> Library | None:
    if not isinstance(tokenizer, JsonTokenizer):
        return None
    library = Library.from_str(tokenizer.library.to_str())
    library.encode_special_tokens = False  # ours reads special tokens as text; a file must say what others do
    return library


def bytes_library() -> Library:
    """Raw bytes as a byte-level BPE without merges: the same ids, one a byte."""
    library = Library(models.BPE(vocab=ALPHABET, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (BOS, EOS)])
    return library
