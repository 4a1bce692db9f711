"""On the H200: BlockSparse by lists (target: 5x dense at 90 % empty, 4096, f16), experts, Gather and Scatter. JSON to $OUT."""
import dataclasses, json, os, time, traceback
import torch
import gemmkit as gk
from gemmkit import Tile, layouts, operators

T0, res = time.time(), {}
OUT = os.environ.get("OUT", "/tmp/sparse.json")
OUT = os.path.join(OUT, "sparse.json") if os.path.isdir(OUT) else OUT


def graph(f, n=10):
    for _ in range(2):
        f()
    torch.cuda.synchronize()
    g, s = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(s):
        f(); torch.cuda.synchronize()
        with torch.cuda.graph(g, stream=s):
            for _ in range(n):
                f()
    return g


def timed(fs, n=10, rounds=9):
    gs = {}
    for k, f in fs.items():
        try:
            gs[k] = graph(f, n)
        except Exception:
            print(k, "FAILED", traceback.format_exc()[-700:], flush=True)
    out = {k: [] for k in gs}
    for _ in range(rounds):
        for k, g in gs.items():
            s, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            s.record(); g.replay(); e.record(); torch.cuda.synchronize()
            out[k].append(s.elapsed_time(e) / n * 1e3)
    return {k: round(sorted(v)[len(v) // 2], 2) for k, v in out.items()}


def step(name, f):
    try:
        res[name] = f()
    except Exception:
        res[name] = traceback.format_exc()[-1500:]
    print(f"[{time.time() - T0:.0f} s]", name, res[name], flush=True)
    json.dump(res, open(OUT, "w"), indent=1)


def conf(m, n, k, schedule, warps, blocks, cluster=(1, 1), **kw):
    l = layouts.RowMajor("float16")
    return gk.get_config(operator=operators.WGMMAOp(n, dtype="float16"), global_a_layout=l, global_b_layout=l, global_d_layout=l,
                         kernel="warp_specialised", block_shape=Tile(M=m, N=n, K=k), schedule=schedule, warps_per_block=warps,
                         cluster=Tile(M=cluster[0], N=cluster[1]), condition=blocks.condition("a"), **kw)


def operands(n, blk, share, seed=1):
    g = torch.Generator(device="cuda").manual_seed(seed)
    mask = torch.rand((-(-n // blk[0]), -(-n // blk[1])), device="cuda", generator=g) < share
    x = torch.randint(-2, 3, (n, n), device="cuda", generator=g).half()
    b = torch.randint(-2, 3, (n, n), device="cuda", generator=g).half()
    there = mask.repeat_interleave(blk[0], 0).repeat_interleave(blk[1], 1)[:n, :n]
    return gk.BlockSparse(torch.where(there, x, torch.nan), mask, blk), torch.where(there, x, 0), x, b


def right(a, dense, b, c):
    d = torch.full((a.shape[0], b.shape[1]), float("nan"), device="cuda", dtype=torch.float16)
    gk.matmul(a, b, conf=c, out=d)
    return bool(torch.equal(d.double(), (dense.double() @ b.double()).half().double()))


SHAPES = {"128x256 coop": (128, 256, 64, "cooperative", 8), "128x128 pp": (128, 128, 64, "pingpong", 8),
          "128x192 coop": (128, 192, 64, "cooperative", 8), "128x128 coop": (128, 128, 64, "cooperative", 8),
          "64x256 pp": (64, 256, 64, "pingpong", 8), "128x256 1x2": (128, 256, 64, "cooperative", 8, (1, 2)),
          "128x128 pp 1x2": (128, 128, 64, "pingpong", 8, (1, 2)), "128x128x128 pp": (128, 128, 128, "pingpong", 8)}


def variants(n, blk, share, names):
    a, dense, x, b = operands(n, blk, share)
    out, fs, said = torch.empty_like(x), {}, {"filled": round(float(a.mask.float().mean()), 4)}
    for name in names:
        m, nn, k, sched, warps, *cl = SHAPES[name]
        try:
            bl = a
            c = conf(m, nn, k, sched, warps, a, *cl)
            c = dataclasses.replace(c, condition=type(c.condition)(a.mask, *a.block, False)) if False else c
            plain = dataclasses.replace(c, condition=gk.kernels.spec.Condition())
            ordered = bl.longest_first("a", plain)
            for tag, cc in ((name, plain), (name + " longest", ordered)):
                said[tag] = right(bl, dense, b, cc)
                p = gk.plan(bl, b, conf=cc, out=out)
                fs[tag] = lambda p=p, cc=cc: p(bl, b, out=out)
        except Exception:
            said[name] = traceback.format_exc()[-600:]
    p = gk.plan(a, b, out=out)
    fs["default"] = lambda: p(a, b, out=out)
    pd = gk.plan(x, b, out=out)
    fs["gemmkit dense"] = lambda: pd(x, b, out=out)
    fs["torch dense"] = lambda: torch.matmul(x, b, out=out)
    return said, timed(fs)


def host():
    """Microseconds of Python for a call, without the GPU's time (small product)."""
    a, dense, x, b = operands(256, (128, 128), 0.5)
    out = torch.empty_like(x)
    p, pd = gk.plan(a, b, out=out), gk.plan(x, b, out=out)
    got = {}
    for k, f in {"matmul sparse": lambda: gk.matmul(a, b, out=out), "plan sparse": lambda: p(a, b, out=out),
                 "matmul dense": lambda: gk.matmul(x, b, out=out), "plan dense": lambda: pd(x, b, out=out)}.items():
        f(); torch.cuda.synchronize(); t = time.perf_counter()
        for _ in range(200):
            f()
        got[k] = round((time.perf_counter() - t) / 200 * 1e6, 1); torch.cuda.synchronize()
    return got


def experts(count, tokens, d, f):
    g = torch.Generator(device="cuda").manual_seed(3)
    share = torch.rand(count, device="cuda", generator=g) ** 2
    which = torch.multinomial(share, tokens, replacement=True, generator=g)
    order = which.argsort(stable=True).int()
    sizes = torch.bincount(which, minlength=count).tolist()
    offs = [0]
    for s in sizes:
        offs.append(offs[-1] + s)
    x = torch.randint(-2, 3, (tokens, d), device="cuda", generator=g).half()
    w = torch.randint(-2, 3, (count, d, f), device="cuda", generator=g).half()
    routed, out, ref = x[order.long()], torch.full((tokens, f), float("nan"), device="cuda", dtype=torch.float16), None
    xs = [routed[i:j] for i, j in zip(offs, offs[1:])]
    outs, ws = [out[i:j] for i, j in zip(offs, offs[1:])], [w[e] for e in range(count)]
    gk.grouped(xs, ws, out=outs)
    ref = torch.cat([xs[e].double() @ ws[e].double() for e in range(count)]).half()
    ok = bool(torch.equal(out.double(), ref.double()))

    def loop():
        for e in range(count):
            if sizes[e]:
                torch.matmul(xs[e], ws[e], out=outs[e])

    def whole_loop():
        for e in range(count):
            if sizes[e]:
                torch.matmul(x[order[offs[e]:offs[e + 1]].long()], ws[e], out=outs[e])
    fs = {"grouped": lambda: gk.grouped(xs, ws, out=outs), "torch loop": loop, "torch loop with gather": whole_loop}
    if hasattr(torch, "_grouped_mm"):
        ends = torch.tensor(offs[1:], device="cuda", dtype=torch.int32)
        xb, wb = routed.bfloat16(), w.bfloat16()
        fs["torch._grouped_mm bf16"] = lambda: torch._grouped_mm(xb, wb, offs=ends)
    return {"right": ok, "sizes": [min(sizes), max(sizes)]}, timed(fs, 3, 5)


def moved(rows, of, n, k):
    g = torch.Generator(device="cuda").manual_seed(2)
    x = torch.randint(-2, 3, (of, k), device="cuda", generator=g).half()
    w = torch.randint(-2, 3, (k, n), device="cuda", generator=g).half()
    index = torch.randperm(of, device="cuda", generator=g)[:rows].int()
    long, y, out = index.long(), torch.zeros((of, n), device="cuda", dtype=torch.float16), torch.empty((rows, n), device="cuda").half()
    a, s = gk.Gather(x, index), gk.Scatter(y, index, check=True)
    said, ref = {}, (x[long].double() @ w.double()).half().double()
    gk.matmul(a, w, out=s)
    expected = torch.zeros_like(y).double(); expected[long] = ref
    said["gather and scatter right"] = bool(torch.equal(y.double(), expected))
    for kind in (gk.Gather, gk.Scatter):
        try:
            kind(x, torch.tensor([0, of, -1], device="cuda", dtype=torch.int32), check=True); said[kind.__name__] = "not refused"
        except IndexError as error:
            said[kind.__name__] = str(error)
    p, q, r, dense = gk.plan(a, w, out=s), gk.plan(a, w, out=out), gk.plan(x[:rows], w, out=s), gk.plan(x[:rows], w, out=out)
    said["mappings"] = [str(z.config.block_shape) + z.config.kernel for z in (p, q, r, dense)]
    return said, timed({"gather+scatter": lambda: p(a, w, out=s), "gather": lambda: q(a, w, out=out),
                        "scatter": lambda: r(x[:rows], w, out=s), "dense": lambda: dense(x[:rows], w, out=out),
                        "torch index, matmul, index_put": lambda: y.__setitem__(long, torch.matmul(x[long], w)),
                        "torch matmul": lambda: torch.matmul(x[:rows], w, out=out)})


step("host", host)
step("90 % empty, 128x128", lambda: variants(4096, (128, 128), 0.1, list(SHAPES)))
step("90 % empty, 128x64", lambda: variants(4096, (128, 64), 0.1, ["128x256 coop", "128x128 pp"]))
step("90 % empty, 256x256", lambda: variants(4096, (256, 256), 0.1, ["128x256 coop", "128x128 pp"]))
step("90 % empty, 64x64", lambda: variants(4096, (64, 64), 0.1, []))
step("experts 64 x 1024 x 4096", lambda: experts(64, 4096, 1024, 4096))
step("experts 64 x 1024 x 1024", lambda: experts(64, 4096, 1024, 1024))
step("50 % empty, 128x128", lambda: variants(4096, (128, 128), 0.5, ["128x256 coop", "128x128 pp"]))
step("gather, scatter 2048 of 8192", lambda: moved(2048, 8192, 4096, 1024))
step("full, 128x128", lambda: variants(4096, (128, 128), 2.0, ["128x256 coop"]))
step("odd 4000", lambda: variants(4000, (128, 128), 0.1, ["128x256 coop"]))
