"""Small reference models and what transformers computes with them, for tests that need neither torch nor transformers.

    python tests/golden/make_golden.py [NAME ...]        (Python 3.11 with torch, transformers and safetensors; a minute on a CPU)

For each entry of MODELS a folder beside this file:

    config.json, model.safetensors   as `save_pretrained` writes them (a variant of rotary settings alone shares the weights of `llama`)
    reference.safetensors            input_ids [b t], logits [b t v], hidden_<i> [b t d] (0 = embeddings, last = after the final norm),
                                     greedy [b n] after the first PROMPT tokens, left_ids, left_mask [b t] and left_logits [b t v]
    reference.json                   loss, norms of gradients by tensor of the file, bf16_max_abs and bf16_median_abs (how far
                                     transformers' own bfloat16 is: the worst logit of all tokens, and of a middling token),
                                     margin (of models with experts: the least distance between the last score that a router took
                                     and the first that it left, over all tokens that were run)

Every parameter is drawn anew, because the usual initial values (0.02, ones, zeros) leave a small model almost linear, and a wrong mask,
rotation or router within any tolerance. Seeds are such that no token is close to another choice of experts.
"""

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

HERE = Path(__file__).resolve().parent
SEED, VOCAB, ROWS, LENGTH, PROMPT, NEW, LEFT = 7, 64, 2, 24, 8, 16, 9
# Of models for which SEED brings a token close to another choice of experts.
SEEDS = dict(deepseek_v32=8, mixtral=12, qwen2_moe=9, qwen3_moe=13, deepseek_v2_groups=15, kimi_linear=9, qwen3_next=9)
MARGIN = 3e-4

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
EXPERTS = dict(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=8)
INDEXER = dict(index_topk=5, index_n_heads=16, index_head_dim=8)  # so many heads, that no score is 0 and none ties
DEEPSEEK = dict(**MLA, **EXPERTS, first_k_dense_replace=1)


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
    "mixtral": ("mixtral", dict(intermediate_size=16, num_local_experts=4, num_experts_per_tok=2)),
    "qwen2_moe": ("qwen2_moe", dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=12, decoder_sparse_step=2,
                                    shared_expert_intermediate_size=20, use_sliding_window=True, sliding_window=6, max_window_layers=1)),
    "qwen3_moe": ("qwen3_moe", dict(head_dim=12, intermediate_size=40, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=8,
                                    norm_topk_prob=True, mlp_only_layers=[0])),
    "gpt_oss": ("gpt_oss", dict(
        head_dim=12, sliding_window=5, intermediate_size=12, num_local_experts=4, num_experts_per_tok=2, swiglu_limit=0.9, **rope(
            "yarn", factor=4.0, truncate=False, original_max_position_embeddings=16, rope_theta=500.0))),
    "deepseek_v2": ("deepseek_v2", dict(
        **DEEPSEEK, q_lora_rank=None, intermediate_size=40, n_shared_experts=2, topk_method="greedy", routed_scaling_factor=1.5)),
    "deepseek_v2_groups": ("deepseek_v2", dict(
        **DEEPSEEK, q_lora_rank=10, n_shared_experts=1, topk_method="group_limited_greedy", n_group=4, topk_group=2,
        routed_scaling_factor=4.0)),
    "deepseek_v3": ("deepseek_v3", dict(
        **DEEPSEEK, q_lora_rank=10, n_shared_experts=1, n_group=4, topk_group=2, num_mtp_layers=0, **rope(
            "yarn", factor=4.0, mscale=0.707, mscale_all_dim=1.0, original_max_position_embeddings=16, rope_theta=500.0))),
    "deepseek_v32": ("deepseek_v32", dict(
        **DEEPSEEK, **INDEXER, q_lora_rank=10, n_shared_experts=1, n_group=4, topk_group=2, num_hidden_layers=2)),
    "deepseek_v4": ("deepseek_v4", dict(
        **EXPERTS, intermediate_size=8, num_hidden_layers=4, num_key_value_heads=1, head_dim=12, qk_rope_head_dim=4, q_lora_rank=10,
        n_shared_experts=1,
        sliding_window=5, o_groups=2, o_lora_rank=6, index_topk=2, index_n_heads=16, index_head_dim=8,
        hc_mult=2, num_nextn_predict_layers=0, routed_scaling_factor=1.3, swiglu_limit=0.9,
        layer_types=["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention", "compressed_sparse_attention"],
        compress_rates=dict(compressed_sparse_attention=4, heavily_compressed_attention=6),
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
        **rope("yarn", factor=4.0, original_max_position_embeddings=16))),
    "glm_moe_dsa": ("glm_moe_dsa", dict(
        **DEEPSEEK, **INDEXER, q_lora_rank=10, n_shared_experts=1, n_group=1, topk_group=1, num_hidden_layers=4,
        indexer_types=["full", "shared", "shared", "full"], mlp_layer_types=["dense", "sparse", "dense", "sparse"])),
    "mimo_v2_flash": ("mimo_v2_flash", dict(
        **EXPERTS, head_dim=12, v_head_dim=6, sliding_window=6, num_key_value_heads=1, routed_scaling_factor=1.3,
        layer_types=["full_attention", "sliding_attention"])),
    "kimi_linear": ("kimi_linear", dict(
        **MLA, q_lora_rank=None, num_experts=6, num_experts_per_token=3, num_shared_experts=1, moe_intermediate_size=8,
        routed_scaling_factor=1.7, linear_head_dim=8, linear_num_heads=3, linear_conv_kernel_dim=4,
        layer_types=["linear_attention", "full_attention"], mlp_layer_types=["dense", "sparse"])),
    "qwen3_next": ("qwen3_next", dict(
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
        shared_expert_intermediate_size=12,
        linear_key_head_dim=8, linear_value_head_dim=6, linear_num_key_heads=2, linear_num_value_heads=4, linear_conv_kernel_dim=4,
        layer_types=["linear_attention", "full_attention"])),
}  # fmt: skip


