"""Positions of a config.json as a rope node, and back.

transformers 4 writes `rope_theta` and `rope_scaling`, 5 writes `rope_parameters` (for models with several kinds of layers, one of each
kind); the older key `type` means `rope_type`. `su` and `yarn` files by hand may lack what the classes then take from elsewhere:
`original_max_position_embeddings` from the configuration, and last from `max_position_embeddings`.
"""

import dataclasses
from typing import Any

from jaxllm.layers import rope as kinds
from jaxllm.weights.config_json import ConfigJson

TARGET = "jaxllm.layers.rope."

# rope_type -> (our class, {our field: its key}, keys that must be there).
KINDS: dict[str, tuple[str, dict[str, str], tuple[str, ...]]] = {
    "default": ("RoPE", {}, ()),
    "linear": ("LinearRoPE", {"factor": "factor"}, ("factor",)),
    "dynamic": ("DynamicNTKRoPE", {"factor": "factor", "max_position": "max_position_embeddings"}, ("factor",)),
    "yarn": (
        "YaRN",
        {
            "factor": "factor",
            "original_max_position": "original_max_position_embeddings",
            "beta_fast": "beta_fast",
            "beta_slow": "beta_slow",
            "truncate": "truncate",
            "attention_factor": "attention_factor",
            "mscale": "mscale",
            "mscale_all_dim": "mscale_all_dim",
        },
        (),
    ),
    "llama3": (
        "Llama3RoPE",
        {
            "factor": "factor",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
            "original_max_position": "original_max_position_embeddings",
        },
        ("factor", "low_freq_factor", "high_freq_factor"),
    ),
    "longrope": (
        "LongRoPE",
        {
            "short_factor": "short_factor",
            "long_factor": "long_factor",
            "original_max_position": "original_max_position_embeddings",
            "factor": "factor",
            "attention_factor": "attention_factor",
        },
        ("short_factor", "long_factor"),
    ),
    "proportional": ("ProportionalRoPE", {"factor": "factor"}, ()),
}
LEGACY = {"su": "longrope"}
COMMON = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "max_position_embeddings",
}


def rope_node(
    c: ConfigJson, *, kind: str | None = None, theta: float = 10000.0, interleaved: bool = False
) -> dict[str, Any]:
    """The rope node of a model, or of its layers of `kind` ("full_attention"). theta: what the class takes when none is given."""
    table = parameters(c, kind)
    rope_type = table.get("rope_type", table.get("type", "default"))
    rope_type = LEGACY.get(rope_type, rope_type)
    if rope_type not in KINDS:
        raise c.error(f"rope_type={rope_type!r} is not available; known: {', '.join(KINDS)}")
    name, fields, needed = KINDS[rope_type]
    for key in needed:
        if table.get(key) is None:
            raise c.error(f"rope_type={rope_type!r} needs {key}")
    unknown = {k for k, v in table.items() if v is not None} - set(fields.values()) - COMMON
    if unknown and rope_type != "default":
        raise c.error(f"rope_type={rope_type!r} has keys that are not known: {', '.join(sorted(unknown))}")
    longest = c.whole("max_position_embeddings", 2048)
    values = {**table, "max_position_embeddings": longest}
    if rope_type in ("yarn", "llama3", "longrope"):
        original = c.get("original_max_position_embeddings") or table.get("original_max_position_embeddings") or longest
        values["original_max_position_embeddings"] = int(original)
        if rope_type != "llama3" and table.get("factor") is None:
            values["factor"] = longest / original
    own = c.get("rope_theta")
    node: dict[str, Any] = {"_target_": TARGET + name, "theta": float(table.get("rope_theta") or own or theta)}
    partial = table.get("partial_rotary_factor", c.get("partial_rotary_factor"))
    if partial is not None:
        node["partial"] = float(partial)
    if interleaved:
        node["interleaved"] = True
    return node | {ours: values[key] for ours, key in fields.items() if values.get(key) is not None}


def parameters(c: ConfigJson, kind: str | None) -> dict[str, Any]:
    """The table of rotary settings under either spelling; that of `kind` where each kind of layer has its own."""
    scaling, own = c.get("rope_scaling"), c.get("rope_parameters")
    table = scaling or own or {}
    if not isinstance(table, dict):
        raise c.error("rope_parameters: expected an object")
    nested = [k for k, v in table.items() if isinstance(v, dict)]
    if nested:
        if kind not in nested:
            raise c.error(f"rope_parameters are given for {', '.join(nested)}, not for {kind or 'all layers'}")
        table = table[kind]
    return dict(table)


def rope_keys(rope: kinds.RoPE, longest: int | None) -> dict[str, Any] | None:
    """config.json's keys for a rope in both spellings, or None where no rope_type means it. longest: `max_position_embeddings`."""
    names = {name: (rope_type, fields) for rope_type, (name, fields, _) in KINDS.items()}
    if type(rope).__name__ not in names:
        return None
    rope_type, fields = names[type(rope).__name__]
    values = {f.name: getattr(rope, f.name) for f in dataclasses.fields(rope)}
    table: dict[str, Any] = {"rope_type": rope_type}
    table |= {
        key: list(value) if isinstance(value, tuple) else value
        for ours, key in fields.items()
        if (value := values[ours]) is not None and key != "max_position_embeddings"
    }
    keys: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.partial != 1.0:
        keys["partial_rotary_factor"] = table["partial_rotary_factor"] = rope.partial
    if rope_type != "default":
        keys["rope_scaling"] = dict(table)
    longest = values.get("max_position", longest)
    return keys | {"rope_parameters": {**table, "rope_theta": rope.theta}, "max_position_embeddings": longest or 2048}
