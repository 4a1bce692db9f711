"""All passes of a program of rows: from its trace to its text."""

from __future__ import annotations

from collections.abc import Mapping as Names

import numpy as np

from gemmkit.kernels.rows.row import Held
from gemmkit.lang.errors import ConfigError
from gemmkit.programs.lines import refused
from gemmkit.programs.mapping import SWITCHES, Mapping
from gemmkit.programs.printed import Printed
from gemmkit.programs.rows.algebra import rewritten
from gemmkit.programs.rows.form import RowProgram, is_vector
from gemmkit.programs.rows.steps import Steps, steps_of
from gemmkit.programs.rows.text import printed
from gemmkit.row_plans import RowsProblem
from gemmkit.runtime.array_info import ArrayInfo
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tuning.problems import choose

F32 = np.dtype(np.float32)


def derived(name: str, program: RowProgram, mapping: Mapping, infos: Names[str, ArrayInfo], numbers: list[str],
            device: DeviceInfo) -> Printed:
    """``numbers``: the names of the run-time scalars. Raises ConfigError for a mapping of products, and ValueError, with the
    user's line, for more rows than can be counted."""
    _refuse_blocks(mapping)
    count = program.rows.extent.size * (1 if program.stack is None else program.stack.extent.size)
    if count >= 2**31 or program.columns >= 2**31:
        raise refused(ValueError, f"{count} rows of {program.columns} elements; less than 2**31 of each is needed",
                      program.line)
    steps = steps_of(program, rewritten(program))
    whole = {x.data[0].name for x in steps.rows if x.op == "load"}
    whole |= {store.parameter.name for store in program.stores if len(store.parameter.shape) > len(program.indices)}
    widest = max(infos[key].dtype.itemsize for key in whole)
    found = choose(RowsProblem(program.columns, widest, F32, steps.at_once), device).spec
    team, source, _ = found
    _check_places(mapping, steps, isinstance(source, Held))
    threads = "a warp" if team.warps == 1 else f"a block of {team.warps} warps"
    title = (f"{name}: {threads} a row; rows are "
             f"{'held in registers' if isinstance(source, Held) else 'loaded anew for each fold and store'}.")
    used = {key: info.dtype for key, info in infos.items()}
    return printed(title, program, steps, found, used, numbers, device.starts_early)


def _refuse_blocks(mapping: Mapping) -> None:
    """Raises ConfigError for what a mapping says of products' tiles and rounds."""
    for name in ("blocks", "cluster", "warpgroups", "stages", "shared_bytes", "splits", "band", "kernel", *SWITCHES):
        value = getattr(mapping, name)
        if value:
            shown = dict(value) if isinstance(value, Names) else value
            raise ConfigError(f"Mapping({name}={shown!r}): tiles and rounds of products have it, and a function of rows has "
                              "neither: its rows' length says which threads have a row; leave it out")


def _check_places(mapping: Mapping, steps: Steps, is_held: bool) -> None:
    """Raises ConfigError for names of no rows, and for rows that no registers hold."""
    names = {x.name for x in steps.rows if is_vector(x)}
    for name in mapping.places:
        if name not in names:
            raise ConfigError(f"Mapping(places={{{name!r}: 'registers'}}): the rows that are loaded or mapped are "
                              f"{', '.join(sorted(names))}")
        if not is_held:
            raise ConfigError(f"Mapping(places={{{name!r}: 'registers'}}): a row is longer than a block's registers, and is "
                              "loaded anew where it is needed; take shorter rows")
