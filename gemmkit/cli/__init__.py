"""The command line: ``python -m gemmkit info | demo | explain | compile | tune | cache``.

    info      versions, the GPU and its limits, compilers, cache, and which kernels and operators are usable
    demo      the examples, on real data
    explain   how a product would be computed, why, and what that compiles to
    compile   kernels for the cache, ahead of the first call
    tune      the fastest mapping of a product, found by trying
    cache     the compiled kernels on disk
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from gemmkit.cli import cache, compile, demo, explain, info, tune
from gemmkit.lang.installed import NotInstalledError

__all__ = ["main"]

COMMANDS = (info, demo, explain, compile, tune, cache)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 0, or 1 for a check that failed, or 2 for a request that cannot be met."""
    parser = argparse.ArgumentParser(prog="python -m gemmkit", description="Composable matrix products (GEMM) in Python.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for module in COMMANDS:
        module.add_parser(commands).set_defaults(run=module.run)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except (ValueError, TypeError, RuntimeError, NotInstalledError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
