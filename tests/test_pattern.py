import pytest

from jaxllm.errors import UserError
from jaxllm.pattern import Group, check_roles, parse


def test_groups_repeats_and_items():
    groups = parse("linear/dense | 3* linear/moe*3 global/moe")
    assert groups == (
        Group(1, (("linear", "dense"),)),
        Group(3, (("linear", "moe"),) * 3 + (("global", "moe"),)),
    )
    assert sum(g.layers for g in groups) == 13
    assert parse("12*global/dense") == parse(" 12 *  global/dense ") == (Group(12, (("global", "dense"),)),)


@pytest.mark.parametrize("bad", ["", "global", "3*", "a/b |", "a/b*", "a/b->c/d", "0* a/b", "a/b*0"])
def test_what_cannot_be_read_is_named(bad):
    with pytest.raises(UserError, match="model.layers"):
        parse(bad)


def test_unknown_role_suggests_the_nearest():
    with pytest.raises(UserError, match="'globl' is not in model.mixers.*did you mean 'global'"):
        check_roles(parse("globl/dense"), ["global", "local"], ["dense"])
    with pytest.raises(UserError, match="model.ffns"):
        check_roles(parse("global/moe"), ["global"], ["dense"])
