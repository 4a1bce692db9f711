"""Layers of 4 bits as quantisers store them: tensors that are drawn, what their libraries make of them in float64, and
modules that compute as theirs do.

Unpacking here is written after the libraries' own (AutoGPTQ's ``qlinear_cuda.py``, AutoAWQ's ``packing_utils.py``,
compressed-tensors' ``pack_quantized``) and shares nothing with `gemmkit.torch.checkpoints`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

FORMATS = "gptq", "gptq_v2", "awq", "pack-quantized"
AWQ_REVERSE_ORDER = 0, 4, 1, 5, 2, 6, 3, 7


def packed_along(integers: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Neighbours along an axis in words of 32 bits, the first in the lowest; zeros behind the last."""
    moved = np.moveaxis(integers, axis, 0).astype(np.uint32)
    per = 32 // bits
    moved = np.concatenate([moved, np.zeros((-len(moved) % per, *moved.shape[1:]), np.uint32)])
    words = np.zeros((len(moved) // per, *moved.shape[1:]), np.uint32)
    for n in range(per):
        words |= moved[n::per] << np.uint32(bits * n)
    return np.moveaxis(words, 0, axis).view(np.int32)


def drawn(form: str, inputs: int, outputs: int, group: int, bits: int = 4, symmetric: bool = False, ordered: bool = False,
          bias: bool = False, dtype: Any = torch.float16, seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of a layer, by their names in a checkpoint of this format; scales of ``dtype`` that are powers of two or not."""
    rng, groups = np.random.default_rng(seed), inputs // group
    q = rng.integers(0, 1 << bits, (inputs, outputs))
    zeros = np.full((groups, outputs), 1 << (bits - 1)) if symmetric else rng.integers(1, 1 << bits, (groups, outputs))
    scales = torch.from_numpy(rng.uniform(0.5, 2, (groups, outputs)) * 2.0**-6).to(dtype)
    of = rng.permutation(inputs) // group if ordered else np.arange(inputs) // group
    found: dict[str, Any] = {}
    if form == "awq":
        order = np.array([0, 2, 4, 6, 1, 3, 5, 7])
        for name, x in (("qweight", q), ("qzeros", zeros)):
            found[name] = packed_along(x.reshape(len(x), -1, 8)[..., order].reshape(x.shape), 4, 1)
        found["scales"] = scales
    elif form == "pack-quantized":
        found.update(weight_packed=packed_along(q.T, bits, 1), weight_scale=scales.T.contiguous(),
                     weight_shape=np.array([outputs, inputs]))
        if not symmetric:
            found["weight_zero_point"] = packed_along(zeros.T, bits, 0)
        if ordered:
            found["weight_g_idx"] = of.astype(np.int32)
    else:
        less = 1 if form == "gptq" else 0
        found.update(qweight=packed_along(q, bits, 0), qzeros=packed_along(zeros - less, bits, 1), scales=scales,
                     g_idx=of.astype(np.int32))
    if bias:
        found["bias"] = torch.from_numpy(rng.standard_normal(outputs)).to(dtype)
    return {name: torch.from_numpy(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else x for name, x in found.items()}


def dequantised(form: str, tensors: dict[str, torch.Tensor], bits: int = 4) -> np.ndarray:
    """W^T (inputs, outputs) as the format's library makes it of the tensors, in float64."""
    of = {name: x.double().cpu().numpy() if x.is_floating_point() else x.cpu().numpy() for name, x in tensors.items()}
    shifts, top = np.arange(0, 32, bits), (1 << bits) - 1
    if form == "pack-quantized":
        outputs, inputs = of["weight_shape"]
        values = ((of["weight_packed"][:, :, None] >> shifts) & top).reshape(outputs, -1)[:, :inputs] - (1 << (bits - 1))
        zeros = np.zeros_like(of["weight_scale"])
        if "weight_zero_point" in of:
            packed = of["weight_zero_point"].T
            zeros = ((packed[:, :, None] >> shifts) & top).reshape(len(packed), -1)[:, :outputs].T - (1 << (bits - 1))
        scales, order = of["weight_scale"], np.arange(inputs)
        if "weight_g_idx" in of:
            order = np.argsort(of["weight_g_idx"], kind="stable")
        grouped = values[:, order].reshape(outputs, scales.shape[1], -1)
        found = ((grouped - zeros[:, :, None]) * scales[:, :, None]).reshape(outputs, inputs)
        return np.asarray(found[:, np.argsort(order)].T)
    if form == "awq":
        def columns(x: np.ndarray) -> np.ndarray:
            every = ((x[:, :, None] >> shifts) & top).reshape(len(x), -1, 8)
            return np.asarray(every[..., AWQ_REVERSE_ORDER].reshape(len(x), -1))

        group = len(of["qweight"]) // len(of["scales"])
        return np.asarray((columns(of["qweight"]) - np.repeat(columns(of["qzeros"]), group, 0)) * np.repeat(of["scales"], group, 0))
    zeros = ((of["qzeros"][:, :, None] >> shifts) & top) + (1 if form == "gptq" else 0)
    weights = ((of["qweight"][:, None, :] >> shifts[:, None]) & top).reshape(len(of["g_idx"]), -1)
    zeros = zeros.reshape(of["scales"].shape)
    return np.asarray(of["scales"][of["g_idx"]] * (weights - zeros[of["g_idx"]]))


# --------------------------------------------------------------------------------------------------
# Modules, after the libraries' own.

class QuantLinear(torch.nn.Module):
    """AutoGPTQ's, in float16 or bfloat16; ``qzero_format`` is GPTQModel's."""

    form = "gptq"

    def __init__(self, tensors: dict[str, torch.Tensor], form: str = "gptq"):
        super().__init__()
        self.form = form
        for name, x in tensors.items():
            self.register_buffer(name, x)
        if "bias" not in tensors:
            self.bias = None
        self.register_buffer("wf", torch.arange(0, 32, 4, dtype=torch.int32), persistent=False)

    def qzero_format(self) -> int:
        return 2 if self.form == "gptq_v2" else 1

    def weights(self) -> torch.Tensor:
        tensors = {name: x for name, x in self._buffers.items() if x is not None and name != "wf"}
        return torch.from_numpy(dequantised(self.form, tensors))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = x @ self.weights().to(x.device, x.dtype)
        return found if self.bias is None else found + self.bias.to(x.dtype)


class WQLinear_GEMM(QuantLinear):
    """AutoAWQ's, which computes in float16."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        super().__init__(tensors, "awq")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = (x.half() @ self.weights().to(x.device, torch.float16)).to(x.dtype)
        return found if self.bias is None else found + self.bias.to(x.dtype)


class CompressedLinear(torch.nn.Linear):
    """compressed-tensors': without a weight until its first call, which decompresses it."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        outputs, inputs = (int(n) for n in tensors["weight_shape"])
        super().__init__(inputs, outputs, "bias" in tensors, device="meta")
        del self.weight
        for name, x in tensors.items():
            setattr(self, name, torch.nn.Parameter(x, requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "weight_packed" in self._parameters:
            tensors = {name: self._parameters[name] for name in list(self._parameters) if name.startswith("weight_")}
            weight = torch.from_numpy(dequantised("pack-quantized", tensors)).T.to(self.weight_scale)
            for name in tensors:
                del self._parameters[name]
            self.weight = torch.nn.Parameter(weight, requires_grad=False)
        return torch.nn.functional.linear(x, self.weight.to(x.dtype), self.bias)


def module(form: str, tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """The module of a format."""
    if form == "pack-quantized":
        return CompressedLinear(tensors)
    return WQLinear_GEMM(tensors) if form == "awq" else QuantLinear(tensors, form)


def with_packed_layers(model: torch.nn.Module, form: str, group: int, without: str = "lm_head", **more: object) -> torch.nn.Module:
    """A model whose dense layers are modules of a format, as its quantiser leaves them; their weights are drawn."""
    for seed, (name, layer) in enumerate(list(model.named_modules())):
        if isinstance(layer, torch.nn.Linear) and name != without:
            bias, device = layer.bias is not None, layer.weight.device
            tensors = drawn(form, layer.in_features, layer.out_features, group, bias=bias, seed=seed, **more)  # type: ignore[arg-type]
            model.set_submodule(name, module(form, tensors).to(device))
    return model
