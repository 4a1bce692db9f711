"""Forms of Python: each is taken in both worlds, with one type and Python's value, or refused in both."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numba.cuda import types

import gemmkit as gk
from gemmkit import epilogues
from gemmkit.emulator.functions import kind_of
from gemmkit.emulator.user_code import arguments
from gemmkit.lang import source as dialect
from gemmkit.lang.functions import device
from gemmkit.lang.scalars import index, type_of_kind
from tests.lang.test_dialect import written
from tests.support.lang import forms_of_numbers, forms_of_structure, forms_of_users
from tests.support.lang.forms_on_host import GIVEN, same, type_here, type_there, value_there
from tests.support.lang.forms_on_host import compiled as compiled_on_host
from tests.support.lang.forms_on_host import written as written_on_host
from tests.support.lang.forms_refused import REFUSED as REFUSED_ON_HOST

# ==========================================================================================================================
# Forms of Python: each is taken in both worlds, with one type and Python's value, or refused in both, with the line and a remedy.
#
# Types alone are inferred here; nothing is compiled to PTX.

VALUES, N = tuple(map(np.float32, (1.5, 2, 3, 4))), 2

# of ``values``, four float32s, and the coordinate ``i``
TAKEN = {
    "tuple of tuple": "return tuple(values)",
    "sum tuple": "return sum(values)",
    "sum start": "return sum(values, 1.5)",
    "sum of ints": "return sum((1, 2, 3)) * values[0]",
    "len": "return values[0] * len(values)",
    "max tuple": "return max(values)",
    "min tuple": "return min(values)",
    "nested def closure": "y = values[1]\ndef g(v):\n    return v * y\nreturn g(values[0])",
    "nested def default": "def g(v, w=2):\n    return v * w\nreturn g(values[0])",
    "nested def twice": "def g(v):\n    return v * 2\nreturn g(g(values[0]))",
    "nested def in loop": "s = values[0]\ndef g(v):\n    return v * 2\nfor k in range(3):\n    s += g(s)\nreturn s",
    "lambda": "g = lambda v: v * 2\nreturn g(values[0])",
    "lambda at once": "return (lambda v: v * 2)(values[0])",
    "lambda passed": "def h(g, v):\n    return g(v)\nreturn h(lambda v: v + 1, values[0])",
    "lambda default": "g = lambda v, k=3: v * k\nreturn g(values[0])",
    "function passed": "def h(g, v):\n    return g(v)\nreturn h(doubled, values[0])",
    "function in a tuple": "return (doubled, abs)[0](values[0])",
    "starred call": "return doubled(*values[:2])",
    "starred call mixed": "return max(values[0], *values)",
    "starred tuple": "return (*values[1:], values[0])",
    "starred twice": "return (*values, *values)[5]",
    "tuple of tuples star": "return (*(*values[:1], values[2]), values[3])",
    "kw call": "return doubled(x=values[0], times=2)",
    "chain assign": "a = b = values[0] * 2\nreturn a + b",
    "chain assign 3": "a = b = c = values[0] * 2\nreturn a + b + c",
    "match guard": "match i:\n    case k if k > 1:\n        return values[0] * k\nreturn values[1]",
    "chained": "return values[0] if 0 < values[0] <= values[1] < 9 else values[1]",
    "chained eq": "return values[0] if i == 1 == i else values[1]",
    "while else": "k = 0\nwhile k < 3:\n    k += 1\nelse:\n    k += 10\nreturn values[0] * k",
    "while else break": "k = 0\nwhile k < 3:\n    k += 1\n    if k > i:\n        break\nelse:\n    k += 10\nreturn values[0] * k",
    "for else": "s = values[0]\nfor v in values:\n    if v > 100:\n        break\nelse:\n    s = -s\nreturn s",
    "slice": "return values[1:3]",
    "slice step": "return values[::2]",
    "slice negative": "return values[::-1]",
    "slice empty": "return (*values[4:], values[0])",
    "slice over": "return values[2:9]",
    "index by coordinate": "return values[i]",
    "index negative": "return values[-1]",
    "in tuple literal": "return values[0] if i in (1, 2) else values[1]",
    "in values": "return values[0] if 1.0 in values else values[1]",
    "not in": "return values[0] if i not in (1, 2) else values[1]",
    "zip three": "s = values[0]\nfor a, b, c in zip(values, values, range(4)):\n    s += a * b * c\nreturn s",
    "zip uneven": "s = values[0]\nfor a, b in zip(values, (1, 2)):\n    s += a * b\nreturn s",
    "enumerate": "s = values[0]\nfor k, v in enumerate(values):\n    s += k * v\nreturn s",
    "enumerate start": "s = values[0]\nfor k, v in enumerate(values, 1):\n    s += k * v\nreturn s",
    "tuple +": "return values + (values[0],)",
    "tuple *": "return (values[0],) * 4",
    "tuple ==": "return values[0] if values == (1.0, 2.0, 3.0, 4.0) else values[1]",
    "tuple <": "return values[0] if (1, 2) < (1, 3) else values[1]",
    "tuple truth": "return values[0] if values else values[1]",
    "swap": "a, b = values[0], values[1]\na, b = b, a\nreturn a - b",
    "ternary types": "return values[0] if i > 1 else 2",
    "ternary tuple": "return values[:2] if i > 1 else values[2:]",
    "named tuple unpack": "a, b = Pair(values[0], values[1])\nreturn a",
    "slice object": "return values[slice(1, 3)]",
    "type change": "y = 1\ny = values[0]\nreturn y",
    "return tuple nested": "return (values[0], (values[1], values[2])), values[3]",
    "list in for": "s = values[0]\nfor k in [1, 2]:\n    s += k\nreturn s",
}
# and a part of what is said
REFUSED = {
    "tuple of genexpr": ("return tuple(2 * v for v in values)", "generators"),
    "tuple of map": ("return tuple(map(abs, values))", "map"),
    "tuple of zip": ("return tuple(zip(values, values))[0]", "tuple() takes a tuple"),
    "tuple of enumerate": ("return tuple(enumerate(values))[1][1]", "tuple() takes a tuple"),
    "tuple of range": ("return tuple(range(4))", "tuple() takes a tuple"),
    "list comp": ("return [v for v in values][0]", "lists"),
    "sum genexpr": ("return sum(v for v in values)", "generators"),
    "sum listcomp": ("return sum([v for v in values])", "lists"),
    "all": ("return values[0] if all(values) else -values[0]", "all"),
    "any": ("return values[0] if any(values) else -values[0]", "any"),
    "sorted": ("return sorted(values)[0]", "sorted"),
    "reversed": ("return reversed(values)", "reversed"),
    "max key": ("return max(values, key=abs)", "by name"),
    "max default": ("return max(values, default=0)", "by name"),
    "zip strict": ("s = values[0]\nfor a, b in zip(values, values, strict=True):\n    s += a * b\nreturn s", "by name"),
    "enumerate start kw": ("s = values[0]\nfor k, v in enumerate(values, start=1):\n    s += k * v\nreturn s", "by name"),
    "dict comp": ("return {k: k for k in values}[0]", "dicts"),
    "set comp": ("return values[0] if 1 in {k for k in values} else 0", "sets"),
    "nested recursion": ("def g(v):\n    return v if v < 1 else g(v / 2)\nreturn g(values[0])", "calls itself"),
    "f-string": ("y = f'{i}'\nreturn values[0]", "strings"),
    "float of str": ("return float('1.5') * values[0]", "numbers of strings"),
    "walrus": ("return y if (y := values[0] * 2) > 1 else -y", "a line of its own"),
    "walrus loop": ("s = values[0]\nwhile (s := s / 2) > 1:\n    pass\nreturn s", "a line of its own"),
    "match tuple": ("match values:\n    case (a, b, c, d):\n        return a\nreturn values[1]", "patterns"),
    "del": ("y = values[0]\ndel y\nreturn values[0]", "del"),
    "global": ("global TABLE\nTABLE = values[0]\nreturn values[0]", "bind names"),
    "in range": ("return values[0] if i in range(3) else values[1]", "a <= x < b"),
    "aug tuple": ("y = ()\nfor v in values:\n    y += (v,)\nreturn y", "(*y, x)"),
    "unpack star": ("a, *b = values\nreturn a", "starred name"),
    "starred list literal": ("return (*[values[0], values[1]],)", "lists"),
    "def star": ("def g(*v):\n    return v[0]\nreturn g(values[0])", "any number of arguments"),
    "def kwonly": ("def g(v, *, k=2):\n    return v * k\nreturn g(values[0], k=3)", "dicts"),
    "named tuple replace": ("return Pair(values[0], values[1])._replace(first=1)[0]", "make a new one"),
    "next iter": ("return next(iter(values))", "next"),
    "genexpr in max": ("return max(v * 2 for v in values)", "generators"),
    "nested comp": ("return tuple(tuple(v for v in values) for w in values)[0]", "generators"),
    "tuple genexpr range": ("return tuple(values[k] for k in range(4))", "generators"),
}


def type_of(value: Any) -> Any:
    """The device's type of what the emulator computed."""
    return types.BaseTuple.from_types([type_of(v) for v in value]) if isinstance(value, tuple) else type_of_kind(kind_of(value))


