"""Builds the wheel and the source distribution, checks them, and tries the wheel in a fresh environment. Publishes nothing.

    python -m tools.wheel                      build, check, and try with the emulator alone (no package of CUDA)
    python -m tools.wheel --extra cu13         try with the compiler's wheels, too: `explain` compiles a kernel
    python -m tools.wheel --out dist           keep what was built
    python -m tools.wheel --cubins sm_90a      with compiled kernels for these GPUs (`tools.cubins`)

What is checked: `twine check --strict` on both; every module of gemmkit and every example is in the wheel, and nothing else;
the source distribution has all that git has; from the wheel alone, away from the sources, `info` and an example run, a
product is right, and what needs the toolkit says which extra has it. The status is 0 where all is as it must be.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "gemmkit/cubins"

PRODUCT = """
import numpy as np, gemmkit as gk
a, b = np.arange(12, dtype="f4").reshape(3, 4), np.ones((4, 5), "f4")
with gk.emulate():
    assert np.array_equal(gk.matmul(a, b), a @ b)
assert "site-packages" in gk.__file__, gk.__file__
"""


def said(command: Sequence[str | Path], at: Path | None = None, status: int = 0) -> str:
    """What a command printed, which must end with this status."""
    print("$", *(Path(x).name if n == 0 else x for n, x in enumerate(command)), flush=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(list(map(str, command)), cwd=at, env=environment, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    if done.returncode != status:
        raise SystemExit(f"status {done.returncode}, and {status} was due:\n{done.stdout[-4000:]}")
    return done.stdout


def environment(at: Path, *packages: str | Path) -> Path:
    """The interpreter of a fresh environment with these packages."""
    said([sys.executable, "-m", "venv", at])
    python = at / ("Scripts" if os.name == "nt" else "bin") / "python"
    said([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages])
    return python


def tracked(*folders: str) -> set[str]:
    """The files that git has."""
    return set(said(["git", "ls-files", *folders], ROOT).split())


def check_contents(wheel: Path, sources: Path, has_kernels: bool) -> None:
    """Raise SystemExit where a distribution lacks a file, or has one that it should not have."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    due = {name for name in tracked("gemmkit") if name.endswith((".py", ".json", "py.typed"))}
    due |= {f"gemmkit_{name}" for name in tracked("examples") if name.endswith(".py")}
    kernels = {name for name in names if name.startswith("gemmkit/cubins/") and name.endswith(".kernel")}
    if bool(kernels) != has_kernels:
        raise SystemExit(f"the wheel has {len(kernels)} compiled kernels")
    names -= kernels
    if names != due:
        raise SystemExit(f"the wheel lacks {sorted(due - names)[:9]} and has {sorted(names - due)[:9]} besides")
    with tarfile.open(sources) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    missing = tracked() - inside
    if missing:
        raise SystemExit(f"the source distribution lacks {sorted(missing)[:9]} ({len(missing)} files)")
    print(f"{len(names)} files and {len(kernels)} kernels in the wheel, {len(inside)} files in the source distribution")


def check_use(python: Path, away: Path, compiles: bool) -> None:
    """Use what is installed, from a folder that is not the sources'."""
    said([python, "-c", PRODUCT], away)
    assert "gemmkit" in said([python, "-m", "gemmkit", "info"], away)
    said([python, "-m", "gemmkit", "demo", "hydrogen_chain", "--emulate"], away)
    explained = said([python, "-m", "gemmkit", "explain"], away, status=0 if compiles else 2)
    assert ("registers" if compiles else "pip install") in explained, explained
    refused = said([python, "-m", "gemmkit", "demo", "digits", "--emulate"], away, status=2)
    assert "gemmkit[demo]" in refused, refused


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.wheel", description="Builds and checks the distributions.")
    parser.add_argument("--extra", help="an extra to install the wheel with: cu12, cu13")
    parser.add_argument("--cubins", nargs="+", default=[], metavar="ARCH",
                        help="GPUs that the wheel has compiled kernels for")
    parser.add_argument("--out", type=Path, help="a folder to keep the distributions in")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        out = (options.out or work / "dist").resolve()
        tools = environment(work / "tools", "build>=1.2", "twine>=6")
        if SHIPPED.exists():
            raise SystemExit(f"{SHIPPED} is there: kernels of other sources would be in the wheel")
        try:
            if options.cubins:
                said([sys.executable, "-m", "tools.cubins", "--into", SHIPPED, "--arch", *options.cubins], ROOT)
            for kind in ("--sdist", "--wheel"):              # a wheel made of the source distribution would have no kernels
                said([tools, "-m", "build", kind, "--outdir", out, ROOT])
        finally:
            shutil.rmtree(SHIPPED, ignore_errors=True)
        (wheel,), (sources,) = out.glob("gemmkit-*.whl"), out.glob("gemmkit-*.tar.gz")
        said([tools, "-m", "twine", "check", "--strict", wheel, sources])
        check_contents(wheel, sources, bool(options.cubins))
        extra = f"[{options.extra}]" if options.extra else ""
        away = work / "away"
        away.mkdir()
        check_use(environment(work / "user", f"{wheel}{extra}"), away, bool(options.extra))
    print("all is as it must be")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
