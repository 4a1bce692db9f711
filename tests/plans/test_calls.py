"""Calls that are known, with a driver and arrays that stand in for a GPU's: how much Python they run, what reaches the
driver, and that nothing is launched which a first call would refuse."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from bench import stand_ins
from gemmkit.lang.references import Fact
from gemmkit.plans.compiled import OPERANDS
from gemmkit.plans.launch import forget
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.device import CTYPES, PARAMETER_FORMATS
from gemmkit.transforms import Map
from tests.support.checks import functions_run
from tests.support.patches import Seeded, Set

LIBRARIES = pytest.mark.parametrize("library", stand_ins.LIBRARIES)
M, N, K = 128, 64, 256


class Launches:
    """Stands for cuLaunchKernelEx: the stream and the values of each launch."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[int]]] = []
        self.formats: list[str] = []
        self.before: Callable[[], object] = lambda: None

    def __call__(self, config: Any, function: Any, pointers: Any, extra: None) -> int:
        self.before()
        values = [CTYPES[PARAMETER_FORMATS[code][0] if code != "tensor_map" else "Q"].from_address(pointer).value
                  for code, pointer in zip(self.formats, pointers)]
        self.seen.append((config._obj.stream, values))
        return 0


@pytest.fixture
def launches() -> Iterator[Launches]:
    made = Launches()
    with stand_ins.gpu(made):
        forget()
        yield made
        forget()


@pytest.fixture
def make(library: str, launches: Launches) -> Iterator[Callable[..., Any]]:
    with stand_ins.library(library) as make:
        yield make


def operands(make: Callable[..., Any]) -> tuple[Any, Any, Any]:
    return make(M, K), make(K, N), make(M, N)


def addresses(run: Any, values: list[int]) -> dict[str, Any]:
    """The addresses of a, b, c and out, and those that the stand-ins' tensor maps are of, by the operand."""
    compiled = run._compiled
    found: dict[str, Any] = dict.fromkeys(OPERANDS)
    for slot, which, _, encoder in compiled.puts:
        found[OPERANDS[which] if encoder is None else f"map of {OPERANDS[which]}"] = values[slot]
    return found


def expected(a: Any, b: Any, out: Any) -> dict[str, Any]:
    at_a, at_b, at_out = (describe(x).pointer for x in (a, b, out))
    return {"a": at_a, "b": at_b, "c": None, "out": at_out, "map of a": at_a, "map of b": at_b, "map of out": at_out}


# -- how much is run ---------------------------------------------------------------------------------------------------

#: The call and its closure, three arrays recognised, CuPy's stream (PyTorch's is asked by a C function), the launch.
PLAN = {"cupy": 7, "torch": 6}
#: matmul, multiply, the keys of two arrays, the plan's launch, a new array, the stream, the launch.
MATMUL = {"cupy": 8, "torch": 7}


@LIBRARIES
def test_a_known_call_runs_few_functions(library: str, make: Any) -> None:
    a, b, out = operands(make)
    run = gk.plan(a, b)
    for _ in range(2):
        run(a, b, out=out), gk.matmul(a, b), gk.matmul(a, b, out=out)                            # the second is known
    planned, anew = functions_run(lambda: run(a, b, out=out)), functions_run(lambda: gk.matmul(a, b))
    assert len(planned) <= PLAN[library], planned
    assert len(anew) <= MATMUL[library], anew
    into = functions_run(lambda: gk.matmul(a, b, out=out))
    assert len(into) <= PLAN[library] + 7, into


@LIBRARIES
def test_other_arrays_cost_their_checks_and_tensor_maps_alone(library: str, make: Any) -> None:
    sets = [operands(make) for _ in range(3)]
    run = gk.plan(*sets[0][:2])
    for a, b, out in sets:
        run(a, b, out=out)
    for a, b, out in sets:
        found = functions_run(lambda a=a, b=b, out=out: run(a, b, out=out))                      # type: ignore[misc]
        assert "_encode" not in found and len(found) <= PLAN[library] + 7, found


@LIBRARIES
def test_a_component_without_runtime_values_has_the_plans_launch(library: str, make: Any) -> None:
    a, b, out = operands(make)
    relu = gk.epilogues.ReLU()
    call = lambda: gk.matmul(a, b, out=out, epilogue=relu)  # noqa: E731
    call(), call()
    found = functions_run(call)
    assert "_freeze_component" not in found and "with_values" not in found and len(found) <= 60, (len(found), found)


