"""Programs of a user's, drawn, and the ways in which their code is edited while the process runs.

A program is the source of a module: a transform, its helper, a constant, a namespace, an enumeration, a named tuple. An
edit changes it in the running process as a notebook, ``%autoreload`` or an assignment would; `Edit.source` is the program
as it then reads, for a fresh process to compile.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType


@dataclass(frozen=True)
class Program:
    """What a drawn program consists of; every field shows in the machine code."""

    scale: str = "2.0"                   # a global constant
    shift: str = "1.0"                   # a default of the helper
    factor: str = "3"                    # a class constant of the component
    bound: str = "0.5"                   # read by a property
    helper: str = "x * SCALE + shift"
    deeper: str = "x - 1"
    body: str = "helper(x) * self.K + self.limit"
    method: str = "x + 0.25"
    namespace: str = "7.0"               # an attribute of a plain class
    level: str = "2"                     # a member of an enumeration
    order: str = "low, high"             # fields of a named tuple, by place
    shadow: str = ""                     # a function with a built-in's name
    extra: str = "1.5"                   # what __post_init__ works out
    jitted: str = "x * JITTED"
    jit_constant: str = "1.25"
    kind: str = "4.0"                    # an attribute of a class in a field
    weight: str = "self.kind.WEIGHT"     # a property
    mixed: str = "1.25"                  # a constant of a mixin, a plain class
    lift: str = "x * self.MIXED"         # a method of the mixin
    beneath: str = "0.75"                # a constant of the mixin's base
    above: str = "pass"                  # what the mixin has that hides it
    root: str = "2.5"                    # a constant of a named class's base
    hides: str = "pass"                  # what the class has that hides it

    @property
    def source(self) -> str:
        return f'''
import enum
import math
from dataclasses import dataclass
from typing import Any, NamedTuple
import numpy as np
from numba import cuda
import gemmkit as gk
from gemmkit import transforms

SCALE = {self.scale}
JITTED = {self.jit_constant}

class Level(enum.Enum):
    HIGH = {self.level}

class Pair(NamedTuple):
    {self.order.split(", ")[0]}: Any
    {self.order.split(", ")[1]}: Any

class Roots:
    ROOT = {self.root}

class Names(Roots):
    OFFSET = {self.namespace}
    {self.hides}

class Kind:
    WEIGHT = {self.kind}

@cuda.jit(device=True)
def jitted(x):
    return {self.jitted}

def deeper(x):
    return {self.deeper}

def helper(x, shift={self.shift}):
    return deeper({self.helper})
{self.shadow}
def size(x):
    return abs(x)

class Base:
    BENEATH = {self.beneath}

class Mixin(Base):
    MIXED = {self.mixed}
    {self.above}

    def lift(self, x):
        return {self.lift}

@dataclass(frozen=True)
class Step(Mixin, transforms.Transform):
    bound: float = {self.bound}
    kind: Any = Kind
    K = {self.factor}

    def __post_init__(self):
        object.__setattr__(self, "extra", {self.extra})

    @property
    def limit(self):
        return self.bound * Level.HIGH.value

    @property
    def weight(self):
        return {self.weight}

    def other(self, x):
        return {self.method}

    def __call__(self, x):
        pair = Pair(x, x * 2)
        return self.other({self.body}) + Names.OFFSET * pair.low - size(x) + self.extra + jitted(x) + self.weight \\
            + self.lift(x) * self.BENEATH - Names.ROOT
'''


def number(rng: random.Random) -> str:
    return str(rng.choice((1, 3, 5, 7, 11)) / rng.choice((2, 4, 8)) + rng.randrange(100))


def drawn(rng: random.Random) -> Program:
    """A program with numbers and expressions of its own."""
    return Program(*(number(rng) for _ in range(2)), str(rng.randrange(2, 99)), number(rng),
                   rng.choice(("x * SCALE + shift", "x / SCALE - shift", "SCALE - x * shift")),
                   rng.choice(("x - 1", "x * 2 + 1", "-x")), "helper(x) * self.K + self.limit",
                   rng.choice(("x + 0.25", "x * 1.75")), number(rng), str(rng.randrange(1, 50)),
                   extra=number(rng), jit_constant=number(rng), kind=number(rng), mixed=number(rng), beneath=number(rng),
                   root=number(rng))


def load_source(source: str, name: str) -> ModuleType:
    """A program as a module of the user's, imported under ``name``."""
    module = ModuleType(name)
    module.__file__ = f"{name}.py"
    sys.modules[name] = module
    run(source, module)
    return module


