"""Processes over a group that run the scenarios of a module, and say of each what went wrong: two, or as many as are asked for.

A scenario is a function ``(rank)`` named ``check_...``, which asserts. The processes are started once for all of a module's
scenarios: importing PyTorch takes longer than they do.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
HANGS = 150                                    # seconds
UNENDED = "it did not come to an end"
ALL_GPUS = "GEMMKIT_TEST_GPUS"                 # how many a machine has, of which a worker of xdist sees one (tests/conftest.py)


def scenarios(module: Any) -> list[str]:
    """In the order of the file."""
    return [name for name in vars(module) if name.startswith("check_")]


def run_chosen(request: Any, module: Any, folder: Path, timeout: float = 300.0, backend: str = "gloo",
               apart: bool = False, count: int = RANKS) -> dict[str, list[str]]:
    """What each rank says of each scenario of ``module`` that the requesting module's tests have as their ``name`` in this
    session: nothing where all is right. After ``timeout`` seconds the ranks are ended, and what they have not said is not lost
    on what they have.

    With ``apart`` each scenario has processes of its own, all at once: on a GPU, where what takes long is compiling. Of the
    workers of xdist the first to ask runs all scenarios, and the others wait for what it finds: four that each ran all of
    them started 100 processes, and took 60 s for a test.
    """
    chosen = {item.callspec.params["name"] for item in request.session.items if item.path == request.path}
    names = [name for name in scenarios(module) if name in chosen]
    shared = folder.parent.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    place = shared / f"{module.__name__}-{backend}-{count}"
    said = place / "said.json"
    try:
        place.mkdir()
    except FileExistsError:
        return _said_to_another(said, timeout + HANGS)
    found: Any = None
    try:
        found = _run(names, module, place, timeout, backend, apart, count)
    finally:
        said.with_suffix(".part").write_text(json.dumps(found), encoding="utf-8")
        said.with_suffix(".part").replace(said)
    return found


def _said_to_another(said: Path, timeout: float) -> Any:
    """What the ranks have said to the worker that runs them."""
    end = time.monotonic() + timeout
    while not said.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"no worker has written {said}")
        time.sleep(0.1)
    found = json.loads(said.read_text(encoding="utf-8"))
    assert found is not None, "the worker that ran the scenarios failed"
    return found


def _run(names: list[str], module: Any, folder: Path, timeout: float, backend: str, apart: bool,
         count: int) -> dict[str, list[str]]:
    groups = [[name] for name in names] if apart else [names]
    folders = [folder / str(n) for n in range(len(groups))]
    started = [process for place, group in zip(folders, groups, strict=True)
               for process in _start(module.__name__, place, backend, group, count)]
    end = time.monotonic() + timeout
    try:
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
    finally:
        for process in started:
            process.kill()
    said = [dict(json.loads(line) for place in folders for line in _lines(place / f"{rank}.jsonl")) for rank in range(count)]
    return {name: [of.get(name, UNENDED) for of in said] for name in names}


def assert_right(said: list[str], ended: int | None = None) -> None:
    """No rank of a scenario says that anything is wrong, but for one that the scenario ends. (All that is wrong is shown: a
    rank's error is often another one's end.)"""
    wrong = [f"rank {rank}: {error or 'it came to an end'}" for rank, error in enumerate(said)
             if error != (UNENDED if rank == ended else "")]
    assert not wrong, "\n".join(wrong)


def _start(module: str, folder: Path, backend: str, names: list[str], count: int) -> list[Any]:
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count),
           "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"}
    if ALL_GPUS in env:
        del env["CUDA_VISIBLE_DEVICES"]
    return [subprocess.Popen([sys.executable, "-m", "tests.support.ranks", module, str(folder), backend, *names], cwd=ROOT,
                             env={**env, "RANK": str(rank)}) for rank in range(count)]


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def main(module: str, folder: str, backend: str, *names: str) -> None:
    import torch
    import torch.distributed as dist

    import gemmkit as gk

    faulthandler.dump_traceback_later(HANGS, exit=False)           # where a rank that does not come to an end is
    rank = int(os.environ["RANK"])
    found = importlib.import_module(module)
    on_gpu = backend != "gloo"                     # "nccl": a GPU for each rank; "shared": one for both
    if on_gpu:
        torch.cuda.set_device(rank if backend == "nccl" else 0)
    dist.init_process_group("nccl" if backend == "nccl" else "gloo", timeout=timedelta(seconds=60 if on_gpu else 20))
    getattr(found, "prepare", lambda: None)()
    session = contextlib.nullcontext() if on_gpu else gk.emulate()
    with open(Path(folder) / f"{rank}.jsonl", "w", buffering=1, encoding="utf-8") as out, session:
        for name in names:
            try:
                getattr(found, name)(rank)
                said = ""
            except Exception:
                said = traceback.format_exc()
            out.write(json.dumps([name, said]) + "\n")
    os._exit(0)                                # a scenario may have lost the other rank: no farewell


if __name__ == "__main__":
    main(*sys.argv[1:])
