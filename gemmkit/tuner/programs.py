"""A program as it is tuned: its mappings in the order in which they are tried, and its launch.

Mappings are tried that differ from the default in one thing, then in two, then in three. All else stays open in each,
so that the passes fit it to what is said: ``Mapping(warpgroups=3)`` has shorter blocks and other stages than the
default. Two mappings of one text are one kernel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gemmkit.components import arrays_of
from gemmkit.lang.errors import ConfigError
from gemmkit.plans.launch import Launch
from gemmkit.programs.calls import Laid, ProgramProblem
from gemmkit.programs.chains.chain import is_chained
from gemmkit.programs.collectives import ROWS
from gemmkit.programs.mapping import ORDERS, SWITCHES, KernelLimits, Mapping, kernel_of
from gemmkit.programs.plan import ProgramPlan
from gemmkit.programs.trace import Loop
from gemmkit.programs.values import Index
from gemmkit.runtime.array_info import ArrayInfo
from gemmkit.runtime.device import DeviceInfo
from gemmkit.runtime.launch import Launchable
from gemmkit.runtime.tensor_maps import Encoder
from gemmkit.tuner.measure import Buffers, Job, Pointer, tolerance
from gemmkit.tuner.subjects import Output, Subject, TunedProgram

TOGETHER = 3                           # things in which a mapping differs from the default
WARPGROUPS, STAGES = (1, 2, 3), (2, 3, 4, 5, 6)
COLUMNS, DEPTHS, SPLITS = (64, 128, 192, 256), (32, 64, 128), (1, 2, 4, 8, 16, 32, 64, 128)
BANDS = 4, 8, 16, 32
F32 = np.dtype(np.float32)


class Programmed(Subject):
    """A program (`gemmkit.programs.decorated.Program`) with arrays. ``mappings``: what is tried; None: what `listed` has."""

    answer = TunedProgram

    def __init__(self, program: Any, *arrays: Any, mappings: Iterable[Mapping] | None = None, **components: Any):
        if components.get("mapping") is not None:
            raise TypeError("tune: mapping= is the result of tuning; leave it out, or give mappings=[...] to try")
        components.pop("mapping", None)
        arguments = program.bound(arrays, components)
        self._problem = ProgramProblem(program, arguments)
        self._mappings = None if mappings is None else _checked(mappings)
        self.default: ProgramPlan = self._problem.default
        if self.default.is_of_rows:
            raise ConfigError(f"{self.default.name}: a function of rows has one mapping, which the length of its rows "
                              "decides; there is nothing to tune")
        host = next((name for name, info in self.default.given.items() if info.device < 0), None)
        if host is not None:
            raise TypeError(f"{host} is a host array (NumPy); mappings are timed on a GPU")
        self._loop, self._known = program.traced(arguments), {_form(self.default)}

    @property
    def what(self) -> str:
        shapes = ", ".join(f"{name} {'x'.join(map(str, info.shape))} {info.dtype}" for name, info in
                           self.default.given.items())
        return f"{self.default.name}: {shapes}, on {self.device.name}"

    @property
    def device(self) -> DeviceInfo:
        return self.default.device

    @property
    def ordinal(self) -> int:
        return next(iter(self.default.given.values())).device

    @property
    def is_empty(self) -> bool:
        return 0 in (self.default.extents[name] for name in self.default.printed.tile)

    def candidates(self) -> Iterator[Laid]:
        kernel = kernel_of(Mapping(), self.device)
        return map(Laid, listed(self._loop, kernel, self._splits()) if self._mappings is None else self._mappings)

    def _splits(self) -> list[int]:
        """Numbers of blocks that a tile's rounds may be shared by, the default's neighbours first; none where no kernel
        merges what they make."""
        own = self.default.mapping.splits or 1
        try:
            self._problem.plan(Mapping(splits=own if own > 1 else SPLITS[1]))
        except (ConfigError, ValueError):
            return []
        return sorted((count for count in SPLITS if count != own), key=lambda count: abs(math.log2(count / own)))

    def tried(self, candidate: Laid) -> ProgramPlan:
        return self._problem.plan(candidate.mapping)

    def is_known(self, tried: ProgramPlan) -> bool:
        known = _form(tried) in self._known
        self._known.add(_form(tried))
        return known

    @staticmethod
    def config_of(compiled: ProgramPlan) -> Mapping:
        return compiled.mapping

    def memory(self) -> Buffers:
        given, results = self.default.given, self.default.results
        captured = [held.info for component in self.default.called_with({}).components for held in arrays_of(component)]
        return Buffers([*(info for name, info in given.items() if name not in results), *captured],
                       [given[name] for name in results])

    @staticmethod
    def kernels(compiled: ProgramPlan) -> list[Launchable]:
        return [launch.kernel for launch in compiled.launches.kernels]

    def job(self, compiled: ProgramPlan, memory: Buffers, cubins: Sequence[bytes]) -> Job:
        launches, given = compiled.launches, [info.pointer for info in compiled.given.values()]
        brought = *given, 0, *(0 for _ in compiled.call.numbers), *compiled.called_with({}).brought
        first, *then = (_job(launch, brought, len(given), memory, cubin)
                        for launch, cubin in zip(launches.kernels, cubins, strict=True))
        varied = tuple(dict.fromkeys(buffer for one in (first, *then) for buffer in one.varied))
        return replace(first, varied=varied, spare_bytes=launches.spare, then=tuple(then))

    def outputs(self) -> list[Output]:
        plan = self.default
        terms = max(index.extent.length for index in _rounds(self._loop))
        return [Output(name, plan.given[name], self._allowed(plan.given[name], terms)) for name in plan.results]

    def _allowed(self, info: ArrayInfo, terms: int) -> float:
        """A chain rounds what it hands over to its operands' dtype, by another maximum where blocks are longer."""
        printed = self.default.printed
        operands = (*(array for _, array in printed.maps), *printed.operands) if is_chained(self._loop) else ()
        handed = [self.default.infos[name].dtype for name in operands]
        return max(tolerance(dtype, F32, terms) for dtype in (info.dtype, *handed))

    def key(self) -> str:
        return self._problem.key()