@LIBRARIES
def test_components_that_are_kept_are_looked_at_alone(library: str, make: Any) -> None:
    a, b, out = operands(make)
    braid, fold = gk.layouts.InterleavedColumns(b, make(*b.shape)), gk.epilogues.Fold(lambda gate, up: gate * up)
    run = gk.plan(a, braid, epilogue=fold)
    for call in (lambda: run(a, braid, out=out), lambda: gk.matmul(a, braid, out=out, epilogue=fold)):
        call(), call()
        found = functions_run(call)
        assert "_freeze_component" not in found and len(found) <= 110, (len(found), found)


@LIBRARIES
@pytest.mark.usefixtures("quick_collections")
def test_known_calls_keep_no_array_alive(library: str, make: Any) -> None:
    """Neither those that components hold, nor what functions captured; nor, with swap-AB, those of the transposed product."""
    def alive() -> list[Any]:
        a, bias, table, gamma = make(64, 64), make(64), make(64), make(64)
        few, many, wide = make(8, 1024), make(1024, 1024), make(1024)
        gate, up = make(64, 64), make(64, 64)
        for _ in range(3):
            gk.glu(a, gate, up)
            gk.matmul(few, many, epilogue=gk.epilogues.Bias(wide))
            gk.matmul(a, a, epilogue=gk.epilogues.Bias(bias),
                      transform_shared_to_global_d=Map(lambda x, i, j: x * table[j]))
            gk.rmsnorm(a, gamma)
        assert gk.plan(few, many, epilogue=gk.epilogues.Bias(wide))._compiled.problem.swap_ab
        return [weakref.ref(x) for x in (a, bias, table, gamma, few, many, wide, gate, up)]

    references = alive()
    gc.collect()
    assert [reference() for reference in references] == [None] * 9


# -- what reaches the driver -------------------------------------------------------------------------------------------

@LIBRARIES
def test_each_launch_has_the_addresses_of_its_call(library: str, make: Any, launches: Launches) -> None:
    sets = [operands(make) for _ in range(3)]
    run = gk.plan(*sets[0][:2])
    launches.formats = run._compiled.launchable.formats
    assert run.config.kernel == "warp_specialised" and sum(put.encoder is not None for put in run._compiled.puts) == 3
    for n in (0, 0, 1, 2, 0, 1, 1):
        a, b, out = sets[n]
        for call in (lambda: run(a, b, out=out), lambda: gk.matmul(a, b, out=out), lambda: gk.matmul(a, b)):
            result = call()
            stream, values = launches.seen[-1]
            assert stream == stand_ins.STREAM and addresses(run, values) == expected(a, b, result)
            assert (result is out) == (describe(result).pointer == describe(out).pointer)
    run(a, b, out=out, stream=5)
    gk.matmul(a, b, stream=6)
    assert [stream for stream, _ in launches.seen[-2:]] == [5, 6]


@LIBRARIES
def test_a_launch_has_the_values_of_the_calls_components(library: str, make: Any, launches: Launches) -> None:
    a, b, out = operands(make)
    biases = [make(N, dtype="float32") for _ in range(3)]
    run = gk.plan(a, b, epilogue=gk.epilogues.Bias(biases[0]))
    launches.formats = run._compiled.launchable.formats
    (slot,) = [n for n, value in enumerate(run._compiled.values) if value == describe(biases[0]).pointer]
    for n in (0, 1, 1, 2, 0):
        gk.matmul(a, b, out=out, epilogue=gk.epilogues.Bias(biases[n]))
        _, values = launches.seen[-1]
        assert values[slot] == describe(biases[n]).pointer and addresses(run, values) == expected(a, b, out)
        run(a, b, out=out)
        assert launches.seen[-1][1][slot] == describe(biases[0]).pointer
    with pytest.raises(ValueError, match="overlaps out"):
        gk.matmul(a, b, out=out, epilogue=gk.epilogues.Bias(strided_row(out)))


