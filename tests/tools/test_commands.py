"""`python -m gemmkit compile` and `tune`, run in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.plans.ahead import recorded
from gemmkit.plans.plan import Plan
from gemmkit.runtime import cache
from gemmkit.runtime.device import A100, H100
from gemmkit.tools import cli as command
from gemmkit.tools.cli import main
from gemmkit.tuner import Tried, Tuned
from gemmkit.tuner.tuner import sweep, tiles
from tests.support.on_device import OnDevice
from tests.support.patches import Seeded, Set

# ==========================================================================================================================
# `python -m gemmkit compile`, run in this process.


@pytest.fixture
def folder(tmp_path: Path, environment: Set) -> Iterator[Path]:
    """A cache of this test's own."""
    environment(GEMMKIT_CACHE_DIR=tmp_path / "kernels", GEMMKIT_CACHE=None)
    cache.default_cache.cache_clear()
    yield tmp_path
    cache.default_cache.cache_clear()


PROGRAM = """
import numpy as np
import gemmkit as gk
from helpers import twice

a, b = np.ones((40, 24), np.float16), np.ones((24, 16), np.float16)
config = gk.get_config(operator=gk.operators.MMAOp(), global_a_layout=gk.layouts.RowMajor("float16"),
                       block_shape=gk.Tile(M=32, N=32, K=16))
d = gk.matmul(a, b, conf=config)
e = gk.matmul(a, b, conf=config, out=np.empty((40, 16), np.float32))
gk.matmul(a, b, conf=config, epilogue=gk.epilogues.Elementwise(twice))
assert not d.any() and not e.any()
print("a program's own words")
"""


