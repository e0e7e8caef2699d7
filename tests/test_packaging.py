"""The wheel carries the yaml, and the pins name versions and no host."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile

import pytest


@pytest.fixture(scope="module")
def wheel(root, tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(root)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stdout + made.stderr
    return next(out.glob("jaxllm-*.whl"))


def test_the_wheel_holds_the_code_and_every_yaml(wheel, root):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for folder, prefix in (("jaxllm", ""), ("conf", "jaxllm/")):
        for file in (root / folder).rglob("*"):
            if file.suffix in (".py", ".yaml"):
                assert prefix + file.relative_to(root).as_posix() in names
    assert not [n for n in names if n.startswith(("tests/", "docs/", "conf/"))]


def test_an_installed_wheel_works_from_another_folder(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:  # what `pip install --no-deps --target` does, without the network
        archive.extractall(tmp_path / "site")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    where = "import jaxllm.config as c; print(c.CONF)"
    ran = subprocess.run([sys.executable, "-P", "-c", where], cwd=elsewhere, env=env, capture_output=True, text=True)
    assert ran.stdout.strip() == str(tmp_path / "site" / "jaxllm" / "conf"), ran.stderr
    command = [sys.executable, "-P", "-m", "jaxllm.run", "--cfg", "job", "+experiment=smoke"]
    ran = subprocess.run(command, cwd=elsewhere, env=env, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0 and "jaxllm.model.LanguageModel" in ran.stdout, ran.stderr
    command = [sys.executable, "-P", "-m", "jaxllm.run", "task=count", "model=tiny"]
    ran = subprocess.run(command, cwd=elsewhere, env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0 and '"task": "count"' in ran.stdout.splitlines()[-1], ran.stderr
    assert list(elsewhere.iterdir()) == []


def test_pins_are_name_version_and_marker(root):
    pin = re.compile(r"[a-z0-9][a-z0-9._-]*==[A-Za-z0-9.!+]+( ; [A-Za-z0-9_.'<>=! ()]+)?")
    lines = (root / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if not pin.fullmatch(line)] == []
    assert "jax==0.10.2 ; python_full_version < '3.12'" in lines
    assert any(re.fullmatch(r"jax==0\.12\.\S+ ; python_full_version >= '3\.12'", line) for line in lines)


def test_every_direct_dependency_is_pinned(root):
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + [d for extra in project["optional-dependencies"].values() for d in extra]
    names = {re.split(r"[\[<>=; ]", d)[0].lower().replace("_", "-") for d in wanted} - {"jaxllm"}
    pinned = {line.split("==")[0] for line in (root / "constraints.txt").read_text().splitlines()}
    assert names - pinned == set()
    assert "jax>=0.10,<0.13" in project["dependencies"]  # plain: an accelerator's plugin comes with an extra


def test_the_oldest_python_that_is_promised_is_the_oldest_that_is_set_up(root):
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11,<3.14"
    assert "VERSIONS=${PYTHON_VERSION:-3.13 3.12 3.11}" in (root / "scripts" / "setup.sh").read_text()


def test_the_landing_check_is_the_newcomers_command(root):
    lines = (root / ".ci" / "run").read_text().splitlines()
    assert "make test" in lines and os.access(root / ".ci" / "run", os.X_OK)
