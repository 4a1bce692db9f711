"""A report as one page of HTML that fetches nothing: the mapping, conflicts of banks, the compiled kernel."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from gemmkit.inspection import CompiledKernel
from gemmkit.report.banks import count
from gemmkit.report.subject import Subject
from gemmkit.runtime.assemble import AssemblerError

__all__ = ["page"]

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --paper: #ffffff; --line: #d5dbe3; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --paper: #14181e; --line: #3a424d; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1100px;
       margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; } th, td { border-bottom: 1px solid var(--line); padding: .25rem .8rem;
        text-align: left; } td.n { text-align: right; font-variant-numeric: tabular-nums; } pre { overflow-x: auto; }
"""


def page(subject: Subject) -> str:
    """The whole page; what is missing (a toolkit, a small product) is said in its place."""
    M, N, K = subject.sizes
    title = f"D ({M} x {N}) = A ({M} x {K}) @ B ({K} x {N})"
    sections = (("mapping", "The mapping", f"<pre>{escape(repr(subject.conf))}</pre>"),
                ("banks", "Conflicts of banks", _banks(subject)), ("resources", "The compiled kernel", _resources(subject)))
    body = "".join(f'<section id="{name}"><h2>{head}</h2>{content}</section>' for name, head, content in sections)
    return (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
            f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>")


def _banks(subject: Subject) -> str:
    if not hasattr(subject.spec, "stage_bytes"):
        return f"<p>Counted of kernels with a ring of stages; this one is {escape(subject.conf.kernel)}.</p>"
    run = subject.run
    if isinstance(run, str):
        return f"<p>No small product by this mapping could be emulated: {escape(run)}</p>"
    said = f" {run.left_out}" if run.left_out else ""
    rows = [(row.operand, row.kind, row.accesses, row.extra, row.without) for row in count(run.events, run.spec)]
    return (f"<p>Of a product of {' x '.join(map(str, run.sizes))} in the emulator{escape(said)}: A's and B's stages, in "
            f"{escape(repr(run.spec.a.shared))} and {escape(repr(run.spec.b.shared))}.</p>"
            + table(("operand", "access", "how many", "extra passes", "without swizzle or padding"), rows))


def _resources(subject: Subject) -> str:
    kernel = subject.kernel
    if not isinstance(kernel, CompiledKernel):
        return (f"<p>Not compiled: {escape(kernel)}</p><p>pip install 'gemmkit[cu13]' (or cu12) brings the compilers; "
                "'python -m gemmkit info' shows which are found.</p>")
    usage = kernel.usage
    rows: list[tuple[str, object]] = [
        ("for", kernel.device.arch_name), ("registers a thread", usage.registers),
        ("bytes spilled a thread", usage.spill_stores),
        ("shared memory, bytes a block", subject.spec.shared_bytes), ("blocks on a multiprocessor", kernel.occupancy.blocks)]
    try:
        counts = kernel.instructions
    except AssemblerError as error:
        return table((), rows) + f"<p>No instructions: {escape(str(error))}</p>"
    return table((), rows) + table(("opcode", "instructions"), counts.most_common(16))


def table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """A table of HTML; numbers stand at the right."""
    def cell(value: object) -> str:
        kind = ' class="n"' if isinstance(value, (int, float)) else ""
        return f"<td{kind}>{escape(f'{value:,}' if isinstance(value, int) else str(value))}</td>"

    names = "".join(f"<th>{escape(str(name))}</th>" for name in head)
    return (f"<table>{f'<thead><tr>{names}</tr></thead>' if names else ''}<tbody>"
            + "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows) + "</tbody></table>")
