"""CuPy's own tests of its products, run with gemmkit behind them (`gemmkit.cupy.use`), on a GPU.

    python -m tools.cupy_tests                                 # fetch CuPy's source distribution, run its tests
    python -m tools.cupy_tests --fetch FOLDER                  # only put the tests there, for a machine without a network
    python -m tools.cupy_tests --tests FOLDER --seconds 50 -n 14

The tests are those of the source distribution of the version that is installed (or of ``--version``), and are never kept in
this repository. What fails is run again without gemmkit: what fails there, too, is CuPy's. With ``--seconds`` the tests come
in a random order of a fixed seed, and those that are not reached are counted. Most of the time goes into compiling: CuPy's
tests multiply small matrices of each dtype, and `-n` processes share the cache on disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

TESTS = ("tests/cupy_tests/linalg_tests/test_product.py", "tests/cupy_tests/linalg_tests/test_einsum.py",
         "tests/cupy_tests/math_tests/test_matmul.py", "tests/cupy_tests/test_cublas.py")
OTHERS = ("tests/conftest.py", "pyproject.toml")           # what pytest is told of by CuPy: warnings, markers
COUNTS, DEADLINE, BEHIND, PART = (f"GEMMKIT_CUPY_{name}" for name in ("COUNTS", "DEADLINE", "BEHIND", "PART"))
NOT_REACHED = "not reached"
NO_TESTS = 5                           # pytest's exit status where a process got none
GRACE = 10.0                           # seconds for the tests that run when the time is up
TOLD_EVERY = 5.0


def fetch(folder: Path, version: str) -> None:
    """Put CuPy's tests into a folder, from its source distribution, which pip downloads.

    Raises RuntimeError where pip, or the archive, has none.
    """
    with tempfile.TemporaryDirectory() as place:
        # pip asks the source for its metadata. The stub lets it answer without CUDA's headers; nothing is built.
        done = subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "cupy", "--dest", place,
                               f"cupy=={version}"], env={**os.environ, "CUPY_INSTALL_USE_STUB": "1"}, text=True,
                              capture_output=True)
        archives = list(Path(place).glob("cupy-*.tar.gz"))
        if done.returncode or not archives:
            raise RuntimeError(f"pip download cupy=={version}: {done.stderr[-2000:]}")
        extract(archives[0], folder)


def extract(archive: Path, folder: Path) -> None:
    """The tests of a source distribution, all into one folder. Raises RuntimeError where one is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as source:
        found = {name.partition("/")[2]: name for name in source.getnames()}
        for path in (*TESTS, *OTHERS):
            member = source.extractfile(found[path]) if path in found else None
            if member is None:
                raise RuntimeError(f"{archive.name} has no {path}")
            (folder / Path(path).name).write_bytes(member.read())


