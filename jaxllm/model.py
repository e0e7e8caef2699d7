"""The model: embedding, groups of scanned periods, final norm and head. Everything else is a layer's own business.

    x = E[tokens];   for each layer:  x <- write(x, mixer(norm(read(x))));  x <- write(x, ffn(norm(read(x))))
    logits = softcap(scale norm(x) W),   W = E^T when tied

Two layouts of one tree of parameters. *Stacked* (training, checkpoints): `g<i>/b<j>/...` with the repeats of group i on axis 0, run
by `nn.scan` so that compile time does not grow with depth. *Unstacked* (decoding): `g<i>_<n>/b<j>/...`, one entry a repeat, because a scan
would copy each layer's weights and caches at every token. `jaxllm.params` holds the pure functions between them.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxllm.errors import UserError
from jaxllm.layers.base import Aux, Context, Cost, Normal, merged, named, param
from jaxllm.layers.block import Block, Period
from jaxllm.layers.draft import NAME as DRAFT
from jaxllm.layers.draft import Draft, after
from jaxllm.layers.lora import LoRA
from jaxllm.layers.mtp import MultiToken
from jaxllm.layers.norm import RMSNorm
from jaxllm.layers.residual import Residual
from jaxllm.mesh import shard
from jaxllm.ops.linear import times_transposed
from jaxllm.pages import Pages, paged_of
from jaxllm.pattern import Group, check_roles, parse

REMAT: dict[str, Callable[..., Any] | None] = {
    "none": None,  # keep every activation
    "full": jax.checkpoint_policies.nothing_saveable,  # keep only the stream between periods
    "dots": jax.checkpoint_policies.checkpoint_dots,  # keep matmul results
    "dots_no_batch": jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,  # keep matmuls with weights, not attention scores
}


@struct.dataclass
class Out:
    """Result of a call. hidden: after the final norm, `[b t d]`; logits fp32 `[b t v]` or None; capture and aux: flat dicts."""

    logits: Array | None
    hidden: Array
    capture: dict[str, Array]
    aux: Aux


class LanguageModel(nn.Module, kw_only=True):
    """Composed by yaml: see `conf/model/`. `mixers`, `ffns`, `residual` and `norm` are partials (classes with some fields set).

    vocab_size: real token ids; the table is padded to a multiple of `vocab_multiple`, and padded ids can neither win nor count.
    layers: see `jaxllm.pattern`. remat: what the backward recomputes, one of `REMAT`. scan: stacked layout (see the module).
    dtype: of the computation; null = float32 on CPU (bf16 matmuls are slower there), bfloat16 elsewhere. param_dtype: of the master copy.
    embed_scale: the embedding is multiplied by it (Gemma: sqrt(d_model)). learned_positions: rows of a table that is added to it
    (GPT-2), and with it the longest sequence. embed_norm: a norm right after the embedding (nanochat). pre_norms, post_norms: see
    `Block` (Gemma 2: both; OLMo 2: only post). logit_scale: factor on the logits before the softcap (Granite: 1 / logits_scaling).
    max_seq_len: the longest sequence allowed; null = `learned_positions`, or no limit. mtp: heads that predict further tokens
    (`jaxllm.layers.mtp`), run when `capture` asks for "mtp": `capture["mtp"] [depth, b, t, d]`, ready for the head. lora: low-rank
    adapters on some matrices, all else frozen (`jaxllm.layers.lora`); their parameters are declared by `params.declare`. draft: a head
    that guesses what this model will say, all else frozen (`jaxllm.layers.draft`): `capture["draft"] [unroll, b, t, d]` of whole
    sequences, ready for `draft_head_weight`; for decoding, `capture["features"] [b t d]` of any call, `draft_step`, `init_draft_cache`.
    """

    vocab_size: int
    d_model: int
    layers: str
    mixers: Mapping[str, Callable[..., nn.Module]]
    ffns: Mapping[str, Callable[..., nn.Module]]
    residual: Callable[..., Residual] = Residual
    norm: Callable[..., nn.Module] = RMSNorm
    mtp: Callable[..., MultiToken] | None = None
    lora: LoRA | None = None
    draft: Callable[..., Draft] | None = None
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    embed_scale: float | None = None
    embed_norm: bool = False
    learned_positions: int | None = None
    pre_norms: bool = True
    post_norms: bool = False
    logit_scale: float | None = None
    logit_softcap: float | None = None
    vocab_multiple: int = 1
    max_seq_len: int | None = None
    dropout: float = 0.0
    dtype: str | None = None
    param_dtype: str = "float32"
    logits_dtype: str = "float32"
    remat: str = "none"
    scan: bool = True

    def __post_init__(self) -> None:
        check_roles(self.groups, self.mixers, self.ffns)
        if self.remat not in REMAT:
            raise UserError(f"model.remat: {self.remat!r} is not one of {', '.join(REMAT)}")
        if self.vocab_size < 1 or self.d_model < 1 or self.vocab_multiple < 1 or not 0 <= self.dropout < 1:
            raise UserError(
                f"model: vocab_size={self.vocab_size}, d_model={self.d_model}, vocab_multiple={self.vocab_multiple} must be >= 1 and"
                f" dropout={self.dropout} in [0, 1)"
            )
        if self.learned_positions is not None:
            if self.max_seq_len is None:
                self.max_seq_len = self.learned_positions
            if not 1 <= self.max_seq_len <= self.learned_positions:
                raise UserError(
                    f"model.max_seq_len: {self.max_seq_len} needs as many learned positions, there are"
                    f" learned_positions={self.learned_positions}"
                )
        for key in ("dtype", "param_dtype", "logits_dtype"):
            if getattr(self, key) not in (None, "float32", "bfloat16", "float16", "float64"):
                raise UserError(f"model.{key}: {getattr(self, key)!r} is not float32, bfloat16, float16 or float64")
        for kind, partials in (
            ("mixers", self.mixers),
            ("ffns", self.ffns),
            ("", {"residual": self.residual, "norm": self.norm, "mtp": self.mtp, "draft": self.draft}),
        ):
            for role, partial in partials.items():
                if isinstance(
                    partial, nn.Module
                ):  # an instance would be adopted once and share its weights between blocks
                    raise UserError(
                        f"model.{kind}{'.' if kind else ''}{role}: needs _partial_: true, got a finished {type(partial).__name__}"
                    )
        self.residual_site("out").check(self.groups)
        if (heads := self.mtp_heads()) is not None:
            check_roles([Group(1, ((heads.mixer, heads.ffn),))], self.mixers, self.ffns, key="model.mtp")
        self._check_draft()
        super().__post_init__()

    @nn.nowrap
    def _check_draft(self) -> None:
        if self.draft is None:
            return
        if self.lora is not None:
            raise UserError("model.draft: a draft head and adapters are not trained at once; merge the adapters first")
        recipe: Any = self.draft
        pair = (recipe.keywords.get("mixer", ""), recipe.keywords.get("ffn", ""))
        check_roles([Group(1, (pair,))], self.mixers, self.ffns, key="model.draft")
        self.draft_head()

    # ---- what the fields mean ------------------------------------------------------------------------------------------------------

    @property
    def groups(self) -> tuple[Group, ...]:
        return parse(self.layers)

    @property
    def num_layers(self) -> int:
        return sum(group.layers for group in self.groups)

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def compute_dtype(self) -> Any:
        if self.dtype is not None:
            return jnp.dtype(self.dtype)
        return jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")

    @nn.nowrap
    def unrolled(self) -> "LanguageModel":
        """The same model on unstacked parameters: needed wherever a cache is passed."""
        return self.clone(scan=False)

    @nn.nowrap
    def _supplied(self) -> dict[str, Any]:
        return {
            "d_model": self.d_model,
            "dtype": self.compute_dtype,
            "param_dtype": jnp.dtype(self.param_dtype),
            "norm_eps": self.norm_eps,
        }

    @nn.nowrap
    def mixer(self, role: str, **kwargs: Any) -> Any:
        """The mixer of a role with the model's fields filled in; unbound unless `name` is given."""
        return self.mixers[role](**self._supplied(), **({"parent": None} | kwargs if "name" not in kwargs else kwargs))

    @nn.nowrap
    def ffn(self, role: str, **kwargs: Any) -> Any:
        layer = self.ffns[role](**self._supplied(), **({"parent": None} | kwargs if "name" not in kwargs else kwargs))
        known = getattr(layer, "token_ids", None)
        if known is not None and known < self.vocab_size:
            raise UserError(
                f"model.ffns.{role}: routes the {known} token ids of its table, and model.vocab_size is {self.vocab_size};"
                f" set model.ffns.{role}.router.vocab_size to {self.vocab_size}"
            )
        return layer

    @nn.nowrap
    def norm_layer(self, **kwargs: Any) -> nn.Module:
        """A norm of the model with its fields filled in; unbound unless `name` is given."""
        supplied = {"eps": self.norm_eps, "param_dtype": jnp.dtype(self.param_dtype)}
        return self.norm(**supplied, **({"parent": None} | kwargs if "name" not in kwargs else kwargs))

    @nn.nowrap
    def residual_site(self, site: str, **kwargs: Any) -> Residual:
        """The residual scheme as it stands at a site; unbound unless `name` is given."""
        supplied = {**self._supplied(), "site": site}
        return self.residual(**supplied, **({"parent": None} | kwargs if "name" not in kwargs else kwargs))

    @nn.nowrap
    def mtp_heads(self, **kwargs: Any) -> MultiToken | None:
        """The heads that look further ahead, if there are any; unbound unless `name` is given."""
        if self.mtp is None:
            return None
        supplied = {name: value for name, value in self._supplied().items() if name != "norm_eps"}
        streams = getattr(getattr(self.mtp, "func", self.mtp), "on_streams", False)
        supplied |= {"block": lambda **kw: self._own_block(heads.mixer, heads.ffn, streams, **kw)}
        supplied |= {"norm_layer": self.norm_layer} | ({"residual": self.residual_site} if streams else {})
        heads: MultiToken = self.mtp(**supplied, **({"parent": None} | kwargs if "name" not in kwargs else kwargs))
        return heads

    @nn.nowrap
    def draft_head(self, **kwargs: Any) -> Draft | None:
        """The head that drafts for this model, if there is one; unbound unless `name` is given."""
        if self.draft is None:
            return None
        recipe: Any = self.draft
        supplied = {
            **self._supplied(),
            "num_layers": self.num_layers,
            "block": lambda **kw: self._own_block(head.mixer, head.ffn, **kw),
            "norm_layer": self.norm_layer,
            "role": self.mixers[recipe.keywords["mixer"]],
            "ffn_layer": lambda **kw: self.ffn(head.ffn, **kw),
        }
        head: Draft = recipe(**supplied, **({"parent": None} | kwargs if "name" not in kwargs else kwargs))
        return head

    @nn.nowrap
    def _own_block(self, mixer_role: str, ffn_role: str, streams: bool = False, **kwargs: Any) -> nn.Module:
        """A block outside the groups, with the model's remat; and the plain residual scheme, or with `streams` the model's."""
        policy = REMAT[self.remat]
        made = self._block(mixer_role, ffn_role).keywords
        kind = Block if policy is None else nn.remat(Block, policy=policy)
        plain = {} if streams else {"residual": functools.partial(Residual, **self._supplied())}
        return kind(**made | plain, **kwargs)

    @nn.nowrap
    def _block(self, mixer_role: str, ffn_role: str) -> functools.partial[Block]:
        return functools.partial(
            Block,
            mixer=lambda **kw: self.mixer(mixer_role, **kw),
            ffn=lambda **kw: self.ffn(ffn_role, **kw),
            residual=self.residual_site,
            norm=self.norm_layer,
            pre_norms=self.pre_norms,
            post_norms=self.post_norms,
            dropout=self.dropout,
        )

    # ---- the forward pass ----------------------------------------------------------------------------------------------------------

    def setup(self) -> None:
        d, v, dtype = self.d_model, self.padded_vocab, jnp.dtype(self.param_dtype)
        self.embed = param(self, "embed", Normal(d**-0.5), (v, d), ("vocab", "embed"), dtype=dtype)
        if not self.tie_embeddings:
            self.lm_head = param(self, "lm_head", Normal(d**-0.5), (d, v), ("embed", "vocab"), dtype=dtype)
        if self.learned_positions is not None:  # smaller than the embedding, as in GPT-2: positions only nudge a token
            table = (self.learned_positions, d)
            self.positions = param(self, "positions", Normal(0.5 * d**-0.5), table, (None, "embed"), dtype=dtype)
        if self.embed_norm:
            self.norm_embed = self.norm_layer(name="norm_embed")
        self.final_norm = self.norm_layer(name="final_norm")
        self.residual_out = self.residual_site("out", name="residual_out")
        self.further = self.mtp_heads(name="mtp")
        self.drafter = self.draft_head(name=DRAFT)
        self.periods = [self._periods(i) for i in range(len(self.groups))]

    @nn.nowrap
    def _period(self, group: Group, *, scanned: bool) -> functools.partial[Period]:
        """The class of a group's period with its fields filled in; `scanned` says whether its backward is a loop of its own."""
        policy = REMAT[self.remat]
        blocks = tuple(self._block(*pair) for pair in group.period)
        body = Period if policy is None else nn.remat(Period, prevent_cse=not scanned, policy=policy)
        return functools.partial(body, blocks=blocks, residual=self.residual_site)

    @nn.nowrap
    def _periods(self, i: int) -> list[nn.Module]:
        """The modules of group i: one a repeat, or one that stands for all."""
        group = self.groups[i]
        period = self._period(group, scanned=self.scan)
        if not self.scan:
            return [period(name=f"g{i}_{n}") for n in range(group.repeats)]
        stacked: dict[str, Any] = {
            "variable_axes": {"params": 0},
            "split_rngs": {"params": True, "dropout": True},
            "out_axes": 0,
            "metadata_params": {nn.PARTITION_NAME: "layers"},
        }
        if self.residual_site(
            "out"
        ).grows:  # a scan cannot carry it: this only declares the parameters, see `_one_by_one`
            return [
                nn.vmap(period.func, in_axes=None, axis_size=group.repeats, **stacked)(**period.keywords, name=f"g{i}")
            ]
        # The body is traced once: the check that would trace it again looks at results that are the same for all repeats; there are none.
        loop: dict[str, Any] = {
            "in_axes": (nn.broadcast,) * 3,
            "length": group.repeats,
            "check_constancy_invariants": False,
        }
        return [nn.scan(period.func, **{**loop, **stacked})(**period.keywords, name=f"g{i}")]

    @nn.nowrap
    def _check_shared(self) -> None:
        """Refuse a layer that takes what no layer before it gives."""
        given: set[str] = set()
        for role in (pair[0] for group in self.groups for pair in group.period):
            mixer = self.mixer(role)
            missing = [name for name in getattr(mixer, "takes", ()) if name not in given]
            if missing:
                raise UserError(
                    f"model.layers: {role!r} takes {missing[0]!r} from a layer before it, and none there gives it; put one first"
                    f" (for sparse attention, one with indexer=full)"
                )
            given.update(getattr(mixer, "gives", ()))

    @nn.nowrap
    def _shared_start(self, ctx: Context) -> dict[str, Array]:
        self._check_shared()
        b, t = ctx.tokens.shape
        spec: dict[str, jax.ShapeDtypeStruct] = {}
        for role in dict.fromkeys(pair[0] for group in self.groups for pair in group.period):
            spec.update(self.mixer(role).shared_spec(b, t, ctx.train, self.compute_dtype))
        return {name: jnp.zeros(s.shape, s.dtype) for name, s in spec.items()}

    def _embed(self, ctx: Context) -> Array:
        """`[b t d]`, what the stream starts with."""
        x = jnp.take(self.embed, ctx.tokens, axis=0, mode="clip").astype(self.compute_dtype)
        if self.embed_scale is not None:
            x = x * jnp.asarray(self.embed_scale, x.dtype)
        if self.learned_positions is not None:
            x = x + jnp.take(self.positions, ctx.positions, axis=0, mode="clip").astype(x.dtype)
        return self.norm_embed(x) if self.embed_norm else x

    def _group(
        self, i: int, R: Any, shared: Mapping[str, Array], ctx: Context, cache: Any
    ) -> tuple[Any, Mapping[str, Array], dict[str, Any], Aux]:
        """Run the layers of group i: what they leave of R and `shared`, the new caches, and aux with a leading axis of repeats."""
        periods: list[Callable[..., Any]] = list(self.periods[i])
        if self.scan and self.residual_out.grows:
            if self.is_initializing():
                (carry, shared), (_, aux) = periods[0]((R, shared), ctx, None, ())
                carry, shared = jax.tree.map(lambda a: a[0], (carry, shared))
                return carry, shared, {}, aux
            periods = self._one_by_one(i)
        carry, fixed = self.residual_out.split(R)
        parts: list[Aux] = []
        caches = {}
        for n, period in enumerate(periods):
            key = f"g{i}_{n}"
            (carry, shared), (caches[key], part) = period(
                (carry, shared), ctx, None if cache is None else cache[key], fixed
            )
            parts.append(part)
        # Both layouts report alike: one leading axis of repeats.
        stacked = self.scan and not self.residual_out.grows
        aux = parts[0] if stacked else {k: jnp.stack([p[k] for p in parts]) for k in parts[0]}
        return self.residual_out.merge(carry, fixed), shared, caches, aux

    def _one_by_one(self, i: int) -> list[Callable[..., Any]]:
        """The repeats of group i as functions, on slices of the stacked parameters: for a scheme whose stream grows inside a group.

        All slices of a leaf are taken at once: the gradient is then one concatenation, not a sum of arrays that are nearly all zero.
        """
        group, stacked = self.groups[i], nn.meta.unbox(self.variables["params"][f"g{i}"])
        slices = jax.tree.map(lambda a: [part[0] for part in jnp.split(a, group.repeats)], stacked)
        module = self._period(group, scanned=False)(parent=None)

        def repeat(n: int) -> Callable[..., Any]:
            params = jax.tree.map(lambda parts: parts[n], slices, is_leaf=lambda x: isinstance(x, list))
            rngs = {"dropout": self.make_rng("dropout")} if self.has_rng("dropout") else {}
            return functools.partial(module.apply, {"params": params}, rngs=rngs)

        return [repeat(n) for n in range(group.repeats)]

    def backbone(self, ctx: Context, cache: Any = None) -> tuple[Any, Out]:
        """Everything but the head."""
        if cache is not None and self.scan:
            raise ValueError("a cache needs the unstacked layout: use model.unrolled() with unstack(model, params)")
        if self.max_seq_len is not None and cache is None and ctx.tokens.shape[1] > self.max_seq_len:
            raise UserError(
                f"model.max_seq_len: a sequence of {ctx.tokens.shape[1]} is longer than {self.max_seq_len}; shorten it or raise the limit"
            )
        asked = ctx
        if self.drafter is not None and {"draft", "features"} & set(ctx.capture):
            # A frozen trunk is met as it will be used: no dropout, nothing to balance.
            ctx = dataclasses.replace(ctx, capture=(*ctx.capture, "stream"), train=False)
        x = self._embed(ctx)
        R = self.residual_out.start(shard(x, "batch", "length", "act_embed"))
        shared: Mapping[str, Array] = self._shared_start(ctx)
        aux: Aux = {}
        new_cache = {}
        streams = [x[None]] if "stream" in ctx.capture else []
        done = 0
        for i, group in enumerate(self.groups):
            if i:
                R = self.residual_out.boundary(R, done)
            done += group.layers
            R, shared, caches, group_aux = self._group(i, R, shared, ctx, cache)
            new_cache.update(caches)
            for k, value in named(group_aux, f"g{i}").items():
                aux = merged(aux, {k: jnp.sum(value, axis=0)} if k.startswith("loss/") else {k: value})
            if streams:
                ordered = [aux.pop(f"capture/g{i}/b{j}/stream") for j in range(len(self.groups[i].period))]
                streams.append(jnp.stack(ordered, axis=1).reshape(-1, *x.shape))
        last = self.residual_out.finish(R)
        hidden = self.final_norm(last)
        if self.further is not None and cache is None and ("mtp" in ctx.capture or self.is_initializing()):
            trunk = {"post_norm": hidden, "pre_norm": last, "streams": R}[self.further.hidden]
            aux["capture/mtp"], more = self.further(trunk, self._embed, ctx, self._shared_start(ctx))
            aux = merged(aux, named(more, "mtp"))
        capture = {k.removeprefix("capture/"): aux.pop(k) for k in list(aux) if k.startswith("capture/")}
        if streams:  # entry k is the stream after k blocks: 0 = embeddings, num_layers = before the final norm
            capture["stream"] = jnp.concatenate(streams)
        if self.drafter is not None and ctx is not asked:
            capture, more = self._drafts(capture, last, hidden, asked)
            aux = merged({k: v for k, v in aux.items() if k.startswith("metric/")}, named(more, DRAFT))
        return (None if cache is None else new_cache), Out(None, hidden, capture, aux)

    def _drafts(
        self, capture: dict[str, Array], last: Array, hidden: Array, ctx: Context
    ) -> tuple[dict[str, Array], Aux]:
        """What the draft head makes of the streams and of what the final norm reads (`last`) and gives (`hidden`): `features`, and on
        whole sequences `draft`, whichever was asked for."""
        assert self.drafter is not None
        stream = capture["stream"] if "stream" in ctx.capture else capture.pop("stream")
        g = self.drafter.fused(stream, last, hidden)
        aux: Aux = {}
        if "features" in ctx.capture:
            capture["features"] = g
        if "draft" in ctx.capture and ctx.rows is None:
            capture["draft"], aux = self.drafter(g, self._embed, ctx, self._shared_start(ctx))
        return capture, aux

    def draft_step(self, g: Array, ctx: Context, cache: Any) -> tuple[Any, Array, Array]:
        """One call of the draft head with its own cache: (cache, logits `[b t padded_vocab]`, features `[b t d]` of its own).

        g: features, of the trunk (`capture["features"]`) or of the last call. ctx: of the tokens *after* those that the features are of,
        the first of them at position 0. Logits at i are of the token after `ctx.tokens[i]`; ids that cannot be drafted have -1e30.
        """
        assert self.drafter is not None, "the model has no draft head"
        e = self._embed(after(ctx))
        cache, own, normed, _ = self.drafter.step(g, e, ctx, cache, self._shared_start(ctx))
        if self.drafter.vocab is None:
            return cache, self.head(normed), own
        w = self.drafter.head.astype(self.compute_dtype)
        logits = self._capped(jnp.einsum("...d,dv->...v", normed, w, preferred_element_type=jnp.float32))
        none = jnp.full((*logits.shape[:-1], self.padded_vocab), -1e30, self.logits_dtype)
        return cache, none.at[..., self.drafter.ids].set(logits.astype(none.dtype)), own

    def declare_ends(self, ctx: Context) -> tuple[Any, Mapping[str, Array]]:
        """Meets every parameter outside the groups once, and gives what their first layer is called with: see `jaxllm.params.declare`."""
        R, shared = self.residual_out.start(self._embed(ctx)), self._shared_start(ctx)
        hidden = self.final_norm(self.residual_out.finish(R))
        if self.further is not None:
            self.further(R if self.further.on_streams else hidden, self._embed, ctx, shared)
        if self.drafter is not None:
            streams = jnp.broadcast_to(hidden, (self.num_layers + 1, *hidden.shape))
            g = self.drafter.fused(streams, hidden, hidden)
            self.drafter.step(g, hidden, ctx, None, shared)
        return R, shared

    def head(self, hidden: Array) -> Array:
        """Logits `[.., padded_vocab]`; ids past `vocab_size` get a value no sampler picks and no softmax counts."""
        # A tied matrix is used as it lies: for `hidden @ embed.T` with one row, XLA on CPU makes a naive loop instead of a product.
        if self.tie_embeddings:
            logits = times_transposed(hidden, self.embed.astype(self.compute_dtype), jnp.float32)
        else:
            logits = jnp.einsum(
                "...d,dv->...v", hidden, self.lm_head.astype(self.compute_dtype), preferred_element_type=jnp.float32
            )
        if self.logit_scale is not None:
            logits = logits * self.logit_scale
        logits = self._capped(logits)
        if self.padded_vocab != self.vocab_size:
            logits = jnp.where(jnp.arange(self.padded_vocab) < self.vocab_size, logits, -1e30)
        return logits.astype(self.logits_dtype)

    @nn.nowrap
    def _capped(self, logits: Array) -> Array:
        return logits if self.logit_softcap is None else self.logit_softcap * jnp.tanh(logits / self.logit_softcap)

    def __call__(self, ctx: Context, cache: Any = None) -> tuple[Any, Out]:
        cache, out = self.backbone(ctx, cache)
        return cache, Out(self.head(out.hidden), out.hidden, out.capture, out.aux)

    # ---- unbound: what callers ask without arrays --------------------------------------------------------------------------------

    @nn.nowrap
    def block(self, mixer_role: str, ffn_role: str) -> Block:
        """One layer by itself, unbound."""
        return self._block(mixer_role, ffn_role)(parent=None)

    @nn.nowrap
    def head_weight(self, params: Mapping[str, Any]) -> Array:
        """The matrix `[d, padded_vocab]` of the head times `logit_scale`, for a loss that never holds all logits."""
        w = params["embed"].T if self.tie_embeddings else params["lm_head"]
        return w if self.logit_scale is None else w * jnp.asarray(self.logit_scale, w.dtype)

    @nn.nowrap
    def draft_head_weight(self, params: Mapping[str, Any]) -> Array:
        """As `head_weight`, of the draft head: `[d, ids that it can draft]`, in the order of `params["draft"]["ids"]`; or the trunk's
        own, which has no gradient then."""
        own = params[DRAFT].get("head")
        return jax.lax.stop_gradient(self.head_weight(params)) if own is None else own

    @nn.nowrap
    def init_draft_cache(self, batch: int, length: int, dtype: Any = None, *, draft: int = 0) -> Any:
        """An empty cache of the draft head: see `Draft.init_cache`."""
        head = self.draft_head()
        assert head is not None, "the model has no draft head"
        return head.init_cache(batch, length, self.compute_dtype if dtype is None else jnp.dtype(dtype), draft=draft)

    @nn.nowrap
    def init_cache(
        self, batch: int, length: int, dtype: Any = None, *, draft: int = 0, pages: Pages | None = None
    ) -> dict[str, Any]:
        """A cache for each layer, in the unstacked layout, with room for `length` tokens a row (tentative ones included).

        pages: in pools that all rows share (`jaxllm.pages`); `batch` is then the number of slots for what does not grow with a row.
        """
        dtype = self.compute_dtype if dtype is None else jnp.dtype(dtype)

        def make(role: str) -> Any:
            def plain(batch: int, length: int) -> Any:
                return self.mixer(role).init_cache(batch, length, dtype, draft=draft)

            return plain(batch, length) if pages is None else paged_of(plain, batch, length, pages)

        return {
            f"g{i}_{n}": {f"b{j}": make(pair[0]) for j, pair in enumerate(group.period)}
            for i, group in enumerate(self.groups)
            for n in range(group.repeats)
        }

    @nn.nowrap
    def prepare(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters for decoding, from unstacked ones: each layer fuses or absorbs its own. Pure.

        What is stored narrower than the computation is widened here, once: on CPU, where bfloat16 checkpoints are computed in float32,
        converting at every token would take longer than the products. Embedding and head take the computation's dtype either way.
        """
        dtype = self.compute_dtype

        def widen(a: Any) -> Any:
            narrow = jnp.issubdtype(a.dtype, jnp.floating) and a.dtype.itemsize < dtype.itemsize
            return a.astype(dtype) if narrow else a

        params = jax.tree.map(widen, dict(params))
        ends = {name: params[name] for name in ("embed", "lm_head") if name in params}
        out = {**params, **{name: a if a.dtype == dtype else a.astype(dtype) for name, a in ends.items()}}
        for i, group in enumerate(self.groups):
            for n in range(group.repeats):
                period = dict(params[f"g{i}_{n}"])
                for j, (mixer, ffn) in enumerate(group.period):
                    block = dict(period[f"b{j}"])
                    for name, layer in (("mixer", self.mixer(mixer)), ("ffn", self.ffn(ffn))):
                        if name in block:
                            block[name] = layer.prepare(block[name])
                    period[f"b{j}"] = block
                out[f"g{i}_{n}"] = period
        if (head := self.draft_head()) is not None and DRAFT in out:
            out[DRAFT] = head.prepare(out[DRAFT])
        return out

    @nn.nowrap
    def cost(self, batch: int = 1, t: int = 1, s: float = 1, dtype: Any = None) -> Cost:
        """Cost of a forward call: every new token meets `s` keys. Norms hold few parameters: see the table."""
        dtype = self.compute_dtype if dtype is None else dtype
        d, v = self.d_model, self.padded_vocab
        size = jnp.dtype(dtype).itemsize
        total = Cost(
            flops=2 * batch * t * d * v,
            params=d * v * (1 if self.tie_embeddings else 2) + d * (self.learned_positions or 0),
            params_active=d * v,
            activation_bytes=batch * t * d * size,
        )
        for group in self.groups:
            for mixer, ffn in group.period:
                layer = self.mixer(mixer).cost(batch, t, s, dtype) + self.ffn(ffn).cost(batch, t, s, dtype)
                total = total + (layer + Cost(activation_bytes=4 * batch * t * d * size)) * group.repeats
        if (heads := self.mtp_heads()) is not None:  # held, but no part of a call without capture
            layers = (self.mixer(heads.mixer), self.ffn(heads.ffn))
            held = heads.depth * sum(layer.cost(1, 1, 1, dtype).params for layer in layers)
            total = total + Cost(params=held + heads.extra_params())
        if (head := self.draft_head()) is not None:
            total = total + Cost(params=head.cost(1, 1, 1, dtype).params)
        return total + self.residual_site("out").cost(batch, t, self.groups, dtype)
