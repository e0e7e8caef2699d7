"""The keys of `task=convert`, `task=logits` and `task=check`. They stand at the root of the config, beside `source`."""

from dataclasses import dataclass
from typing import Literal

from jaxllm.errors import UserError

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class ConvertSettings:
    """format: run = a run folder of this program, which every task takes as its source; hf = a Hugging Face folder.

    out: the folder to make; absent or empty. dtype: of the tensors of a Hugging Face folder; null = that of the checkpoint it came
    from, else float32. shard_size: the most that one safetensors file holds, e.g. 5GB.
    """

    format: Literal["run", "hf"] | None = None
    out: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    shard_size: str = "5GB"

    def __post_init__(self) -> None:
        _ = self.shard_bytes  # refuses what it cannot read

    @property
    def shard_bytes(self) -> int:
        text = self.shard_size.strip().upper()
        unit = next((u for u in ("KB", "MB", "GB", "B") if text.endswith(u)), "")
        try:
            size = int(float(text.removesuffix(unit)) * UNITS[unit or "B"])
        except (ValueError, OverflowError):
            size = 0
        if size < 1:
            raise UserError(f"shard_size={self.shard_size}: expected a size such as 500MB or 5GB")
        return size


@dataclass(frozen=True)
class LogitsSettings:
    """tokens: a .npy of int32 ids [b t]. out: the .npy of float32 logits [b t v] to write.

    mode: full = one call on whole sequences; cached = a prefill of `split` tokens, then one at a time from the cache.
    """

    tokens: str | None = None
    out: str | None = None
    mode: Literal["full", "cached"] = "full"
    split: int | None = None


@dataclass(frozen=True)
class CheckSettings:
    """reference: a safetensors file with input_ids [b t], logits [b t v] and, as far as there are, hidden_<i> [b t d] (the stream
    before layer i, the last after the final norm), and greedy_prompt with greedy_tokens (or greedy, after the first tokens of
    input_ids). tolerance: the largest difference of logits and hidden states that counts as equal, relative to the size of the
    reference where that is above 1."""

    reference: str | None = None
    tolerance: float = 1e-4

    def __post_init__(self) -> None:
        if not self.tolerance > 0:
            raise UserError(f"tolerance={self.tolerance}: must be above 0")
