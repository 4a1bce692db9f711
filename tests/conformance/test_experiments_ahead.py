"""`bench.experiments` without a GPU: the kernels that are compiled ahead."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gemmkit
from bench import prepare
from bench.experiments import groups, minplus
from bench.experiments import run as experiments
from bench.experiments.experiment import Experiment
from gemmkit.operators.base import units
from gemmkit.plans.launch import Launch, forget
from gemmkit.programs.plan import ProgramPlan
from gemmkit.runtime import device
from gemmkit.runtime import launch as workspace
from tests.conformance.test_experiments import first_of_each
from tests.support.hosts import Host
from tests.support.on_device import OnDevice
from tests.support.patches import Seeded


def test_products_are_recorded_and_not_computed() -> None:
    x = np.full((32, 32), 7, np.float32)
    out = np.zeros_like(x)
    (compiled,) = prepare.recorded(lambda: gemmkit.einsum("ab,bc->ac", x, x, out=out))
    assert compiled.problem.K == 32 and not out.any()


def test_kernels_of_all_rows_resolve() -> None:
    rows = experiments.make(experiments.DEFAULT)
    wanted, failed = prepare.distinct(rows)
    assert not failed and 40 < len(wanted) < len(rows)


@pytest.mark.parametrize("case", experiments.make(["diagonal", "triangular", "algebras", "contraction"], "f16"), ids=str)
def test_sixteen_bit_products_take_the_tensor_cores_of_hopper(case: Any) -> None:
    (compiled,) = prepare.products(case)
    conf = compiled.problem.config
    tensor = units(conf.operator)
    assert type(tensor).__name__ in ("WGMMAOp", "MMAOp")


@pytest.mark.sample(10)
@pytest.mark.parametrize("case", first_of_each(), ids=str)
def test_a_call_on_the_device_finds_what_was_compiled_ahead(case: Experiment, replaced: Seeded) -> None:
    found: list[Any] = []

    class OnTheDevice(prepare.HostArrays):
        def complex_view(self, parts: OnDevice) -> OnDevice:  # type: ignore[override]
            return OnDevice(super().complex_view(parts.array))

        def of_numbers(self, numbers: np.ndarray) -> OnDevice:  # type: ignore[override]
            return OnDevice(super().of_numbers(numbers))

    def bind_launch(launch: Launch) -> Launch:
        found.extend(SimpleNamespace(launchable=one.kernel) for one in (launch, *launch.behind))
        launch.start = lambda *given: None
        return launch

    of_host = ProgramPlan.run

    def run_program(plan: ProgramPlan, arguments: Any, stream: Any = None) -> None:
        if any(info.library == "numpy" for info in plan.infos.values()):
            of_host(plan, arguments, stream)
        else:
            found.append(plan)

    replaced(Launch, "bind", bind_launch)
    replaced(workspace, "table", lambda *given: 0)
    replaced(device, "made_current", lambda ordinal: contextlib.nullcontext())
    replaced(device, "current", lambda: device.H100)
    replaced(ProgramPlan, "run", run_program)
    forget()                                           # another row's call of the same arrays has been bound
    x = case.operands(prepare.HostArrays(), 0)
    for name, value in vars(x).items():
        if isinstance(value, np.ndarray):
            setattr(x, name, OnDevice(value))
    case.ours(OnTheDevice(), x)()
    assert {one.launchable.code_key for one in found} == set(prepare.key(case)[0])


def test_groups() -> None:
    """Sizes are the same in every run, and results are right."""
    cases = list(groups.groups())
    assert all(len(case.shapes) == 32 and case.shapes == case.shapes for case in cases)
    assert all(size % 8 == 0 and 0 < size <= case.m for case in cases for shape in case.shapes for size in shape)
    case = dataclasses.replace(cases[0], m=24, n=16, k=32, count=3)
    host = Host()
    x = case.operands(host, 0)
    x.out[...] = np.nan
    with gemmkit.emulate():
        case.ours(host, x)()
    assert case.error(host, x) < case.tolerance and not np.isnan(x.out).any()
    assert prepare.products(cases[0])[0].problem.config.kernel == "multistage"


@pytest.mark.thorough
def test_the_kernel_of_groups_is_compiled_ahead() -> None:
    assert prepare.build(dataclasses.replace(next(groups.groups()), m=24, n=16, k=32, count=3)).error is None


@pytest.mark.parametrize("work", ["3 ragged experts", "3 equal experts"])
def test_experts(work: str) -> None:
    """Shares of tokens are the same in every run, some are empty where they are ragged, and both peers are right."""
    for versus in ("_grouped_mm", "a loop"):
        case = groups.Experts("experts", work, "bf16", 21, 16, 32, count=3, versus=versus)
        assert case.ends == case.ends and case.ends[-1] == 21 and sorted(case.ends) == case.ends
        host = Host()
        x = case.operands(host, 0)
        x.out[...] = np.nan
        with gemmkit.emulate():
            case.ours(host, x)()
        case.peers(host, x)()
        assert case.error(host, x) < case.tolerance and case.peer_error(host, x) < case.tolerance


def keys_of(groups: tuple[str, ...]) -> dict[str, str]:
    rows = [case for group in groups for case in experiments.make([group], "f16|f32")]
    return {str(case): re.sub(r" at 0x\w+", "", repr(prepare.key(case))) for case in rows}          # of functions, by process


@pytest.mark.thorough
def test_what_came_before_does_not_change_a_kernel() -> None:
    """Processes that compile rows ahead take them in any order, the worker in its own."""
    groups = ("diagonal", "algebras", "complex64", "minplus", "contraction")
    spawn = multiprocessing.get_context("spawn")
    found = []
    for order in (groups, groups[1:] + groups[:1], groups[::-1]):
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            found.append(pool.submit(keys_of, order).result())
    assert found[0] == found[1] == found[2]


def test_a_row_that_cannot_be_compiled_says_why() -> None:
    @dataclasses.dataclass(frozen=True)
    class Broken(minplus.MinPlus):
        def ours(self, lib: Any, x: Any) -> Any:
            return lambda: gemmkit.matmul(x.a, x.b[1:], out=x.out)

    made = prepare.build(Broken("minplus", "min-plus", "f32", 64, 64, 64))
    assert made.error is not None and made.error.startswith("ValueError") and "K=64" in made.error


@pytest.mark.thorough
@pytest.mark.usefixtures("own_cache")
def test_the_peers_kernel_is_compiled_too() -> None:
    from gemmkit.runtime import cache

    try:
        case = minplus.MinPlus("minplus", "min-plus", "f32", 64, 64, 64)
        assert prepare.build(case).error is None and cache.default_cache().stats.builds == 2
    finally:
        cache.default_cache.cache_clear()
