"""`explain`: a product as it would be computed, to be read in a notebook, a browser or a terminal."""

from __future__ import annotations

import os
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemmkit.emulator.errors import document, framed, table
from gemmkit.kernels.config import Config, Keywords, names_keywords
from gemmkit.plans.ahead import CompiledKernel
from gemmkit.runtime.compile import AssemblerError
from gemmkit.tools import figures, timeline
from gemmkit.tools.timeline import ChoiceReport, ExplainedKernel, Run, choice_of, microseconds_text, of_call

if TYPE_CHECKING:
    from typing_extensions import Unpack

# --------------------------------------------------------------------------------------------------
# A report as one page of HTML that fetches nothing: from the mapping and its reasons to the compiled kernel.

OPCODES = 16  # that are listed
#: By the beginning of an opcode: what such instructions do.
KINDS = {
    "products": ("HGMMA", "QGMMA", "IGMMA", "HMMA", "DMMA", "IMMA", "QMMA", "FFMA", "DFMA", "HFMA2", "IDP"),
    "copies to shared memory": ("UTMALDG", "LDGSTS", "STS", "STSM"),
    "loads from shared memory": ("LDS", "LDSM"),
    "global memory": ("LDG", "STG", "UTMASTG", "LD.", "ST.", "RED", "ATOM"),
    "barriers and waits": (
        "SYNCS",
        "BAR",
        "WARPSYNC",
        "LDGDEPBAR",
        "DEPBAR",
        "WARPGROUP",
        "MEMBAR",
        "FENCE",
        "NANOSLEEP",
        "CCTL",
    ),
    "control": ("BRA", "EXIT", "BSSY", "BSYNC", "CALL", "RET", "BREAK", "NOP", "WARPGROUPSET"),
}


def page(subject: ExplainedKernel) -> str:
    """The whole page; what is missing (a toolkit, a small product) is said in its place."""
    sections: tuple[tuple[str, str, Callable[[ExplainedKernel], str]], ...] = (
        ("mapping", "The mapping, and why", _mapping),
        ("tiles", "The tile plan", figures.plan_drawn),
        ("banks", "Shared memory and its banks", _banks),
        ("pipeline", "The pipeline", _pipeline),
        ("resources", "The compiled kernel", _resources),
        ("roofline", "Roofline", figures.drawn_roofline),
    )
    links = " ".join(f'<a href="#{name}">{escape(head)}</a>' for name, head, _ in sections)
    body = "".join(
        f'<section id="{name}"><h2>{escape(head)}</h2>{content(subject)}</section>' for name, head, content in sections
    )
    return document(title(subject), f"{summary(subject)}<nav>{links}</nav>{body}")


def summary(subject: ExplainedKernel) -> str:
    """Three lines: what bounds the product, its share of the roof, what to try."""
    found = figures.standing(subject)
    if isinstance(found, str):
        bound, share = f"not known: {found}", "not known"
    else:
        bound = f"{found.bound}: {found.intensity:,.4g} operations a byte, and the ridge is at {found.roof.ridge:,.4g}"
        most = f"{found.most / 1e12:,.4g} TFLOP/s at most"
        share = f"not modelled; {most}" if found.modelled is None else (
            f"{found.share}, modelled: {found.modelled / 1e12:,.4g} TFLOP/s of {most}")
    rows = (("Bound by", bound), ("Share of the roof", share), ("To try", advice(subject)))
    return '<table id="summary">' + table((), rows).removeprefix("<table>")


