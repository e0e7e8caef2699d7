"""What is settled before JAX runs: freed memory is kept, harmless tracebacks stay off stderr."""

import os
import subprocess
import sys
import types

import pytest

from jaxllm import backend

PROGRAM = """
import ctypes, resource, threading
from jaxllm.backend import keep_freed_memory
kept = keep_freed_memory() if {keep} else False
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
counts = []
def step():  # as XLA does on its own threads: scratch space for a step, written, given back
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(2**28)
    libc.memset(block, 1, 2**28)
    libc.free(block)
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
for _ in range(4):
    worker = threading.Thread(target=step)
    worker.start()
    worker.join()
print(kept, counts[-1])
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


def test_late_callbacks_of_a_closed_loop_are_quiet_and_others_are_not(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: seen.append(str(unraisable.exc_value)))
    backend.quiet_late_callbacks()
    backend.quiet_late_callbacks()  # twice is once
    for text in ("Event loop is closed", "something else"):
        sys.unraisablehook(types.SimpleNamespace(exc_value=RuntimeError(text)))
    assert seen == ["something else"]