def run(folder: Path, chosen: Sequence[str], processes: int, seconds: float | None, behind: bool,
        told: Callable[[dict[str, Any]], object] = lambda counts: None) -> dict[str, Any]:
    """Run tests, ``chosen`` by their ids, each process a part of them, and add up what the processes counted.

    ``told`` is called with the counts so far, every few seconds. A test that still runs `GRACE` seconds after the time is
    ended with its process, and "ended" counts these; what their processes had counted before is kept.
    """
    many = max(1, processes)
    with tempfile.TemporaryDirectory() as counts:
        path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        said = {COUNTS: counts, BEHIND: str(int(behind)), "PYTHONPATH": path}
        end = float("inf") if seconds is None else time.time() + seconds
        if seconds is not None:
            said[DEADLINE] = str(end)
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--no-header", "-p", "no:cacheprovider", "-p",
                   "tools.cupy_tests", "-c", str(folder / "pyproject.toml"), "--rootdir", str(folder),
                   *(str(folder / name) for name in chosen)]
        started = []
        for n in range(many):
            with open(Path(counts) / f"{n}.txt", "w") as output:
                started.append(subprocess.Popen(command, env={**os.environ, **said, PART: f"{n}/{many}"}, stdout=output,
                                                stderr=subprocess.STDOUT, start_new_session=True))
        next_told = time.time() + TOLD_EVERY
        while any(one.poll() is None for one in started) and time.time() < end + GRACE:
            time.sleep(0.2)
            if time.time() > next_told:
                next_told += TOLD_EVERY
                told(_counted(Path(counts)))
        ended = [one for one in started if one.poll() is None]
        for one in ended:
            with contextlib.suppress(ProcessLookupError):      # (it may just have come to its end)
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()
        texts = [(Path(counts) / f"{n}.txt").read_text(errors="replace") for n in range(many)]
        found = _counted(Path(counts))
    failing = [text for text, one in zip(texts, started) if one.returncode not in (0, NO_TESTS)] or texts
    return {**found, "ended": len(ended), "said": "\n".join(text[-6000 // len(failing):] for text in failing),
            "rc": max(one.returncode for one in started)}


def _counted(folder: Path) -> dict[str, Any]:
    """What the processes have counted so far."""
    return added(json.loads(path.read_text()) for path in folder.glob("*.json"))


def added(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The sum of what processes counted.

    >>> one = {"outcomes": {"passed": 1}, "failed": ["x"], "calls": {"dot": 2}, "left": {}}
    >>> added([one, one])["calls"], added([one, one])["failed"]
    ({'dot': 4}, ['x', 'x'])
    """
    found: dict[str, Any] = {"outcomes": Counter(), "failed": [], "calls": Counter(), "left": Counter()}
    for part in parts:
        for name, total in found.items():
            if isinstance(total, Counter):
                total.update(part[name])
            else:
                total += part[name]
    return {name: dict(x) if isinstance(x, Counter) else x for name, x in found.items()}


# -- the plugin of pytest that this module is in the processes of `run` -----------------------------------------------------

_outcomes: Counter[str] = Counter()
_failed: list[str] = []
_using: list[Any] = []


def _is_told() -> bool:
    return COUNTS in os.environ


def pytest_configure(config: Any) -> None:
    if _is_told() and os.environ[BEHIND] == "1":
        from gemmkit.cupy import use

        _using.append(use(least=0))


def pytest_collection_modifyitems(items: list[Any]) -> None:
    if not _is_told():
        return
    if DEADLINE in os.environ:
        random.Random(0).shuffle(items)
    part, parts = map(int, os.environ[PART].split("/"))
    items[:] = items[part::parts]


def pytest_runtest_setup(item: Any) -> None:
    if time.time() > float(os.environ.get(DEADLINE, "inf")):
        import pytest

        pytest.skip(NOT_REACHED)


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        reached = not (report.skipped and NOT_REACHED in str(report.longrepr))
        _outcomes[report.outcome if reached else NOT_REACHED] += 1
        if report.failed:
            _failed.append(report.nodeid)
        if _is_told() and reached:
            _write()


def pytest_sessionfinish(session: Any) -> None:
    for using in _using:
        using.stop()
    if _is_told():
        _write()


def _write() -> None:
    """Put what has been counted so far where `run` finds it: whole, whenever it looks, and kept if this process is ended."""
    calls: Counter[str] = Counter()
    left: Counter[str] = Counter()
    for using in _using:
        calls.update(using.calls)
        for (name, reason), count in using.left.items():
            left[f"{name}: {reason[:150]}"] += count
    found = dict(outcomes=_outcomes, failed=_failed, calls=calls, left=left)
    place = Path(os.environ[COUNTS]) / f"{os.getpid()}.json"
    place.with_suffix(".new").write_text(json.dumps(found))
    place.with_suffix(".new").replace(place)


# -- the command --------------------------------------------------------------------------------------------------------

def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.cupy_tests", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", help="of CuPy; default: that which is installed")
    parser.add_argument("--fetch", type=Path, metavar="FOLDER", help="put the tests there, and run none")
    parser.add_argument("--tests", type=Path, metavar="FOLDER", help="where --fetch has put them; default: fetch them now")
    parser.add_argument("--seconds", type=float, help="start no test after so many")
    parser.add_argument("-n", type=int, default=0, help="processes, each of which runs a part of the tests (default: 1)")
    parser.add_argument("chosen", nargs="*", help="files or ids of tests; default: all four files")
    told = parser.parse_args(arguments)
    version = told.version or _installed()
    if told.fetch:
        fetch(told.fetch, version)
        print(f"{len(TESTS)} files of CuPy {version} are in {told.fetch}")
        return 0
    with tempfile.TemporaryDirectory() as place:
        folder = (told.tests or Path(place)).absolute()
        if told.tests is None:
            fetch(folder, version)
        chosen = told.chosen or [Path(path).name for path in TESTS]
        start = time.time()

        def tell(counts: dict[str, Any]) -> None:
            computed = sum(counts["calls"].values())
            print(f"{time.time() - start:.0f} s: {counts['outcomes']}, computed by gemmkit: {computed}", flush=True)

        first = run(folder, chosen, told.n, told.seconds, behind=True, told=tell)
        print(first["said"])
        print(json.dumps({name: first[name] for name in ("outcomes", "ended", "calls", "left")}, indent=1), flush=True)
        alone = run(folder, first["failed"], told.n, told.seconds, behind=False) if first["failed"] else added([])
    ours = sorted(set(first["failed"]) - set(alone["failed"]))
    print(json.dumps({"failed": ours, "failed without gemmkit, too": sorted(alone["failed"])}, indent=1))
    return int(bool(ours) or not first["outcomes"].get("passed"))


def _installed() -> str:
    from importlib.metadata import packages_distributions, version

    names = packages_distributions().get("cupy")
    if not names:
        raise SystemExit("CuPy is not installed; give --version")
    return version(names[0])


if __name__ == "__main__":
    sys.exit(main())
