"""What all tests share: GPU tests only where there is a GPU, and random numbers from a test's name.

Compare results with `from tests.support.checks import assert_close, relative_error`.
"""

from __future__ import annotations

import gc
import glob
import os
import random
import secrets
import zlib
from collections import Counter
from collections.abc import Generator
from typing import Any

import hypothesis
import numpy as np
import pytest

from tests.support.patches import (  # noqa: F401
    always_wide,
    cheap_copies,
    clusters,
    driver_calls,
    environment,
    few_blocks,
    fresh_cache,
    gpus,
    grids,
    in_the_emulator,
    no_assembler,
    no_gpu,
    own_cache,
    own_launches,
    ptx_alone,
    quick_collections,
    rebound,
    replaced,
    seeded,
    without_wgmma,
)
from tests.support.ranks import ALL_GPUS
from tests.support.replaced import forget_replaced
from tests.verifier import watched

# Examples are the same in every run, so that a red run can be looked into; no deadline: kernels compile in
# seconds.
hypothesis.settings.register_profile("gemmkit", deadline=None, derandomize=True)
hypothesis.settings.load_profile("gemmkit")

#: The seed of the drawn cases of `make test`.
SAMPLE = "20261122"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", action="store_true",
                     help="what `make test` runs: no tests marked thorough, every n-th case of each function marked sample(n), "
                          "every n-th of a module's functions that are marked kin(n)")
    parser.addoption("--rest", type=int, default=0, metavar="N",
                     help="N cases, drawn anew in each run, of what --sample leaves out of each function")


def pytest_configure(config: pytest.Config) -> None:
    """One seed for the drawn cases of all workers: xdist's inherit it. A sample has the same in every run: a change that
    is right must not fail by chance. All tests draw anew."""
    os.environ.setdefault("GEMMKIT_SEED", SAMPLE if config.getoption("sample") else str(secrets.randbelow(10**9)))
    if getattr(config.option, "numprocesses", None):           # workers beside each other: not with threads of NumPy's on every core each
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.set_threshold(50_000, 20, 1000)                         # collecting tests makes 500,000 objects that stay
    _take_a_gpu()


def _take_a_gpu() -> None:
    """Where there are several GPUs, each worker of xdist has one of them. (Before anything has asked the driver.)"""
    worker, count = os.environ.get("PYTEST_XDIST_WORKER", ""), len(glob.glob("/dev/nvidia[0-9]*"))
    if worker and count > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(int(worker.removeprefix("gw")) % count)
        os.environ[ALL_GPUS] = str(count)


def pytest_report_header(config: pytest.Config) -> list[str]:
    which = "a sample of the tests (all: make test-all)" if config.getoption("sample") else "all tests"
    return [f"drawn cases: GEMMKIT_SEED={os.environ['GEMMKIT_SEED']}", which]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many cases were drawn (tests/conformance/test_drawn.py), by what the workers' reports say."""
    counts: dict[str, Counter[str]] = {}
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        for name, value in getattr(report, "user_properties", ()):
            if name == "drawn" and report.when == "call":
                machine, *numbers = value.split(":")
                counts.setdefault(machine, Counter()).update(dict(zip(("families", "cases", "refused"), map(int, numbers))))
    for machine, of in counts.items():
        terminalreporter.write_line(f"drawn cases ({machine}): {of['cases']} of {of['families']} families; {of['refused']} mappings "
                                    f"refused and drawn anew; GEMMKIT_SEED={os.environ['GEMMKIT_SEED']}")


def _left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """The cases that a sample does without. Which ones follows from the function's name alone, so every run has the same, or from
    its mark, ``sample(n, at=first)``, where a case has all edges and others are larger. Every function keeps one at least (but
    see `_kin_left_out`): one in the emulator and one on a GPU, where it has both. On a GPU
    it then has no more than that one: its cost is compiling, and what distinguishes the cases is looked at in the emulator."""
    functions: dict[tuple[str, bool, int], list[pytest.Item]] = {}
    out = [item for item in items if item.get_closest_marker("thorough")] + _kin_left_out(items)
    without = set(out)
    emulated = {item.nodeid.partition("[")[0] for item in items
                if not item.get_closest_marker("gpu") and not item.get_closest_marker("thorough")}
    for item in items:
        if item not in without:
            key = item.nodeid.partition("[")[0], item.get_closest_marker("gpu") is not None, _every(item)
            functions.setdefault(key, []).append(item)
    for (name, on_gpu, every), cases in functions.items():
        if on_gpu and name in emulated:
            every = len(cases)
        mark: Any = cases[0].get_closest_marker("sample")
        first = zlib.crc32(name.encode()) if mark is None else mark.kwargs.get("at", zlib.crc32(name.encode()))
        kept = first % min(every, len(cases))
        out += [item for n, item in enumerate(cases) if n % every != kept]
    return out