def compiled(function: Callable[..., Any]) -> Any:
    taken = device(function)
    bound, _ = taken.bind((types.UniTuple(types.float32, len(VALUES)), index), {})
    return taken.compile(bound).signature.return_type


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", TAKEN)
def test_a_form_that_both_worlds_take(name: str) -> None:
    function = written(TAKEN[name], f"taken, {name}", "values, i")
    dialect.SourceWalk(compiled=False).function(function, None, True)
    (twin,) = arguments([function])
    value = twin(VALUES, N)
    assert value == function(VALUES, N)
    assert compiled(function) == type_of(value)


@pytest.mark.parametrize("name", REFUSED)
def test_a_form_that_both_worlds_refuse(name: str) -> None:
    body, reason = REFUSED[name]
    said = []
    for world in (lambda f: dialect.SourceWalk(compiled=False).function(f, None, True), compiled):
        with pytest.raises(gk.ComponentError) as caught:
            world(written(body, f"refused, {name}", "values, i"))
        said.append(str(caught.value))
    heading, where, source, why = said[0].splitlines()
    assert said[0] == said[1] and where.startswith(f'  File "<cell refused, {name}>", line ') and reason in why
    assert source.strip() in [line.strip() for line in body.split("\n")]


def test_arguments_by_name_of_a_users_function() -> None:
    """Its module says "builtins"; it is the user's all the same."""
    scope: dict[str, Any] = {"__name__": "builtins"}
    exec("def scaled(x, times):\n  return x * times\ndef f(values, i):\n  return scaled(values[0], times=2)", scope)
    assert scope["scaled"].__module__ == "builtins"
    assert compiled(scope["f"]) == types.float32


