"""The keys of `task=generate`, which stand at the root of the config beside the common `seed` and `source`, and of `task=read`."""

from dataclasses import dataclass, field
from typing import Any

from jaxllm.errors import UserError
from jaxllm.ops.paged_attention import check_kernel


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
    out: with prompts, a jsonl file that gets each answer as soon as it is there; started again, the task goes on where it ended. Rows
    run through the engine, by the settings under `server`.
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
    out: str | None = None


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


@dataclass(frozen=True)
class EngineSettings:
    """How an engine holds its requests: the keys `server.*` that have to do with memory, batching and shapes.

    cache: "paged" = pools of pages that rows share; "contiguous" = each row has a cache of its own for the longest sequence: the plainest
    engine, and what to read first. rows: requests that run at once. max_len: tokens of the longest sequence, prompt and answer; null =
    the model's limit, or 2,048. page_size: tokens of a page. pages: of the pool; null = enough for every row at its longest.
    cache_dtype: null = the model's. kernel: what attends on pages, by name (`jaxllm.ops.paged_attention`); auto = the fastest here.

    step_tokens: tokens that one step computes at most, decoding rows first; it must exceed rows. chunk: the longest piece of a prompt in
    one call. policy: "reserve" = a request starts when it is sure to end; "optimistic" = when its prompt fits, and the youngest is
    computed again when pages run out; "static" = a batch starts when the one before has ended (to compare with). prefix_cache: reuse
    pages of prompts that begin alike. snapshots: copies of states that models with recurrent layers or windows keep for that, each as
    large as a row's; null = as many as rows; 0 = such models reuse nothing. queue: requests that may wait.

    row_buckets, token_buckets, width_buckets: shapes that are compiled, ascending: rows of decoding, tokens of a chunk, pages of a row;
    null = powers of two, and of four for widths (one width where every layer reads pages in place). prompt_logprobs: compile also what
    scores prompts. overlap: dispatch a step before the last one's tokens have been read. preempt_every: for tests.
    """

    cache: str = "paged"
    rows: int = 8
    max_len: int | None = None
    page_size: int = 16
    pages: int | None = None
    cache_dtype: str | None = None
    kernel: str = "auto"
    step_tokens: int = 512
    chunk: int = 256
    policy: str = "reserve"
    prefix_cache: bool = True
    snapshots: int | None = None
    queue: int = 1024
    row_buckets: list[int] | None = None
    token_buckets: list[int] | None = None
    width_buckets: list[int] | None = None
    prompt_logprobs: bool = True
    overlap: bool = True
    preempt_every: int | None = None

    def __post_init__(self) -> None:
        if self.cache not in ("paged", "contiguous"):
            raise UserError(f"server.cache: {self.cache!r} is not one of paged, contiguous")
        if self.policy not in ("reserve", "optimistic", "static"):
            raise UserError(f"server.policy: {self.policy!r} is not one of reserve, optimistic, static")
        check_kernel(self.kernel)
        if self.snapshots is not None and self.snapshots < 0:
            raise UserError(f"server.snapshots: {self.snapshots} must be at least 0")
        for name in ("rows", "page_size", "chunk", "queue", "max_len", "pages"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"server.{name}: {value} must be at least 1")
        if self.step_tokens <= self.rows:
            raise UserError(
                f"server.step_tokens: {self.step_tokens} must exceed rows={self.rows}, or prompts would never get a turn"
            )
        for name in ("row_buckets", "token_buckets", "width_buckets"):
            if (sizes := getattr(self, name)) is not None and (
                not sizes or sorted(set(sizes)) != sizes or sizes[0] < 1
            ):
                raise UserError(f"server.{name}: {sizes} must be ascending numbers of at least 1")


