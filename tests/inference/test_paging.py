"""Pages and places: reference counts, reuse by identity, tokens and parent, copies on write, and a random machine against a dict."""

import dataclasses

import pytest
from hypothesis import settings, stateful
from hypothesis import strategies as st

from jaxllm.errors import UserError
from jaxllm.inference import blocks
from jaxllm.inference.blocks import BlockPool, Identity
from jaxllm.inference.paging import Places

BASE = Identity("m", "1")


def fill(places, tokens, identity=BASE):
    """A place in which all of `tokens` have been computed; and how many were there before."""
    place, cached = places.open(tokens, identity)
    copies = places.extend(place, cached, len(tokens))
    assert not copies
    places.computed(place, tokens, len(tokens))
    places.check([(place, len(tokens))])
    return place, cached


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_a_prompt_sent_twice_leaves_at_least_one_token_to_compute(length, cached):
    places = Places(32, 4, 4)
    tokens = list(range(length))
    first, before = fill(places, tokens)
    assert before == 0
    second, again = fill(places, tokens)
    assert again == cached
    places.close(first)
    places.close(second)
    third, after = fill(places, tokens)  # freed pages stay findable
    assert after == cached
    places.close(third)
    assert places.free_pages == 31 and places.free_slots == 4


def test_a_prefix_is_found_by_every_field_of_its_identity():
    places = Places(64, 4, 16)
    tokens = list(range(16))
    identities = [BASE]
    for field in dataclasses.fields(Identity):
        identities.append(dataclasses.replace(BASE, **{field.name: "A"}))
    # Two fields whose texts run together are still two fields.
    identities += [Identity("ab", "c"), Identity("a", "bc"), Identity("", "abc")]
    for identity in identities:
        assert fill(places, tokens, identity)[1] == 0, identity
    assert places.open(tokens, dataclasses.replace(BASE, salt="A"))[1] == 12


def test_tokens_and_parents_are_compared_when_hashes_collide(monkeypatch):
    monkeypatch.setattr(blocks, "chain", lambda parent, content: b"same")
    places = Places(32, 2, 8)
    fill(places, [1, 2, 3, 4, 5])
    for other in ([1, 3, 3, 4, 5], [9, 9, 3, 4, 5], [3, 4, 9]):
        pages, _ = places.match(other, BASE)
        assert pages == []
    assert places.match([1, 2, 7, 7, 7], dataclasses.replace(BASE, salt="s"))[0] == []


def test_a_block_behind_another_parent_is_another_block():
    places = Places(32, 2, 8)
    fill(places, [1, 2, 7, 8, 0])
    assert fill(places, [3, 4, 7, 8, 0])[1] == 0
    assert fill(places, [1, 2, 7, 8, 0])[1] == 4


def test_nothing_is_found_before_it_is_computed():
    places = Places(32, 4, 4)
    tokens = list(range(12))
    place, _ = places.open(tokens, BASE)
    places.extend(place, 0, 12)
    assert places.match(tokens, BASE)[0] == []
    places.computed(place, tokens, 7)
    assert places.match(tokens, BASE)[0] == place.pages[:1]


def test_a_forked_page_is_copied_by_whoever_writes_first():
    places = Places(16, 4, 4)
    tokens = [1, 2, 3, 4, 5, 6]
    place, _ = fill(places, tokens)
    twin = places.fork(place, 5)
    assert twin.pages == place.pages
    assert places.writable(twin, 5, 7) == 1
    copies = places.extend(twin, 5, 7)
    assert copies == [(place.pages[1], twin.pages[1])] and twin.pages[0] == place.pages[0]
    assert places.extend(place, 6, 7) == []  # its own again
    places.check([(place, 7), (twin, 7)])
    places.close(place)
    places.close(twin)
    places.check()
    assert places.free_pages == 15


def test_a_page_that_is_written_again_is_found_no_more():
    places = Places(16, 4, 4)
    place, _ = fill(places, [1, 2, 3, 4, 5])
    twin = places.fork(place, 2)
    places.close(place)
    assert places.match([1, 2, 3, 4, 9], BASE)[0]
    places.extend(twin, 2, 3)
    assert places.match([1, 2, 3, 4, 9], BASE)[0] == []


