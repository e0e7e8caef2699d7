"""Reading config.json strictly: every key is read, known to be harmless, known to have one harmless value, or named in a warning."""

from collections.abc import Callable, Container
from typing import Any

from jaxllm.errors import UserError

Warn = Callable[[str], None]

# Keys that say nothing about the mathematics of a forward pass.
INERT = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures", "attention_dropout", "attn_pdrop",
    "auto_map", "bos_token_id", "cache_implementation", "chunk_size_feed_forward", "dtype", "embd_pdrop", "eos_token_id",
    "finetuning_task", "gradient_checkpointing", "id2label", "initializer_range", "initializer_factor", "is_decoder",
    "keys_to_ignore_at_inference", "label2id", "model_type", "n_ctx", "name_or_path", "output_attentions",
    "output_hidden_states", "output_router_logits", "pad_token_id", "prefix", "problem_type", "reorder_and_upcast_attn", "resid_pdrop",
    "return_dict", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params", "tokenizer_class", "torch_dtype",
    "torchscript", "transformers_version", "transformers.js_config", "unsloth_fixed", "unsloth_version", "use_cache", "use_bfloat16",
})  # fmt: skip

# Keys that change the mathematics, with the values under which they do not.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "clip_qkv": (None,),
    "is_encoder_decoder": (False,),
    "pretraining_tp": (None, 0, 1),
    "pruned_heads": (None, {}),
    "scale_attn_by_inverse_layer_idx": (False,),
    "tie_encoder_decoder": (False,),
    "use_bidirectional_attention": (None, False),
}


class ConfigJson:
    """A config.json that notes which of its keys were asked for. Errors name the file and the key.

    there: names of the tensors beside it, for what it announces and a file may lack; None: all that it announces.
    """

    def __init__(self, config: dict[str, Any], where: str, there: Container[str] | None = None) -> None:
        self.config, self.where, self.there = config, where, there
        self._read: set[str] = set()
        self._notes: list[str] = []

    def error(self, text: str) -> UserError:
        return UserError(f"{self.where}: config.json: {text}")

    def rename(self, spellings: dict[str, str]) -> None:
        """Read other spellings of keys as their usual ones. A file that has both must mean the same by them."""
        for key, usual in spellings.items():
            if key in self.config:
                value = self.config[key]
                if self.config.get(usual, value) != value:
                    raise self.error(f"{key}={value!r} and {usual}={self.config[usual]!r} contradict each other")
                self.config = {**{k: v for k, v in self.config.items() if k != key}, usual: value}

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default where it is absent."""
        self._read.add(key)
        return self.config.get(key, default)

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1; the default also where null stands."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(f"{key}={value!r}: expected a whole number of at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{key}={value!r}: expected a number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(f"{key}={value!r}: expected true or false")
        return value

    def only(self, key: str, *allowed: Any, why: str = "") -> None:
        """Refuse a value that is not modelled. An absent key is taken for the first one allowed."""
        value = self.get(key, allowed[0])
        if value not in allowed:
            raise self.error(f"{key}={value!r} is not available{why}; only {' or '.join(map(repr, allowed))} is")

    def has(self, *tensors: str) -> bool:
        """Whether the file holds a tensor of any of these names."""
        return self.there is None or any(name in self.there for name in tensors)

    def note(self, text: str) -> None:
        """Something to say to whoever reads the checkpoint: what is left aside, though it does not change the model."""
        self._notes.append(text)

    def finish(self, warn: Warn | None) -> None:
        """Refuse or name what was not read."""
        if warn is not None:
            for text in self._notes:
                warn(f"{self.where}: config.json: {text}")
        left = []
        for key, value in self.config.items():
            if key in self._read or key in INERT:
                continue
            if key in NEUTRAL:
                if value not in NEUTRAL[key]:
                    raise self.error(f"{key}={value!r} changes what the model computes and is not available")
            elif value not in (None, False):
                left.append(key)
        if left and warn is not None:
            warn(
                f"{self.where}: config.json: keys that are not known here and have no effect: {', '.join(sorted(left))}"
            )
