"""Calculators in closed form: caches, training memory, experts, the attention matrix, speculation.

Each is arithmetic on numbers and nothing else, so that `to_js` can write the same formula for a page: there is one text of it. Bytes
are bytes, GB are 10^9. What a composed model needs exactly, layer by layer, `task=count` says; these are for asking "what if".
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from math import floor

Formula = Callable[..., Mapping[str, float]]


def cache(
    layers: float, heads: float, kv_heads: float, head_dim: float, latent: float, rope_dim: float, index_dim: float, rate: float,
    window: float, context: float, batch: float, bytes_each: float, memory_gb: float, weights_gb: float,
) -> Mapping[str, float]:  # fmt: skip
    """Bytes that the caches of `batch` rows of `context` tokens hold if all layers are of one kind, and rows that fit beside the weights.

    Multi-head, grouped and multi-query: `2 g k` elements a token. Window: the same of at most `window` tokens, and their places. MLA:
    `r + o`; DSA: an index key more. CSA: entries of `r` and an index key for each `rate` tokens, and `r` for each of the window. KDA: fp32
    `h k k` whatever the context, and three tokens of q, k and v for the convolutions."""
    token = layers * bytes_each
    mha = token * 2 * heads * head_dim * context
    gqa = token * 2 * kv_heads * head_dim * context
    mqa = token * 2 * head_dim * context
    swa = (token * 2 * kv_heads * head_dim + layers * 4) * min(window, context)
    mla = token * (latent + rope_dim) * context
    dsa = token * (latent + rope_dim + index_dim) * context
    csa = token * ((latent + index_dim) / rate * context + latent * min(window, context))
    kda = layers * heads * head_dim * head_dim * 4 + token * 3 * 3 * heads * head_dim
    room = max(0, memory_gb - weights_gb) * 1e9
    return {
        "MHA bytes": batch * mha, "GQA bytes": batch * gqa, "MQA bytes": batch * mqa, "window bytes": batch * swa, "MLA bytes": batch * mla,
        "DSA bytes": batch * dsa, "CSA bytes": batch * csa, "KDA bytes": batch * kda,
        "MHA users": floor(room / mha), "GQA users": floor(room / gqa), "MQA users": floor(room / mqa), "window users": floor(room / swa),
        "MLA users": floor(room / mla), "DSA users": floor(room / dsa), "CSA users": floor(room / csa), "KDA users": floor(room / kda),
    }  # fmt: skip


def training(
    params_b: float, layers: float, d_model: float, length: float, rows: float, devices: float, tensor: float, zero: float,
    param_bytes: float, recompute: float,
) -> Mapping[str, float]:  # fmt: skip
    """Bytes of one device. ZeRO (arXiv 1910.02054) splits over the data-parallel devices the optimiser's state (1), gradients too (2),
    parameters too (3). Gradients fp32; Adam's two moments fp32, and masters fp32 where parameters are narrower.

    Activations of `rows` sequences on a device, 16 bits, attention without its score matrix: 34 d a token and layer (arXiv 2205.05198), of
    which tensor parallelism splits 24; with recompute=1 only each layer's input, 2 d."""
    n = params_b * 1e9 / tensor
    ways = max(1, devices / tensor)
    held = n * param_bytes / (ways if zero >= 3 else 1)
    grads = n * 4 / (ways if zero >= 2 else 1)
    state = n * (8 if param_bytes >= 4 else 12) / (ways if zero >= 1 else 1)
    activations = layers * rows * length * d_model * (2 if recompute >= 1 else 10 + 24 / tensor)
    return {
        "parameters bytes": held,
        "gradients bytes": grads,
        "optimiser bytes": state,
        "activations bytes": activations,
        "total bytes": held + grads + state + activations,
    }


def zero_stage(
    params: float, grads: float, optimiser: float, activations: float, devices: float, zero: float
) -> Mapping[str, float]:
    """Bytes of one of `devices`, from what one device alone holds; activations are of its own rows, which nothing splits."""
    held = params / (devices if zero >= 3 else 1)
    gradients = grads / (devices if zero >= 2 else 1)
    state = optimiser / (devices if zero >= 1 else 1)
    return {"total bytes": held + gradients + state + activations}


def experts(
    layers: float, dense_layers: float, d_model: float, attention_m: float, d_ff: float, d_expert: float, number: float, top_k: float,
    shared: float, vocab: float,
) -> Mapping[str, float]:  # fmt: skip
    """Parameters held, and those one token's products use: gated units of three matrices, a router, attention of `attention_m` million a
    layer, an untied embedding that is read and a head that is multiplied."""
    sparse = max(0, layers - dense_layers)
    common = (
        layers * attention_m * 1e6 + dense_layers * 3 * d_model * d_ff + sparse * d_model * number + vocab * d_model
    )
    one = 3 * d_model * d_expert
    total = common + vocab * d_model + sparse * (number + shared) * one
    active = common + sparse * (min(top_k, number) + shared) * one
    return {"total parameters": total, "active parameters": active, "total over active": total / active}


def attention_matrix(n: float, heads: float, layers: float, bytes_each: float) -> Mapping[str, float]:
    """Bytes of the scores of n tokens on each other, if they were ever written down: one head, one layer, all layers."""
    one = n * n * bytes_each
    return {"one head bytes": one, "one layer bytes": one * heads, "all layers bytes": one * heads * layers}


def speculative(accept: float, draft: float, cost: float) -> Mapping[str, float]:
    """Tokens a step of the large model is expected to give, of `draft` drafted ones each kept with probability `accept`, and the speed-up
    if a drafted token costs `cost` steps (arXiv 2211.17192, equation 1 and theorem 3.8)."""
    tokens = draft + 1 if accept >= 1 else (1 - accept ** (draft + 1)) / (1 - accept)
    return {"tokens a step": tokens, "times as fast": tokens / (draft * cost + 1)}


# --- the same in JavaScript -------------------------------------------------------------------------------------------

_OPERATORS: Mapping[type, str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**"}
_COMPARED: Mapping[type, str] = {ast.GtE: ">=", ast.Gt: ">", ast.LtE: "<=", ast.Lt: "<"}
_CALLS = {"min": "Math.min", "max": "Math.max", "floor": "Math.floor"}


def to_js(formula: Formula) -> str:
    """A JavaScript function of the same name, arguments and result, made from the Python text. ValueError for more than arithmetic."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(formula))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    lines = []
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            lines.append(f"const {statement.targets[0].id}={_js(statement.value)};")
        elif isinstance(statement, ast.Return) and isinstance(statement.value, ast.Dict):
            pairs = zip(statement.value.keys, statement.value.values, strict=True)
            lines.append("return {" + ",".join(f"{_js(k)}:{_js(v)}" for k, v in pairs if k is not None) + "};")
        elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):  # a docstring
            raise ValueError(f"{tree.name}: {ast.unparse(statement)} is no arithmetic")
    return f"function {tree.name}({','.join(a.arg for a in tree.args.args)}){{{''.join(lines)}}}"


def _js(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, str)):
        return repr(node.value).replace("'", '"')
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return f"({_js(node.left)}{_OPERATORS[type(node.op)]}{_js(node.right)})"
    if isinstance(node, ast.IfExp):
        return f"({_js(node.test)}?{_js(node.body)}:{_js(node.orelse)})"
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARED:
        return f"({_js(node.left)}{_COMPARED[type(node.ops[0])]}{_js(node.comparators[0])})"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS and not node.keywords:
        return f"{_CALLS[node.func.id]}({','.join(map(_js, node.args))})"
    raise ValueError(f"{ast.unparse(node)} is no arithmetic")