FINISH = ("tuple(2 * v for v in values)", "tuple([v for v in values])", "tuple(map(abs, values))", "tuple(v for v in values if v > 0)")


@pytest.mark.parametrize("returned", FINISH)
def test_a_users_finish_of_generators(returned: str) -> None:
    """It would emulate; it says what to write before it does."""
    method = written(f"return {returned}", "finish", "self, values, tile, shape")
    own = type("Own", (epilogues.Epilogue,), {"finish": method, "__module__": "__main__"})
    with pytest.raises(gk.ComponentError, match='"<cell finish>", line 2') as caught:
        dialect.check(dataclass(frozen=True)(own)())
    assert "write" in str(caught.value) or "tuple" in str(caught.value)


# ==========================================================================================================================
# Several hundred forms of Python: the device's types and values are the emulator's, or both worlds refuse, in one's words.
#
# A conditional expression of several types is none of these: it has their common type on the GPU (docs/reference/device_code.md).

TAKEN_ON_HOST = forms_of_structure.TAKEN | forms_of_numbers.TAKEN | forms_of_users.TAKEN


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::SyntaxWarning")
@pytest.mark.sample(33)
@pytest.mark.parametrize("name", TAKEN_ON_HOST)
def test_a_form_that_both_worlds_take_beside_numpy(name: str) -> None:
    function = written_on_host(TAKEN_ON_HOST[name], f"taken on host, {name}")
    dialect.SourceWalk(compiled=False).function(function, None, True)
    (twin,) = arguments([function])
    here = twin(*GIVEN)
    assert type_there(compiled_on_host(function)) == type_here(here)
    there = value_there(function)
    assert same(here, there), f"{here} in the emulator, {there} in the device's code"


# Where a conditional expression that is returned is two returns (not in Python 3.11), and ways meet in another order.
SAYS_OTHERWISE = sys.version_info[:2] != (3, 11)


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::SyntaxWarning")
@pytest.mark.sample(4)
@pytest.mark.parametrize("name", REFUSED_ON_HOST)
def test_a_form_that_both_worlds_refuse_beside_numpy(name: str) -> None:
    body, reason = REFUSED_ON_HOST[name]
    function = written_on_host(body, f"refused on host, {name}")
    with pytest.raises(gk.ComponentError) as there:
        compiled_on_host(function)
    with pytest.raises(gk.ComponentError) as here:
        dialect.SourceWalk(compiled=False).function(function, None, True)
        (twin,) = arguments([function])
        twin(*GIVEN)
    assert str(here.value) == str(there.value)
    where, source = str(here.value).splitlines()[1:3]
    assert where.startswith(f'  File "<cell refused on host, {name}>", line ')
    assert reason in str(here.value) or (SAYS_OTHERWISE and re.search("one way and|on some ways|slice", reason)
                                         and re.search("one way and|on some ways|one of several types", str(here.value)))
    assert source.strip() in [line.strip() for line in body.split("\n")] or source.strip().startswith("def f(")


def test_the_names_are_of_one_form_each() -> None:
    assert len(TAKEN_ON_HOST) == sum(len(part.TAKEN) for part in (forms_of_numbers, forms_of_structure, forms_of_users))
