"""Continuous batching of transformers on random weights of SmolLM2-135M's shape, driven line by line by `peers.py`.

Needs torch and transformers >= 5, and nothing of jaxllm. One JSON line in, `{"jobs": [[prompt ids, new tokens], ..]}`, one out:
`{"seconds", "new_tokens", "ttft_p50"}`.
"""

import argparse
import json
import statistics
import sys
import time

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig


def model_of(layers: int, attention: str) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        rope_theta=100000.0,
        tie_word_embeddings=True,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def ride(manager, jobs: list) -> dict[str, float]:
    start = time.monotonic()
    ids = [manager.add_request(prompt, max_new_tokens=new, record_timestamps=True) for prompt, new in jobs]
    left, first, new = set(ids), [], 0
    while left:
        result = manager.get_result(timeout=0.05)
        if result is None or not result.is_finished():
            continue
        if result.error is not None:
            raise RuntimeError(result.error)
        left.discard(result.request_id)
        new += len(result.generated_tokens)
        if result.timestamps:
            first.append(result.timestamps[0] - result.created_time)
    seconds = time.monotonic() - start
    return {"seconds": seconds, "new_tokens": new, "ttft_p50": statistics.median(first) if first else float("nan")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--pages", type=int, default=384)
    parser.add_argument("--step-tokens", type=int, default=264)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--attention", default="sdpa")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = model_of(args.layers, args.attention)
    config = ContinuousBatchingConfig(
        page_size=args.page,
        num_blocks=args.pages,
        max_batch_tokens=args.step_tokens,
        max_requests_per_batch=args.rows,
        use_cuda_graph=False,
        allow_block_sharing=False,  # or the next round finds the prompts of this one
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    with (
        torch.inference_mode(),
        model.continuous_batching_context_manager(greedy, continuous_batching_config=config, warmup=False) as manager,
    ):
        for line in sys.stdin:
            print(json.dumps(ride(manager, json.loads(line)["jobs"])), flush=True)


if __name__ == "__main__":
    main()