def test_the_longest_unused_page_is_handed_out_first():
    places = Places(5, 2, 4)  # four pages to hold
    old, _ = fill(places, [1, 2, 3, 4, 5][:4])
    places.close(old)
    new, _ = fill(places, [6, 7, 8, 9][:4])
    assert places.match([1, 2, 3, 4, 5], BASE)[0], "free pages without a record come first"
    places.close(new)
    fill(places, [10, 11, 12])
    assert places.match([6, 7, 8, 9, 0], BASE)[0] and len(places.match([1, 2, 3, 4, 5], BASE)[0]) == 0


def test_a_pool_needs_a_page_besides_the_dump():
    with pytest.raises(UserError, match="pages"):
        BlockPool(1, 16)


class Machine(stateful.RuleBasedStateMachine):
    """Random sequences over a small alphabet, beside a dict that says what each page would hold on a device."""

    SIZE, PAGES, SLOTS = 2, 12, 4

    def __init__(self):
        super().__init__()
        self.places = Places(self.PAGES, self.SIZE, self.SLOTS)
        self.live = []  # [place, tokens, computed]
        self.memory = {}  # page -> what is written: {offset: (identity, all tokens up to it)}

    def write(self, place, tokens, start, end):
        for source, target in self.places.extend(place, start, end):
            self.memory[target] = dict(self.memory.get(source, {}))
        for t in range(start, end):
            page = place.pages[t // self.SIZE]
            assert self.places.pool.refs[page] == 1, "a shared page is written"
            self.memory.setdefault(page, {})[t % self.SIZE] = (place.identity, tuple(tokens[: t + 1]))

    def holds(self, place, tokens, count):
        for t in range(count):
            page = place.pages[t // self.SIZE]
            assert self.memory[page][t % self.SIZE] == (place.identity, tuple(tokens[: t + 1]))

    @stateful.rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), salt=st.sampled_from("ab"))
    def admit(self, tokens, salt):
        identity = Identity(salt=salt)
        missing = self.places.missing(tokens, identity, len(tokens))
        if not self.places.free_slots or missing > self.places.free_pages:
            return
        free = self.places.free_pages
        place, cached = self.places.open(tokens, identity)
        assert cached < len(tokens)
        self.holds(place, tokens, cached)  # what is reused is what would have been computed
        self.write(place, tokens, cached, len(tokens))
        assert free - self.places.free_pages == missing
        self.places.computed(place, tokens, len(tokens))
        self.live.append([place, list(tokens)])

    @stateful.precondition(lambda self: self.live)
    @stateful.rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data, token):
        row = data.draw(st.sampled_from(self.live))
        place, tokens = row
        if self.places.writable(place, len(tokens), len(tokens) + 1) > self.places.free_pages:
            return
        tokens.append(token)
        self.write(place, tokens, len(tokens) - 1, len(tokens))
        self.places.computed(place, tokens, len(tokens))

    @stateful.precondition(lambda self: self.live)
    @stateful.rule(data=st.data())
    def fork(self, data):
        place, tokens = data.draw(st.sampled_from(self.live))
        if self.places.free_slots:
            length = data.draw(st.integers(1, len(tokens)))
            self.live.append([self.places.fork(place, length), tokens[:length]])

    @stateful.precondition(lambda self: self.live)
    @stateful.rule(data=st.data())
    def close(self, data):
        row = data.draw(st.sampled_from(self.live))
        self.live.remove(row)
        self.places.close(row[0])

    @stateful.rule()
    def crash(self):
        if len(self.live) == self.SLOTS:
            self.places.reset()
            self.live, self.memory = [], {}

    @stateful.invariant()
    def laws(self):
        self.places.check([(place, len(tokens)) for place, tokens in self.live])
        for place, tokens in self.live:
            self.holds(place, tokens, len(tokens))


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
