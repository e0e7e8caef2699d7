"""`task=read`: a stream read in pieces gives what a whole sequence gives, and holds as much memory however long it is."""

import jax
import numpy as np
import pytest

from jaxllm.compose import compose
from jaxllm.errors import UserError
from jaxllm.inference.settings import ReadSettings
from jaxllm.layers.base import Context
from jaxllm.params import init_params
from jaxllm.run import main
from jaxllm.tasks import TaskIO
from jaxllm.tasks.read import Reader, run

TOY = ["+experiment=million_tokens", "model.d_model=16", "model.ffns.dense.d_ff=16", "model.layers='1* linear/dense'"]


def test_pieces_give_what_the_whole_stream_gives():
    model = compose(TOY).build("model")
    params = init_params(model, jax.random.key(0))
    reader = Reader(model, params, ReadSettings(tokens=150, chunk=32, decode=2), seed=3)
    marks = list(reader.read())
    assert [m["tokens"] for m in marks] == [32, 64, 128, 150]
    ids = np.random.Generator(np.random.Philox(3))
    stream = np.concatenate([ids.integers(0, 256, (1, 32), np.int32) for _ in range(5)], axis=1)[:, :150]
    want = model.apply({"params": params}, Context.whole(stream))[1].logits[:, -1]
    np.testing.assert_allclose(reader.logits, want, atol=2e-5)


def test_the_result_says_what_it_took(capsys):
    result = run(compose([*TOY, "read.tokens=96", "read.chunk=32", "read.decode=3"]), TaskIO(level="error"))
    assert result["tokens"] == 96 and len(result["marks"]) == 3
    state, window = 4 * 2 * 8 * 8, 4 * 3 * 3 * 16
    assert result["cache_bytes"] == state + window  # whatever was read
    assert result["tokens_per_s"] > 0 and result["decode_ms"] > 0
    assert result["peak_rss_bytes"] >= max(m["rss_bytes"] for m in result["marks"]) // 2


@pytest.mark.parametrize("model", ["hybrid", "attention"])
def test_the_twins_of_the_demonstration_compose_and_are_as_large(model):
    from jaxllm.params import declare, is_declared

    def size(name):
        tree = declare(compose(["+experiment=million_tokens", f"model=million_tokens/{name}"]).build("model"))
        return sum(box.value.size for box in jax.tree.leaves(tree, is_leaf=is_declared))

    assert abs(size(model) / size("kda") - 1) < 0.1


def test_mistakes_are_one_line(capsys):
    assert main(["+experiment=million_tokens", "read.chunk=0"]) == 2
    assert "chunk: 0 must be at least 1" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"read.tokens: 64 and read.decode=3 do not fit model.max_seq_len=60"):
        run(compose([*TOY, "read.tokens=64", "read.decode=3", "model.max_seq_len=60"]), TaskIO(level="error"))
