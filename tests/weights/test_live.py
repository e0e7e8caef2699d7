"""With the `parity` extra (torch and transformers): the golden files are what transformers computes today, and it reads our folders."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from golden_models import GOLDEN, facts
from safetensors.numpy import load_file

from jaxllm.data.tokenizer import BPE
from jaxllm.weights.logits import full_logits
from jaxllm.weights.mxfp4 import expand
from jaxllm.weights.tokenizer_files import hf_files

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.parity
torch = pytest.importorskip(
    "torch", reason="parity: torch is not installed (pip install 'jaxllm[parity]'); the golden files are used instead"
)
transformers = pytest.importorskip(
    "transformers", reason="parity: transformers is not installed (pip install 'jaxllm[parity]')"
)


def module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def maker(tmp_path_factory):
    """The generator of the golden files, writing to a folder of its own."""
    made = module(GOLDEN / "make_golden.py")
    made.HERE = tmp_path_factory.mktemp("live")
    return made


@pytest.mark.parametrize("name", sorted(p.parent.name for p in GOLDEN.glob("*/reference.safetensors")))
def test_golden_files_are_what_transformers_computes(maker, name):
    maker.whole_model(name)
    for file in ("model.safetensors", "reference.safetensors"):
        if not (GOLDEN / name / file).exists():
            continue
        live, kept = load_file(maker.HERE / name / file), load_file(GOLDEN / name / file)
        assert live.keys() == kept.keys()
        for key in kept:
            np.testing.assert_allclose(live[key], kept[key], atol=5e-5, rtol=0, err_msg=f"{file}: {key}")
    live_facts = json.loads((maker.HERE / name / "reference.json").read_text())
    assert live_facts["gradient_norms"] == pytest.approx(facts(name)["gradient_norms"], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("maker", "file"), [("make_kda", "kda_bounded"), ("make_pooled_dsa", "dsa_pooled")])
def test_the_golden_layers_are_what_transformers_computes(maker, file, tmp_path):
    made = module(GOLDEN / f"{maker}.py")
    made.OUT = tmp_path / f"{file}.safetensors"
    made.main()
    live, kept = load_file(made.OUT), load_file(GOLDEN / f"{file}.safetensors")
    assert live.keys() == kept.keys()
    for key in kept:
        np.testing.assert_allclose(live[key], kept[key], atol=5e-5, rtol=0, err_msg=key)


def test_transformers_reads_a_model_and_a_tokenizer_of_ours(tmp_path):
    out = tmp_path / "out"
    made, params = module(Path(__file__).with_name("test_exported.py")).export(out, 40_000)
    tokenizer = BPE(vocab_size=300).fit(["hello, hello world\n" * 50], tmp_path)
    for name, text in hf_files(tokenizer, 64).items():
        (out / name).write_text(text, encoding="utf-8")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    ids = np.arange(24).reshape(2, 12) * 5 % 50
    with torch.no_grad():
        wanted = theirs(input_ids=torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(full_logits(made, params, ids)[0], wanted, atol=1e-4, rtol=0)
    text = "hello w\u00f6rld\n"
    reader = transformers.AutoTokenizer.from_pretrained(out)
    assert reader(text)["input_ids"] == tokenizer.prompt(text) and reader.decode(tokenizer.encode(text)) == text


def test_a_run_that_was_trained_goes_to_transformers(tmp_path):
    """The commands of the documentation: train, export, logits; transformers reads the export and agrees, with its tokenizer too."""

    def command(*words):
        subprocess.run(
            [sys.executable, "-m", "jaxllm.run", *words], check=True, cwd=ROOT, capture_output=True, timeout=600
        )

    run, out, ids = tmp_path / "run", tmp_path / "out", np.arange(2 * 31, dtype=np.int32).reshape(2, 31) * 7 % 256
    command("+experiment=smoke", "train.steps=30", "optim.lr=3e-3", f"run_dir={run}")
    command("task=convert", f"source={run}", "format=hf", f"out={out}", "dtype=float32")
    np.save(tmp_path / "ids.npy", ids)
    command("task=logits", f"source={run}", f"tokens={tmp_path / 'ids.npy'}", f"out={tmp_path / 'logits.npy'}")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = theirs(input_ids=torch.tensor(ids)).logits.numpy()
    ours = np.load(tmp_path / "logits.npy")
    assert wanted.std() > 0.5, "training moved the logits"
    np.testing.assert_allclose(ours[..., : wanted.shape[-1]], wanted, atol=1e-4, rtol=0)


def test_experts_of_four_bits_are_what_transformers_reads():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(0)
    blocks, scales = rng.integers(0, 256, (2, 6, 4, 16), np.uint8), rng.integers(90, 160, (2, 6, 4), np.uint8)
    want = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32).numpy()
    for expert, expected in enumerate(want):
        np.testing.assert_array_equal(expand(blocks[expert], scales[expert]).T, expected)
