"""`gemmkit.torch.scaled_mm`: scales of every kind beside float64, what is refused, transforms, and PyTorch's own on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from gemmkit.torch import scaled_mm  # noqa: E402

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
M, N, K = 70, 136, 260
KINDS = ["one", "one element", "lines", "blocks along K", "square blocks"]


def drawn(*shape: int, device: str = "cpu", dtype: Any = torch.float32) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(device)


def scales(kind: str, m: int, k: int, device: str = "cpu") -> Any:
    """Those of rows of A, as a view that has NaN beside it."""
    shape = {"one": (), "one element": (1, 1), "lines": (m, 1), "blocks along K": (m, -(-k // 128)),
             "square blocks": (-(-m // 128), -(-k // 128))}[kind]
    if not shape:
        return torch.tensor(0.75, device=device)
    held = torch.full((shape[0] + 1, 2 * shape[1] + 1), torch.nan)
    held[1:, 1::2] = torch.rand(shape, generator=torch.Generator().manual_seed(m + k)) + 0.5
    return held.to(device)[1:, 1::2]


def wide(x: Any, scale: Any) -> Any:
    """The operand with its scales, in float64."""
    if scale.numel() == 1:
        return x.double() * scale.double()
    for axis in (0, 1):
        times = 1 if scale.shape[axis] in (1, x.shape[axis]) else 128
        scale = scale.repeat_interleave(times, axis)[:x.shape[0], :x.shape[1]]
    return x.double() * scale.double()


def check(of_a: str, of_b: str, device: str, *, sizes: tuple[int, int, int] = (M, N, K), b_dtype: Any = E4M3, most: float = 2.0**-12,
          bias_dtype: Any = None, out_dtype: Any = BF16, **how: Any) -> None:
    m, n, k = sizes
    a, b = drawn(m, k, device=device, dtype=E4M3), drawn(n, k, device=device, dtype=b_dtype).t()
    scale_a, scale_b = scales(of_a, m, k, device), scales(of_b, n, k, device).t()
    bias = None if bias_dtype is None else drawn(n, device=device, dtype=bias_dtype)
    a64, b64 = wide(a, scale_a), wide(b, scale_b)
    wanted = a64 @ b64 if bias is None else a64 @ b64 + bias.double()
    for _ in range(2):                                     # the second call is a known one
        found = scaled_mm(a, b, scale_a, scale_b, bias, out_dtype=out_dtype, **how)
        assert found.dtype == out_dtype and found.shape == (m, n)
        bound = most * (a64.abs() @ b64.abs()) + torch.finfo(out_dtype).eps * wanted.abs()
        assert bool(((found.double() - wanted).abs() <= bound).all())


PAIRS = [("one", "one element"), ("lines", "lines"), ("one", "lines"), ("blocks along K", "square blocks"),
         ("blocks along K", "blocks along K"), ("square blocks", "blocks along K"), ("square blocks", "square blocks")]


@pytest.mark.sample(2)
@pytest.mark.parametrize("of_a, of_b", PAIRS)
def test_scales(of_a: str, of_b: str, in_the_emulator: None) -> None:
    check(of_a, of_b, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("of_a, of_b", PAIRS)
def test_scales_on_a_gpu(of_a: str, of_b: str) -> None:
    for sizes in ((M, N, K), (1024, 1536, 2048), (4096, 7168, 512), (1, 2112, 1024), (64, 2112, 7168)):
        check(of_a, of_b, "cuda", sizes=sizes)


FORMS: list[dict[str, Any]] = [
    dict(b_dtype=E5M2, out_dtype=torch.float16), dict(bias_dtype=BF16), dict(bias_dtype=torch.float32, out_dtype=torch.float32),
    dict(use_fast_accum=True, most=2.0**-8)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", FORMS, ids=lambda how: ", ".join(how))
@pytest.mark.parametrize("of_a, of_b", [("lines", "lines"), ("blocks along K", "square blocks")])
def test_forms(of_a: str, of_b: str, how: dict[str, Any], in_the_emulator: None) -> None:
    check(of_a, of_b, "cpu", sizes=(40, 48, 140), **how)


@pytest.mark.gpu
@pytest.mark.parametrize("how", FORMS, ids=lambda how: ", ".join(how))
@pytest.mark.parametrize("of_a, of_b", [("lines", "lines"), ("blocks along K", "square blocks")])
def test_forms_on_a_gpu(of_a: str, of_b: str, how: dict[str, Any]) -> None:
    for sizes in ((1000, 1008, 1040), (77, 131, 499)):
        check(of_a, of_b, "cuda", sizes=sizes, **how)


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
def test_it_is_pytorchs_own(fast: bool) -> None:
    a, b = drawn(1024, 2048, device="cuda", dtype=E4M3), drawn(1536, 2048, device="cuda", dtype=E4M3).t()
    for kind in ("one", "lines"):
        scale_a, scale_b = scales(kind, 1024, 2048, "cuda").contiguous(), scales(kind, 1536, 2048, "cuda").t().contiguous()
        wanted = torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=BF16, use_fast_accum=fast)
        found = scaled_mm(a, b, scale_a, scale_b, use_fast_accum=fast)
        assert (found.double() - wanted.double()).abs().max() <= 2e-2 * wanted.double().abs().max()


@pytest.mark.gpu
def test_graphs() -> None:
    """The host reads no scale: a graph takes others when it runs again."""
    a, b = drawn(128, 512, device="cuda", dtype=E4M3), drawn(256, 512, device="cuda", dtype=E4M3).t()
    for kind in ("one element", "lines", "blocks along K"):
        scale_a, scale_b = scales(kind, 128, 512, "cuda").contiguous(), scales(kind, 256, 512, "cuda").t().contiguous()
        scaled_mm(a, b, scale_a, scale_b)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = scaled_mm(a, b, scale_a, scale_b)
        for factor in (2.0, 0.5):
            scale_a.mul_(factor)
            graph.replay()
            wanted = wide(a, scale_a) @ wide(b, scale_b)
            assert (found.double() - wanted).abs().max() <= 1e-2 * wanted.abs().max()


def test_one_tensor_may_be_both_scales(in_the_emulator: None) -> None:
    """A call that is known by a tensor in two places is not that of two tensors."""
    a, b, two = torch.ones(4, 128).to(E4M3), torch.ones(8, 128).to(E4M3).t(), torch.tensor(2.0)
    assert scaled_mm(a, b, two, two)[0, 0] == 512
    assert scaled_mm(a, b, two, torch.tensor(3.0))[0, 0] == 768


def test_sizes_of_nothing(in_the_emulator: None) -> None:
    for m, n, k in ((0, 16, 128), (16, 0, 128), (16, 16, 0)):
        a, b = drawn(m, k, dtype=E4M3), drawn(n, k, dtype=E4M3).t()
        for of_a, of_b in (("one", "one"), ("lines", "lines"), ("blocks along K", "square blocks")):
            found = scaled_mm(a, b, scales(of_a, m, k), scales(of_b, n, k).t())
            assert found.shape == (m, n) and not found.any()


def test_transforms(in_the_emulator: None) -> None:
    """A batch is one launch after the other; a tensor without data has a result without; compilers see one operator."""
    a, b = drawn(2, 9, 256).to(E4M3), drawn(16, 256, dtype=E4M3).t()
    scale_a, scale_b = torch.rand(2, 9, 2), torch.rand(2, 1)
    found = torch.func.vmap(lambda x, s: scaled_mm(x, b, s, scale_b))(a, scale_a)
    assert torch.equal(found, torch.stack([scaled_mm(x, b, s, scale_b) for x, s in zip(a, scale_a)]))
    assert scaled_mm(*(x.to("meta") for x in (a[0], b, scale_a[0], scale_b)), out_dtype=torch.float32).dtype == torch.float32
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: scaled_mm(x, b, scale_a[0], scale_b))(a[0]).graph
    assert torch.ops.gemmkit.scaled_mm.default in [node.target for node in graph.nodes]
    torch.library.opcheck(torch.ops.gemmkit.scaled_mm.default, (a[0], b, scale_a[0], scale_b, None, BF16, False),
                          test_utils="test_faketensor")


OPERANDS = dict(mat_a=torch.zeros(70, 256).to(E4M3), mat_b=torch.zeros(40, 256).to(E4M3).t(), scale_a=torch.ones(70, 2),
                scale_b=torch.ones(2, 1))


@pytest.mark.parametrize("change, error, words", [
    (dict(mat_a=[[1.0]]), TypeError, "mat_a is a list; gemmkit.torch.scaled_mm takes tensors"),
    (dict(mat_a=torch.zeros(70, 256)), TypeError, "mat_a has dtype torch.float32; float8_e4m3fn or float8_e5m2"),
    (dict(mat_b=torch.zeros(256, 40).half()), TypeError, "mat_b has dtype torch.float16"),
    (dict(mat_b=torch.zeros(128, 40).to(E4M3)), ValueError, r"mat_b has shape \(128, 40\); \(M, K\) and \(K, N\) are needed"),
    (dict(scale_a=torch.ones(70, 2).half()), TypeError, "scale_a has dtype torch.float16; float32 is needed"),
    (dict(scale_b=torch.ones(2, 1, dtype=torch.float64)), TypeError, "scale_b has dtype torch.float64; float32 is needed"),
    (dict(scale_a=torch.ones(70)), ValueError, r"scale_a has shape \(70,\) and scale_b has shape \(2, 1\); a product of 70 x 40 x 256"),
    (dict(scale_a=torch.ones(70, 1)), ValueError, r"\(70, 2\) or \(1, 2\) beside \(2, 40\) or \(2, 1\)"),
    (dict(scale_b=torch.ones(1, 40)), ValueError, r"takes one element or \(70, 1\) beside one element or \(1, 40\)"),
    (dict(scale_b=torch.ones(2, 1, device="meta")), ValueError, "scale_b is on meta and a on cpu"),
    (dict(bias=torch.ones(41)), ValueError, r"bias has shape \(41,\) and dtype torch.float32; \(40,\)"),
    (dict(bias=torch.ones(40, dtype=torch.int32)), ValueError, r"bias has shape \(40,\) and dtype torch.int32"),
    (dict(out_dtype=E4M3), TypeError, "out_dtype=torch.float8_e4m3fn: bfloat16, float16 or float32 is needed"),
    (dict(scale_a=torch.ones(70, 2, requires_grad=True)), NotImplementedError, "scale_a requires a gradient"),
])
def test_what_is_refused(change: dict[str, Any], error: type[Exception], words: str, in_the_emulator: None) -> None:
    with pytest.raises(error, match=words):
        scaled_mm(**{**OPERANDS, **change})
