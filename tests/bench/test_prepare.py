"""What is compiled ahead is what a call on device arrays then finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import cases, prepare
from bench.cases import Case
from gemmkit.plans.plan import Plan
from gemmkit.runtime import cache, launch
from tests.support.on_device import OnDevice
from tests.support.patches import Seeded, Set

SMALL = Case("fused", "bias", "f16", 64, 64, 64)


@pytest.fixture
def fresh_cache(own_cache: Path) -> Any:
    yield
    cache.default_cache.cache_clear()


@pytest.mark.usefixtures("fresh_cache")
def test_a_call_finds_what_was_compiled_ahead(replaced: Seeded, gpus: Set) -> None:
    made = prepare.build(SMALL)
    assert made.error is None and made.usage is not None and made.usage["registers"] > 0
    assert "registers" in str(made) and cache.default_cache().stats.builds == 1

    x = cases.operands(SMALL, lambda name, rows, columns, dtype: OnDevice(prepare.host_array(name, rows, columns, dtype)))
    (a, b, c, conf), keywords = cases.plan_arguments(SMALL, x)
    bound: list[bytes] = []

    class Loaded:
        def bind(self, *arguments: Any, **options: Any) -> None:
            bound.append(b"")

    replaced(launch, "load", lambda cubin, name: Loaded())
    gpus(current=0)
    Plan(a, b, c, keywords.pop("out"), conf, keywords)._compiled.launchable.bind()
    assert bound and cache.default_cache().stats.builds == 1


@pytest.mark.parametrize("case", cases.make(["square", "table2", "toeplitz", *cases.PAPER], sizes=[4096]), ids=str)
def test_host_arrays_decide_on_the_kernel_that_device_arrays_do(case: Case) -> None:
    x = cases.operands(case, lambda name, rows, columns, dtype: OnDevice(prepare.host_array(name, rows, columns, dtype)))
    (a, b, c, conf), keywords = cases.plan_arguments(case, x)
    compiled = Plan(a, b, c, keywords.pop("out"), conf, keywords)._compiled
    assert prepare.key(case) == ((compiled.launchable.code_key,), False)


def test_each_kernel_is_compiled_once_and_failures_are_named() -> None:
    rows = cases.make(["fused"], sizes=[512])
    bad = Case("mappings", "matmul", "f16", 512, 512, 512, "nt", mapping="96x256c-1x1-g8")
    wanted, failed = prepare.distinct([*rows, bad])
    assert len(wanted) == 5 and len(rows) == 9  # the plain product and four fusions, each against two peers
    assert [made.case for made in failed] == [bad] and failed[0].error and "ConfigError" in str(failed[0])


@pytest.mark.thorough
@pytest.mark.usefixtures("fresh_cache")
def test_processes_share_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    found = prepare.prepare([SMALL], jobs=1)
    assert [made.error for made in found] == [None]
    assert "1 kernels of 1 rows" in capsys.readouterr().out
    prepare.build(SMALL)
    assert cache.default_cache().stats.builds == 0
