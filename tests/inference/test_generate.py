"""Generation: prefill and decode against the plain loop, batches, buckets, ends, and the cache that is never copied."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.cache import cache_bytes
from jaxllm.compose import compose
from jaxllm.data.tokenizer import Bytes
from jaxllm.errors import UserError
from jaxllm.inference.generate import Generator, sample_text, start_ids
from jaxllm.inference.programs import Progress, bucket
from jaxllm.inference.sampling import GREEDY, SamplingParams
from jaxllm.layers.base import Context
from jaxllm.layers.gqa import GQA
from jaxllm.layers.mlp import MLP
from jaxllm.model import LanguageModel
from jaxllm.ops.linear import Transposed
from jaxllm.params import init_params

LIMIT = 64


def build(vocab_size=97, **fields):
    """Two scanned layers of grouped-query attention with a padded head."""
    return LanguageModel(
        **{
            "vocab_size": vocab_size,
            "vocab_multiple": 64,
            "d_model": 32,
            "layers": "2* global/dense",
            "mixers": {"global": functools.partial(GQA, num_heads=4, num_kv_heads=2, qk_norm=True)},
            "ffns": {"dense": functools.partial(MLP, d_ff=48)},
            "tie_embeddings": False,
            "max_seq_len": LIMIT,
        }
        | fields
    )


@functools.cache
def tiny():
    """(model, stacked params, generator, weights), shared by all tests so that each shape is compiled once."""
    model = build()
    params = loud(init_params(model, jax.random.key(0)))
    generator = Generator(model)
    return model, params, generator, generator.prepare(params)


def loud(params):
    """Every weight larger: the context decides the next token, and no choice hangs on the last bit."""
    return jax.tree.map(lambda leaf: leaf * 2, params)


def prompts_of(*lengths):
    draw = np.random.default_rng(sum(lengths))
    return [draw.integers(0, 97, length).tolist() for length in lengths]


@functools.cache
def plain_forward():
    """Logits [1 LIMIT v] of the stacked model on whole sequences: the slow truth."""
    model = tiny()[0]
    return jax.jit(lambda params, tokens, segments: model.apply({"params": params}, Context.whole(tokens, segments))[1])


def plain_logits(ids, params=None):
    params = tiny()[1] if params is None else params
    tokens, segments = np.zeros((1, LIMIT), np.int32), np.zeros((1, LIMIT), np.int32)
    tokens[0, : len(ids)], segments[0, : len(ids)] = ids, 1
    return np.asarray(plain_forward()(params, tokens, segments).logits)[0, len(ids) - 1, :97]


def plain_greedy(prompt, count):
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(plain_logits(ids).argmax()))
    return ids[len(prompt) :]


def test_buckets():
    assert [bucket(n) for n in (1, 16, 17, 32, 33)] == [16, 16, 32, 32, 64]
    assert [bucket(n, limit=40) for n in (1, 30, 33, 40)] == [16, 32, 40, 40]
    assert bucket(1, limit=8) == 8
    assert [bucket(n, smallest=1) for n in (1, 2, 3, 5, 8)] == [1, 2, 4, 8, 8]


@pytest.mark.parametrize("cache", [True, False])
def test_greedy_tokens_equal_the_plain_loop(cache):
    _, _, generator, weights = tiny()
    for prompt in prompts_of(1, 7, 16, 33):
        rows, _ = generator.generate(weights, [prompt], max_new_tokens=8, sampling=GREEDY, cache=cache)
        assert rows[0].tokens == plain_greedy(prompt, 8)
        assert rows[0].finish == "length" and rows[0].prompt_ids == prompt


def test_logprobs_equal_the_plain_loop_at_every_step():
    _, _, generator, weights = tiny()
    prompt = prompts_of(9)[0]
    for cache in (True, False):
        rows, _ = generator.generate(weights, [prompt], max_new_tokens=8, sampling=SamplingParams(seed=3), cache=cache)
        for i, (token, logprob) in enumerate(zip(rows[0].tokens, rows[0].logprobs, strict=True)):
            expected = jax.nn.log_softmax(plain_logits(prompt + rows[0].tokens[:i]))[token]
            assert logprob == pytest.approx(float(expected), abs=1e-5)


def test_cached_logits_equal_uncached_logits():
    model, _, generator, _ = tiny()
    params = init_params(model, jax.random.key(0))  # as initialised: logits of size 1, where 1e-5 is a tight bound
    weights = generator.prepare(params)
    prompt = prompts_of(23)[0]
    programs = generator.programs
    cache, logits = programs.init(weights, 1, 32)()
    tokens = np.zeros((1, 16), np.int32)
    tokens[0] = prompt[:16]
    prefill = programs.prefill(weights, 1, 32, 16)
    cache, logits = prefill(weights, cache, logits, tokens, np.array([0], np.int32), np.array([16], np.int32))
    np.testing.assert_allclose(np.asarray(logits)[0, :97], plain_logits(prompt[:16], params), atol=1e-5)
    decode = programs.decode(weights, 1, 32)
    for at in range(16, 23):
        row = [np.array([n], np.int32) for n in (prompt[at], at, 1)]
        cache, logits, progress = decode(weights, cache, Progress(*row))
        assert int(progress.lengths[0]) == at + 1
        np.testing.assert_allclose(np.asarray(logits)[0, :97], plain_logits(prompt[: at + 1], params), atol=1e-5)


@pytest.mark.parametrize("cache", [True, False])
def test_every_row_of_a_batch_is_as_if_alone(cache):
    _, _, generator, weights = tiny()
    prompts = prompts_of(3, 7, 1, 22, 12)  # eight rows with the fill: three of nothing but padding
    sampling = [GREEDY, GREEDY, SamplingParams(1.0, seed=5), GREEDY, SamplingParams(0.7, top_k=9, seed=2**40)]
    together, _ = generator.generate(weights, prompts, max_new_tokens=8, sampling=sampling, cache=cache)
    for prompt, params, row in zip(prompts, sampling, together, strict=True):
        alone, _ = generator.generate(weights, [prompt], max_new_tokens=8, sampling=params)
        assert row.tokens == alone[0].tokens
        # 1e-5 for weights as drawn; `loud` doubles the final norm and the head, so the logits' rounding errors are four times as large.
        np.testing.assert_allclose(row.logprobs, alone[0].logprobs, rtol=0, atol=4e-5)


def test_draws_do_not_depend_on_how_the_prompt_is_cut():
    model, _, generator, weights = tiny()
    prompts = prompts_of(11, 4, 2, 1, 10)
    sampling = [SamplingParams(1.0, seed=7), SamplingParams(1.2, top_p=0.9, seed=8), GREEDY, GREEDY, GREEDY]
    whole, whole_stats = generator.generate(weights, prompts, max_new_tokens=8, sampling=sampling)
    for chunk in (2, 5):
        cut = Generator(model, prefill_chunk=chunk)
        cut.programs = generator.programs
        rows, stats = cut.generate(weights, prompts, max_new_tokens=8, sampling=sampling)
        assert [row.tokens for row in rows] == [row.tokens for row in whole]
        assert stats.tokens_processed == whole_stats.tokens_processed


def test_a_row_taken_up_again_goes_on_as_if_never_stopped():
    _, _, generator, weights = tiny()
    prompt, params = prompts_of(8)[0], SamplingParams(1.5, seed=11)
    rows, _ = generator.generate(weights, [prompt], max_new_tokens=9, sampling=params)
    whole = rows[0].tokens
    for at in range(1, 8):
        rest, _ = generator.generate(weights, [prompt + whole[:at]], max_new_tokens=8, sampling=params)
        assert rest[0].tokens[: 9 - at] == whole[at:]
    plain, _ = generator.generate(weights, [prompt], max_new_tokens=9, sampling=params, cache=False)
    assert plain[0].tokens == whole


def test_one_seed_gives_one_text_and_another_seed_another():
    _, _, generator, weights = tiny()
    prompt = prompts_of(9) * 5
    sampling = [SamplingParams(1.5, seed=s) for s in (1, 2, 3, 1, 4)]
    rows, _ = generator.generate(weights, prompt, max_new_tokens=8, sampling=sampling)
    texts = [tuple(row.tokens) for row in rows]
    assert len(set(texts)) == 4 and texts[0] == texts[3]


def test_no_retrace_after_the_warm_up():
    _, _, generator, weights = tiny()
    generator.warm_up(weights, max_prompt=56, max_new_tokens=4)
    before = generator.traces
    assert before > 0
    for i, length in enumerate(np.random.default_rng(0).integers(1, 57, 50).tolist()):
        params = SamplingParams(temperature=i % 3, top_k=i % 5, top_p=1 - i / 100, min_p=i / 200, seed=i)
        generator.generate(weights, prompts_of(length), max_new_tokens=4, sampling=params)
    assert generator.traces == before


@pytest.mark.parametrize("cache", [True, False])
def test_nothing_is_traced_or_compiled_while_tokens_are_timed(cache, caplog):
    _, _, generator, weights = tiny()
    common = {"max_new_tokens": 8, "cache": cache}
    generator.generate(weights, prompts_of(6), sampling=GREEDY, **common)
    with jax.log_compiles(), caplog.at_level("DEBUG"):
        generator.generate(weights, prompts_of(4), sampling=SamplingParams(0.7, top_k=5), **common)
        assert not caplog.records
        jax.jit(lambda x: x + 1.2345)(1.0)
        assert caplog.records  # or the line above would prove nothing


def test_uncached_needs_few_shapes_and_no_retrace():
    _, _, generator, weights = tiny()
    generator.warm_up(weights, max_prompt=32, max_new_tokens=20, cache=False)
    before = generator.traces
    for length in (1, 9, 15, 31):
        generator.generate(weights, prompts_of(length), max_new_tokens=20, sampling=GREEDY, cache=False)
    assert generator.traces == before


def test_tokens_processed_counts_what_the_model_read():
    _, _, generator, weights = tiny()
    for lengths, count in (((5,), 1), ((5,), 8), ((3, 7, 1, 22, 12), 8)):
        common = {"max_new_tokens": count, "sampling": GREEDY}
        _, cached = generator.generate(weights, prompts_of(*lengths), **common)
        _, uncached = generator.generate(weights, prompts_of(*lengths), cache=False, **common)
        assert cached.tokens_processed == sum(lengths) + len(lengths) * (count - 1)
        assert uncached.tokens_processed == sum(length + i for length in lengths for i in range(count))
        assert cached.new_tokens == uncached.new_tokens == count * len(lengths)
        assert 0 < cached.ttft_s <= cached.seconds


def test_compile_time_is_reported_apart():
    model, _, _, weights = tiny()
    generator = Generator(model)
    common = {"max_new_tokens": 2, "sampling": GREEDY, "cache": False}  # the way with the fewest programs
    _, first = generator.generate(weights, prompts_of(3), **common)
    _, second = generator.generate(weights, prompts_of(3), **common)
    assert first.compile_s > 0 and second.compile_s == 0
    assert first.seconds < first.compile_s


@pytest.mark.parametrize("cache", [True, False])
def test_generation_fills_the_model_to_its_limit_and_no_further(cache):
    _, _, generator, weights = tiny()
    prompt = prompts_of(LIMIT - 8)[0]
    rows, _ = generator.generate(weights, [prompt], max_new_tokens=8, sampling=GREEDY, cache=cache)
    assert rows[0].tokens == plain_greedy(prompt, 8)
    with pytest.raises(UserError, match=f"max_seq_len={LIMIT}; use max_new_tokens=8 or less"):
        generator.generate(weights, [prompt], max_new_tokens=9, sampling=GREEDY, cache=cache)
    with pytest.raises(UserError, match="shorten the prompt"):
        generator.generate(weights, prompts_of(LIMIT + 3), max_new_tokens=1, sampling=GREEDY, cache=cache)


def test_a_cache_too_short_is_refused_before_the_call(monkeypatch):
    _, _, generator, weights = tiny()
    monkeypatch.setattr(generator, "_capacity", lambda longest, new: 16)
    with pytest.raises(UserError, match="17 tokens do not fit a cache of 16"):
        generator.generate(weights, prompts_of(10), max_new_tokens=12, sampling=GREEDY)
    with pytest.raises(UserError, match="20 tokens do not fit a cache of 16"):
        generator.generate(weights, prompts_of(20), max_new_tokens=1, sampling=GREEDY)


def test_wrong_prompts_are_named():
    _, _, generator, weights = tiny()
    outside = r"prompt_ids\[1\]=97: outside the vocabulary of 97"
    for prompt, named in (([1, 97], outside), ([-1], "=-1"), ([], "has no tokens")):
        with pytest.raises(UserError, match=named):
            generator.generate(weights, [prompt], max_new_tokens=1, sampling=GREEDY)
    with pytest.raises(UserError, match="max_new_tokens=0"):
        generator.generate(weights, [[1]], max_new_tokens=0, sampling=GREEDY)
    with pytest.raises(UserError, match="prompts: empty"):
        generator.generate(weights, [], max_new_tokens=1, sampling=GREEDY)


def test_weights_that_are_not_numbers_are_reported():
    _, params, generator, _ = tiny()
    broken = generator.prepare(params | {"embed": params["embed"].at[:, 0].set(jnp.nan)})
    with pytest.raises(UserError, match="logits at position 3 are not numbers"):
        generator.generate(broken, prompts_of(3), max_new_tokens=2, sampling=GREEDY)


# --- with text ----------------------------------------------------------------------------------------------------


@functools.cache
def speaking():
    """(generator, stacked params, weights) with a tokenizer that knows 258 of the model's 300 ids."""
    model = build(vocab_size=300)
    params = loud(init_params(model, jax.random.key(1)))
    generator = Generator(model, Bytes())
    return generator, params, generator.prepare(params)


