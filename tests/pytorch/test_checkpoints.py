"""`QuantisedLinear.from_checkpoint`: tensors of GPTQ, AWQ and compressed-tensors against what their libraries make of them, in
float64, and what cannot be read, refused by name."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from tests.support.checks import functions_run
from tests.support.machines import on_devices

torch: Any = pytest.importorskip("torch")

from gemmkit.torch import QuantisedLinear  # noqa: E402
from tests.support import checkpoints  # noqa: E402
from tests.support.checkpoints import FORMATS, drawn  # noqa: E402

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def config_of(form: str, **more: Any) -> dict[str, Any]:
    """What a checkpoint's ``config.json`` says."""
    method = {"awq": "awq", "pack-quantized": "compressed-tensors"}.get(form, "gptq")
    name = {"awq": "version", "pack-quantized": "format"}.get(form, "checkpoint_format")
    return {"quant_method": method, name: "gemm" if form == "awq" else form, **more}


def checked(layer: Any, weights: np.ndarray, x: Any, bias: Any = None) -> None:
    """A product beside one of float64, of weights that are rounded as the kernel rounds them; of a matrix the gradient of x."""
    rounded = torch.from_numpy(weights).to(F16).to(x.dtype).double()
    wanted = x.double().cpu() @ rounded + (0 if bias is None else bias.double().cpu())
    with torch.no_grad():
        found = layer(x)
    assert found.dtype == x.dtype and found.device == x.device and found.is_contiguous()
    unit = torch.finfo(x.dtype).eps * wanted.abs().max()
    assert (found.double().cpu() - wanted).abs().max() <= unit
    if x.dim() > 2:
        return
    with torch.no_grad():
        assert torch.equal(layer(x.clone()), found)                  # a call that is known, at other addresses
    x = x.detach().clone().requires_grad_()
    toward = torch.ones_like(found)
    layer(x).backward(toward)
    of_x = toward.double().cpu() @ rounded.T
    assert (x.grad.double().cpu() - of_x).abs().max() <= 2 * torch.finfo(x.dtype).eps * of_x.abs().max()


@on_devices
@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize(("group", "symmetric", "ordered"), [(32, True, False), (128, False, False), (32, False, True),
                                                             (8, True, True)])
@pytest.mark.parametrize("form", FORMATS)
def test_formats(form: str, group: int, symmetric: bool, ordered: bool, dtype: Any, device: str) -> None:
    ordered = ordered and form != "awq"                              # which has no order of inputs
    tensors = drawn(form, 128, 40, group, symmetric=symmetric, ordered=ordered, bias=ordered)
    weights = checkpoints.dequantised(form, tensors)
    given = {name: x.to(device) for name, x in tensors.items()}
    layer = QuantisedLinear.from_checkpoint(given, config_of(form))
    assert (layer.in_features, layer.out_features, layer.group, layer.symmetric) == (128, 40, group, symmetric)
    assert (layer.order is not None) == ordered and ("ordered" in repr(layer)) == ordered
    np.testing.assert_array_equal(layer.dequantised().double().cpu().numpy().T, weights.astype(np.float32))
    for rows in ((1,), (2, 9)):
        x = torch.randn(*rows, 128, generator=torch.Generator().manual_seed(1)).to(device, dtype)
        checked(layer, weights, x, tensors.get("bias"))


@on_devices
@pytest.mark.parametrize(("form", "bits", "outputs"), [("gptq", 2, 48), ("gptq_v2", 2, 16), ("pack-quantized", 2, 37),
                                                       ("pack-quantized", 4, 37)])
def test_bits_and_odd_outputs(form: str, bits: int, outputs: int, device: str) -> None:
    """An odd number of outputs, which compressed-tensors alone stores, takes the default kernel."""
    tensors = drawn(form, 64, outputs, 32, bits)
    layer = QuantisedLinear.from_checkpoint({name: x.to(device) for name, x in tensors.items()}, config_of(form, bits=bits))
    assert layer.bits == bits
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).to(device, F16)
    checked(layer, checkpoints.dequantised(form, tensors, bits), x)


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", FORMATS)
def test_one_group_of_all_inputs(form: str) -> None:
    """group_size=-1, or one scale a channel."""
    tensors = drawn(form, 64, 16, 64)
    layer = QuantisedLinear.from_checkpoint(tensors, config_of(form, group_size=-1))
    assert layer.group == 64
    np.testing.assert_array_equal(layer.dequantised().numpy().T, checkpoints.dequantised(form, tensors).astype("f4"))


