"""The ladder of kernels: each level is right in the emulator, compiles for an H100 as it should, and has its place in the docs."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from bench import levels_page, report
from examples.levels import __main__ as ladder
from gemmkit.emulator.errors import DeadlockError, RaceError, UninitialisedRead
from gemmkit.runtime.compile import assemble, disassemble, instruction_counts
from tests.support import code_lines, markdown
from tests.support.banks import conflicts, recorded
from tests.support.patches import Seeded

PAGE = markdown.ROOT / "docs" / "levels.md"
every_level = pytest.mark.parametrize("level", ladder.LEVELS, ids=lambda level: level.__name__.rpartition(".")[2])

#: Sizes beyond a block's tile: edges of level 1, several blocks, steps that are no multiple of the ring, bands of tiles.
SHAPES = ((19, 37, 23), (256, 128, 24), (128, 256, 32), (128, 128, 224), (128, 256, 320), (256, 512, 320))


@pytest.mark.sample(3)
@pytest.mark.parametrize("level, shape", [*zip(ladder.LEVELS, SHAPES)], ids=str)
def test_a_level_multiplies(level: ModuleType, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(level, "BLOCKS"):
        monkeypatch.setattr(level, "BLOCKS", 3)                    # fewer than tiles: a block goes on to the next
    assert ladder.emulated(level, shape, seed=1) <= ladder.ERRORS[np.dtype(level.DTYPE).name]


@pytest.mark.parametrize("level, removed, fault", [
    (ladder.level_2, "        barrier()  # all threads have read the tiles before\n", RaceError),
    (ladder.level_4, "        barrier()  # and those of the others; all warps have read the stage before\n", UninitialisedRead),
    (ladder.level_5, "        barrier()  # both warpgroups have read the stage\n", RaceError),
    (ladder.level_6, "                if step > 0 and thread_index() % 128 == 0:\n                    mbarrier_arrive(empty, before)\n",
     DeadlockError)],
    ids=("tiles", "copies", "boxes", "roles"))
def test_what_the_page_says_of_barriers_is_so(level: ModuleType, removed: str, fault: type, tmp_path: Path) -> None:
    """A level without one of its barriers is found out."""
    source = Path(level.__file__ or "").read_text(encoding="utf-8")
    assert source.count(removed) == 1
    (tmp_path / "broken.py").write_text(source.replace(removed, ""))
    spec = importlib.util.spec_from_file_location("broken", tmp_path / "broken.py")
    assert spec is not None and spec.loader is not None
    broken = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(broken)
    m, n, k = level.MULTIPLES
    with pytest.raises(fault):
        ladder.emulated(broken, (m, n, 6 * k))


@pytest.mark.gpu
@every_level
def test_a_level_multiplies_on_the_gpu(level: ModuleType) -> None:
    row = ladder.measured(level, 512)
    assert row["error"] <= ladder.ERRORS[row["dtype"]]


# -- machine code -----------------------------------------------------------------------------------------------------

#: What a level's machine code has, how many times at least; and the most registers that its blocks leave a thread.
INSTRUCTIONS = {1: ({"LDG": 2, "FFMA": 1}, 64), 2: ({"LDS": 4, "FFMA": 64}, 128), 3: ({"LDSM": 8, "HMMA": 32}, 128),
                4: ({"LDSM": 8, "HMMA": 32, "LDGSTS": 8}, 128), 5: ({"UTMALDG": 3, "HGMMA": 4}, 128),
                6: ({"UTMALDG": 5, "HGMMA": 4, "USETMAXREG": 2}, 168)}


def compiled(level: ModuleType) -> Any:
    """A level's machine code for an H100, by ``numba.cuda`` alone."""
    from numba import cuda
    from numba.cuda import types
    from numba.cuda.np.numpy_support import from_dtype

    array = types.Array(from_dtype(np.dtype(level.DTYPE)), 2, "C")
    maps = types.Array(types.int64, 2, "C"), types.int64
    takes = level.kernel.py_func.__code__.co_varnames[:3]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ptx, _ = cuda.compile_ptx(level.kernel.py_func, (array, *maps) if "maps" in takes else (array,) * 3, cc=(9, 0, "a"),
                                  launch_bounds=level.kernel.targetoptions["launch_bounds"])
    return ptx, assemble(ptx, "sm_90a")


