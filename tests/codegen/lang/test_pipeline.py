"""Functions compile without what surrounds the work; what somebody relies on is still done."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.cuda.core.postproc import PostProcessor

from gemmkit.components import freeze
from gemmkit.lang import compile, deferred
from gemmkit.lang.numba_hooks import operation, signature, types
from gemmkit.runtime.compile import to_ptx
from gemmkit.runtime.device import H100

ROOT = Path(__file__).resolve().parents[3]
OUT = freeze(np.zeros(16, "f4")).type


def ptx(kernel: Any, *arguments: Any) -> str:
    return to_ptx(kernel, (OUT, *(freeze(a).type for a in arguments)), 32, H100)


def loops(out: Any) -> None:
    i = 0
    while i < 16:
        i += 1
        if out[i - 1] > 3:
            continue                                           # two ways back to the head of the loop
        if out[i - 1] < -3:
            break
        out[i - 1] = 1


@pytest.mark.compile
@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_as_it_was(enabled: bool) -> None:
    """Also after an error, and Numba's own functions are analysed as ever."""
    def wrong(out: Any) -> None:
        out[0] = out.nothing

    analyse = PostProcessor.run
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        assert ".visible .entry" in ptx(loops)
        assert gc.isenabled() == enabled and PostProcessor.run is analyse
        with pytest.raises(Exception, match="nothing"):
            ptx(wrong)
        assert gc.isenabled() == enabled and PostProcessor.run is analyse
    finally:
        (gc.enable if was else gc.disable)()


@pytest.mark.compile
def test_an_operation_registered_after_a_compilation_is_found() -> None:
    def uses(out: Any) -> None:
        out[0] = divmod(out[0], out)

    ptx(loops)

    @operation(divmod)
    def _divmod(context: Any, *args: Any) -> Any:
        if len(args) != 2 or not isinstance(args[1], type(OUT)):
            return None
        return signature(types.float32, *args), lambda c, b, s, v: b.fadd(v[0], v[0])

    assert ".visible .entry" in ptx(uses)


SCRIPT = """
import sys
from tests.codegen.lang.test_pipeline import loops, ptx
ptx(loops)
assert "scipy.linalg" not in sys.modules
assert not any(getattr(f, "__qualname__", "").startswith("_absent") for f in sys.meta_path)
import scipy.linalg
assert scipy.linalg.det([[2.0]]) == 2.0
"""


@pytest.mark.compile
def test_scipy_is_not_loaded_and_can_be() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_module_is_absent_in_one_thread_for_the_time_being() -> None:
    import importlib
    import threading

    outcomes = []
    name = "colorsys"
    sys.modules.pop(name, None)
    with compile._absent(name):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
        other = threading.Thread(target=lambda: outcomes.append(importlib.import_module(name)))
        other.start()
        other.join()
    assert outcomes and importlib.import_module(name) is outcomes[0]


class _Node:
    """Refers to itself: only the collector frees it."""

    __slots__ = ("itself",)
    alive = 0

    def __init__(self) -> None:
        self.itself = self
        _Node.alive += 1

    def __del__(self) -> None:
        _Node.alive -= 1


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The collector's walks from now on, the first when a thousand objects were set aside."""
    seen: list[str] = []

    def noted(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            seen.append(phase)

    for name, value in dict(_LEAST=1000, _made=0, _alive=0).items():
        monkeypatch.setattr(deferred, name, value)
    gc.callbacks.append(noted)
    yield seen
    gc.callbacks.remove(noted)


def leave(objects: int) -> None:
    """What a compilation does."""
    with deferred.without_collections():
        assert not gc.isenabled()
        for _ in range(objects):
            _Node()


def test_what_compilations_leave_is_found(walks: list[str]) -> None:
    """Not at once, but before it is much; and the collector runs again, over all objects."""
    frozen = gc.get_freeze_count()                             # (Python 3.12 begins with some)
    for number in range(1, 4):
        leave(300)
        assert _Node.alive >= 300 * number and not walks
    leave(300)
    assert _Node.alive == 0 and len(walks) == 1
    assert gc.isenabled() and gc.get_freeze_count() == frozen


def test_a_walk_waits_until_as_much_was_made_as_is_alive(walks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "collect", lambda: walks.append("asked for"))
    leave(1200)
    assert len(walks) == 1 and deferred._alive > 10_000          # after the first it is known what is alive
    monkeypatch.setattr(deferred, "_alive", 10_000)
    for walked in (1, 1, 2):
        leave(4000)
        assert len(walks) == walked


def test_frozen_objects_stay_frozen(walks: list[str]) -> None:
    gc.collect()
    gc.freeze()
    try:
        frozen, before = gc.get_freeze_count(), len(walks)
        for _ in range(4):
            leave(300)
        assert gc.get_freeze_count() > frozen // 2 and len(walks) == before + 1
    finally:
        gc.unfreeze()


def inner_function(out: Any) -> None:
    def twice(y: float) -> float:
        return y + y

    out[0] = twice(out[1])


def no_inner_function(out: Any) -> None:
    out[0] = out[1] + out[1]


@pytest.mark.compile
def test_inner_functions_are_inlined() -> None:
    """What has one goes through Numba's own pass; what has none through the short one. The code is the same."""
    one, other = (re.findall(r"^\t((?:ld|add|mul|fma|st|ret)\b.*);", ptx(f), re.MULTILINE)
                  for f in (inner_function, no_inner_function))
    assert one == other and [line.split(".")[0] for line in one] == ["ld", "ld", "add", "st", "ret"]
