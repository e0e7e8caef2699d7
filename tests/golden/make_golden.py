"""Small reference models and what transformers computes with them, for tests that need neither torch nor transformers.

    python tests/golden/make_golden.py [NAME ...]        (Python 3.11 with torch, transformers and safetensors; a minute on a CPU)

For each entry of MODELS a folder beside this file:

    config.json, model.safetensors   as `save_pretrained` writes them (a variant of rotary settings alone shares the weights of `llama`)
    reference.safetensors            input_ids [b t], logits [b t v], hidden_<i> [b t d] (0 = embeddings, last = after the final norm),
                                     greedy [b n] after the first PROMPT tokens, left_ids, left_mask [b t] and left_logits [b t v]
    reference.json                   loss, norms of gradients by parameter, bf16_max_abs (how far transformers' own bfloat16 is)

and for each of ATTENTION the same without a model around it: x, and the output of each layer's attention.

Every parameter is drawn anew, because the usual initial values (0.02, ones, zeros) leave a small model almost linear, and a wrong mask
or rotation within any tolerance.
"""

import json
import math
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
SEED, VOCAB, ROWS, LENGTH, PROMPT, NEW, LEFT = 7, 64, 2, 24, 8, 16, 9

SHARED = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
MLA = dict(num_key_value_heads=4, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
EXPERTS = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)


def rope(kind: str, **keys) -> dict:
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=keys.pop("rope_theta", 10000.0), **keys))


