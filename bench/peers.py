"""What `bench.hopper` and `bench.experiments` measure against: cuBLAS through PyTorch, with the fusions that cuBLASLt has.

Where a work is more than cuBLASLt fuses, the rest are element-wise kernels that PyTorch compiles of one C++ expression
(its "jiterator"), each one pass over memory. Where those do not compile, CuPy's take their place; the peer's name says
which it was.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

from bench import rivals, torch_attention
from bench.backends import Torch
from bench.cases import Case
from bench.cublas import CublasLt
from bench.fusions import Operands
from bench.harness import Call

Array = Any


class TorchPeers(Torch):
    """cuBLAS and cuBLASLt through PyTorch; for the GPU only."""

    def wide(self, array: Array, rows: Array | None = None) -> Array:
        """The array, or some of its rows, in float64."""
        if rows is not None:
            # Rows of 8-bit floats are taken as rows of bytes: indexing knows those.
            bits = array.view(self.torch.uint8) if array.element_size() == 1 else array
            array = bits[rows].view(array.dtype)
        return array.double()

    def toeplitz(self, diagonals: Array, m: int, k: int) -> Array:
        """a[i, j] = diagonals[i - j + k - 1] in memory, C-ordered, for m rows."""
        return diagonals.flip(0).unfold(0, k, 1).flip(0).contiguous()

    def diagonal_matrix(self, diagonal: Array) -> Array:
        """It in memory, C-ordered."""
        return self.torch.diag(diagonal)

    def half(self, a: Array, half: str) -> Array:
        """A copy of ``a`` with zeros beside its "lower" or "upper" half."""
        return a.tril() if half == "lower" else a.triu()

    def experts(self, tokens: Array, weights: Array, ends: Array) -> Array:
        """Each expert's tokens, which end before ``ends``, times its weights, by the library's own kernel."""
        return self.torch._grouped_mm(tokens, weights, offs=ends)

    def einsum(self, spec: str, a: Array, b: Array) -> Array:
        """The contraction, into a new array."""
        return self.torch.einsum(spec, a, b)

    def complex_view(self, parts: Array) -> Array:
        """An array of float32 with a last axis of 2 as one of complex64."""
        return self.torch.view_as_complex(parts)

    def min_plus(self, a: Array, b: Array, rows: Array) -> Array:
        """The given rows of the min-plus product, in float64."""
        wide = b.double()
        return self.torch.stack([(row[:, None] + wide).amin(0) for row in a[rows].double()])

    def row_wise(self, work: str, is_compiled: bool) -> Callable[..., Array]:
        """A function of x, gamma and beta: "layernorm", "rmsnorm", "softmax" or "transposed", or also of an index, "named"
        (`bench.row_programs`); compiled by the library, if it can."""
        from torch.nn import functional

        def layernorm(x: Array, gamma: Array, beta: Array) -> Array:
            return functional.layer_norm(x, x.shape[-1:], gamma, beta, 1e-5)

        def rmsnorm(x: Array, gamma: Array, beta: Array) -> Array:
            return functional.rms_norm(x, x.shape[-1:], gamma, 1e-6)

        def softmax(x: Array, gamma: Array, beta: Array) -> Array:
            return functional.softmax(x, -1)

        def transposed(x: Array, gamma: Array, beta: Array) -> Array:
            return (functional.silu(x) * gamma).t().contiguous()

        def named(x: Array, gamma: Array, beta: Array, index: Array) -> Array:
            return functional.rms_norm(x[index], x.shape[-1:], gamma, 1e-6)

        call: Any = {"layernorm": layernorm, "rmsnorm": rmsnorm, "softmax": softmax, "transposed": transposed,
                     "named": named}[work]
        if not is_compiled:
            return call
        self.torch._dynamo.reset()         # it compiles a function eight times, and from then on runs it as it is
        return self.torch.compile(call, dynamic=False)

    def row_wise_title(self, is_compiled: bool) -> str:
        """How results call it."""
        return f"{'torch.compile' if is_compiled else 'PyTorch'} {self.torch.__version__}"

    # -- of `bench.experiments.composed` ----------------------------------------------------------------------------

    def plain(self, a: Array, b: Array, out: Array) -> None:
        """gemmkit's own product, as what a product with more to do is compared with."""
        import gemmkit

        gemmkit.matmul(a, b, out=out)

    def wide_matmul(self, a: Array, b: Array, out: Array) -> None:
        """A @ B into ``out`` of a wider type than theirs."""
        if out.dtype == a.dtype:
            self.torch.matmul(a, b, out=out)
        else:
            self.torch.mm(a, b, out_dtype=out.dtype, out=out)

    def joined(self, a: Array, b: Array, axis: int) -> Array:
        """Both side by side, in memory of its own."""
        return self.torch.cat((a, b), axis)

    def scaled(self, array: Array, factor: float) -> Array:
        """The array times a power of two."""
        return array * factor

    def shown(self, array: Array, shown: Any) -> tuple[Array, Array]:
        """The array with NaN where ``shown``, a NumPy array, is False; and with zeros there."""
        hidden = self.torch.tensor(~shown, device="cuda")
        return array.masked_fill(hidden, float("nan")), array.masked_fill(hidden, 0)

    def largest(self, array: Array) -> Array:
        """Of each row."""
        return array.amax(-1)

    def composed(self, work: str) -> Callable[[Any], None]:
        """What computes a work of `bench.experiments.composed` into ``peer_out`` without gemmkit."""
        torch = self.torch

        def gate(wide: Array) -> Array:
            n = wide.shape[1] // 2
            return torch.nn.functional.silu(wide[:, :n]) * wide[:, n:]

        element_wise: Any = torch.compile(gate, dynamic=False) if work == "glu" else None

        def glu(x: Any) -> None:
            torch.matmul(x.a, x.b, out=x.wide)
            x.peer_out = element_wise(x.wide)

        def five_kernels(x: Any) -> None:
            torch.matmul(x.a, x.b, out=x.first)
            torch.matmul(x.h, x.u, out=x.second)
            torch.add(x.first, x.second, out=x.first)
            torch.add(x.first, x.bias, out=x.first)
            torch.clamp_min(x.first, 0, out=x.peer_out)

        def addmm(x: Any) -> None:
            torch.addmm(x.bias, x.inputs, x.weights, out=x.first)
            torch.clamp_min(x.first, 0, out=x.peer_out)

        def softmax(x: Any) -> None:
            torch.matmul(x.a, x.b, out=x.first)
            torch.softmax(x.first, -1, out=x.peer_out)

        def rmsnorm(x: Any) -> None:
            torch.matmul(x.a, x.b, out=x.first)
            x.peer_out = torch.nn.functional.rms_norm(x.first, (x.gain.shape[0],), x.gain, 1e-5)

        calls: Any = {"softmax": softmax, "rmsnorm": rmsnorm, "glu": glu, "lstm, 5 kernels": five_kernels,
                      "lstm, addmm": addmm}
        found: Callable[[Any], None] = calls[work]
        return found

    def composed_title(self, work: str) -> str:
        """How results call it, and `plain`."""
        titles = {
            "glu": "torch.matmul of 2 N columns, then an element-wise kernel by torch.compile",
            "softmax": "torch.matmul, torch.softmax",
            "rmsnorm": "torch.matmul, torch.nn.functional.rms_norm",
            "lstm, 5 kernels": "torch.matmul twice, torch.add twice, torch.clamp_min",
            "lstm, addmm": "torch.addmm of inputs joined beforehand, torch.clamp_min",
        }
        return f"{titles[work]} (torch {self.torch.__version__})" if work in titles else "gemmkit's plain product"

    def layers(self, x: Any) -> None:
        """Results go to and fro between two arrays, so that the last one is ``peer_out``."""
        count, h = len(x.weights), x.a
        for n, (w, b) in enumerate(zip(x.weights, x.biases)):
            out = x.peer_out if (count - n) % 2 else x.other
            self.torch._addmm_activation(b, h, w, out=out)
            h = out

    def layers_title(self) -> str:
        """How results call it."""
        return f"torch._addmm_activation, a call for each layer (torch {self.torch.__version__})"

    def of_numbers(self, numbers: Any) -> Array:
        """A NumPy array's numbers; whole ones as int32, truths as they are."""
        kinds = {"i": self.torch.int32, "u": self.torch.int32, "b": self.torch.bool}
        kind = kinds.get(numbers.dtype.kind, self.torch.float32)
        return self.torch.tensor(numbers, dtype=kind, device="cuda")

    def as_numpy(self, array: Array) -> Any:
        """The array on the host, in float64 or complex128."""
        return array.to(self.torch.complex128 if array.is_complex() else self.torch.float64).cpu().numpy()

    def attention(self, case: Any) -> Callable[[Array, Array, Array], Array]:
        """A function of q, k and v that computes a `bench.experiments.attention.Attention`."""
        return torch_attention.by_cudnn(case) if case.by_cudnn else torch_attention.by_flex(case)

    def attention_title(self, case: Any) -> str:
        """How results call it."""
        if case.by_cudnn:
            return f"cuDNN {self.torch.backends.cudnn.version()} (torch {self.torch.__version__})"
        return f"FlexAttention (torch {self.torch.__version__})"

    def limit(self, limit: Any, out: Array, first: Array) -> Call:
        """A call of a `bench.experiments.limit.Limit`."""
        call: Call = limit.bind(out, first)
        return call

    def rival(self, case: Any, x: Any) -> Call:
        """A call that computes a row of `bench.experiments.versus` into ``peer_out``, by the library that it names."""
        return rivals.make(case.of, case.rival, x)

    def rival_title(self, case: Any) -> str:
        """How results call it."""
        return rivals.version(case.rival)

    # -- float16 into float32 ---------------------------------------------------------------------------------------

    @cached_property
    def _lt(self) -> CublasLt:
        return CublasLt(self.torch)

    def mixed(self, case: Any, x: Any) -> Call:
        """A call that computes a row of `bench.experiments.mixed` into ``peer_out``."""
        torch, lt, work = self.torch, self._lt, case.work
        if hasattr(x, "planes"):
            return self._planes(case, x)
        if hasattr(case, "spec"):                      # TTGT: A as (d, b, a), which is the product's order
            d, a, b = case.terms
            (k,) = set(a) & set(b)
            columns = a.replace(k, "")
            if d != b.replace(k, "") + columns[::-1]:
                raise ValueError(f"{case.spec}: the peer takes a contraction whose result has B's index first")
            axes = [a.index(label) for label in k + columns[::-1]]
            out = x.peer_out.reshape(x.peer_out.shape[0], -1)
            return lambda: lt(x.b, x.a.permute(axes).contiguous().reshape(x.b.shape[1], -1), None, out)
        if work in ("matmul", "wmma", "diagonal"):
            return lambda: lt(x.a, x.b, x.c, x.peer_out)
        bias = None if work == "relu" else x.bias
        is_relu = work != "bias"
        if case.way == "fused":
            def fused() -> None:
                a, b = (self._fused.relu_plus_one(x.a), torch.add(x.b, 1)) if work == "table2" else (x.a, x.b)
                c = torch.clamp_min(x.c, 0) if work in ("table2", "bias relu c") else x.c
                lt(a, b, c, x.peer_out, bias=bias, relu=is_relu)

            return fused

        def kernels() -> None:
            a, b = (self._fused.relu_plus_one(x.a), torch.add(x.b, 1)) if work == "table2" else (x.a, x.b)
            c = torch.clamp_min(x.c, 0) if work in ("table2", "bias relu c") else x.c
            lt(a, b, c, x.peer_out)
            if bias is None:
                x.peer_out.clamp_min_(0)
            elif is_relu:
                x.peer_out = self._fused.relu_of_sum(x.peer_out, bias)
            else:
                x.peer_out.add_(bias)

        return kernels

    def _planes(self, case: Any, x: Any) -> Call:
        (a, b), begun = x.planes, set[int]()
        steps = []
        for i, j, part, sign in case.terms:
            c = (x.peer_out if part in begun else x.c_planes)[part]
            steps.append((a[i], b[j], c, x.peer_out[part], float(sign)))
            begun.add(part)

        def call() -> None:
            for left, right, c, out, sign in steps:
                self._lt(left, right, c, out, alpha=sign)

        return call

    def mixed_title(self, case: Any) -> str:
        """How results call it."""
        name = f"cuBLASLt {self._lt.version()}"
        if hasattr(case, "terms"):
            how = "A transposed, then a product" if hasattr(case, "spec") else f"{case.products} products of planes"
            return f"{name}: {how}"
        more = {"relu": "ReLU", "bias": "bias", "bias relu": "bias and ReLU", "bias relu c": "relu(C), then bias and ReLU",
                "table2": "relu(A+1), B+1, relu(C), then bias and ReLU"}.get(case.work)
        return f"{name}: A B + C" if more is None else f"{name}: A B + C, {more} " + (
            "fused" if case.way == "fused" else "by kernels of PyTorch")

    # -- the plain product of each kind -----------------------------------------------------------------------------

    def product(self, kind: str, a: Array, b: Array, out: Array) -> None:
        """A @ B into ``out``, as cuBLAS computes a kind of `bench.cases.KINDS`."""
        torch = self.torch
        if kind == "tf32":
            torch.backends.cuda.matmul.allow_tf32 = True
            try:
                torch.matmul(a, b, out=out)
            finally:
                torch.backends.cuda.matmul.allow_tf32 = False
        elif kind == "i8":
            torch._int_mm(a, b, out=out)
        elif kind.startswith("e4m3"):
            torch._scaled_mm(
                a,
                b,
                scale_a=self._one,
                scale_b=self._one,
                out_dtype=out.dtype,
                use_fast_accum=kind.endswith("fast"),
                out=out,
            )
        else:
            torch.matmul(a, b, out=out)

    @cached_property
    def _one(self) -> Array:
        return self.torch.ones((), device="cuda", dtype=self.torch.float32)

    # -- fusions ----------------------------------------------------------------------------------------------------

    def peer(self, case: Case, x: Operands) -> Call:
        """A call that computes the case into ``x.peer_out`` without gemmkit."""
        fusions: dict[str, Callable[[Operands], None]] = {
            "bias": self._bias,
            "bias relu": self._bias_relu,
            "bias relu c": self._bias_relu_c,
            "c": self._c,
            "gelu residual": self._gelu_residual,
            "table2": self._table2,
        }
        by_kernels: dict[str, Callable[[Operands], None]] = {
            "relu": self._then_relu,
            "bias": self._then_bias,
            "bias relu": self._then_bias_relu,
        }
        call = (by_kernels if case.peer == "kernels" else {}).get(case.work) or fusions.get(case.work)
        if call is not None:
            return lambda: call(x)
        return lambda: self.product(case.kind, x.a, x.b, x.peer_out)

    def peer_title(self, case: Case) -> str:
        """How results call it."""
        if case.kind.startswith("e4m3"):
            fast = case.kind.endswith("fast")
            return f"cuBLAS (torch {self.torch.__version__}): torch._scaled_mm, use_fast_accum={fast}"
        product = {"i8": "torch._int_mm", "tf32": "torch.matmul, tf32 allowed"}.get(case.kind, "torch.matmul")
        materialised = f"{product} of the materialised matrix"
        maker = self._fused.maker if case.work in ("bias relu", "bias relu c", "table2") else ""
        names = {
            "bias": "torch.addmm",
            "bias relu": "torch._addmm_activation",
            "bias relu c": f"torch.addmm, relu(D+relu(C)) by {maker}",
            "c": "torch.addmm",
            "gelu residual": "torch._addmm_activation and add",
            "table2": f"relu(A+1), B+1, torch.addmm, relu(D+relu(C)) by {maker}",
            **dict.fromkeys(("diagonal", "dense diagonal", "lower", "upper"), materialised),
        }
        by_kernels = {
            "relu": "torch.matmul, torch.relu_",
            "bias": "torch.matmul, torch.add_",
            "bias relu": f"torch.matmul, relu(D+bias) by {maker}",
        }
        name = (by_kernels if case.peer == "kernels" else {}).get(case.work) or names.get(case.work, product)
        return f"{self.peer_name()}: {name}"

    def _then_relu(self, x: Operands) -> None:
        self.torch.matmul(x.a, x.b, out=x.peer_out)
        self.torch.relu_(x.peer_out)

    def _then_bias(self, x: Operands) -> None:
        self.torch.matmul(x.a, x.b, out=x.peer_out)
        x.peer_out.add_(x.bias)

    def _then_bias_relu(self, x: Operands) -> None:
        x.peer_out = self._fused.relu_of_sum(self.torch.matmul(x.a, x.b), x.bias)

    def _bias_relu_c(self, x: Operands) -> None:
        """cuBLASLt adds the bias, which spares a pass over memory that the paper's peer had."""
        x.peer_out = self._fused.relu_plus_relu(self.torch.addmm(x.bias, x.a, x.b), x.c)

    def _bias(self, x: Operands) -> None:
        self.torch.addmm(x.bias, x.a, x.b, out=x.peer_out)

    def _bias_relu(self, x: Operands) -> None:
        self.torch._addmm_activation(x.bias, x.a, x.b, out=x.peer_out)

    def _c(self, x: Operands) -> None:
        self.torch.addmm(x.c, x.a, x.b, out=x.peer_out)

    def _gelu_residual(self, x: Operands) -> None:
        """cuBLASLt's GELU comes with a bias, which is zero here; the sum with the residual is a kernel of its own."""
        zeros = self._zeros(x)
        self.torch._addmm_activation(zeros, x.a, x.b, use_gelu=True, out=x.peer_out)
        self.torch.add(x.peer_out, x.residual, out=x.peer_out)

    def _zeros(self, x: Operands) -> Array:
        key = int(x.b.shape[1]), x.b.dtype
        if key not in self._kept:
            self._kept[key] = self.torch.zeros(key[0], device="cuda", dtype=key[1])
        return self._kept[key]

    @cached_property
    def _kept(self) -> dict[tuple[int, Any], Array]:
        return {}

    def _table2(self, x: Operands) -> None:
        """What the last kernel allocates is the result: PyTorch's compiled expressions take no ``out``."""
        a, b = self._fused.relu_plus_one(x.a), self.torch.add(x.b, 1)
        x.peer_out = self._fused.relu_plus_relu(self.torch.addmm(x.bias, a, b), x.c)

    @cached_property
    def _fused(self) -> Expressions:
        try:
            found = jiterated()
            ones = self.torch.ones(8, 8, device="cuda", dtype=self.torch.float16)
            found.relu_of_sum(found.relu_plus_relu(found.relu_plus_one(ones), ones), ones[0])
            return found
        except Exception as problem:  # it is a beta interface of PyTorch's
            print(f"torch.cuda.jiterator: {type(problem).__name__}: {problem}; CuPy takes its place", flush=True)
            return by_cupy(self.torch)


