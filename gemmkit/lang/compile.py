"""One function compiled for argument types: numba-cuda's pipeline, with gemmkit's passes in it."""

from __future__ import annotations

import contextlib
import dis
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType, NoneType
from typing import Any, ClassVar

import numba.core.utils
from numba.core.types import Type
from numba.cuda import compiler as numba_compiler
from numba.cuda import lowering, types
from numba.cuda.compiler import CUDABytecodeInterpreter, CUDANativeLowering, CUDATranslateBytecode
from numba.cuda.core import base, ir, transforms
from numba.cuda.core.compiler_machinery import PassManager, _pass_registry, register_pass
from numba.cuda.core.errors import NumbaError
from numba.cuda.core.inline_closurecall import RewriteArrayOfConsts
from numba.cuda.core.ir_utils import fixup_var_define_in_scope
from numba.cuda.core.postproc import PostProcessor
from numba.cuda.core.rewrites import rewrite_registry
from numba.cuda.core.rewrites.registry import RewriteRegistry
from numba.cuda.core.typed_passes import NopythonRewrites
from numba.cuda.core.untyped_passes import InlineClosureLikes, IRProcessing
from numba.cuda.target import CUDATargetContext

from gemmkit.lang import source
from gemmkit.lang.complex import WEAK_COMPLEX
from gemmkit.lang.lowering import Calls, Lines, Lower, in_values
from gemmkit.lang.numba_hooks import Atom, compiles_users, compiling, rules_hold_in, target_arch
from gemmkit.lang.passes import Assertions, CapturesToArguments, InnerFunctions, ModuleAttributes, StaticBranches
from gemmkit.lang.scalars import WEAK_FLOATS, IndexType, NarrowFloatType, WeakIntLiteral
from gemmkit.lang.source import Endings

# --------------------------------------------------------------------------------------------------
# Questions that Numba asks thousands of times a kernel, answered faster. The answers are Numba's.
#
# * Whether an object is a type of some class: Numba's types are abstract base classes, whose ``isinstance`` asks a registry
#   of virtual subclasses, which is empty, for 50,000 objects a kernel.
# * Which variables a statement names: Numba asks all that a statement holds, its line included, a dozen times each.
# * Whether a lowering takes a ``loc``: Numba makes a signature for every operation that it lowers.
# * The type of a name: an atom knows its own, and a built-in function of Python is neither a buffer nor an array.
# * Which templates of an operator are for this target, and in which order: once for a list of templates.

_NOTHING = {str, int, float, bool, NoneType, ir.Loc, ir.Scope}             # what names no variable


def _variables(self: ir.Inst, value: object) -> list:
    """``ir.Inst._rec_list_vars``: the variables in a value of a statement, in order."""
    found: list = []
    _collect(value, found)
    return found