def _job(launch: Launch, brought: Sequence[Any], spare: int, memory: Buffers, cubin: bytes) -> Job:
    """Of one kernel of a plan whose arrays, at the addresses ``brought``, lie in ``memory``; ``spare``: where among these
    the address of its own arrays is."""
    kernel, values = launch.kernel, list(launch.kernel.values)
    pointers: list[tuple[int, Pointer]] = []
    maps: list[tuple[int, Pointer, tuple[Any, ...]]] = []
    spares: list[tuple[int, int]] = []
    for put in launch.puts:
        if isinstance(put.encoder, Encoder):
            values[put.slot] = bytes(128)
            maps.append((put.slot, memory.pointer(brought[put.which] + put.offset), put.encoder.arguments))
        elif put.which == spare:
            spares.append((put.slot, put.offset))
        elif put.encoder is None:                      # numbers stay the plan's
            pointers.append((put.slot, memory.pointer(brought[put.which] + put.offset)))
    varied = tuple(dict.fromkeys(at.buffer for at in (*(at for _, at in pointers), *(at for _, at, _ in maps))))
    return Job(cubin, kernel.blocks, kernel.threads, kernel.shared_bytes, tuple(kernel.formats), tuple(values),
               kernel.cluster, kernel.dependent, kernel.waits, tuple(pointers), tuple(maps), (), varied, (), tuple(spares))


def _form(plan: ProgramPlan) -> tuple[str, int]:
    """What tells kernels apart: a text is one for all numbers of shares."""
    return plan.text, plan.mapping.splits


def listed(loop: Loop, kernel: KernelLimits, splits: Sequence[int] = ()) -> Iterator[Mapping]:
    """The mappings of a traced program that a kernel may have, those that differ least from the default first. ``splits``:
    the numbers of shares to try, those nearest to the default's first. They are the first field where the default has
    shares, and else the last one: there tiles are enough for all multiprocessors."""
    chained, rounds = is_chained(loop), _rounds(loop)
    choices: dict[str, list[dict[str, Any]]] = {}

    def lengths(name: str, of: Iterable[int]) -> None:
        choices[f"blocks of {name}"] = [dict(blocks={name: length}) for length in of]

    shares = [dict(splits=count) for count in splits]
    if 1 in splits:                                        # the default has more than one
        choices["splits"] = shares
    if chained:
        for index in rounds:
            if not index.stack:
                lengths(index.name, kernel.lengths)
    else:
        lengths(loop.indices[-1].name, COLUMNS)
    choices["warpgroups"] = [dict(warpgroups=count) for count in WARPGROUPS]
    if not chained and kernel.parts == 2:              # a warp's loads of B serve twice as many rows
        m = loop.indices[-2].name
        choices["warpgroups"] += [dict(warpgroups=count, blocks={m: 2 * ROWS * count}) for count in WARPGROUPS]
    if kernel.uses_tma:
        of_tile = [index.name for index in loop.indices if not index.stack]
        shapes = [{name: 2} for name in of_tile] + ([] if chained else [dict.fromkeys(of_tile, 2)])
        choices["cluster"] = [dict(cluster=shape) for shape in shapes]
    if not chained:
        choices["band"] = [dict(band=rows) for rows in BANDS]
    for switch in SWITCHES if chained else ():
        if switch in ORDERS and not kernel.uses_tma:
            continue
        choices[switch] = [{switch: value} for value in (True, False)]
    choices["stages"] = [dict(stages=count) for count in STAGES]
    if not chained:
        for index in rounds:
            lengths(index.name, (length for length in DEPTHS if length % kernel.depths == 0))
    if shares:
        choices.setdefault("splits", shares)
    for count in range(1, TOGETHER + 1):
        for names in itertools.combinations(choices, count):
            for values in itertools.product(*(choices[name] for name in names)):
                blocks = {name: length for value in values for name, length in value.get("blocks", {}).items()}
                yield Mapping(**{**{key: x for value in values for key, x in value.items()}, "blocks": blocks})


def _rounds(loop: Loop) -> list[Index]:
    """The indices of sequential loops."""
    return [held.indices[0] for held in loop.body if isinstance(held, Loop)]


def _checked(mappings: Any) -> list[Mapping]:
    given = list(mappings) if isinstance(mappings, Iterable) else [mappings]
    other = next((x for x in given if not isinstance(x, Mapping)), None)
    if other is not None or not isinstance(mappings, Iterable):
        raise TypeError(f"tune(mappings={mappings!r}): a list of instances of gemmkit.Mapping is needed, such as "
                        "[gemmkit.Mapping(stages=3)]")
    return given
