"""What a run says about where it ran, and the peak table behind MFU."""

import json
import subprocess

import jax
import pytest

from jaxllm.measure.chips import peak_flops
from jaxllm.measure.environment import environment, git_state, package_versions


def test_environment_is_json_and_names_the_versions():
    found = json.loads(json.dumps(environment()))
    assert found["versions"]["jax"] == jax.__version__ and found["versions"]["jaxllm"]
    assert found["device_kind"] == jax.devices()[0].device_kind and found["device_count"] == jax.device_count()
    assert package_versions(("no-such-distribution",)) == {"no-such-distribution": None}


def test_git_state_belongs_to_this_checkout_only(tmp_path):
    assert git_state(tmp_path) == (None, None)
    run = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    (tmp_path / "file").write_text("one")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-qm", "first"]):
        subprocess.run([*run, *command], check=True)
    commit, dirty = git_state(tmp_path)
    assert len(commit) == 40 and dirty is False
    (tmp_path / "file").write_text("two")
    assert git_state(tmp_path) == (commit, True)
    inside = tmp_path / "site-packages"
    inside.mkdir()
    assert git_state(inside) == (None, None), "an installed copy does not report the repository around it"


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", None),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12),
        ("TPU7x", 1153.5e12),
        ("cpu", None),
    ],
)
def test_peaks(kind, peak):
    assert peak_flops(kind) == peak


def test_this_device_has_the_peak_of_its_kind():
    assert peak_flops(jax.devices()[0]) == peak_flops(jax.devices()[0].device_kind)
