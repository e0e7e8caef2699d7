"""Conversations from jsonl files, for supervised fine-tuning: every turn is read, only what the assistant says is trained.

A line is `{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}, ...]}`. The tokenizer's chat template
makes the tokens, the same ones that `task=generate chat=true` and the server make, and says which of them are the assistant's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxllm.data import checks
from jaxllm.data.chat import ASSISTANT, MAX_TEMPLATE_CHARS, ChatTemplate, template_text
from jaxllm.data.checks import Log
from jaxllm.data.corpus import Conversation, Documents, Encoder, Source
from jaxllm.data.files import Reading, find_files, keys, read_records, unicode
from jaxllm.data.subword import JsonTokenizer
from jaxllm.data.vocabulary import Tokenizer, read_text
from jaxllm.errors import UserError

# For tokenizers of text alone, which have no tokens for turns: a line names the speaker, `eos` ends an answer.
PLAIN = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '# ' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content | trim + eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content | trim }}{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '# assistant\\n' }}{% endif %}"
)
NAMED = {"plain": PLAIN}


@dataclass
class Chat(Source):
    """Conversations, one a line of jsonl.

    path: a file, a folder, a glob or a list of them, packed or not. messages_key: where the messages are in a line.
    turns: which answers are trained, `all` or the `last` one of each conversation. A template that rewrites earlier turns (one that
        leaves out old reasoning, say) needs `last`, unless it marks answers by `{% generation %}`.
    template: null = the tokenizer's own; else a jinja file, or `plain`: lines that name the speaker, for a tokenizer of text alone.
        It travels with the tokenizer from then on, so the model is asked in the words that it was taught.
    max_expansion: packed files that unpack to more than this many times their size (and 64 MiB) are refused.
    """

    path: str | Sequence[str] = ""
    messages_key: str = "messages"
    turns: Literal["all", "last"] = "all"
    template: str | None = None
    max_expansion: int = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise UserError("data.path: missing; give data.path=<jsonl file of conversations>")
        checks.word("data.messages_key", self.messages_key)
        checks.word("data.template", self.template, optional=True)
        checks.whole("data.max_expansion", self.max_expansion, least=1)
        if self.turns not in ("all", "last"):
            raise UserError(f"data.turns={self.turns!r}: must be all or last")

    def outfit(self, tokenizer: Tokenizer, base: Path) -> Tokenizer:
        """The tokenizer with `template` as its chat template. Raises UserError where there is none to be had."""
        if not isinstance(tokenizer, JsonTokenizer):
            raise UserError(
                "data.tokenizer: conversations need one that can hold a chat template (data/tokenizer=bpe|file)"
            )
        text = self._template(base)
        if text is None:
            if template_text(tokenizer.companions) is None:
                raise UserError("data.template: the tokenizer has no chat template; name a jinja file, or plain")
            return tokenizer
        files = {**tokenizer.companions, "chat_template.jinja": text}
        return JsonTokenizer(tokenizer.library, tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id, files)

    def open(self, base: Path, log: Log) -> Documents:
        files = find_files(self.path, base, log)
        identity = {
            "files": [[f.path.as_posix(), f.size, f.mtime_ns] for f in files],
            "messages_key": self.messages_key,
            "turns": self.turns,
            "template": self._template(base),
        }
        how = Reading(max_expansion=self.max_expansion)

        def read() -> Iterator[Conversation]:
            for file in files:
                for where, record in read_records(file, how):
                    yield Conversation(messages_of(record, self.messages_key, where), where)

        facts = {"source": "conversations", "path": self.path, "files": len(files), "turns": self.turns}
        size = sum(f.size for f in files)
        return Documents(identity, facts, read, size=size, masked=True, encoder=self._encoder)

    def _template(self, base: Path) -> str | None:
        if self.template is None or self.template in NAMED:
            return NAMED.get(self.template or "")
        path = base / Path(self.template).expanduser()
        if not path.is_file():
            raise UserError(f"data.template={self.template}: no file {path}, and none of {', '.join(NAMED)}")
        if len(text := read_text(path)) > MAX_TEMPLATE_CHARS:
            raise UserError(f"data.template={self.template}: {len(text)} characters is too long for a template")
        return text

    def _encoder(self, tokenizer: Tokenizer) -> Encoder:
        template = ChatTemplate(tokenizer)

        def encode(conversation: Conversation) -> tuple[list[int], list[bool]]:
            try:
                ids, trained = template.conversation(conversation.messages, last_only=self.turns == "last")
            except UserError as error:
                raise UserError(f"{conversation.where}: {error}") from None
            if not any(trained):
                raise UserError(f"{conversation.where}: the template writes nothing of what the assistant says")
            return ids, trained

        return encode


def messages_of(record: Mapping[str, Any], key: str, where: str) -> tuple[Mapping[str, Any], ...]:
    """The messages of a line; anything that is no conversation with an answer names the line."""
    messages = record.get(key)
    if not isinstance(messages, list) or not messages:
        raise UserError(
            f"{where}: no messages under data.messages_key={key!r} (keys of this line: {keys(dict(record))})"
        )
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"{where}: message {number} has no role; a message is {{role: ..., content: ...}}")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise UserError(f"{where}: the content of message {number} is {type(content).__name__}, not text")
        unicode(content or "", where)
    if not any(message["role"] == ASSISTANT for message in messages):
        raise UserError(f"{where}: no message of the role {ASSISTANT!r}, so there is nothing to train")
    return tuple(messages)
