"""`gemmkit.tune` on a machine without a GPU: what it tries, what it makes of what it measures, and what it keeps."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues, operators
from gemmkit.kernels.collectives import scheduler
from gemmkit.plans.ahead import Made
from gemmkit.plans.plan import Plan
from gemmkit.plans.problem import resolve
from gemmkit.runtime import cache
from gemmkit.runtime.arrays import describe_all
from gemmkit.runtime.cache import Entry
from gemmkit.runtime.device import A100, H100
from gemmkit.tuner import tuner as module
from gemmkit.tuner.measure import Failed, difference, elements, job_of, memory_of, tolerance
from gemmkit.tuner.tuner import EFFORTS, Effort, subject_of, tune
from gemmkit.tuning import store
from gemmkit.tuning.candidates import Candidate, candidates
from tests.support.on_device import OnDevice
from tests.support.patches import Seeded, Set

F16, F32 = np.float16, np.float32
USAGE = {"registers": 32, "spill_stores": 0, "spill_loads": 0, "stack_bytes": 0}


@pytest.fixture
def folder(no_gpu: None, tmp_path: Path, replaced: Seeded, environment: Set) -> Iterator[Path]:
    """A cache, a store and an H100 of this test's own."""
    environment(GEMMKIT_CACHE_DIR=tmp_path, GEMMKIT_CACHE=None, GEMMKIT_TUNED=None)
    replaced(store, "_warned", set())
    replaced(store, "_stores", {})
    cache.default_cache.cache_clear()
    yield tmp_path
    cache.default_cache.cache_clear()


