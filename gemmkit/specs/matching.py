"""Atomic specs: a spec that is not decomposed is an instruction, or it is refused (Graphene, section 5.2 and Table 2).

An `Instruction` is a component whose `run` is device code. Its class says what a spec would have to be for it: `differs`
gives a sentence for each thing that is otherwise. The first instruction of a spec's kind from which nothing differs is
taken. Is there none, `NoAtom` lists the nearest and what differs from each:

>>> from gemmkit.specs import THREAD, T, instruction
>>> instruction("Move", THREAD, T[8].fp16.GL, T[8].fp16.RF).__class__.__name__
'MoveLine'
>>> instruction("MatMul", THREAD, T[()].fp16.RF, T[()].fp16.RF, T[()].fp32.RF)   # doctest: +ELLIPSIS
Traceback (most recent call last):
...
gemmkit.specs.matching.NoAtom: MatMul <<<[].thread>>> ([].fp16.RF, [].fp16.RF) -> ([].fp32.RF) is no instruction...

A spec is called with its parameters (an operator, a value), the threads that execute it together, its inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, ClassVar

from gemmkit.components import Component, freeze
from gemmkit.lang.atoms import Atom, atom
from gemmkit.lang.functions import DeviceFunctionType
from gemmkit.lang.numba_hooks import TypingError, cgutils, signature, types
from gemmkit.lang.static import NotKnown, SplitType, known
from gemmkit.specs.forms import MMA, Form, Line, line_of
from gemmkit.specs.threads import Threads

NEAREST = 3                                                   # instructions that an error lists


class NoAtom(ValueError):
    """A spec that no instruction executes, and that has no decomposition."""


class Instruction(Component):
    """An instruction as a spec: ``row`` is its line in Table 2."""

    row: ClassVar[str] = ""

    @property
    def becomes(self) -> str:
        """What is executed."""
        return self.row.rpartition(": ")[2]

    @staticmethod
    def differs(threads: Threads, *given: Any) -> Iterator[str]:
        """What a spec's parameters and forms have otherwise; nothing if this is the instruction."""
        raise NotImplementedError

    @classmethod
    def of(cls, threads: Threads, *given: Any) -> Instruction:
        """The instruction for them."""
        return cls()


_known: dict[str, list[type[Instruction]]] = {}


def atomic(kind: str) -> Callable[[type[Instruction]], type[Instruction]]:
    """Enter a class of instructions among those that execute a kind of spec."""
    def enter(cls: type[Instruction]) -> type[Instruction]:
        _known.setdefault(kind, []).append(cls)
        return cls

    return enter


@lru_cache(maxsize=8192)
def instruction(kind: str, *given: Any) -> Instruction:
    """The instruction that a spec is. Raises NoAtom, with the nearest ones."""
    at = next(n for n, x in enumerate(given) if isinstance(x, Threads))
    parameters, threads, forms = given[:at], given[at], given[at + 1:]
    missed = []
    for number, cls in enumerate(_known[kind]):
        wrong = list(cls.differs(threads, *parameters, *forms))
        if not wrong:
            return cls.of(threads, *parameters, *forms)
        missed.append((len(wrong), number, cls, wrong))
    missed.sort(key=lambda m: m[:2])
    nearest = [f"  {cls.row}\n    but {'; '.join(wrong)}" for _, _, cls, wrong in missed[:NEAREST]]
    said = f"<{', '.join(map(str, parameters))}>" if parameters else ""
    inputs, output = ", ".join(map(str, forms[:-1])), str(forms[-1])
    raise NoAtom(f"{kind}{said} <<<{threads}>>> ({inputs}) -> ({output}) is no instruction. Decompose it further; the "
                 "nearest instructions are\n" + "\n".join(nearest))


# -- as device code ---------------------------------------------------------------------------------------------------

def _value_of(ty: Any) -> Any:
    """What is matched of an argument: its compile-time value, its form; of a function itself."""
    if isinstance(ty, SplitType):
        return ty.static
    if isinstance(ty, DeviceFunctionType):
        return ty.function.function
    return known(ty)


def _arguments(kind: str, values: tuple) -> tuple:
    """The place of the threads among a spec's arguments."""
    at = [n for n, x in enumerate(values) if isinstance(x, Threads)]
    if len(at) != 1 or not all(isinstance(x, Form) for x in values[at[0] + 1:]) or len(values) == at[0] + 1:
        raise NoAtom(f"{kind}: give its parameters, the threads that execute it, and its tensors; got "
                     f"({', '.join(map(str, values))})")
    return at[0], values


def spec(kind: str, doc: str) -> Atom:
    """A kind of spec as a function of device code, of (parameters..., threads, tensors...)."""
    def typer(context: Any, *args: Any) -> Any:
        try:
            at, values = _arguments(kind, tuple(map(_value_of, args)))
            made = instruction(kind, *values)
        except (NoAtom, NotKnown) as error:
            raise TypingError(str(error)) from None
        ty: Any = freeze(made).type
        run = ty.method("run")
        tensors = args[at + 1:]
        inner = signature(run.compile((ty, *tensors)).signature.return_type, ty, *tensors)

        def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
            component = cgutils.create_struct_proxy(ty)(c, b)._getvalue()
            c.get_function(DeviceFunctionType(run), inner)(b, (component, *v[at + 1:]))
            return c.get_dummy_value()

        return signature(types.none, *args), codegen

    def emulate(*args: Any) -> None:
        at, values = _arguments(kind, tuple(getattr(x, "form", x) for x in args))
        run: Any = instruction(kind, *values)
        run.run(*args[at + 1:])

    emulate.__name__, emulate.__doc__ = kind, doc
    return atom(typer)(emulate)


# -- what rules say ---------------------------------------------------------------------------------------------------

def count_is(threads: Threads, count: int) -> Iterator[str]:
    if threads.size != count:
        yield f"{threads.size} threads execute it, not {count}"


def memory_is(name: str, form: Form, *memories: str) -> Iterator[str]:
    if form.memory not in memories:
        yield f"{name} is in {form.memory}, not in {' or '.join(memories)}"


def dtype_is(name: str, form: Form, *dtypes: Any) -> Iterator[str]:
    if form.dtype not in dtypes:
        yield f"{name} is of {form.dtype}, not of {' or '.join(map(str, dtypes))}"


def levels_are(name: str, form: Form, *extents: tuple) -> Iterator[str]:
    if tuple(level.extents for level in form.levels) != extents:
        wanted = ".".join(f"[{','.join(map(str, e))}]" for e in extents)
        yield f"{name} is {form}, not {wanted}"


def fragment_of(name: str, form: Form, by: str) -> Iterator[str]:
    """Fragments of wmma's and of mma.sync's hold elements in other orders; ``by`` is `WMMA` or `MMA`."""
    if form.role is not None and form.role.by != by:
        yield f"{name} is a fragment of {'wmma' if by == MMA else 'mma.sync'}'s"


def is_line(name: str, form: Form) -> Iterator[str]:
    line = line_of(form)
    if not isinstance(line, Line):
        yield f"{name} {form} {line}"


def count_of(form: Form) -> int:
    """How many elements a line has; 0 of what is none."""
    line = line_of(form)
    return line.count if isinstance(line, Line) else 0


def alike(forms: tuple, what: str = "operands") -> Iterator[str]:
    if len({form.dtype for form in forms}) != 1:
        yield f"{what} are of {', '.join(str(form.dtype) for form in forms)}: all of one type are needed"