@dataclass(frozen=True)
class ServeSettings(EngineSettings):
    """`server.*`: an engine (see above) and the HTTP server before it.

    host, port: where it listens; port 0 = any free one. public: must be true to listen beyond this machine. model_name: what clients call
    the model; null = the source's name. api_key_env: name of the environment variable that holds the key; api_key_file: a file with
    one key a line. metrics_public: /metrics without a key. vllm_metrics: the same numbers also under vLLM's names.

    modes: fields of the model by context tier, `{8192: {mixers.global.top_k: 512}, 65536: {mixers.global.top_k: 2048}}`: those of the
    smallest tier that holds `max_len` are set (top-k budgets, RoPE scaling: nothing that changes the shape of a parameter); a key
    `model.*` on the command line wins.

    max_body: bytes of a request; max_connections; deadline_s: the longest a request may take; read_timeout_s: the longest a body may
    take to arrive; drain_s: how long running requests may go on after SIGTERM.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    public: bool = False
    model_name: str | None = None
    api_key_env: str | None = None
    api_key_file: str | None = None
    metrics_public: bool = False
    vllm_metrics: bool = False
    modes: dict[int, dict[str, Any]] = field(default_factory=dict)
    max_body: int = 2**20
    max_connections: int = 1024
    deadline_s: float = 600.0
    read_timeout_s: float = 30.0
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.public and self.host not in ("127.0.0.1", "localhost", "::1"):
            raise UserError(
                f"server.host: {self.host} can be reached from other machines; add server.public=true if you mean it"
            )
        if not 0 <= self.port < 65536:
            raise UserError(f"server.port: {self.port} is no port")
        for name in ("max_body", "max_connections", "deadline_s", "read_timeout_s"):
            if getattr(self, name) <= 0:
                raise UserError(f"server.{name}: {getattr(self, name)} must be greater than 0")
        self.mode()

    def mode(self) -> dict[str, Any]:
        """Dotted keys of the model, and their values, of the tier that this server is for."""
        if not self.modes:
            return {}
        if self.max_len is None:
            raise UserError("server.max_len: null, so no tier of server.modes is chosen; set it")
        tiers = sorted(self.modes)
        tier = next((tier for tier in tiers if tier >= self.max_len), None)
        if tier is None:
            raise UserError(f"server.modes: {tiers} has no tier for server.max_len={self.max_len}; add one")
        return {f"model.{key}": value for key, value in self.modes[tier].items()}


@dataclass(frozen=True)
class BenchSettings:
    """`bench.*`: load on a server, and what counts as good.

    url: of a server of the OpenAI protocol; null = the engine of `source=`, in this process and without HTTP. model: its name there;
    null = the first it lists. api_key_env: environment variable that holds its key.

    rate: requests a second, at random intervals (open loop: they come whether or not the server keeps up); null = closed loop, where
    `concurrency` clients each ask again as soon as they are answered. requests: how many; warm_up: so many before, not counted.
    prompt_min, prompt_max: tokens, log-uniform. output_min, output_max: tokens, log-normal about their geometric mean (long-tailed), cut
    to this range; every answer is made exactly so long. prefix: so many first tokens are the same in all prompts.

    ttft_limit_s, tpot_limit_s: a request is good when both are kept: goodput counts those alone.
    """

    url: str | None = None
    model: str | None = None
    api_key_env: str | None = None
    rate: float | None = None
    concurrency: int = 8
    requests: int = 32
    warm_up: int = 2
    prompt_min: int = 16
    prompt_max: int = 512
    output_min: int = 8
    output_max: int = 256
    prefix: int = 0
    ttft_limit_s: float = 2.0
    tpot_limit_s: float = 0.2

    def __post_init__(self) -> None:
        for name in ("concurrency", "requests", "prompt_min", "output_min"):
            if getattr(self, name) < 1:
                raise UserError(f"bench.{name}: {getattr(self, name)} must be at least 1")
        for name in ("prompt", "output"):
            low, high = getattr(self, f"{name}_min"), getattr(self, f"{name}_max")
            if low > high:
                raise UserError(f"bench.{name}_max: {high} must be at least bench.{name}_min={low}")
        if not 0 <= self.prefix < self.prompt_min:
            raise UserError(f"bench.prefix: {self.prefix} must be in [0, prompt_min={self.prompt_min})")
        if self.rate is not None and self.rate <= 0:
            raise UserError(f"bench.rate: {self.rate} must be greater than 0; null = closed loop")
