"""The caller's side of the process that runs candidates (`gemmkit.tuner.device_process`).

Each request has a time limit. A process that dies or does not answer is ended, and the next request starts another one,
with the caller's arrays copied anew.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gemmkit.tuner.jobs import Job, Memory

START_S = 120.0                        # to start, and to copy arrays
MODULE = "gemmkit.tuner.device_process"


class Failed(Exception):
    """A candidate that faulted, hung, or was refused by the driver: its reason is the text."""


class Measuring:
    """Runs and times jobs on copies of ``contents``, which are the bytes of the buffers of ``memory``.

    ``command`` starts the process; two numbers of open files and the device's ordinal are appended.
    """

    def __init__(self, memory: Memory, contents: Sequence[bytes], varied: Sequence[int], ordinal: int,
                 command: Sequence[str] = (sys.executable, "-m", MODULE)):
        self._memory, self._contents, self._varied = memory, contents, varied
        self._ordinal, self._command = ordinal, tuple(command)
        self._process: Any = None
        self._errors: Any = None                              # what the process writes there
        self._jobs: dict[int, Job] = {}                       # kept for a process that has to start anew
        self._loaded: set[int] = set()

    def __enter__(self) -> Measuring:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- requests

    def keep(self, number: int, job: Job) -> None:
        """A job under a number; it is loaded when it is first asked for."""
        self._jobs[number] = job

    def forget(self, number: int) -> None:
        self._jobs.pop(number, None)
        if number in self._loaded:
            self._loaded.discard(number)
            self._ask("forget", (number,), START_S)

    def result(self, number: int, seconds: float) -> list[bytes]:
        """What a job writes: the bytes of each buffer that is written. Raises Failed."""
        self._load(number, seconds)
        found: list[bytes] = self._ask("result", (number,), seconds)
        return found

    def pairs(self, one: int, other: int, count: int, target: float, seconds: float) -> list[tuple[float, float]]:
        """The times of two jobs in turns, in microseconds of a launch. Raises Failed."""
        self._load(one, seconds)
        self._load(other, seconds)
        found: list[tuple[float, float]] = self._ask("pairs", (one, other, count, target), seconds)
        return found

    def _load(self, number: int, seconds: float) -> None:
        if self._process is None:
            self._start()
        if number not in self._loaded:
            self._ask("job", (number, self._jobs[number]), seconds)
            self._loaded.add(number)

    # -- the process

    def _start(self) -> None:
        self._errors = tempfile.TemporaryFile()
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        paths = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[2]), *sys.path]))
        try:
            self._process = subprocess.Popen(
                [*self._command, str(theirs_in), str(theirs_out), str(self._ordinal)], pass_fds=(theirs_in, theirs_out),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._errors,
                env={**os.environ, "PYTHONPATH": paths})
        except BaseException:
            os.close(ours_out)
            os.close(ours_in)
            self._errors.close()
            raise
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self._requests, self._answers = Connection(ours_out, readable=False), Connection(ours_in, writable=False)
        self._loaded.clear()
        self._ask("memory", (self._memory.buffers, list(self._contents), list(self._varied)), START_S)

    def _ask(self, name: str, arguments: tuple[Any, ...], seconds: float) -> Any:
        try:
            self._requests.send((name, arguments))
            if not self._answers.poll(seconds):
                self.close()
                raise Failed(f"it did not end within {seconds:g} s")
            is_right, answer = self._answers.recv()
        except (EOFError, OSError):
            reason = f"its process died with status {self._process.wait()}{self._last_words()}"
            self.close()
            raise Failed(reason) from None
        if not is_right:
            self.close()                                      # after a fault every call of the driver fails
            raise Failed(str(answer))
        return answer

    def _last_words(self) -> str:
        """The last line that the process wrote of an error."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return "".join([f" ({line.strip()})" for line in lines if line.strip()][-1:])

    def close(self) -> None:
        """End the process."""
        if self._process is None:
            return
        process, self._process = self._process, None
        self._loaded.clear()
        process.kill()
        process.wait()
        self._requests.close()
        self._answers.close()
        self._errors.close()