def test_scales_of_other_dtypes() -> None:
    """bfloat16's are float16's where these hold them; float32's are rounded; a tiny one beside others may become 0."""
    tensors = drawn("pack-quantized", 64, 16, 32, dtype=BF16)
    assert torch.equal(QuantisedLinear.from_checkpoint(tensors).scales, tensors["weight_scale"].half().T)
    tensors["weight_scale"][3, 1] = 1e-9
    assert QuantisedLinear.from_checkpoint(tensors).scales[1, 3] == 0
    tensors["weight_scale"][3] = 1e-9
    with pytest.raises(ValueError, match=r"scales of torch\.bfloat16 are not finite, or too large or small"):
        QuantisedLinear.from_checkpoint(tensors)
    wide = drawn("gptq", 64, 16, 32, dtype=F32)
    assert torch.equal(QuantisedLinear.from_checkpoint(wide).scales, wide["scales"].half())


def test_what_is_kept() -> None:
    """Words of GPTQ are not copied; a state and a pickle have the order; a bias keeps its dtype and is not trained."""
    tensors = drawn("gptq", 64, 16, 32, bias=True, dtype=BF16)
    layer = QuantisedLinear.from_checkpoint(tensors)
    assert layer.words is tensors["qweight"] and layer.bias.dtype == BF16 and not layer.bias.requires_grad
    signed = drawn("pack-quantized", 64, 16, 32)
    whole = QuantisedLinear.from_checkpoint(signed)
    zeros = torch.from_numpy((whole.zeros.numpy().astype(np.int8) - 8).T.copy())
    assert torch.equal(QuantisedLinear.from_checkpoint({**signed, "weight_zero_point": zeros}).zeros, whole.zeros)
    none = {**signed, "weight_g_idx": torch.full((64,), -1, dtype=torch.int32)}
    assert QuantisedLinear.from_checkpoint(none).order is None
    ordered = QuantisedLinear.from_checkpoint(drawn("gptq", 64, 16, 32, ordered=True, symmetric=True))
    other = QuantisedLinear(64, 16, group=32, bias=False, ordered=True)
    other.load_state_dict(ordered.state_dict())
    for made in (other, pickle.loads(pickle.dumps(ordered)), ordered.bfloat16()):
        assert torch.equal(made.dequantised(), ordered.dequantised()) and made.order.dtype == torch.int32


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_a_bias_of_another_dtype(dtype: Any, in_the_emulator: None) -> None:
    """The result has x's, and lies in rows whatever x's strides are. (By columns x takes another kernel, which rounds weights.)"""
    tensors = drawn("awq", 64, 16, 32, bias=True)
    tensors["bias"] = tensors["bias"].to(dtype)
    layer, x = QuantisedLinear.from_checkpoint(tensors), torch.randn(64, 3).half().T
    with torch.no_grad():
        results = layer(x), layer(x.contiguous())
    wanted = x.double() @ torch.from_numpy(checkpoints.dequantised("awq", tensors)).half().double() + tensors["bias"].double()
    for found in results:
        assert found.dtype == F16 and found.is_contiguous()
        assert (found.double() - wanted).abs().max() <= 2e-3 * wanted.abs().max()


def test_without_indices_groups_are_stated() -> None:
    """A group may end within the last one: (K / groups) alone would be another size."""
    tensors = drawn("gptq", 64, 16, 32)
    del tensors["g_idx"]
    assert QuantisedLinear.from_checkpoint(tensors, {"group_size": 32}).group == 32
    for config, words in ((None, "no g_idx; give it, or config with group_size"), ({"group_size": 48}, "group_size=48")):
        with pytest.raises(ValueError, match=words):
            QuantisedLinear.from_checkpoint(tensors, config)


