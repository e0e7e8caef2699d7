"""The layer string: which mixer and which ffn each layer has, and what is scanned.

    linear/dense | 3* linear/moe*3 global/moe

Groups are separated by `|`. A group may start with `N*`: N scanned repeats of its period. An item is `mixer/ffn`, the names being
roles of the model's `mixers` and `ffns`; `*n` repeats the item inside the period. The string above has 1 + 3 x 4 = 13 layers.
"""

import dataclasses
import difflib
import re
from collections.abc import Iterable

from jaxllm.errors import UserError

_REPEATS = re.compile(r"^\s*(\d+)\s*\*\s*")
_ITEM = re.compile(r"^([A-Za-z_]\w*)/([A-Za-z_]\w*)(?:\*(\d+))?$")


@dataclasses.dataclass(frozen=True)
class Group:
    """`repeats` scanned copies of a period of (mixer role, ffn role) layers."""

    repeats: int
    period: tuple[tuple[str, str], ...]

    @property
    def layers(self) -> int:
        return self.repeats * len(self.period)


def parse(layers: str) -> tuple[Group, ...]:
    """The groups of a layer string. Raises `UserError` naming the part that cannot be read."""
    groups = []
    for part in str(layers).split("|"):
        head = _REPEATS.match(part)
        repeats = int(head.group(1)) if head else 1
        period: list[tuple[str, str]] = []
        for word in part[head.end() if head else 0 :].split():
            item = _ITEM.match(word)
            if not item:
                raise UserError(
                    f"model.layers: cannot read {word!r} in {layers!r}; an item is mixer/ffn or mixer/ffn*n, a group N* items"
                )
            period += [(item.group(1), item.group(2))] * int(item.group(3) or 1)
        if not period or repeats < 1:
            raise UserError(
                f"model.layers: group {part.strip()!r} of {layers!r} has no layers; write e.g. 12* global/dense"
            )
        groups.append(Group(repeats, tuple(period)))
    return tuple(groups)


def check_roles(groups: Iterable[Group], mixers: Iterable[str], ffns: Iterable[str], key: str = "model.layers") -> None:
    """Every role used must be defined. key: where they are used, for the message."""
    mixers, ffns = list(mixers), list(ffns)
    for group in groups:
        for pair in group.period:
            for role, known, part in zip(pair, (mixers, ffns), ("mixers", "ffns"), strict=True):
                if role not in known:
                    near = difflib.get_close_matches(role, known, n=1)
                    hint = f"; did you mean {near[0]!r}?" if near else ""
                    raise UserError(
                        f"{key}: role {role!r} is not in model.{part} (has {', '.join(known) or 'nothing'}){hint}"
                    )
