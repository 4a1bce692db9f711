"""What gemmkit chooses, recorded: the gate of changes to the code that chooses.

    python -m tools.choices check            what is chosen now, compared with tools/choices.json; 1 where it differs
    python -m tools.choices record           keep what is chosen now
    ... --every 40 --jobs 2                  every 40th case alone; processes

A case is a measured work of ``bench`` (for an H100), or a call that `tests.resolved_calls` drew, for an H100, an A100 or a
T4 in turn: products, and what has kernels of its own (attention, MLPs, functions of rows, programs). It is kept as code, so
that what it asks for stays the same when the drawing changes. Its choice is, of each kernel that it would launch, how many
blocks of how many threads that is, and the configuration, the spec or the program's mapping, without the arrays that
components hold; or why it is refused. Public names are recorded beside it: every name in ``__all__`` of each module that
users import.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.jobs import in_jobs

ROOT = Path(__file__).resolve().parents[1]
STORED = Path(__file__).with_name("choices.json")
SEED, DRAWN, FUSED = 42, 2000, 700
PART = 25                              # cases that a process takes at a time
PUBLIC = {                             # what has public names: where they lie
    "__init__": "__init__", "blas": "blas", "fast": "epilogues/fast", "masks": "kernels/masks", "rows": "functions/rows",
    "scores": "kernels/masks", "tiling": "tiling",
    **{package: f"{package}/__init__" for package in ("cupy", "distributed", "epilogues", "layouts", "operators", "programs",
                                                      "specs", "torch", "transforms")}}

Record = dict[str, Any]


# -- cases ------------------------------------------------------------------------------------------------------------

def drawn() -> Iterator[tuple[str, str]]:
    """Calls as code, each with the GPU that it is resolved for."""
    from tests.resolved_calls import draw
    from tests.resolved_calls.resolve import DEVICES

    names = list(DEVICES)
    for number in range(DRAWN):
        yield names[number % len(names)], draw.draw(SEED, number).code
    for number in range(FUSED):                        # a T4 has most of these not
        yield ("H100", "A100", "H100", "A100", "H100", "T4")[number % 6], draw.draw(SEED, number, draw.FUSED).code


def measured() -> dict[str, Any]:
    """The works of bench.hopper and bench.experiments, by name."""
    from bench import cases
    from bench.experiments.run import GROUPS, make

    hopper = cases.make([group for group in cases.GROUPS if group not in ("mappings", *cases.PAPER)])
    return {str(case): case for case in (*hopper, *make([group for group in GROUPS if group != "listings"]))}


# -- choices ----------------------------------------------------------------------------------------------------------

def choice_of(found: Sequence[Any]) -> str:
    """What `gemmkit.plans.ahead.recorded` found, as text."""
    return "\n".join(map(_of_launch, found))


def _of_launch(made: Any) -> str:
    from gemmkit.components import without_arrays

    kernel = made.launchable
    shape = (f"{kernel.blocks} blocks of {kernel.threads} threads, clusters of {kernel.cluster}, "
             f"{kernel.shared_bytes} bytes shared")
    problem = getattr(made, "problem", None)
    if problem is None:
        return f"{kernel.kernel.__qualname__}: {shape}{_how(made)}"
    order = "the transpose; " if problem.swap_ab else ""
    return f"{order}{shape}; {plain(repr(without_arrays(problem.config)))}"


def _how(made: Any) -> str:
    """Of a kernel without a configuration: its spec, or of a program the mapping and who has a row."""
    from gemmkit.components import without_arrays
    from gemmkit.programs.plan import ProgramPlan

    if isinstance(made, ProgramPlan):
        return f"; {made.mapping!r}; {next(line for line in made.text.splitlines() if made.name in line)}"
    spec = getattr(made, "spec", None)
    return "" if spec is None else f"; {plain(repr(without_arrays(spec)))}"


def plain(text: str) -> str:
    """Without what differs from process to process: addresses, and where functions lie."""
    return re.sub(r"pointer=\d+|stream=\d+| at 0x[0-9a-f]+|<function [^>]*>", "", text)


def of_calls(calls: Sequence[tuple[str, str]]) -> list[str]:
    from gemmkit.lang.errors import ConfigError
    from gemmkit.plans.ahead import recorded
    from tests.resolved_calls.draw import scope
    from tests.resolved_calls.resolve import DEVICES

    def said(device: str, code: str) -> str:
        try:
            return choice_of(recorded(partial(eval, code, scope()), DEVICES[device], zeros=False))
        except (ConfigError, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}".replace("\n", " ")

    return [said(device, code) for device, code in calls]


def of_works(names: Sequence[str]) -> list[str]:
    from bench.prepare import products
    from gemmkit.runtime.device import H100, assumed

    works, found = measured(), []
    for name in names:
        with assumed(H100):
            found.append(choice_of(products(works[name])))
    return found


def parts(cases: Sequence[Any]) -> list[Sequence[Any]]:
    return [cases[n:n + PART] for n in range(0, len(cases), PART)]


def choices(calls: Sequence[tuple[str, str]], works: Sequence[str], jobs: int) -> dict[str, str]:
    of: tuple[tuple[Callable[[Any], list[str]], Sequence[Any]], ...] = (of_calls, calls), (of_works, works)
    found = [text for work, cases in of for part in in_jobs(work, parts(cases), jobs) for text in part]
    return dict(zip((*(f"{device}: {code}" for device, code in calls), *works), found, strict=True))


def public_names() -> dict[str, list[str]]:
    """``__all__`` of what users import, read from the sources: PyTorch need not be here."""
    found = {}
    for name, path in PUBLIC.items():
        for node in ast.parse((ROOT / "gemmkit" / f"{path}.py").read_text()).body:
            if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == "__all__" for to in node.targets):
                found[name] = sorted(ast.literal_eval(node.value))
    return found


# -- the record -------------------------------------------------------------------------------------------------------

def load(path: Path = STORED) -> Record:
    found: Record = json.loads(path.read_text())
    return found


def save(calls: Sequence[tuple[str, str]], found: dict[str, str], path: Path = STORED) -> None:
    """Each line of a choice once, and each choice as its lines' numbers: most lines are of many cases."""
    numbers: dict[str, int] = {}

    def said(text: str) -> str:
        return " ".join(str(numbers.setdefault(line, len(numbers))) for line in text.splitlines())

    drawn_ones = {f"{device}: {code}" for device, code in calls}
    record = {"public names": public_names(),
              "calls": [[device, code, said(found[f"{device}: {code}"])] for device, code in calls],
              "works": {name: said(text) for name, text in found.items() if name not in drawn_ones}, "lines": list(numbers)}
    path.write_text(json.dumps(record, indent=0) + "\n")


