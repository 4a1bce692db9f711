"""Operators of `gemmkit.torch` with what PyTorch computes in their place: types x structures x epilogues.

Imported where PyTorch is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

import gemmkit as gk
import gemmkit.torch
from gemmkit import epilogues as ep
from gemmkit.operators import algebra as semiring

M, N, K = 5, 4, 3
#: Of the largest element, the error that a dtype may leave.
TOLERANCE = {torch.float16: 6e-3, torch.bfloat16: 5e-2, torch.float32: 2e-5, torch.float64: 1e-12, torch.complex128: 1e-12}
_numbers = itertools.count()


@dataclass(frozen=True)
class Case:
    """An operator and its reference, of (a, b, c, *operands); operands are those of the epilogue."""

    name: str
    told: dict[str, Any]
    reference: Callable[..., Any]
    dtype: Any = torch.float64
    shapes: tuple[tuple[int, ...], ...] = ((M, K), (K, N))
    operands: tuple[tuple[int, ...], ...] = field(default=())
    c: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"{self.name}-{str(self.dtype).removeprefix('torch.')}"

    @property
    def is_exact(self) -> bool:
        """Whether differences of it tell derivatives (gradcheck)."""
        return self.dtype in (torch.float64, torch.complex128)

    def operator(self) -> Any:
        return gk.torch.op(name=f"tests::operator{next(_numbers)}", **self.told)

    def tensors(self, device: str, seed: int = 0) -> tuple[list[Any], Any]:
        """a, b and the operands, and c or None: random, with gradients."""
        random = torch.Generator().manual_seed(seed)

        def one(shape: tuple[int, ...]) -> Any:
            drawn = torch.randn(shape, generator=random, dtype=torch.complex128 if self.dtype.is_complex else torch.float64)
            return drawn.to(self.dtype).to(device).requires_grad_()

        return [one(shape) for shape in (*self.shapes, *self.operands)], None if self.c is None else one(self.c)


def _epilogue(make: Callable[..., Any] | None) -> dict[str, Any]:
    return {} if make is None else {"epilogue": make}


def _leaky(slope: Any) -> ep.Epilogue:
    return ep.Elementwise(lambda x, m, n: x if x > 0 else x * slope[m])


#: name -> (epilogue, PyTorch's, shapes of its operands)
EPILOGUES: dict[str, tuple[Any, Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "none": (None, lambda x: x, ()),
    "bias": (lambda bias: ep.Bias(bias), lambda x, o: x + o, ((N,),)),
    "bias of rows": (lambda bias: ep.Bias(bias, along="M"), lambda x, o: x + o[:, None], ((M,),)),
    "bias, gelu": (lambda bias: ep.Bias(bias) | ep.GELU(), lambda x, o: F.gelu(x + o), ((N,),)),
    "gelu of tanh": (ep.GELU("tanh"), lambda x: F.gelu(x, approximate="tanh"), ()),
    "silu": (ep.SiLU(), F.silu, ()),
    "tanh": (ep.Tanh(), torch.tanh, ()),
    "bias, relu": (lambda bias: ep.Bias(bias) | ep.ReLU(), lambda x, o: F.relu(x + o), ((N,),)),
    "clamp": (ep.Clamp(-0.5, 0.75), lambda x: x.clamp(-0.5, 0.75), ()),
    "scale": (ep.Scale(-1.5), lambda x: x * -1.5, ()),
    "scale by a vector": (lambda by: ep.Scale(by) | ep.Tanh(), lambda x, o: torch.tanh(x * o), ((N,),)),
    "residual": (lambda r: ep.SiLU() | ep.Residual(r), lambda x, o: F.silu(x) + o, ((M, N),)),
    "causal": (ep.CausalMask(0.0), lambda x: torch.tril(x), ()),
    "band": (ep.Where(lambda m, n: abs(m - n) <= 1, 0.0), lambda x: torch.triu(torch.tril(x, 1), -1), ()),
    "function": (ep.Elementwise(lambda x: x * x + 1 / (1 + abs(x))), lambda x: x * x + 1 / (1 + x.abs()), ()),
    "slopes": (_leaky, lambda x, o: torch.where(x > 0, x, x * o[:, None]), ((M,),)),
    "two operands": (lambda by, bias: ep.Scale(by, along="M") | ep.Bias(bias) | ep.GELU(),
                     lambda x, by, bias: F.gelu(x * by[:, None] + bias), ((M,), (N,))),
}


def _dense(reference: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b, c, *operands: reference(a @ b if c is None else a @ b + c, *operands)


def _symmetric(x: Any, half: Callable[..., Any], strictly: int) -> Any:
    return half(x) + half(x, strictly).mT


def _unit(x: Any) -> Any:
    return torch.triu(x, 1) + torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)


#: name -> (what op() is told, PyTorch's product, shapes of a and b)
STRUCTURES: dict[str, tuple[dict[str, Any], Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "diagonal A": (dict(a=gk.layouts.DiagonalMatrix), lambda a, b, c: torch.diag(a) @ b, ((M,), (M, N))),
    "diagonal B": (dict(b=gk.layouts.DiagonalMatrix), lambda a, b, c: a @ torch.diag(b), ((M, N), (N,))),
    "lower A": (dict(a=gk.layouts.TriangularMatrix), lambda a, b, c: torch.tril(a) @ b, ((M, M), (M, N))),
    "upper B": (dict(b=lambda x: gk.layouts.TriangularMatrix(x, "upper")), lambda a, b, c: a @ torch.triu(b), ((M, N), (N, N))),
    "unit upper A": (dict(a=lambda x: gk.layouts.TriangularMatrix(x, "upper", unit=True)), lambda a, b, c: _unit(a) @ b, ((M, M), (M, N))),
    "symmetric A": (dict(a=gk.layouts.SymmetricMatrix), lambda a, b, c: _symmetric(a, torch.tril, -1) @ b, ((M, M), (M, N))),
    "symmetric B": (dict(b=lambda x: gk.layouts.SymmetricMatrix(x, "upper")), lambda a, b, c: a @ _symmetric(b, torch.triu, 1),
                    ((M, N), (N, N))),
}
#: name -> (semiring, PyTorch's of (M, K, 1) and (1, K, N) along K)
SEMIRINGS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "min-plus": (semiring.MIN_PLUS, lambda a, b: (a[:, :, None] + b[None]).amin(1)),
    "max-plus": (semiring.MAX_PLUS, lambda a, b: (a[:, :, None] + b[None]).amax(1)),
    "widest path": (semiring.Semiring(max, min, -math.inf), lambda a, b: torch.minimum(a[:, :, None], b[None]).amax(1)),
    "max-times": (semiring.MAX_TIMES, lambda a, b: (a[:, :, None] * b[None]).amax(1).clamp(min=0)),
}
STACKS = {
    "stack": (((2, M, K), (2, K, N)), None), "stack of A": (((2, M, K), (K, N)), None),
    "stack of B": (((M, K), (2, K, N)), None), "broadcast": (((2, 1, M, K), (3, K, N)), None),
    "c": (((M, K), (K, N)), (M, N)), "stack and c": (((2, M, K), (2, K, N)), (2, M, N)),
}
NARROW = "none", "bias", "bias, gelu", "bias, relu", "silu", "residual", "slopes"


def cases() -> list[Case]:
    """All of them."""
    out = [Case(name, _epilogue(make), _dense(of), operands=operands) for name, (make, of, operands) in EPILOGUES.items()]
    out += [Case(name, told, of, shapes=shapes) for name, (told, of, shapes) in STRUCTURES.items()]
    out += [Case(name, told, of, torch.complex128, shapes) for name, (told, of, shapes) in STRUCTURES.items() if "unit" not in name]
    for after in ("bias, gelu", "silu"):
        make, of, operands = EPILOGUES[after]
        out += [Case(f"{name}, {after}", {**told, **_epilogue(make)}, lambda a, b, c, *rest, of=of, first=first: of(first(a, b, c), *rest),
                     shapes=shapes, operands=operands) for name, (told, first, shapes) in STRUCTURES.items()]
    out += [Case(name, dict(operator=operator), lambda a, b, c, of=of: of(a, b), dtype) for name, (operator, of) in SEMIRINGS.items()
            for dtype in (torch.float64, torch.float32)]
    out += [Case(name, {}, _dense(lambda x: x), dtype, shapes, c=c) for name, (shapes, c) in STACKS.items()
            for dtype in (torch.float64, torch.complex128)]
    for name in ("none", "bias", "scale"):
        make, of, operands = EPILOGUES[name]
        out.append(Case(name, _epilogue(make), _dense(of), torch.complex128, operands=operands))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        out += [Case(name, _epilogue(EPILOGUES[name][0]), _dense(EPILOGUES[name][1]), dtype, operands=EPILOGUES[name][2])
                for name in NARROW]
    return out


def check(case: Case, device: str, fast: bool, opcheck: bool) -> float:
    """D and all gradients against PyTorch's in float64, derivatives against differences, the operator by PyTorch's own
    checks. Returns the largest error."""
    f = case.operator()
    given, c = case.tensors(device)
    tensors = [*given, *(() if c is None else (c,))]
    d = f(*given, c=c)
    wide = [x.detach().to(torch.promote_types(x.dtype, torch.float64)).requires_grad_() for x in tensors]
    of_c = None if c is None else wide[-1]
    expected = case.reference(wide[0], wide[1], of_c, *wide[2:len(given)])
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device)
    assert d.shape == expected.shape and d.dtype == case.dtype
    (d * weights.to(d.dtype)).sum().abs().backward()
    (expected * weights).sum().abs().backward()
    worst = _error(d, expected)
    for x, y in zip(tensors, wide):
        assert x.grad is not None and x.grad.shape == x.shape and x.grad.dtype == x.dtype
        worst = max(worst, _error(x.grad, y.grad))
    assert worst <= TOLERANCE[case.dtype], f"{case}: an error of {worst}"
    if case.is_exact:
        fresh, other = case.tensors(device, seed=2)
        inputs = (*fresh, *(() if other is None else (other,)))
        count = len(fresh)
        assert torch.autograd.gradcheck(lambda *x: f(*x[:count], c=x[count] if other is not None else None), inputs, fast_mode=fast,
                                        nondet_tol=1e-12)
    if opcheck:
        for operator in (f._plain, f._keeping):
            if operator is not None:
                torch.library.opcheck(operator.operator, (given[0], given[1], c, *given[2:]), atol=1e-2 if not case.is_exact else 1e-8,
                                      rtol=1e-2 if not case.is_exact else 1e-8)
    return worst


def _error(found: Any, expected: Any) -> float:
    return float((found.detach() - expected.detach()).abs().max() / expected.detach().abs().max().clamp(min=1e-30))