# name -> (model_type, settings); "weights" names the folder whose tensors are used.
MODELS = {
    "gpt2": ("gpt2", dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=None,
                          resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)),
    "llama": ("llama", dict(head_dim=12)),
    "llama_linear": ("llama", dict(weights="llama", head_dim=12, **rope("linear", factor=4.0))),
    "llama_dynamic": ("llama", dict(weights="llama", head_dim=12, max_position_embeddings=16, **rope("dynamic", factor=4.0))),
    "llama_llama3": ("llama", dict(weights="llama", head_dim=12, **rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16))),
    "llama_yarn": ("llama", dict(weights="llama", head_dim=12, **rope(
        "yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=500.0))),
    "llama_longrope": ("llama", dict(weights="llama", head_dim=12, **rope(
        "longrope", short_factor=[1.0, 1.1, 1.2, 1.4, 1.7, 2.0], long_factor=[1.0, 1.5, 2.0, 3.0, 5.0, 8.0],
        original_max_position_embeddings=16))),
    "llama_bias_tied": ("llama", dict(num_key_value_heads=4, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    "mistral": ("mistral", dict(sliding_window=5)),
    "smollm3": ("smollm3", dict(num_hidden_layers=4, no_rope_layer_interval=2, tie_word_embeddings=True)),
    "granite": ("granite", dict(embedding_multiplier=3.0, logits_scaling=1.7, residual_multiplier=0.6, attention_multiplier=0.2)),
    "olmo2": ("olmo2", dict()),
    "qwen2": ("qwen2", dict(use_sliding_window=True, sliding_window=6, max_window_layers=1, tie_word_embeddings=True)),
    "qwen3": ("qwen3", dict(head_dim=12, tie_word_embeddings=True)),
    "gemma2": ("gemma2", dict(head_dim=12, query_pre_attn_scalar=20, sliding_window=6,
                              attn_logit_softcapping=4.0, final_logit_softcapping=6.0)),
    "nanochat": ("nanochat", dict(final_logit_softcapping=5.0)),
    "deepseek_v2": ("deepseek_v2", dict(**MLA, **EXPERTS, q_lora_rank=None, first_k_dense_replace=2)),
    "deepseek_v3": ("deepseek_v3", dict(**MLA, **EXPERTS, q_lora_rank=10, first_k_dense_replace=2, num_mtp_layers=0, **rope(
        "yarn", factor=4.0, mscale=0.707, mscale_all_dim=1.0, original_max_position_embeddings=16, rope_theta=500.0))),
    "mimo_v2_flash": ("mimo_v2_flash", dict(
        **EXPERTS, head_dim=12, v_head_dim=6, sliding_window=6, mlp_layer_types=["dense"] * 2, num_key_value_heads=1,
        layer_types=["full_attention", "sliding_attention"])),
}  # fmt: skip
ATTENTION = {
    "gpt_oss": ("gpt_oss", dict(
        num_hidden_layers=2, head_dim=12, sliding_window=5, num_local_experts=2, num_experts_per_tok=1, **rope(
            "yarn", factor=4.0, truncate=False, original_max_position_embeddings=16, rope_theta=500.0))),
}  # fmt: skip


def draw(model: torch.nn.Module) -> None:
    """Values under which every parameter shows in the logits, rounded to 12 bits so that files are the same everywhere."""
    generator = torch.Generator().manual_seed(SEED)
    seen = set()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.data_ptr() in seen:
                continue
            seen.add(p.data_ptr())
            noise = torch.randn(p.shape, generator=generator)
            if "embed" in name or "wte" in name or "wpe" in name:
                value = 0.6 * noise
            elif p.ndim >= 2:
                value = noise * (1.3 / math.sqrt(p.shape[0] if ".c_" in name else p.shape[-1]))
            elif name.endswith("weight"):  # norms: about what they are at the start, 0 or 1
                value = p + 0.25 * noise
            else:
                value = 0.3 * noise
            p.copy_((value * 4096).round() / 4096)


def config(kind: str, settings: dict):
    shared = {} if kind == "gpt2" else SHARED
    made = AutoConfig.for_model(kind, **{**shared, **settings})
    made._attn_implementation = "eager"
    return made


def build(cfg, dtype=torch.float32):
    return AutoModelForCausalLM.from_config(cfg, dtype=dtype, attn_implementation="eager").eval()


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(SEED + 1))


@torch.no_grad()
def greedy(model, ids: torch.Tensor) -> torch.Tensor:
    for _ in range(NEW):
        ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids[:, PROMPT:]


@torch.no_grad()
def left_padded(model, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The second row loses its first LEFT tokens; their places are padding."""
    mask = torch.ones_like(ids)
    mask[1, :LEFT] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = ids * mask
    logits = model(input_ids=padded, attention_mask=mask, position_ids=positions, use_cache=False).logits
    return {"left_ids": padded, "left_mask": mask, "left_logits": logits}


def reference(model, ids: torch.Tensor) -> tuple[dict, dict]:
    with torch.no_grad():
        out = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    arrays = {
        "input_ids": ids,
        "logits": out.logits,
        "greedy": greedy(model, ids[:, :PROMPT]),
        **left_padded(model, ids),
    }
    arrays |= {f"hidden_{i}": h for i, h in enumerate(out.hidden_states)}
    logits = model(input_ids=ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1))
    loss.backward()
    norms = {name: p.grad.norm().item() for name, p in model.named_parameters() if p.grad is not None}
    half = build(model.config, torch.bfloat16)
    half.load_state_dict({name: value.to(torch.bfloat16) for name, value in model.state_dict().items()})
    with torch.no_grad():
        off = (half(input_ids=ids, use_cache=False).logits.float() - out.logits).abs().max().item()
    return arrays, {"loss": loss.item(), "gradient_norms": norms, "bf16_max_abs": off}


def save(name: str, model, arrays: dict, facts: dict, weights: str | None) -> None:
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    if weights is None:
        model.save_pretrained(folder)
    else:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        facts = {"weights": weights, **facts}
    (folder / "generation_config.json").unlink(missing_ok=True)
    whole = {
        key: value.detach().to(torch.int32 if value.dtype == torch.int64 else value.dtype).contiguous()
        for key, value in arrays.items()
    }
    save_file(whole, folder / "reference.safetensors")
    (folder / "reference.json").write_text(json.dumps(facts, indent=1) + "\n")
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{name}: {size / 1000:.0f} kB", {k: v for k, v in facts.items() if k in ("loss", "bf16_max_abs")})


def whole_model(name: str) -> None:
    kind, settings = MODELS[name]
    weights = settings.pop("weights", None)
    torch.manual_seed(SEED)
    model = build(config(kind, settings))
    draw(model)
    save(name, model, *reference(model, tokens()), weights)


def attention_alone(name: str) -> None:
    """The attention of each layer, on inputs of its own."""
    kind, settings = ATTENTION[name]
    model = build(config(kind, settings))
    draw(model)
    x = torch.randn(ROWS, LENGTH, model.config.hidden_size, generator=torch.Generator().manual_seed(SEED + 2))
    kept = {key: value for key, value in model.state_dict().items() if "self_attn" in key}
    arrays = {"x": x}
    positions = torch.arange(LENGTH)[None]
    with torch.no_grad():
        angles = model.model.rotary_emb(x, positions)
        for i, layer in enumerate(model.model.layers):
            back = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None]
            window = model.config.sliding_window if layer.self_attn.sliding_window else LENGTH
            mask = torch.where((back >= 0) & (back < window), 0.0, torch.finfo(torch.float32).min)[None, None]
            arrays[f"y_{i}"] = layer.self_attn(x, position_embeddings=angles, attention_mask=mask)[0]
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    save_file(
        {key: value.contiguous() for key, value in kept.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    save_file({key: value.contiguous() for key, value in arrays.items()}, folder / "reference.safetensors")
    print(f"{name}: {sum(file.stat().st_size for file in folder.iterdir()) / 1000:.0f} kB")


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or [*MODELS, *ATTENTION]:
        whole_model(name) if name in MODELS else attention_alone(name)


if __name__ == "__main__":
    main()