@pytest.mark.sample(3)
@every_level
def test_a_level_is_the_code_that_it_describes(level: ModuleType) -> None:
    wanted, registers = INSTRUCTIONS[ladder.LEVELS.index(level) + 1]
    ptx, assembled = compiled(level)
    usage = assembled.usage
    assert usage.registers <= registers and usage.spill_stores == usage.spill_loads == usage.stack_bytes == 0
    assert ".local" not in ptx
    text = disassemble(assembled.cubin)
    found = instruction_counts(text)
    assert {name: found[name] for name in wanted if found[name] < wanted[name]} == {}
    if "HGMMA" in wanted:                                          # one group of four: ptxas makes none wait for the last
        assert text.count("HGMMA") == 4 and text.count("WARPGROUP.ARRIVE") == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("level", ladder.LEVELS[1:4], ids=("2", "3", "4"))
def test_no_warp_meets_in_a_bank(level: ModuleType) -> None:
    """TMA and wgmma choose the order of the other levels by themselves."""
    with recorded() as seen:
        ladder.emulated(level)
    assert seen.loads and seen.stores if level is not ladder.level_4 else seen.loads
    assert conflicts(seen.loads) == conflicts(seen.stores) == 0


# -- the command and the page -----------------------------------------------------------------------------------------

@every_level
def test_a_level_can_be_read(level: ModuleType) -> None:
    source = Path(level.__file__ or "").read_text(encoding="utf-8")
    assert len(code_lines.code_lines(source)) <= 120
    assert ladder.title(level).startswith(f"Level {level.__name__[-1]}: ")


def test_the_command_runs_all_levels(capsys: pytest.CaptureFixture[str], tmp_path: Path, seeded: Seeded) -> None:
    tried: list[ModuleType] = []
    seeded(ladder, "emulated", lambda level: tried.append(level) or 1e-7)
    assert ladder.command(["--emulate", "--json", str(tmp_path / "none.json")]) == 0
    said = capsys.readouterr().out
    assert tried == list(ladder.LEVELS) and said.count("error 1.0e-07") == 6 and not (tmp_path / "none.json").exists()
    seeded(ladder, "emulated", lambda level: float("inf"))
    assert ladder.command(["--emulate"]) == 1


def test_nan_is_an_error() -> None:
    one = np.ones((2, 2))
    assert ladder.error(np.array([[2, 2], [2, 2.5]]), one, one) == 0.25
    assert ladder.error(np.array([[2, 2], [2, np.nan]]), one, one) == float("inf")


def test_the_page_has_what_was_measured() -> None:
    """`python -m bench.levels_page --into docs/levels.md` was run after the last measurement."""
    text = PAGE.read_text(encoding="utf-8")
    between = text[text.index(levels_page.BEGIN) + len(levels_page.BEGIN):text.index(levels_page.END)]
    assert between.strip() == levels_page.text().strip()


def test_the_pages_kernel_runs(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    assert markdown.run(PAGE, monkeypatch, rng, {}, lambda block, names, said: None, [0]) == 1


def test_the_pages_table(tmp_path: Path) -> None:
    rows = [{"group": "levels", "work": title, "dtype": "float16", "m": 64, "n": 64, "k": 64, "layout": "nn", "ours_us": 8.0, "peer": "cuBLAS",
             "peer_us": 2.0, "ratio": 0.25, "error": 1e-4, "graph": False, "tflops": 12.34} for title in ("Level 1: one", "Level 2: two")]
    report.write(report.document("levels", rows, "a GPU"), tmp_path / "levels.json")
    text = levels_page.text(tmp_path / "levels.json")
    assert "| 1: one | float16 | 8.0 us | 12.3 | 25 % |" in text and "64 x 64 x 64" in text and "a GPU" in text
    assert levels_page.text(tmp_path / "none.json").startswith("Not measured yet")


@every_level
def test_the_page_shows_the_files(level: ModuleType) -> None:
    """What the page quotes of a level is in its file, word by word."""
    source = Path(level.__file__ or "").read_text(encoding="utf-8")
    quoted = levels_page.quoted(PAGE.read_text(encoding="utf-8"), level.__name__.rpartition(".")[2])
    assert quoted and all(block in source for block in quoted)
