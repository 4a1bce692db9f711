"""``gemmkit::scaled_mm``: products of 8-bit floats with scales, as an operator of PyTorch's."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch

from gemmkit.epilogues import Bias, Epilogue, Scale
from gemmkit.functions.matmul import Door
from gemmkit.operators.wgmma import BLOCK, BlockScaledOp
from gemmkit.runtime.arrays import describe, dtype_from_torch
from gemmkit.runtime.device import target
from gemmkit.torch.product import batched_by, check_together, define, is_eager, known
from gemmkit.tuning.sm90 import columns_of_scaled

EIGHT = torch.float8_e4m3fn, torch.float8_e5m2
RESULTS = torch.bfloat16, torch.float16, torch.float32


def scaled_mm(mat_a: torch.Tensor, mat_b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
              bias: torch.Tensor | None = None, *, out_dtype: torch.dtype = torch.bfloat16,
              use_fast_accum: bool = False) -> Any:
    """Multiply 8-bit floats that have scales: (scale_a * mat_a) @ (scale_b * mat_b) + bias, with the arguments of PyTorch's
    ``torch._scaled_mm``. Scales stay on the GPU: nothing is synchronised.

    Args:
        mat_a: (M, K) float8_e4m3fn or float8_e5m2. By rows it is read as it lies.
        mat_b: (K, N) of either dtype. By columns it is read as it lies.
        scale_a, scale_b: float32, any strides. For either matrix one of the first two rows, or for both one of the others
            (quotients are rounded up).

            | scales | scale_a | scale_b |
            |---|---|---|
            | of the matrix | one element | one element |
            | of its rows, or columns | (M, 1) | (1, N) |
            | of blocks of 128 along K | (M, K / 128) | (K / 128, N) |
            | of blocks of 128 x 128 | (M / 128, K / 128) | (K / 128, N / 128) |

        bias: (N,) float16, bfloat16 or float32, added behind the scales.
        out_dtype: bfloat16, float16 or float32.
        use_fast_accum: keep the 14 bits of a sum that Hopper's tensor cores keep. By default, and with scales of blocks
            always, sums of 128 elements are added in float32.

    Returns: a new (M, N) tensor of ``out_dtype``. It has no gradient.

    Raises, before anything is launched
        TypeError: no tensors, or other dtypes.
        ValueError: shapes that do not fit each other; tensors on several devices.
        NotImplementedError: a tensor requires a gradient, and gradients are enabled.
        ConfigError: scales of blocks on a GPU other than of compute capability 9.0.

    >>> import torch, gemmkit as gk, gemmkit.torch
    >>> a, b = torch.ones(2, 256).to(torch.float8_e4m3fn), torch.ones(3, 256).to(torch.float8_e4m3fn).t()
    >>> with gk.emulate():
    ...     gk.torch.scaled_mm(a, b, torch.tensor([[1.0, 0.5], [2.0, 2.0]]), torch.ones(2, 1)).tolist()
    [[192.0, 192.0, 192.0], [512.0, 512.0, 512.0]]
    """
    tensors = (mat_a, mat_b, scale_a, scale_b) if bias is None else (mat_a, mat_b, scale_a, scale_b, bias)
    found = known(_scaled, (out_dtype, use_fast_accum), tensors)
    if found is not None:
        return found
    for name, x in zip(("mat_a", "mat_b", "scale_a", "scale_b", "bias"), tensors):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; gemmkit.torch.scaled_mm takes tensors")
        if x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"{name} requires a gradient, which scaled_mm does not have; use torch.no_grad(), or "
                                      "detach it")
    if is_eager(tensors):
        return _compute(mat_a, mat_b, scale_a, scale_b, bias, out_dtype, use_fast_accum)
    return _OPERATOR(mat_a, mat_b, scale_a, scale_b, bias, out_dtype, use_fast_accum)


_scaled = Door()                       # by the result's dtype and the accumulation, of all tensors


def _check(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: torch.Tensor | None,
           out_dtype: torch.dtype) -> str:
    """Of what the scales are: "matrices", for rows, columns and whole ones, or "blocks"."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"mat_a has shape {tuple(a.shape)} and mat_b has shape {tuple(b.shape)}; (M, K) and (K, N) are "
                         "needed")
    for name, x in (("mat_a", a), ("mat_b", b)):
        if x.dtype not in EIGHT:
            raise TypeError(f"{name} has dtype {x.dtype}; float8_e4m3fn or float8_e5m2 is needed")
    for name, x in (("scale_a", scale_a), ("scale_b", scale_b)):
        if x.dtype != torch.float32:
            raise TypeError(f"{name} has dtype {x.dtype}; float32 is needed")
    if out_dtype not in RESULTS:
        raise TypeError(f"out_dtype={out_dtype}: bfloat16, float16 or float32 is needed")
    check_together(a, mat_b=b, scale_a=scale_a, scale_b=scale_b, bias=bias)
    (M, K), N = a.shape, b.shape[1]
    if bias is not None and (tuple(bias.shape) != (N,) or bias.dtype not in RESULTS):
        raise ValueError(f"bias has shape {tuple(bias.shape)} and dtype {bias.dtype}; ({N},) of bfloat16, float16 or "
                         "float32 is needed")
    of_a, of_b = tuple(scale_a.shape), tuple(scale_b.shape)
    if (scale_a.numel() == 1 or of_a == (M, 1)) and (scale_b.numel() == 1 or of_b == (1, N)):
        return "matrices"
    blocks, rows, columns = _blocks(K), _blocks(M), _blocks(N)
    if of_a in ((M, blocks), (rows, blocks)) and of_b in ((blocks, N), (blocks, columns)):
        return "blocks"
    raise ValueError(f"scale_a has shape {of_a} and scale_b has shape {of_b}; a product of {M} x {N} x {K} takes one "
                     f"element or ({M}, 1) beside one element or (1, {N}), or ({M}, {blocks}) or ({rows}, {blocks}) beside "
                     f"({blocks}, {N}) or ({blocks}, {columns})")


