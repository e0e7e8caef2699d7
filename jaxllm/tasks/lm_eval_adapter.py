"""A model of ours behind the interface of lm-evaluation-harness (the extra `lm-eval`), which brings its tasks and metrics.

The harness asks three things: log-likelihoods of continuations, of whole texts, and greedy continuations up to a stop text.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.errors import UserError
from jaxllm.inference.generate import Generator
from jaxllm.inference.sampling import SamplingParams
from jaxllm.tasks.source import Source
from jaxllm.training.likelihood import Scorer, pair
from jaxllm.training.settings import EvalSettings

NEW_TOKENS = 256  # of a continuation, where a task sets no limit


def evaluate(
    settings: EvalSettings, source: Source, params: Mapping[str, Any], base: Any
) -> dict[str, dict[str, float]]:
    """`{task: {metric: value}}` of the tasks named in `eval.lm_eval`."""
    try:
        library: Any = importlib.import_module("lm_eval")
        tasks: Any = importlib.import_module("lm_eval.tasks")
    except ImportError as error:
        raise UserError(f"eval.lm_eval: needs the package lm-eval: pip install 'jaxllm[lm-eval]' ({error})") from None
    include = None if settings.lm_eval_path is None else str(base / settings.lm_eval_path)
    manager = tasks.TaskManager(include_path=include)
    known = set(manager.all_tasks)
    if unknown := [name for name in settings.lm_eval if name not in known]:
        raise UserError(
            f"eval.lm_eval={unknown[0]}: the harness knows no such task; name a folder with it by eval.lm_eval_path"
        )
    result = library.simple_evaluate(
        model=adapter(source, params),
        tasks=list(settings.lm_eval),
        task_manager=manager,
        limit=settings.limit,
        bootstrap_iters=0,
        log_samples=False,
    )
    return {
        task: {name.partition(",")[0]: value for name, value in metrics.items() if isinstance(value, int | float)}
        for task, metrics in result["results"].items()
    }


def adapter(source: Source, params: Mapping[str, Any]) -> Any:
    """The model as an `lm_eval.api.model.LM`; the class exists only where the package does."""
    base: Any = importlib.import_module("lm_eval.api.model").LM
    asked = Requests(source, params)
    methods = {name: getattr(asked, name) for name in ("loglikelihood", "loglikelihood_rolling", "generate_until")}

    def method(call: Any) -> Any:
        return lambda self, requests, disable_tqdm=False: call([request.args for request in requests])

    return type("JaxLM", (base,), {name: method(call) for name, call in methods.items()})()


class Requests:
    """What the harness asks, in plain arguments."""

    def __init__(self, source: Source, params: Mapping[str, Any]):
        assert source.tokenizer is not None
        self.tokenizer, self.params, self.model = source.tokenizer, params, source.model
        self.scorer = Scorer(source.model)
        self._generator: tuple[Generator, dict[str, Any]] | None = None

    def loglikelihood(self, arguments: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """(log-probability, is greedy) of each (context, continuation)."""
        scores = self.scorer(self.params, [pair(self.tokenizer, *args) for args in arguments])
        return [(score.logprob, score.greedy) for score in scores]

    def loglikelihood_rolling(self, arguments: Sequence[tuple[str]]) -> list[float]:
        """Log-probability of each whole text: pieces of the longest row, each token in exactly one, and the last token of the piece before
        stands in front of it."""
        found = []
        for (text,) in arguments:
            ids = [*(self.tokenizer.prompt("") or [self.tokenizer.eos_id]), *self.tokenizer.encode(text)]
            size = self.scorer.longest
            pairs = [(ids[i : i + 1], ids[i + 1 : i + 1 + size]) for i in range(0, len(ids) - 1, size)]
            found.append(sum(score.logprob for score in self.scorer(self.params, pairs)))
        return found

    def generate_until(self, arguments: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """The continuation of each context, up to the first stop text, which is left out."""
        if self._generator is None:
            generator = Generator(self.model, self.tokenizer)
            self._generator = (generator, generator.prepare(self.params))
        generator, weights = self._generator
        found = []
        for context, asked in arguments:
            until = asked.get("until") or []
            until = [until] if isinstance(until, str) else until
            count = int(asked.get("max_gen_toks", NEW_TOKENS))
            prompt = self.tokenizer.prompt(context) or [self.tokenizer.eos_id]
            if self.model.max_seq_len is not None:
                prompt = prompt[-max(1, self.model.max_seq_len - count) :]
            heat = float(asked.get("temperature") or 0.0) if asked.get("do_sample") else 0.0
            sampling = SamplingParams(temperature=heat, max_tokens=count)
            (made,), _ = generator.generate(weights, [prompt], max_new_tokens=count, sampling=sampling)
            text = made.text
            for stop in until:
                text = text.partition(stop)[0]
            found.append(text)
        return found