class Measured:
    """Stands for the process that measures: the n-th candidate (from 1 on) has the n-th of these times, beside the default's
    100 us."""

    def __init__(self, times: Callable[[int], Any]):
        self.kept, self.timed, self.order = dict[int, Any](), list[int](), list[int]()
        self.times = lambda number: times(self.order.index(number))

    def __call__(self, memory: Any, contents: Any, varied: Any, ordinal: int) -> Measured:
        self.memory, self.varied, self.ordinal = memory, varied, ordinal
        return self

    def __enter__(self) -> Measured:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True

    def keep(self, number: int, job: Any) -> None:
        self.kept[number] = job
        if number not in self.order:
            self.order.append(number)

    def forget(self, number: int) -> None:
        del self.kept[number]

    def result(self, number: int, seconds: float) -> list[bytes]:
        time = 100.0 if number == 0 else self.times(number)
        if isinstance(time, Exception | KeyboardInterrupt):
            raise time
        fill = 3.0 if time == "wrong" else 2.0
        return [np.full(buffer.nbytes // 2, fill, F16).tobytes() for buffer in self.memory.buffers if buffer.is_written]

    def pairs(self, one: int, other: int, count: int, target: float, seconds: float) -> list[tuple[float, float]]:
        assert one == 0 and {one, other} <= set(self.kept)
        self.timed.append(self.order.index(other))
        return [(100.0 + n, self.times(other) * (100.0 + n) / 100) for n in range(count)]


@pytest.fixture
def measured(folder: Path, replaced: Seeded) -> Callable[[Callable[[int], Any]], Measured]:
    """``measured(times)``: what `tune` measures. Nothing is compiled."""
    def install(times: Callable[[int], Any]) -> Measured:
        made = Measured(times)
        real = module._Search.__init__
        replaced(module._Search, "__init__", lambda self, *given: real(self, *given, made))
        replaced(module, "compiled", lambda kernels, jobs: (Made(kernel, USAGE) for kernel in kernels))
        replaced("gemmkit.runtime.launch.Launchable.entry", lambda self: Entry(b"\x7fELF", {"usage": USAGE}, False))
        replaced(module, "contents_of", lambda memory, ordinal: [b"" for _ in memory.buffers])
        return made

    return install


def arrays(m: int = 512, n: int = 512, k: int = 512, dtype: Any = F16) -> tuple[OnDevice, OnDevice, OnDevice]:
    return OnDevice(np.zeros((m, k), dtype)), OnDevice(np.zeros((k, n), dtype)), OnDevice(np.zeros((m, n), dtype))


# -- the search --------------------------------------------------------------------------------------------------------

def test_the_fastest_is_kept_and_taken_next_time(folder: Path, measured: Any) -> None:
    process = measured(lambda number: 50.0 if number == 5 else 80.0 + number)
    a, b, out = arrays()
    found = tune(a, b, out=out)
    assert found.best.ratio == pytest.approx(2.0) and found.rows[0] is found.best and found.kept and process.is_closed
    assert found.best.candidate is not None and found.config == found.best.config
    timed = [row.ratio for row in found.rows if row.ratio is not None]
    assert timed == sorted(timed, reverse=True) and found.default.ratio == 1.0 and found.default in found.rows
    assert len(timed) == EFFORTS["quick"].candidates + 1
    assert all(str(row.error).startswith("not legal: ") for row in found.rows[len(timed):])
    assert process.timed.count(5) == 2                         # a finalist is timed again
    taken = Plan(a, b, None, out, None, {}).config
    assert taken.mapping == found.config.mapping != found.default.config.mapping           # type: ignore[union-attr]
    text = str(found)
    assert text.splitlines()[0] == f"512 x 512 x 512, float16, on {H100.name}" and "* " in text and "us  2.000  " in text
    names: dict[str, Any] = {}
    for each in (gk, gk.layouts, operators, gk.transforms, epilogues, scheduler):
        names |= {name: getattr(each, name) for name in getattr(each, "__all__", vars(each))}
    assert eval(repr(found.config), names).mapping == found.config.mapping


def test_a_mapping_that_is_hardly_faster_is_not_kept(folder: Path, measured: Any) -> None:
    measured(lambda number: 99.5)
    a, b, out = arrays()
    found = tune(a, b, out=out)
    assert found.best is found.default and found.kept
    (file,) = (folder / "tuned").glob("*.json")
    (entry,) = json.loads(file.read_text())["entries"].values()
    assert entry["mapping"] is None and entry["name"] == "default"
    assert Plan(a, b, None, out, None, {}).config == found.config


def test_candidates_that_fail_are_told_and_nothing_is_lost(folder: Path, measured: Any) -> None:
    outcomes = {1: Failed("CUDA_ERROR_ILLEGAL_ADDRESS"), 2: "wrong", 3: Failed("it did not end within 20 s")}
    measured(lambda number: outcomes.get(number, 90.0))
    a, b, out = arrays()
    found = tune(a, b, out=out)
    errors = {row.error for row in found.rows if row.error is not None}
    assert {"failed: CUDA_ERROR_ILLEGAL_ADDRESS", "failed: it did not end within 20 s"} <= errors
    assert any(error.startswith("wrong: out: elements differ by up to 1, the largest is 2") for error in errors)
    assert found.best.ratio == pytest.approx(100 / 90) and found.kept and "failed: it did not" in str(found)


def test_an_interruption_keeps_what_was_measured(folder: Path, measured: Any) -> None:
    measured(lambda number: KeyboardInterrupt() if number == 4 else 70.0)
    a, b, out = arrays()
    found = tune(a, b, out=out)
    assert found.kept and found.best.ratio == pytest.approx(100 / 70) and "interrupted" in str(found)
    assert Plan(a, b, None, out, None, {}).config.mapping == found.config.mapping


def test_a_budget_of_nothing(folder: Path, measured: Any) -> None:
    measured(lambda number: 1.0)
    a, b, out = arrays()
    found = tune(a, b, out=out, budget=0)
    assert found.best is found.default and not found.kept and len(found.rows) == 1
    assert found.notes == ("a budget of 0 seconds: nothing was tried",) and not (folder / "tuned").exists()


def test_a_budget_that_ends(folder: Path, measured: Any, replaced: Seeded) -> None:
    """What was not timed by then is listed as such."""
    now = [0.0]

    def time_of(number: int) -> float:
        now[0] += 2.0
        return 80.0

    measured(time_of)
    replaced(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    a, b, out = arrays()
    found = tune(a, b, out=out, budget=9)
    assert found.kept and sum(row.error == "not timed within the budget" for row in found.rows) > 5
    assert found.best.ratio == pytest.approx(1.25)


def test_compiling_takes_half_of_the_budget(folder: Path, measured: Any, replaced: Seeded) -> None:
    now = [0.0]
    measured(lambda number: 80.0)

    def compiled(kernels: Any, jobs: Any) -> Iterator[Made]:
        for n, kernel in enumerate(kernels):
            now[0] += 1.0
            yield Made(kernel, error="ptxas said no") if n == 2 else Made(kernel, USAGE)

    replaced(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    replaced(module, "compiled", compiled)
    found = tune(*arrays()[:2], out=arrays()[2], budget=10)
    errors = [row.error for row in found.rows if row.error]
    assert errors.count("not compiled within the budget") > 5 and "not compiled: ptxas said no" in errors and found.best.ratio


def test_a_default_that_does_not_run(folder: Path, measured: Any, replaced: Seeded) -> None:
    process = measured(lambda number: 80.0)

    def result(number: int, seconds: float) -> list[bytes]:
        raise Failed("CUDA_ERROR_OUT_OF_MEMORY")

    replaced(process, "result", result)
    a, b, out = arrays()
    with pytest.raises(RuntimeError, match="the default mapping does not run: CUDA_ERROR_OUT_OF_MEMORY"):
        tune(a, b, out=out)


@pytest.mark.parametrize(("keywords", "error", "message"), [
    (dict(effort="nope"), ValueError, "effort='nope': one of quick, full"),
    (dict(budget=-1), ValueError, "budget=-1"), (dict(budget=float("nan")), ValueError, "budget=nan"),
    (dict(budget=True), ValueError, "budget=True"), (dict(epilog=1), TypeError, "unknown keywords epilog"),
], ids=str)
def test_bad_calls(folder: Path, keywords: dict[str, Any], error: type, message: str) -> None:
    a, b, out = arrays(64, 64, 64)
    with pytest.raises(error, match=message):
        tune(a, b, out=out, **keywords)


def test_host_arrays_and_the_emulator(folder: Path) -> None:
    x = np.zeros((16, 16), F16)
    with pytest.raises(TypeError, match=r"a is a host array"):
        tune(x, x)
    with gk.emulate(), pytest.raises(TypeError, match="timed on a GPU"):
        tune(x, x)


# -- launches ----------------------------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Sums(epilogues.Epilogue):
    """Adds a column's bias, and notes the element."""

    bias: gk.Array
    seen: gk.Array
    outputs = ("seen",)

    def __call__(self, x: Any, m: int, n: int) -> Any:
        self.seen[m, n] = x
        return x + self.bias[n]


@pytest.mark.parametrize("case", ["plain", "c", "epilogue", "reversed", "stack", "few rows", "shares", "captured"])
def test_a_job_is_the_launch(folder: Path, case: str) -> None:
    """Its values with the addresses put in are those of the plan."""
    m, n, k = (8, 2048, 2048) if case == "few rows" else (64, 64, 65536) if case == "shares" else (96, 80, 64)
    a, b, out = arrays(m, n, k)
    c: Any = None
    keywords: dict[str, Any] = {}
    if case == "c":
        c = OnDevice(np.zeros((m, n), F16))
    if case == "epilogue":
        keywords["epilogue"] = Sums(OnDevice(np.zeros(n, F32)), OnDevice(np.zeros((m, n), F32)))
    if case == "captured":
        scale = OnDevice(np.ones((n,), F32))
        keywords["epilogue"] = epilogues.Elementwise(lambda x, i, j: x * scale[j])
    if case == "reversed":
        a, b = OnDevice(np.zeros((m, 2 * k), F32)[::-1, ::-2]), OnDevice(np.zeros((k, n), F32))
        out = OnDevice(np.zeros((m, n), F32))
    if case == "stack":
        a, b = OnDevice(np.zeros((3, m, k), F16)), OnDevice(np.zeros((k, n), F16))
        out = OnDevice(np.zeros((3, m, n), F16))
    compiled = Plan(a, b, c, out, None, keywords)._compiled
    memory = memory_of(compiled)
    job = job_of(compiled, memory, b"cubin")
    values, kept = list(job.values), compiled.launchable.values
    for slot, pointer in job.pointers:
        values[slot] = memory.buffers[pointer.buffer].start + pointer.offset
    for slot, pointer, _ in job.maps:
        assert kept[slot] == bytes(128) and values[slot] == bytes(128)
        assert memory.buffers[pointer.buffer].start + pointer.offset in {
            x.__cuda_array_interface__["data"][0] for x in (a, b, c, out) if x is not None}
    assert values == kept
    assert {slot for slot, _ in job.pointers} >= {put.slot for put in compiled.puts if put.encoder is None}
    written = [buffer for buffer in memory.buffers if buffer.is_written]
    assert len(written) == (2 if case == "epilogue" else 1) and len(job.spaces) == len(compiled.spaces)
    extra = {"c": 1, "epilogue": 2, "captured": 1}.get(case, 0)
    assert len(memory.buffers) == 3 + extra and len(job.varied) == 3 + (case == "c")
    assert (job.maps != ()) == (compiled.problem.config.kernel == "warp_specialised")


# -- results -----------------------------------------------------------------------------------------------------------

def test_differences() -> None:
    one = np.array([[1.0, -2.0], [np.nan, np.inf]], F32)
    assert difference(one, one.copy(), 0.0) is None
    near = one * np.float32(1 + 1e-6)
    assert difference(one, near, 1e-5) is None and "differ by up to" in str(difference(one, near, 1e-8))
    assert difference(one, np.nan_to_num(one, nan=0.0, posinf=np.inf), 1.0) == "1 of 4 elements differ in what is NaN or infinite"
    assert "differ by up to inf" in str(difference(one, np.full_like(one, np.nan), 1.0)) or difference(one, one * np.nan, 1.0)
    whole = np.arange(4)
    assert difference(whole, whole, 0.0) is None and difference(whole, whole[::-1], 0.5) == "4 of 4 elements differ"
    z = np.array([1 + 2j, 3 - 4j], np.complex64)
    assert difference(z, z, 0.0) is None and difference(z, z.conj(), 0.1) is not None
    dual = np.zeros(3, [("value", F32), ("slope", F32)])
    other = dual.copy()
    other["slope"] = 1
    assert difference(dual, dual, 0.0) is None and str(difference(dual, other, 0.0)).startswith("slope: ")
    half = np.ones(3, ml_dtypes.bfloat16)
    assert difference(half, half, 0.0) is None and difference(half, half * ml_dtypes.bfloat16(2), 0.1) is not None


def test_tolerances_grow_with_k_and_shrink_with_the_type() -> None:
    f16, f32, f64, bf16 = map(np.dtype, (F16, F32, np.float64, ml_dtypes.bfloat16))
    assert tolerance(bf16, f32, 64) > tolerance(f16, f32, 64) > tolerance(f32, f32, 64) > tolerance(f64, f64, 64) > 0
    assert tolerance(f32, f32, 4096) > 7 * tolerance(f32, f32, 64) / 2 and tolerance(np.dtype(np.int32), np.dtype(np.int32), 64) == 0


def test_elements_are_where_their_strides_say() -> None:
    held = np.arange(60, dtype=np.int32).reshape(5, 12)
    view = held[::-2, 1::3]
    from gemmkit.runtime.arrays import byte_range, describe

    info = describe(view)
    first, last = byte_range(info)
    start = held.ctypes.data
    assert np.array_equal(elements(held.tobytes()[first - start:last - start], first, info), view)


# -- candidates and the store ------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("dtype", "sizes", "keywords"), [
    ("float16", (4096, 4096, 4096), {}), ("float32", (4096, 64, 4096), {}), ("float64", (512, 512, 512), {}),
    ("complex64", (512, 512, 512), {}), ("complex128", (256, 256, 256), {}), ("int8", (512, 512, 512), {}),
    ("float16", (64, 64, 65536), {}), ("float32", (512, 512, 512), dict(operator=operators.MIN_PLUS)),
    ("float16", (512, 512, 512), dict(operator=operators.MMAOp())), ("float16", (16, 4096, 4096), {}),
], ids=str)
@pytest.mark.sample(3)
@pytest.mark.parametrize("device", [H100, A100], ids=lambda device: device.arch_name)
def test_candidates_are_configurations(dtype: str, sizes: tuple[int, int, int], keywords: dict[str, Any], device: Any) -> None:
    """Each is legal or refused with a reason; what is legal has the candidate's fields, and comes back from a file."""
    from gemmkit.runtime.device import assumed

    m, n, k = sizes
    a, b = np.empty((m, k), dtype), np.empty((k, n), dtype)
    with gk.emulate(), assumed(device):
        infos = describe_all(a, b, None, None)
        default = resolve(*infos, None, keywords).config
        listed = candidates(default.global_a_layout, default.global_b_layout, keywords.get("operator"), sizes, device)
        assert len(listed) == len(set(listed)) >= 5
        legal = 0
        for one in listed:
            assert Candidate.of_plain(json.loads(json.dumps(one.plain()))) == one and one.name.startswith(one.kernel)
            try:
                config = resolve(*infos, None, keywords, one).config
            except gk.ConfigError:
                continue
            legal += 1
            assert {name: repr(getattr(config, name)) for name in one.fields()} == {
                name: repr(value) for name, value in one.fields().items()}
        assert legal >= 0.8 * len(listed)


@pytest.mark.parametrize("plain", [None, [], {}, {"kernel": "multistage"}, {"kernel": 3, "block": [1, 2, 3]},
                                   {"kernel": "multistage", "block": [1, 2]}, {"kernel": "multistage", "block": [1, 2, "3"]},
                                   {"kernel": "multistage", "block": [64, 64, 32], "evil": 1}, {"kernel": "multistage", "block": [64, 64, 64], "boxed": "c"},
                                   {"kernel": "multistage", "block": [64, 64, 32], "stages": True},
                                   {"kernel": "multistage", "block": [64, 64, 32], "nanoseconds": 1}], ids=str)
def test_what_is_no_candidate(plain: Any) -> None:
    with pytest.raises(ValueError, match="is not a mapping"):
        Candidate.of_plain(plain)


def kept(folder: Path, mapping: Any, a: Any, b: Any, out: Any, **keywords: Any) -> Path:
    """A store with a mapping for this product."""
    call = Plan(a, b, None, out, None, keywords)._compiled.problem
    assert call.tuning_key is not None
    made = store.store_of(call.device)
    assert made is not None
    made.put(call.tuning_key(), {"mapping": mapping})
    return made.file


ONE = Candidate("multistage", (64, 64, 64), (32, 32), stages=3, blocks_per_sm=2)


def test_what_a_tuned_mapping_is_for(folder: Path) -> None:
    """Other sizes, strides, types, layouts and components are other products; other addresses are not."""
    a, b, out = arrays(256, 256, 256)
    kept(folder, ONE.plain(), a, b, out)

    def kernel(a: Any, b: Any, out: Any, **keywords: Any) -> str:
        return Plan(a, b, None, out, None, keywords).config.kernel

    assert kernel(a, b, out) == kernel(*arrays(256, 256, 256)) == "multistage"
    assert kernel(a, b, out.T.T) == "multistage" and kernel(a.T, b, out) == "warp_specialised"
    assert kernel(*arrays(256, 256, 264)) == kernel(*arrays(256, 256, 256, ml_dtypes.bfloat16)) == "warp_specialised"
    assert kernel(a, b, OnDevice(np.zeros((256, 256), F32))) == "warp_specialised"
    assert kernel(a, b, out, epilogue=epilogues.Elementwise(lambda x: x * 2)) == "warp_specialised"
    with store.unread():
        assert kernel(a, b, out) == "warp_specialised"


def test_components_are_part_of_it(folder: Path) -> None:
    def scaled(by: float) -> Any:
        return epilogues.Elementwise(lambda x: x * by)

    a, b, out = arrays(256, 256, 256)
    kept(folder, ONE.plain(), a, b, out, epilogue=scaled(2.0))
    kernels = [Plan(a, b, None, out, None, dict(epilogue=scaled(by))).config.kernel for by in (2.0, 3.0)]
    assert kernels == ["multistage", "warp_specialised"]


def test_the_store_can_be_left_unread(folder: Path, environment: Set) -> None:
    a, b, out = arrays(256, 256, 256)
    kept(folder, ONE.plain(), a, b, out)
    environment(GEMMKIT_TUNED="0")
    assert Plan(a, b, None, out, None, {}).config.kernel == "warp_specialised"


@pytest.mark.parametrize(("content", "message"), [
    (b"{", "cannot be read"), (b"[]", "it is not a store of this version"), (b'{"format": 99, "entries": {}}', "this version"),
    (b"[" * 10**6, "cannot be read"), (b"\xff\xfe", "cannot be read"), (b'{"format": 1, "entries": {}, "device": {}}', "another GPU"),
], ids=str)
def test_a_store_that_cannot_be_used(folder: Path, content: bytes, message: str) -> None:
    """It is told once, defaults are taken, and the next result that is kept replaces it."""
    a, b, out = arrays(256, 256, 256)
    file = kept(folder, ONE.plain(), a, b, out)
    file.write_bytes(content)
    with pytest.warns(RuntimeWarning, match=message):
        assert Plan(a, b, None, out, None, {}).config.kernel == "warp_specialised"
    kept(folder, ONE.plain(), a, b, out)
    assert Plan(a, b, None, out, None, {}).config.kernel == "multistage"


def test_a_link_is_not_followed(folder: Path) -> None:
    a, b, out = arrays(256, 256, 256)
    file = kept(folder, ONE.plain(), a, b, out)
    file.rename(folder / "elsewhere.json")
    file.symlink_to(folder / "elsewhere.json")
    with pytest.warns(RuntimeWarning, match="cannot be read"):
        assert Plan(a, b, None, out, None, {}).config.kernel == "warp_specialised"


@pytest.mark.parametrize(("mapping", "message"), [
    ({"kernel": "multistage"}, "is not a mapping: kernel and block are needed"),
    (dataclasses.replace(ONE, block=(64, 64, 24)).plain(), "the default is taken instead"),
    (dataclasses.replace(ONE, kernel="fourstage").plain(), "the default is taken instead"),
], ids=str)
def test_an_entry_that_no_kernel_takes(folder: Path, mapping: Any, message: str) -> None:
    a, b, out = arrays(256, 256, 256)
    kept(folder, mapping, a, b, out)
    with pytest.warns(RuntimeWarning, match=message):
        assert Plan(a, b, None, out, None, {}).config.kernel == "warp_specialised"


def test_processes_that_tune_at_once_lose_nothing(folder: Path) -> None:
    import multiprocessing

    made = store.store_of(H100)
    assert made is not None
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(made, n)) for n in range(6)]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    assert sorted(made.entries()) == sorted(f"{n}-{k}" for n in range(6) for k in range(5))
    assert sorted(path.suffix for path in made.file.parent.iterdir()) == [".json", ".lock"]


