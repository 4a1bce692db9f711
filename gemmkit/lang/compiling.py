"""One function compiled for argument types: numba-cuda's pipeline, with gemmkit's passes in it."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from numba.cuda import compiler as numba_compiler
from numba.cuda import lowering
from numba.cuda.core.untyped_passes import IRProcessing

from gemmkit.lang import dialect
from gemmkit.lang.assertions import Assertions
from gemmkit.lang.calls import Calls
from gemmkit.lang.captures import Captures
from gemmkit.lang.endings import Endings
from gemmkit.lang.inner_functions import InnerFunctions
from gemmkit.lang.module_attributes import ModuleAttributes
from gemmkit.lang.numba_hooks import rules_hold_in
from gemmkit.lang.pipeline import Passes, Translation, analysed_once, contexts
from gemmkit.lang.static_branches import StaticBranches
from gemmkit.lang.target import compiling, target_arch


class _Pipeline(numba_compiler.CUDACompiler):
    """numba-cuda's pipeline with six passes more, right after the bytecode is read."""

    _passes: Passes | None = None                             # the same for all functions

    def define_pipelines(self) -> Any:
        if _Pipeline._passes is None:
            (pipeline,) = super().define_pipelines()
            passes = Passes(pipeline.passes)
            passes.add_pass_after(Endings, Translation)
            passes.add_pass_after(ModuleAttributes, Translation)
            passes.add_pass_after(Captures, Translation)
            passes.add_pass_after(Assertions, Translation)
            passes.add_pass_after(InnerFunctions, IRProcessing)
            passes.add_pass_after(StaticBranches, IRProcessing)
            passes.finalize()
            _Pipeline._passes = passes
        return [_Pipeline._passes]


rules_hold_in(_Pipeline)


def compile_function(function: FunctionType, args: tuple, captures: Any = None, inline: bool = True) -> Any:
    """What numba-cuda's ``compile_cuda`` does, with our pipeline; ``inline``: a device function, not a kernel."""
    dialect.check_compiled(function, args)
    typing_context, context = contexts()
    flags = numba_compiler.CUDAFlags()
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.debuginfo = flags.dbg_directives_only = True
    flags.inline, flags.error_model = "never", "numpy"
    flags.forceinline = inline
    flags.nvvm_options = {"opt": 3, "fastmath": False}
    flags.compute_capability = target_arch()
    if captures is not None:
        args = (captures, *args)
    with compiling(), numba_compiler.utils.numba_target_override(), analysed_once():
        result = _run_pipeline(function, args, flags, typing_context, context)
    dialect.check_result(function, result.signature.return_type)
    result.library.finalize()
    return result


def _run_pipeline(function: FunctionType, args: tuple, flags: Any, typing_context: Any, context: Any) -> Any:
    # Numba parses a function's source for the line of its ``def``, which fails for a lambda inside a longer expression
    # (its lines alone are no syntax); the code object knows the line. The caller holds the compiler lock.
    convention = (Calls if flags.forceinline else numba_compiler.CUDACallConv)(context)       # (a kernel's is Numba's)
    parse, lowering.get_func_def_lineno = lowering.get_func_def_lineno, _first_line
    try:
        return numba_compiler.compile_extra(
            typingctx=typing_context, targetctx=context, func=function, args=args, return_type=None, flags=flags,
            locals={}, pipeline_class=_Pipeline, call_conv=convention, abi_info={})
    finally:
        lowering.get_func_def_lineno = parse


def _first_line(function: FunctionType) -> int:
    return function.__code__.co_firstlineno