class Expressions(NamedTuple):
    """Element-wise kernels of one pass each, into new arrays, and who made them: relu(x + 1), relu(x + relu(y)), and
    relu(x + y) of a matrix and a row."""

    maker: str
    relu_plus_one: Callable[[Array], Array]
    relu_plus_relu: Callable[[Array, Array], Array]
    relu_of_sum: Callable[[Array, Array], Array]


def jiterated() -> Expressions:
    """By PyTorch; computed in float32."""
    from torch.cuda.jiterator import _create_jit_fn

    return Expressions(
        "torch.cuda.jiterator",
        _create_jit_fn(
            "template <typename T> T relu_plus_one(T x) {"
            " float y = static_cast<float>(x) + 1.0f; return T(y > 0.0f ? y : 0.0f); }"
        ),
        _create_jit_fn(
            "template <typename T> T relu_plus_relu(T x, T y) {"
            " float c = static_cast<float>(y); float d = static_cast<float>(x) + (c > 0.0f ? c : 0.0f);"
            " return T(d > 0.0f ? d : 0.0f); }"
        ),
        _create_jit_fn(
            "template <typename T> T relu_of_sum(T x, T y) {"
            " float d = static_cast<float>(x) + static_cast<float>(y); return T(d > 0.0f ? d : 0.0f); }"
        ),
    )


def by_cupy(torch: Any) -> Expressions:
    """By CuPy, on PyTorch's current stream; computed in float32."""
    import cupy

    one = cupy.ElementwiseKernel("T x", "T y", "float v = float(x) + 1.0f; y = T(v > 0 ? v : 0.0f)", "relu_plus_one")
    two = cupy.ElementwiseKernel(
        "T x, T y",
        "T z",
        "float c = float(y); float d = float(x) + (c > 0 ? c : 0.0f); z = T(d > 0 ? d : 0.0f)",
        "relu_plus_relu",
    )
    three = cupy.ElementwiseKernel(
        "T x, T y", "T z", "float d = float(x) + float(y); z = T(d > 0 ? d : 0.0f)", "relu_of_sum"
    )

    def call(kernel: Any, *arrays: Array) -> Array:
        out = torch.empty_like(arrays[0])
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            kernel(*(cupy.asarray(array) for array in (*arrays, out)))
        return out

    return Expressions(
        "cupy.ElementwiseKernel",
        lambda x: call(one, x),
        lambda x, y: call(two, x, y),
        lambda x, y: call(three, x, y),
    )
