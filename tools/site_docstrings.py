"""Examples in docstrings as blocks of code: Markdown would take ``>>>`` for quotations.

An extension of griffe, which reads the sources for the site's reference (``extensions`` in mkdocs.yml).
"""

from __future__ import annotations

import textwrap
from typing import Any

import griffe


def fenced(text: str) -> str:
    """``text`` with its examples, which end at a blank line, between fences.

    >>> print(fenced("One:\\n\\n>>> 1\\n1\\n\\nEnd."))
    One:
    <BLANKLINE>
    ```pycon
    >>> 1
    1
    ```
    <BLANKLINE>
    End.
    """
    found = []
    for paragraph in text.split("\n\n"):
        lines = paragraph.split("\n")
        at = next((n for n, line in enumerate(lines) if line.lstrip().startswith(">>> ")), None)
        if at is None:
            found.append(paragraph)
            continue
        margin = lines[at][:len(lines[at]) - len(lines[at].lstrip())]
        example = textwrap.indent(textwrap.dedent("\n".join(lines[at:])), margin)
        found.append("\n".join([*lines[:at], f"{margin}```pycon", example, f"{margin}```"]))
    return "\n\n".join(found)


class Examples(griffe.Extension):
    def on_object(self, *, obj: Any, **rest: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
