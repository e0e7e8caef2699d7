"""What devices say to each other in a compiled step: every collective of its program, how often, how many bytes, how long at link speed.

Read from the text of the optimised program, so it is what runs and not what was meant: XLA merges, moves and rewrites collectives. One
inside a loop (the scan over layers) counts as often as the loop turns, where XLA knows how often that is.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jaxllm.measure.roofline import ring_seconds

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
# One array of an HLO type: `f32[8,128]{1,0}`; a tuple holds several.
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_NAME = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_CALL = re.compile(r" = (.*?) (" + "|".join(KINDS) + r")(-start)?\(")
_TRIPS = re.compile(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)')
_INNER = re.compile(
    r"(?:condition|body|to_apply|calls|true_computation|false_computation)=(%?[\w.-]+)|branch_computations=\{([^}]*)\}"
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """kind: as XLA calls it. devices: of one group. bytes: of one device's array (the whole that is reduced, gathered or exchanged).
    count: how often in one call of the program, None where a loop's length is not known."""

    kind: str
    devices: int
    bytes: int
    count: int | None
    where: str = ""

    def seconds(self, link: float | None) -> float | None:
        """Of all of them, over a ring of links of so many bytes a second."""
        if link is None or self.count is None:
            return None
        return self.count * ring_seconds(self.kind, self.bytes, self.devices, link)


def collectives(hlo: str, devices: int) -> list[Collective]:
    """Those of a program's text (`compiled.as_text()`), alike ones together, the most bytes first. devices: of the whole program."""
    computations = dict(_computations(hlo))
    entry = next((name for name, (first, _) in computations.items() if first.startswith("ENTRY")), None)
    if entry is None:
        return []
    found: dict[tuple[str, int, int, str], int | None] = {}

    def walk(name: str, times: int | None) -> None:
        for line in computations.get(name, ("", []))[1]:
            made = _CALL.search(line)
            if made is not None:
                key = _read(line, made, devices)
                before = found.get(key, 0)
                found[key] = None if times is None or before is None else before + times
            inner = times
            if " while(" in line:
                trips = _TRIPS.search(line)
                inner = None if times is None or trips is None else times * int(trips[1])
            for one, several in _INNER.findall(line):
                for called in (one or several).split(","):
                    walk(called.strip().lstrip("%"), inner)

    walk(entry, 1)
    listed = [Collective(kind, n, size, count, where) for (kind, n, size, where), count in found.items()]
    return sorted((c for c in listed if c.devices > 1), key=lambda c: -c.bytes * (c.count or 1))


def _computations(hlo: str) -> Iterator[tuple[str, tuple[str, list[str]]]]:
    """(name, (its first line, its instructions)) of each computation of the program."""
    name: str | None = None
    head, lines = "", list[str]()
    for line in hlo.splitlines():
        start = _NAME.match(line.strip()) if line.rstrip().endswith("{") and " = " not in line.split("(")[0] else None
        if start is not None:
            name, head, lines = start[1], line.strip(), []
        elif line.strip() == "}" and name is not None:
            yield name, (head, lines)
            name = None
        elif name is not None:
            lines.append(line.strip())


def _read(line: str, made: re.Match[str], devices: int) -> tuple[str, int, int, str]:
    """(kind, devices of a group, bytes, where it comes from)."""
    result, kind, start = made[1], made[2], made[3]
    arrays = [
        math.prod(map(int, filter(None, shape.split(",")))) * _width(dtype) for dtype, shape in _ARRAY.findall(result)
    ]
    if start and kind != "all-reduce" and len(arrays) > 1:  # an asynchronous one returns (operands, results, ..)
        arrays = [max(arrays)]
    group = _group(line, devices)
    size = sum(arrays) * (group if kind == "reduce-scatter" else 1)
    name = re.search(r'op_name="([^"]*)"', line)
    return kind, group, size, _place("" if name is None else name[1])


def _width(dtype: str) -> int:
    if dtype == "pred":
        return 1
    bits = re.match(r"[a-z]+(\d+)", dtype)
    return 1 if bits is None else max(1, int(bits[1]) // 8)


def _group(line: str, devices: int) -> int:
    """Devices of one group: `{{0,1},{2,3}}`, `[4,2]<=[8]` or `mesh['data'=2,'tensor'=4] {'tensor'}`; none named = all."""
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line)
    if named is not None:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        return math.prod(sizes.get(axis, 1) for axis in re.findall(r"'(\w+)'", named[2]))
    tiled = re.search(r"replica_groups=\[([\d,]+)\]<=", line)
    if tiled is not None:
        return int(tiled[1].split(",")[-1])
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed is not None:
        return listed[1].count(",") + 1
    return devices


def _place(name: str) -> str:
    """`jit(step)/transpose(jvp(..))/g0/while/body/b0/mixer/..` -> `backward mixer`: which half of the step, and which part."""
    half = "backward" if "transpose(" in name else "forward" if "jvp(" in name else ""
    part = next((p for p in ("mixer", "ffn", "embed", "head", "final_norm") if re.search(rf"\b{p}\b", name)), "")
    return " ".join(filter(None, (half, part)))


def table(found: Sequence[Collective], link: float | None) -> list[str]:
    """One line each, and the sum."""
    lines = [("collective", "of", "where", "count", "bytes each", "bytes in all", "ms at link speed")]
    for c in found:
        seconds = c.seconds(link)
        lines.append(
            (
                c.kind,
                str(c.devices),
                c.where or "-",
                "n/a" if c.count is None else f"{c.count:,}",
                f"{c.bytes:,}",
                "n/a" if c.count is None else f"{c.bytes * c.count:,}",
                "n/a" if seconds is None else f"{1e3 * seconds:,.3g}",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(7)]
    return [
        "  ".join(c.ljust(w) if i in (0, 2) else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    ]


def rows(found: Sequence[Collective], link: float | None) -> list[dict[str, Any]]:
    """For the JSON line."""
    return [{**dataclasses.asdict(c), "seconds": c.seconds(link)} for c in found]
