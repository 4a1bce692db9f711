"""Stand-ins for what is made when Numba is loaded: none is left, in any thread, and a failure is no end."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

import gemmkit as gk
from gemmkit.lang import later
from gemmkit.lang.fingerprint import function_text, read_value


def run(program: str) -> str:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True).stdout


def test_no_stand_in_is_left() -> None:
    """One in a closure, a default or a class would be unequal to what it stands for."""
    text = run("""
        import gc
        import gemmkit
        from gemmkit.kernels.select import KERNELS
        from gemmkit.lang import later

        before = sum(type(x) is later.Later for x in gc.get_objects())
        later.load()
        gc.collect()
        left = [x for x in gc.get_objects() if type(x) is later.Later]
        holders = [holder for x in left for holder in gc.get_referrers(x) if holder is not left]
        print(before > 300, [repr(holder)[:200] for holder in holders])
    """)
    assert text == "True []\n"


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
        from gemmkit.inspection import compile_config
        conf = gk.get_config(operator=gk.operators.FPUOp(M=16, N=16), global_a_layout=gk.layouts.RowMajor("float32"))
        print(compile_config(conf).usage.spill_stores)
    """)
    assert text == "not there\nnot there\n0\n"


READINGS = """
    import gemmkit as gk
    from gemmkit.components import freeze
    from gemmkit.kernels.select import KERNELS
    from gemmkit.lang import later
    from gemmkit.lang.fingerprint import function_text
    from gemmkit.lang.package_state import package_digest, packages_stand

    conf = gk.get_config(operator=gk.operators.WGMMAOp(), global_a_layout=gk.layouts.RowMajor("float16"))
    def texts():
        return [function_text(KERNELS[conf.kernel]), freeze(conf.spec()).fingerprint, package_digest()]
"""


def test_readings_are_the_same_before_and_after() -> None:
    """A kernel's key is made before Numba is loaded, or after: it is one key, and what was read still holds."""
    before = run(READINGS + "    first = texts(); later.load(); assert packages_stand() and texts() == first; print(first)")
    after = run(READINGS + "    later.load(); print(texts())")
    assert before == after


def test_names_are_told_by_name() -> None:
    """Of gemmkit's own names that are made with Numba; a user's are read."""
    later.load()
    from gemmkit.lang import number_types, scalars

    assert later.made_later(vars(scalars), "index") and not later.made_later(vars(number_types), "numba_type")
    index = 3
    assert function_text(lambda: index) != function_text(lambda: gk)
    assert read_value(number_types.numba_type, "f").text
