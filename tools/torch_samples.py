"""PyTorch's own samples of products, attention, norms and softmaxes (those of its OpInfo tests) through `gemmkit.torch`.

    python -m tools.torch_samples                                      # in the emulator
    python -m tools.torch_samples --device cuda
    python -m tools.torch_samples --only softmax --dtypes float16 float32

Each result, and each gradient and second derivative where the dtype has them, is compared with PyTorch's own function of the
same numbers in float64 or complex128; integers must be equal to PyTorch's. A sample is

| counted as | where |
|---|---|
| right | dtype, shape and numbers are PyTorch's |
| refused | gemmkit raises an error that says so, before anything is launched; the errors are printed |
| random | dropout, which draws other numbers each time |
| wrong | anything else: other numbers, another shape or dtype, an error of another kind |

The exit status is 1 if a sample is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import types
import unittest
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import gemmkit as gk
from gemmkit import torch as gt

REFUSALS = NotImplementedError, TypeError, ValueError      # `ConfigError` and `ComponentError` are such
#: How far a number may be from float64's, of the largest one of a result.
BOUNDS = {torch.float64: 1e-12, torch.complex128: 1e-12, torch.float32: 1e-5, torch.complex64: 1e-5, torch.float16: 4e-3,
          torch.bfloat16: 3e-2}
DTYPES = "float16", "bfloat16", "float32", "float64", "complex64", "int8", "int64"
#: How far a gradient may be: each is a sum of more that was rounded.
GRADIENTS = 4
Call = Callable[..., Any]


# --------------------------------------------------------------------------------------------------
# What gemmkit computes, by the names of PyTorch's samples: of a sample's input, arguments and keywords.

def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    layer = gt.Linear(weight.shape[1], weight.shape[0], bias is not None, device=x.device, dtype=x.dtype)
    given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    return torch.func.functional_call(layer, given, (x,))


def _addmm(c: Any, a: Any, b: Any, *, alpha: float = 1, beta: float = 1) -> Any:
    return gt.matmul(alpha * a, b, beta * c)


def _normed(norm: Call) -> Call:
    """A norm of the last axes, as one of the last: a view of them."""
    def normed(x: Any, shape: Any, *vectors: Any, **more: Any) -> Any:
        given = [v if v is None else v.flatten() for v in vectors]
        given += [more.pop(name).flatten() for name in ("weight", "bias") if more.get(name) is not None]
        return norm(x.flatten(-len(shape)), *given, **more).view(x.shape)

    return normed


def _layer_norm(x: Any, *vectors: Any, eps: float = 1e-5) -> Any:
    return gt.layernorm(x, *vectors, eps=eps)


def _rms_norm(x: Any, *vectors: Any, eps: float | None = None) -> Any:
    return gt.rmsnorm(x, *vectors, eps=torch.finfo(x.dtype).eps if eps is None else eps)


def _softmaxed(softmax: Call) -> Call:
    def softmaxed(x: Any, dim: int, dtype: Any = None) -> Any:
        x = x if dtype is None else x.to(dtype)
        return softmax(x) if not x.dim() else softmax(x.movedim(dim, -1)).movedim(-1, dim)

    return softmaxed


WORKS: dict[str, Call] = {
    "matmul": gt.matmul, "mm": gt.matmul, "bmm": gt.matmul, "mv": gt.matmul, "dot": gt.matmul,
    "__rmatmul__": lambda b, a: gt.matmul(a, b), "addmm": _addmm, "addmv": _addmm, "baddbmm": _addmm,
    "einsum": lambda operands, spec: gk.einsum(spec, *operands), "nn.functional.linear": _linear,
    "nn.functional.layer_norm": _normed(_layer_norm), "nn.functional.rms_norm": _normed(_rms_norm),
    "softmax": _softmaxed(gt.softmax), "log_softmax": _softmaxed(gt.log_softmax),
    "nn.functional.scaled_dot_product_attention": gt.scaled_dot_product_attention,
}
#: Which record no gradient.
FORWARD = "einsum",
#: Which are asked no whole numbers: a layer's parameters are none, and einsum's results have NumPy's types (a sum of int8 is
#: int8, where PyTorch has int64).
NO_INTEGERS = "einsum", "nn.functional.linear"


# --------------------------------------------------------------------------------------------------
# Samples.

def samples_of(name: str, dtype: torch.dtype, device: str) -> Iterator[Any]:
    """PyTorch's samples, without any where it has none of the dtype."""
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:    # a base class, not used here
        made: Any = types.ModuleType("expecttest")
        made.TestCase = unittest.TestCase
        sys.modules["expecttest"] = made
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        if op.name == name and dtype in op.dtypes and op.variant_test_name in ("", "with_dtype", "decomposed"):
            # (PyTorch draws them from its own state, so that they are the same each time)
            torch.manual_seed(0)
            yield from ((op, x) for x in op.sample_inputs(device, dtype, requires_grad=False))


def each(tree: Any, function: Call) -> Any:
    """A sample's operands with a function of each tensor."""
    if isinstance(tree, (list, tuple)):
        return type(tree)(each(x, function) for x in tree)
    if isinstance(tree, dict):
        return {name: each(x, function) for name, x in tree.items()}
    return function(tree) if isinstance(tree, torch.Tensor) else tree


