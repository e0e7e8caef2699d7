"""What a run says about where it ran."""

import json
import subprocess

import jax

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