@pytest.mark.parametrize("cache", [True, False])
def test_eos_ends_its_row_and_only_its_row(cache):
    generator, _, weights = speaking()
    prompts, common = [[65, 66, 67], [68] * 7], {"max_new_tokens": 8, "sampling": GREEDY, "cache": cache}
    free, _ = generator.generate(weights, prompts, ignore_eos=True, **common)
    third = free[0].tokens[2]
    assert third not in free[0].tokens[:2] + free[1].tokens  # or the test would not show anything
    ending = Generator(generator.model, generator.tokenizer)
    ending.programs, ending.stop = generator.programs, (third,)
    rows, stats = ending.generate(weights, prompts, **common)
    assert rows[0].tokens == free[0].tokens[:3] and rows[0].finish == "stop"
    assert rows[0].text == Bytes().decode(rows[0].tokens[:2])
    assert rows[1].tokens == free[1].tokens and rows[1].finish == "length"
    assert stats.new_tokens == 11
    if cache:
        assert stats.tokens_processed == 10 + 2 + 7
    ignored, _ = ending.generate(weights, prompts, ignore_eos=True, **common)
    assert ignored[0].tokens == free[0].tokens


def test_streamed_text_is_the_whole_text():
    generator, _, weights = speaking()
    shown = {0: [], 1: []}
    prompts = [[65], [66, 67]]
    sampling = [SamplingParams(3.0, seed=s) for s in (1, 2)]
    rows, _ = generator.generate(
        weights, prompts, max_new_tokens=40, sampling=sampling, on_text=lambda row, text: shown[row].append(text)
    )
    for i, row in enumerate(rows):
        kept = [token for token in row.tokens if token != Bytes().eos_id]
        assert row.text == "".join(shown[i]) == Bytes().decode(kept)
        assert len(shown[i]) > 10 and all(shown[i])


