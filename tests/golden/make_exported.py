"""What transformers computes with a folder that this program exported: writes exported.safetensors beside this file.

    python tests/weights/test_exported.py FOLDER             (exports the model of the test; needs this program)
    python tests/golden/make_exported.py FOLDER              (needs the `parity` extra: torch, transformers, safetensors)

Beside the logits it keeps the tensors' sha256, so that the test knows that its export is the folder that was read here.
"""

import hashlib
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

OUT = Path(__file__).resolve().with_name("exported.safetensors")


def digest(folder: Path) -> str:
    """Of all tensors by name, whatever the shards."""
    total = hashlib.sha256()
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}
    for name in sorted(found):
        total.update(name.encode() + found[name].tobytes())
    return total.hexdigest()


def main() -> None:
    folder = Path(sys.argv[1])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.arange(48).reshape(2, 24) * 7 % model.config.vocab_size
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    facts = {"class": type(model).__name__, "sha256": digest(folder)}
    save_file({"input_ids": ids.to(torch.int32), "logits": logits.contiguous()}, OUT, metadata=facts)
    print(facts, list(logits.shape))


if __name__ == "__main__":
    main()
