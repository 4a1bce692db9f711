"""cuBLASLt as C programs call it, on tensors of PyTorch: D = alpha A B + C with operands of one type and C and D of another.

`torch.addmm` of such types copies C first. Here C and D are two arrays of one call (``cublasLtMatmul``), with the algorithm
that cuBLASLt itself names first and a workspace of 32 MiB, which is what PyTorch gives it on Hopper.

    product = CublasLt(torch)
    product(a, b, c, out)                               # out = a @ b + c
    product(a, b, c, out, bias=bias, relu=True)         # out = relu(a @ b + c + bias), in cuBLASLt's epilogue
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

_TYPES = {"float16": 2, "float32": 0, "bfloat16": 14}              # cudaDataType_t
_COMPUTE_32F = 68                                                  # CUBLAS_COMPUTE_32F
_TRANSA, _TRANSB, _EPILOGUE, _BIAS_POINTER = 3, 4, 7, 8            # cublasLtMatmulDescAttributes_t
_EPILOGUES = {(False, False): 1, (False, True): 2, (True, False): 4, (True, True): 6}      # by bias and ReLU
_MAX_WORKSPACE = 1                                                 # cublasLtMatmulPreferenceAttributes_t
WORKSPACE = 32 << 20


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (("algorithm", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int),
                ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4))


def _library() -> Any:
    """The libcublasLt that PyTorch has loaded."""
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcublasLt.so" in line}
    if not paths:
        raise RuntimeError("PyTorch has loaded no libcublasLt; multiply two tensors first")
    return ctypes.CDLL(sorted(paths)[0])


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"{what}: cuBLAS answered {status}")


class CublasLt:
    """Calls of cublasLtMatmul; what describes one is made once for each kind of operands."""

    def __init__(self, torch: Any):
        self.torch = torch
        ones = torch.ones(64, 64, device="cuda", dtype=torch.float16)
        torch._addmm_activation(ones[0], ones, ones)               # loads the library
        self.lib, self.handle = _library(), ctypes.c_void_p()
        self._call("Create", ctypes.byref(self.handle))
        self.workspace = torch.empty(WORKSPACE, device="cuda", dtype=torch.uint8)
        self.known: dict[Any, Any] = {}

    def version(self) -> str:
        self.lib.cublasLtGetVersion.restype = ctypes.c_size_t
        return str(self.lib.cublasLtGetVersion())

    def _call(self, name: str, *arguments: Any) -> None:
        _check(getattr(self.lib, f"cublasLt{name}")(*arguments), f"cublasLt{name}")

    def __call__(self, a: Any, b: Any, c: Any, out: Any, *, bias: Any = None, relu: bool = False,
                 alpha: float = 1.0) -> None:
        """``out`` = alpha ``a`` @ ``b`` + ``c`` (None: no C), with a bias of N numbers of out's type, and ReLU."""
        key = tuple((x.shape, x.stride(), x.dtype) for x in (a, b, out)), c is None, bias is None, relu
        if key not in self.known:
            self.known[key] = self._made(a, b, c, out, bias, relu)
        describing, layouts, found = self.known[key]
        if bias is not None:
            at = ctypes.c_void_p(bias.data_ptr())
            self._call("MatmulDescSetAttribute", describing, _BIAS_POINTER, ctypes.byref(at), ctypes.sizeof(at))
        factors = ctypes.c_float(alpha), ctypes.c_float(0.0 if c is None else 1.0)
        at_c = (out if c is None else c).data_ptr()
        # Matrices by rows are transposes to cuBLAS, and D^T = B^T A^T + C^T.
        self._call("Matmul", self.handle, describing, ctypes.byref(factors[0]), ctypes.c_void_p(b.data_ptr()), layouts[0],
                   ctypes.c_void_p(a.data_ptr()), layouts[1], ctypes.byref(factors[1]), ctypes.c_void_p(at_c), layouts[2],
                   ctypes.c_void_p(out.data_ptr()), layouts[2], ctypes.byref(found.algorithm),
                   ctypes.c_void_p(self.workspace.data_ptr()), ctypes.c_size_t(WORKSPACE),
                   ctypes.c_void_p(self.torch.cuda.current_stream().cuda_stream))

    def _made(self, a: Any, b: Any, c: Any, out: Any, bias: Any, relu: bool) -> tuple[Any, list[Any], Heuristic]:
        assert out.stride(1) == 1 and (c is None or c.stride() == out.stride())
        describing, preference, layouts = ctypes.c_void_p(), ctypes.c_void_p(), []
        self._call("MatmulDescCreate", ctypes.byref(describing), _COMPUTE_32F, _TYPES["float32"])

        def describe(attribute: int, value: Any) -> None:
            self._call("MatmulDescSetAttribute", describing, attribute, ctypes.byref(value), ctypes.sizeof(value))

        for matrix, attribute in ((b, _TRANSA), (a, _TRANSB), (out, None)):
            by_rows = matrix.stride(1) == 1
            rows, columns = matrix.shape[::-1] if by_rows else matrix.shape                # of what cuBLAS reads by columns
            step = matrix.stride(0) if by_rows else matrix.stride(1)
            layout = ctypes.c_void_p()
            self._call("MatrixLayoutCreate", ctypes.byref(layout), _TYPES[str(matrix.dtype).removeprefix("torch.")],
                       ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(step))
            layouts.append(layout)
            if attribute is not None:
                describe(attribute, ctypes.c_int32(0 if by_rows else 1))
        describe(_EPILOGUE, ctypes.c_int32(_EPILOGUES[bias is not None, relu]))
        if bias is not None:
            describe(_BIAS_POINTER, ctypes.c_void_p(bias.data_ptr()))
        self._call("MatmulPreferenceCreate", ctypes.byref(preference))
        most = ctypes.c_size_t(WORKSPACE)
        self._call("MatmulPreferenceSetAttribute", preference, _MAX_WORKSPACE, ctypes.byref(most), ctypes.sizeof(most))
        found, count = Heuristic(), ctypes.c_int()
        self._call("MatmulAlgoGetHeuristic", self.handle, describing, *layouts, layouts[2], preference, 1,
                   ctypes.byref(found), ctypes.byref(count))
        if not count.value:
            raise RuntimeError(f"cuBLASLt has no algorithm for {a.shape} @ {b.shape} of {a.dtype} into {out.dtype}")
        return describing, layouts, found