def test_ids_without_text_are_never_drawn():
    generator, _, weights = speaking()
    drawn = []
    for seed in range(0, 8, 2):
        sampling = [SamplingParams(50.0, seed=seed), SamplingParams(50.0, seed=seed + 1)]
        rows, _ = generator.generate(weights, [[1]] * 2, max_new_tokens=40, sampling=sampling, ignore_eos=True)
        drawn += [token for row in rows for token in row.tokens]
    assert len(drawn) == 320 and 240 < max(drawn) < 258
    with pytest.raises(UserError, match=r"prompt_ids\[0\]=258: outside the vocabulary of 258 ids"):
        generator.generate(weights, [[258]], max_new_tokens=1, sampling=GREEDY)


def test_samples_during_training_compile_once():
    generator, params, _ = speaking()
    first = sample_text(generator, params, ["ab", ""], max_new_tokens=6, temperature=1.0, seed=3)
    before = generator.traces
    again = sample_text(generator, params, ["abcd", "x"], max_new_tokens=6, temperature=0.5, top_k=4, seed=4)
    moved = jax.tree.map(lambda leaf: leaf * 1.5, params)
    later = sample_text(generator, moved, ["ab", ""], max_new_tokens=6, temperature=1.0, seed=3)
    assert generator.traces == before
    assert [row["prompt"] for row in first] == ["ab", ""] and [row["prompt"] for row in again] == ["abcd", "x"]
    assert all(len(row["tokens"]) <= 6 and row["finish"] in ("stop", "length") for row in first + again)
    assert [row["tokens"] for row in first] != [row["tokens"] for row in later]
    repeat = sample_text(generator, params, ["ab", ""], max_new_tokens=6, temperature=1.0, seed=3)
    assert repeat == first


