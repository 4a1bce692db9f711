"""What goes wrong when PTX is run: each error names the instruction, its line in the PTX and, where known, in Python."""

from __future__ import annotations


class PtxError(Exception):
    """An error at an instruction."""

    def __init__(self, message: str, instruction: object = None):
        super().__init__(message if instruction is None else f"{message}\n  {instruction}")


class UnknownInstruction(PtxError):
    """An instruction, a modifier or a type that the interpreter does not have."""


class Fault(PtxError):
    """The program did what it may not: an access out of bounds, misaligned or to memory that nothing wrote, threads that do not
    meet where they have to."""


__all__ = ["Fault", "PtxError", "UnknownInstruction"]