def _collect(value: object, found: list) -> None:
    cls = type(value)
    if cls in _NOTHING:
        return
    if isinstance(value, ir.var_types):
        found.append(value)
    elif isinstance(value, ir.inst_types):
        found += value.list_vars()
    elif isinstance(value, (list, tuple)):
        for each in value:
            _collect(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            _collect(each, found)


_by_signature = base._has_loc


def _has_loc(function: Any) -> bool:
    """Whether a lowering has a parameter ``loc``."""
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__wrapped__") or hasattr(function, "__signature__"):
        return bool(_by_signature(function))
    return "loc" in code.co_varnames[:code.co_argcount + code.co_kwonlyargcount]


_in_order = numba.core.utils.order_by_target_specificity


@lru_cache(maxsize=1024)
def _ordered(target: object, templates: tuple, fnkey: object) -> tuple:
    return tuple(_in_order(target, list(templates), fnkey))


def _order(target: object, templates: Iterable, fnkey: object = "") -> list:
    """``order_by_target_specificity``, which looks at every template of an operator at every call of it."""
    return list(_ordered(target, tuple(templates), fnkey))


def value_types(context: base.BaseContext) -> Callable[[Any], Any]:
    """``resolve_value_type`` of a typing context."""
    ask = context.resolve_value_type

    def resolve(value: object) -> Any:
        if isinstance(value, Atom):
            return value.device_type
        if type(value) is BuiltinFunctionType:                # of no type by itself, as `typeof` says in the end
            found = context._get_global_type(value)
            if found is not None:
                return found
        return ask(value)

    return resolve


def install() -> None:
    """Put the shortcuts in the places of what they answer for."""
    metaclass: Any = type(Type)
    metaclass.__instancecheck__, metaclass.__subclasscheck__ = type.__instancecheck__, type.__subclasscheck__
    ir.Inst._rec_list_vars = _variables
    base._has_loc = _has_loc
    numba.core.utils.order_by_target_specificity = _order


# --------------------------------------------------------------------------------------------------
# A number that is of one type on one way and of another on the other: refused in a user's code.
#
# ``x if c else y`` of float32 and float64 would be float64 on both ways when compiled. Python, and so the emulator, takes
# the one as it is: what is computed with it then has another type. A literal or a plain float takes the type of the
# number on the other way, where that holds it.

_NUMBERS = (types.Number, types.Boolean, NarrowFloatType, *WEAK_FLOATS, *WEAK_COMPLEX)


def unify_ways(context: base.BaseContext) -> Any:
    """``unify_pairs`` of a typing context: the type of a variable that several ways give a value."""
    ask = context.unify_pairs

    def unify(first: types.Type, second: types.Type) -> Any:
        if first != second and isinstance(first, _NUMBERS) and isinstance(second, _NUMBERS) and compiles_users():
            if not (_takes(first, second) or _takes(second, first)):
                return None
        return ask(first, second)

    return unify


def _takes(ty: types.Type, other: types.Type) -> bool:
    """Whether a number of type ``other`` is, beside one of type ``ty``, the same number of that type in both worlds."""
    if isinstance(other, WeakIntLiteral):
        return _holds(types.unliteral(ty), other.literal_value)
    if isinstance(ty, WeakIntLiteral):                        # whether it is held is asked the other way about
        return isinstance(other, _PLAIN)
    if isinstance(other, IndexType):
        if isinstance(ty, types.Integer):
            return bool(ty.signed and ty.bitwidth >= other.bitwidth)
        return not isinstance(ty, types.Boolean)
    if isinstance(other, (*WEAK_FLOATS, *WEAK_COMPLEX)):
        whole = isinstance(ty, (types.Integer, types.Boolean)) and not isinstance(ty, (IndexType, WeakIntLiteral))
        return not whole and not (isinstance(other, WEAK_COMPLEX) and not isinstance(ty, (types.Complex, *_PLAIN)))
    return bool(types.unliteral(ty) == types.unliteral(other))


_PLAIN = (*WEAK_FLOATS, *WEAK_COMPLEX, IndexType, WeakIntLiteral)


def _holds(ty: types.Type, value: int) -> bool:
    """Whether an integer literal is a number of this type."""
    if isinstance(ty, types.Boolean):
        return False
    if not isinstance(ty, types.Integer):
        return True
    low = -2 ** (ty.bitwidth - 1) if ty.signed else 0
    return bool(low <= value < low + 2 ** ty.bitwidth)


# --------------------------------------------------------------------------------------------------
# How Numba compiles our functions: what it does for every one of them, once; what it does for nobody, not at all.
#
# A kernel is some hundred small functions, each compiled by itself. Numba spent more time around the work than on it:
#
# * it found out which variables live where after each of a dozen passes (8 %), kept timers and told of events (5 %);
# * it looked for newly registered operations before each function and each template (10 %), and loaded SciPy (5 %);
# * it described every argument to a debugger, and every line again at every instruction (9 %);
# * the garbage collector walked through all that lives (16 %): `gemmkit.lang.deferred`;
# * it looked for inner functions to inline and for array expressions to rewrite, with an analysis for each (4 %).
#
# The code that comes out is the same.

@register_pass(mutates_CFG=True, analysis_only=False)
class _ClosureLikes(InlineClosureLikes):
    """Numba's inlining of inner functions, of `reduce` and of lists that become arrays, for code that has one of them. It
    finds out which variables live where before it looks (2 % of the time)."""

    _name = "gemmkit_closure_likes"

    def run_pass(self, state: numba_compiler.StateDict) -> bool:
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

    def run_pass(self, state: numba_compiler.StateDict) -> bool:
        rewrites = RewriteRegistry()
        has_list = _BUILD_LIST in state.func_ir.func_id.code.co_code[::2]
        rewrites.rewrites["after-inference"] = [each for each in rewrite_registry.rewrites["after-inference"]
                                                if has_list or each is not RewriteArrayOfConsts]
        rewrites.apply("after-inference", state)
        return True


class _Interpreter(CUDABytecodeInterpreter):
    """Numba's reading of bytecode. It goes through a function again for each form of it that is written in several
    instructions: here only where an instruction of that form is in the code (2 %)."""

    def post_process(self, peepholes: list, func_ir: ir.FunctionIR) -> Any:
        there = set(func_ir.func_id.code.co_code[::2])
        wanted = [peephole for peephole in peepholes if not there.isdisjoint(_FORMS.get(peephole.__name__, there))]
        return super().post_process(wanted, func_ir)


@register_pass(mutates_CFG=True, analysis_only=False)
class Translation(CUDATranslateBytecode):
    """From bytecode to Numba's intermediate code."""

    _name = "gemmkit_translation"

    def run_pass(self, state: numba_compiler.StateDict) -> bool:
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

    def run(self, state: numba_compiler.StateDict) -> None:
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


def _tidy(self: PostProcessor, emit_dels: bool = False, extend_lifetimes: bool = False) -> None:
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


def _registered(context: base.BaseContext) -> list[list]:
    """The operations of each kind that are registered with what a context reads, in lists that grow."""
    return [getattr(registry, kind) for registry, loader in context._registries.items() for kind in loader.registry_items]


class _Refresh:
    """Both contexts' ``refresh``: they look for what was registered, until there is nothing new.

    Numba's own templates ask for it a hundred times while they are loaded themselves; then it is under way.
    """

    def __init__(self, *contexts: base.BaseContext):
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
        def find_spec(name: str, path: object = None, target: object = None) -> None:
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

    def get_abi_sizeof(self, ty: object) -> int:
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


class _Pipeline(numba_compiler.CUDACompiler):
    """numba-cuda's pipeline with six passes more, right after the bytecode is read."""

    _passes: Passes | None = None                             # the same for all functions

    def define_pipelines(self) -> Any:
        if _Pipeline._passes is None:
            (pipeline,) = super().define_pipelines()
            passes = Passes(pipeline.passes)
            passes.add_pass_after(Endings, Translation)
            passes.add_pass_after(ModuleAttributes, Translation)
            passes.add_pass_after(CapturesToArguments, Translation)
            passes.add_pass_after(Assertions, Translation)
            passes.add_pass_after(InnerFunctions, IRProcessing)
            passes.add_pass_after(StaticBranches, IRProcessing)
            passes.finalize()
            _Pipeline._passes = passes
        return [_Pipeline._passes]


rules_hold_in(_Pipeline)


def compile_function(function: FunctionType, args: tuple, captures: Any = None, inline: bool = True) -> Any:
    """What numba-cuda's ``compile_cuda`` does, with our pipeline; ``inline``: a device function, not a kernel."""
    source.check_compiled(function, args)
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
    source.check_result(function, result.signature.return_type)
    result.library.finalize()
    return result


def _run_pipeline(function: FunctionType, args: tuple, flags: Any, typing_context: Any, context: base.BaseContext) -> Any:
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
