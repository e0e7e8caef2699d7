"""The reference models of tests/golden, and what is computed from them once and used by several tests."""

import functools
import importlib.util
import json
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxllm.data.tokenizer import Bytes
from jaxllm.layers.base import Context
from jaxllm.training.losses import backbone, next_token
from jaxllm.weights.hf_folder import HFFolder
from jaxllm.weights.load import build, read_node, read_params
from jaxllm.weights.logits import Stepper, full_logits
from jaxllm.weights.tokenizer_files import hf_files

GOLDEN = Path(__file__).resolve().parent / "golden"
NAMES = sorted(p.parent.name for p in GOLDEN.glob("*/reference.json"))
# With torch installed, as for the live tests, every family is looked at in every way. Else gradients and bfloat16 are those of a few that
# have most kinds of layers between them: each compiles for ten seconds.
THOROUGH = importlib.util.find_spec("torch") is not None
GRADIENTS = NAMES if THOROUGH else ["gpt2", "gemma2", "deepseek_v3", "gpt_oss", "kimi_linear"]
BFLOAT16 = NAMES if THOROUGH else ["llama", "deepseek_v3"]  # dense, and experts behind a router in float32
PROMPT = 8  # tokens before the greedy ones
WIDTH = 6  # tokens of a call with a cache


@functools.cache
def facts(name):
    return json.loads((GOLDEN / name / "reference.json").read_text())


@functools.cache
def folder(name):
    """The checkpoint; a variant of rotary settings gets the tensors it shares."""
    own = GOLDEN / name
    if "weights" not in facts(name):
        return own
    made = Path(tempfile.mkdtemp(prefix="jaxllm-golden-"))
    shutil.copy(own / "config.json", made)
    shutil.copy(GOLDEN / facts(name)["weights"] / "model.safetensors", made)
    return made


@functools.cache
def arrays(name):
    return load_file(GOLDEN / name / "reference.safetensors")


@functools.cache
def loaded(name):
    """(source, model, params)."""
    source = HFFolder(folder(name))
    warnings = []
    model = build(read_node(source, warnings.append))
    assert warnings == []  # every key that transformers writes is known
    return source, model, read_params(source, model)


def rows(name):
    """(tokens, segments) of one call: the two rows as they are, both with the second one's start as padding, both continued greedily."""
    ref = arrays(name)
    greedy = np.concatenate([ref["input_ids"][:, :PROMPT], ref["greedy"]], axis=1)
    full = np.ones_like(ref["left_mask"])
    tokens = np.concatenate([ref["input_ids"], ref["left_ids"], greedy])
    return tokens, np.concatenate([full, ref["left_mask"], full])


def variant(model):
    """Linear attention in chunks that a row has three of; calls with a cache run it token by token."""
    if "linear" not in model.mixers:
        return model
    chunked = functools.partial(model.mixers["linear"], kernel="chunk", chunk_size=8)
    return model.clone(mixers={**model.mixers, "linear": chunked})


@functools.cache
def whole(name):
    """(logits, hidden) of `rows`. Models whose gradients are looked at get both from one program. Of the others, experts compute all at
    once: that all ways to them are equal is tested elsewhere, and this one compiles in half the time."""
    if name in GRADIENTS:
        return trained(name)[:2]
    _, model, params = loaded(name)
    ffns = {k: functools.partial(f, dispatch="dense") if k == "moe" else f for k, f in model.ffns.items()}
    return full_logits(variant(model).clone(ffns=ffns), params, *rows(name))


@functools.cache
def trained(name):
    """(logits, hidden, loss, gradients) through the loss that training uses, of the first two rows."""
    _, model, params = loaded(name)
    model = variant(model)
    tokens, segments = rows(name)
    batch = shifted(tokens)
    batch["weights"] = batch["weights"].at[2:].set(0.0)

    def loss(params):
        ctx = Context.whole(batch["tokens"], segments, train=True, capture=("stream",))
        out = backbone(model, params, ctx)
        logits = model.apply({"params": params}, out.hidden, method="head")
        return next_token(model, params, out.hidden, batch)[0] / batch["weights"].sum(), (logits, out)

    (value, (logits, out)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True, allow_int=True))(params)
    hidden = [*np.asarray(out.capture["stream"])[:-1], np.asarray(out.hidden)]
    return np.asarray(logits), hidden, float(value), grads


def chunks(total, sizes):
    """`sizes` over and over, cut at `total`: `chunks(7, [3, 1]) == [3, 1, 3]`."""
    out = []
    while sum(out) < total:
        out.append(min(sizes[len(out) % len(sizes)], total - sum(out)))
    return out


def stepped(step, tokens, sizes):
    """Feed row b of `tokens [b t]` in pieces of `sizes[b]`, all rows in the same calls; logits `[b t v]`."""
    rows, total = tokens.shape
    plans = [chunks(total, s) for s in sizes]
    out = [[] for _ in range(rows)]
    for n in range(max(map(len, plans))):
        new = np.array([plan[n] if n < len(plan) else 0 for plan in plans])
        at = step.lengths
        padded = np.zeros((rows, WIDTH), np.int32)
        for b in range(rows):
            padded[b, : new[b]] = tokens[b, at[b] : at[b] + new[b]]
        logits = step(padded, new)
        for b in range(rows):
            out[b].append(logits[b, : new[b]])
    return np.stack([np.concatenate(parts) for parts in out])


def new_stepper(name, rows=4):
    _, model, params = loaded(name)
    return Stepper(model, params, rows, arrays(name)["input_ids"].shape[1] + WIDTH)


def shifted(tokens):
    """A batch of next-token predictions: the last token of a row predicts nothing."""
    labels = np.concatenate([tokens[:, 1:], tokens[:, :1]], axis=1)
    weights = np.ones(tokens.shape, np.float32)
    weights[:, -1] = 0
    return {"tokens": jnp.asarray(tokens), "labels": jnp.asarray(labels), "weights": jnp.asarray(weights)}


def with_text(folder, name="qwen3"):
    """A Hugging Face folder with a tokenizer and a chat template: a golden model with a vocabulary of bytes."""
    config = json.loads((GOLDEN / name / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 260, "eos_token_id": 257}))
    embed = np.random.default_rng(0).standard_normal((260, config["hidden_size"]), dtype=np.float32)
    tensors = {**load_file(GOLDEN / name / "model.safetensors"), "model.embed_tokens.weight": embed}
    save_file(tensors, folder / "model.safetensors")
    for file, text in hf_files(Bytes(), 64).items():
        (folder / file).write_text(text)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 10, 999], "temperature": 0.6}))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role[0] }}: {{ m.content }} {% endfor %}a: "
    )
    return folder
