"""The keys of `task=generate`, which stand at the root of the config beside the common `seed` and `source`, and of `task=read`."""

from dataclasses import dataclass

from jaxllm.errors import UserError


@dataclass(frozen=True)
class GenerateSettings:
    """What to continue, and how.

    Exactly one of the three prompts counts; none at all, or an empty one, starts from the token that begins a document.
    prompt: text. prompt_ids: token ids, taken as they are. prompts: a jsonl file, one object a line with a `prompt` or
    `prompt_ids`.
    chat: true puts `prompt` (and each `prompt` of a file) through the chat template that came with the model, as what a user says;
    system: what the system message before it says.
    max_new_tokens: stop after this many new tokens, or earlier at a token that ends a document or a turn.
    temperature: 0 = always the most likely token. top_k: 0 = off. top_p: in (0, 1], 1 = off. min_p: in [0, 1], 0 = off.
    See `jaxllm.inference.sampling` for the order in which they act.
    seed: row i of a prompts file draws as `seed + i` would alone.
    cache: false recomputes the whole sequence for every token, then reports both ways side by side.
    """

    prompt: str | None = None
    prompt_ids: list[int] | None = None
    prompts: str | None = None
    chat: bool = False
    system: str | None = None
    max_new_tokens: int = 128
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    cache: bool = True


@dataclass(frozen=True)
class ReadSettings:
    """`read.*`: tokens to read in pieces of `chunk`, then tokens to decode."""

    tokens: int = 65536
    chunk: int = 2048
    decode: int = 64

    def __post_init__(self) -> None:
        for name in ("tokens", "chunk", "decode"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: {getattr(self, name)} must be at least 1")