@pytest.mark.kin(3)
def test_a_program(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its kernels, each once; what a GPU's arrays then ask for is there."""
    (folder / "helpers.py").write_text("def twice(x):\n    return 2 * x\n")
    (folder / "work.py").write_text(PROGRAM)
    assert main(["compile", str(folder / "work.py"), "--arch", "sm_80", "--jobs", "2"]) == 0
    said = capsys.readouterr().out
    assert "a program's own words" not in said and "2 compiled, 0 were there, 0 failed" in said and "sm_80" in said
    assert len(list((folder / "kernels").glob("*.kernel"))) == 2
    assert main(["compile", str(folder / "work.py"), "--arch", "sm_80"]) == 0
    assert "0 compiled, 2 were there, 0 failed" in capsys.readouterr().out


@pytest.mark.kin(3)
def test_a_gpu_finds_what_was_compiled_for_it(folder: Path, replaced: Seeded, gpus: Set) -> None:
    """The mapping, and so the kernel, is the one that device arrays choose."""
    assert main(["compile", "--shapes", "2x32x48x16", "--dtypes", "f64", "--layouts", "nt", "--arch", "sm_80"]) == 0
    cache.default_cache.cache_clear()
    gpus(available=False)
    replaced("gemmkit.runtime.device.H100", A100)                # a machine whose GPU this is
    gpus(current=0)
    a, b = OnDevice(np.empty((2, 32, 16))), OnDevice(np.empty((2, 48, 16)).swapaxes(1, 2))
    planned = Plan(a, b, None, OnDevice(np.empty((2, 32, 48))), None, {})
    entry = planned._compiled.launchable.entry()
    assert entry.from_disk and cache.default_cache().stats.builds == 0


def test_products_of_all_that_is_asked_for(folder: Path, replaced: Seeded, capsys: pytest.CaptureFixture[str]) -> None:
    """Shapes times types times layouts times GPUs. (What is compiled stands for itself here.)"""
    from gemmkit.tools import cli as command

    wanted: list[Any] = []

    def compiled(kernels: Any, jobs: Any) -> Any:
        wanted.extend(kernels)
        return (command.Made(kernel, {"registers": 32, "spill_stores": 0, "spill_loads": 0}) for kernel in kernels)

    replaced(command, "compiled", compiled)
    assert main(["compile", "--shapes", "64x64x64", "512x256x128", "--dtypes", "f16", "f32", "--layouts", "nn", "nt",
                 "--arch", "sm_90a:114,sm_75"]) == 0
    capsys.readouterr()
    assert {kernel.launchable.target.arch_name for kernel in wanted} == {"sm_90a", "sm_75"}
    assert {name for kernel in wanted for name in kernel.products} == {
        f"{dtype} {layout} {sizes}" for dtype in ("f16", "f32") for layout in ("nn", "nt") for sizes in ("64x64x64", "512x256x128")}
    assert {kernel.launchable.target.sm_count for kernel in wanted} == {114, 40}
    assert len({id(kernel) for kernel in wanted}) == len(wanted) <= 16


@pytest.mark.kin(3)
def test_a_kernel_that_fails_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "bad.py").write_text(
        "import numpy as np, gemmkit as gk\na = np.ones((16, 16), np.float32)\n"
        "gk.matmul(a, a, epilogue=gk.epilogues.Elementwise(lambda x: x.clipped(2)))\n")
    assert main(["compile", str(folder / "bad.py"), "--arch", "sm_80"]) == 1
    said = capsys.readouterr().out
    assert "bad.py for an A100: ComponentError" in said and "0 compiled, 0 were there, 1 failed" in said
    assert "bad.py" in said and "line 3" in said


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "a FILE or --shapes is needed, and not both"),
    (["x.py", "--shapes", "1x1x1"], "a FILE or --shapes is needed, and not both"),
    (["nowhere.py"], "nowhere.py: there is no such file"),
    (["--shapes", "64x64"], "--shapes 64x64: MxNxK is needed"),
    (["--shapes", "0x64x64"], "--shapes 0x64x64: MxNxK is needed"),
    (["--shapes", "64x64x64", "--arch", "sm_70"], "'sm_70' is not a GPU that kernels can be compiled for"),
    (["--shapes", "64x64x64", "--dtypes", "f7"], "--dtypes f7: no dtype of this name"),
    (["--shapes", "64x64x64", "--jobs", "0"], "--jobs 0: 1 or more is needed"),
], ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_what_is_wrong(folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err and "Traceback" not in said.err and not (folder / "kernels").exists()


def test_nowhere_to_compile_to(folder: Path, environment: Set, capsys: pytest.CaptureFixture[str]) -> None:
    environment(GEMMKIT_CACHE="0")
    cache.default_cache.cache_clear()
    assert main(["compile", "--shapes", "64x64x64"]) == 2
    assert "nothing is kept on disk" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["raise SystemExit(3)", "raise KeyError('x')", "import nowhere_to_be_found"])
def test_a_program_that_fails(folder: Path, ending: str) -> None:
    (folder / "ends.py").write_text(ending)
    with pytest.raises((KeyError, ImportError)) if "Exit" not in ending else _exit_status():
        assert main(["compile", str(folder / "ends.py")]) == 2


def _exit_status() -> Any:
    import contextlib

    return contextlib.nullcontext()


# -- recorded ----------------------------------------------------------------------------------------------------------

def test_every_kind_of_call_is_recorded() -> None:
    x = np.ones((16, 16), np.float32)

    def calls() -> None:
        gk.matmul(x, x)
        gk.plan(x, x)(x, x)
        gk.blas.gemmEx("N", "N", 1, x, x, 0, np.zeros_like(x))
        gk.einsum("ab,bc->ac", x, x)
        gk.grouped([x, x[:8]], [x, x])
        gk.functions.select(x, x)

    found = recorded(calls, H100)
    assert len(found) == 6 and all(compiled.launchable.target is H100 for compiled in found)


def test_plans_of_one_device_are_not_anothers() -> None:
    x = np.ones((512, 512), np.float16)
    kernels = [recorded(lambda: gk.matmul(x, x), device)[0].problem.config.kernel for device in (H100, A100, H100)]
    assert kernels == ["warp_specialised", "multistage", "warp_specialised"]
    with gk.emulate():
        assert not np.any(recorded(lambda: gk.matmul(x[:16], x)) == []) and gk.matmul(x[:1], x[:, :1])[0, 0] == 512


# ==========================================================================================================================
# `python -m gemmkit tune`, run in this process: its request, its table, its picture. (It times on a GPU alone.)


