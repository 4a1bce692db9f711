"""``python -m gemmkit cache``: the compiled kernels on disk."""

from __future__ import annotations

import argparse
from typing import Any

from gemmkit.cli.console import bytes_text, console
from gemmkit.runtime.cache import default_cache


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "cache", help="the compiled kernels on disk", description="Show or clear the compiled kernels on disk. "
        "GEMMKIT_CACHE_DIR sets the folder, GEMMKIT_CACHE=0 keeps nothing, GEMMKIT_CACHE_MAX_MB bounds the size.")
    parser.add_argument("action", choices=("info", "clear"), nargs="?", default="info", help="default: info")
    return parser


def run(options: argparse.Namespace) -> int:
    cache, out = default_cache(), console()
    before = cache.info()
    if before.folder is None:
        out.print("Nothing is kept on disk (GEMMKIT_CACHE=0, or no home folder).")
        return 0
    size = f"{before.entries} kernels, {bytes_text(before.bytes)}"
    if options.action == "clear":
        cache.clear()
        left = cache.info().entries
        out.print(f"{before.folder}: removed {size}" + (f"; {left} could not be removed" if left else ""), soft_wrap=True)
        return 1 if left else 0
    out.print(f"{before.folder}: {size}", soft_wrap=True)
    return 0
