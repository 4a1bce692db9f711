"""Kernels of a layer, by Inductor and by gemmkit's backend."""
import sys, torch, collections
import gemmkit.torch
from bench.compiled import works, called
for name in ("layer 1 x 2048", "layer 1 x 2048, train"):
    work = works("cuda", False)[name]()
    if name == "layer 1 x 2048":
        with torch.no_grad(): print(gemmkit.torch.explain(work.function, *work.inputs), flush=True)
    else: print(gemmkit.torch.explain(work.function, *work.inputs), flush=True)
    for backend in ("inductor", "gemmkit"):
        torch._dynamo.reset()
        step = called(torch.compile(work.function, dynamic=False, fullgraph=True, backend=backend), work)
        for _ in range(5): step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
            for _ in range(5): step()
            torch.cuda.synchronize()
        print("==", name, backend)
        rows = sorted(((e.self_device_time_total / 5, e.count / 5, e.key[:90]) for e in p.key_averages()), reverse=True)
        print(f"total {sum(r[0] for r in rows):.1f} us")
        for t, c, k in rows[:24]: print(f"{t:9.1f} us {c:5.1f} {k}", flush=True)
