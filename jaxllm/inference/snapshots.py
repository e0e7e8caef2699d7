"""Copies of states, so that a model with a memory of constant size (recurrent layers, rings of windows) can reuse a prefix too.

Keys of a prefix stay where they are, one page for so many tokens. A state is overwritten by every token and cannot be cut back, so what a
row remembers is copied at page borders of its prompt, into slots that lie behind those of the rows. A prefix is reused up to the last of
its pages that has such a copy; the copy becomes the state of the new row. There are few of them: the longest unused is overwritten.
"""

from collections import OrderedDict
from collections.abc import Iterable

from jaxllm.inference.blocks import Record


class Snapshots:
    """Slots `first .. first + count - 1` of the pools of states, by the record of the page that ends where the copy was made."""

    def __init__(self, count: int, first: int):
        self._all = range(first, first + count)
        self._free = list(reversed(self._all))
        self._slots: OrderedDict[Record, int] = OrderedDict()

    def __contains__(self, record: Record) -> bool:
        return record in self._slots

    def take(self, *, spare: bool = False) -> int | None:
        """A slot to copy into; None where all are promised to rows whose pages have no records yet. spare: only one that is free."""
        if self._free:
            return self._free.pop()
        if spare:
            return None
        return self._slots.popitem(last=False)[1] if self._slots else None

    def keep(self, record: Record, slot: int) -> None:
        """The copy in `slot` belongs to `record` from now on; a second copy of the same is one too many."""
        if record in self._slots:
            self._free.append(slot)
        else:
            self._slots[record] = slot

    def give_back(self, slot: int) -> None:
        """A slot that was taken and not kept."""
        self._free.append(slot)

    def use(self, record: Record) -> int:
        """The slot of its copy, which is the one used last from now on."""
        self._slots.move_to_end(record)
        return self._slots[record]

    def clear(self) -> None:
        """Nothing that was copied is worth anything. What is promised comes back by `give_back`."""
        self._free += self._slots.values()
        self._slots.clear()

    def check(self, promised: Iterable[int]) -> None:
        """Assert that every slot is free, kept or promised, and only one of these."""
        assert sorted([*self._free, *self._slots.values(), *promised]) == list(self._all), (
            "a snapshot is lost or held twice"
        )
