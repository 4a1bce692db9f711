"""What Numba says of a form that types cannot describe, in words that say what to write instead."""

from __future__ import annotations

import re
from typing import NamedTuple


class Saying(NamedTuple):
    """A pattern in Numba's text; ``words`` take its groups."""

    pattern: str
    words: str


_TUPLE = r"(?:Uni)?Tuple\(.*\)|\w+\(.* x \d+\)|\w+\(.*\)"
_CHOSEN = "which function is called is decided at run time, and device code has no pointers to functions; "
_SAYINGS = (
    Saying(r"Cannot unify (?:device\(|Function\(|closure |Function<)",
           _CHOSEN + "call each where it is chosen: f(x) if c else g(x)"),
    Saying(r"Cannot cast type\(CUDADispatcher", _CHOSEN + "write one function, with the condition in it"),
    Saying(r"Cannot unify dtype\(", "which type is converted to is decided at run time; convert on each way"),
    Saying(r"getitem\((.*), slice",
           "a slice of {0} by what is known at run time alone, and a tuple's length is part of its type; slice by a literal "
           "or a static field, or take one value: t[i]"),
    Saying(rf"getitem\(((?:{_TUPLE})), [^)]*\)",
           "which value of {0} is taken is decided at run time, and they are of several types; convert them to one, or take "
           "each where it is chosen: t[0] if i == 0 else t[1]"),
    Saying(r"Invalid use of getiter with parameters \((.*)\)$",
           "a loop over {0}, whose values are of several types; convert them to one, or write the body once for each"),
    Saying(r"signature: >>> (enumerate|zip)\((.*)\) No match",
           "{0} of {1}, of which one is no tuple of one type; convert its values to one, or write the body once for each"),
    Saying(r"found for signature: >>> (.*?\)) (?:No match|Rejected).* specific error: (?:\w+Error: )?(\S.*)$",
           "{0} has no device code: {1}"),
    Saying(r"found for signature: >>> (.*?\)) (?:No match|Rejected|Operator|Type)", "{0} has no device code"),
    Saying(rf"Cannot unify ({_TUPLE}) and ({_TUPLE}) for '",
           "it is {0} on one way and {1} on another; give it as many values, of the same types, on every way"),
    Saying(r"Cannot unify (.*) and (.*) for '",
           "it is {0} on one way and {1} on another; convert one of them, so that it has one type"),
    Saying(r"Can't unify return type from the following types: (.*?)(?: Return of:|$)",
           "it returns one of several types ({0}); return the same on every way"),
)


def in_words(text: str) -> str:
    """A message of Numba's in gemmkit's words; itself where there are none.

    >>> in_words("Cannot unify UniTuple(float32 x 1) and UniTuple(float32 x 4) for 't', defined at a (6)").split("; ")[0]
    'it is UniTuple(float32 x 1) on one way and UniTuple(float32 x 4) on another'
    """
    for pattern, words in _SAYINGS:
        found = re.search(pattern, text)
        if found:
            return words.format(*found.groups())
    return text
