"""A part of a text that is made from result files: it stands between two marks."""

from __future__ import annotations


def put(into: str, part: str, begin: str, end: str) -> str:
    """``into`` with the part between its marks.

    Raises:
        ValueError: it has no such marks.

    >>> put("a<old>b", "new", "<", ">") == "a<\\nnew\\n>b"
    True
    """
    before, opened, rest = into.partition(begin)
    _, closed, after = rest.partition(end)
    if not (opened and closed):
        raise ValueError(f"the text lacks {begin!r} and, after it, {end!r}")
    return f"{before}{begin}\n{part}\n{end}{after}"
