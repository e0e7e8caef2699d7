"""What a run reads: its text in its tokens, and the rows of each of its stages."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from jaxllm.config import Config
from jaxllm.data.checks import Log
from jaxllm.data.corpus import Corpus, Source
from jaxllm.data.loader import Loader
from jaxllm.data.mix import MixLoader
from jaxllm.data.soft_labels import SoftLabels, description
from jaxllm.data.store import TokenStore
from jaxllm.data.tokenizer import Tokenizer, TokenizerSpec, load_tokenizer
from jaxllm.errors import UserError
from jaxllm.tasks import TaskIO
from jaxllm.tasks.source import TOKENIZER, pack_tokenizer
from jaxllm.tasks.teachers import labels_of
from jaxllm.training.loop import Data
from jaxllm.training.objectives import Distill
from jaxllm.training.settings import TrainSettings
from jaxllm.training.stages import Stage


@dataclasses.dataclass(frozen=True)
class Fixed(TokenizerSpec):
    """A tokenizer that is already there: later stages and resumed runs must read text as the model learned it."""

    tokenizer: Tokenizer

    def fit(self, texts: Iterable[str], base: Path, log: Log = None) -> Tokenizer:
        return self.tokenizer

    def identity(self, base: Path) -> dict[str, Any]:
        text = json.dumps(pack_tokenizer(self.tokenizer), sort_keys=True)
        return {"kind": "fixed", "sha256": hashlib.sha256(text.encode()).hexdigest()}


def corpus_of(cfg: Config, io: TaskIO, run_dir: Path, tokenizer: Tokenizer | None = None) -> Corpus:
    """The run's text, in the tokens of `tokenizer` if there is one. A resumed run keeps the tokenizer it has, even where the text
    under it has changed."""
    source: Source = cfg.build("data")
    if tokenizer is not None:
        source = with_tokenizer(source, tokenizer)
    corpus = source.prepare(io.log, cfg.original_cwd)
    later = [cfg.build_node(s.data, f"stages.{i}.data") for i, s in enumerate(cfg.section("stages")) if s.data]
    for other in later:  # what a later stage adds (a chat template) travels with the run's tokenizer from the start
        corpus = dataclasses.replace(corpus, tokenizer=other.outfit(corpus.tokenizer, cfg.original_cwd))
    folder = run_dir / TOKENIZER
    if io.resume and folder.is_dir():
        old = load_tokenizer(folder)
        if pack_tokenizer(old) != pack_tokenizer(corpus.tokenizer):
            io.log("data: the text has changed since the run began; its tokenizer is kept")
            corpus = with_tokenizer(source, old).prepare(io.log, cfg.original_cwd)
    io.log(
        f"data: {corpus.train.size:,} tokens to train on, {corpus.val.size:,} held out,"
        f" vocabulary {corpus.tokenizer.vocab_size:,} ({corpus.facts.get('documents', len(corpus.train)):,} documents)"
    )
    return corpus


def with_tokenizer(source: Source, tokenizer: Tokenizer) -> Source:
    return dataclasses.replace(source, tokenizer=Fixed(tokenizer))


class Opener:
    """Opens the data of a stage: the run's corpus, or the stage's own text in the run's tokens."""

    def __init__(self, cfg: Config, io: TaskIO, corpus: Corpus, seed: int, settings: TrainSettings):
        self.cfg, self.io, self.corpus, self.seed, self.settings = cfg, io, corpus, seed, settings

    def __call__(self, stage: Stage) -> Data:
        corpus = self.corpus
        if stage.data is not None:
            source = self.cfg.build_node(stage.data, f"stages.{stage.index}.data")
            corpus = with_tokenizer(source, corpus.tokenizer).prepare(self.io.log, self.cfg.original_cwd)
        hosts = {"host": jax.process_index(), "hosts": jax.process_count()}
        seed = self.seed + 7919 * stage.index
        labels = self._labels(stage, corpus)

        # Each stage shuffles anew: one that only changes the length must not start over with the rows of the first.
        def load(store: TokenStore) -> Loader:
            return Loader(store, stage.batch_size, stage.seq_len, seed, **hosts, labels=labels)

        loader: Loader | MixLoader
        if corpus.parts:
            loader = MixLoader({name: load(part.train) for name, part in corpus.parts.items()}, corpus.weights)
        else:
            loader = load(corpus.train)
        if len(corpus.val) == 0:
            return Data(loader)
        # In one fixed shuffled order: a pass that is cut short (eval_batches) then reads from all documents, not the first ones.
        held_out = Loader(corpus.val, stage.batch_size // stage.accumulate, stage.seq_len, seed=0, **hosts)
        parts = {
            name: Loader(part.val, stage.batch_size // stage.accumulate, stage.seq_len, seed=0, **hosts).epoch
            for name, part in corpus.parts.items()
            if len(part.val)
        }
        return Data(loader, held_out.epoch, corpus.tokenizer.token_bytes(), parts)

    def _labels(self, stage: Stage, corpus: Corpus) -> SoftLabels | None:
        """A teacher's labels of this stage's rows, where an objective reads some."""
        for name, objective in stage.objectives.items():
            if isinstance(objective, Distill) and objective.labels:
                key = f"objective.{name}.labels={objective.labels}"
                if corpus.parts:
                    raise UserError(
                        f"{key}: labels are of the rows of one source, and data is a mix of {len(corpus.parts)}"
                    )
                labels = labels_of(self.cfg, stage.objectives, key)
                labels.check(description(corpus.facts, corpus.train, stage.seq_len), key)
                return labels
        return None
