"""``python -m gemmkit.distributed check``: what the GPUs of this host offer each other, and which way calls will take.

Alone it looks at the host's GPUs. Started by ``torchrun --nproc-per-node=2 -m gemmkit.distributed check`` its ranks make a
group and compute small products over it, each way that there is; the exit status is 1 where one of them is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys

from gemmkit.distributed.checking import of_group, of_host


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m gemmkit.distributed", description=(__doc__ or "").split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="topology, peer access, bandwidths, and what will be used")
    check.add_argument("--mib", type=int, default=256, help="size of the copies that bandwidths are taken from")
    given = parser.parse_args(arguments)
    if given.mib < 1:
        parser.error(f"--mib {given.mib}: 1 at least is needed")
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        print("\n".join(of_host(given.mib << 20)), flush=True)
    if "WORLD_SIZE" not in os.environ:
        return 0
    is_right, lines = of_group()
    if rank == 0 or not is_right:
        print("\n".join(lines), flush=True)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