def differences(stored: Record, every: int = 1, jobs: int = 1) -> list[str]:
    """What is chosen otherwise than the record says, every so many-th case alone, and which public names are gone."""
    there = public_names()
    gone = [f"gemmkit/{module}: {name} is no public name any more" for module, names in stored["public names"].items()
            for name in names if name not in there.get(module, ())]
    calls, works = stored["calls"][::every], list(stored["works"])[::every]
    wanted = {**{f"{device}: {code}": said for device, code, said in calls},
              **{name: stored["works"][name] for name in works}}
    found = choices([(device, code) for device, code, _ in calls], works, jobs)
    for name, said in wanted.items():
        was = [stored["lines"][int(n)] for n in said.split()]
        now = found[name].splitlines()
        if was != now:
            gone.append("\n".join((name, *(line for line in difflib.unified_diff(was, now, "was", "is", lineterm="", n=0)))))
    return gone


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tools.choices", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("check", "record"))
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every N-th case alone")
    parser.add_argument("--jobs", type=int, default=2, metavar="J", help="processes")
    options = parser.parse_args(arguments)
    if options.command == "record":
        calls = list(drawn())
        save(calls, choices(calls, list(measured()), options.jobs))
        return 0
    found = differences(load(), options.every, options.jobs)
    print(*found, f"{len(found)} choices differ", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    import tools.choices  # processes find functions by the name of their module

    sys.exit(tools.choices.main())
