"""Conversations for fine-tuning: the tokens are the template's, only answers and what ends them are trained, bad lines are named."""

import json

import numpy as np
import pytest
from chat_files import CHATML, make

from jaxllm.data import BPE, Bytes, Loader
from jaxllm.data.chat import ChatTemplate
from jaxllm.data.conversations import PLAIN, Chat
from jaxllm.data.tokenizer import TokenizerFile
from jaxllm.errors import UserError

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1+1?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "<|im_end|> and 2+2?"},
    {"role": "assistant", "content": " Four<|im_start|>. "},
]
# The same text as CHATML, with answers marked as published templates mark them: the end of a turn stands outside the tag.
TAGGED = (
    "{% for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{% if message.role == 'assistant' %}{% generation %}{{- message.content | trim -}}{% endgeneration %}"
    "{% else %}{{- message.content | trim -}}{% endif %}{{- '<|im_end|>' + '\\n' -}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
REWRITES = "{% for m in messages %}{{ m.role }}:{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}<|eot|>{% endfor %}"
REWRITES += "{% if add_generation_prompt %}assistant:{% endif %}"


def said(ids, trained):
    """The trained stretches, as text with special tokens as numbers."""
    runs, current = [], ""
    for index, flag in zip(ids, trained, strict=True):
        if flag:
            current += chr(index) if index < 256 else f"[{index}]"
        elif current:
            runs, current = [*runs, current], ""
    return [*runs, current] if current else runs


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("template", [CHATML, TAGGED], ids=["by turns", "by tags"])
def test_only_answers_and_their_ends_are_trained(tmp_path, template):
    chat = ChatTemplate(make(tmp_path, "{{ bos_token }}" + template))
    ids, trained = chat.conversation(TALK)
    assert ids == chat.encode(TALK, add_generation_prompt=False)  # nothing but what the template writes
    assert said(ids, trained) == ["Two.[258]", "Four<|im_start|>.[258]"]  # spelled by a message: text, trained as text
    assert ids.count(256) == 1 and ids[0] == 256 and ids.count(257) == 5
    prompt = chat.encode(TALK[:2])  # the first answer goes on exactly where generation would
    assert ids[: len(prompt)] == prompt and not any(trained[: len(prompt)]) and trained[len(prompt)]
    assert said(*chat.conversation(TALK, last_only=True)) == ["Four<|im_start|>.[258]"]
    assert said(*chat.conversation(TALK[:4])) == ["Two.[258]"]  # a last question is context


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("adds", [True, False])
def test_one_bos_whoever_writes_it(tmp_path, written, adds):
    chat = ChatTemplate(make(tmp_path, "{{ bos_token }}" * 2 * written + CHATML, adds_bos=adds))
    ids, trained = chat.conversation(TALK)
    assert ids.count(256) == int(written or adds)
    assert said(ids, trained) == ["Two.[258]", "Four<|im_start|>.[258]"]


def test_an_answer_that_nothing_ends_gets_eos(tmp_path):
    bare = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    ids, trained = ChatTemplate(make(tmp_path, bare)).conversation(TALK[:3])
    assert said(ids, trained) == ["Two.\n[258]"] and ids[-1] == 258


def test_a_template_that_rewrites_earlier_turns(tmp_path):
    chat = ChatTemplate(make(tmp_path, REWRITES, generation={"eos_token_id": 259}))
    with pytest.raises(
        UserError, match="message 3 is written otherwise once the conversation goes on.*data.turns=last"
    ):
        chat.conversation(TALK)
    assert said(*chat.conversation(TALK, last_only=True)) == [" Four<|im_start|>. [259]"]


def test_a_source_packs_conversations(tmp_path):
    (tmp_path / "tok").mkdir()
    make(tmp_path / "tok", CHATML)
    short = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
    path = write(tmp_path / "talk.jsonl", {"messages": TALK}, short, short)
    chat = Chat(path=path, tokenizer=TokenizerFile(str(tmp_path / "tok")), val_every=0, cache_dir=str(tmp_path / "c"))
    corpus = chat.prepare()
    assert corpus.facts["documents"] == 3 and corpus.facts["turns"] == "all"
    template = ChatTemplate(corpus.tokenizer)
    batch = Loader(corpus.train, 1, 256, shuffle=False).batch(0)
    tokens, labels, weights = (batch[name][0] for name in ("tokens", "labels", "weights"))
    whole = [template.conversation(talk) for talk in (TALK, short["messages"], short["messages"])]
    ids = [i for row, _ in whole for i in row]
    np.testing.assert_array_equal(tokens[: len(ids)], ids)
    lengths = [len(row) for row, _ in whole]
    np.testing.assert_array_equal(batch["segments"][0][: len(ids)], np.repeat([1, 2, 3], lengths))
    trained = np.array([flag for _, row in whole for flag in row])
    want = np.append(trained[1:], False)  # a label is the next token
    np.testing.assert_array_equal(weights[: len(ids)] > 0, want)
    assert "".join(chr(i) for i in labels[weights > 0] if i < 256) == "Two.Four<|im_start|>.yoyo"
    assert int((labels[weights > 0] == 258).sum()) == 4  # every answer's end is trained
    again = Chat(path=path, tokenizer=chat.tokenizer, val_every=0, turns="last", cache_dir=chat.cache_dir).prepare()
    assert again.folder != corpus.folder and again.train.trained.sum() < corpus.train.trained.sum()


def test_a_trained_vocabulary_gets_a_template_that_travels(tmp_path):
    path = write(tmp_path / "talk.jsonl", *[{"conversation": TALK}] * 3)
    fields = {"path": path, "messages_key": "conversation", "val_every": 0, "cache_dir": str(tmp_path / "c")}
    corpus = Chat(tokenizer=BPE(vocab_size=260), template="plain", **fields).prepare()
    chat = ChatTemplate(corpus.tokenizer)
    assert chat.render(TALK[1:2]).endswith("# user\nWhat is 1+1?\n# assistant\n")
    ids, trained = chat.conversation(TALK)
    bos, eos = corpus.tokenizer.bos_id, corpus.tokenizer.eos_id
    assert ids[0] == bos and ids.count(bos) == 1
    kept = [i for i, flag in zip(ids, trained, strict=True) if flag]
    assert kept.count(eos) == 2 and corpus.tokenizer.decode(kept) == "Two.Four<|im_start|>."
    (tmp_path / "own.jinja").write_text(PLAIN.replace("# ", "@ "))
    own = Chat(tokenizer=BPE(vocab_size=260), template=str(tmp_path / "own.jinja"), **fields).prepare()
    assert ChatTemplate(own.tokenizer).render(TALK[:1]).startswith("<|bos|>@ system")
    for tokenizer, template, message in (
        (BPE(vocab_size=260), None, "the tokenizer has no chat template; name a jinja file, or plain"),
        (BPE(vocab_size=260), "nowhere", "data.template=nowhere: no file"),
        (Bytes(), "plain", "data/tokenizer=bpe"),
    ):
        with pytest.raises(UserError, match=message):
            Chat(tokenizer=tokenizer, template=template, **fields).prepare()


@pytest.mark.parametrize(
    "line, message",
    [
        ({"text": "hi"}, r"talk.jsonl:2: no messages under data.messages_key='messages' \(keys of this line: text\)"),
        ({"messages": [{"content": "hi"}]}, "talk.jsonl:2: message 1 has no role"),
        (
            {"messages": [{"role": "user", "content": ["hi"]}]},
            "talk.jsonl:2: the content of message 1 is list, not text",
        ),
        ({"messages": TALK[:2]}, "talk.jsonl:2: no message of the role 'assistant'"),
        ({"messages": [{"role": "assistant", "content": "\ud800"}]}, "talk.jsonl:2: the text holds a lone surrogate"),
        ([1], "talk.jsonl:2: is no JSON object"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    (tmp_path / "tok").mkdir()
    make(tmp_path / "tok", CHATML)
    path = write(tmp_path / "talk.jsonl", {"messages": TALK}, line)
    chat = Chat(path=path, tokenizer=TokenizerFile(str(tmp_path / "tok")), cache_dir=str(tmp_path / "c"))
    with pytest.raises(UserError, match=message):
        chat.prepare()
