"""One JSON of what `scripts/gpu_check.sh` left in its folder: `gpu_check.json`, and the last line of stdout.

Exit code 1: something failed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PARTS = ("parity", "hardware", "timing", "training")
TIMED_OUT = (124, 137)


def collect(folder: Path) -> dict[str, Any]:
    """`ok`, `seconds`, and for each part: its state (ok, failed, timed out, never run), its seconds and its result.

    A timing gives its rows too, also one that was cut short.
    """
    found: dict[str, Any] = {name: _part(folder, name) for name in PARTS}
    for name in ("hardware", "timing"):
        rows = folder / name / "time.jsonl"
        if rows.is_file():
            found[name]["rows"] = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    agreed = found["parity"].get("result", {}).get("ok") is True
    return {
        "ok": agreed and all(part["state"] == "ok" for part in found.values()),
        "seconds": sum(part["seconds"] for part in found.values()),
        **found,
    }


def _part(folder: Path, name: str) -> dict[str, Any]:
    try:
        code, seconds = map(int, (folder / f"{name}.part").read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return {"state": "never run", "seconds": 0}
    part: dict[str, Any] = {
        "state": "ok" if code == 0 else "timed out" if code in TIMED_OUT else "failed",
        "seconds": seconds,
    }
    lines = (folder / f"{name}.out").read_text(encoding="utf-8").splitlines()
    try:
        part["result"] = json.loads(lines[-1])
    except (IndexError, ValueError):
        part["error"] = (folder / f"{name}.err").read_text(encoding="utf-8", errors="replace").strip()[-500:]
    return part


def main() -> int:
    folder = Path(sys.argv[1])
    result = collect(folder)
    line = json.dumps(result)
    (folder / "gpu_check.json").write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
