"""Places in the cache for sequences: tables of pages, reuse of prefixes, copies on write, and one slot a row for states of constant size.

A sequence's `Place` says where its tokens lie: `pages[i]` holds tokens `i size .. (i + 1) size - 1`, `slot` its state in the pools of
layers whose memory does not grow (recurrent states, rings). Tokens in `[0, computed)` are valid; nothing else is known of a place, so
prefill, chunk, decode, preemption and the reuse of a prefix are the same operations with other numbers.

Laws, which `check` asserts: a page with two holders is never written; a page can be found only when the keys of all its tokens have
been computed; reuse leaves at least one token of a prompt to compute, because its logits are needed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jaxllm.inference.blocks import BlockPool, Identity, Record
from jaxllm.inference.snapshots import Snapshots


@dataclass(eq=False)
class Place:
    """Where one sequence's cache lies. `records`: of its first full pages, those that are computed and findable. `start`: the snapshot that
    its state begins from. `copied`: snapshots of its own whose pages have no record yet, (tokens, slot)."""

    identity: Identity
    slot: int
    pages: list[int] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    start: int | None = None
    copied: list[tuple[int, int]] = field(default_factory=list)


class Places:
    """All places of one engine.

    Args:
        pages, page_size: of the pools, page 0 included; pages = 0: contiguous caches, one row a slot, nothing shared.
        slots: rows that may be held at once: numbers `first_slot`, `first_slot` + 1 ...
        reuse: whether prefixes may be reused. snapshots: None: all that a row remembers lies in its pages; else a layer keeps a state,
            and a prefix is reused up to where one of so many copies was made (`snapshots.py`), whose slots follow those of the rows.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        slots: int,
        *,
        reuse: bool = True,
        first_slot: int = 1,
        snapshots: int | None = None,
    ):
        self.pool = BlockPool(pages, page_size) if pages else None
        self.reuse = reuse and self.pool is not None and snapshots != 0
        self.snapshots = Snapshots(snapshots, first_slot + slots) if snapshots and self.reuse else None
        self.page_size, self.slots = page_size, slots
        self._first_slot = first_slot
        self._free_slots = list(range(first_slot + slots - 1, first_slot - 1, -1))
        self.places: dict[int, Place] = {}  # by slot

    # --- counting -------------------------------------------------------------------------------------------------

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def free_pages(self) -> int:
        return 0 if self.pool is None else self.pool.free

    @property
    def usage(self) -> float:
        """The share of pages, or of rows, that are held."""
        if self.pool is None:
            return 1.0 - self.free_slots / self.slots
        return 1.0 - self.pool.free / self.pool.total

    def pages_for(self, tokens: int) -> int:
        return 0 if self.pool is None else self.pool.needed(tokens)

    def match(self, tokens: Sequence[int], identity: Identity) -> tuple[list[int], list[Record]]:
        """Pages that hold the beginning of `tokens` already; never the page of the last token."""
        pages: list[int] = []
        records: list[Record] = []
        if self.pool is None or not self.reuse:
            return pages, records
        size, parent = self.page_size, identity
        for i in range((len(tokens) - 1) // size):
            page = self.pool.find(records[-1] if records else parent, tokens[i * size : (i + 1) * size])
            if page is None:
                break
            record = self.pool.records[page]
            assert record is not None
            pages.append(page)
            records.append(record)
        while self.snapshots is not None and records and records[-1] not in self.snapshots:
            pages.pop()
            records.pop()
        return pages, records

    def missing(self, tokens: Sequence[int], identity: Identity, length: int) -> int:
        """Free pages that a new sequence of `length` tokens would take, the reuse of what `tokens` begin with counted in."""
        if self.pool is None:
            return 0
        held = sum(not self.pool.is_free(page) for page in self.match(tokens, identity)[0])
        return self.pages_for(length) - held

    def writable(self, place: Place, start: int, length: int) -> int:
        """Free pages that `extend(place, start, length)` would take."""
        if self.pool is None:
            return 0
        shared = sum(self.pool.refs[p] > 1 for p in place.pages[start // self.page_size :])
        return max(0, self.pages_for(length) - len(place.pages)) + shared

    # --- holding --------------------------------------------------------------------------------------------------

    def open(self, tokens: Sequence[int], identity: Identity) -> tuple[Place, int]:
        """A place for a new sequence, and how many of its first tokens are in it already."""
        pages, records = self.match(tokens, identity)
        place = Place(identity, self._free_slots.pop(), pages, records)
        for page in pages:
            assert self.pool is not None
            self.pool.hold(page)
        if records and self.snapshots is not None:
            place.start = self.snapshots.use(records[-1])
        self.places[place.slot] = place
        return place, len(pages) * self.page_size

    def cut(self, start: int, count: int, prompt: int) -> int:
        """How many of `count` tokens from `start` on to compute in one piece of a prompt of `prompt` tokens: where states are copied, up to
        the last page border in them, and up to the last one before the prompt's last token."""
        end = min(start + count, (prompt - 1) // self.page_size * self.page_size)
        end -= end % self.page_size
        return count if self.snapshots is None or end <= start else end - start

    def snapshot(self, place: Place, length: int) -> tuple[int, int] | None:
        """Copy the state after `length` tokens, (from, to), if that is a page border and a snapshot can be had.

        A prompt that is read in many pieces has no records until its last: its later copies, which serve more, take the place of its own
        earlier ones before they take anybody else's.
        """
        if self.snapshots is None or length % self.page_size:
            return None
        slot = self.snapshots.take(spare=bool(place.copied))
        if slot is None and place.copied:
            _, slot = place.copied.pop(0)
        if slot is None:
            return None
        place.copied.append((length, slot))
        return place.slot, slot

    def extend(self, place: Place, start: int, length: int) -> list[tuple[int, int]]:
        """Make tokens `start .. length - 1` writable. Returns the pages to copy first, (from, to): those that others hold as well."""
        copies: list[tuple[int, int]] = []
        if self.pool is None:
            return copies
        for i in range(start // self.page_size, min(len(place.pages), self.pages_for(length))):
            page = place.pages[i]
            if self.pool.refs[page] > 1:
                place.pages[i] = self.pool.allocate()
                copies.append((page, place.pages[i]))
                self.pool.release([page])
            else:
                self.pool.forget(page)
        while len(place.pages) < self.pages_for(length):
            place.pages.append(self.pool.allocate())
        del place.records[start // self.page_size :]
        return copies

    def computed(self, place: Place, tokens: Sequence[int], count: int) -> None:
        """The keys of the first `count` tokens are in the cache: their full pages may be found from now on."""
        if self.pool is None or not self.reuse:
            return
        size = self.page_size
        for i in range(len(place.records), count // size):
            parent = place.records[-1] if place.records else place.identity
            record = self.pool.record(place.pages[i], parent, tokens[i * size : (i + 1) * size])
            place.records.append(record)
            for length, slot in [c for c in place.copied if c[0] == (i + 1) * size]:
                assert self.snapshots is not None
                self.snapshots.keep(record, slot)
                place.copied.remove((length, slot))

    def fork(self, place: Place, length: int) -> Place:
        """A second sequence with the same first `length` tokens, in the same pages: whoever writes first copies."""
        assert self.pool is not None
        pages = place.pages[: self.pages_for(length)]
        for page in pages:
            self.pool.hold(page)
        twin = Place(place.identity, self._free_slots.pop(), pages, place.records[: length // self.page_size])
        self.places[twin.slot] = twin
        return twin

    def close(self, place: Place) -> None:
        """Give everything back. What is findable stays so until its page is handed out again."""
        del self.places[place.slot]
        self._free_slots.append(place.slot)
        if self.pool is not None:
            self.pool.release(reversed(place.pages))
        for _, slot in place.copied:
            assert self.snapshots is not None
            self.snapshots.give_back(slot)
        place.pages, place.records, place.copied = [], [], []

    def reset(self) -> None:
        """The pools were lost and made anew: nothing in them is worth finding."""
        for place in list(self.places.values()):
            self.close(place)
        if self.pool is not None:
            self.pool.forget_all()
        if self.snapshots is not None:
            self.snapshots.clear()

    # --- invariants -----------------------------------------------------------------------------------------------

    def check(self, lengths: Iterable[tuple[Place, int]] = ()) -> None:
        """Assert the laws; `lengths`: places and the tokens for which they have room, to compare the tables with."""
        held = [p.slot for p in self.places.values()]
        everything = range(self._first_slot, self._first_slot + self.slots)
        assert sorted(held + self._free_slots) == list(everything), "a slot is lost or held twice"
        if self.pool is None:
            return
        self.pool.check(p.pages for p in self.places.values())
        if self.snapshots is not None:
            self.snapshots.check(slot for place in self.places.values() for _, slot in place.copied)
        for place in self.places.values():
            for page, record in zip(place.pages, place.records, strict=False):
                assert len(record.tokens) == self.page_size
                # A page that was computed twice stands once under its key: the other's record is that of the first.
                assert self.pool.records[page] in (record, None), f"page {page} is recorded as something else"
        for place, length in lengths:
            assert len(place.pages) == self.pages_for(length), "a table is longer or shorter than its tokens"
