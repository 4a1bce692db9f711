"""Compiles programs each in a process that has seen no other: `Fresh` starts a server that forks one for every program.

The server has imported gemmkit and compiled a kernel without any code of the user's, so a program costs a fork and what is
its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


class Fresh:
    """``ptx(source)``: the PTX of the program's ``Step()`` by a process of its own."""

    def __enter__(self) -> Fresh:
        environment = {**os.environ, "GEMMKIT_CACHE": "0"}
        self._server = subprocess.Popen([sys.executable, "-m", "tests.stale.fresh"], cwd=ROOT, env=environment, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(60)
        self._server.stdout.close()

    def ptx(self, source: str) -> str:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(source) + "\n")
        self._server.stdin.flush()
        answer: dict[str, Any] = json.loads(self._server.stdout.readline())
        assert "ptx" in answer, answer
        return str(answer["ptx"])


def serve() -> None:
    from gemmkit.transforms import Identity
    from tests.stale import edits
    from tests.stale.kernel import ptx_of

    ptx_of(Identity())
    for line in sys.stdin:
        if os.fork() == 0:
            try:
                module = edits.load_source(json.loads(line), "users_program")
                answer = {"ptx": ptx_of(module.Step())}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), flush=True)
            os._exit(0)
        os.wait()


if __name__ == "__main__":
    serve()
