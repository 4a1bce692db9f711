"""What Table 1 of the paper counts of a launch, by Nsight Compute: accesses to global memory, instructions of tensor cores.

    python -m bench.counted                  runs each work under ncu, and prints its counts as JSON
    python -m bench.counted run WORK         launches the work once between the profiler's start and stop; ncu runs this

Works: "diagonal" (gemmkit, D = diag(a) B + C), "product" (gemmkit, D = A B + C) and "cublas" (cuBLASLt, the same as
"product" of the materialised matrix). A in float16, C and D in float32, N = 4096.

A transfer by TMA is no access of a thread, so accesses are counted where both arrive: at the L2, in sectors of 32 bytes.
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

WORKS = "diagonal", "product", "cublas"
METRICS = {
    "seconds": "gpu__time_duration.sum",
    "instructions": "smsp__inst_executed.sum",
    "L2 sectors read": "lts__t_sectors_op_read.sum",
    "L2 sectors written": "lts__t_sectors_op_write.sum",
    "DRAM bytes read": "dram__bytes_read.sum",
    "DRAM bytes written": "dram__bytes_write.sum",
    "global loads of threads": "smsp__inst_executed_op_global_ld.sum",
    "global stores of threads": "smsp__inst_executed_op_global_st.sum",
}
TENSOR = "sm__inst_executed_pipe_tensor"       # metrics of tensor cores begin so; which there are differs by GPU


def launch(work: str, n: int = 4096) -> None:
    """Compile and launch it once before the profiler looks, and once while it does."""
    import numpy as np
    import torch

    import gemmkit
    from bench.cublas import CublasLt
    from gemmkit.layouts import Diagonal

    torch.manual_seed(0)
    diagonal = torch.randn(n, device="cuda", dtype=torch.float16)
    a, b = torch.diag(diagonal), torch.randn(n, n, device="cuda", dtype=torch.float16)
    c, out = (torch.randn(n, n, device="cuda") for _ in range(2))
    lt: Any = CublasLt(torch) if work == "cublas" else None

    def call() -> None:
        if work == "diagonal":
            gemmkit.matmul(diagonal, b, c, out=out, global_a_layout=Diagonal(np.float16))
        elif work == "product":
            gemmkit.matmul(a, b, c, out=out)
        else:
            lt(a, b, c, out)

    for _ in range(2):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    wanted = diagonal[:, None].double() * b.double() + c.double()
    assert float((out.double() - wanted).abs().max()) < 1e-2, "the result is wrong"


def available(text: str) -> dict[str, str]:
    """`METRICS` that ncu has, by its list of names, and those of tensor cores."""
    names = {line.split()[0] for line in text.splitlines() if line.strip()}
    found = {title: metric for title, metric in METRICS.items() if metric.rpartition(".")[0] in names}
    return found | {f"tensor instructions {name[len(TENSOR):]}".rstrip(): f"{name}.sum"
                    for name in sorted(names) if name.startswith(TENSOR)}


def counts(work: str, metrics: dict[str, str]) -> dict[str, float]:
    """Of one launch, under ncu. Raises RuntimeError if it has measured nothing."""
    command = ["ncu", "--csv", "--page", "raw", "--profile-from-start", "off", "--clock-control", "none", "--print-units",
               "base", "--metrics", ",".join(metrics.values()), sys.executable, "-m", "bench.counted", "run", work]
    made = subprocess.run(command, capture_output=True, text=True, timeout=180)
    return parsed(made.stdout, metrics, made.stderr)


def parsed(text: str, metrics: dict[str, str], errors: str = "") -> dict[str, float]:
    """The sums over all kernels of ncu's raw page."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(io.StringIO("\n".join(lines))))[1:]              # the first has units
    if not rows:
        raise RuntimeError(f"ncu has measured no launch: {text[-500:]}{errors[-500:]}")
    found = {"kernels": float(len(rows))}
    for name, metric in metrics.items():
        values = [row.get(metric, "n/a") for row in rows]
        if all(value not in ("", "n/a", None) for value in values):
            found[name] = sum(float(value.replace(",", "")) for value in values)
    return found


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["run"]:
        launch(arguments[1])
        return 0
    metrics = available(subprocess.run(["ncu", "--query-metrics"], capture_output=True, text=True, timeout=60).stdout)
    print(json.dumps({work: counts(work, metrics) for work in WORKS}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