@pytest.fixture
def conf() -> gk.Config:
    return gk.get_config(operator=gk.operators.MMAOp(), global_a_layout=gk.layouts.RowMajor("float16"))


@pytest.fixture
def found(conf: gk.Config) -> Tuned:
    default = Tried("default", conf, None, 100.0, 1.0)
    best = Tried("multistage 128x128x32", conf, None, 50.0, 2.0)
    rest = (Tried("one", error="not legal: no"), Tried("two", conf, error="failed: CUDA_ERROR_ILLEGAL_ADDRESS"))
    return Tuned("512 x 512 x 512, float16, on a GPU", (best, default, *rest), default, best, True, ("interrupted: so",))


def asked(monkeypatch: pytest.MonkeyPatch, found: Tuned) -> dict[str, Any]:
    """What `gemmkit.tune` is asked, on a machine that says that it has a GPU."""
    seen: dict[str, Any] = {}

    def tune(a: Any, b: Any, **keywords: Any) -> Tuned:
        seen.update(keywords, a=a, b=b)
        return found

    monkeypatch.setattr(command.gemmkit, "tune", tune, raising=False)
    monkeypatch.setattr(command, "absence", lambda: None)
    monkeypatch.setattr(command, "_library", lambda of: lambda x: x)
    return seen


def test_a_request_and_its_table(monkeypatch: pytest.MonkeyPatch, found: Tuned, capsys: pytest.CaptureFixture[str]) -> None:
    seen = asked(monkeypatch, found)
    assert main(["tune", "--m", "48", "--n", "32", "--k", "16", "--layout", "nt", "--batch", "3", "--budget", "7", "--jobs", "2",
                 "--effort", "full"]) == 0
    assert seen["a"].shape == (3, 48, 16) and seen["b"].shape == (3, 16, 32) and seen["b"].strides[-1] > seen["b"].strides[-2]
    assert seen["a"].dtype == np.float16 and np.std(seen["a"]) > 0.5
    assert {name: seen[name] for name in ("effort", "budget", "keep", "jobs")} == dict(effort="full", budget=7, keep=True, jobs=2)
    said = capsys.readouterr().out
    assert "* multistage 128x128x32" in said and "2.000" in said and "two: failed: CUDA_ERROR_ILLEGAL_ADDRESS" in said
    assert "one: not legal" not in said and "interrupted: so" in said and "get_config(" in said
    assert said.rstrip().endswith("gemmkit.matmul takes it from now on")
    assert main(["tune", "--all", "--no-keep"]) == 0
    assert "one: not legal: no" in capsys.readouterr().out and seen["keep"] is False


def test_a_picture_of_tiles(monkeypatch: pytest.MonkeyPatch, found: Tuned, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked(monkeypatch, found)
    assert main(["tune", "--m", "64", "--n", "64", "--k", "64", "--sweep", str(tmp_path / "tiles.png")]) == 0
    assert (tmp_path / "tiles.png").read_bytes().startswith(b"\x89PNG") and "drawn: " in capsys.readouterr().out
    assert list(tiles(found).values()) == [50.0]
    nothing = Tuned("nothing", (), found.default, found.default, False)
    with pytest.raises(ValueError, match="no mapping was timed"):
        sweep(nothing, tmp_path / "none.png", 1.0)


@pytest.mark.parametrize(("arguments", "message"), [
    (["--m", "0"], "--m 0: 1 or more is needed"), (["--jobs", "0"], "--jobs 0"), (["--a-dtype", "f7"], "no dtype of this name"),
    ([], "there is none here"),
], ids=str)
def test_what_is_wrong_with_tune(replaced: Seeded, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    replaced(command, "absence", lambda: "the driver lists no device")
    assert main(["tune", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_integers_are_small(monkeypatch: pytest.MonkeyPatch, found: Tuned) -> None:
    seen = asked(monkeypatch, found)
    assert main(["tune", "--m", "8", "--n", "8", "--k", "8", "--a-dtype", "int8"]) == 0
    assert seen["a"].dtype == np.int8 and np.abs(seen["a"]).max() <= 4
