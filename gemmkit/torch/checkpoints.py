"""Weights of 2 and 4 bits as GPTQ, AWQ and compressed-tensors store them, as `gemmkit.torch.QuantisedLinear` holds them.

W has N outputs and K inputs, in G groups of K / G inputs; R = 32 / bits integers are in a word, the first in its lowest
bits.

| | gptq, gptq_v2 | awq, "gemm" | pack-quantized |
|---|---|---|---|
| integers | ``qweight`` (K / R, N) | ``qweight`` (K, N / 8) | ``weight_packed`` (N, K / R) |
| zero points | ``qzeros`` (G, N / R) | ``qzeros`` (G, N / 8) | ``weight_zero_point`` (N / R, G), or none |
| scales | ``scales`` (G, N) | ``scales`` (G, N) | ``weight_scale`` (N, G) |
| group of each input | ``g_idx`` (K,) | neighbours | ``weight_g_idx`` (K,), or neighbours |

Words lie along the axis that is divided. Eight columns of awq lie in a word in the order `AWQ_ORDER`. Zero points of gptq
are stored less 1, those of gptq_v2 as they are; without any they are 2 ** (bits - 1).

In all of them an element is (q - zero) * scale. Sources: ``auto_gptq/nn_modules/qlinear/qlinear_cuda.py`` of AutoGPTQ, and
``convert_gptq_v1_to_v2_format`` of GPTQModel; ``awq/utils/packing_utils.py`` of AutoAWQ;
``compressors/pack_quantized`` of compressed-tensors. (Frantar et al., *GPTQ*, 2022; Lin et al., *AWQ*, 2023.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

#: Order of AWQ's columns in a word: the n-th lowest bits are those of column AWQ_ORDER[n] of eight.
AWQ_ORDER = 0, 2, 4, 6, 1, 3, 5, 7

#: Names of a layer's tensors: those that must be there, and those that may.
NAMES = {"qweight": (("qweight", "qzeros", "scales"), ("g_idx", "bias")),
         "weight_packed": (("weight_packed", "weight_scale", "weight_shape"), ("weight_zero_point", "weight_g_idx", "bias"))}

FLOATS = torch.float16, torch.bfloat16, torch.float32
_GROUPED = "group_size", "q_group_size"


class LayerTensors(NamedTuple):
    """A layer's tensors as `gemmkit.torch.QuantisedLinear` has them: words (K / R, N) int32, scales (G, N) float16, zeros
    (G, N) uint8 or None for 2 ** (bits - 1), the input that each row of words is of (None: in order), and a bias."""

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None
    bias: torch.Tensor | None
    bits: int
    group: int


def read(tensors: Mapping[str, torch.Tensor], config: object = None) -> LayerTensors:
    """A layer's tensors, by their names in a checkpoint without the layer's own; `QuantisedLinear.from_checkpoint` says what
    is taken and refused."""
    if not isinstance(tensors, Mapping) or not all(isinstance(x, torch.Tensor) for x in tensors.values()):
        raise TypeError("tensors: a dictionary of a layer's tensors by their names is needed, such as {'qweight': ..., "
                        "'qzeros': ..., 'scales': ...}")
    said = _said(config)
    for key, (needed, allowed) in NAMES.items():
        if key in tensors:
            missing, other = [x for x in needed if x not in tensors], [*set(tensors).difference(needed, allowed)]
            if missing or other:
                wrong = f"no {missing[0]}" if missing else f"{min(other)}, which is not known"
                raise ValueError(f"tensors has {key}, and {wrong}; {', '.join(needed)} are needed, {', '.join(allowed)} may "
                                 "be there")
            break
    else:
        raise ValueError(f"tensors has {', '.join(sorted(tensors)) or 'nothing'}; qweight of GPTQ and AWQ is needed, or "
                         "weight_packed of compressed-tensors")
    if any(x.is_meta for x in tensors.values()):
        raise ValueError("tensors are on the meta device; load them first")
    found = _compressed(tensors, said) if key == "weight_packed" else _of_qweight(tensors, said)
    for names, own in ((("bits", "w_bit"), found.bits), (_GROUPED, found.group)):
        for name in names:
            if said.get(name) not in (None, -1, own):
                raise ValueError(f"config has {name}={said[name]} and the tensors have {own}")
    bias = tensors.get("bias")
    if bias is not None and (bias.shape != found.words.shape[1:] or bias.dtype not in FLOATS):
        raise ValueError(f"bias has shape {tuple(bias.shape)} and dtype {bias.dtype}; {tuple(found.words.shape[1:])} of "
                         "float16, bfloat16 or float32 is needed")
    return found._replace(bias=bias, scales=_float16(found.scales))


def _said(config: object) -> dict[str, Any]:
    """A checkpoint's ``quantization_config``, as a dictionary."""
    if config is not None and not isinstance(config, Mapping):
        config = config.to_dict() if hasattr(config, "to_dict") else config
        if not isinstance(config, Mapping):
            raise TypeError(f"config is a {type(config).__name__}; the quantization_config of a checkpoint's config.json is "
                            "needed, a dictionary, or None")
    return dict(config or {})