def _blocks(size: int) -> int:
    return -(-size // BLOCK)


def _compute(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: torch.Tensor | None,
             out_dtype: torch.dtype, use_fast_accum: bool) -> Any:
    kind = _check(a, b, scale_a, scale_b, bias, out_dtype)

    def described() -> tuple[Any, Any, dict[str, Any]]:
        keywords: dict[str, Any] = {"dtype": dtype_from_torch(out_dtype)}
        stages: list[Epilogue] = []
        if kind == "blocks":
            keywords["operator"] = _operator(a, b, scale_a.detach(), scale_b.detach())
        else:
            stages = [_factor(scale_a.detach(), "M"), _factor(scale_b.detach(), "N")]
            if use_fast_accum:
                keywords["precision"] = "fast"
        if bias is not None:
            stages.append(Bias(bias.detach()))
        if stages:
            keywords["epilogue"] = functools.reduce(operator.or_, stages)
        return a, b, keywords

    arrays = (a, b, scale_a, scale_b) if bias is None else (a, b, scale_a, scale_b, bias)
    with torch.no_grad():
        return _scaled((out_dtype, use_fast_accum), arrays, None, None, described)


def _factor(scale: torch.Tensor, along: str) -> Scale:
    """Of one element, in memory; else of each row or column."""
    return Scale(scale.reshape(()) if scale.numel() == 1 else scale.select(1 if along == "M" else 0, 0), along)


def _operator(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> BlockScaledOp:
    (M, K), N = a.shape, b.shape[1]
    rows, columns = (1 if own == size else BLOCK for own, size in ((scale_a.shape[0], M), (scale_b.shape[1], N)))
    width = columns_of_scaled((M, N, K), target(describe(a, "mat_a").device), BLOCK if columns == 1 else 2 * BLOCK)
    return BlockScaledOp(width, dtype_from_torch(a.dtype), b_dtype=dtype_from_torch(b.dtype), scale_a=scale_a,
                         scale_b=scale_b, rows=rows, columns=columns)


def _allocate(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: torch.Tensor | None,
              out_dtype: torch.dtype, use_fast_accum: bool) -> Any:
    """The result, uninitialised."""
    _check(a, b, scale_a, scale_b, bias, out_dtype)
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


def _one_by_one(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    """Of a batch there is one launch after the other."""
    tensors, options = args[:5], args[5:]
    return batched_by(lambda *one: _OPERATOR(*one, *options), info.batch_size, in_dims[:5], tensors, (None,) * 5, {})


_SCHEMA = ("(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType out_dtype, bool use_fast_accum) "
           "-> Tensor")
_OPERATOR: Any = define("gemmkit::scaled_mm", _SCHEMA, _compute, _allocate)
torch.library.register_vmap(_OPERATOR, _one_by_one)
