"""A model of ours, exported, is the same model in transformers: its logits there are kept in tests/golden/exported.safetensors."""

import hashlib
import sys
from pathlib import Path

import jax
import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file

from jaxllm.compose import compose
from jaxllm.params import init_params
from jaxllm.weights.choose import choose
from jaxllm.weights.export import new_folder, write_folder
from jaxllm.weights.logits import full_logits

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def model():
    """The quickstart's kind: q/k norms, a scaled and tied embedding, a padded vocabulary; every parameter far from its start."""
    words = ["model.mixers.global.qk_norm=true", "model.embed_scale=5.7", "model.vocab_multiple=16", "track=none"]
    made = compose(["model=tiny", "model.d_model=32", "model.vocab_size=50", *words]).build("model")
    noise = np.random.Generator(np.random.Philox(5))

    def shift(a):
        return np.asarray(a) + 0.2 * noise.standard_normal(a.shape, dtype=np.float32)

    return made, jax.tree.map(shift, init_params(made, jax.random.key(3)))


def export(out, shard_bytes):
    made, params = model()
    choice = choose(made)
    with new_folder(out) as part:
        write_folder(part, choice, choice.fold(made, params), dtype="float32", shard_bytes=shard_bytes, files={})
    return made, params


def digest(folder):
    """Of all tensors by name, whatever the shards."""
    total, found = hashlib.sha256(), {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    for name in sorted(found):
        total.update(name.encode() + found[name].tobytes())
    return total.hexdigest()


def test_transformers_reads_the_same_model(tmp_path):
    made, params = export(tmp_path / "out", 40_000)
    with safe_open(GOLDEN / "exported.safetensors", framework="numpy") as kept:
        facts, ids, wanted = kept.metadata(), kept.get_tensor("input_ids"), kept.get_tensor("logits")
    assert facts["class"] == "Qwen3ForCausalLM"
    assert digest(tmp_path / "out") == facts["sha256"]  # what transformers read then is what is written now
    np.testing.assert_allclose(full_logits(made, params, ids)[0], wanted, atol=1e-4, rtol=0)


if __name__ == "__main__":
    export(Path(sys.argv[1]), 40_000)