def _check_format(said: dict[str, Any], method: str, names: tuple[str, ...], formats: tuple[str, ...]) -> str:
    """The format that a configuration names, and the first of ``formats`` where it names none."""
    def word(name: str) -> str:
        return str(getattr(said[name], "value", said[name])).lower()         # or that of an enumeration

    if said.get("quant_method") is not None and word("quant_method") != method:
        raise ValueError(f"config has quant_method={word('quant_method')!r} and the tensors are those of {method}")
    found = next((word(name) for name in names if said.get(name) is not None), formats[0])
    if found not in formats:
        raise ValueError(f"config has the format {found!r}; of {method} {' and '.join(map(repr, formats))} can be read")
    return found


def _float16(scales: torch.Tensor) -> torch.Tensor:
    """Scales as float16: what that changes may be no more than half a unit of an output's largest scale, as rounding its
    weights changes."""
    found = scales.to(torch.float16).contiguous()
    off, most = (found.double() - scales.double()).abs(), scales.double().abs().amax(0, keepdim=True)
    if not bool(found.isfinite().all()) or not bool((off <= 2.0**-11 * most).all()):
        raise ValueError(f"scales of {scales.dtype} are not finite, or too large or small for float16, which gemmkit's "
                         "kernels read")
    return found


# --------------------------------------------------------------------------------------------------
# GPTQ and AWQ.

def _of_qweight(tensors: Mapping[str, torch.Tensor], said: dict[str, Any]) -> LayerTensors:
    qweight, qzeros, scales = (tensors[name] for name in NAMES["qweight"][0])
    for name, x in (("qweight", qweight), ("qzeros", qzeros)):
        if x.dtype != torch.int32 or x.dim() != 2:
            raise ValueError(f"{name} has shape {tuple(x.shape)} and dtype {x.dtype}; a matrix of int32 words is needed")
    if scales.dim() != 2 or scales.dtype not in FLOATS or scales.shape[0] != qzeros.shape[0] or 0 in scales.shape:
        raise ValueError(f"scales has shape {tuple(scales.shape)} and dtype {scales.dtype}; a row of floats for each of the "
                         f"{qzeros.shape[0]} rows of qzeros is needed")
    groups, columns = scales.shape
    bits = _bits(qzeros.shape[1], columns, "qzeros")
    if qweight.shape[1] == columns:
        return _gptq(qweight, qzeros, scales, tensors.get("g_idx"), bits, said)
    if qweight.shape[1] == qzeros.shape[1] and bits == 4 and "g_idx" not in tensors:
        _check_format(said, "awq", ("version", "format"), ("gemm",))
        group = _even(qweight.shape[0], groups)
        words, zeros = _awq_words(qweight), _awq_columns(qzeros)
        return LayerTensors(words, scales, _unless_middle(zeros, bits), None, None, bits, _checked_group(group, bits))
    raise ValueError(f"qweight has shape {tuple(qweight.shape)}, with scales of {tuple(scales.shape)}; (K / {32 // bits}, "
                     f"{columns}) of GPTQ or (K, {columns // 8}) of AWQ's gemm is needed. A kernel's own order (Marlin, "
                     "GEMV, BitBLAS) cannot be read; load the checkpoint's tensors")


