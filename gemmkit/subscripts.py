"""What the subscripts of an `einsum` say: the operands' indices, the result's, and views that have each index once.

Three things of NumPy's notation are views. The dimensions of an ellipsis are indices of their own, the last of all operands
together. An index that an operand repeats is its diagonal: one dimension, whose stride is the sum of
both. A dimension of extent 1 whose index is larger elsewhere is left out, for its one element goes with all of them.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Iterator, Sequence
from typing import NamedTuple

DOTS = "..."


class View(NamedTuple):
    """An operand with each of its indices once, by shape and strides in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Subscripts(NamedTuple):
    """Indices of the operands' views, the result's, and the views."""

    terms: tuple[str, ...]
    result: str
    views: tuple[View, ...]


@functools.lru_cache(maxsize=4096)
def subscripts(spec: str, shapes: tuple[tuple[int, ...], ...], strides: tuple[tuple[int, ...], ...]) -> Subscripts:
    """Resolve a spec for operands of these shapes and strides.

    Raises ValueError, naming the term or the operand, for a spec that does not fit them.

    >>> subscripts("...ii->i...", ((2, 3, 3),), ((9, 3, 1),))
    Subscripts(terms=('ai',), result='ia', views=(View(shape=(2, 3), strides=(9, 4)),))
    """
    text = spec.replace(" ", "")
    left, arrow, result = text.partition("->")
    named = tuple(left.split(","))
    for term in (*named, result):
        if (term.replace(DOTS, "") and not term.replace(DOTS, "").isalpha()) or term.count(".") > 3:
            raise ValueError(f"einsum({spec!r}): indices are letters, terms are separated by commas, and one -> may follow "
                             "them; a term may have an ellipsis, three dots, for dimensions without a name")
    if len(named) != len(shapes):
        raise ValueError(f"einsum({spec!r}) has {len(named)} terms and got {len(shapes)} operands")
    unnamed = [_unnamed(spec, n, term, shape) for n, (term, shape) in enumerate(zip(named, shapes))]
    others = _letters_beside(text)
    dots = "".join(next(others) for _ in range(max(unnamed)))
    terms = tuple(term.replace(DOTS, dots[len(dots) - count:]) for term, count in zip(named, unnamed))
    if not arrow:
        once = sorted(label for label in set(left) - set(",.") if left.count(label) == 1)
        result = dots + "".join(once)
    elif dots and DOTS not in result:
        raise ValueError(f"einsum({spec!r}): the operands have dimensions of an ellipsis, and the result has none; write "
                         "... in it")
    result = result.replace(DOTS, dots)
    if len(set(result)) != len(result):
        raise ValueError(f"einsum({spec!r}): the result {text.partition('->')[2]!r} repeats an index")
    missing = set(result) - set("".join(terms))
    if missing:
        raise ValueError(f"einsum({spec!r}): the result has {', '.join(sorted(missing))}, which no operand has")
    sizes = _checked_sizes(spec, named, terms, shapes, dots)
    views = [_view(term, shape, own, sizes) for term, shape, own in zip(terms, shapes, strides)]
    return Subscripts(tuple(term for term, _ in views), result, tuple(view for _, view in views))


def sizes_of(terms: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
    """The extents of indices that fit each other."""
    return {label: extent for term, shape in zip(terms, shapes) for label, extent in zip(term, shape)}


def _unnamed(spec: str, n: int, term: str, shape: tuple[int, ...]) -> int:
    """How many dimensions of operand ``n`` are the ellipsis'."""
    count = len(shape) - len(term.replace(DOTS, ""))
    if count < 0 or (count > 0 and DOTS not in term):
        least = " or more" if DOTS in term else ""
        raise ValueError(f"einsum({spec!r}): {term!r} names {len(term.replace(DOTS, ''))} dimensions{least}, and "
                         f"operand {n} has shape {shape}")
    return count


def _letters_beside(text: str) -> Iterator[str]:
    """Indices that a spec does not use."""
    yield from (letter for letter in string.ascii_letters if letter not in text)
    yield from (letter for letter in map(chr, range(0xC0, 0x3000)) if letter.isalpha() and letter not in text)


def _checked_sizes(spec: str, named: tuple[str, ...], terms: tuple[str, ...], shapes: tuple[tuple[int, ...], ...],
                   dots: str) -> dict[str, int]:
    """The extent of each index: that of its dimensions, of which those of extent 1 are repeated."""
    sizes: dict[str, tuple[int, int]] = {}
    for n, (term, shape) in enumerate(zip(terms, shapes)):
        own: dict[str, int] = {}
        for label, extent in zip(term, shape):
            if own.setdefault(label, extent) != extent:
                raise ValueError(f"einsum({spec!r}): {named[n]!r} repeats {label}, which is {own[label]} and {extent} in "
                                 f"operand {n} (shape {shape}); a diagonal is of equal extents")
            first, known = sizes.setdefault(label, (n, extent))
            if known == 1:
                sizes[label] = n, extent
            elif extent not in (1, known):
                name = "a dimension of the ellipsis" if label in dots else label
                raise ValueError(f"einsum({spec!r}): {name} is {extent} in operand {n} (shape {shape}) and {known} in "
                                 f"operand {first} (shape {tuple(shapes[first])})")
    return {label: extent for label, (_, extent) in sizes.items()}


def _view(term: str, shape: tuple[int, ...], strides: tuple[int, ...], sizes: dict[str, int]) -> tuple[str, View]:
    steps: dict[str, int] = {}
    for label, extent, stride in zip(term, shape, strides):
        if extent == sizes[label]:                         # else it is 1, and repeated
            steps[label] = steps.get(label, 0) + stride
    return "".join(steps), View(tuple(sizes[label] for label in steps), tuple(steps.values()))
