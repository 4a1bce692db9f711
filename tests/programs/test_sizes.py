"""Sizes at run time: a plan of other sizes is what the passes would make of them anew, without these passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import programs as gp
from gemmkit.programs import calls
from gemmkit.programs.plan import ProgramPlan, planned
from gemmkit.runtime.device import H100, assumed
from tests.support import chains, row_programs
from tests.support import programs as listing
from tests.support.checks import named_functions_run
from tests.support.patches import Seeded, Set

F16 = np.dtype(np.float16)
Case = tuple[Any, list[np.ndarray], gk.Mapping, dict[str, Any]]


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    """Host arrays are planned for a GPU that need not be here, and not run."""
    calls.forget_all()
    with assumed(H100):
        yield


@pytest.fixture
def derivations(replaced: Seeded) -> list[str]:
    """The names of programs that the passes read, one for each time that they do."""
    seen: list[str] = []

    def counted(program: Any, *given: Any) -> ProgramPlan:
        seen.append(program.function.__name__)
        return planned(program, *given)

    replaced(calls, "planned", counted)
    return seen


def resized(program: Any, arrays: list[np.ndarray], more: dict[str, Any], rng: np.random.Generator) -> list[np.ndarray]:
    """Arrays like these, whose axes have other lengths: those that the program makes one have one, and those that are values'
    own keep theirs."""
    arguments = program.bound(tuple(arrays), more)
    axes = program.traced(arguments).axes
    names = [name for name in arguments if any(arguments[name] is x for x in arrays)]
    lengths = {at: int(rng.choice([1, 7, 8, 64, 65, 128, 200, 333, 1000, 3000, 5000])) for name in names
               for at in ((name, axis) for axis in range(arguments[name].ndim))}
    for at in lengths:
        if at in axes.whole:
            lengths[at] = arguments[at[0]].shape[at[1]]
        elif at[1] == arguments[at[0]].ndim - 1 and rng.integers(2):
            lengths[at] = 8 * (1 + lengths[at] // 8)
        elif at[1] == 0 and arguments[at[0]].ndim == 3:
            lengths[at] = int(rng.integers(1, 9))
    equal = [(one, other) for one, other, by, more in axes.related if (by, more) == (1, 0)]
    for _ in equal:                                    # so often a length is handed on at most
        for one, other in equal:
            lengths[one] = lengths[other] = lengths[one] if other not in axes.whole else lengths[other]
    made = []
    for name in names:
        shape = [lengths[name, axis] for axis in range(arguments[name].ndim)]
        whole = np.zeros((*shape[:-1], shape[-1] + -shape[-1] % 8), arguments[name].dtype)
        made.append(whole[..., :shape[-1]])
    return made


def same(one: ProgramPlan, other: ProgramPlan) -> None:
    """Whether they launch the same, in all that a launch and its checks look at."""
    assert one.text == other.text and one.mapping == other.mapping and one.printed == other.printed
    assert one.extents == other.extents and one.call == other.call and one.spare == other.spare
    assert [one.name, one.device, list(one.infos)] == [other.name, other.device, list(other.infos)]
    assert [info[1:] for info in one.infos.values()] == [info[1:] for info in other.infos.values()]
    assert one.sizes == other.sizes and one.blocks == other.blocks
    assert one.launchable.values == other.launchable.values and one.launchable.code_key == other.launchable.code_key
    assert (one.merge is None) == (other.merge is None)
    if one.merge is not None and other.merge is not None:
        same(one.merge, other.merge)


def rows_case(seed: int) -> Case:
    """A function of rows (drawn ones hold lists, which can change in place, so that all of them are derived anew)."""
    rng = np.random.default_rng(seed)
    count, rows, columns = (int(x) for x in (rng.integers(1, 5), rng.integers(1, 90), rng.choice(row_programs.COLUMNS)))

    def array(*shape: int) -> np.ndarray:
        dtypes = np.float16, row_programs.BF16, np.float32
        return rng.uniform(0.25, 1.5, shape).astype(dtypes[rng.integers(3)])

    def row() -> np.ndarray:
        return array(rows, columns)

    name = ("softmax", "layernorm", "added_rmsnorm", "causal_softmax", "stacked", "quantised", "corners")[seed % 7]
    arrays, more = {
        "softmax": ([row(), row()], dict(scale=0.5)), "layernorm": ([row(), array(columns), array(columns), row()], dict(eps=1e-5)),
        "added_rmsnorm": ([row(), row(), array(columns), row(), row(), array(rows)], dict(eps=1e-5)),
        "causal_softmax": ([row(), row(), array(rows)], {}), "quantised": ([row(), row(), array(rows)], {}),
        "stacked": ([array(count, rows, columns), array(count, columns), array(count), array(count, rows),
                     array(count, rows, columns), array(count, rows)], {}),
        "corners": ([row(), array(columns), row(), row(), array(rows)], dict(alpha=0.5)),
    }[name]
    return getattr(row_programs, name), arrays, gk.Mapping(), dict(more)


DRAWN: dict[str, Callable[[int], Case]] = {
    "tiles": listing.drawn_case, "chains": chains.drawn_case, "lengths": chains.drawn_lengths, "shares": chains.drawn_shares,
    "lazy": chains.drawn_lazy, "clusters": chains.drawn_clusters,
    "rows": lambda seed: rows_case(seed),
}


@pytest.mark.kin(1)
@pytest.mark.sample(60)
@pytest.mark.parametrize("draw", DRAWN)
@pytest.mark.parametrize("seed", range(40))
def test_drawn_sizes(draw: str, seed: int) -> None:
    """Of a program and mapping several sizes in a row, each by its derivation and anew: plans and errors are equal."""
    program, arrays, mapping, more = DRAWN[draw](seed)
    mapping = (mapping, listing.multistage(mapping), gk.Mapping())[seed % 3] if draw != "rows" else mapping
    rng = np.random.default_rng(seed)
    for _ in range(6):
        arguments = program.bound(tuple(arrays), more)
        try:
            anew: Any = planned(program, arguments, mapping, None)
        except (ValueError, TypeError) as error:       # ConfigError is a ValueError
            with pytest.raises(type(error)) as found:
                calls.derive(program, arguments, mapping)
            assert str(found.value) == str(error)
        else:
            same(calls.derive(program, arguments, mapping)[0], anew)
        arrays = resized(program, arrays, more, rng)


def heads(count: int, rows: int, keys: int) -> list[np.ndarray]:
    return [np.zeros((count, extent, 64), F16) for extent in (rows, keys, keys, rows)]


def plan(program: Any, *arrays: Any, **more: Any) -> Any:
    return calls.plan_of_call(program, program.bound(arrays, more), None)


OF_HEADS = [(1, 20, 40), (2, 33, 17), (1, 50, 100)]
COMPUTED: dict[str, tuple[Any, list[list[tuple[int, ...]]], gk.Mapping, dict[str, Any]]] = {
    "tiles": (listing.gemm, [[(m, k), (k, n), (m, n)] for m, k, n in ((64, 64, 64), (65, 72, 40), (1, 8, 136))],
              gk.Mapping({"n": 64}, warpgroups=1), {}),
    "chains": (listing.attention, [[(h, m, 64), (h, n, 64), (h, n, 64), (h, m, 64)] for h, m, n in OF_HEADS],
               gk.Mapping({"n": 16}, warpgroups=1, splits=1), dict(scale=0.125, visible=chains.causal)),
    "shares": (listing.attention, [[(h, m, 64), (h, n, 64), (h, n, 64), (h, m, 64)] for h, m, n in OF_HEADS],
               gk.Mapping({"n": 16}, warpgroups=1, splits=2), dict(scale=0.125)),
    "multistage": (listing.attention, [[(h, m, 64), (h, n, 64), (h, n, 64), (h, m, 64)] for h, m, n in OF_HEADS],
                   gk.Mapping({"n": 16}, kernel="multistage", splits=1), dict(scale=0.125)),
    "rows": (row_programs.stacked, [[(h, m, 24), (h, 24), (h,), (h, m), (h, m, 24), (h, m)] for h, m in ((2, 8), (4, 24), (2, 16))],
             gk.Mapping(), {}),
}


@pytest.mark.kin(1)
@pytest.mark.parametrize("name", COMPUTED)
def test_a_plan_of_another_size_computes(name: str, derivations: list[str], rng: np.random.Generator) -> None:
    """What has been resized is run, and compared with the reference: fewer rows, more places, one row alone."""
    program, sizes, mapping, more = COMPUTED[name]
    for shapes in sizes:
        arrays = [(rng.standard_normal(shape) / 4).astype(F16) for shape in shapes]
        arguments = program.bound(tuple(arrays), more)
        plan, _ = calls.derive(program, arguments, mapping)
        for result in plan.results:
            arguments[result][...] = np.nan
        wanted = program.reference(*arrays, **more)
        with gk.emulate():
            plan.run(arguments)
        chains.check_close([arguments[name] for name in arguments if name in plan.results], wanted, lambda got: 2e-3)
    assert len(derivations) == 1


def test_a_new_length_derives_nothing(derivations: list[str]) -> None:
    """Sizes that decide the same mapping share a text, and so do numbers of one sign."""
    first = plan(listing.attention, *heads(16, 4000, 4000), scale=0.125, visible=chains.causal)
    assert derivations == ["attention"]
    arrays = heads(16, 4100, 4321)
    second = plan(listing.attention, *arrays, scale=0.25, visible=chains.causal)
    assert derivations == ["attention"] and second.text is first.text and second.call.numbers == {"scale": 0.25}
    assert second.extents == {"h": 16, "m": 4100, "n": 4321, "section": second.extents["section"]}
    assert named_functions_run(lambda: plan(listing.attention, *heads(16, 4101, 4000), scale=0.25, visible=chains.causal)) <= 700


@pytest.mark.kin(1)
def test_500_sizes_of_attention_have_few_texts(derivations: list[str]) -> None:
    rng = np.random.default_rng(5)
    texts = {plan(listing.attention, *heads(int(rng.integers(1, 65)), int(2 ** rng.uniform(0, 13)), int(2 ** rng.uniform(0, 14))),
                  scale=0.125).text for _ in range(500)}
    assert len(texts) <= 12 and len(derivations) <= 12


@gk.program
def by_its_shape(x: Any, y: Any) -> None:
    """Its own code reads a length, which the text then has."""
    for m in gp.parallel(x.rows):
        y[m] = x[m] / float(x.shape[0])


@gk.program
def by_its_extent(x: Any, y: Any) -> None:
    for m in gp.parallel(x.rows):
        y[m] = x[m] * (2.0 if x.rows.size > 64 else 3.0)


@pytest.mark.parametrize("program", [by_its_shape, by_its_extent], ids=str)
def test_what_a_program_makes_of_a_shape_is_made_for_that_shape(program: Any, derivations: list[str]) -> None:
    texts = set()
    for rows in (32, 128, 32):
        x, y = np.ones((rows, 24), np.float32), np.full((rows, 24), np.nan, np.float32)
        made = plan(program, x, y)
        texts.add(made.text)
        with gk.emulate():
            made.run(dict(x=x, y=y))
        assert np.allclose(y, program.reference(x, y))
    assert len(texts) == 2 and len(derivations) == 2           # the third is a call that is known


def test_axes_that_must_agree_are_refused_by_their_line() -> None:
    a, b, d = (np.zeros((64, 64), F16) for _ in range(3))
    plan(listing.gemm, a, b, d)
    with pytest.raises(ValueError, match=r"k is a block of axis 1 of a \(72\), used here for axis 0 of b \(64 elements\)"):
        plan(listing.gemm, np.zeros((64, 72), F16), b, d)


def test_a_length_of_zero_and_one_too_long(derivations: list[str]) -> None:
    """What a launch may not have is refused for a new size too; a tile that is empty launches nothing."""
    plan(listing.gemm, *(np.zeros((64, 64), F16) for _ in range(3)))
    empty = plan(listing.gemm, np.zeros((0, 64), F16), np.zeros((64, 64), F16), np.zeros((0, 64), F16))
    assert empty.is_empty
    with pytest.raises(ValueError, match="a kernel sums over at least one element"):
        plan(listing.gemm, np.zeros((64, 0), F16), np.zeros((0, 64), F16), np.zeros((64, 64), F16))
    thin = np.zeros((2, 8), F16)
    plan(row_programs.softmax, thin, thin.copy())
    long, other = (np.lib.stride_tricks.as_strided(x, (2**31, 8), (0, 2)) for x in (thin, thin.copy()))
    with pytest.raises(ValueError, match="less than 2\\*\\*31"):
        plan(row_programs.softmax, long, other)


SLOPE = 2.0


@gk.program
def sloped(a: Any, b: Any, d: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
        d[m, n] = SLOPE * acc


def test_code_that_changes_is_read_anew_for_a_new_size(rebound: Set, derivations: list[str]) -> None:
    def matrices(m: int) -> list[np.ndarray]:
        return [np.zeros(shape, F16) for shape in ((m, 64), (64, 64), (m, 64))]

    first = plan(sloped, *matrices(64))
    assert plan(sloped, *matrices(128)).text == first.text and len(derivations) == 1
    rebound(SLOPE=3.0)
    assert plan(sloped, *matrices(256)).text != first.text and len(derivations) == 2
    assert "3.0" in plan(sloped, *matrices(512)).text and len(derivations) == 2


def test_lengths_that_differ_in_their_remainder_are_other_kernels() -> None:
    """TMA, pairs of elements and copies of 16 bytes: what a row's end allows is part of a class."""
    texts = {}
    for columns in (64, 128, 66, 72, 65):
        whole = [np.zeros((64, columns + -columns % 8), F16)[:, :columns] for _ in range(2)]
        texts[columns] = plan(listing.gemm, np.zeros((64, 64), F16), *whole).text
    assert texts[64] == texts[128] or "128" in texts[128]
    assert "DirectOut" in texts[65] and "TmaOut" in texts[64]
    assert len({texts[66], texts[65], texts[72]}) == 3


def test_places_that_float32_cannot_count_convert_another_way() -> None:
    """Where a text depends on how long an axis is, beside the mapping."""
    def product(m: Any, n: Any) -> Any:
        return m * n < 40_000_000

    short, long = (plan(listing.attention, *heads(1, rows, rows), scale=0.125, visible=product) for rows in (256, 8192))
    anew = planned(listing.attention, listing.attention.bound(tuple(heads(1, 8192, 8192)), dict(scale=0.125, visible=product)),
                   gk.Mapping(), None)
    assert long.text == anew.text and short.extents["m"] == 256