def run(source: str, module: ModuleType) -> None:
    exec(compile(source, f"{module.__name__}.py", "exec"), module.__dict__)


def _of_new(program: Program, module: ModuleType) -> ModuleType:
    """The edited program's objects, from which an edit takes what it puts into the running ones."""
    new = ModuleType(module.__name__)
    new.__file__ = module.__file__
    run(program.source, new)
    return new


# -- the ways to edit -----------------------------------------------------------------------------------------------------

def bind_global(rng: random.Random, program: Program, module: ModuleType) -> Program:
    after = replace(program, scale=number(rng))
    module.SCALE = float(after.scale)                                          # type: ignore[attr-defined]
    return after


def bind_helper(rng: random.Random, program: Program, module: ModuleType) -> Program:
    after = replace(program, helper="x * SCALE - shift * 3")
    new = _of_new(after, module).helper
    module.helper = type(new)(new.__code__, module.__dict__, "helper", new.__defaults__)      # type: ignore[attr-defined]
    return after


def code_of_helper(rng: random.Random, program: Program, module: ModuleType) -> Program:
    after = replace(program, helper=f"x + SCALE * {number(rng)} + shift")
    module.helper.__code__ = _of_new(after, module).helper.__code__
    return after


def code_of_deeper(rng: random.Random, program: Program, module: ModuleType) -> Program:
    after = replace(program, deeper=f"x * {number(rng)}")
    module.deeper.__code__ = _of_new(after, module).deeper.__code__
    return after


def default_of_helper(rng: random.Random, program: Program, module: ModuleType) -> Program:
    after = replace(program, shift=number(rng))
    module.helper.__defaults__ = (float(after.shift),)
    return after


def code_of_method(rng: random.Random, program: Program, module: ModuleType) -> Program:
    after = replace(program, body=f"helper(x) - self.K * {number(rng)} + self.limit")
    module.Step.__call__.__code__ = _of_new(after, module).Step.__call__.__code__
    return after


def bind_call(rng: random.Random, program: Program, module: ModuleType) -> Program:
    after = replace(program, body=f"helper(x) / self.K + {number(rng)} * self.limit")
    new = _of_new(after, module).Step.__call__
    module.Step.__call__ = type(new)(new.__code__, module.__dict__, "__call__")
    return after


def bind_method(rng: random.Random, program: Program, module: ModuleType) -> Program:
    after = replace(program, method=f"x * {number(rng)}")
    new = _of_new(after, module).Step.other
    module.Step.other = type(new)(new.__code__, module.__dict__, "other")
    return after


def class_constant(rng: random.Random, program: Program, module: ModuleType) -> Program:
    after = replace(program, factor=str(rng.randrange(100, 999)))
    module.Step.K = int(after.factor)
    return after


def bind_property(rng: random.Random, program: Program, module: ModuleType) -> Program:
    after = replace(program, weight=f"self.kind.WEIGHT * {number(rng)}")
    new = vars(_of_new(after, module).Step)["weight"].fget
    module.Step.weight = property(type(new)(new.__code__, module.__dict__, "weight"))
    return after


def constant_of_mixin(rng: random.Random, program: Program, module: ModuleType) -> Program:
    after = replace(program, mixed=number(rng))
    module.Mixin.MIXED = float(after.mixed)
    return after


def method_of_mixin(rng: random.Random, program: Program, module: ModuleType) -> Program:
    after = replace(program, lift=f"x * self.MIXED + {number(rng)}")
    new = _of_new(after, module).Mixin.lift
    module.Mixin.lift = type(new)(new.__code__, module.__dict__, "lift")
    return after


def constant_of_mixins_base(rng: random.Random, program: Program, module: ModuleType) -> Program:
    after = replace(program, beneath=number(rng))
    module.Base.BENEATH = float(after.beneath)
    return after


def hide_constant_of_mixins_base(rng: random.Random, program: Program, module: ModuleType) -> Program:
    constant = number(rng)
    after = replace(program, above=f"BENEATH = {constant}")
    module.Mixin.BENEATH = float(constant)
    return after