@LIBRARIES
def test_a_launch_has_the_tensor_maps_of_the_calls_components(library: str, make: Any, launches: Launches) -> None:
    """A residual comes by TMA: its map is of the array of the call, also where the plan's epilogue holds two that were one.
    Of other strides it is another plan's."""
    a, b, out = operands(make)
    others = [make(M, N) for _ in range(3)]

    def epilogue(x: Any, y: Any) -> Any:
        return gk.epilogues.Residual(x) | gk.epilogues.Residual(y)

    run = gk.plan(a, b, epilogue=epilogue(others[0], others[0]))
    launches.formats = run._compiled.launchable.formats
    (held,) = run._compiled.held_maps
    for n, m in ((0, 0), (1, 2), (2, 1), (0, 0), (1, 1)):
        gk.matmul(a, b, out=out, epilogue=epilogue(others[n], others[m]))
        _, values = launches.seen[-1]
        assert values[held.slot] == values[held.which] == describe(others[n]).pointer
        assert addresses(run, values) == expected(a, b, out)
        run(a, b, out=out)
        assert launches.seen[-1][1][held.slot] == describe(others[0]).pointer
    wide = make(M, N + 8)
    gk.matmul(a, b, out=out, epilogue=epilogue(part_of(wide, M, N), others[0]))
    gk.matmul(a, b, out=out, epilogue=epilogue(others[1], others[2]))
    assert launches.seen[-1][1][held.slot] == describe(others[1]).pointer


@LIBRARIES
def test_a_known_unit_has_the_addresses_of_its_call(library: str, make: Any, launches: Launches) -> None:
    """`gk.glu` is known by its arrays alone: also where two are one, and where ``out`` would overlap one."""
    sets = [(make(M, K), make(K, N), make(K, N), make(M, N)) for _ in range(3)]
    x, w, v, out = sets[0]
    launches.formats = gk.plan(x, gk.layouts.InterleavedColumns(w, v), epilogue=gk.epilogues.Fold(lambda a, b: a * b))._compiled.launchable.formats
    at = {id(array): describe(array).pointer for arrays in sets for array in arrays}
    for n in (0, 0, 1, 2, 0, 1, 1):
        x, w, v, out = sets[n]
        for given in ((x, w, v), (x, v, w), (x, w, w), (x, v, v)):
            for how in ({"out": out}, {}):
                gk.glu(*given, **how)
                _, values = launches.seen[-1]
                assert {at[id(array)] for array in given} == set(values) & {at[id(x)], at[id(w)], at[id(v)]}
                assert (at[id(out)] in values) == bool(how)
    for given in ((x, w, v), (x, w, w)):
        count = len(functions_run(lambda given=given: gk.glu(*given, out=out)))                     # type: ignore[misc]
        assert count <= PLAN[library] + 12, count
    launched = len(launches.seen)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"shares? memory|overlaps"):
            gk.glu(x, w, v, out=part_of(v, M, N))
    assert len(launches.seen) == launched


@LIBRARIES
@pytest.mark.parametrize("spec", ["mk,kn->mn", "mk,kn->nm", "km,nk->mn", "bmk,bkn->bmn", "mak,kan->mn", "mk,bkn->bnm", "mk,mk->m"])
def test_a_known_contraction_launches_what_the_first_did(library: str, make: Any, launches: Launches, spec: str) -> None:
    """`gk.einsum` is known by its arrays alone, whichever of them comes first as a matrix."""
    extents = dict(m=M, n=N, k=K, a=2, b=3)
    shapes = [tuple(extents[x] for x in term) for term in spec.replace("->", ",").split(",")]
    sets = [tuple(make(*shape) for shape in shapes) for _ in range(3)]
    seen: dict[tuple[int, bool], Any] = {}
    for n in (0, 1, 2):
        x, y, out = sets[n]
        for how in ({"out": out}, {}):
            forget()
            gk.einsum(spec, x, y, **how)
            seen[n, bool(how)] = launches.seen[-1]
    forget()
    for n in (0, 0, 1, 2, 0, 2, 1, 1):
        x, y, out = sets[n]
        for how in ({"out": out}, {}):
            found = gk.einsum(spec, x, y, **how)
            assert launches.seen[-1] == seen[n, bool(how)] and tuple(found.shape) == shapes[2]
            assert found is out or not how
    count = len(functions_run(lambda: gk.einsum(spec, *sets[0][:2], out=sets[0][2])))
    assert count <= PLAN[library] + 12, count
    launched = len(launches.seen)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"shares? memory|overlaps"):
            gk.einsum(spec, x, y, out=part_of(y, *shapes[2]))
    assert len(launches.seen) == launched


def strided_row(x: Any) -> Any:
    """The beginning of an array's memory, as a bias."""
    return part_of(x, N)