def _gptq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, g_idx: torch.Tensor | None, bits: int,
          said: dict[str, Any]) -> LayerTensors:
    is_first = _check_format(said, "gptq", ("checkpoint_format", "format"), ("gptq", "gptq_v2")) == "gptq"
    rows = qweight.shape[0] * 32 // bits
    if g_idx is None:
        stated = next((said[name] for name in _GROUPED if said.get(name) is not None), None)
        if stated is None:
            raise ValueError("tensors has no g_idx; give it, or config with group_size: groups may end within the last one")
        if (rows if stated == -1 else stated) * scales.shape[0] != rows:
            raise ValueError(f"config has group_size={stated}; {scales.shape[0]} groups of it are not the {rows} inputs")
    group, order = _groups(g_idx, rows, scales.shape[0], "g_idx")
    zeros = unpacked(qzeros, bits, 1).to(torch.uint8)
    if is_first:
        most = (1 << bits) - 1
        if bool((zeros == most).any()):
            raise ValueError(f"qzeros has {most}, which libraries read as a zero point of {most + 1}, or of 0, in the "
                             "format 'gptq'; store the checkpoint as gptq_v2, or name it in config: checkpoint_format")
        zeros = zeros + 1
    words = qweight.contiguous() if order is None else _reordered(qweight, bits, order)
    return LayerTensors(words, scales, _unless_middle(zeros, bits), order, None, bits, _checked_group(group, bits))