def advice(subject: ExplainedKernel) -> str:
    """The first thing that is worth trying, and why."""
    conf, spec, (M, N, K) = subject.conf, subject.spec, subject.sizes
    scheduler, slots = subject.of_product, subject.device.sm_count
    tiles = scheduler.computed(M, N) * scheduler.cluster.size * subject.compiled.computed.products
    kernel = subject.kernel
    if isinstance(kernel, CompiledKernel) and kernel.usage.spill_stores:
        return f"a smaller tile of a block: this one spills {kernel.usage.spill_stores} bytes a thread"
    if 4 * tiles < 3 * slots and conf.splits == 1:
        steps = -(-K // spec.block.size.K)
        deeper = f", or splits= of its {steps} k-tiles" if steps >= 4 else ""
        return f"a smaller tile of a block{deeper}: {tiles} of {slots} multiprocessors have a tile"
    waves = -(-tiles // slots)
    last = tiles - (waves - 1) * slots
    if conf.splits == 1 and waves <= 4 and last < slots / 2:
        return (f"another tile of a block, by gemmkit.tune: in the last of {waves} waves {last} of {slots} multiprocessors "
                "have a tile")
    found = figures.standing(subject)
    if not isinstance(found, str) and tiles <= slots and found.modelled is not None and 2 * found.modelled < found.most:
        return ("several products in one launch (a stack, gemmkit.grouped), or fusing what follows: the latency of one tile "
                "takes most of the time")
    if not isinstance(found, str) and found.bound == "global memory":
        return "to fuse what comes before or after it (transforms, epilogues): its time is that of reading and writing"
    return "gemmkit.tune(a, b), which measures the other mappings on your GPU"


def title(subject: ExplainedKernel) -> str:
    M, N, K = subject.sizes
    many = subject.compiled.computed.products
    stack = f"{many} x " if many != 1 else ""
    return f"{stack}D ({M} x {N}) = A ({M} x {K}) @ B ({K} x {N})"


def _mapping(subject: ExplainedKernel) -> str:
    conf, choice = subject.conf, choice_of(subject.compiled)
    size, call = conf.block_shape.extents, subject.compiled.computed
    transposed = ", of the transpose D^T = B^T A^T" if call is not subject.compiled.problem else ""
    time = "not modelled" if choice.microseconds is None else f"{microseconds_text(choice.microseconds)} a launch"
    rows: list[tuple[str, object]] = [
        *([("part of", subject.part_of)] if subject.part_of else []),
        ("kernel", f"{conf.kernel}{transposed}, for {subject.device.name}"),
        ("chosen because", choice.reason),
        ("decided in", choice.owner),
        ("modelled time", time),
        ("operator", repr(conf.operator)),
        ("tile of a block", " x ".join(map(str, size))),
        ("threads", f"{conf.threads} ({conf.threads // 32} warps)"),
        ("global A, B, D", f"{conf.global_a_layout!r}, {conf.global_b_layout!r}, {conf.global_d_layout!r}"),
        ("shared A, B, D", f"{conf.shared_a_layout!r}, {conf.shared_b_layout!r}, {conf.shared_d_layout!r}"),
        ("shared memory", f"{subject.spec.shared_bytes:,} bytes a block"),
        ("epilogue", repr(conf.epilogue)),
    ]
    return (
        table((), rows) + _others(subject) + f"<details><summary>As code</summary><pre>{escape(repr(conf))}</pre></details>"
    )


def _others(subject: ExplainedKernel) -> str:
    choice = choice_of(subject.compiled)
    if not choice.others:
        return "<p class=soft>The tables model no other mapping of this product.</p>"
    mine = [] if choice.candidate is None else [choice.candidate]
    listed = sorted((*mine, *choice.others), key=lambda one: one.nanoseconds)
    rows = [(one.name, microseconds_text(one.nanoseconds / 1000)) for one in listed]
    own = listed.index(choice.candidate) if choice.candidate is not None else None
    said = (
        "The model's times of other tiles of this kernel; 'gemmkit.tune' measures them."
        if own is not None
        else ("The mapping that runs is not among those that the tables model; these are.")
    )
    return f"<p>{said}</p>{table(('mapping', 'modelled us'), rows, own)}"


def _run_or_why(subject: ExplainedKernel) -> Run | str:
    if not hasattr(subject.spec, "stage_bytes"):
        return f"<p>Shown of kernels with a ring of stages; this one is {escape(subject.conf.kernel)}, with one stage.</p>"
    run = subject.run
    if isinstance(run, str):
        return f"<p>No small product by this mapping could be emulated: {escape(run)}</p>"
    return run


def _banks(subject: ExplainedKernel) -> str:
    run = _run_or_why(subject)
    if isinstance(run, str):
        return run
    said = f" {run.left_out}" if run.left_out else ""
    return (
        f"<p>Counted in a product of {' x '.join(map(str, run.sizes))} that the emulator ran{escape(said)}. Shared "
        f"memory has 32 "
        f"banks of 4 bytes; two accesses to one bank take two passes.</p>{figures.drawn_accesses(run)}"
    )


def _pipeline(subject: ExplainedKernel) -> str:
    run = _run_or_why(subject)
    return run if isinstance(run, str) else timeline.drawn(run)


def _resources(subject: ExplainedKernel) -> str:
    kernel = subject.kernel
    if not isinstance(kernel, CompiledKernel):
        return (
            f"<p>Not compiled: {escape(kernel)}</p><p>pip install 'gemmkit[cu13]' (or cu12) brings the compilers; "
            "'python -m gemmkit info' shows which are found.</p>"
        )
    usage, found, conf = kernel.usage, kernel.occupancy, subject.conf
    device = subject.device
    rows: list[tuple[str, object]] = [
        ("for", kernel.device.arch_name),
        ("registers a thread", usage.registers),
        ("bytes spilled a thread", usage.spill_stores),
        ("shared memory, bytes a block", subject.spec.shared_bytes),
        ("blocks on a multiprocessor", found.blocks),
        (
            "occupancy",
            f"{100 * found.blocks * conf.threads / device.max_threads_per_sm:.0f} % of its {device.max_threads_per_sm} "
            f"threads",
        ),
    ]
    limits = [
        ("registers", f"{usage.registers} x {conf.threads} threads", found.by_registers),
        ("threads", f"{conf.threads}", found.by_threads),
        ("shared memory", f"{subject.spec.shared_bytes:,} bytes", found.by_shared_memory),
        ("hardware", "", found.by_hardware),
    ]
    tables = table((), rows) + table(("limit", "a block takes", "blocks"), limits)
    try:
        counts = kernel.instructions
    except AssemblerError as error:
        return f"<div class=row>{tables}</div><p>No instructions: {escape(str(error))}</p>"
    total = sum(counts.values())
    kinds: dict[str, int] = {}
    for opcode, number in counts.items():
        kind = next(
            (name for name, starts in KINDS.items() if opcode.startswith(starts)), "addresses, conversions, the rest"
        )
        kinds[kind] = kinds.get(kind, 0) + number
    mix = [
        (name, number, f"{100 * number / total:.0f} %") for name, number in sorted(kinds.items(), key=lambda one: -one[1])
    ]
    return (
        f"<div class=row>{tables}</div><p>{total:,} instructions in the kernel's text (not weighted by how often they "
        f"run):</p>"
        f"<div class=row>{table(('kind', 'instructions', ''), mix)}"
        f"{table(('opcode', 'instructions'), counts.most_common(OPCODES))}</div>"
    )


class Explanation:
    """What `explain` returns. A notebook shows the page; ``print`` shows what was chosen, and why.

    ``config`` is the configuration, ``choice`` what chose it (``by``, ``reason``, ``microseconds``, ``others``).
    """

    def __init__(self, subject: ExplainedKernel) -> None:
        self.subject = subject
        self._page: str | None = None

    @property
    def config(self) -> Config:
        return self.subject.compiled.problem.config

    @property
    def choice(self) -> ChoiceReport:
        return choice_of(self.subject.compiled)

    def html(self) -> str:
        """The page: the kernel is compiled and a small product emulated when it is first asked for (a few seconds)."""
        if self._page is None:
            self._page = page(self.subject)
        return self._page

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page; raises ValueError, before anything is computed, where the folder is not there."""
        file = Path(path)
        if not file.parent.is_dir():
            raise ValueError(f"path={os.fspath(path)!r}: there is no folder {file.parent}")
        file.write_text(self.html(), encoding="utf-8")

    def _repr_html_(self) -> str:
        return framed(self.html(), 900)

    def __repr__(self) -> str:
        choice, conf = self.choice, self.config
        time = "" if choice.microseconds is None else f"\nmodelled: {microseconds_text(choice.microseconds)}"
        part_of = f"{self.subject.part_of}\n" if self.subject.part_of else ""
        tile = "x".join(map(str, conf.block_shape.extents))
        return (
            f"{part_of}{title(self.subject)}\n{conf.kernel}, {tile}, {conf.operator!r}"
            f"\nchosen because: {choice.reason} ({choice.owner}){time}"
        )


@names_keywords
def explain(a: Any, b: Any, c: Any = None, conf: Any = None, *, out: Any = None,
            **keywords: Unpack[Keywords]) -> Explanation:
    """Explain how `gemmkit.matmul` would compute a product, and why. Nothing is launched; no element is read or written.
    ``explain(gemmkit.einsum, spec, x, y)`` explains a contraction of two operands, and which of them are copied first.

    Args:
        a: (M, K), as `gemmkit.matmul` takes it. NumPy arrays need no GPU: the product is planned for the GPU that is here,
            or for an H100. An array of another library is planned on its GPU, where D is allocated if out is not given.
        b: (K, N), as a.
        c: (M, N), or None.
        conf: a configuration of `gemmkit.get_config`; None explains the one that is chosen.
        out: (M, N), or None.
        keywords: those of `gemmkit.matmul`.

    Returns:
        An `Explanation`: ``print`` shows what was chosen and why, ``save("report.html")`` writes the page with waves,
        lanes and times in us, and a notebook shows the page.

    Raises:
        ValueError: a product without elements.
        ValueError, TypeError, ConfigError, ComponentError: as `gemmkit.matmul` raises them.

    >>> import numpy as np, gemmkit as gk
    >>> a = np.empty((512, 512), np.float32)
    >>> said = gk.explain(a, a)
    >>> said.config.kernel, said.choice.by
    ('multistage', 'multistage')
    >>> print(said)                                             # doctest: +ELLIPSIS
    D (512 x 512) = A (512 x 512) @ B (512 x 512)
    multistage, ..., FPUOp(...)
    chosen because: the least modelled time among ...
    >>> said.save("no/such/folder/report.html")
    Traceback (most recent call last):
    ValueError: path='no/such/folder/report.html': there is no folder no/such/folder
    """
    return Explanation(of_call(a, b, c, conf, out, dict(keywords)))
