"""The result file of a measurement, its schema, and the table that is printed last.

A file is `{"bench", "date", "commit", "device", "driver", "versions", "rows": [...]}`; `ROW` lists what each row has.
Rows and the file may have further keys. `ratio` is peer / ours: above 1, ours is faster. `commit` is the code that ran, and
`graph` tells whether both sides were launched from CUDA graphs.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Schema = Mapping[str, type | tuple[type, ...]]
NUMBER = (int, float)
DOCUMENT: Schema = {
    "bench": str, "date": str, "commit": str, "device": str, "driver": str, "versions": dict, "rows": list,
}  # fmt: skip
ROW: Schema = {
    "work": str, "dtype": str, "m": int, "n": int, "k": int, "layout": str,
    "ours_us": NUMBER, "peer": str, "peer_us": NUMBER, "ratio": NUMBER, "error": NUMBER,
    "graph": bool,
}  # fmt: skip
LAYOUTS = ("nn", "nt", "tn", "tt")

PACKAGES = (
    "gemmkit", "numba-cuda", "numba", "numpy", "cuda-core", "cuda-bindings", "cuda-toolkit",
    "nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cublas", "torch", "cupy-cuda12x", "cupy-cuda13x",
)  # fmt: skip


def document(bench: str, rows: Sequence[Mapping[str, Any]], device: str, **further: Any) -> dict[str, Any]:
    """A result file's content, with the date (UTC), commit, driver and versions of this run filled in."""
    return {
        "bench": bench,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "device": device,
        "driver": driver(),
        "versions": versions(),
        **further,
        "rows": [dict(row) for row in rows],
    }


def commit() -> str:
    """The commit of the code that runs: GEMMKIT_COMMIT where it is set (a copy of the tree has no .git), else git's answer.

    Raises:
        RuntimeError: neither is there. A result without its commit cannot be repeated.
    """
    named = os.environ.get("GEMMKIT_COMMIT", "")
    if named:
        return named
    root = Path(__file__).parent.parent
    try:
        command = ["git", "describe", "--always", "--abbrev=8", "--dirty"]
        return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as problem:
        raise RuntimeError(f"{root} is no git checkout; set GEMMKIT_COMMIT to the commit that is measured") from problem


def driver() -> str:
    """The NVIDIA driver's version, or "none" where there is no driver."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return "none"
    return answer[0] if answer else "none"


def versions() -> dict[str, str]:
    """The versions of Python and of every installed package that can move a result."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def validate(content: Mapping[str, Any]) -> None:
    """Check a result file's content against the schema.

    Raises:
        ValueError: naming the key, what it has, and what it must have.
    """

    def check(where: str, mapping: Mapping[str, Any], schema: Schema) -> None:
        for key, kind in schema.items():
            if key not in mapping:
                raise ValueError(f"{where}: the key {key!r} is missing; it has {sorted(mapping)}")
            value = mapping[key]
            if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
                raise ValueError(f"{where}: {key!r} is {value!r}, of a wrong type ({type(value).__name__})")
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{where}: {key!r} is {value}, must be finite")

    check("the result file", content, DOCUMENT)
    try:
        datetime.datetime.fromisoformat(content["date"])
    except ValueError as problem:
        raise ValueError(
            f"the result file: 'date' is {content['date']!r}, must be an ISO 8601 date"
        ) from problem
    for i, row in enumerate(content["rows"]):
        where = f"row {i}"
        if not isinstance(row, Mapping):
            raise ValueError(f"{where}: is {row!r}, must be an object")
        check(where, row, ROW)
        if row["layout"] not in LAYOUTS:
            raise ValueError(f"{where}: 'layout' is {row['layout']!r}, must be one of {', '.join(LAYOUTS)}")
        if min(row["m"], row["n"], row["k"]) < 0 or row["error"] < 0:
            raise ValueError(f"{where}: sizes and errors must not be negative")
        for key in ("ours_us", "peer_us", "ratio"):
            if row[key] <= 0:
                raise ValueError(f"{where}: {key!r} is {row[key]}, must be positive")


def results_path(bench: str, out: str | os.PathLike[str] | None = None) -> Path:
    """Where the result file of `bench` goes: the file or folder `out`, else $OUT, else bench/results."""
    if out is not None and Path(out).suffix == ".json":
        return Path(out)
    folder = out or os.environ.get("OUT") or Path(__file__).parent / "results"
    return Path(folder) / f"{bench}.json"


def write(content: Mapping[str, Any], path: Path) -> None:
    """Validate and write a result file; a reader never sees half of one."""
    validate(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    partial.replace(path)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and validate a result file."""
    content = json.loads(Path(path).read_text())
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds a {type(content).__name__}, must hold an object")
    validate(content)
    return content


def table(content: Mapping[str, Any]) -> str:
    """The rows as text, one a line, with a line above that says on what they were measured."""
    header = ["work", "dtype", "m", "n", "k", "layout", "ours us", "peer us", "ratio", "spread"]
    header += ["TFLOP/s", "error", "peer"]
    lines = [header]
    for row in content["rows"]:
        lines.append([
            row["work"], row["dtype"], str(row["m"]), str(row["n"]), str(row["k"]), row["layout"],
            f"{row['ours_us']:.2f}", f"{row['peer_us']:.2f}", f"{row['ratio']:.3f}",
            f"{row['spread']:.3f}" if "spread" in row else "",
            f"{row['tflops']:.1f}" if "tflops" in row else "",
            f"{row['error']:.1e}", row["peer"],
        ])  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    left = {0, 1, 5, len(header) - 1}
    text = [
        "  ".join(
            cell.ljust(w) if i in left else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    machine = f"{content['device']}, driver {content['driver']}, {content['date']}"
    title = f"{content['bench']}: {machine}; ratio = peer / ours"
    return "\n".join([title, *(line.rstrip() for line in text)])
