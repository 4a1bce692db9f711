"""The command line, run in this process."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import gemmkit as gk
from gemmkit.runtime import cache
from gemmkit.runtime.device import H100, assumed
from gemmkit.tools import cli
from gemmkit.tools.cli import COMMANDS, main
from tests.support.patches import Seeded, Set


@pytest.fixture
def folder(own_cache: Path, tmp_path: Path) -> Iterator[Path]:
    """A cache of this test's own."""
    yield tmp_path
    cache.default_cache.cache_clear()


def rows(text: str) -> dict[str, list[str]]:
    """Rows of the printed tables: the first cell -> the others. A row that goes on in the next line is one."""
    found: dict[str, list[str]] = {}
    last: list[str] = []
    for line in text.splitlines():
        if not line.startswith("│"):
            continue
        name, *cells = (cell.strip() for cell in line.strip("│").split("│"))
        if name or not last:
            found[name] = last = cells
        else:
            last[:] = [f"{old} {new}".strip() for old, new in zip(last, cells, strict=True)]
    return found


# -- help and errors ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)],
                         ids=" ".join)
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "usage: python -m gemmkit" in said
    for name in COMMANDS:
        if arguments == ["--help"]:
            assert name in said


@pytest.mark.parametrize("arguments", [[], ["sing"], ["explain", "--layout", "xy"], ["cache", "lose"]], ids=" ".join)
def test_what_is_no_command(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


@pytest.mark.parametrize(("arguments", "message"), [
    (["--a-dtype", "float9"], "--a-dtype float9: no dtype of this name; for example float16"),
    (["--operator", "wmma", "--a-dtype", "complex64"], "WMMAOp(dtype=complex64"),
    (["--operator", "mma", "--b-dtype", "f32"], "--operator mma: A is float16 and B is float32"),
    (["--block", "64x64"], "--block 64x64: MxNxK is needed"),
    (["--block", "100x64x64"], "block_shape=Tile(M=100"),
    (["--k", "0"], "--k 0: a size of 1 or more"),
    (["--a-dtype", "U7"], "a has dtype <U7"),
], ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_explain_says_what_is_wrong(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and "Traceback" not in printed.err


def test_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "gemmkit", "explain", "--m", "0"], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("error: --m 0")


# -- info and cache ----------------------------------------------------------------------------------------------------

def test_info(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    found = rows(capsys.readouterr().out)
    assert found["gemmkit"] == [gk.__version__] and found["Python"] and found["numpy"] and found["numba-cuda"]
    assert found["ptxas"][0].startswith("ptxas ") and "/" not in found["ptxas"][0]
    assert found["cache"][0].replace(" ", "") == f"{folder}:0kernels,0bytes".replace(" ", "")
    assert found["compiled for"][0].startswith("sm_") and "KiB a block" in found["shared memory"][0]
    assert found["operator"][:2] == ["WMMAOp (bfloat16)", "yes"] and found["kernel"][:2] == ["quantised", "yes"]


def test_info_without_a_gpu(folder: Path, gpus: Set, capsys: pytest.CaptureFixture[str]) -> None:
    gpus(absence="the driver lists no device")
    with assumed(H100):
        assert main(["info"]) == 0
    found = rows(capsys.readouterr().out)
    assert found["GPU"][0].startswith("no GPU (the driver lists no device)") and found["target"] == [H100.name]


def test_info_tells_what_an_old_gpu_lacks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import dataclasses

    turing = dataclasses.replace(H100, name="a Turing", arch=(7, 5))
    with assumed(turing):
        assert main(["info"]) == 0
    said = capsys.readouterr().out
    assert "Usable on a Turing (compute capability 7.5)" in said
    lines = {name: next(line for line in said.splitlines() if f"│ {name} " in line) for name in ("FPUOp", "MMAOp", "WMMAOp")}
    assert "yes" in lines["FPUOp"] and "yes" in lines["WMMAOp"] and "no: needs compute capability 8.0" in lines["MMAOp"]


def test_a_variable_that_names_no_tool(folder: Path, environment: Set, capsys: pytest.CaptureFixture[str]) -> None:
    environment(GEMMKIT_PTXAS="/nowhere/ptxas")
    assert main(["info"]) == 0
    assert "is not an executable file" in rows(capsys.readouterr().out)["ptxas"][0]


def test_the_cache_is_shown_and_cleared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for key in ("one", "two"):
        cache.default_cache().get_or_build(key, lambda: (b"\x7fELF" + bytes(1000), {}))
    assert main(["cache"]) == 0
    assert capsys.readouterr().out.startswith(f"{folder}: 2 kernels, ")
    assert main(["cache", "clear"]) == 0
    assert "removed 2 kernels" in capsys.readouterr().out and not list(folder.glob("*.kernel"))
    assert main(["cache", "info"]) == 0
    assert capsys.readouterr().out == f"{folder}: 0 kernels, 0 bytes\n"


def test_no_cache_on_disk(folder: Path, environment: Set, capsys: pytest.CaptureFixture[str]) -> None:
    environment(GEMMKIT_CACHE="0")
    cache.default_cache.cache_clear()
    assert main(["cache", "clear"]) == 0
    assert "Nothing is kept on disk" in capsys.readouterr().out


# -- explain -----------------------------------------------------------------------------------------------------------

@pytest.mark.kin(4)
@pytest.mark.compile
def test_explain_counts_the_warps_that_fetch(capsys: pytest.CaptureFixture[str]) -> None:
    """Of Hopper's kernel a warpgroup loads, and does not multiply."""
    assert main(["explain", "--m", "256", "--n", "512", "--k", "64"]) == 0
    found = re.search(r"threads[^0-9]+([0-9]+) \(([0-9]+) warps\)", capsys.readouterr().out)
    assert found and int(found[1]) == 32 * int(found[2]) > 128


@pytest.mark.kin(4)
@pytest.mark.compile
def test_explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ptx, sass = tmp_path / "k.ptx", tmp_path / "k.sass"
    assert main(["explain", "--m", "256", "--n", "512", "--k", "64", "--block", "64x64x32", "--warp", "32x32x16", "--layout",
                 "tn", "--d-dtype", "f32", "--config", "--ptx", str(ptx), "--sass", str(sass)]) == 0
    said = capsys.readouterr().out
    found = rows(said)
    assert "D (256 x 512) = A (256 x 64) @ B (64 x 512)" in said
    assert found["operator"] == ["MMAOp()"]
    assert found["block"] == ["64x64x32 (M, N, K): 4 x 8 blocks, 2 k-tiles"]
    assert found["warp"] == ["32x32x16 (M, N, K): 2 x 4 fragments of 16x8x16, 1 deep"]
    assert found["global A, B -> D"] == ["ColMajor('float16'), RowMajor('float16') -> RowMajor('float32')"]
    blocks = int(found["all together"][-1])
    assert blocks == min(int(found[limit][-1]) for limit in ("registers", "threads", "shared memory", "hardware")) >= 1
    assert int(found["registers a thread"][0]) > 16 and found["stack a thread"] == ["0 bytes"]
    assert "HMMA" in found["by opcode"][0] and int(found["instructions"][0]) > 100
    assert "get_config(" in said and "block_shape=Tile(M=64, N=64, K=32)" in said
    assert "mma.sync" in ptx.read_text() and "HMMA" in sass.read_text()


@pytest.mark.kin(4)
def test_explain_says_how_many_blocks_share_k(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--m", "64", "--n", "64", "--k", "9000", "--a-dtype", "float32"]) == 0
    assert rows(capsys.readouterr().out)["shared K"] == ["66 blocks, by way of a workspace, for each, 5 steps or fewer a block"]


@pytest.mark.kin(4)
@pytest.mark.compile
def test_explain_of_a_stack_says_how_many_launches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--m", "64", "--n", "64", "--k", "32", "--batch", "6", "--a-dtype", "float32", "--block", "32x32x32"]) == 0
    assert "6 in one launch, 24 tiles" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "operator"), [
    ([], "WGMMAOp("),
    (["--a-dtype", "bf16"], "WGMMAOp("),
    (["--block", "128x128x32"], "MMAOp()"),
    (["--a-dtype", "bf16", "--warp", "64x32x16"], "MMAOp(dtype='bfloat16')"),
    (["--accumulator", "f16"], "MMAOp(accumulator='float16')"),
    (["--operator", "fpu"], "FPUOp("),
    (["--operator", "wmma", "--layout", "nt"], "WMMAOp(a_order='row'"),
    (["--a-dtype", "f32"], "FPUOp("),
    (["--a-dtype", "int8", "--accumulator", "int32"], "FPUOp("),
    (["--a-dtype", "f32", "--b-dtype", "f64"], "FPUOp("),
], ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_explain_chooses_the_operator_asked_for(arguments: list[str], operator: str) -> None:
    import argparse

    commands = argparse.ArgumentParser().add_subparsers()
    options = cli.add_explain(commands).parse_args(arguments)
    assert repr(cli.subject(options, H100).conf.operator).startswith(operator)


# -- demo --------------------------------------------------------------------------------------------------------------

class Example:
    """Stands for a module of `examples`."""

    def __init__(self, result: bool):
        self.result, self.emulate = result, "not called"

    def main(self, emulate: Any) -> bool:
        self.emulate = emulate
        return self.result


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have `demo` run other examples, which a function finds by name."""
    return partial(monkeypatch.setattr, cli, "_example")


@pytest.mark.parametrize("failing", [None, *cli.EXAMPLES])
def test_demo_fails_with_an_example(failing: str | None, demo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    examples = {name: Example(name != failing) for name in cli.EXAMPLES}
    demo(examples.__getitem__)
    assert main(["demo", "--emulate"]) == (0 if failing is None else 1)
    said = capsys.readouterr().out
    assert [e.emulate for e in examples.values()] == [True] * len(examples) and "Emulating" in said
    assert ("All are as they must be" if failing is None else f"Not as it must be: {failing}") in said


def test_demo_of_some_examples(demo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    examples = {name: Example(True) for name in cli.EXAMPLES}
    demo(examples.__getitem__)
    assert main(["demo", "attention", "digits", "--emulate"]) == 0
    assert {name for name, e in examples.items() if e.emulate != "not called"} == {"attention", "digits"}
    assert main(["demo", "atention"]) == 2
    assert "example 'atention' is none of hydrogen_chain, digits, " in capsys.readouterr().err


def test_demo_says_when_there_is_no_gpu(demo: Any, gpus: Set, capsys: pytest.CaptureFixture[str]) -> None:
    example = Example(True)
    demo(lambda name: example)
    gpus(absence="the driver lists no device")
    assert main(["demo"]) == 0 and example.emulate is None
    assert capsys.readouterr().out.startswith("No GPU (the driver lists no device). The kernels run in the emulator")


def test_demo_runs_the_examples() -> None:
    for name in cli.EXAMPLES:
        assert cli._example(name) is importlib.import_module(f"examples.{name}")


def test_demo_away_from_the_source_tree(monkeypatch: pytest.MonkeyPatch, replaced: Seeded, tmp_path: Path,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    """There they are a package beside gemmkit, or are not there."""
    replaced(gk, "__file__", str(tmp_path / "gemmkit" / "__init__.py"))
    monkeypatch.setitem(sys.modules, "gemmkit_examples", None)             # it may be installed
    assert main(["demo", "--emulate"]) == 2
    assert "neither beside the package" in capsys.readouterr().err
    installed = tmp_path / "gemmkit_examples"
    installed.mkdir()
    (installed / "__init__.py").touch()
    (installed / "hydrogen_chain.py").write_text("def main(emulate): return emulate")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("gemmkit_examples", "gemmkit_examples.hydrogen_chain"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert main(["demo", "hydrogen_chain", "--emulate"]) == 0
    assert main(["demo", "hydrogen_chain"]) == 1


def test_demo_without_the_data(monkeypatch: pytest.MonkeyPatch, replaced: Seeded, capsys: pytest.CaptureFixture[str]) -> None:
    """What needs none is run, the rest is named, with the way to it; an example that is asked for by name is refused."""
    ran: list[str] = []
    replaced(cli, "_lacks", lambda name: "sklearn" if cli.NEEDS[name] == "sklearn.datasets" else None)
    with monkeypatch.context() as patch:
        patch.setattr(cli, "_example", lambda name: ran.append(name) or Example(True))
        assert main(["demo", "--emulate"]) == 0
    said = capsys.readouterr().out.replace("\n", " ")
    assert ran == ["hydrogen_chain", "shortest_paths"]
    assert "Left out: digits (sklearn is not installed), " in said and "pip install 'gemmkit[demo]'" in said
    assert main(["demo", "digits", "--emulate"]) == 2
    assert "pip install 'gemmkit[demo]'" in capsys.readouterr().err
