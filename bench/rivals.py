"""Other ways to compute the rows of `bench.experiments.versus`: Triton, QuACK, PyTorch's three ways, attentions.

`RIVALS` has, for each work, makers by the names that results give them. A maker takes the row's case and its operands, and
returns a call that writes ``x.peer_out``. A rival gets its operands in the order that it documents: FlashAttention-4 has
heads behind rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from bench.harness import Call

Array = Any
Maker = Callable[[Any, Any], Call]


def _into(x: Any, function: Callable[..., Array], *arrays: Array) -> Call:
    def call() -> None:
        x.peer_out = function(*arrays)

    return call


@cache
def _made(name: str, how: str) -> Callable[..., Array]:
    """A function of PyTorch: "eager", "scripted" (TorchScript) or "compiled" (torch.compile)."""
    import torch

    function: Any = globals()[name]
    if how == "scripted":
        return torch.jit.script(function)
    if how == "compiled":
        torch._dynamo.reset()
        return torch.compile(function, dynamic=False)
    return function


# Functions that TorchScript takes: their names are resolved when PyTorch is there.

def layernorm(x, gamma, beta):  # type: ignore[no-untyped-def]
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    scale = (centred.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    return (centred * scale * gamma + beta).half()


def lstm(x, w, h, u, bias):  # type: ignore[no-untyped-def]
    return (x @ w + h @ u + bias).relu()


def glu(x, w, v):  # type: ignore[no-untyped-def]
    gate = x @ w
    return gate * gate.sigmoid() * (x @ v)


def unfused(q, k, v):  # type: ignore[no-untyped-def]
    return ((q @ k.transpose(-1, -2)) * q.size(-1) ** -0.5).softmax(-1) @ v


def _of_rows(how: str) -> Maker:
    return lambda case, x: _into(x, _made("layernorm", how), x.x, x.gamma, x.beta)


def _of_lstm(how: str) -> Maker:
    return lambda case, x: _into(x, _made("lstm", how), x.a, x.b, x.h, x.u, x.bias)


def _of_glu(how: str) -> Maker:
    return lambda case, x: _into(x, _made("glu", how), x.a, x.w, x.v)


def _of_attention(how: str) -> Maker:
    return lambda case, x: _into(x, _made("unfused", how), x.q, x.k, x.v)


def _builtin(case: Any, x: Any) -> Call:
    from torch.nn import functional

    return _into(x, lambda: functional.layer_norm(x.x, x.x.shape[-1:], x.gamma, x.beta, 1e-5))


def _two_kernels(case: Any, x: Any) -> Call:
    import torch

    def call() -> None:
        torch.addmm(x.bias, x.inputs, x.weights, out=x.first)
        torch.clamp_min(x.first, 0, out=x.peer_out)

    return call


def _cublas(case: Any, x: Any) -> Call:
    import torch

    return lambda: torch.matmul(x.a, x.b, out=x.peer_out)


def _with_sums(case: Any, x: Any) -> Call:
    """cuBLAS, and a kernel for the sums."""
    import torch

    sums = torch.empty_like(x.found)

    def call() -> None:
        torch.matmul(x.a, x.b, out=x.peer_out)
        torch.sum(x.a, 1, dtype=torch.float32, out=sums)

    return call


def _sdpa(name: str) -> Maker:
    def make(case: Any, x: Any) -> Call:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        def run() -> Array:
            with sdpa_kernel(getattr(SDPBackend, name)):
                return scaled_dot_product_attention(x.q, x.k, x.v, is_causal=case.work == "causal")

        return _into(x, run)

    return make


def _triton(name: str, *of: str) -> Maker:
    def make(case: Any, x: Any) -> Call:
        from bench import triton_kernels

        arrays = [getattr(x, one) for one in of]
        if name == "gated":
            arrays[1:3] = [one.contiguous() for one in arrays[1:3]]        # TMA's boxes need no copy; views of one matrix do
        call: Call = getattr(triton_kernels, name)(*arrays, *((case.work == "causal",) if name == "attention" else ()))
        return call

    return make


def _quack(case: Any, x: Any) -> Call:
    """QuACK's product with the mapping of its own heuristic; ``tuned=True`` would try 44 of them first, for minutes."""
    from quack.gemm_interface import gemm

    return lambda: gemm(x.a, x.b, out=x.peer_out, tuned=False)


def _quack_layernorm(case: Any, x: Any) -> Call:
    from quack.rmsnorm import layernorm_fwd

    gamma, beta = x.gamma.float(), x.beta.float()                  # it takes no others
    return _into(x, lambda: layernorm_fwd(x.x, gamma, beta, eps=1e-5))


def _flash_attention_4(case: Any, x: Any) -> Call:
    from flash_attn.cute import flash_attn_func

    q, k, v = (one.transpose(1, 2).contiguous() for one in (x.q, x.k, x.v))

    def call() -> None:
        found = flash_attn_func(q, k, v, causal=case.work == "causal")
        x.peer_out = (found[0] if isinstance(found, tuple) else found).transpose(1, 2)

    return call


ATTENTION: dict[str, Maker] = {
    "FlashAttention-4": _flash_attention_4,
    "Triton": _triton("attention", "q", "k", "v", "peer_out"), "cuDNN": _sdpa("CUDNN_ATTENTION"),
    "FlashAttention-2": _sdpa("FLASH_ATTENTION"),
}
RIVALS: dict[str, dict[str, Maker]] = {
    "square": {"Triton": _triton("product", "a", "b", "peer_out"), "QuACK": _quack, "cuBLAS": _cublas},
    "glu": {"Triton": _triton("gated", "a", "w", "v", "peer_out"), "PyTorch": _of_glu("eager"),
            "torch.compile": _of_glu("compiled")},
    "row sums of a": {"Triton": _triton("with_sums", "a", "b", "peer_out", "found2"), "cuBLAS, then a kernel": _with_sums},
    "plain": ATTENTION | {"PyTorch, unfused": _of_attention("eager"), "torch.compile, unfused": _of_attention("compiled")},
    "causal": ATTENTION,
    "layernorm": {"PyTorch, unfused": _of_rows("eager"), "TorchScript, unfused": _of_rows("scripted"),
                  "torch.compile": _of_rows("compiled"), "PyTorch's layer_norm": _builtin, "QuACK": _quack_layernorm},
    "lstm": {"PyTorch, 5 kernels": _of_lstm("eager"), "TorchScript": _of_lstm("scripted"),
             "torch.compile": _of_lstm("compiled"), "two kernels": _two_kernels},
}


PACKAGES = {"Triton": "triton", "QuACK": "quack-kernels", "FlashAttention-4": "flash-attn-4"}


def names(work: str) -> list[str]:
    return list(RIVALS[work.partition(",")[0]])


def make(case: Any, name: str, x: Any) -> Call:
    """A call of the rival for one input set. Raises ImportError if it is not installed."""
    return RIVALS[case.work.partition(",")[0]][name](case, x)


def version(name: str) -> str:
    """The rival with its version."""
    import importlib.metadata

    import torch

    if name not in PACKAGES:
        return f"{name} (torch {torch.__version__})"
    return f"{name} {importlib.metadata.version(PACKAGES[name])}" + " (bench.triton_kernels)" * (name == "Triton")
