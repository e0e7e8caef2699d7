#!/bin/sh
# Everything that only an accelerator can tell, in one command of less than eight minutes:
#
#     sh scripts/gpu_check.sh [OUT]        OUT: a new folder, gpu_check-DATE-TIME by default
#
# Kernels against their naive twins, products and branches of the hardware, a timing sweep over every kind of mixer, and a short
# training. Each part has its own limit; one that fails or runs over it is said so, and the others go on. The last line of stdout, and
# OUT/gpu_check.json, hold all of it. Exit code 0: every part ran and every kernel agreed; 3: there is no accelerator here.
#
# PYTHON names the interpreter (default: .venv/bin/python, else python). GPU_CHECK_SMALL=1 tries the script itself on a CPU.
set -u
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then PYTHON=python; [ -x .venv/bin/python ] && PYTHON=.venv/bin/python; fi
OUT=${1:-gpu_check-$(date +%Y%m%d-%H%M%S)}
SMALL=${GPU_CHECK_SMALL:-}
export WANDB_MODE=offline

if [ -z "$SMALL" ] && ! timeout 60 "$PYTHON" -c 'import sys, jax; sys.exit(jax.default_backend() == "cpu")' 2>/dev/null; then
    echo "gpu_check: JAX finds no accelerator here (see the extras gpu and tpu of pyproject.toml); nothing was run" >&2
    exit 3
fi
mkdir "$OUT" || exit 2

# part NAME SECONDS COMMAND...: its stdout is OUT/NAME.out, its stderr OUT/NAME.err, its exit code and seconds OUT/NAME.part
part() {
    name=$1 limit=$2
    shift 2
    echo "gpu_check: $name, at most $limit s" >&2
    start=$(date +%s)
    timeout -k 5 "$limit" "$@" >"$OUT/$name.out" 2>"$OUT/$name.err"
    code=$?
    echo "$code $(($(date +%s) - start))" >"$OUT/$name.part"
    [ $code -eq 0 ] || echo "gpu_check: $name ended with $code, see $OUT/$name.err" >&2
}

run() {
    name=$1 limit=$2
    shift 2
    part "$name" "$limit" "$PYTHON" -m jaxllm.run "$@" track=none run_dir="$OUT/$name"
}

if [ -z "$SMALL" ]; then
    part parity 100 "$PYTHON" -m jaxllm.measure.parity
    run hardware 60 +experiment=time_hardware time.sizes='[512,1024,2048,4096,8192]'
    run timing 150 +experiment=time_gpu
    run training 100 model=llama_24m data=synthetic mesh=single train.steps=60 train.batch_size=32 train.seq_len=512 \
        train.eval_every=0 train.save_every=0 train.sample_tokens=0 train.eval_batches=1
else
    part parity 300 "$PYTHON" -m jaxllm.measure.parity --small
    run hardware 300 +experiment=time_hardware time.sizes='[16,32]' time.repeats=2
    run timing 300 +experiment=time_gpu scale=1 model=tiny model.vocab_size=64 model.d_model=32 time.context=16 time.batch=1 \
        time.dtype=float32 time.repeats=2
    run training 300 model=tiny data=synthetic data.documents=60 mesh=single train.steps=3 train.batch_size=4 train.seq_len=32 \
        train.eval_every=0 train.save_every=0 train.sample_tokens=0 train.eval_batches=1
fi
"$PYTHON" scripts/gpu_report.py "$OUT"
