"""Examples in docstrings as blocks of code: Markdown would take ``>>>`` for quotations. Keywords of ``Unpack[T]`` by name.

An extension of griffe, which reads the sources for the site's reference (``extensions`` in mkdocs.yml).
"""

from __future__ import annotations

import re
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

    def on_package(self, *, pkg: Any, **rest: Any) -> None:
        """What `gemmkit.kernels.config.names_keywords` does for ``help``."""
        for function in _functions(pkg):
            for parameter in list(function.parameters):
                if str(parameter.annotation).startswith("Unpack["):
                    _name_keywords(function, parameter, pkg[parameter.annotation.slice.canonical_path.partition(".")[2]])


def _functions(module: Any) -> Any:
    for member in module.members.values():
        if not member.is_alias:
            yield from [member] if member.is_function else _functions(member) if member.is_module else ()


def _name_keywords(function: Any, parameter: Any, keywords: Any) -> None:
    classes = [*reversed(keywords.mro()), keywords]
    rows = "\n".join(cls.docstring.value.split("Args:\n")[1] for cls in classes)
    del function.parameters[parameter.name]
    for name in (name for cls in classes for name in cls.members):
        function.parameters.add(griffe.Parameter(name, kind=griffe.ParameterKind.keyword_only, default="None"))
    row = re.compile(rf"\n {{4}}{parameter.name}: .*?(?=\n {{4}}\w|\n\n)", re.DOTALL)
    function.docstring.value = row.sub(lambda found: f"{found[0]}\n{rows}", function.docstring.value, count=1)
