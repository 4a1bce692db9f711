"""The command line; see the package."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.sass_gate import __doc__ as about
from tools.sass_gate.compare import Comparison, compare
from tools.sass_gate.record import STORED, compact, load, record, save

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("sass_gate", description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("check", "write", "compare"):
        command = commands.add_parser(name)
        command.add_argument("--jobs", type=int, default=2, help="processes")
        command.add_argument("--case", action="append", default=[], help="a case; may be given several times (default: all)")
        command.add_argument("--lines", action="store_true", help="show the lines of loops that differ")
        if name == "check":
            command.add_argument("--update", action="store_true", help="keep what is found")
            command.add_argument("--stored", type=Path, default=STORED, help="the record that is checked against")
        elif name == "write":
            command.add_argument("file", type=Path)
        else:
            command.add_argument("files", type=Path, nargs="*", help="two records, or none with --commit")
            command.add_argument("--commit", help="compare this tree with a commit")
    given = parser.parse_args(arguments)

    if given.command == "write":
        save(record(given.case, given.jobs), given.file)
        return 0
    if given.command == "check":
        found = record(given.case, given.jobs)
        outcome = compare(load(given.stored), found, given.lines, partial=bool(given.case))
        if given.update:
            kept = load(given.stored) if given.case and given.stored.exists() else {"kernels": {}}
            save(compact({**found, "kernels": {**kept["kernels"], **found["kernels"]}}), given.stored)
        return report(outcome)
    if given.commit:
        if given.files:
            parser.error("give --commit or two files")
        return report(compare(of_commit(given.commit, given.case, given.jobs), record(given.case, given.jobs), given.lines))
    if len(given.files) != 2:
        parser.error("two files are needed, or --commit")
    before, after = map(load, given.files)
    return report(compare(before, after, given.lines))


def report(outcome: Comparison) -> int:
    for line in (*outcome.notes, *outcome.faults):
        print(line)
    if outcome.incomparable:
        print(outcome.incomparable)
    elif outcome.faults:
        print(f"{len(outcome.faults)} differences in registers, spills and histograms")
    else:
        print(f"registers, spills and histograms are equal; {len(outcome.notes)} notes on loops")
    return outcome.status


def of_commit(revision: str, names: list[str], jobs: int) -> dict[str, Any]:
    """The record of another commit's gemmkit, by this tree's tool and cases."""
    with tempfile.TemporaryDirectory(prefix="sass-gate-") as folder:
        tree, out = Path(folder, "tree"), Path(folder, "record.json")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), revision], cwd=ROOT, check=True)
        try:
            shutil.rmtree(tree / "tools", ignore_errors=True)
            shutil.copytree(ROOT / "tools", tree / "tools")
            chosen = [part for name in names for part in ("--case", name)]
            subprocess.run([sys.executable, "-m", "tools.sass_gate", "write", str(out), "--jobs", str(jobs), *chosen],
                           cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, check=True)
            return load(out)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main())
