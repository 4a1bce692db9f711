"""Fixtures that put something else in place of a part of gemmkit, of CUDA's driver or of the environment, one for each purpose.

tests/conftest.py imports them. A test that needs one of these things asks for the fixture, so it names no module of gemmkit but
the one whose behaviour it looks at.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Seeded = Callable[..., None]
Set = Callable[..., None]


@pytest.fixture
def seeded(monkeypatch: pytest.MonkeyPatch) -> Seeded:
    """Seed a fault: ``seeded(module, "barrier", lambda: None)`` has kernels run that in place of the function."""
    return monkeypatch.setattr


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Seeded:
    """Put a stand-in where a test would need a GPU, a tool, a clock or minutes: ``replaced(Launchable, "bind", bind)``. What is
    tested is not replaced, and no constant is: a case that is large or small enough is drawn in place of it."""
    return monkeypatch.setattr


@pytest.fixture
def rebound(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Set:
    """Bind globals of the test's module again: ``rebound(SLOPE=3.0)``."""
    def rebind(**names: Any) -> None:
        for name, value in names.items():
            monkeypatch.setitem(vars(request.module), name, value)

    return rebind


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Set:
    """Set environment variables: ``environment(GEMMKIT_CACHE="0", OUT=None)``; None removes one."""
    def change(**variables: Any) -> None:
        for name, value in variables.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, str(value))

    return change


@pytest.fixture
def fresh_cache(environment: Set) -> Iterator[Callable[[Any], None]]:
    """Have a folder for compiled kernels, or a process without one: ``fresh_cache(tmp_path)``, ``fresh_cache(None)``."""
    from gemmkit.runtime import cache

    def use(folder: Path | None) -> None:
        environment(GEMMKIT_CACHE_DIR=folder, GEMMKIT_CACHE="0" if folder is None else None, GEMMKIT_TUNED=None)
        cache.default_cache.cache_clear()

    yield use
    cache.default_cache.cache_clear()


@pytest.fixture
def own_cache(fresh_cache: Callable[[Any], None], tmp_path: Path) -> Path:
    """An empty folder of compiled kernels and of tuned mappings for this test alone."""
    fresh_cache(tmp_path)
    return tmp_path


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Set:
    """What gemmkit sees of the GPUs: ``gpus(count=2, current=0)``, ``gpus(absence="no driver")``; ``context``
    makes one current."""
    from gemmkit.runtime import device

    places = {"count": "count", "current": "current_ordinal", "absence": "_absence", "available": "available",
              "context": "ensure_context"}

    def tell(**facts: Any) -> None:
        for name, value in facts.items():
            monkeypatch.setattr(device, places[name], value if name == "context" else lambda value=value: value)

    return tell


@pytest.fixture
def no_gpu(gpus: Set) -> None:
    """A machine without a GPU, where kernels are compiled for the one that is assumed."""
    gpus(available=False, current=0)


@pytest.fixture
def driver_calls(monkeypatch: pytest.MonkeyPatch) -> Set:
    """Functions of CUDA's driver: ``driver_calls(cuStreamGetDevice=lambda handle: (0, 1))``."""
    def answer(**functions: Any) -> None:
        from cuda.bindings import driver

        for name, function in functions.items():
            monkeypatch.setattr(driver, name, function, raising=False)

    return answer


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The grid of each launch in the emulator."""
    from gemmkit.emulator import machine as emulated

    found: list[Any] = []
    launch = emulated.launch
    monkeypatch.setattr(emulated, "launch", lambda *given, **how: (found.append(how["grid"]), launch(*given, **how))[1])
    return found


@pytest.fixture
def own_launches() -> Iterator[None]:
    """No launch is known from another test, and none of this test's is known after it."""
    from gemmkit.plans.launch import forget

    forget()
    yield
    forget()


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """So many clusters of the warp-specialised kernel do everything, however many multiprocessors there are, so that tiles follow
    each other. (Blocks that wait for each other stay as many as they must be.)"""
    from gemmkit.kernels.sm90.family import Sm90Spec

    def limit(count: int, waiting: bool = True) -> None:
        blocks = Sm90Spec.blocks
        monkeypatch.setattr(Sm90Spec, "blocks", lambda spec, M, N, sm_count: (
            count * spec.cluster.size if waiting or not spec.reduction.waits else blocks(spec, M, N, sm_count)))

    return limit


@pytest.fixture
def few_blocks(clusters: Callable[[int], None]) -> None:
    """Two clusters of the warp-specialised kernel: each has several tiles, one after the other."""
    clusters(2)


@pytest.fixture
def quick_collections() -> Iterator[None]:
    """`gc.collect` walks through what the test makes, and not through the million objects that were there: a second each time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def in_the_emulator() -> Iterator[None]:
    """All of the test's products are computed in the emulator."""
    import gemmkit as gk

    with gk.emulate():
        yield


@pytest.fixture
def ptx_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`compile_config` gives PTX, which is not assembled."""
    from gemmkit.plans import ahead

    monkeypatch.setattr(ahead, "assemble", lambda ptx, arch: None)


@pytest.fixture
def no_assembler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without ptxas: what is shown of a kernel says so. (PTX, which takes a second and which nothing would take, is none.)"""
    from gemmkit.plans import ahead
    from gemmkit.runtime.compile import AssemblerError

    def none(*given: object) -> None:
        raise AssemblerError("no ptxas is here")

    monkeypatch.setattr(ahead, "to_ptx", lambda *given: "")
    monkeypatch.setattr(ahead, "assemble", none)


@pytest.fixture
def always_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operand counts as one of 2^31 elements, and a product by adapters as one of many."""
    from gemmkit.plans import adapters

    monkeypatch.setattr(adapters, "COUNT", 1)


@pytest.fixture
def without_wgmma(monkeypatch: pytest.MonkeyPatch, own_launches: None) -> Callable[[], None]:
    """`attention` and `mlp` take a Hopper GPU for one without wgmma from here on: on hardware, too."""
    from tests.support.attention import by_warps

    return lambda: by_warps(monkeypatch)


@pytest.fixture
def cheap_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Operands that may be copied before a product (`gemmkit.tuning.choose.in_lines`) are: copies are worth any time."""
    from gemmkit.plans.launch import forget
    from gemmkit.tuning import choose

    monkeypatch.setattr(choose, "WORTH_COPYING", 1e9)
    monkeypatch.setattr(choose, "SAVED", -1e18)
    forget()
    yield
    forget()
