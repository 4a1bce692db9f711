"""Why a product takes the mapping that it takes: what chose it, what the tables' model says of it, and of others."""

from __future__ import annotations

from dataclasses import dataclass

from gemmkit.compiled import Compiled
from gemmkit.config import Config
from gemmkit.lang.errors import ConfigError
from gemmkit.tuning.candidates import Candidate, modelled

SHOWN = 8                              # mappings beside the one that was chosen
#: By `gemmkit.problem.Call.chosen_by`: the reason, and the file that owns it.
REASONS = {
    "conf": ("the configuration was given (conf=)", "gemmkit/config.py"),
    "operator": ("the operator was given; get_config completes its tiles", "gemmkit/tuning/choose.py"),
    "tuned": ("gemmkit.tune measured it on such a GPU, and its result is on disk", "gemmkit/tuning/store.py"),
    "candidate": ("a mapping that is being tried", "gemmkit/tuning/candidates.py"),
    "winners": ("the table that ships has a measured mapping for these sizes, faster than the model's by 7 % or more",
                "gemmkit/tuning/winners.py"),
    "boxes": ("A and B are contiguous along different indices of K, and are copied as boxes",
              "gemmkit/tuning/multistage.py"),
    "quantised": ("B has 2- or 4-bit words with group scales, which are dequantised in registers",
                  "gemmkit/tuning/other_kernels.py"),
    "multistage": ("the least modelled time among the mappings of mma.sync and of the ordinary units with a ring of stages",
                   "gemmkit/tuning/multistage.py"),
    "gathered": ("TMA cannot take the rows of A or B, and another kernel hides their copies better",
                 "gemmkit/tuning/other_kernels.py"),
    "hopper": ("16-bit floats on Hopper: the least modelled time among the mappings of its tensor cores (wgmma, TMA)",
               "gemmkit/tuning/hopper.py"),
    "swap_ab": ("the transpose D^T = B^T A^T is computed: A has few rows, or B would have to be rewritten",
                "gemmkit/tuning/choose.py"),
    "units": ("the operator that gives NumPy's result type for these dtypes, in the tiles for these sizes",
              "gemmkit/tuning/operators.py"),
}


@dataclass(frozen=True)
class Choice:
    """What chose a mapping (``by``, a key of `REASONS`), its own ``candidate`` with the modelled time, None where the tables
    do not model it, and the ``others`` with the least modelled times."""

    by: str
    candidate: Candidate | None
    others: tuple[Candidate, ...]

    @property
    def reason(self) -> str:
        return REASONS[self.by][0]

    @property
    def owner(self) -> str:
        """The file that decides."""
        return REASONS[self.by][1]

    @property
    def microseconds(self) -> float | None:
        """The modelled time of a launch."""
        return None if self.candidate is None else self.candidate.nanoseconds / 1000


def microseconds_text(time: float) -> str:
    """A time as it is shown.

    >>> microseconds_text(171.6234), microseconds_text(10450.2)
    ('171.6 us', '10,450 us')
    """
    return f"{time:,.0f} us" if time >= 1000 else f"{time:.4g} us"


def choice_of(compiled: Compiled) -> Choice:
    """The choice of a product's mapping.

    >>> import numpy as np, gemmkit
    >>> from gemmkit.ahead import recorded
    >>> from gemmkit.runtime.device import H100
    >>> a = np.zeros((4096, 4096), np.float16)
    >>> choice = choice_of(recorded(lambda: gemmkit.matmul(a, a), H100, zeros=False)[0])
    >>> choice.by, choice.candidate.name, 100 < choice.microseconds < 300
    ('hopper', 'warp_specialised 128x256x64, cooperative, 8 warps, groups of 8', True)
    """
    conf, call = compiled.problem.config, compiled.computed
    sizes = call.M, call.N, call.K
    mine: Candidate | None = None
    found: list[Candidate] = []
    for given in dict.fromkeys((None, conf.operator)):
        try:
            families = modelled(conf.global_a_layout, conf.global_b_layout, given, sizes, call.device, call.products,
                                (call.a, call.b))
        except (ConfigError, TypeError, ValueError):           # no table knows such operands
            continue
        listed = sorted((one for family in families for one in family), key=_time)
        own = next((one for one in listed if is_of(one, conf)), None)
        if own is not None or not found:
            mine, found = own, listed
        if own is not None:
            break
    others: dict[tuple, Candidate] = {}
    # Of each tile the best: the rest are orders and depths of it. Families have models of their own, which do not compare.
    for one in found:
        if mine is None or (one.kernel == mine.kernel and tile_of(one) != tile_of(mine)):
            others.setdefault(tile_of(one), one)
    return Choice(compiled.problem.chosen_by, mine, tuple(others.values())[:SHOWN])


def _time(candidate: Candidate) -> float:
    return candidate.nanoseconds


def tile_of(candidate: Candidate) -> tuple:
    return candidate.kernel, candidate.block[:2], candidate.schedule, candidate.splits


def is_of(candidate: Candidate, conf: Config) -> bool:
    """Whether a configuration has all that a candidate says."""
    return all(getattr(conf, name) == value for name, value in candidate.fields().items())