def draw(model: torch.nn.Module, seed: int) -> None:
    """Values under which every parameter shows in the logits, rounded to 12 bits so that files are the same everywhere."""
    generator = torch.Generator().manual_seed(seed)
    seen = set()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.data_ptr() in seen:
                continue
            seen.add(p.data_ptr())
            noise = torch.randn(p.shape, generator=generator)
            if name.endswith("A_log"):  # decays near 0.9: with the usual values a state is gone after each token
                value = math.log(0.1) + 0.5 * noise
            elif "embed" in name or "wte" in name or "wpe" in name:
                value = 0.6 * noise
            elif p.ndim >= 2:
                value = noise * (1.3 / math.sqrt(p.shape[0] if ".c_" in name else p.shape[-1]))
            elif name.endswith("weight"):  # norms: about what they are at the start, 0 or 1
                value = p + 0.25 * noise
            else:
                value = 0.3 * noise
            p.copy_((value * 4096).round() / 4096)
        kept = model.state_dict()
        for name, buffer in model.named_buffers():  # biases that only choose experts, tables that choose by token
            if name.endswith("tid2eid"):
                count = model.config.n_routed_experts
                buffer.copy_(torch.rand(len(buffer), count, generator=generator).argsort(-1)[:, : buffer.shape[1]])
            elif name in kept:
                buffer.copy_((0.2 * torch.randn(buffer.shape, generator=generator) * 4096).round() / 4096)


def config(kind: str, settings: dict):
    shared = {} if kind == "gpt2" else SHARED
    made = AutoConfig.for_model(kind, **{**shared, **settings})
    made._attn_implementation = "eager"
    return made


def build(cfg, dtype=torch.float32):
    plain = dict(attn_implementation="eager", experts_implementation="eager")
    return AutoModelForCausalLM.from_config(cfg, dtype=dtype, **plain).eval()


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(SEED + 1))


@contextmanager
def margins() -> Iterator[list[float]]:
    """Collects, of every choice of some of several scores, the distance between the last taken and the first left."""
    seen: list[float] = []
    choose = torch.topk

    def watched(scores: torch.Tensor, k: int, *args, **kwargs):
        if k < scores.shape[-1]:
            best = choose(scores.detach(), k + 1, dim=-1).values
            gaps = best[..., k - 1] - best[..., k]
            seen.append(gaps[gaps.isfinite() & (best[..., k] > -1e30)].min().item())
        return choose(scores, k, *args, **kwargs)

    torch.topk = watched
    try:
        yield seen
    finally:
        torch.topk = choose


@torch.no_grad()
def greedy(model, ids: torch.Tensor) -> torch.Tensor:
    for _ in range(NEW):
        ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids[:, PROMPT:]


@torch.no_grad()
def left_padded(model, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The second row loses LEFT tokens, its first wherever the class can do that; their places are padding."""
    mask = torch.ones_like(ids)
    if model.config.model_type == "deepseek_v4":  # its windows count padding on the left as tokens
        mask[1, -LEFT:] = 0
    else:
        mask[1, :LEFT] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = ids * mask
    logits = model(input_ids=padded, attention_mask=mask, position_ids=positions, use_cache=False).logits
    return {"left_ids": padded, "left_mask": mask, "left_logits": logits}


def reference(model, ids: torch.Tensor) -> tuple[dict, dict]:
    with margins() as seen:
        with torch.no_grad():
            out = model(input_ids=ids, use_cache=False, output_hidden_states=True)
        arrays = {
            "input_ids": ids,
            "logits": out.logits,
            "greedy": greedy(model, ids[:, :PROMPT]),
            **left_padded(model, ids),
        }
    arrays |= {f"hidden_{i}": h.mean(2) if h.ndim == 4 else h for i, h in enumerate(out.hidden_states)}
    logits = model(input_ids=ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1))
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norms = {name: grad.norm().item() for name, grad in revert_weight_conversion(model, grads).items()}
    half = build(model.config, torch.bfloat16)
    half.load_state_dict(model.state_dict())
    with torch.no_grad():
        off = (half(input_ids=ids, use_cache=False).logits.float() - out.logits).abs().amax(-1).flatten()
    facts = {
        "loss": loss.item(),
        "gradient_norms": norms,
        "bf16_max_abs": off.max().item(),
        "bf16_median_abs": off.quantile(0.5).item(),
    }
    return arrays, facts | ({"margin": min(seen)} if seen else {})


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
    weights, settings = settings.get("weights"), {k: v for k, v in settings.items() if k != "weights"}
    seed = SEEDS.get(name, SEED)
    torch.manual_seed(seed)
    model = build(config(kind, settings))
    draw(model, seed)
    arrays, facts = reference(model, tokens())
    if facts.get("margin", math.inf) < MARGIN:
        print(f"{name}: seed {seed}: margin {facts['margin']:.1e} is too small; give it another in SEEDS")
    save(name, model, arrays, facts, weights)


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or MODELS:
        whole_model(name)


if __name__ == "__main__":
    main()