def _awq_words(qweight: torch.Tensor) -> torch.Tensor:
    """Words along N as words along K."""
    rows, across = qweight.shape
    if rows % 8:
        raise ValueError(f"qweight has {rows} rows; a multiple of 8 inputs is needed")
    given, words = qweight.view(rows // 8, 8, across), qweight.new_empty((rows // 8, across, 8))
    for n, column in enumerate(AWQ_ORDER):
        words[..., column] = _packed((given >> 4 * n) & 15, 4, 1)
    return words.view(rows // 8, 8 * across)


def _awq_columns(qzeros: torch.Tensor) -> torch.Tensor:
    found = torch.empty((*qzeros.shape, 8), dtype=torch.uint8, device=qzeros.device)
    for n, column in enumerate(AWQ_ORDER):
        found[..., column] = (qzeros >> 4 * n) & 15
    return found.flatten(1)


# --------------------------------------------------------------------------------------------------
# compressed-tensors.

def _compressed(tensors: Mapping[str, torch.Tensor], said: dict[str, Any]) -> LayerTensors:
    _check_format(said, "compressed-tensors", ("format",), ("pack-quantized",))
    packed, scales, shape = (tensors[name] for name in NAMES["weight_packed"][0])
    if packed.dtype != torch.int32 or packed.dim() != 2 or shape.numel() != 2:
        raise ValueError(f"weight_packed has shape {tuple(packed.shape)} and dtype {packed.dtype}, weight_shape "
                         f"{shape.tolist()}; a matrix of int32 words is needed, and the two extents of the weight")
    columns, rows = (int(n) for n in shape.tolist())
    bits = _bits(packed.shape[1], rows, "weight_packed")
    if packed.shape[0] != columns or scales.dim() != 2 or scales.shape[0] != columns or scales.dtype not in FLOATS or (
            0 in scales.shape):
        raise ValueError(f"weight_packed has shape {tuple(packed.shape)} and weight_scale {tuple(scales.shape)}; "
                         f"({columns}, K / {32 // bits}) and ({columns}, groups) of floats are needed, by weight_shape")
    groups, g_idx = scales.shape[1], tensors.get("weight_g_idx")
    if g_idx is not None and bool((g_idx == -1).any()):               # as the library says that there is none
        g_idx = None
    group, order = _groups(g_idx, rows, groups, "weight_g_idx")
    words = packed.T.contiguous()
    zeros = tensors.get("weight_zero_point")
    if zeros is not None and zeros.dtype == torch.int8 and zeros.shape == scales.shape:      # before they were packed
        zeros = zeros.to(torch.int32) + (1 << (bits - 1))
    elif zeros is not None:
        if zeros.dtype != torch.int32 or zeros.shape != (-(-columns * bits // 32), groups):
            raise ValueError(f"weight_zero_point has shape {tuple(zeros.shape)} and dtype {zeros.dtype}; words of int32, "
                             f"{(-(-columns * bits // 32), groups)}, or int8 {tuple(scales.shape)} are needed")
        zeros = unpacked(zeros, bits, 0)[:columns]
    if zeros is not None and not bool(((0 <= zeros) & (zeros < 1 << bits)).all()):
        raise ValueError(f"weight_zero_point has numbers that {bits} bits do not hold")
    return LayerTensors(words if order is None else _reordered(words, bits, order), scales.T,
                  None if zeros is None else _unless_middle(zeros.T.to(torch.uint8).contiguous(), bits), order, None, bits,
                  _checked_group(group, bits))


# --------------------------------------------------------------------------------------------------
# Words and groups.

def _bits(words: int, integers: int, name: str) -> int:
    """How many bits an integer has, where so many integers are in so many words."""
    for bits in (2, 4):
        if words * 32 == integers * bits:
            return bits
    found = f"{words * 32 / integers:.3g} bits" if integers else "nothing"
    raise ValueError(f"{name} has {words} words for {integers} integers, {found} each; 2 or 4 bits, and whole words, are "
                     "needed")


def _checked_group(group: int, bits: int) -> int:
    if group % (32 // bits):
        raise ValueError(f"groups have {group} inputs; a multiple of the {32 // bits} integers in a word is needed")
    return group


def _even(rows: int, groups: int) -> int:
    if rows % groups:
        raise ValueError(f"{rows} inputs are in {groups} groups; groups of one size are needed")
    return rows // groups


def _groups(g_idx: torch.Tensor | None, rows: int, groups: int, name: str) -> tuple[int, torch.Tensor | None]:
    """Inputs in a group, and the inputs in the order of their groups; None where they lie so."""
    group = _even(rows, groups)
    if g_idx is None:
        return group, None
    if g_idx.shape != (rows,) or g_idx.is_floating_point():
        raise ValueError(f"{name} has shape {tuple(g_idx.shape)} and dtype {g_idx.dtype}; the group of each of {rows} "
                         "inputs is needed")
    if not bool(((0 <= g_idx) & (g_idx < groups)).all()) or not bool(
            (torch.bincount(g_idx.long(), minlength=groups) == group).all()):
        raise ValueError(f"{name} does not divide {rows} inputs into {groups} groups of {group}; groups of one size are "
                         "needed")
    order = torch.argsort(g_idx, stable=True)
    if torch.equal(order, torch.arange(rows, device=order.device)):
        return group, None
    return group, order.to(torch.int32)


def _unless_middle(zeros: torch.Tensor, bits: int) -> torch.Tensor | None:
    """None for zero points that are all 2 ** (bits - 1), which kernels need not load."""
    return None if bool((zeros == 1 << (bits - 1)).all()) else zeros


def unpacked(words: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """A matrix's integers along an axis, int32."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    found = words.unsqueeze(axis + 1) >> (shifts if axis else shifts[:, None])
    return (found & (1 << bits) - 1).flatten(axis, axis + 1)


def _packed(integers: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """Integers along an axis of 32 / bits as a word, without the axis."""
    found = torch.zeros_like(integers.select(axis, 0), dtype=torch.int64)
    for n in range(32 // bits):
        found |= integers.select(axis, n).long() << bits * n
    return found.to(torch.int32)                               # modulo 2 ** 32


def _reordered(words: torch.Tensor, bits: int, order: torch.Tensor) -> torch.Tensor:
    """Words along K whose integers are in another order of K."""
    integers = unpacked(words, bits, 0).to(torch.uint8)[order]
    return _packed(integers.view(words.shape[0], 32 // bits, words.shape[1]), bits, 1)
