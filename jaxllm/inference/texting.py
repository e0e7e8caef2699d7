"""Text of a row that is being generated, piece by piece: never half a character, never the beginning of a stop text."""

from collections.abc import Sequence

from jaxllm.data.stream import StreamDecoder
from jaxllm.data.vocabulary import Tokenizer


class TextStream:
    """Ids in, certain text out. What could still become a stop text is held back; once one is there, nothing comes after it.

    `stopped` is the stop text that was met, or None. The text that was given out never holds it.
    """

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str] = ()):
        self._stream = None if tokenizer is None else StreamDecoder(tokenizer)
        self._stops = tuple(stops)
        self._held = ""
        self.stopped: str | None = None

    def push(self, token: int, may_stop: bool = True) -> str:
        """The text that became certain with this id. may_stop: False lets a stop text pass like any other."""
        if self._stream is None or self.stopped is not None:
            return ""
        text = self._stream.push(token)
        if may_stop:
            return self._give(text)
        text, self._held = self._held + text, ""
        return text

    def finish(self) -> str:
        """What was held back, when no id will come any more."""
        if self._stream is None or self.stopped is not None:
            return ""
        text = self._give(self._stream.finish())
        if self.stopped is None:
            text, self._held = text + self._held, ""
        return text

    def _give(self, text: str) -> str:
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.stopped = min(found, key=lambda pair: pair[0])
            self._held = ""
            return text[:at]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """The longest end of the text that a stop text begins with."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
