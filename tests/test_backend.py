"""Freed memory is kept: a repeated step of hundreds of MiB faults no page in again."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from jaxllm.backend import keep_freed_memory
kept = keep_freed_memory() if {keep} else False
import jax, jax.numpy as jnp
def step(x):  # tens of MiB of scratch
    y = jnp.sin(x)[:, None] * jnp.arange(32.0)
    return jnp.square(y @ jnp.sin(jnp.arange(1024.0)).reshape(32, 32)).sum()
call = jax.jit(step)
x = jnp.arange(2.0**20)
counts = []
for _ in range(8):  # the heap needs a few calls to find its shape
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    call(x).block_until_ready()
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(kept, min(counts[2:]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_a_repeated_step_faults_no_memory_in(root):
    def faults(keep):
        plain = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        out = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(keep=keep)],
            capture_output=True,
            text=True,
            check=True,
            cwd=root,
            env=plain,
            timeout=300,
        )
        kept, count = out.stdout.split()
        return kept == "True", int(count)

    kept, count = faults(True)
    if not kept:
        pytest.skip("the C library is not glibc, or MALLOC_* is set")
    assert count < 2000
    assert faults(False)[1] > 20000, "without it every step faults its scratch in again: the setting does something"
