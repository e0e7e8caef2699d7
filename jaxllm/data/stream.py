"""Text from tokens as they come, one at a time, never showing half a character."""

import codecs

from jaxllm.data.vocabulary import Tokenizer


class StreamDecoder:
    """Turns ids into text increments. Joined, `push` of each id and one `finish` equal `tokenizer.decode(ids)`.

    A character whose bytes are spread over several tokens is held back until it is whole; if the stream ends inside
    one, `finish` gives the single U+FFFD that decoding the whole would give.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = tokenizer.strip_space

    def push(self, token: int) -> str:
        """The text that became certain with this id; empty while a character is unfinished."""
        raw = self._tokenizer.piece(int(token))
        if self._strip and raw:
            raw, self._strip = raw.removeprefix(b" "), False
        return self._decoder.decode(raw)

    def finish(self) -> str:
        """Whatever is still held; the decoder may be used for another text afterwards."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._strip = self._tokenizer.strip_space
        return rest
