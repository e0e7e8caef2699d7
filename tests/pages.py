"""What tests of pages share: made-up run folders, a reader of HTML, and a browser where there is one."""

import functools
import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml

from jaxllm.compose import compose
from jaxllm.config import set_key

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NODE = shutil.which("node")
VOID = {"meta", "img", "br", "hr", "input", "link"}


class Page(html.parser.HTMLParser):
    """tags: (name, attributes); shown: the text outside style and script. Refuses tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.shown, self._open = "", []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if "style" not in self._open and "script" not in self._open:
            self.shown += data

    def all(self, tag: str) -> list[dict]:
        return [attrs for name, attrs in self.tags if name == tag]


def check_self_contained(text: str) -> Page:
    """Nothing of the page lies elsewhere, whatever could run has been allowed, every picture has words."""
    page = Page(text)
    assert not re.search(r"""(?:src|srcset|@import|url\()\s*=?\s*["']?(?:https?:)?//""", text)
    assert not page.all("link") and not page.all("iframe")
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "script-src" in policy or not page.all("script")
    assert any(a.get("name") == "viewport" for a in page.all("meta"))
    assert "prefers-color-scheme:dark" in text
    assert all(len(a["alt"]) > 3 for a in page.all("img"))
    pictures = [a for a in page.all("svg") if "role" in a]
    assert all(a["role"] == "img" and len(a["aria-label"]) > 20 for a in pictures)
    assert not re.search(r"\bNaN\b|nan nan|Infinity", re.sub(r"<script>.*?</script>", "", text, flags=re.S))
    return page


@functools.cache
def composed(*choices: str):
    return compose(["+experiment=smoke", *choices])


def fake_run(
    folder: Path, *overrides: str, end: float = 2.0, speed: float = 1000.0, steps: int = 40, ended=True, **more
) -> Path:
    """A run folder as training leaves it, without training."""
    folder.mkdir(parents=True)
    values = {key: yaml.safe_load(value) for key, value in (text.split("=") for text in overrides if "@" not in text)}
    tree = composed(*(text for text in overrides if "@" in text)).to_dict()
    for key, value in values.items():
        set_key(tree, key, value)
    (folder / "config.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    rng = np.random.default_rng(0)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            loss = end + 3 * 0.9**step + 0.01 * rng.standard_normal()
            row = {
                "step": step,
                "time": 0.0,
                "train/loss": loss,
                "train/tokens_per_s": speed,
                "train/lr": 1e-3,
                "train/grad_norm": 1.0,
            }
            if step % 10 == 0:
                row |= {"val/loss": loss + 0.1, "val/bpb": loss / 2}
            file.write(json.dumps(row) + "\n")
    if ended:
        result = {
            "task": "train",
            "loss": end,
            "val_loss": end + 0.1,
            "val_bpb": end / 2,
            "tokens_per_s": speed,
            "steps": steps,
            "seconds": 1.0,
        }
        (folder / "result.json").write_text(json.dumps(result | more))
    return folder


def chromium(*arguments: str, folder: Path) -> str:
    """What a headless browser prints, or a skip that says why."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
    ]
    done = subprocess.run([CHROMIUM, *flags, *arguments], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def seen(page: Path, folder: Path, *flags: str, width: int = 390, dark: bool = False) -> dict:
    """What a browser of that width makes of a page: widths, colours, errors of scripts. Of a copy that may run the probe."""
    text = page.read_text()
    probe = (
        "<script>window.onerror=m=>{(window.bad=window.bad||[]).push(m)};window.onload=()=>{const s=getComputedStyle(document.body),"
        "r=e=>e.getBoundingClientRect();document.title=JSON.stringify({scroll:document.documentElement.scrollWidth,width:innerWidth,"
        "ink:s.color,paper:s.backgroundColor,bad:window.bad||[],pictures:[...document.querySelectorAll('figure>svg')].map(e=>r(e).width),"
        "outside:[...document.querySelectorAll('figure>svg text')].filter(t=>{const b=r(t),p=r(t.closest('figure>svg'));"
        "return p.width&&(b.left<p.left-2||b.right>p.right+2)}).map(t=>t.textContent)})}</script>"
    )
    copy = folder / "probed.html"
    head, rest = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text).split("</head>", 1)
    copy.write_text(f"{head}{probe}</head>{rest}")
    look = ["--blink-settings=preferredColorScheme=0"] if dark else []
    dom = chromium(
        *look,
        *flags,
        f"--window-size={width},900",
        "--virtual-time-budget=3000",
        "--dump-dom",
        copy.as_uri(),
        folder=folder,
    )
    title = re.search(r"<title>(.*?)</title>", dom, re.S)
    assert title is not None
    return json.loads(html.unescape(title[1]))
