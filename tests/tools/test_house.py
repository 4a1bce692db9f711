"""What `python -m tools.house` counts, of sources that are written here."""

import ast
import re
from pathlib import Path

import pytest

from tools import house
from tools.house import cycles, figures, imports

SOURCES = {
    "gemmkit/__init__.py": "from gemmkit.one import f\n",
    "gemmkit/one.py": "from gemmkit import two\n\ndef f():\n    from gemmkit import three\n",
    "gemmkit/two.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from gemmkit.one import f\nimport gemmkit.three\n",
    "gemmkit/three.py": "from . import two\n",
    "gemmkit/lang/low.py": "x = 1\n" * 801,
    "gemmkit/kernels/k.py": "class KSpec:\n    a: int\n    @property\n    def b(self): ...\n    def c(self): ...\n"
                            "def g(a, b, c, d, e, f, *, h, i):\n    return choose(a, b, c)\n",
}


def test_figures():
    found = figures(SOURCES)
    assert found["lines"] - found["lines above device, ptx, emulator and runtime"] == 801
    assert found["files over 800 lines"] == 1
    assert (found["functions in kernels"], found["most parameters"]) == (4 - 1, 8)
    assert found["functions in kernels with 8 parameters or more"] == 1
    assert found["fields and properties of specs"] == 2 and found["calls of choose in kernels"] == 1
    assert found["files that import each other"] == 2 and found["import cycles between rooms"] == 0
    assert (found["entries"], found["files"], found["banned names"]) == (4, 6, 0)


def test_imports_that_run_upwards_and_what_launches():
    sources = {
        "gemmkit/kernels/k.py": "from gemmkit.epilogues import E\nfrom gemmkit.tiling import T\n",
        "gemmkit/epilogues/__init__.py": "from gemmkit.kernels import k\n",
        "gemmkit/tiling.py": "def f():\n    from gemmkit.plans.plan import g\n",
        "gemmkit/plans/plan.py": "def choose(): ...\ndef g(kernel):\n    for _ in range(3):\n        try: kernel.bind()\n"
                               "        except (CodeChanged, OSError): pass\n    kernel.bind(1)\n",
        "gemmkit/kernels/sm90/mapping.py": "class A:\n    @property\n    def choice(self): ...\ndef mapping_of(): ...\n",
        "gemmkit/kernels/common/k.py": "def choose(): ...\n",
        "gemmkit/programs/p.py": "def chosen():\n    return choose(1)\n"
                                 "def first():\n    for x in y:\n        try: return x()\n        except ConfigError: pass\n"
                                 "def other():\n    try: x()\n    except ConfigError:\n        if y: raise\n        return other()\n"
                                 "def told():\n    for x in y:\n        try: x()\n        except ConfigError:\n            if y: raise\n",
    }
    graph = imports({path: ast.parse(text) for path, text in sources.items()})
    assert house.upwards(graph) == [("gemmkit/kernels/k.py", "gemmkit/epilogues/__init__.py"),
                                    ("gemmkit/tiling.py", "gemmkit/plans/plan.py")]
    found = figures(sources)
    assert found["imports that run upwards"] == 2 and found["lines in the room kernels"] == 2 + 4 + 1
    assert found["implementations of a launch"] == found["loops that compile again where code has changed"] == 1
    assert found["functions that choose a mapping"] == 4       # choose, mapping_of, first, other


def test_what_is_measured_without_a_gpu():
    """A first product of float16, planned for an H100 of which nothing is there."""
    found = house.measured()
    assert all(value > 0 for value in found.values())
    assert found["modules loaded by import gemmkit"] < found["files that it passes through"]
    assert found["files that it passes through"] < found["modules loaded by a first f16 matmul"]
    assert found["files that it passes through"] < found["calls into gemmkit that it makes"]


def test_imports_for_types_make_no_cycle_and_those_in_functions_do():
    graph = imports({path: ast.parse(text) for path, text in SOURCES.items()})
    assert graph["gemmkit/one.py"] == {"gemmkit/two.py", "gemmkit/three.py"}
    assert cycles(graph) == [["gemmkit/three.py", "gemmkit/two.py"]]
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_the_command_without_a_commit(replaced, capsys):
    replaced(house, "of_tree", lambda: {**SOURCES, "gemmkit/tiling.py": "from gemmkit.plans import plan\n",
                                                   "gemmkit/plans/plan.py": ""})
    replaced(house, "measured", lambda: {"calls": 12345})
    assert house.main(["--cycles", "--parameters", "--upwards"]) == 1                          # a long file, an import upwards
    printed = capsys.readouterr().out
    assert re.search(r"^files over 800 lines +1 +0  over$", printed, re.MULTILINE)
    assert re.search(rf"^lines +{sum(text.count(chr(10)) for text in SOURCES.values()) + 1} +[\d,]+$", printed, re.MULTILINE) and "gemmkit/three.py <-> gemmkit/two.py" in printed
    assert re.search(r"^calls +12,345 +-$", printed, re.MULTILINE)
    assert "gemmkit/tiling.py (tiling) imports gemmkit/plans/plan.py (plans)" in printed
    assert "gemmkit/kernels/k.py:6 g(a, b, c, d, e, f, h, i)" in printed


# -- what tests may not do ---------------------------------------------------------------------------------------------

CLOCKS = re.compile(r"(?<![\w.])(time\.(monotonic|perf_counter|process_time)(_ns)?\(|timeit\.)|assert .*(?<![\w.])time\.time\(")


@pytest.mark.parametrize(("line", "is_one"), [
    ("begin = time.process_time()", True), ("assert time.time() - start < 3", True), ("timeit.repeat(f)", True),
    ("module.time.monotonic()", False), ("os.utime(file, (time.time() - age,) * 2)", False), ("time.sleep(1)", False),
])
def test_what_reads_a_clock(line, is_one):
    assert (CLOCKS.search(line) is not None) == is_one


def test_no_test_looks_at_a_clock():
    """What takes so many milliseconds on one machine takes three times as long on another. Tests count what is done, or wait for
    what happens (pytest ends a test that waits for ever); `python -m bench.calls` and its like measure."""
    files = Path(__file__).parents[1].rglob("test_*.py")
    found = [f"{path}:{n}" for path in files if path != Path(__file__)
             for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if CLOCKS.search(line)]
    assert not found
