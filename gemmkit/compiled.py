"""A kernel for a class of problems: its specialisation, and where its arguments lie."""

from __future__ import annotations

from typing import Any

from gemmkit.components import Component, Frozen, freeze, freeze_array
from gemmkit.kernels.common.arrays import Arrays
from gemmkit.kernels.spec import Shape
from gemmkit.layouts import Layout, Plain
from gemmkit.problem import Problem
from gemmkit.runtime.arrays import ArrayInfo
from gemmkit.runtime.device import made_current
from gemmkit.wide import widened

__all__ = ["Compiled", "Nothing"]


class Nothing(Component):
    """Stands for an operand that is not there."""


class Compiled:
    """A kernel for a class of problems, and how its arguments are laid out: shared by all plans of the class."""

    def __init__(self, problem: Problem, out: ArrayInfo):
        conf = problem.config
        M, N, K = problem.M, problem.N, problem.K
        conf = widened(conf, {"a": problem.a, "b": problem.b, "c": problem.c if conf.has_c else None, "out": out}, (M, N, K))
        arrays = Arrays(problem.a, problem.b, out, M, N, K)
        self.spec = conf.spec(arrays)
        self.operands = [_operand(info, layout, readonly) for info, layout, readonly in (
            (problem.a, conf.global_a_layout, True), (problem.b, conf.global_b_layout, True),
            (problem.c if conf.has_c else None, conf.global_c_layout, True), (out, conf.global_d_layout, False))]
        spec, shape = freeze(self.spec), freeze(Shape(M, N, K))
        self.maps = conf.family.maps(self.spec, arrays)
        arguments = [spec, *self.operands, shape, *(freeze(Nothing()) if m is None else m.frozen for m in self.maps)]
        self.arguments = arguments
        self.formats = [code for argument in arguments for code, _ in argument.leaves]
        self.values = [value for argument in arguments for _, value in argument.leaves]
        self.pointers: list[int | None] = []
        at = len(spec.leaves)
        for operand in self.operands:
            self.pointers.append(at if operand.leaves else None)
            at += len(operand.leaves)
        at += len(shape.leaves)
        self.map_slots = {at + m.ordinal: m for m in self.maps if m is not None}
        for info in spec.arrays:
            if info.device != problem.a.device:
                raise ValueError(f"a component's array is on device {info.device} and a on device {problem.a.device}")
        self.blocks = self.spec.blocks(M, N, problem.device.sm_count)
        self.problem, self.out = problem, out

    def forget_code(self) -> None:
        """Keep no function alive, nor the arrays that it captured: what was compiled is not looked at again."""
        for argument in self.arguments:
            argument.guards, argument.captures = (), ()

    def bind(self) -> Any:
        """Compile (or find) the kernel, load it on the operands' device, and make it launchable."""
        with made_current(self.problem.a.device):
            return self._bind()

    def _bind(self) -> Any:
        from gemmkit.runtime.compile import cubin_of
        from gemmkit.runtime.launch import load

        conf = self.problem.config
        entry = cubin_of(conf.family.kernel, self.arguments, conf.threads, self.problem.device, conf.blocks_per_sm)
        kernel = _loaded(entry.cubin, load)
        peers = conf.peers
        return kernel.bind((self.blocks, 1, 1), (conf.threads, 1, 1), self.spec.shared_bytes, self.formats,
                           cluster=(peers, 1, 1) if peers > 1 else None, dependent=conf.family.is_dependent)


_kernels: dict[tuple[int, bytes], Any] = {}


def _loaded(cubin: bytes, load: Any) -> Any:
    from gemmkit.runtime.compile import ENTRY
    from gemmkit.runtime.device import current_ordinal

    key = (current_ordinal(), cubin)
    found = _kernels.get(key)
    return found if found is not None else _kernels.setdefault(key, load(cubin, ENTRY))


def _operand(info: ArrayInfo | None, layout: Layout, readonly: bool) -> Frozen:
    if info is None:
        return freeze(Nothing())
    if not isinstance(layout, Plain):
        return freeze_array(info, readonly=readonly)
    axis = layout.axis
    contiguous = info.strides[axis] == 1 or info.shape[axis] <= 1
    return freeze_array(info, axis if contiguous else None, readonly=readonly)