def gptq(**more: Any) -> dict[str, Any]:
    found = {**drawn("gptq", 64, 32, 32), **more}
    return {name: x for name, x in found.items() if x is not None}


def words(*shape: int) -> Any:
    return torch.zeros(shape, dtype=torch.int32)


@pytest.mark.parametrize(("tensors", "config", "said"), [
    (lambda: {"weight": torch.ones(2, 2)}, None, "tensors has weight; qweight of GPTQ and AWQ is needed"),
    (lambda: gptq(scales=None), None, "tensors has qweight, and no scales"),
    (lambda: gptq(input_scale=torch.ones(1)), None, "and input_scale, which is not known"),
    (lambda: gptq(qzeros=words(2, 8)), None, "qzeros has 8 words for 32 integers, 8 bits each; 2 or 4 bits"),
    (lambda: gptq(qzeros=words(2, 3)), None, "qzeros has 3 words for 32 integers, 3 bits each"),
    (lambda: gptq(qweight=words(4, 64)), None, "Marlin, GEMV, BitBLAS"),
    (lambda: gptq(qweight=words(8, 32).long()), None, "qweight has shape .* and dtype torch.int64"),
    (lambda: gptq(qzeros=words(2, 4) - 1), None, "qzeros has 15, which libraries read as a zero point of 16, or of 0"),
    (lambda: gptq(g_idx=torch.zeros(64, dtype=torch.int32)), None, "g_idx does not divide 64 inputs into 2 groups of 32"),
    (lambda: gptq(g_idx=torch.zeros(60, dtype=torch.int32)), None, r"g_idx has shape \(60,\)"),
    (lambda: drawn("gptq", 24, 32, 12), None, "groups have 12 inputs; a multiple of the 8"),
    (lambda: gptq(bias=torch.ones(31)), None, r"bias has shape \(31,\)"),
    (lambda: {name: x.to("meta") for name, x in gptq().items()}, None, "meta device"),
    (gptq, {"bits": 8}, "config has bits=8 and the tensors have 4"),
    (gptq, {"group_size": 128}, "config has group_size=128 and the tensors have 32"),
    (gptq, {"checkpoint_format": "marlin"}, "config has the format 'marlin'; of gptq 'gptq' and 'gptq_v2' can be read"),
    (gptq, {"quant_method": "awq"}, "config has quant_method='awq' and the tensors are those of gptq"),
    (lambda: drawn("awq", 64, 32, 32), {"version": "GEMV"}, "config has the format 'gemv'; of awq 'gemm' can be read"),
    (lambda: {**drawn("pack-quantized", 64, 32, 32), "weight_shape": torch.tensor([32, 32])}, None,
     "weight_packed has 8 words for 32 integers, 8 bits each"),
    (lambda: {**drawn("pack-quantized", 64, 32, 32), "weight_scale": torch.ones(1)}, None, r"weight_scale \(1,\)"),
    (lambda: {**drawn("pack-quantized", 64, 32, 32), "weight_zero_point": words(32, 2)}, None, "weight_zero_point has shape"),
    (lambda: {**drawn("pack-quantized", 64, 32, 32), "weight_zero_point": torch.full((32, 2), 9, dtype=torch.int8)}, None,
     "weight_zero_point has numbers that 4 bits do not hold"),
    (lambda: drawn("pack-quantized", 64, 32, 32), {"format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized'")])
def test_refused(tensors: Any, config: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        QuantisedLinear.from_checkpoint(tensors(), config)


def test_refused_types() -> None:
    with pytest.raises(TypeError, match="a dictionary of a layer's tensors"):
        QuantisedLinear.from_checkpoint(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="config is a str; the quantization_config"):
        QuantisedLinear.from_checkpoint(gptq(), "gptq")


def test_an_ordered_layer_compiles_without_a_break() -> None:
    layer = QuantisedLinear.from_checkpoint(drawn("gptq", 64, 16, 32, ordered=True))
    with gk.emulate():
        x = torch.randn(3, 64).half()
        assert torch._dynamo.explain(layer)(x).graph_break_count == 0


# -- gated units of such layers -------------------------------------------------------------------------------------------

def pair(form: str, device: str = "cpu", **more: Any) -> tuple[list[Any], list[Any]]:
    """Gate and up of one order of inputs, and their weights in float64."""
    of = {"symmetric": False, **more}
    both = [drawn(form, 64, 24, 32, **of, seed=seed) for seed in (0, 1)]
    if "g_idx" in both[0]:
        both[1]["g_idx"] = both[0]["g_idx"]
    layers = [QuantisedLinear.from_checkpoint({n: x.to(device) for n, x in of.items()}, config_of(form)) for of in both]
    layers[1].order = layers[0].order
    return layers, [torch.from_numpy(checkpoints.dequantised(form, of)) for of in both]


def launches(call: Callable[[], Any], device: str) -> int:
    """How many kernels a call launches; in the emulator gemmkit's, and gathers of PyTorch's."""
    if device == "cpu":
        with torch.profiler.profile() as seen:
            own = functions_run(call).count("launch")
        return own + sum(event.count for event in seen.key_averages() if event.key == "aten::index_select")
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return len([event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA])


@on_devices
@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize(("form", "ordered"), [("awq", False), ("gptq", True)])
def test_glu_is_one_launch(form: str, ordered: bool, dtype: Any, device: str) -> None:
    """With a gradient of x it is two products and a gate."""
    (gate, up), (w, v) = pair(form, device, ordered=ordered)
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    x64 = x.double().cpu().requires_grad_()
    w, v = (weights.to(F16).to(dtype).double() for weights in (w, v))
    wanted = torch.nn.functional.silu(x64 @ w) * (x64 @ v)
    with torch.no_grad():
        found = gk.torch.glu(x, gate, up)
        assert launches(lambda: gk.torch.glu(x, gate, up), device) == 1 + ordered       # and PyTorch's gather
    assert found.dtype == dtype and (found.double().cpu() - wanted).abs().max() <= torch.finfo(dtype).eps * wanted.abs().max()
    x.requires_grad_()
    gk.torch.glu(x, gate, up).sum().backward()
    wanted.sum().backward()
    assert (x.grad.double().cpu() - x64.grad).abs().max() <= 6 * torch.finfo(dtype).eps * x64.grad.abs().max()


def test_glu_of_what_is_not_alike(in_the_emulator: None) -> None:
    """Right by two products; the operator's own gradient, and what is refused."""
    (gate, up), (w, v) = pair("gptq", ordered=True)
    x = torch.randn(3, 64).half()
    wanted = torch.nn.functional.gelu(x.double() @ w) * (x.double() @ v)
    up.order = up.order.clone()
    with torch.no_grad():
        assert (gk.torch.glu(x, gate, up, "gelu").double() - wanted).abs().max() <= 2e-3 * wanted.abs().max()
    (gate, up), _ = pair("awq")
    tensors = gate.words, gate.scales, gate.zeros, up.words, up.scales, up.zeros
    grad = x.clone().requires_grad_()
    torch.ops.gemmkit.quantised_glu(grad, *tensors, bits=4, group=32, activation="silu").sum().backward()
    other = x.clone().requires_grad_()
    gk.torch.glu(other, gate, up).sum().backward()
    assert (grad.grad - other.grad).abs().max() <= 2e-3 * other.grad.abs().max()
    torch.library.opcheck(torch.ops.gemmkit.quantised_glu, (grad, *tensors), dict(bits=4, group=32, activation="silu"),
                          test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))
    stack = torch.randn(2, 3, 64).half()
    with torch.no_grad():
        each = torch.stack([gk.torch.glu(one, gate, up) for one in stack])
        assert torch.equal(torch.func.vmap(lambda one: gk.torch.glu(one, gate, up))(stack), each)
    with pytest.raises(TypeError, match="w is a QuantisedLinear and v a Tensor; two tensors are needed"):
        gk.torch.glu(x, gate, torch.ones(64, 24).half())
    with pytest.raises(ValueError, match="v has 64 and 40; both must be the same"):
        gk.torch.glu(x, gate, QuantisedLinear.from_checkpoint(drawn("awq", 64, 40, 32)))
    with pytest.raises(TypeError, match="x has dtype torch.float32"), torch.no_grad():
        gk.torch.glu(x.float(), gate, up)
