"""The keys of `task=report` and `task=inspect`, which stand at the root of the config."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ReportSettings:
    """runs: which run folders, as a path with `*`, several apart by commas; a folder that is no run stands for the runs inside it, as a
    sweep's does. out: the HTML to write; null = report.html in the run folder of this task if it has one, else here."""

    runs: str | None = None
    out: str | None = None


@dataclass(frozen=True)
class InspectSettings:
    """prompt: text, or prompt_ids: token ids, that the model reads. out: the HTML to write; null = inspect.html in the run folder of this
    task if it has one, else here. temperature, top_k, top_p, min_p: the cut that the picture of sampling shows, as in generation."""

    prompt: str | None = None
    prompt_ids: list[int] | None = None
    out: str | None = None
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
