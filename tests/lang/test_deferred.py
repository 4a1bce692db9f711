"""Public names are imported when they are asked for, and Numba at the first compilation."""

from __future__ import annotations

import ast
import importlib
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import gemmkit as gk
from gemmkit.lang import deferred
from gemmkit.lang.fingerprint import function_text, read_value

# ==========================================================================================================================
# Public names are imported when they are asked for, and Numba when it is used: no stand-in for what it makes is left, in any
# thread, and a failure is no end.


def run(program: str) -> str:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True).stdout


@pytest.mark.kin(2)
def test_no_stand_in_is_left() -> None:
    """One in a closure, a default or a class would be unequal to what it stands for."""
    text = run("""
        import gc
        import gemmkit.functions.matmul
        from gemmkit.kernels.spec import FAMILIES
        from gemmkit.lang import deferred as later

        before = sum(type(x) is later.Later for x in gc.get_objects())
        later.load()
        gc.collect()
        left = [x for x in gc.get_objects() if type(x) is later.Later]
        holders = [holder for x in left for holder in gc.get_referrers(x) if holder is not left]
        print(before > 300, [repr(holder)[:200] for holder in holders])
    """)
    assert text == "True []\n"


@pytest.mark.kin(2)
def test_a_use_loads_and_is_the_real_thing() -> None:
    text = run("""
        import sys
        import gemmkit
        from gemmkit.lang.memory import ViewType
        from gemmkit.lang.numba_hooks import types
        from gemmkit.lang.scalars import index

        assert not isinstance(3, ViewType) and "numba" not in sys.modules
        given = index, ViewType                                   # held where nothing puts the real ones
        assert types.UniTuple(index, 2).count == 2 and "numba" in sys.modules
        view = given[1]("float32", 2, 1, 16)
        assert isinstance(view, given[1]) and isinstance(view, ViewType) and isinstance(view, types.Type)
        assert type(ViewType) is type(types.Type) and index.bitwidth == given[0].bitwidth == 32
        class Mine(given[1]):
            pass
        assert Mine.__mro__[1] is ViewType
    """)
    assert text == ""


@pytest.mark.kin(2)
def test_threads_wait_for_the_one_that_loads() -> None:
    text = run("""
        import sys, threading
        import gemmkit
        from gemmkit.lang.memory import ViewType
        from gemmkit.lang.registers import FragmentType

        sys.setswitchinterval(1e-5)
        start, made, wrong = threading.Barrier(8), [], []
        def work(make=ViewType):
            start.wait()
            try:
                made.append(make("float16", 2, 1, 16))
            except BaseException as error:
                wrong.append(error)
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(wrong, len({id(x) for x in made}))
    """)
    assert text == "[] 1\n"


@pytest.mark.thorough
def test_what_failed_is_tried_again() -> None:
    text = run("""
        import sys
        import gemmkit as gk
        from gemmkit.lang.numba_hooks import types

        class Without:
            @staticmethod
            def find_spec(name, path=None, target=None):
                if name == "numba.cuda.datamodel":
                    raise ImportError("not there")

        sys.meta_path.insert(0, Without)
        for _ in range(2):
            try:
                types.int32
            except ImportError as error:
                print(error)
        sys.meta_path.remove(Without)
        from gemmkit.plans.ahead import compile_config
        conf = gk.get_config(operator=gk.operators.FPUOp(M=16, N=16), global_a_layout=gk.layouts.RowMajor("float32"))
        print(compile_config(conf).usage.spill_stores)
    """)
    assert text == "not there\nnot there\n0\n"


READINGS = """
    import gemmkit as gk
    from gemmkit.components import freeze
    from gemmkit.kernels.spec import FAMILIES
    from gemmkit.lang import deferred as later
    from gemmkit.lang.fingerprint import function_text
    from gemmkit.lang.fingerprint import package_digest, packages_stand

    conf = gk.get_config(operator=gk.operators.WGMMAOp(), global_a_layout=gk.layouts.RowMajor("float16"))
    def texts():
        return [function_text(FAMILIES[conf.kernel].kernel), freeze(conf.spec()).fingerprint, package_digest()]
"""


