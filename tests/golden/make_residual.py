"""Golden numbers of residual schemes: writes hyper_connections.safetensors and attention_residuals.safetensors beside this file.

    python tests/golden/make_residual.py        # needs the `parity` extra (torch, transformers)

Hyper-connections are transformers' own modules of DeepSeek-V4. No release of transformers has attention residuals, so a twin stands
here, written from the equations (arXiv 2603.15031; block order of arXiv 2607.24653), over toy layers, with autograd's gradients.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead

HERE = Path(__file__).parent
STREAMS, D, EPS = 4, 12, 1e-5
LAYERS, BLOCK = 5, 2


def drawn(module: torch.nn.Module) -> torch.nn.Module:
    """All parameters random: the constants of an initialiser would hide a fault."""
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return module.float()


def hyper_connections() -> dict[str, torch.Tensor]:
    config = DeepseekV4Config(hidden_size=D, hc_mult=STREAMS, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=EPS)
    site, head = drawn(DeepseekV4HyperConnection(config)), drawn(DeepseekV4HyperHead(config))
    x, y = 2 * torch.randn(2, 3, STREAMS, D), torch.randn(2, 3, D)
    x.requires_grad_()
    post, comb, collapsed = site(x)
    written = post.unsqueeze(-1) * y.unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), x)  # the decoder layer's line
    end = head(x)
    (torch.sin(collapsed).sum() + torch.sin(written).sum() + torch.sin(end).sum()).backward()
    out = {"x": x, "y": y, "comb": comb, "collapsed": collapsed, "written": written, "end": end, "grad_x": x.grad}
    for name in ("fn", "base", "scale"):
        out |= {f"site.{name}": getattr(site, name), f"site.grad_{name}": getattr(site, name).grad}
        out |= {f"head.{name}": getattr(head, f"hc_{name}")}
    return out


def rms(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)


def mix(sources: list[torch.Tensor], query: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    scores = torch.stack([(rms(v) * norm * query).sum(-1) for v in sources])
    return (torch.softmax(scores, 0).unsqueeze(-1) * torch.stack(sources)).sum(0)


def attention_residuals(mode: str) -> dict[str, torch.Tensor]:
    """Layer l: a = tanh(rms(read) A_l), then m = sin(rms(read) B_l); sites 2 l and 2 l + 1 of `query` and `norm`, the last is the end."""
    e = torch.randn(2, 3, D, requires_grad=True)
    a, b = torch.randn(2, LAYERS, D, D) * D**-0.5
    query = torch.randn(2 * LAYERS + 1, D, requires_grad=True)
    norm = (1 + 0.3 * torch.randn(2 * LAYERS + 1, D)).requires_grad_()
    blocks, prefix = ([], e) if mode == "block" else ([e], None)
    for layer in range(LAYERS):
        for half, site in enumerate((2 * layer, 2 * layer + 1)):
            sources = blocks + ([] if prefix is None else [prefix])
            x = mix(sources, query[site], norm[site]) if blocks else prefix
            if mode == "block" and half == 0 and layer % BLOCK == 0:
                blocks, prefix = [*blocks, prefix], None
            y = torch.sin(rms(x) @ b[layer]) if half else torch.tanh(rms(x) @ a[layer])
            if mode == "full":
                blocks = [*blocks, y]
            else:
                prefix = y if prefix is None else prefix + y
    out = mix(blocks + ([] if prefix is None else [prefix]), query[-1], norm[-1])
    torch.sin(out).sum().backward()
    tensors = {"e": e, "a": a, "b": b, "query": query, "norm": norm, "out": out}
    return tensors | {f"grad_{name}": value.grad for name, value in (("e", e), ("query", query), ("norm", norm))}


def write(name: str, tensors: dict[str, torch.Tensor]) -> None:
    save_file(
        {key: value.detach().contiguous().clone() for key, value in tensors.items()}, HERE / f"{name}.safetensors"
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    write("hyper_connections", hyper_connections())
    modes = {mode: attention_residuals(mode) for mode in ("block", "full")}
    write("attention_residuals", {f"{mode}.{key}": v for mode, more in modes.items() for key, v in more.items()})