def part_of(x: Any, *shape: int) -> Any:
    """The first elements of an array along its last dimensions."""
    info = describe(x)
    strides = tuple(stride * info.dtype.itemsize for stride in info.strides[-len(shape):])

    class Part:
        __cuda_array_interface__ = {"version": 3, "shape": shape, "strides": strides, "typestr": info.dtype.str,
                                    "data": (info.pointer, False)}

    return Part()


def test_threads_that_share_a_plan_do_not_mix_their_arrays(launches: Launches) -> None:
    launches.before = lambda: time.sleep(1e-4)
    with stand_ins.library("cupy") as make:
        sets = [operands(make) for _ in range(6)]
        run, start = gk.plan(*sets[0][:2]), threading.Barrier(len(sets))
        launches.formats = run._compiled.launchable.formats

        def work(n: int) -> None:
            start.wait()
            for turn in range(40):
                a, b, out = sets[(n + turn // 3) % len(sets)]
                run(a, b, out=out, stream=n)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(len(sets))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for n in range(len(sets)):
            mine = [addresses(run, values) for stream, values in launches.seen if stream == n]
            assert mine == [expected(*sets[(n + turn // 3) % len(sets)]) for turn in range(40)]


class OnStream:
    """An array of no library, which asks to be ordered after a stream."""

    def __init__(self, like: Any, stream: int | None):
        info = describe(like)
        self.__cuda_array_interface__ = {"version": 3, "shape": info.shape, "strides": None, "stream": stream,
                                         "typestr": info.dtype.str, "data": (info.pointer, False)}


def test_an_arrays_own_stream_is_that_of_the_call(launches: Launches) -> None:
    """Not that of the array which the plan was made with."""
    with stand_ins.library("cupy") as make:
        a, b, out = operands(make)
        run = gk.plan(OnStream(a, 5), OnStream(b, 5))
        for stream in (5, 7, None, 8):
            given = OnStream(a, stream), OnStream(b, stream)
            run(*given), gk.matmul(*given), gk.matmul(*given, out=OnStream(out, stream))
            assert [seen for seen, _ in launches.seen[-3:]] == [stream or 0] * 3


@LIBRARIES
@pytest.mark.usefixtures("quick_collections")
def test_no_array_is_kept_alive(library: str, make: Any) -> None:
    def alive() -> list[Any]:
        a, b, out = operands(make)
        run = gk.plan(a, b)
        results = [run(a, b, out=out), run(a, b), gk.matmul(a, b), gk.matmul(a, b), gk.matmul(a, b, out=out)]
        plans.append(run)
        return [weakref.ref(x) for x in (a, b, *results)]

    plans: list[Any] = []
    references = alive()
    gc.collect()
    assert not any(reference() for reference in references)


@LIBRARIES
def test_the_elements_of_an_array_are_never_looked_at(library: str, make: Any, replaced: Seeded) -> None:
    """Not for a message that nobody reads either: an array's text is copied from the device, and waits for it."""
    a, b, out = operands(make)
    bias, table = make(N, dtype="float32"), make(M, N)
    replaced(type(a), "__repr__", lambda self: pytest.fail("elements were looked at"))
    added = gk.epilogues.Bias(bias) | gk.epilogues.ReLU()
    for epilogue in (added, gk.epilogues.Residual(table), gk.epilogues.Store(table) | added):
        gk.matmul(a, b, out=out, epilogue=epilogue)
        assert f"array of shape {(M, N) if epilogue is not added else (N,)}" in repr(gk.plan(a, b, epilogue=epilogue).config)


# -- what is refused, however known the call is ------------------------------------------------------------------------

@LIBRARIES
def test_addresses_that_do_not_fit_are_refused(library: str, make: Any, launches: Launches) -> None:
    a, b, out = operands(make)
    c = make(M, N)
    run, with_c = gk.plan(a, b), gk.plan(a, b, c)

    def moved(like: Any, address: int) -> Any:
        x = make(*like.shape, dtype="float16")
        if library == "cupy":
            x.data.ptr = address
        else:
            x.data_ptr = lambda: address
        return x

    at_a, at_c = describe(a).pointer, describe(c).pointer
    for plan, first, wrong, words in (
        (run, (a, b), (a, b, moved(out, at_a + 1024)), "out overlaps a"),
        (run, (a, b), (a, b, moved(out, at_a)), "out overlaps a"),
        (run, (a, b), (moved(a, at_a + 2), b, out), "not a multiple of 16"),
        (with_c, (a, b, c), (a, b, c, moved(out, at_c + 1024)), "out overlaps c"),
    ):
        *given, bad_out = wrong
        for _ in range(2):
            plan(*first, out=out)
            launched = len(launches.seen)
            with pytest.raises(ValueError, match=words):
                plan(*given, out=bad_out)
            assert len(launches.seen) == launched
    with_c(a, b, c, out=c)                                          # c itself is what out may be
    with pytest.raises(ValueError, match="out overlaps b"):
        gk.matmul(a, b, out=moved(out, describe(b).pointer + 512))


@LIBRARIES
def test_an_array_that_changed_in_place_is_another(library: str, make: Any, launches: Launches) -> None:
    a, b, out = operands(make)
    run = gk.plan(a, b)
    run(a, b, out=out), gk.matmul(a, b)
    launched = len(launches.seen)
    a.shape = (M, K // 2)
    with pytest.raises(ValueError, match="a differs from the plan's"):
        run(a, b, out=out)
    with pytest.raises(ValueError, match="b has shape"):
        gk.matmul(a, b)
    assert len(launches.seen) == launched


@pytest.mark.parametrize(("state", "words"), [
    ({"requires_grad": True}, "requires a gradient"),
    ({"is_neg": lambda: True}, "lazily negated"),
    ({"is_conj": lambda: True}, "lazily conjugated"),
    ({"is_cuda": False, "device": ("cpu", 0)}, "move it to the GPU"),
])
def test_a_tensors_state_is_looked_at_in_each_call(state: dict[str, Any], words: str, launches: Launches,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[Any] = []
    monkeypatch.setitem(sys.modules, "gemmkit.torch.autograd", SimpleNamespace(recorded=lambda *call: recorded.append(call)))
    with stand_ins.library("torch") as make:
        a, b, out = operands(make)
        run = gk.plan(a, b)
        run(a, b, out=out), gk.matmul(a, b), gk.matmul(a, b)
        launched = len(launches.seen)
        vars(b).update(state)
        calls: list[Callable[[], Any]] = [lambda: gk.matmul(a, b), lambda: gk.matmul(a, b, out=out)]
        if "is_conj" not in state:                                  # real numbers: a plan need not ask
            calls.append(lambda: run(a, b, out=out))
        if "requires_grad" in state:                                # autograd's part begins
            calls.pop(0)(), calls.pop(0)()
        for call in calls:
            with pytest.raises(ValueError, match=words):
                call()
        assert len(launches.seen) == launched
        assert [call[4] for call in recorded] == ([None, out] if "requires_grad" in state else [])


@LIBRARIES
def test_device_arrays_are_not_for_the_emulator(library: str, make: Any) -> None:
    a, b, _ = operands(make)
    gk.matmul(a, b), gk.matmul(a, b)
    with gk.emulate(), pytest.raises(TypeError, match="the emulator works on NumPy arrays"):
        gk.matmul(a, b)


def test_arrays_of_one_alignment_share_a_plan(launches: Launches) -> None:
    """Whatever their addresses are beyond that."""
    from gemmkit.plans.plan import _plans

    with stand_ins.library("cupy") as make:
        a, b, _ = operands(make)
        for offset in (0, 16, 32, 4, 12):
            x = make(M, K)
            x.data.ptr += offset
            for _ in range(2):
                gk.matmul(x, b)
        assert len({made for made, *_ in _plans.values()}) == 2


def test_code_that_changes_during_the_first_compilation(launches: Launches, replaced: Seeded) -> None:
    """The call is made with the values of the code that was compiled."""
    from gemmkit.runtime.compile import CodeChanged
    from gemmkit.runtime.launch import Launchable

    bind, failures = Launchable.bind, [CodeChanged(Fact("item", {}, "", None))]

    def once(self: Any) -> Any:
        if failures:
            raise failures.pop()
        return bind(self)

    replaced(Launchable, "bind", once)
    with stand_ins.library("cupy") as make:
        a, b, out = operands(make)
        for call in (lambda: gk.matmul(a, b), lambda: gk.matmul(a, b, out=out)):
            forget()
            failures[:] = [CodeChanged(Fact("item", {}, "", None))]
            call()
            assert not failures
    assert len(launches.seen) == 2


FACTOR = 2.0


def test_a_group_is_bound_anew_when_code_changes(launches: Launches, replaced: Seeded, rebound: Set) -> None:
    """During its first compilation, and between calls of one configuration or of one plan."""
    from gemmkit.runtime.compile import CodeChanged
    from gemmkit.runtime.launch import Launchable

    bind, failures, bound = Launchable.bind, [CodeChanged(Fact("item", {}, "", None))], []

    def seen(self: Any) -> Any:
        if failures:
            raise failures.pop()
        bound.append(self.arguments[0].fingerprint)
        return bind(self)

    replaced(Launchable, "bind", seen)
    replaced("gemmkit.runtime.launch.table", lambda ordinal, stream, key, data: 0x7000)
    with stand_ins.library("cupy") as make:
        a, b, out = operands(make)
        conf = gk.functions.plan_grouped([a], [b], epilogue=gk.epilogues.Elementwise(lambda x: x * FACTOR)).config
        run = gk.functions.plan_grouped([a], [b], conf=conf)
        gk.grouped([a], [b], conf=conf)
        assert not failures and len(set(bound)) == 1
        for factor in (3.0, 4.0):
            rebound(FACTOR=factor)
            count = len(bound)
            for call in (run, partial(gk.grouped, conf=conf)):
                for _ in range(2):
                    call([a], [b], out=[out])
            assert len(bound) == count + 2 and len(set(bound)) == factor - 1


# -- new arrays --------------------------------------------------------------------------------------------------------

@LIBRARIES
@pytest.mark.parametrize("devices", [1, 2])
def test_new_arrays_are_of_the_callers_library_and_kind(library: str, devices: int, make: Any, gpus: Set) -> None:
    from gemmkit.runtime.arrays import allocator

    gpus(count=devices)
    like, wanted = make(4, 4), make(M, N, dtype="float32")
    make_one, address_of = allocator(describe(like), (M, N), np.float32)
    made = make_one()
    pointer = address_of(made)
    assert type(made) is type(wanted) and describe(made)[1:] == describe(wanted)[1:] and pointer == describe(made).pointer


def test_pytorchs_short_way_to_a_new_tensor_is_taken_on_one_device(launches: Launches, gpus: Set) -> None:
    from types import SimpleNamespace

    from gemmkit.runtime.arrays import allocator

    asked = []

    def short(*arguments: Any) -> Any:
        asked.append(arguments)
        return stand_ins.TorchTensor(arguments[0], arguments[2])

    with stand_ins.library("torch") as make:
        like, torch = describe(make(4, 4)), sys.modules["torch"]
        torch._C._dynamo = SimpleNamespace(guards=SimpleNamespace(_empty_strided_cuda=short))    # type: ignore[attr-defined]
        allocator(like, (M, 0), np.float16)[0]()
        gpus(count=2)
        allocator(like, (M, N), np.float16)[0]()
        with pytest.raises(TypeError, match="PyTorch has no dtype"):
            allocator(like, (M, N), np.complex64)[0]()
    assert asked == [((M, 0), (1, 1), "torch.float16")]


# -- new shapes of known products -----------------------------------------------------------------------------------------

def new_shape(call: Callable[[int], object], sizes: tuple[int, ...] = (512, 520, 528, 568)) -> list[str]:
    """The functions that the last of these sizes runs."""
    for size in sizes[:-1]:
        call(size)
    return functions_run(lambda: call(sizes[-1]))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("library", ["cupy"])
def test_a_new_shape_is_decided_once(make: Callable[..., Any], dtype: str) -> None:
    """Of a product that is known but for its sizes: the kernel is specialised once, for the arrays, by a configuration that
    is neither made nor validated nor asked for its shared memory again. (Before, four specialisations, three validations
    and 11,300 functions of f16.)"""
    ran = new_shape(lambda n: gk.plan(make(n, n, dtype=dtype), make(n, n, dtype=dtype)))
    assert ran.count("transforms_of") == 2                        # of A and B, by `Config.spec`
    assert not {"_validate_dtypes", "check_device", "_fit"} & set(ran)
    assert sum(not name.startswith("<") for name in ran) <= {"float16": 1300, "float32": 2100}[dtype]


@pytest.mark.parametrize("library", ["cupy"])
def test_a_new_shape_with_components_is_validated_once(make: Callable[..., Any]) -> None:
    """With a function of the user's: specialised for the shared memory that any problem needs, and for the arrays."""
    ran = new_shape(lambda n: gk.matmul(make(n, n), make(n, n), epilogue=gk.epilogues.Elementwise(lambda x: x * 2)))
    assert ran.count("_validate_dtypes") == 1 and ran.count("transforms_of") == 2 * 2
    assert sum(not name.startswith("<") for name in ran) <= 4000
