"""What several tests of the data package build."""

import pytest
import tokenizers
from tokenizers import Tokenizer as Library


def write_sentencepiece(path):
    """A Llama-like file: spaces as U+2581, bytes as <0xNN>, a prepended space."""
    words = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)]
    words += ["\u2581", "h", "i", "\u2581h", "\u2581hi"]
    library = Library(
        tokenizers.models.BPE(
            {w: i for i, w in enumerate(words)},
            [("\u2581", "h"), ("\u2581h", "i")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    library.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")]
    )
    library.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("\u2581", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.enable_truncation(3)
    library.enable_padding(length=3)
    library.save(str(path))


@pytest.fixture(scope="session")
def sentencepiece():
    """Writes a small Llama-like tokenizer.json to a path."""
    return write_sentencepiece