def test_a_sample_prompt_too_long_loses_its_beginning():
    generator, params, _ = speaking()
    common = {"max_new_tokens": 60, "temperature": 0.0}
    long = sample_text(generator, params, ["z" * 100 + "ab", "x"], **common)
    ends = [[122, 122, 97, 98], [256, 120]]
    rows, _ = generator.generate(generator.prepare(params), ends, max_new_tokens=60, sampling=GREEDY)
    assert [row["tokens"] for row in long] == [row.tokens for row in rows]


def test_an_empty_text_starts_where_documents_start():
    assert start_ids(Bytes(), "") == [256]
    no_bos = Bytes()
    object.__setattr__(no_bos, "bos_id", None)
    assert start_ids(no_bos, "") == [257]


# --- memory and devices -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 4])
def test_the_decode_step_copies_no_cache(rows):
    model = build(max_seq_len=None, tie_embeddings=True)
    generator = Generator(model)
    weights = generator.prepare(init_params(model, jax.random.key(0)))
    capacity = 4096
    compiled = generator.programs.decode(weights, rows, capacity)
    leaves = jax.tree.leaves(jax.eval_shape(lambda: generator.programs.model.init_cache(rows, capacity)))
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < min(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    assert memory.alias_size_in_bytes == cache_bytes(leaves)
    sizes = {int(np.prod(leaf.shape)) for leaf in leaves}
    for shape, operation in re.findall(r"= \w+\[([\d,]+)\]\S* (\w+)\(", compiled.as_text()):
        if operation in ("copy", "transpose"):
            assert int(np.prod([int(n) for n in shape.split(",")])) not in sizes
    # And every product is a product: inside a loop fusion it would be a naive loop, slow for a layer and very slow for the head.
    loops = re.findall(r"kind=kLoop, calls=%(\S+?)[,\s]", compiled.as_text())
    assert loops
    for body in re.findall(r"^%(\S+) \([^\n]*\{\n(.*?)^\}", compiled.as_text(), flags=re.M | re.S):
        assert body[0] not in loops or " dot(" not in body[1], body[0]


def test_a_16_bit_model_is_computed_in_float32_on_cpu():
    """Its weights are widened once, and the program that float32 weights use runs on them: no conversion at every token."""
    model, params, generator, _ = tiny()
    small = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    other = Generator(build(dtype="bfloat16", param_dtype="bfloat16"))
    assert other.model.compute_dtype == jnp.float32
    weights = other.prepare(small)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(weights)} == {"float32"}
    prompts = prompts_of(5, 9)
    traces = generator.traces
    rows, _ = generator.generate(weights, prompts, max_new_tokens=6, sampling=GREEDY)
    again, _ = generator.generate(generator.prepare(small), prompts, max_new_tokens=6, sampling=GREEDY)
    assert [row.tokens for row in rows] == [row.tokens for row in again]
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), small)
    ids = list(prompts[0])
    for token in rows[0].tokens:
        assert int(plain_logits(ids, wide).argmax()) == token
        ids.append(token)
    assert generator.traces - traces <= 4