#: Where cases emulate or compile kernels: a sample has a sixth of what `sample(n)` says, a fifth of what `kin(n)` says, and a third of
#: the cases of other functions, so that `make test` takes five minutes of two cores. (`sample(1)` keeps all.)
SLOW = tuple(f"tests/{name}" for name in (
    "blas/", "components/", "conformance/test_experiments", "distributed/", "epilogues/", "functions/", "kernels/", "lang/", "layouts/",
    "operators/", "plans/test_export", "plans/test_plan", "plans/test_inspection", "plans/test_ozaki", "programs/", "ptx/", "pytorch/",
    "specs/", "tiling/", "tuner/", "tuning/test_narrow"))


def _rest(items: list[pytest.Item], count: int) -> list[pytest.Item]:
    """``count`` cases of each function that a sample leaves out: in the emulator, and as many on a GPU."""
    functions: dict[tuple[str, bool], list[pytest.Item]] = {}
    for item in _left_out(items):
        functions.setdefault((item.nodeid.partition("[")[0], item.get_closest_marker("gpu") is not None), []).append(item)
    draw = random.Random(os.environ["GEMMKIT_SEED"])
    return [item for cases in functions.values() for item in draw.sample(cases, min(count, len(cases)))]


def _every(item: pytest.Item) -> int:
    """Every how many-th case of its function a sample has."""
    mark: Any = item.get_closest_marker("sample")
    every = mark.args[0] if mark else 1
    if not item.nodeid.startswith(SLOW) or (mark and every == 1):
        return every
    return 6 * every if mark else 3


def _kin_left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of a module's functions that are marked ``kin`` all but every n-th: slow ones that look at one thing from several sides.
    Which ones follows from the module's name. What they have on a GPU stays."""
    modules: dict[tuple[str, int], dict[str, list[pytest.Item]]] = {}
    for item in items:
        mark: Any = item.get_closest_marker("kin")
        if mark and not item.get_closest_marker("gpu") and not item.get_closest_marker("thorough"):
            module, _, function = item.nodeid.partition("[")[0].partition("::")
            every = 5 * mark.args[0] if module.startswith(SLOW) else mark.args[0]
            modules.setdefault((module, every), {}).setdefault(function, []).append(item)
    return [item for (module, every), functions in modules.items() for n, cases in enumerate(functions.values())
            if n % every != zlib.crc32(module.encode()) % min(every, len(functions)) for item in cases]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what `--sample` or `--rest` leaves out, and the tests marked `gpu` where there is no GPU (a skip would look like
    a fault)."""
    if config.getoption("sample") or config.getoption("rest"):
        without = set(_left_out(items)) if config.getoption("sample") else set(items).difference(_rest(items, config.getoption("rest")))
        config.hook.pytest_deselected(items=list(without))
        items[:] = [item for item in items if item not in without]
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    from gemmkit.runtime import device

    if not device.available():
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules, Numba's registries and thousands of tests stay: to go through them again and again for garbage took a quarter of
    the time. Tests of what is kept alive collect it themselves. (Frozen they must not be: seeded faults look for functions
    among the collector's objects.) A worker's reporter, which prints nothing, would keep the 18,000 tests that were left out."""
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and "PYTEST_XDIST_WORKER" in os.environ:
        reporter.stats.pop("deselected", None)
    gc.collect()
    gc.set_threshold(50_000, 20, 1000)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Errors of finalisers, for which pytest walks five times through a million objects at the end, have been told by then."""
    gc.freeze()


# What a process cannot get over: after it every call of the driver fails.
_STICKY = ("IllegalInstruction", "IllegalAddress", "MisalignedAddress", "LaunchFailure", "HardwareStackError",
           "ILLEGAL_INSTRUCTION", "ILLEGAL_ADDRESS", "MISALIGNED_ADDRESS", "LAUNCH_FAILED", "illegal memory access")
_lost: list[str] = []


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, None]:
    """Notice the test after which the GPU is lost to this process."""
    yield
    if call.excinfo is not None and item.get_closest_marker("gpu") and any(s in str(call.excinfo.value) for s in _STICKY):
        _lost.append(item.nodeid)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Hundreds of failures after one are no news: a worker of xdist gives up, and a fresh one goes on with the rest."""
    if _lost and item.get_closest_marker("gpu") and "PYTEST_XDIST_WORKER" in os.environ:
        os._exit(3)


@pytest.fixture(scope="session", autouse=True)
def verified_plans() -> Generator[None, None, None]:
    """What the passes of programs make in any test is verified (tests/verifier)."""
    with watched():
        yield


@pytest.fixture
def monkeypatch(monkeypatch: pytest.MonkeyPatch) -> Generator[pytest.MonkeyPatch, None, None]:
    """pytest's own, behind which nothing is known of gemmkit as it was meanwhile."""
    yield monkeypatch
    monkeypatch.undo()
    forget_replaced()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers by the test's name and parameters: the same in every run."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))
