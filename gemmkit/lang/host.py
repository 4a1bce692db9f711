"""The emulator's side of memory: views of NumPy arrays and pointers into emulated shared memory.

Every access goes through the machine, which checks bounds, alignment, that the bytes were written, and that no other
thread's access is unordered with it.
"""

from __future__ import annotations

import linecache
import math
import os
import sys
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from greenlet import getcurrent

from gemmkit.lang.errors import ConfigError, refused_at
from gemmkit.lang.numba_hooks import TypingContext, atom, signature, types
from gemmkit.lang.number_rules import Record, narrows, part_size, scalars, to_dtype
from gemmkit.lang.scalars import DTypeType, IndexType, WeakFloat64Type, WeakFloatLiteral, WeakIntLiteral, numpy_dtype
from gemmkit.runtime.arrays import part_bytes

if TYPE_CHECKING:
    from gemmkit.emulator.machine import Thread


# --------------------------------------------------------------------------------------------------
# Where in the kernel something happened, noted cheaply and resolved to a line only when it is to be shown.
#
# A site is (code object, instruction offset) of the *kernel line*: the innermost frame that is not machinery (instruction
# atoms, device language, this emulator). When that line stands in a user's component, the line of the template kernel
# that called it is noted as well.

Site = tuple[CodeType, int, CodeType | None, int]

_MACHINERY, _USER, _TEMPLATE = 0, 1, 2
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

#: Path fragments of files that are never a kernel line.
INTERNAL_PATHS: tuple[str, ...] = tuple(
    os.path.join(_ROOT, name) + end for name in ("ptx", "lang", "emulator") for end in (os.sep, ".py"))
#: Path fragments of the template kernels.
TEMPLATE_PATHS: tuple[str, ...] = (os.path.join(_ROOT, "kernels") + os.sep,)

_internal, _template = INTERNAL_PATHS, TEMPLATE_PATHS
_HAS_COPIES = sys.version_info < (3, 11)
_LANGUAGE = os.path.join(_ROOT, "lang") + os.sep
_kinds: dict[str, int] = {}  # by file name, because hashing a code object is slow and a string's hash is kept


def current() -> Thread:
    """The emulated thread that runs now.

    Raises:
        RuntimeError: no kernel is being emulated in this operating-system thread.
    """
    try:
        return getcurrent().thread
    except AttributeError:
        raise RuntimeError("not inside an emulated kernel: device code runs under emulator.machine.launch, "
                           "or compiled on a GPU") from None


class SourceLine(NamedTuple):
    """A line of source: file, number (from 1) and stripped text; ``str(line)`` is ``"file:number: text"``."""

    file: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}: {self.text}" if self.text else f"{self.file}:{self.number}"


def configure(*, internal: Sequence[str] = INTERNAL_PATHS, templates: Sequence[str] = TEMPLATE_PATHS) -> None:
    """Sets which files are machinery and which hold template kernels, as fragments of their paths.

    Example: ``configure(internal=(*sites.INTERNAL_PATHS, "my_library/"))``; ``configure()`` restores the
        defaults.
    """
    global _internal, _template
    for name, fragments in (("internal", internal), ("templates", templates)):
        if isinstance(fragments, str):
            raise TypeError(f"{name} is {fragments!r}; pass a sequence of fragments, as ({fragments!r},)")
    _internal, _template = tuple(internal), tuple(templates)
    _kinds.clear()


def is_unrolled(code: CodeType) -> bool:
    """Whether this is a function of the device language that calls others once for each of some values (`lang`)."""
    return code.co_filename.startswith(_LANGUAGE)


def _classify(file: str) -> int:
    if any(fragment in file for fragment in _internal):
        kind = _MACHINERY
    elif any(fragment in file for fragment in _template):
        kind = _TEMPLATE
    else:
        kind = _USER
    _kinds[file] = kind
    return kind


