"""One tiny engine for all tests of serving, so that its shapes are compiled once a process."""

import functools
import json
import tempfile
from pathlib import Path

import jax
import tokenizers

from jaxllm.data.pieces import ALPHABET
from jaxllm.data.tokenizer import load_tokenizer
from jaxllm.inference.engine import Engine
from jaxllm.inference.settings import EngineSettings
from jaxllm.layers.gqa import GQA
from jaxllm.layers.mlp import MLP
from jaxllm.model import LanguageModel
from jaxllm.params import init_params

LENGTH, PAGE, ROWS = 64, 4, 4
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SETTINGS = EngineSettings(
    rows=ROWS,
    max_len=LENGTH,
    page_size=PAGE,
    step_tokens=24,
    chunk=16,
    row_buckets=[ROWS],
    token_buckets=[4, 16],  # four rows of the first go in one call
    width_buckets=[LENGTH // PAGE],
)


@functools.cache
def tokenizer():
    """A token a byte, two marks of turns (256 and 257), and a chat template."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ALPHABET, merges=[]))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    with tempfile.TemporaryDirectory() as folder:
        library.save(f"{folder}/tokenizer.json")
        declared = {"eos_token": "<|im_end|>", "chat_template": CHATML}
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(declared))
        return load_tokenizer(folder)


@functools.cache
def model_and_params():
    model = LanguageModel(
        vocab_size=tokenizer().vocab_size,
        vocab_multiple=64,
        d_model=32,
        layers="2* global/dense",
        mixers={"global": functools.partial(GQA, num_heads=4, num_kv_heads=2)},
        ffns={"dense": functools.partial(MLP, d_ff=48)},
        tie_embeddings=False,
        max_seq_len=LENGTH,
    )
    return model, jax.tree.map(lambda leaf: leaf * 3, init_params(model, jax.random.key(0)))


@functools.cache
def made():
    return Engine(*model_and_params(), tokenizer(), SETTINGS, name="tiny", warm_up=True)


def as_new(engine):
    """The engine under its first settings, with an empty cache."""
    names = ("policy", "step_tokens", "chunk", "prefix_cache", "overlap", "preempt_every", "pages", "queue")
    engine.arrange(**{name: getattr(SETTINGS, name) for name in names})
    return engine
