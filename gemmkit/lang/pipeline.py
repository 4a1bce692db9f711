"""How Numba compiles our functions: what it does for every one of them, once; what it does for nobody, not at all.

A kernel is some sixty small functions, each compiled by itself, and more went into what surrounds the work than into the
work. Of the time from a kernel to PTX, before:

* after each of a dozen passes over a function Numba analysed anew which variables live where (8 %), and around each it kept
  timers and told of events (5 %);
* before each function, and for each of its own templates, it looked whether operations had been registered meanwhile (10 %),
  and loaded SciPy (5 %);
* it described every argument to a debugger, which asks LLVM for the sizes of their types, and every line again at every
  instruction (9 %);
* the garbage collector walked through all that lives (9 %), and once more when all was done (7 %): `gemmkit.lang.garbage`;
* it looked for inner functions to inline, and for array expressions to rewrite, with an analysis for each (4 %).

The code that comes out is the same.
"""

from __future__ import annotations

import contextlib
import dis
import sys
import threading
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType
from typing import Any, ClassVar

from numba.cuda.compiler import CUDABytecodeInterpreter, CUDANativeLowering, CUDATranslateBytecode
from numba.cuda.core import transforms
from numba.cuda.core.compiler_machinery import PassManager, _pass_registry, register_pass
from numba.cuda.core.errors import NumbaError
from numba.cuda.core.inline_closurecall import RewriteArrayOfConsts
from numba.cuda.core.ir_utils import fixup_var_define_in_scope
from numba.cuda.core.postproc import PostProcessor
from numba.cuda.core.rewrites import rewrite_registry
from numba.cuda.core.rewrites.registry import RewriteRegistry
from numba.cuda.core.typed_passes import NopythonRewrites
from numba.cuda.core.untyped_passes import InlineClosureLikes
from numba.cuda.target import CUDATargetContext

from gemmkit.lang.lowering import Lines, Lower, in_values
from gemmkit.lang.shortcuts import install, value_types
from gemmkit.lang.ways import unify_ways


@register_pass(mutates_CFG=True, analysis_only=False)
class _ClosureLikes(InlineClosureLikes):
    """Numba's inlining of inner functions, of `reduce` and of lists that become arrays, for code that has one of them. It
    finds out which variables live where before it looks (2 % of the time)."""

    _name = "gemmkit_closure_likes"

    def run_pass(self, state: Any) -> bool:
        code = state.func_ir.func_id.code
        if ("reduce" in code.co_names or any(isinstance(constant, CodeType) for constant in code.co_consts)
                or _BUILD_LIST in code.co_code[::2]):
            inlined: bool = super().run_pass(state)
            return inlined
        fixup_var_define_in_scope(state.func_ir.blocks)
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class _Rewrites(NopythonRewrites):
    """Numba's rewrites after type inference, without the analysis of lifetimes that those of arrays on the host wanted
    (2 %): the ones for CUDA are of items with constant numbers. Arrays are looked for (3 %) where there is a list."""

    _name = "gemmkit_rewrites"

    def run_pass(self, state: Any) -> bool:
        rewrites = RewriteRegistry()
        has_list = _BUILD_LIST in state.func_ir.func_id.code.co_code[::2]
        rewrites.rewrites["after-inference"] = [each for each in rewrite_registry.rewrites["after-inference"]
                                                if has_list or each is not RewriteArrayOfConsts]
        rewrites.apply("after-inference", state)
        return True


class _Interpreter(CUDABytecodeInterpreter):
    """Numba's reading of bytecode. It goes through a function again for each form of it that is written in several
    instructions: here only where an instruction of that form is in the code (2 %)."""

    def post_process(self, peepholes: list, func_ir: Any) -> Any:
        there = set(func_ir.func_id.code.co_code[::2])
        wanted = [peephole for peephole in peepholes if not there.isdisjoint(_FORMS.get(peephole.__name__, there))]
        return super().post_process(wanted, func_ir)


@register_pass(mutates_CFG=True, analysis_only=False)
class Translation(CUDATranslateBytecode):
    """From bytecode to Numba's intermediate code."""

    _name = "gemmkit_translation"

    def run_pass(self, state: Any) -> bool:
        state["func_ir"] = _Interpreter(state["func_id"]).interpret(state["bc"])
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class _Lowering(CUDANativeLowering):
    """From typed intermediate code to LLVM's."""

    _name = "gemmkit_lowering"
    lowering_class = Lower


_SHORTER = {InlineClosureLikes: _ClosureLikes, NopythonRewrites: _Rewrites, CUDATranslateBytecode: Translation,
            CUDANativeLowering: _Lowering}
_BUILD_LIST = dis.opmap["BUILD_LIST"]
_WITH = {dis.opmap[name] for name in ("SETUP_WITH", "BEFORE_WITH", "LOAD_SPECIAL") if name in dis.opmap}
_FORMS = {                                                    # of what Numba's peepholes rewrite, an instruction
    "peep_hole_list_to_tuple": {_BUILD_LIST},
    "peep_hole_delete_with_exit": _WITH,
    "peep_hole_call_function_ex_to_call_function_kw": {dis.opmap["CALL_FUNCTION_EX"]},
    "peep_hole_fuse_dict_add_updates": {dis.opmap["DICT_UPDATE"], dis.opmap["DICT_MERGE"]},
}


