"""Shapes of an engine: how large its pools are, and the few shapes of calls that are compiled."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from jaxllm.errors import UserError
from jaxllm.inference.settings import EngineSettings
from jaxllm.model import LanguageModel
from jaxllm.pages import leaves_of

DEFAULT_LENGTH = 2048  # of the longest sequence, where the model sets no limit
SMALLEST_CHUNK = 16


class Sizes(NamedTuple):
    """Shapes of everything. rows, tokens, widths: the bucket lists, ascending. pages 0: contiguous, one row a slot. call: tokens, padding
    included, of a call on several prompts at most. snapshots: slots for copies of states, behind those of the rows."""

    slots: int
    length: int
    pages: int
    page_size: int
    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    widths: tuple[int, ...]
    call: int = 0
    snapshots: int = 0

    @property
    def contiguous(self) -> bool:
        return self.pages == 0

    def together(self, tokens: int) -> int:
        """Prompts of which one call takes a piece of `tokens` tokens each: a number of `rows`, or 1."""
        fitting = [n for n in self.rows if n * tokens <= self.call]
        return 1 if self.contiguous or not fitting else fitting[-1]


def sizes_of(model: LanguageModel, s: EngineSettings) -> Sizes:
    """Shapes of an engine's pools and calls, with what null means filled in."""
    length = s.max_len or model.max_seq_len or DEFAULT_LENGTH
    if model.max_seq_len is not None and length > model.max_seq_len:
        raise UserError(f"server.max_len: {length} is longer than model.max_seq_len={model.max_seq_len}")
    chunk = min(s.chunk, length)
    tokens = tuple(s.token_buckets or powers(min(SMALLEST_CHUNK, chunk), chunk))
    if s.cache == "contiguous":
        return Sizes(s.rows, length, 0, length, (s.rows,), tokens, (1,))
    most = -(-length // s.page_size)
    pages = s.pages or s.rows * most
    rows = tuple(s.row_buckets or powers(1, s.rows))
    # Who reads pages in place looks at no more of a table than its rows have: one width serves them all.
    in_place = s.kernel != "naive" and all(model.mixer(role).reads_pages for g in model.groups for role, _ in g.period)
    widths = tuple(s.width_buckets or ((most,) if in_place else powers(min(8, most), most, 4)))
    if rows[-1] < s.rows:
        raise UserError(f"server.row_buckets: {list(rows)} has no place for rows={s.rows}")
    if widths[-1] < most:
        raise UserError(f"server.width_buckets: {list(widths)} has no place for {most} pages, of max_len={length}")
    snapshots = (
        (s.rows if s.snapshots is None else s.snapshots) if s.prefix_cache and not shares(model, s.page_size) else 0
    )
    call = max(s.step_tokens, tokens[-1])
    return Sizes(s.rows, length, pages + 1, s.page_size, rows, tokens, widths, call, snapshots)


def shares(model: LanguageModel, page_size: int) -> bool:
    """Whether all that the model remembers of a row grows with it, and so lies in pages."""
    roles = {role for group in model.groups for role, _ in group.period}
    kinds = (functools.partial(model.mixer(role).init_cache, dtype=model.compute_dtype) for role in roles)
    return all(leaf.axis is not None for make in kinds for leaf in leaves_of(make, 2 * page_size))


def bucket(sizes: Sequence[int], n: int) -> int:
    """The smallest of the sizes that holds n."""
    return next(size for size in sizes if size >= n)


def powers(smallest: int, largest: int, step: int = 2) -> tuple[int, ...]:
    """smallest, smallest * step, .. and largest itself."""
    out, n = [], smallest
    while n < largest:
        out.append(n)
        n *= step
    return (*out, largest)
