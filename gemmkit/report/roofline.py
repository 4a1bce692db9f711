"""A roofline: what bounds a product by its operations and bytes, and where its modelled time stands.

Rates are NVIDIA's, of a multiprocessor and a cycle at the boost clock, dense ("NVIDIA H100 Tensor Core GPU Architecture",
tables 1 to 3; "NVIDIA A100 Tensor Core GPU Architecture", tables 1 and 4; H200: its data sheet). The figure is Williams,
Waterman and Patterson's ("Roofline", CACM 52(4), 2009).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from gemmkit.drawing import figure, table, text
from gemmkit.operators import MMAOp, Operator, WGMMAOp, WMMAOp
from gemmkit.report.choice import choice_of, microseconds_text
from gemmkit.report.subject import Subject
from gemmkit.runtime.device import DeviceInfo

#: Operations (a multiplication and an addition are two) of a multiprocessor a cycle: tensor cores, by the operands' dtype.
TENSOR = {
    (9, 0): {
        "float16": 4096,
        "bfloat16": 4096,
        "float32": 2048,
        "float64": 256,
        "int8": 8192,
        "uint8": 8192,
        "float8_e4m3fn": 8192,
        "float8_e5m2": 8192,
    },
    (8, 0): {"float16": 2048, "bfloat16": 2048, "float32": 1024, "float64": 128, "int8": 4096, "uint8": 4096},
}
#: The same of the ordinary units.
ORDINARY = {
    (9, 0): {"float16": 512, "bfloat16": 512, "float32": 256, "float64": 128, "int32": 128},
    (8, 0): {"float16": 512, "bfloat16": 256, "float32": 128, "float64": 64, "int32": 128},
}
CLOCK = {(9, 0): 1.83e9, (8, 0): 1.41e9}
#: Bytes a second of global memory, by what a GPU's name holds.
MEMORY = {"H200": 4.8e12, "H100 PCIe": 2.0e12, "H100": 3.35e12, "A100": 1.94e12}


#: What complex numbers are multiplied in: four products and four additions of it.
REAL = {"complex64": "float32", "complex128": "float64"}


@dataclass(frozen=True)
class Roof:
    """Operations a second of the units that an operator uses, and bytes a second of global memory."""

    operations: float
    memory: float
    units: str

    @property
    def ridge(self) -> float:
        """The intensity, operations a byte, from which on the units are the bound."""
        return self.operations / self.memory

    def at(self, intensity: float) -> float:
        """Operations a second that can be had at most."""
        return min(self.operations, self.memory * intensity)


def roof_of(operator: Operator, device: DeviceInfo) -> Roof | str:
    """The roof of an operator on a device, or what is not known of it.

    >>> from gemmkit.runtime.device import H100
    >>> roof = roof_of(MMAOp(), H100)
    >>> round(roof.operations / 1e12), round(roof.ridge), roof.units
    (989, 295, 'tensor cores, float16')
    """
    base = getattr(operator, "operator", operator)
    is_tensor = isinstance(base, (MMAOp, WMMAOp, WGMMAOp)) or hasattr(operator, "instruction")
    dtype = str(base.dtype if is_tensor and hasattr(base, "dtype") else operator.fragment_c.dtype)
    rates = (TENSOR if is_tensor else ORDINARY).get(device.arch)
    memory = next((value for name, value in MEMORY.items() if name in device.name), None)
    if rates is None or memory is None:
        return f"rates of {device.name} are not in gemmkit/report/roofline.py"
    dtype = REAL.get(dtype, dtype)
    if dtype not in rates:
        return f"the rate of {type(operator).__name__} on {dtype} is not known: NVIDIA's tables have none"
    units = "tensor cores" if is_tensor else "ordinary units"
    return Roof(rates[dtype] * device.sm_count * CLOCK[device.arch], memory, f"{units}, {dtype}")


def work_of(subject: Subject) -> tuple[float, float, float]:
    """Operations; bytes where each operand is read (or written) once; bytes that blocks fetch from the L2."""
    M, N, K = subject.sizes
    call, size = subject.compiled.computed, subject.spec.block.size
    many, a, b = call.products, call.a.dtype.itemsize, call.b.dtype.itemsize
    d = subject.conf.global_d_layout.storage.itemsize
    once = (M * K * a + K * N * b + M * N * d * (2 if subject.conf.has_c else 1)) * many
    blocks = math.ceil(M / size.M) * math.ceil(N / size.N)
    cluster = subject.spec.cluster
    fetched = (blocks * K * (size.M * a / cluster.n + size.N * b / cluster.m) + M * N * d) * many
    each = 8.0 if str(call.a.dtype) in REAL and str(call.b.dtype) in REAL else 2.0
    return each * M * N * K * many, float(once), float(fetched)


@dataclass(frozen=True)
class Standing:
    """Where a product stands: its roof, operations, operations a byte, and modelled operations a second (None: no model)."""

    roof: Roof
    operations: float
    intensity: float
    modelled: float | None

    @property
    def bound(self) -> str:
        return "the " + self.roof.units if self.intensity >= self.roof.ridge else "global memory"

    @property
    def most(self) -> float:
        """Operations a second that can be had at most."""
        return self.roof.at(self.intensity)

    @property
    def share(self) -> str | None:
        return None if self.modelled is None else f"{100 * self.modelled / self.most:.0f} % of the roof"


def standing(subject: Subject) -> Standing | str:
    """Where a product stands, or what is not known of its roof."""
    roof = roof_of(subject.spec.operator, subject.device)
    if isinstance(roof, str):
        return roof
    operations, once, _ = work_of(subject)
    microseconds = choice_of(subject.compiled).microseconds
    return Standing(roof, operations, operations / once, None if microseconds is None else operations / microseconds * 1e6)


def drawn(subject: Subject) -> str:
    """The figure, and its numbers."""
    found = standing(subject)
    if isinstance(found, str):
        return f"<p>No roofline: {found}.</p>"
    operations, once, fetched = work_of(subject)
    roof, intensity, modelled = found.roof, found.intensity, found.modelled
    rows: list[tuple[str, object]] = [
        ("operations (2 M N K, of complex numbers 8)", f"{operations:.4g}"),
        ("bytes, each operand once", f"{once / 1e6:,.4g} MB"),
        ("operations a byte", f"{intensity:,.4g}"),
        ("the ridge is at", f"{roof.ridge:,.4g} operations a byte"),
        ("bound by", found.bound),
        ("at most", f"{found.most / 1e12:.4g} TFLOP/s: {operations / found.most * 1e6:.4g} us"),
        ("bytes that blocks fetch from the L2", f"{fetched / 1e6:,.5g} MB ({operations / fetched:.3g} operations a byte)"),
    ]
    if modelled is not None:
        time = microseconds_text(operations / modelled * 1e6)
        rows.append(("modelled", f"{modelled / 1e12:.4g} TFLOP/s: {time}, {found.share}"))
    return f"<div class=row>{_figure(roof, intensity, modelled)}{table((), rows)}</div>"


def _figure(roof: Roof, intensity: float, modelled: float | None) -> str:
    wide, high, left, top = 420.0, 240.0, 56.0, 14.0
    low_x, high_x = min(-1.0, math.log10(intensity) - 0.3), max(math.log10(roof.ridge), math.log10(intensity)) + 0.8
    high_y = math.log10(roof.operations) + 0.25
    low_y = min(high_y - 3.2, math.log10(modelled or roof.at(intensity)) - 0.3)

    def x(value: float) -> float:
        return left + wide * (math.log10(value) - low_x) / (high_x - low_x)

    def y(value: float) -> float:
        return top + high * (high_y - math.log10(value)) / (high_y - low_y)

    def parts() -> Iterator[str]:
        for power in range(math.ceil(low_x), math.floor(high_x) + 1):
            at = x(10.0**power)
            yield f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{top + high}" stroke="var(--line)"/>'
            yield text(at, top + high + 15, f"{10.0**power:g}", "middle", "soft")
        for power in range(math.ceil(low_y), math.floor(high_y) + 1):
            at = y(10.0**power)
            yield f'<line x1="{left}" x2="{left + wide}" y1="{at:.1f}" y2="{at:.1f}" stroke="var(--line)"/>'
            yield text(left - 6, at + 4, f"{10.0 ** (power - 12):g}", "end", "soft")
        start = max(10.0**low_x, 10.0**low_y / roof.memory)
        yield (
            f'<path d="M{x(start):.1f} {y(roof.memory * start):.1f} L{x(roof.ridge):.1f} {y(roof.operations):.1f} '
            f"L{left + wide} "
            f'{y(roof.operations):.1f}" fill="none" stroke="var(--accent)" stroke-width="2.5"/>'
        )
        yield text(x(roof.ridge) - 8, y(roof.operations) + 4, f"{roof.operations / 1e12:.4g} TFLOP/s, {roof.units}", "end")
        slope = math.degrees(math.atan((y(roof.memory) - y(10 * roof.memory)) / (x(10.0) - x(1.0))))
        middle = math.sqrt(start * roof.ridge)
        at_x, at_y = x(middle) - 7, y(roof.memory * middle) - 7
        yield (
            f'<text x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="middle" transform="rotate({-slope:.1f} {at_x:.1f} '
            f'{at_y:.1f})">'
            f"{roof.memory / 1e12:g} TB/s</text>"
        )
        most = roof.at(intensity)
        yield (
            f'<line x1="{x(intensity):.1f}" x2="{x(intensity):.1f}" y1="{y(most):.1f}" y2="{top + high}" '
            f'stroke="var(--hot)" '
            'stroke-dasharray="4 3"/>'
        )
        yield _point(x(intensity), y(most), f"at most {most / 1e12:.4g} TFLOP/s at {intensity:.4g} operations a byte", False)
        if modelled is not None:
            yield _point(x(intensity), y(modelled), f"modelled: {modelled / 1e12:.4g} TFLOP/s", True)
        yield text(left + wide / 2, top + high + 32, "operations a byte of global memory", "middle", "soft")
        yield (
            f'<text x="12" y="{top + high / 2}" class="soft" text-anchor="middle" transform="rotate(-90 12 '
            f'{top + high / 2})">'
            "TFLOP/s</text>"
        )

    return figure(
        left + wide + 12,
        top + high + 38,
        parts(),
        "Both axes are logarithmic. The open circle is the bound of this product, "
        "the full one the time that the tables model.",
    )


def _point(x: float, y: float, tip: str, full: bool) -> str:
    fill = "var(--hot)" if full else "var(--paper)"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5" fill="{fill}" stroke="var(--hot)" stroke-width="2" data-t="{tip}"/>'