def constant_of_named_base(rng: random.Random, program: Program, module: ModuleType) -> Program:
    after = replace(program, root=number(rng))
    module.Roots.ROOT = float(after.root)
    return after


def hide_constant_of_named_base(rng: random.Random, program: Program, module: ModuleType) -> Program:
    constant = number(rng)
    after = replace(program, hides=f"ROOT = {constant}")
    module.Names.ROOT = float(constant)
    return after


def attribute_of_class(rng: random.Random, program: Program, module: ModuleType) -> Program:
    after = replace(program, namespace=number(rng))
    module.Names.OFFSET = float(after.namespace)
    return after


def class_in_a_field(rng: random.Random, program: Program, module: ModuleType) -> Program:
    after = replace(program, kind=number(rng))
    module.Kind.WEIGHT = float(after.kind)
    return after


def shadow_built_in(rng: random.Random, program: Program, module: ModuleType) -> Program:
    constant = number(rng)
    after = replace(program, shadow=f"def abs(x):\n    return x * {constant}\n")
    run(after.shadow, module)
    return after


def redefine_enumeration(rng: random.Random, program: Program, module: ModuleType) -> Program:
    after = replace(program, level=str(rng.randrange(50, 99)))
    module.Level = _of_new(after, module).Level                                # type: ignore[attr-defined]
    return after


def redefine_named_tuple(rng: random.Random, program: Program, module: ModuleType) -> Program:
    after = replace(program, order=", ".join(reversed(program.order.split(", "))))
    module.Pair = _of_new(after, module).Pair                                  # type: ignore[attr-defined]
    return after


def redefine_component(rng: random.Random, program: Program, module: ModuleType) -> Program:
    after = replace(program, bound=number(rng), extra=number(rng))
    start = after.source.index("@dataclass(frozen=True)")
    run("\n" * after.source[:start].count("\n") + after.source[start:], module)
    return after


def global_of_jitted(rng: random.Random, program: Program, module: ModuleType) -> Program:
    after = replace(program, jit_constant=number(rng))
    module.JITTED = float(after.jit_constant)                                  # type: ignore[attr-defined]
    return after


def run_the_cell_again(rng: random.Random, program: Program, module: ModuleType) -> Program:
    after = drawn(rng)
    run(after.source, module)
    module.__dict__.pop("abs", None)
    return after


def reload_in_place(rng: random.Random, program: Program, module: ModuleType) -> Program:
    """What ``%autoreload 2`` does: the old functions and methods get the new code, and names stay bound to them."""
    after = replace(drawn(rng), order=program.order)
    old = dict(module.__dict__)
    run(after.source, module)
    module.__dict__.pop("abs", None)
    for name in ("deeper", "helper", "size"):
        new = getattr(module, name)
        old[name].__code__, old[name].__defaults__ = new.__code__, new.__defaults__
        setattr(module, name, old[name])
    for name in ("__call__", "other", "__post_init__"):
        getattr(old["Step"], name).__code__ = getattr(module.Step, name).__code__
    for name in ("K", "bound", "limit", "weight", "__init__"):
        setattr(old["Step"], name, vars(module.Step)[name])
    for name in ("Base", "Mixin"):
        mine, new = old[name], vars(getattr(module, name))
        for entry in [entry for entry in vars(mine) if not entry.startswith("__") and entry not in new]:
            delattr(mine, entry)
        for entry in [entry for entry in new if not entry.startswith("__")]:
            setattr(mine, entry, new[entry])
        setattr(module, name, mine)
    module.Step = old["Step"]                                                  # type: ignore[attr-defined]
    return after


Edit = Callable[[random.Random, Program, ModuleType], Program]
EDITS: tuple[Edit, ...] = (
    bind_global, bind_helper, code_of_helper, code_of_deeper, default_of_helper, code_of_method, bind_call, bind_method,
    class_constant, constant_of_mixin, method_of_mixin, constant_of_mixins_base, hide_constant_of_mixins_base,
    constant_of_named_base, hide_constant_of_named_base, bind_property, attribute_of_class, class_in_a_field, shadow_built_in, redefine_enumeration,
    redefine_named_tuple, redefine_component, global_of_jitted, run_the_cell_again, reload_in_place)