def of_frame(frame: FrameType | None) -> Site:
    """The site of a running or suspended stack, given its innermost frame."""
    outermost = frame
    code: CodeType | None = None
    offset = 0
    while frame is not None:
        here_code = frame.f_code
        kind = _kinds.get(here_code.co_filename)
        if kind is None:
            kind = _classify(here_code.co_filename)
        if kind == _TEMPLATE:
            if code is None:
                return here_code, frame.f_lasti, None, 0
            return code, offset, here_code, frame.f_lasti
        if kind == _USER and code is None:
            code, offset = here_code, frame.f_lasti
        outermost, frame = frame, frame.f_back
    if code is None:  # machinery alone, as when an atom itself is the kernel
        assert outermost is not None
        return outermost.f_code, outermost.f_lasti, None, 0
    return code, offset, None, 0


def of_traceback(trace: TracebackType | None) -> Site:
    """The site where an exception was raised."""
    stack: list[tuple[CodeType, int]] = []
    while trace is not None:
        stack.append((trace.tb_frame.f_code, trace.tb_lasti))
        trace = trace.tb_next
    lines = [(_classify(code.co_filename), code, offset) for code, offset in reversed(stack)]
    innermost = next(((code, offset) for kind, code, offset in lines if kind != _MACHINERY), stack[0])
    template = next(((code, offset) for kind, code, offset in lines if kind == _TEMPLATE), innermost)
    return *innermost, *((None, 0) if template == innermost else template)


def here(skip: int = 0) -> Site:
    """The site of the caller's stack; the `skip` innermost frames are known to be machinery."""
    return of_frame(sys._getframe(1 + skip))


def _line(code: CodeType, offset: int) -> SourceLine:
    number = code.co_firstlineno
    for start, end, candidate in code.co_lines():
        if start <= offset < end and candidate is not None:
            number = candidate
            break
    return SourceLine(code.co_filename, number, linecache.getline(code.co_filename, number).strip())


def is_same_place(first: Site, second: Site) -> bool:
    """Whether two sites are one place of the source. Python 3.10 may compile what follows ``f() if x else None`` twice,
    a copy for each way, and tells columns of neither: two sites of one line are one place there."""
    if first == second or not _HAS_COPIES:
        return first == second
    return kernel_line(first) == kernel_line(second) and template_line(first) == template_line(second)


def kernel_line(site: Site) -> SourceLine:
    """The innermost line that is not machinery."""
    return _line(site[0], site[1])


def template_line(site: Site) -> SourceLine | None:
    """The template kernel's line that led there; None if that is the kernel line itself, or there is none."""
    return None if site[2] is None else _line(site[2], site[3])


# --------------------------------------------------------------------------------------------------
# Results that their array cannot hold: refused, unless they are converted by name.
#
# Stricter than NumPy's ``same_kind``: a float result does not go into an integer array, a wide integer not into a narrow
# one, and signed and unsigned ones only where every value has room. A float may go into a narrower float, which is what a
# product in float16 with float32 sums does, and any number into a float. ``np.int8(x)`` in a function, or
# ``epilogues.Saturate("int8")``, asks for what is refused here.

_FLOAT = np.dtype(np.float64)


def misfit_of_type(ty: types.Type, wanted: np.dtype) -> str | None:
    """What a value of a device type is that does not fit, or None if it does."""
    if isinstance(ty, WeakIntLiteral):
        return misfit(int(ty.literal_value), wanted)
    if isinstance(ty, IndexType):                          # a coordinate, or a function's literal: it takes the array's type
        return "int" if wanted.kind == "b" else None
    if isinstance(ty, (WeakFloatLiteral, WeakFloat64Type)):
        return "float" if narrows(_FLOAT, wanted) else None
    if isinstance(ty, types.BaseTuple) or not (isinstance(ty, (types.Number, types.Boolean)) or hasattr(ty, "dtype")):
        return None                                        # no number: the conversion itself says what is wrong
    given = numpy_dtype(ty)
    return str(given) if narrows(given, wanted) else None


def misfit(value: Any, wanted: np.dtype) -> str | None:
    """The same of a value in the emulator."""
    if isinstance(value, np.generic):
        return str(value.dtype) if narrows(value.dtype, wanted) else None
    if isinstance(value, int) and not isinstance(value, bool) and wanted.kind in "iu":
        limits = np.iinfo(wanted)
        return None if limits.min <= value <= limits.max else str(value)
    if isinstance(value, (bool, Record, tuple)):
        return "bool" if isinstance(value, bool) and narrows(np.dtype(bool), wanted) else None
    given = np.dtype(np.int32) if isinstance(value, int) else _FLOAT if isinstance(value, float) else None
    return type(value).__name__ if given is not None and narrows(given, wanted) else None


