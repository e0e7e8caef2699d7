"""The keys of `task=report` and `task=inspect`, which stand at the root of the config."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ReportSettings:
    """runs: which run folders, as a path with `*`, several apart by commas; a folder that is no run stands for the runs inside it, as a
    sweep's does. out: the HTML to write; null = report.html in the run folder of this task if it has one, else here."""

    runs: str | None = None
    out: str | None = None
