"""The known families, found by the `model_type` of a config.json. Code that a folder brings along (`auto_map`) is never run."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from jaxllm.errors import UserError
from jaxllm.weights.families import (
    deepseek,
    deepseek_sparse,
    deepseek_v4,
    gemma,
    gpt2,
    gpt_oss,
    kimi,
    llama,
    mimo,
    mixtral,
    nanochat,
    qwen,
    qwen_moe,
    qwen_next,
)
from jaxllm.weights.family import Family

# In the order in which an export tries them: the plainest first.
FAMILIES: tuple[Family, ...] = (
    llama.LLAMA,
    qwen.QWEN3,
    qwen.QWEN2,
    llama.MISTRAL,
    llama.SMOLLM3,
    llama.GRANITE,
    llama.OLMO2,
    gemma.GEMMA2,
    nanochat.NANOCHAT,
    gpt2.GPT2,
    mixtral.MIXTRAL,
    qwen_moe.QWEN3_MOE,
    qwen_moe.QWEN2_MOE,
    deepseek.DEEPSEEK_V3,
    deepseek.DEEPSEEK_V2,
    deepseek_sparse.DEEPSEEK_V32,
    deepseek_sparse.GLM_MOE_DSA,
    deepseek_v4.DEEPSEEK_V4,
    mimo.MIMO_V2_FLASH,
    gpt_oss.GPT_OSS,
    qwen_next.QWEN3_NEXT,
    kimi.KIMI_LINEAR,
)
BY_TYPE = {name: family for family in FAMILIES for name in family.model_types}


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The family of a config.json. Raises UserError for one that is not known, or that needs the folder's own code."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in BY_TYPE:
        near = get_close_matches(str(kind), BY_TYPE, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"{where}: config.json: model_type={kind!r} is not known; {hint}known: {', '.join(BY_TYPE)}")
    family = BY_TYPE[kind]
    named = config.get("architectures") or []
    if isinstance(named, list) and named and not set(named) & set(family.architectures):
        own = ", which is code in the folder: such code is not run" if config.get("auto_map") else ""
        raise UserError(
            f"{where}: config.json: architecture {named[0]!r}{own}; of model_type {kind!r} only {', '.join(family.architectures)} is known"
        )
    return family
