"""Pages of a cache as the host sees them: who holds which, which hold known tokens, which may be handed out again.

A page is a fixed run of `size` token places in every layer's pool, so one number stands for all layers. The device never sees these
records, only tables of page numbers. Page 0 belongs to nobody: padding points at it.

*Reuse.* A full page whose keys have been computed is recorded under the hash of its tokens and of everything before them (the parent's
hash), the root being the identity of what computed them: model, weights, adapter, dtype, salt. A hash only finds a candidate: the
record's tokens and its parent are compared, so a collision can never serve another text's keys. A page that nobody holds keeps its
record until it is handed out again, the longest unused first: the list of free pages is the cache (vLLM, arXiv 2309.06180, section 4.2).
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from jaxllm.errors import UserError

DUMP = 0  # the page that padding points at


@dataclass(frozen=True)
class Identity:
    """All that decides what a prefix's keys are besides its tokens. Two identities share nothing unless every field is equal."""

    model: str = ""
    weights: str = ""
    adapter: str = ""
    adapter_version: str = ""
    dtype: str = ""
    salt: str = ""

    def digest(self) -> bytes:
        """Each field by its name and length: no two identities write the same bytes, whatever their texts hold."""
        parts = []
        for field in fields(self):
            value = str(getattr(self, field.name)).encode("utf-8", "surrogatepass")
            parts.append(f"{field.name}:{len(value)}:".encode() + value)
        return chain(b"", b"".join(parts))


def chain(parent: bytes, content: bytes) -> bytes:
    """The 128-bit key of `content` behind everything that `parent` stands for."""
    return hashlib.blake2b(len(parent).to_bytes(2, "little") + parent + content, digest_size=16).digest()


@dataclass(eq=False)
class Record:
    """What a full page holds: its tokens, and by `parent` all before them. Compared by identity: one record, one computed prefix."""

    key: bytes
    tokens: tuple[int, ...]
    parent: "Record | Identity"


class BlockPool:
    """`count` pages of `size` tokens, page 0 among them. Reference counts, records by hash, free pages in the order they were freed."""

    def __init__(self, count: int, size: int):
        if count < 2 or size < 1:
            raise UserError(f"pages: {count} pages of {size} tokens; a pool needs at least 2 (one is for padding) of 1")
        self.count, self.size = count, size
        self.refs = [0] * count
        self.records: list[Record | None] = [None] * count
        self._found: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, count))

    # --- counting -------------------------------------------------------------------------------------------------

    @property
    def total(self) -> int:
        """Pages that may hold tokens."""
        return self.count - 1

    @property
    def free(self) -> int:
        """Pages that nobody holds, with a record or without."""
        return len(self._free)

    def is_free(self, page: int) -> bool:
        return page in self._free

    def needed(self, tokens: int) -> int:
        """Pages that `tokens` tokens lie in."""
        return -(-tokens // self.size)

    # --- holding --------------------------------------------------------------------------------------------------

    def allocate(self) -> int:
        """A page to write into, for one holder. What was recorded of it is forgotten. The caller has looked at `free`."""
        page, _ = self._free.popitem(last=False)
        self._forget(page)
        self.refs[page] = 1
        return page

    def hold(self, page: int) -> None:
        """One more holder of a page that is held or free."""
        assert page != DUMP
        self._free.pop(page, None)
        self.refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder fewer of each. Give a sequence's pages last first: its end is then handed out before its beginning."""
        for page in pages:
            assert self.refs[page] > 0, f"page {page} is released by nobody"
            self.refs[page] -= 1
            if not self.refs[page]:
                self._free[page] = None
                if self.records[page] is None:  # nobody can find it: the next one to hand out
                    self._free.move_to_end(page, last=False)

    # --- finding --------------------------------------------------------------------------------------------------

    def key_of(self, parent: Record | Identity, tokens: Sequence[int]) -> bytes:
        before = parent.key if isinstance(parent, Record) else parent.digest()
        return chain(before, b"".join(int(t).to_bytes(4, "little") for t in tokens))

    def find(self, parent: Record | Identity, tokens: Sequence[int]) -> int | None:
        """The page that holds exactly these tokens behind `parent`, free or held."""
        page = self._found.get(self.key_of(parent, tokens))
        if page is None:
            return None
        record = self.records[page]
        assert record is not None
        same = record.parent is parent if isinstance(parent, Record) else record.parent == parent
        return page if same and record.tokens == tuple(tokens) else None

    def record(self, page: int, parent: Record | Identity, tokens: Sequence[int]) -> Record:
        """Make a computed, full page findable; the record of the page that already is, where there is one."""
        assert len(tokens) == self.size and self.refs[page] > 0
        known = self.find(parent, tokens)
        if known is not None:
            record = self.records[known]
            assert record is not None
            return record
        key = self.key_of(parent, tokens)
        old = self._found.get(key)
        if old is not None:  # a colliding hash, or a page whose parent has been recycled: it can be found no more
            self.records[old] = None
        record = Record(key, tuple(int(t) for t in tokens), parent)
        self.records[page], self._found[key] = record, page
        return record

    def forget(self, page: int) -> None:
        """Its only holder is about to write into it: it will not hold what it was recorded for."""
        assert self.refs[page] == 1
        self._forget(page)

    def forget_all(self) -> None:
        """No page can be found any more: the weights changed, or the pools were made anew."""
        for page in range(1, self.count):
            self._forget(page)

    def _forget(self, page: int) -> None:
        record, self.records[page] = self.records[page], None
        if record is not None and self._found.get(record.key) == page:
            del self._found[record.key]

    # --- invariants -----------------------------------------------------------------------------------------------

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Everything that must hold at any time, given the tables of all holders. For tests: it looks at every page."""
        held = [0] * self.count
        for table in tables:
            assert len(set(table)) == len(table), "a table holds a page twice"
            for page in table:
                held[page] += 1
        assert held[DUMP] == 0 and self.refs[DUMP] == 0 and not self.is_free(DUMP), "page 0 is somebody's"
        assert held == self.refs, "a reference count is not the number of tables that hold the page"
        for page in range(1, self.count):
            assert self.is_free(page) == (self.refs[page] == 0), f"page {page} is both free and held, or neither"
        for key, page in self._found.items():
            record = self.records[page]
            assert record is not None and record.key == key, f"page {page} is found under a key that is not its own"