def test_weights_laid_out_for_many_rows_give_the_same_tokens():
    _, params, generator, weights = tiny()
    many = generator.prepare(params, rows=2)
    assert jax.tree.structure(many) != jax.tree.structure(weights)
    assert (
        sum(isinstance(a, Transposed) for a in jax.tree.leaves(many, is_leaf=lambda a: isinstance(a, Transposed))) == 8
    )
    prompts = prompts_of(5, 9)
    rows, again = (generator.generate(w, prompts, max_new_tokens=6, sampling=GREEDY)[0] for w in (weights, many))
    assert [row.tokens for row in rows] == [row.tokens for row in again]
    np.testing.assert_allclose(rows[0].logprobs, again[0].logprobs, atol=1e-4)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
def test_sharded_weights_give_the_same_text():
    from jaxllm.mesh import build_mesh, use_mesh

    model, params, generator, weights = tiny()
    mesh = build_mesh({"data": 1, "fsdp": 2, "tensor": 2}, devices=jax.devices()[:4])
    with use_mesh(mesh):
        sharded = init_params(model, jax.random.key(0), mesh=mesh)
        sharded = jax.tree.map(lambda new, old: jax.device_put(old, new.sharding), sharded, params)
        split = Generator(model)
        weights_split = split.prepare(sharded)
        rows, _ = split.generate(weights_split, prompts_of(5, 9), max_new_tokens=6, sampling=GREEDY)
        before = split.traces
        split.generate(split.prepare(sharded), prompts_of(6, 8), max_new_tokens=6, sampling=GREEDY)
    assert split.traces == before
    alone, _ = generator.generate(weights, prompts_of(5, 9), max_new_tokens=6, sampling=GREEDY)
    assert [row.tokens for row in rows] == [row.tokens for row in alone]


def test_experts_keep_their_layout_whatever_the_rows():
    """Matrices of all experts are multiplied at once; only what all tokens meet is transposed for several rows."""
    model = compose(["model=tiny", "model.vocab_size=64", "ffn@model.ffns.dense=moe"]).build("model")
    generator, params = Generator(model), init_params(model, jax.random.key(0))
    one, two = (
        generator.generate(generator.prepare(params, rows=n), [[1, 2, 3]] * n, max_new_tokens=3, sampling=GREEDY)[0]
        for n in (1, 2)
    )
    assert [row.tokens for row in two] == [one[0].tokens] * 2
