"""The record of what gemmkit chooses: a sample of it is compared, and what differs is said."""

from __future__ import annotations

import copy

from tools import choices


def test_what_is_chosen_is_what_was_recorded() -> None:
    assert choices.differences(choices.load(), every=71) == []


def test_another_choice_and_a_lost_name_are_said() -> None:
    stored = copy.deepcopy(choices.load())
    stored["calls"], stored["works"] = stored["calls"][:1], {}
    first = int(stored["calls"][0][2].split()[0])
    stored["lines"][first] += "; another"
    stored["public names"]["__init__"].append("gone_name")
    gone, other = choices.differences(stored)
    assert "gone_name is no public name" in gone
    assert "-" + stored["lines"][first] in other and stored["calls"][0][1] in other


def test_texts_are_the_same_in_every_process() -> None:
    assert choices.plain("x(<function f at 0x7f12>, pointer=123)") == "x(, )"
