"""All threads of a grid in step, with control flow of their own.

A register is an array with a value a thread. The program is cut into blocks of instructions that threads go through together; the
threads that are to run next are those whose block comes first in the text, so that threads which parted meet again behind a branch
or a loop. A barrier, or an instruction of a whole warp, waits until all have come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.ptx_machine.faults import Fault, PtxError, UnknownInstruction
from tests.ptx_machine.kinds import KINDS, Kind
from tests.ptx_machine.memory import POISON, RANK, READABLE, WINDOWS, WRITABLE, GlobalMemory, Memory
from tests.ptx_machine.parser import Instruction, Program, immediate
from tests.ptx_machine.registry import COLLECTIVE, EFFECTS, OPERATIONS, load_families

Mask = Any                              # an array of bool, or None for all threads
Step = Callable[[Mask], None]
CONTROL = ("bra", "ret", "exit", "bar", "barrier")
GROUPED, ALL = {"shfl": 4, "bar": 0}, 0xFFFFFFFF         # the operands that name the lanes which an instruction is of
STEPS = 50_000_000                      # instructions of a launch, before it is taken for endless


class Machine:
    """One launch of ``blocks`` blocks of ``threads`` threads, in clusters of ``cluster``."""

    def __init__(self, program: Program, threads: int, blocks: int, memory: GlobalMemory, shared_bytes: int = 0, cluster: int = 1):
        if program.threads not in (None, threads):
            raise PtxError(f"the kernel is compiled for {program.threads} threads a block, not {threads}")
        if threads % 32 or blocks % cluster:
            raise PtxError(f"blocks of {threads} threads are not whole warps, or {blocks} blocks not whole clusters of {cluster}")
        load_families()
        self.program, self.threads, self.blocks, self.cluster = program, threads, blocks, cluster
        self.count = threads * blocks
        thread = np.arange(self.count)
        self.block, self.warps = thread // threads, self.count // 32
        self.memory = memory
        self._lay_out(shared_bytes)
        ranks = self.block % cluster
        self.special = {name: np.asarray(value + 0 * thread).astype(np.uint32) for name, value in {
            "%tid.x": thread % threads, "%tid.y": 0, "%tid.z": 0, "%laneid": thread % 32, "%warpid": thread % threads // 32,
            "%ctaid.x": self.block, "%ctaid.y": 0, "%ctaid.z": 0, "%ntid.x": threads, "%ntid.y": 1, "%ntid.z": 1,
            "%nctaid.x": blocks, "%nctaid.y": 1, "%nctaid.z": 1, "%cluster_ctarank": ranks, "%cluster_nctarank": cluster}.items()}
        self.registers = {name: np.full(self.count, bool(0) if kind.bits == 1 else int.from_bytes([POISON] * kind.size, "little"),
                                        kind.unsigned) for name, kind in program.registers.items()}
        self.parameters: dict[str, np.ndarray] = {}
        self.mbarriers: dict[int, Any] = {}                            # by their places in shared memory
        self.live = np.ones(self.count, bool)
        self.steps = 0
        self._cut()

    # -- memory -----------------------------------------------------------------------------------------------------------

    def _lay_out(self, shared_bytes: int) -> None:
        """Places of the variables: shared and local ones one after the other, those of the launch behind them."""
        self.symbols: dict[str, tuple[str, int]] = {}
        ends = {"shared": 1024, "local": 64}                           # so that 0 is nobody's address
        outer = [v for v in self.program.variables if v.space == "shared" and not v.size]
        for v in self.program.variables:
            if v.space in ends and v not in outer:
                at = -(-ends[v.space] // v.align) * v.align
                self.symbols[v.name], ends[v.space] = (v.space, at), at + v.size
            elif v.space in ("global", "const"):
                raise UnknownInstruction(f"variable {v.name} in .{v.space} memory")
        static = ends["shared"]
        for v in outer:
            at = -(-static // v.align) * v.align
            self.symbols[v.name], ends["shared"] = ("shared", at), at + shared_bytes
        self.strides = {space: -(-end // 16) * 16 for space, end in ends.items()}
        self.spaces: dict[str, Memory] = {"global": self.memory}
        for space, first, owners in (("shared", 1024, self.blocks), ("local", 64, self.count)):
            made = Memory(space, owners * self.strides[space])
            made.flags.reshape(owners, -1)[:, first:ends[space]] = READABLE | WRITABLE
            self.spaces[space] = made

    # -- operands ---------------------------------------------------------------------------------------------------------

    def reader(self, operand: str, kind: Kind, instruction: Instruction) -> Callable[[], np.ndarray]:
        """What gives an operand's values of a type: an array with a value a thread, or none with one for all."""
        if kind.bits == 1 and operand.startswith("!"):
            inner = self.reader(operand[1:], kind, instruction)
            return lambda: ~inner()
        name, registers = operand, self.registers
        if name in registers:
            held = self.program.registers[name]
            if held.bits == kind.bits:
                return lambda: registers[name].view(kind.dtype)
            if held.bits > kind.bits > 1:
                return lambda: registers[name].astype(kind.unsigned).view(kind.dtype)
            raise PtxError(f"{name} is too narrow for .{kind.name}", instruction)
        if name in self.special:
            value = self.special[name].astype(kind.unsigned).view(kind.dtype)
            return lambda: value
        if name in self.symbols:
            value = np.array(self.symbols[name][1], kind.unsigned).view(kind.dtype)
            return lambda: value
        literal = immediate(name, kind)
        if literal is None:
            raise UnknownInstruction(f"unknown operand {name}", instruction)
        value = np.full(self.count, literal).view(kind.dtype) if kind.lanes > 1 else literal.view(kind.dtype)
        return lambda: value

    def writer(self, operand: str, kind: Kind, instruction: Instruction) -> Callable[[np.ndarray, Mask], None]:
        """What puts values of a type into a register, which is extended by the type's sign if it is wider."""
        if operand == "_":
            return lambda value, mask: None
        if operand not in self.registers:
            raise UnknownInstruction(f"{operand} is no register", instruction)
        registers, held, count = self.registers, self.program.registers[operand], self.count
        if held.bits < kind.bits or (held.bits == 1) is not (kind.bits == 1):
            raise PtxError(f"{operand} does not take .{kind.name}", instruction)
        wide = np.dtype(f"i{held.size}") if kind.is_signed and held.bits > kind.bits else held.unsigned

        def put(value: np.ndarray, mask: Mask) -> None:
            if value.dtype != kind.dtype:
                raise PtxError(f"the interpreter made {value.dtype} for .{kind.name}", instruction)
            bits = value.view(held.unsigned) if held.bits == kind.bits else value.astype(wide).view(held.unsigned)
            if bits.shape != (count,):
                bits = np.broadcast_to(bits, (count,))
            registers[operand] = np.where(mask, bits, registers[operand]) if mask is not None else bits.copy() if bits.base is not None else bits

        return put

    # -- the program ------------------------------------------------------------------------------------------------------

    def _cut(self) -> None:
        """Blocks of instructions: a new one at a label, behind control flow and before an instruction of a warp."""
        code, labels = self.program.instructions, set(self.program.labels.values())
        self.first: dict[int, int] = {}                                # the first instruction of a block -> behind its last
        starts = {0} | {n for n in labels if n < len(code)}
        for n, instruction in enumerate(code):
            if instruction.name in CONTROL:
                starts.add(n + 1)
            if self._is_collective(instruction):
                starts |= {n, n + 1}
        ordered = sorted(s for s in starts if s < len(code))
        for start, end in zip(ordered, [*ordered[1:], len(code)]):
            self.first[start] = end
        self.steps_of: dict[int, list[Step]] = {}

    @staticmethod
    def _is_collective(instruction: Instruction) -> bool:
        return instruction.name in COLLECTIVE and (instruction.name != "bar" or instruction.has("warp"))

    def _steps(self, start: int) -> list[Step]:
        """The steps of a block but its control flow, made when it is first come to."""
        if start not in self.steps_of:
            code = self.program.instructions[start:self.first[start]]
            self.steps_of[start] = [self._step(i) for i in code if not self._ends(i)]
        return self.steps_of[start]

    @staticmethod
    def _ends(instruction: Instruction) -> bool:
        """Whether the machine itself does it, at a block's end."""
        return instruction.name in CONTROL and instruction.modifiers[:1] != ("warp",)

    def _step(self, instruction: Instruction) -> Step:
        name = instruction.name
        if name in EFFECTS:
            act = EFFECTS[name](self, instruction)
        elif name in OPERATIONS:
            act = self._operation(instruction)
        else:
            raise UnknownInstruction("unknown instruction", instruction)
        if not instruction.guard:
            return act
        predicate = self.reader(instruction.guard, KINDS["pred"], instruction)

        def guarded(mask: Mask) -> None:
            on = predicate() if mask is None else predicate() & mask
            if on.any():
                act(None if on.all() else on)

        return guarded

    def _operation(self, instruction: Instruction) -> Step:
        """An instruction that makes a value of values."""
        operation = OPERATIONS[instruction.name](instruction)
        target, *operands = instruction.operands
        if len(operands) != len(operation.inputs):
            raise UnknownInstruction(f"has {len(operands)} source operands, not {len(operation.inputs)}", instruction)
        sources = [self.reader(x, kind, instruction) for x, kind in zip(operands, operation.inputs)]
        put, compute = self.writer(target, operation.output, instruction), operation.compute
        if len(sources) == 2:
            one, two = sources
            return lambda mask: put(compute(one(), two()), mask)
        return lambda mask: put(compute(*[source() for source in sources]), mask)

    # -- running ----------------------------------------------------------------------------------------------------------

    def run(self, parameters: Sequence[int]) -> None:
        """Run it with these parameters, as bits. Raises `Fault`, or `UnknownInstruction`."""
        if len(parameters) != len(self.program.parameters):
            raise PtxError(f"{len(parameters)} parameters given for {len(self.program.parameters)}")
        for (name, kind), bits in zip(self.program.parameters.items(), parameters):
            self.parameters[name] = np.array(bits & (1 << kind.bits) - 1, kind.unsigned)
        self.ready: dict[int, np.ndarray] = {0: np.ones(self.count, bool)}           # block -> who is to run it
        self.waiting: dict[tuple[int, str], np.ndarray] = {}                         # (block behind a barrier, which) -> who waits
        self.parked: dict[int, np.ndarray] = {}                                      # block of a whole warp -> who waits for the rest
        with np.errstate(all="ignore"):
            while self.ready or self.waiting or self.parked:
                if not self.ready:
                    self._stuck()
                start = min(self.ready)
                here = self.ready.pop(start)
                here = here if start not in self.parked else here | self.parked.pop(start)
                if self._is_collective(self.program.instructions[start]):
                    here = self._whole_warps(start, here)
                if here is not None:
                    self._run_block(start, here)

    def _run_block(self, start: int, here: np.ndarray) -> None:
        mask = None if here.all() else here
        steps = self._steps(start)
        self.steps += len(steps)
        if self.steps > STEPS:
            raise Fault(f"{STEPS} instructions and no end", self.program.instructions[start])
        for step in steps:
            step(mask)
        end = self.first[start]
        last = self.program.instructions[end - 1]
        if not self._ends(last):
            self._go(end, here)
            return
        taken = here
        if last.guard:
            taken = here & self.reader(last.guard, KINDS["pred"], last)()
            self._go(end, here & ~taken)
        if last.name == "bra":
            self._go(self.program.labels[last.operands[0]], taken)
        elif last.name in ("ret", "exit"):
            self.live &= ~taken
            self._release()
        else:
            self._barrier(last, end, taken)

    def _go(self, start: int, who: np.ndarray) -> None:
        if start >= len(self.program.instructions):
            raise Fault("threads run past the program's end", self.program.instructions[-1])
        if who.any():
            self.ready[start] = self.ready[start] | who if start in self.ready else who

    def _whole_warps(self, start: int, here: np.ndarray) -> np.ndarray | None:
        """Those of whose warps, or of the groups that they name, all (that have not ended) are here; the others wait for the
        rest of theirs."""
        instruction = self.program.instructions[start]
        lanes, alive = here.reshape(-1, 32), self.live.reshape(-1, 32)
        awaited = np.full((1, 32), ALL, np.int64)
        if instruction.name in GROUPED:
            named = self.reader(instruction.operands[GROUPED[instruction.name]], KINDS["b32"], instruction)()
            awaited = np.broadcast_to(named, (self.count,)).reshape(-1, 32).astype(np.int64)
        missing = ((alive & ~lanes) << np.arange(32, dtype=np.int64)).sum(1)[:, None]
        whole = (awaited & missing) == 0
        if (whole | ~lanes).all():
            return here
        together = lanes & whole
        left = (lanes & ~whole).reshape(-1)
        if left.any():
            self.parked[start] = left
        return together.reshape(-1) if together.any() else None

    def _barrier(self, instruction: Instruction, behind: int, who: np.ndarray) -> None:
        if instruction.modifiers[:2] == ("cluster", "arrive"):         # who has arrived goes on, and waits at its wait
            self._go(behind, who)
            return
        cluster = instruction.modifiers[:2] == ("cluster", "wait")
        of_all = instruction.operands == ("0",) or instruction.operands[1:] == (str(self.threads),)
        if not cluster and (not of_all or "sync" not in instruction.modifiers):
            raise UnknownInstruction("only barriers of all threads are known", instruction)
        key = behind, "cluster" if cluster else "block"
        if who.any():
            self.waiting[key] = self.waiting[key] | who if key in self.waiting else who
        self._release()

    def _release(self) -> None:
        """Let those go on who all have come; it is a fault if they have come to different barriers."""
        for kind in {kind for _, kind in self.waiting}:
            size = self.threads * (self.cluster if kind == "cluster" else 1)
            here = {key: who for key, who in self.waiting.items() if key[1] == kind}
            total = sum(who.reshape(-1, size).sum(1) for who in here.values())
            alive = self.live.reshape(-1, size).sum(1)
            full = (total == alive) & (total > 0)
            for key, who in here.items():
                group = who.reshape(-1, size)
                if (full & (group.sum(1) != total) & group.any(1)).any():
                    raise Fault("threads of a block wait at different barriers", self.program.instructions[key[0] - 1])
                free = (group & full[:, None]).reshape(-1)
                if free.any():
                    del self.waiting[key]
                    if (who & ~free).any():
                        self.waiting[key] = who & ~free
                    self._go(key[0], free)

    def _stuck(self) -> None:
        lines = [f"{int(who.sum())} threads wait behind {self.program.instructions[key[0] - 1]}" for key, who in self.waiting.items()]
        lines += [f"{int(who.sum())} threads wait for the rest of their warps at {self.program.instructions[n]}"
                  for n, who in self.parked.items()]
        raise Fault("nobody can go on:\n  " + "\n  ".join(lines))

    # -- addresses --------------------------------------------------------------------------------------------------------

    def place(self, space: str, address: np.ndarray, mask: Mask, instruction: Instruction) -> tuple[str, np.ndarray]:
        """(the space, the places in its memory) of the running threads' addresses."""
        who = np.arange(self.count) if mask is None else np.flatnonzero(mask)
        at = np.broadcast_to(address, (self.count,))[who].astype(np.int64)
        if space == "generic":
            spaces = np.select([at >= WINDOWS["global"], at >= WINDOWS["local"], at >= WINDOWS["shared"]], [0, 1, 2], 0)
            if (spaces != spaces[0]).any():
                raise UnknownInstruction("a generic access to different spaces at once", instruction)
            space = ("global", "local", "shared")[spaces[0]]
            at = at if space == "global" else at - WINDOWS[space]
        if space == "global":
            return space, self.memory.places(at, instruction)
        owner = self.block[who] if space == "shared" else who
        if space == "shared":
            rank = at >> RANK                                          # 0: the own block
            owner, at = np.where(rank > 0, owner // self.cluster * self.cluster + rank - 1, owner), at & (1 << RANK) - 1
        stride = self.strides[space]
        outside = (at < 0) | (at >= stride)
        if outside.any():
            raise Fault(f"{space} memory: {int(at[outside][0]):#x} is out of bounds", instruction)
        return space, owner * stride + at

    def spread(self, values: np.ndarray, mask: Mask, kind: Kind) -> np.ndarray:
        """Values of the running threads among all."""
        if mask is None:
            return values
        out = np.zeros(self.count, kind.dtype)
        out[mask] = values
        return out


__all__ = ["Machine", "Mask", "Step"]
