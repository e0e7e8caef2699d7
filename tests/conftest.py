"""What every test runs under: the CPU as 8 devices, no network, nothing of the user's home touched.

The process has 8 CPU devices (`jax.devices()`); arrays live on the first unless a test builds a mesh. Commands started
in other processes see one device, unless they are given `cpu_devices=8`. Compiled programs are kept in `.cache/` of the
checkout, which makes the second run of the suite much faster; token caches live in a folder that goes with the session.
"""

import os
import shutil
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOME = tempfile.mkdtemp(prefix="jaxllm-tests-")
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"
os.environ["XDG_CACHE_HOME"] = HOME
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "compiled"))
# Tests compile a thousand tiny programs and run each for a moment: LLVM's optimiser only costs. What tests read of a compiled
# program (its HLO, its buffers) is settled before that. A device count in the user's XLA_FLAGS would clash with ours.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
# Two dozen processes are started: without bytecode each would compile every module of the project that it imports.
for name in ("WANDB_API_KEY", "HYDRA_FULL_ERROR", "PYTHONDONTWRITEBYTECODE"):
    os.environ.pop(name, None)

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

from jaxllm.backend import prepare  # noqa: E402
from jaxllm.config import Common  # noqa: E402

prepare(Common(cpu_devices=8))
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("suite")


def pytest_sessionfinish(session: pytest.Session) -> None:
    shutil.rmtree(HOME, ignore_errors=True)


@pytest.fixture(scope="session")
def devices():
    """The 8 CPU devices."""
    assert len(jax.devices()) == 8
    return jax.devices()


@pytest.fixture(scope="session")
def root():
    """The checkout."""
    return ROOT