def refusal(what: str, got: str, wanted: np.dtype) -> str:
    """What would do, too."""
    name = wanted.name
    return (f"{what} holds {name} and would get {got} values, which it cannot hold; gemmkit narrows nothing silently: use "
            f"epilogues.Saturate({name!r}), which rounds and clamps, convert explicitly where the value is made "
            f"(np.{name}(x)), or give an array that holds {got}")


def _type_fitting(context: TypingContext, what: types.Type, dtype: types.Type, values: types.Type) -> Any:
    if not isinstance(dtype, DTypeType) or not isinstance(values, types.BaseTuple):
        return None
    wanted = numpy_dtype(dtype.target)
    for ty in dict.fromkeys(values.types):
        got = misfit_of_type(ty, wanted)
        if got is not None:
            raise ConfigError(refusal(what.literal_value, got, wanted))
    return signature(values, what, dtype, values), lambda c, b, s, v: v[2]


@atom(_type_fitting)
def fitting(what: str, dtype: np.dtype, values: tuple) -> tuple:
    """The values, unchanged; raises ConfigError where an array of ``dtype``, called ``what``, cannot hold them."""
    if {*map(type, values)} != {dtype.type}:
        for value in values:
            got = misfit(value, dtype)
            if got is not None:
                raise ConfigError(refusal(what, got, dtype))
    return values


def check_stored(value: Any, dtype: np.dtype) -> None:
    """In the emulator: raise ComponentError, with the line that stores it, for a value that an array does not hold."""
    got = misfit(value, dtype)
    if got is not None:

        site = here()
        line = kernel_line(site)
        raise refused_at(site[0].co_name, line.file, line.number, refusal("this array", got, dtype))


Elements = tuple[Any, ...]             # what a thread has of a tile in its registers: elements, sums or words


class Numeric(Protocol):
    """A number of any dtype in device code: what an operator gives has the dtype that NumPy promotes to."""

    def __add__(self, other: Any, /) -> Any: ...
    def __radd__(self, other: Any, /) -> Any: ...
    def __sub__(self, other: Any, /) -> Any: ...
    def __rsub__(self, other: Any, /) -> Any: ...
    def __mul__(self, other: Any, /) -> Any: ...
    def __rmul__(self, other: Any, /) -> Any: ...
    def __truediv__(self, other: Any, /) -> Any: ...
    def __rtruediv__(self, other: Any, /) -> Any: ...
    def __lt__(self, other: Any, /) -> Any: ...
    def __le__(self, other: Any, /) -> Any: ...
    def __gt__(self, other: Any, /) -> Any: ...
    def __ge__(self, other: Any, /) -> Any: ...
    def __neg__(self) -> Any: ...