def wide(x: torch.Tensor) -> torch.Tensor:
    kind = torch.complex128 if x.is_complex() else torch.float64 if x.is_floating_point() else x.dtype
    return x.detach().to(kind)


def tensors(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def take(x: torch.Tensor) -> None:
        found.append(x)

    each(tree, take)
    return found


class Outcome(NamedTuple):
    what: str                          # right, refused, random or wrong
    why: str = ""


def differs(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, factor: float = 1.0) -> str:
    """Why ``found`` is not ``wanted``, which is of float64, rounded to ``dtype``; "" where it is."""
    if found.dtype != dtype or found.shape != wanted.shape:
        return f"{found.dtype} {tuple(found.shape)}, where PyTorch has {dtype} {tuple(wanted.shape)}"
    if dtype not in BOUNDS:
        return "" if torch.equal(found, wanted.to(dtype)) else "other whole numbers"
    if not wanted.numel():
        return ""
    if not torch.equal(found.isnan(), wanted.isnan()):
        return "NaN in other places"
    there = ~wanted.isnan()
    off, largest = (found.to(wanted.dtype) - wanted)[there].abs(), wanted[there].abs()
    if not off.numel() or bool((off <= factor * BOUNDS[dtype] * largest.max().clamp_min(1.0)).all()):
        return ""
    return f"off by {float(off.max()):.3g}, and the largest is {float(largest.max()):.3g}"


def outcome(name: str, op: Any, sample: Any, dtype: torch.dtype) -> Outcome:
    """How a sample goes by gemmkit."""
    given = sample.input, sample.args, sample.kwargs
    if given[2].get("dropout_p"):
        return Outcome("random")
    has_gradient = dtype.is_floating_point and name not in FORWARD and given[2].get("dtype") is None

    def computed(function: Call, operands: Any) -> Any:
        first, args, keywords = operands
        return function(first, *args, **keywords)

    def leaf(x: torch.Tensor) -> torch.Tensor:
        return x.requires_grad_() if has_gradient and x.is_floating_point() else x

    exact = each(given, lambda x: leaf(wide(x)))
    own = each(given, lambda x: leaf(x.detach().clone()))
    wanted, kind = computed(op.op, exact), computed(op.op, given).dtype
    try:
        found = computed(WORKS[name], own)
        why = differs(found.detach(), wanted.detach(), kind)
        if not why and has_gradient and wanted.requires_grad:
            ours, theirs, factor = [found], [wanted], 1
            inputs, of_exact = ([x for x in tensors(tree) if x.requires_grad] for tree in (own, exact))
            for order in ("a gradient", "a second derivative"):
                to, factor = [torch.randn_like(x) for x in ours], factor * GRADIENTS
                ours, theirs = gradients(ours, inputs, to), gradients(theirs, of_exact, [x.double() for x in to])
                for x, one, other in zip(inputs, ours, theirs):
                    said = differs(one.detach(), other.detach(), x.dtype, factor)
                    why = why or (said and f"{order}: {said}")
    except REFUSALS as error:
        return Outcome("refused", f"{type(error).__name__}: {error}")
    except (RuntimeError, AssertionError, LookupError, AttributeError, ArithmeticError) as error:
        return Outcome("wrong", f"{type(error).__name__}: {error}")
    return Outcome("wrong", why) if why else Outcome("right")


def gradients(results: Any, inputs: Any, grads: Any) -> Any:
    """Of the inputs; zeros, where no result depends on one."""
    made = [(y, grad) for y, grad in zip(results, grads) if y.requires_grad]
    if not made:
        return [torch.zeros_like(x) for x in inputs]
    of, toward = zip(*made)
    return torch.autograd.grad(of, inputs, toward, create_graph=True, allow_unused=True, materialize_grads=True)


def told(sample: Any) -> str:
    return str(each((sample.input, sample.args, sample.kwargs), lambda x: (tuple(x.shape), tuple(x.stride()))))


def main(arguments: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(prog="python -m tools.torch_samples", description=__doc__.splitlines()[0])
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cpu: in the emulator")
    made.add_argument("--only", nargs="+", default=list(WORKS), choices=list(WORKS), metavar="NAME")
    made.add_argument("--dtypes", nargs="+", default=DTYPES)
    options = made.parse_args(arguments)
    totals: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    # (of PyTorch's kinds of attention this one has second derivatives)
    with gk.emulate() if options.device == "cpu" else contextlib.nullcontext(), sdpa_kernel(SDPBackend.MATH):
        for name in options.only:
            counts: Counter[str] = Counter()
            for dtype in (getattr(torch, one) for one in options.dtypes):
                if name in NO_INTEGERS and not (dtype.is_floating_point or dtype.is_complex):
                    continue
                for op, sample in samples_of(name, dtype, options.device):
                    what, why = outcome(name, op, sample, dtype)
                    counts[what] += 1
                    if what == "refused":
                        refusals[f"{name}: {why}"] += 1
                    if what == "wrong":
                        print(f"  {name} of {dtype}, {told(sample)}: {why}", flush=True)
            totals += counts
            print(f"{name:44} " + ", ".join(f"{count} {what}" for what, count in sorted(counts.items())), flush=True)
    for why, count in refusals.most_common():
        print(f"  refused {count} x {why[:220]}")
    print(f"{sum(totals.values())} samples: " + ", ".join(f"{count} {what}" for what, count in sorted(totals.items())))
    return 1 if totals["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
