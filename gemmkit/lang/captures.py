"""Captured values as an argument: their struct, and the pass that reads captured names from it instead of the closure."""

from __future__ import annotations

from typing import Any

from gemmkit.lang.numba_hooks import (
    AttributeTemplate,
    FunctionPass,
    build_definitions,
    cgutils,
    lowering_registry,
    models,
    register_model,
    register_pass,
    types,
    typing_registry,
)
from gemmkit.lang.numba_hooks import (
    numba_ir as ir,
)
from gemmkit.lang.static_branches import of_type

ARGUMENT = "gemmkit_captures"


class CapturesType(types.Type):
    """The struct of a function's captured values."""

    def __init__(self, members: dict[str, Any]):
        self.members = members
        super().__init__("captures(" + ", ".join(f"{k}: {t}" for k, t in members.items()) + ")")

    def known_attribute(self, name: str) -> Any:
        """What is known before types are inferred (:mod:`gemmkit.lang.static_branches`)."""
        return of_type(self.members[name])


@register_model(CapturesType)
class _CapturesModel(models.StructModel):
    def __init__(self, dmm: Any, fe_type: CapturesType):
        super().__init__(dmm, fe_type, list(fe_type.members.items()))


@typing_registry.register_attr
class _CapturesAttributes(AttributeTemplate):
    key = CapturesType

    def generic_resolve(self, ty: CapturesType, attr: str) -> Any:
        return ty.members.get(attr)


@lowering_registry.lower_getattr_generic(CapturesType)
def _captures_getattr(context: Any, builder: Any, ty: CapturesType, value: Any, attr: str) -> Any:
    return getattr(cgutils.create_struct_proxy(ty)(context, builder, value=value), attr)


class Captures(FunctionPass):
    """Reads captured names from an extra argument instead of the closure."""

    _name = "gemmkit_captures"

    def __init__(self) -> None:
        FunctionPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        first = state.args[0] if state.args else None
        if not isinstance(first, CapturesType):
            return False
        _bind(state.func_ir, tuple(first.members))
        return True


register_pass(mutates_CFG=False, analysis_only=False)(Captures)


def _bind(func_ir: Any, names: tuple[str, ...]) -> None:
    """One argument more in front, and captured names read from it."""
    block = func_ir.blocks[min(func_ir.blocks)]
    scope, loc = block.scope, block.loc
    struct = scope.redefine(ARGUMENT, loc)
    for each in func_ir.blocks.values():
        for statement in each.body:
            if not isinstance(statement, ir.Assign):
                continue
            value = statement.value
            if isinstance(value, ir.Arg):
                statement.value = ir.Arg(value.name, value.index + 1, value.loc)
            elif isinstance(value, (ir.FreeVar, ir.Global)) and value.name in names:
                statement.value = ir.Expr.getattr(struct, value.name, value.loc)
    block.body.insert(0, ir.Assign(ir.Arg(ARGUMENT, 0, loc), struct, loc))
    func_ir.arg_names = (ARGUMENT, *func_ir.arg_names)
    func_ir.arg_count += 1
    func_ir._definitions = build_definitions(func_ir.blocks)       # or branches on them would be decided by what cells held