class View:
    """A NumPy array as a kernel sees it: ``view[i, j]``, ``view.shape``; no wrap-around, every access checked."""

    __slots__ = ("address", "alignment", "apart", "dtype", "memory", "ndim", "shape", "steps", "unit")

    def __init__(self, array: np.ndarray, memory: Any, unit: int | None, alignment: int):
        self.memory, self.dtype, self.shape, self.ndim = memory, array.dtype, array.shape, array.ndim
        self.address = array.__array_interface__["data"][0]
        self.steps = array.strides
        self.unit, self.alignment = unit, alignment
        own = access_alignment(self, 1) if self.dtype.names is None else self.dtype.itemsize
        self.apart = own if own < self.dtype.itemsize else None          # its numbers are read part by part

    def at(self, coordinates: tuple) -> View:
        """What the first dimensions' coordinates leave: a matrix of a stack, in the same memory."""
        if not all(0 <= i < extent for i, extent in zip(coordinates, self.shape)):
            current().out_of_bounds(self.memory, coordinates, self.shape)
        out, count = object.__new__(View), len(coordinates)
        for name in ("memory", "dtype", "alignment", "apart"):
            setattr(out, name, getattr(self, name))
        out.address = self.address + sum(int(i) * step for i, step in zip(coordinates, self.steps))
        out.shape, out.steps, out.ndim = self.shape[count:], self.steps[count:], self.ndim - count
        out.unit = None if self.unit is None or self.unit < count else self.unit - count
        return out

    def locate(self, key: tuple, axis: int = 0, count: int = 1) -> int:
        """The absolute address of an element, the first of ``count`` along ``axis``.

        An index outside the extents is an error whatever lies there.
        """
        if len(key) != self.ndim:
            raise IndexError(f"{self.memory.name} has {self.ndim} dimensions and was indexed with {key}")
        address = self.address
        for i, extent, step in zip(key, self.shape, self.steps):
            if i.__class__ is not int:
                i = int(i) if isinstance(i, int) else i          # a coordinate's own arithmetic takes long
            if not 0 <= i < extent:
                current().out_of_bounds(self.memory, key, self.shape)
            address += int(i) * step
        if count > 1 and key[axis] + count > self.shape[axis]:
            last = tuple(i + (count - 1 if n == axis else 0) for n, i in enumerate(key))
            current().out_of_bounds(self.memory, last, self.shape)
        return address

    def __getitem__(self, key: Any) -> Any:
        key = key if isinstance(key, tuple) else (key,)
        if self.dtype.names is not None:
            return scalars(self.load_bytes(0, key, 1), self.dtype)[0]
        return current().read(self.memory, self.locate(key), self.dtype.itemsize, self.apart).view(self.dtype)[0]

    def __setitem__(self, key: Any, value: Any) -> None:
        key = key if isinstance(key, tuple) else (key,)
        if isinstance(value, (Record, tuple)) or self.dtype.names is not None:
            self.store(0, key, (value,))
            return
        if type(value) is not self.dtype.type:
            check_stored(value, self.dtype)
        data = np.asarray(value).astype(self.dtype).reshape(1).view(np.uint8)
        current().write(self.memory, self.locate(key), data, self.apart)

    def load(self, axis: int, first: tuple, count: int) -> tuple:
        """``count`` elements along ``axis``, in accesses as wide as the device code's."""
        return scalars(self.load_bytes(axis, first, count), self.dtype)

    def load_bytes(self, axis: int, first: tuple, count: int) -> np.ndarray:
        """`load`, as bytes."""
        if self.dtype.names is not None:
            return np.concatenate([current().read(self.memory, address, size)
                                   for address, size in self._accesses(axis, first, count)])
        width = piece_elements(self, axis, count)
        read, memory, size = current().read, self.memory, width * self.dtype.itemsize
        apart = self.apart if width == 1 else None
        if width == count:
            return read(memory, self.locate(first, axis, width), size, apart)
        return np.concatenate([read(memory, self.locate(_ahead(first, axis, at), axis, width), size, apart)
                               for at in range(0, count, width)])

    def store(self, axis: int, first: tuple, values: tuple) -> None:
        count = len(values)
        thread = current()
        for value in values if {*map(type, values)} != {self.dtype.type} else ():
            check_stored(value, self.dtype)
        data = narrowed(values, self.dtype)
        if self.dtype.names is not None:
            raw, at = data.view(np.uint8), 0
            for address, size in self._accesses(axis, first, count):
                thread.write(self.memory, address, raw[at:at + size])
                at += size
            return
        width = piece_elements(self, axis, count)
        for at in range(0, count, width):
            address = self.locate(_ahead(first, axis, at), axis, width)
            thread.write(self.memory, address, data[at:at + width].view(np.uint8), self.apart if width == 1 else None)

    def _accesses(self, axis: int, first: tuple, count: int) -> Iterator[tuple[int, int]]:
        """Address and size of each access to ``count`` records, which may be wider or narrower than a record."""
        run, step = record_accesses(self, axis, count)
        for at in range(0, count, run):
            address = self.locate(_ahead(first, axis, at), axis, run)
            for byte in range(0, run * self.dtype.itemsize, step):
                yield address + byte, step


def _ahead(position: tuple, axis: int, distance: int) -> tuple:
    return tuple(i + (distance if n == axis else 0) for n, i in enumerate(position)) if distance else position


