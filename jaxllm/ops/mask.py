"""Which keys a query may see: one static description, evaluated block by block from positions and document ids.

Query i and key j of the same document, by absolute position:

    j <= i   and   ( local(i - j)   or   j < global_tokens )
    local:  i - j < window * dilation,   (i - j) mod dilation = 0,   floor(i / chunk) = floor(j / chunk)

A window of W counts the query itself: row i sees j > i - W (Mistral, Gemma 2, gpt-oss). Dilated windows and global tokens are those
of Longformer (Beltagy et al. 2020, arXiv 2004.05150) and BigBird (Zaheer et al. 2020, arXiv 2007.14062), made causal: the global
tokens are a prefix of the document, because a later one could not be read by the queries before it. Chunked-local attention is
Llama 4's.
"""

import dataclasses

from jax import Array

from jaxllm.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mask:
    """window: keys, self included, of a sliding window. chunk: length of local blocks. dilation: every so many-th key only.
    global_tokens: so many first tokens of a document are seen by all later ones. All null or neutral: plain causal.
    """

    window: int | None = None
    chunk: int | None = None
    dilation: int = 1
    global_tokens: int = 0

    def __post_init__(self) -> None:
        for key in ("window", "chunk", "dilation"):
            if (value := getattr(self, key)) is not None and value < 1:
                raise UserError(f"{key}: {value} must be at least 1")
        if self.global_tokens < 0:
            raise UserError(f"global_tokens: {self.global_tokens} must be at least 0")
        if self.global_tokens and self.window is None and self.chunk is None and self.dilation == 1:
            raise UserError(
                f"global_tokens: {self.global_tokens} means nothing where every token sees all; set window, chunk or dilation"
            )

    @property
    def span(self) -> int | None:
        """How far local attention reaches: consecutive positions, self included. None: without limit."""
        reaches = [] if self.window is None else [self.window * self.dilation]
        reaches += [] if self.chunk is None else [self.chunk]
        return min(reaches, default=None)

    def sees(self, queries: Array, keys: Array) -> Array:
        """bool of the broadcast shape of two arrays of positions, of one document."""
        distance = queries - keys
        local = distance >= 0
        if self.window is not None:
            local &= distance < self.window * self.dilation
        if self.dilation > 1:
            local &= distance % self.dilation == 0
        if self.chunk is not None:
            local &= queries // self.chunk == keys // self.chunk
        if self.global_tokens:
            local |= (distance >= 0) & (keys < self.global_tokens)
        return local


CAUSAL = Mask()


def visible(q_positions: Array, k_positions: Array, q_segments: Array, k_segments: Array, mask: Mask = CAUSAL) -> Array:
    """bool `[b t s]` for positions and document ids `[b t]` and `[b s]`; 0 is padding, which sees and is seen by nothing."""
    same = (q_segments[:, :, None] == k_segments[:, None, :]) & (k_segments[:, None, :] > 0)
    return same & mask.sees(q_positions[:, :, None], k_positions[:, None, :])