def _write(made: Any, n: int) -> None:
    for k in range(5):
        made.put(f"{n}-{k}", {"mapping": None})


def test_each_gpu_has_its_store(folder: Path) -> None:
    one, other = store.store_of(H100), store.store_of(A100)
    assert one is not None and other is not None and one is store.store_of(H100)
    assert one.file.name == "nvidia-h100-80gb-hbm3-sm_90a.json" and other.file.name == "an-a100-sm_80.json"


def test_nothing_is_kept_without_a_folder(folder: Path, measured: Any, environment: Set) -> None:
    environment(GEMMKIT_CACHE="0")
    cache.default_cache.cache_clear()
    measured(lambda number: 50.0)
    found = tune(*arrays()[:2], out=arrays()[2])
    assert not found.kept and found.best.ratio == pytest.approx(2.0) and "nothing is kept on disk" in str(found)


@pytest.mark.kin(1)
@pytest.mark.compile
def test_candidates_are_compiled_side_by_side(folder: Path, replaced: Seeded) -> None:
    """For real: kernels in the cache, which are those that are launched."""
    process = Measured(lambda number: 90.0)
    replaced(module, "contents_of", lambda memory, ordinal: [b"" for _ in memory.buffers])
    a, b, out = arrays(64, 64, 64)
    subject = subject_of((a, b), dict(out=out))
    found = module._Search(subject, Effort(1, 120.0, 3, 100.0), module.time.monotonic(), process).run(True, 2, module.Progress(False))
    assert [row.error for row in found.rows] == [None] * 2 and len(list(folder.glob("*.kernel"))) == 2
    assert all(job.cubin.startswith(b"\x7fELF") for job in process.kept.values())
