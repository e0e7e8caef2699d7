"""A toy tokenizer with a chat template: bytes and four special tokens, as a publisher's folder would hold them."""

import json

import tokenizers
from tokenizers import Tokenizer as Library
from tokenizers import processors

from jaxllm.data.pieces import ALPHABET
from jaxllm.data.tokenizer import load_tokenizer

SPECIAL = ("<s>", "<|im_start|>", "<|im_end|>", "<|eot|>")  # ids 256..259, after the bytes
CHATML = (
    "{% for message in messages %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' -}}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make(folder, template, *, adds_bos=False, jinja_file=False, generation=None, **settings):
    """The tokenizer of a folder: bytes, four special tokens, and the template in either place."""
    library = Library(tokenizers.models.BPE(vocab=ALPHABET, merges=[]))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(list(SPECIAL))
    if adds_bos:
        library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    library.save(str(folder / "tokenizer.json"))
    declared = {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}, **settings}
    if template is not None:
        if jinja_file:
            (folder / "chat_template.jinja").write_text(template)
        else:
            declared["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(declared))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_tokenizer(folder)