class Passes(PassManager):
    """Numba's passes, without timers, events and checks of its own consistency around each of them."""

    def __init__(self, passes: list):
        super().__init__("cuda")
        self.passes = [(_SHORTER.get(cls, cls), text) for cls, text in passes]

    def finalize(self) -> None:
        super().finalize()
        self._steps = [(_pass_registry.get(cls), text) for cls, text in self.passes]

    def run(self, state: Any) -> None:
        for info, text in self._steps:
            step = info.pass_inst
            step.analysis = self._analysis
            try:
                step.run_initialization(state)
                step.run_pass(state)
                step.run_finalizer(state)
            except NumbaError as error:
                raise self._patch_error(f"Failed in {self.pipeline_name} mode pipeline (step: {text})", error)      # noqa: B904
            if info.mutates_CFG:
                PostProcessor(state.func_ir).run()


_analyse = PostProcessor.run


def _tidy(self: Any, emit_dels: bool = False, extend_lifetimes: bool = False) -> None:
    """What Numba does after a pass, with the analysis of which variables live only where something reads it."""
    code = self.func_ir.func_id.code
    reads = "literal_unroll" in code.co_names or not _WITH.isdisjoint(code.co_code[::2])
    if emit_dels or reads or self.func_ir.is_generator:
        _analyse(self, emit_dels, extend_lifetimes)
    elif len(self.func_ir.blocks) > 1 and _edges(self.func_ir.blocks) != getattr(self.func_ir, "_gemmkit_edges", None):
        self.func_ir.blocks = transforms.canonicalize_cfg(self.func_ir.blocks)
        self.func_ir._gemmkit_edges = _edges(self.func_ir.blocks)


def _edges(blocks: dict) -> list[tuple[int, Any]]:
    """Which blocks follow which. Whether they are canonical (a loop has one way back to its head) depends on that."""
    return [(offset, block.body[-1].get_targets()) for offset, block in blocks.items()]


@contextlib.contextmanager
def analysed_once() -> Iterator[None]:
    """Functions are compiled with few analyses; the caller holds Numba's compiler lock."""
    before, PostProcessor.run = PostProcessor.run, _tidy       # compilations nest
    try:
        with in_values():
            yield
    finally:
        PostProcessor.run = before


def _registered(context: Any) -> list[list]:
    """The operations of each kind that are registered with what a context reads, in lists that grow."""
    return [getattr(registry, kind) for registry, loader in context._registries.items() for kind in loader.registry_items]


class _Refresh:
    """Both contexts' ``refresh``: they look for what was registered, until there is nothing new.

    Numba's own templates ask for it a hundred times while they are loaded themselves; then it is under way.
    """

    def __init__(self, *contexts: Any):
        self._contexts, self._refreshes = contexts, [context.refresh for context in contexts]
        self._lists: list[list] = []
        self._known: Any = None
        self._lock, self._busy = threading.RLock(), False

    def __call__(self) -> None:
        with self._lock:
            if self._busy:
                return
            self._busy = True
            try:
                while (found := self._count()) != self._known:
                    with _absent("scipy.linalg"):
                        for refresh in self._refreshes:
                            refresh()
                    self._lists = [each for context in self._contexts for each in _registered(context)]
                    self._known = found
            finally:
                self._busy = False

    def _count(self) -> Any:
        return [len(context._registries) for context in self._contexts], list(map(len, self._lists))


@contextlib.contextmanager
def _absent(module: str) -> Iterator[None]:
    """This thread imports without a module: numba.cuda asks for SciPy's BLAS, which no device code can call, and a tenth of
    the time of a first compilation went into loading it."""
    asking = threading.get_ident()

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> None:
            if name == module and threading.get_ident() == asking:
                raise ModuleNotFoundError(f"{name} is not wanted here", name=name)

    sys.meta_path.insert(0, Finder)
    try:
        yield
    finally:
        sys.meta_path.remove(Finder)


class _Target(CUDATargetContext):
    """numba-cuda's target context (its tables are shared), with our line numbers, and with a memory for types' sizes: Numba
    has LLVM parse a module for each question (2 % of the time)."""

    DIBuilder = Lines
    _sizes: ClassVar[dict[str, int]] = {}

    def get_abi_sizeof(self, ty: Any) -> int:
        text = str(ty)
        size = self._sizes.get(text)
        if size is None:
            size = self._sizes[text] = super().get_abi_sizeof(ty)
        return size


@lru_cache(maxsize=1)
def contexts() -> tuple[Any, Any]:
    """The typing and the target context to compile with."""
    from numba.cuda.descriptor import cuda_target

    typing_context, target = cuda_target.typing_context, cuda_target.target_context.subtarget()
    target.__class__ = _Target
    install()
    typing_context.resolve_value_type = value_types(typing_context)
    typing_context.unify_pairs = unify_ways(typing_context)
    typing_context.refresh = cuda_target.target_context.refresh = target.refresh = _Refresh(target, typing_context)
    return typing_context, target