@pytest.mark.kin(2)
def test_readings_are_the_same_before_and_after() -> None:
    """A kernel's key is made before Numba is loaded, or after: it is one key, and what was read still holds."""
    before = run(READINGS + "    first = texts(); later.load(); assert packages_stand() and texts() == first; print(first)")
    after = run(READINGS + "    later.load(); print(texts())")
    first = run("    from gemmkit.lang import deferred as later; later.load()\n" + READINGS + "    print(texts())")
    assert before == after == first


def test_names_are_told_by_name() -> None:
    """Of gemmkit's own functions, because a kernel's key holds a digest of gemmkit's source; a user's are read."""
    deferred.load()
    from gemmkit.epilogues import activations
    from gemmkit.lang import scalars as number_types

    assert function_text(activations.relu) == "gemmkit.epilogues.activations.relu"
    index = 3
    assert function_text(lambda: index) != function_text(lambda: gk)
    assert read_value(number_types.numba_type, "f").text


@pytest.mark.kin(1)
def test_a_stand_in_that_is_stored_while_another_thread_loads_is_put_right(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(textwrap.dedent("""
        import sys
        from gemmkit.lang.numba_hooks import types

        def late(made):
            sys.entered.set()
            assert sys.loaded.wait(60)
            return made

        value, pair = late(types.int32), (types.int64, 1)
    """))
    text = run(f"""
        import importlib, sys, threading
        import gemmkit
        from gemmkit.lang import deferred as later

        entered, loaded = sys.entered, sys.loaded = threading.Event(), threading.Event()
        gemmkit.__path__.append({str(tmp_path)!r})
        thread = threading.Thread(target=importlib.import_module, args=("gemmkit.probe",))
        thread.start()
        assert entered.wait(60)
        later.load()
        loaded.set()
        thread.join()
        from gemmkit.probe import value
        print(type(value) is later.Later, value.bitwidth)
        later.load()
        from gemmkit.probe import pair, value
        from numba.cuda import types
        print(value is types.int32, pair[0] is types.int64, later._State.unfinished)
    """)
    assert text == "True 32\nTrue True []\n"


# -- public names ------------------------------------------------------------------------------------------------------

PACKAGES = "gemmkit", "gemmkit.layouts", "gemmkit.epilogues", "gemmkit.operators", "gemmkit.transforms"


@pytest.mark.sample(1)
@pytest.mark.parametrize("package", PACKAGES)
def test_names_are_what_type_checkers_and_editors_read(package: str) -> None:
    """A name that is asked for is what the import of it under ``if TYPE_CHECKING`` gives, and all are in ``__all__``."""
    module = importlib.import_module(package)
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    read = {alias.asname or alias.name: (str(node.module), alias.name)
            for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(module.__all__) == set(read)
    assert set(module.__all__) <= set(dir(module)) and dir(module) == sorted(set(dir(module)))
    for name, (home, origin) in read.items():
        module_of = importlib.import_module(home)
        wanted = importlib.import_module(f"{home}.{origin}") if home == package or not hasattr(module_of, origin) else getattr(
            module_of, origin)
        assert getattr(module, name) is wanted, name
        assert not isinstance(wanted, type) or pickle.loads(pickle.dumps(wanted)) is wanted
    names: dict[str, object] = {}
    exec(f"from {package} import *", names)
    assert set(module.__all__) <= set(names)


@pytest.mark.sample(1)
@pytest.mark.parametrize("package, name, said", [
    ("gemmkit", "matmull", "module 'gemmkit' has no attribute 'matmull'; the nearest is 'matmul'"),
    ("gemmkit.layouts", "RowMayor", "module 'gemmkit.layouts' has no attribute 'RowMayor'; the nearest is 'RowMajor'"),
    ("gemmkit", "Bias", "module 'gemmkit' has no attribute 'Bias'; gemmkit.epilogues has it"),
    ("gemmkit", "Causal", "module 'gemmkit' has no attribute 'Causal'; gemmkit.masks has it"),
    ("gemmkit", "quantise", "module 'gemmkit' has no attribute 'quantise'; gemmkit.layouts.quantised has it"),
    ("gemmkit.operators", "min_plus", "module 'gemmkit.operators' has no attribute 'min_plus'; the nearest is 'MIN_PLUS'"),
    ("gemmkit", "zzzz", "module 'gemmkit' has no attribute 'zzzz'"),
    ("gemmkit", "__wrapped__", "module 'gemmkit' has no attribute '__wrapped__'")])
def test_a_name_that_is_not_there(package: str, name: str, said: str) -> None:
    module = importlib.import_module(package)
    assert not hasattr(module, name)
    with pytest.raises(AttributeError) as refused:
        getattr(module, name)
    assert str(refused.value) == said


def test_modules_are_attributes_and_what_they_lack_is_told() -> None:
    """A module is imported when it is asked for, whether it was before or not. Its own failure is no missing attribute."""
    text = run("""
        import sys
        sys.modules["torch"] = None
        import gemmkit as gk
        print(gk.plans.__name__, gk.layouts.tensor.__name__, callable(gk.glu), callable(gk.grouped), callable(gk.matmul))
        try:
            hasattr(gk, "torch")
        except ModuleNotFoundError as error:
            print(error.name)
    """)
    assert text == "gemmkit.plans gemmkit.layouts.tensor True True True\ntorch\n"


@pytest.mark.kin(1)
def test_threads_that_ask_for_names_at_once() -> None:
    text = run("""
        import sys, threading
        import gemmkit as gk

        sys.setswitchinterval(1e-5)
        names = [name for name in gk.__all__ if not name.startswith("float")]
        start, wrong, found = threading.Barrier(8), [], [{} for _ in range(8)]
        def work(n):
            start.wait()
            try:
                for name in names[n * 7:] + names[:n * 7]:
                    found[n][name] = getattr(gk, name)
            except BaseException as error:
                wrong.append(error)
        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(wrong, all(each == found[0] for each in found), callable(gk.matmul), "numba" in sys.modules)
    """)
    assert text == "[] True True False\n"


# ==========================================================================================================================
# What a process loads: Numba and what comes with it at the first compilation, not before.

HEAVY = "numba", "numba_cuda", "llvmlite", "scipy", "asyncio", "torch", "cupy"


def loaded(*programs: str) -> list[set[str]]:
    """Which of the heavy packages a fresh process has after each of some programs, run one after the other."""
    report = f"\nimport sys\nprint(*[name for name in {HEAVY!r} if name in sys.modules])\n"
    done = subprocess.run([sys.executable, "-c", "".join(textwrap.dedent(program) + report for program in programs)],
                          capture_output=True, text=True, check=True)
    return [set(line.split()) for line in done.stdout.splitlines()]


COMPONENTS = """
    from dataclasses import dataclass
    import gemmkit as gk
    import numpy as np

    @dataclass(frozen=True)
    class Skewed(gk.layouts.Layout):
        def element(self, data, m, k, shape):
            return data[m - k + shape.K - 1]

    scale = np.arange(32, dtype=np.float32)
    conf = gk.get_config(
        operator=gk.operators.MMAOp(dtype="bfloat16", accumulator="float32"), global_a_layout=gk.layouts.RowMajor("bfloat16"),
        transform_regs_to_shared_d=gk.transforms.Map(lambda x: max(x, 0)), epilogue=gk.epilogues.Bias(scale),
        gemm_shape=dict(M=64, N=32, K=64))
    repr(conf), Skewed("float32"), gk.operators.WMMAOp(), gk.operators.WGMMAOp(), gk.epilogues.Saturate("int8")
    gk.operators.FPUOp(dtype="float64"), gk.layouts.Swizzled(gk.layouts.RowMajor("float16")), gk.operators.dual(1)
"""

EMULATED = """
    a, b = (np.ones(shape, np.float16) for shape in ((48, 40), (40, 32)))
    with gk.emulate():
        assert (gk.matmul(a, b) == 40).all()
        assert (gk.matmul(a.astype("f4"), b.astype("f4"), epilogue=gk.epilogues.Bias(scale)) == 40 + scale).all()
        assert (gk.matmul(a.astype("c8"), b.astype("c8")) == 40).all()
        assert (gk.einsum("ik,kj->ij", a, b) == 40).all()
        gk.plan(a, b)(a, b)
        assert np.allclose(gk.softmax(np.zeros((4, 8), "f4")), 1 / 8)
        q = np.ones((1, 1, 8, 64), np.float16)
        assert (gk.attention(q, q, q) == 1).all()
"""

#: Types are asked for before anything is compiled, as `compile_config` with shapes that layouts leave open does.
ASKED = """
    import gemmkit as gk
    from gemmkit.components import freeze
    from gemmkit.kernels.spec import ProblemShape
    from gemmkit.runtime.compile import to_ptx
    from gemmkit.runtime.device import H100

    shape = freeze(ProblemShape(1, 2, 3)).type

    def kernel(shape, out):
        out[0] = shape.M + shape.K

    import numpy as np
    from gemmkit.lang.functions import freeze_array
    from gemmkit.runtime.arrays import describe
    assert ".entry" in to_ptx(kernel, (shape, freeze_array(describe(np.zeros(4, np.int32), "out")).type), 32, H100)
"""

OWN = COMPONENTS + """
    with gk.emulate():
        d = gk.matmul(np.ones((4, 5), "f4"), np.ones((5, 6), "f4"), epilogue=gk.epilogues.Elementwise(lambda x, i, j: x + i))
        assert (d == 5 + np.arange(4)[:, None]).all()
"""

COMPILED = """
    import gemmkit as gk
    from gemmkit.plans.ahead import compile_config
    conf = gk.get_config(operator=gk.operators.FPUOp(M=16, N=16), global_a_layout=gk.layouts.RowMajor("float32"))
    assert compile_config(conf).usage.spill_stores == 0
"""


#: How many of gemmkit's modules there may be after ``import gemmkit``. A name that is asked for loads its own.
IMPORTED = 8

COUNTED = """
    import sys
    import gemmkit, numpy
    numpy.dtype("bfloat16")                                        # which NumPy knows by name from then on
    print(*[name for name in sys.modules if name.partition(".")[0] == "gemmkit"])
"""


def test_an_import_loads_no_more_than_names() -> None:
    """Plans, kernels, layouts, the emulator and the tuner are loaded with the first name that needs them."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(COUNTED)], capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) <= IMPORTED, done.stdout


@pytest.mark.kin(2)
def test_without_compiling_nothing_heavy_is_loaded() -> None:
    assert loaded("import gemmkit", COMPONENTS, EMULATED) == [set()] * 3


@pytest.mark.sample(3)
@pytest.mark.compile
@pytest.mark.parametrize("program", [COMPILED, ASKED, OWN], ids=["compiled", "types first", "a function of the user's, in the emulator"])
@pytest.mark.kin(2)
def test_compiling_loads_the_compiler(program: str) -> None:
    """The names above are those of the packages that a compiler is. The emulator asks it about functions of the user's."""
    (found,) = loaded(program)
    assert {"numba", "llvmlite"} <= found


#: What a plain product, planned for an H100, has no use for.
UNUSED = ("attention_call", "attention_plans", "mlp_call", "mlp_plans", "rows", "row_plans", "lstm", "glu_call",
          "grouped_call", "groups", "programs", "specs", "tuner", "cli", "report", "distributed", "torch", "cupy",
          "inspection", "dual", "selection", "blas", "block_sparse", "contraction", "masks", "scores", "fast",
          "emulator.machine", "kernels.rows", "kernels.attention", "kernels.mlp", "kernels.simt.family",
          "kernels.sm80.family", "kernels.quantised.family")
PLANNED = """
    import sys
    import numpy as np
    import gemmkit as gk
    from gemmkit.plans.ahead import recorded
    from gemmkit.runtime.device import H100

    a = np.ones((256, 256), np.float16)
    (found,) = recorded(lambda: gk.matmul(a, a), H100)
    assert found.problem.config.kernel == "warp_specialised"
    print(*[name for name in sys.modules if name.partition(".")[0] == "gemmkit"])
"""


def test_a_product_loads_what_it_needs() -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(PLANNED)], capture_output=True, text=True, check=True)
    found = set(done.stdout.split())
    assert not found & {f"gemmkit.{name}" for name in UNUSED}
    assert len(found) <= 275
