"""What may come of a bad call: an error of the caller's that names what was broken, or a right result."""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import linecache
import os
import re
import traceback
import warnings
from typing import Any, NamedTuple

import numpy as np

import gemmkit as gk
from gemmkit.emulator.errors import EmulatorError
from tests.bad_calls.scope import SMALL, scope
from tests.support.jobs import limited

ROOT = os.path.dirname(os.path.abspath(gk.__file__)) + os.sep
BROKEN_INSIDE = (AttributeError, LookupError, StopIteration, AssertionError, RecursionError, ArithmeticError, NameError,
                 NotImplementedError, MemoryError)


LIMIT = 20                             # seconds of the processor, not of a busy machine: a call emulates a few blocks at most


class Case(NamedTuple):
    """``code`` is evaluated to ``result``, then ``after``. ``names``: one of them is in a right error's text."""

    code: str
    after: str
    names: tuple[str, ...]
    expected: str | None = None
    broken: str = ""

    def __str__(self) -> str:
        return (f"from tests.bad_calls.judge import *; globals().update(scope())\nwith gk.emulate():\n    result = {self.code}\n"
                f"    {self.after}")


class Outcome(NamedTuple):
    """``fault`` is None where all is well; ``kind`` is how it went, for counting."""

    kind: str
    fault: str | None


def run(case: Case) -> Outcome:
    names = dict(scope(), emulated=_emulated)
    try:
        with (warnings.catch_warnings(), gk.emulate(), contextlib.redirect_stdout(io.StringIO()),
              contextlib.redirect_stderr(io.StringIO()), limited(LIMIT)):
            warnings.simplefilter("ignore")
            names["result"] = eval(case.code, names)
            result = eval(case.after, names)
    except SystemExit as error:
        return Outcome("exit", None if error.code == 2 else f"exit status {error.code}")
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        return _judged(case, error)
    return _checked(case, result, names)


def _judged(case: Case, error: BaseException) -> Outcome:
    kind = type(error).__name__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if not (frame.filename.endswith("lang/components.py") and frame.name == "__call__")       # Python's own otherwise
              and frame.name != "__getattr__"]
    inside = [n for n, frame in enumerate(frames) if frame.filename.startswith(ROOT)
              and (frame.name != "recorded" or frame is frames[-1])]                   # it calls the case's code
    ours = bool(inside) and inside[-1] == len(frames) - 1
    if not inside and frames[-1].filename == "<string>":
        return Outcome("no call", None)                       # the bad value itself cannot be made of this good one
    is_users = bool(inside) and not ours and frames[-1].filename.endswith(("<string>", "bad_calls/scope.py"))
    if is_users or (not inside and not isinstance(error, BROKEN_INSIDE)):
        return Outcome("the user's own code raised", None)
    if isinstance(error, BROKEN_INSIDE) or not isinstance(error, (ValueError, TypeError, EmulatorError)):
        return Outcome(kind, f"{kind} at {_place(frames[inside[-1]] if inside else frames[-1])}: {error}")
    last = frames[inside[-1]]
    if not ours or not _is_raise(last.filename, last.lineno or 0):
        return Outcome(kind, f"{kind} that nothing in gemmkit raised, at {_place(last)}: {error}")
    text = str(error)
    if isinstance(error, gk.ComponentError) and f'File "{ROOT}' in text:
        return Outcome(kind, f"{kind} that names a line of gemmkit's own: {text}")
    if last.filename.endswith("lang/components.py") and re.search(rf"\b{re.escape(re.split('[: ]', text)[0])}\(", case.code):
        return Outcome(kind, None)                            # the bad value itself says which class it cannot be made of
    named = re.match(r"\w+(?=\.\w+ cannot be compiled)", text)
    if isinstance(error, gk.ComponentError) and (named[0] if named else text.partition(" returned ")[0]) in case.broken:
        return Outcome(kind, None)                            # the bad value is the function, or the component, that is named
    if isinstance(error, EmulatorError) and re.search(r"^  at <string>:\d+$", text, re.MULTILINE):
        return Outcome(kind, None)                            # the line of the user's code that a GPU has no result for
    if not any(re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", text) for name in case.names):
        return Outcome(kind, f"{kind} names none of {', '.join(case.names)}, at {_place(last)}: {text}")
    return Outcome(kind, None)


def _checked(case: Case, result: Any, names: dict[str, Any]) -> Outcome:
    if case.expected is None:
        return Outcome("accepted", None)
    try:
        with np.errstate(all="ignore"):
            wanted = np.asarray(eval(case.expected, names))
    except Exception as error:
        return Outcome("accepted", f"accepted, and NumPy says {type(error).__name__}: {error}")
    found = np.asarray(result)
    if found.shape != wanted.shape or not np.allclose(found.astype(complex), wanted.astype(complex), rtol=1e-2, atol=1e-2, equal_nan=True):
        return Outcome("accepted", f"accepted, and the result is {found.tolist()} where NumPy has {wanted.tolist()}")
    return Outcome("right result", None)


def good_call() -> str | None:
    """What is wrong with an ordinary call after a bad one; None if nothing is."""
    a, b = np.arange(6, dtype="f4").reshape(2, 3), np.ones((3, 2), "f4")
    with gk.emulate():
        found = gk.matmul(a, b, conf=SMALL)
    return None if gk.emulator.current_mode() is None and np.array_equal(found, a @ b) else f"an ordinary call gives {found}"


def _emulated(seed: Any) -> Any:
    with gk.emulate(seed):
        return gk.matmul(np.ones((3, 2), "f4"), np.ones((2, 3), "f4"))


def _place(frame: traceback.FrameSummary) -> str:
    return f"{os.path.relpath(frame.filename, os.path.dirname(ROOT[:-1]))}:{frame.lineno} ({frame.name})"


@functools.cache
def _raises(filename: str) -> frozenset[int]:
    """The lines of a file that belong to raise statements."""
    tree = ast.parse("".join(linecache.getlines(filename)))
    return frozenset(line for node in ast.walk(tree) if isinstance(node, ast.Raise)
                     for line in range(node.lineno, (node.end_lineno or node.lineno) + 1))


def _is_raise(filename: str, line: int) -> bool:
    return line in _raises(filename)