def narrowed(values: tuple, dtype: np.dtype) -> np.ndarray:
    """Values converted to a dtype as the device converts them."""
    if dtype.names is not None:
        return np.array([tuple(to_dtype(dtype, v)) for v in values], dtype)
    if {*map(type, values)} == {dtype.type}:
        return np.array(values, dtype)
    with np.errstate(all="ignore"):
        return np.array([to_dtype(dtype, v) if isinstance(v, (Record, tuple)) else np.asarray(v).astype(dtype)
                         for v in values], dtype)


def piece_bytes(total: int, alignment: int) -> int:
    """The widest access (a power of two up to 16 bytes) that the alignment class allows and that divides the whole."""
    return math.gcd(min(16, alignment), total)


def piece_elements(view: Any, axis: int, count: int) -> int:
    """Elements per access along ``axis``: one unless the axis has stride 1. Used by the device and the emulator alike."""
    if view.unit != axis:
        return 1
    return max(1, piece_bytes(count * view.dtype.itemsize, view.alignment) // view.dtype.itemsize)


def access_alignment(view: Any, width: int) -> int:
    """Where an access to ``width`` neighbours starts, in bytes: at a multiple of its size. A complex number's address may be
    a multiple of its parts' size alone."""
    size = view.dtype.itemsize
    return width * size if width > 1 else min(size, max(view.alignment, part_bytes(view.dtype)))


def record_accesses(view: Any, axis: int, count: int) -> tuple[int, int]:
    """Of ``count`` records along ``axis``: how many are neighbours in memory, and the bytes of each access to them."""
    run = count if view.unit == axis else 1
    return run, max(part_size(view.dtype), piece_bytes(run * view.dtype.itemsize, view.alignment))


class SharedPointer:
    """A typed pointer into the block's shared memory: ``pointer[i]``."""

    __slots__ = ("dtype", "offset")

    def __init__(self, dtype: np.dtype, offset: int):
        self.dtype, self.offset = dtype, offset

    def __getitem__(self, i: int) -> Any:
        return self.load(int(i), 1)[0]

    def __setitem__(self, i: int, value: Any) -> None:
        self.store(int(i), (value,))

    def moved(self, dtype: np.dtype, distance: int) -> SharedPointer:
        """A pointer to elements of ``dtype``, ``distance`` bytes behind this one."""
        return SharedPointer(dtype, self.offset + distance)

    def from_base(self, base: int) -> SharedPointer:
        """The pointer for an access whose position has this base."""
        return self

    def load(self, first: int, count: int) -> tuple:
        return scalars(self.load_bytes(first, count), self.dtype)

    def load_bytes(self, first: int, count: int) -> np.ndarray:
        size = count * self.dtype.itemsize
        step, at = piece_bytes(size, 16), self.offset + first * self.dtype.itemsize
        thread = current()
        memory = thread.block.shared
        if step == size:
            return thread.read(memory, at, step)
        return np.concatenate([thread.read(memory, at + k, step) for k in range(0, size, step)])

    def store(self, first: int, values: tuple) -> None:
        self.store_bytes(first, narrowed(values, self.dtype).view(np.uint8))

    def store_bytes(self, first: int, data: np.ndarray) -> None:
        step, at = piece_bytes(len(data), 16), self.offset + first * self.dtype.itemsize
        thread = current()
        for k in range(0, len(data), step):
            thread.write(thread.block.shared, at + k, data[k:k + step])


class PinnedPointer(SharedPointer):
    """A pointer whose accesses have one base: compiled code has added ``place``, and does not look at theirs."""

    __slots__ = ("place",)

    def __init__(self, dtype: np.dtype, offset: int, place: int):
        super().__init__(dtype, offset)
        self.place = place

    def moved(self, dtype: np.dtype, distance: int) -> SharedPointer:
        return PinnedPointer(dtype, self.offset + distance, self.place)

    def from_base(self, base: int) -> SharedPointer:
        if base * self.dtype.itemsize != self.place:
            raise ValueError(f"a load from base {base} of elements of {self.dtype} by a pointer that is pinned to byte "
                             f"{self.place}: the operator's place_a or place_b is not where its load_a or load_b begins")
        return self
