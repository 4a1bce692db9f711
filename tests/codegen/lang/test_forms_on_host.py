"""Several hundred forms of Python: the device's types and values are the emulator's, or both worlds refuse, in one's words.

A conditional expression of several types is none of these: it has their common type on the GPU (docs/components.md).
"""

from __future__ import annotations

import re
import sys

import pytest

import gemmkit as gk
from gemmkit.emulator.user_code import arguments
from gemmkit.lang import source as dialect
from tests.support.lang import forms_of_numbers, forms_of_structure, forms_of_users
from tests.support.lang.forms_on_host import GIVEN, compiled, same, type_here, type_there, value_there, written
from tests.support.lang.forms_refused import REFUSED

TAKEN = forms_of_structure.TAKEN | forms_of_numbers.TAKEN | forms_of_users.TAKEN


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::SyntaxWarning")
@pytest.mark.sample(33)
@pytest.mark.parametrize("name", TAKEN)
def test_a_form_that_both_worlds_take(name: str) -> None:
    function = written(TAKEN[name], f"taken on host, {name}")
    dialect.Walk(compiled=False).function(function, None, True)
    (twin,) = arguments([function])
    here = twin(*GIVEN)
    assert type_there(compiled(function)) == type_here(here)
    there = value_there(function)
    assert same(here, there), f"{here} in the emulator, {there} in the device's code"


# Where a conditional expression that is returned is two returns (not in Python 3.11), and ways meet in another order.
SAYS_OTHERWISE = sys.version_info[:2] != (3, 11)


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::SyntaxWarning")
@pytest.mark.sample(4)
@pytest.mark.parametrize("name", REFUSED)
def test_a_form_that_both_worlds_refuse(name: str) -> None:
    body, reason = REFUSED[name]
    function = written(body, f"refused on host, {name}")
    with pytest.raises(gk.ComponentError) as there:
        compiled(function)
    with pytest.raises(gk.ComponentError) as here:
        dialect.Walk(compiled=False).function(function, None, True)
        (twin,) = arguments([function])
        twin(*GIVEN)
    assert str(here.value) == str(there.value)
    where, source = str(here.value).splitlines()[1:3]
    assert where.startswith(f'  File "<cell refused on host, {name}>", line ')
    assert reason in str(here.value) or (SAYS_OTHERWISE and re.search("one way and|on some ways|slice", reason)
                                         and re.search("one way and|on some ways|one of several types", str(here.value)))
    assert source.strip() in [line.strip() for line in body.split("\n")] or source.strip().startswith("def f(")


def test_the_names_are_of_one_form_each() -> None:
    assert len(TAKEN) == sum(len(part.TAKEN) for part in (forms_of_numbers, forms_of_structure, forms_of_users))
