"""``DistributedMatrix``: a matrix that the ranks of a group share out, by rows or by columns; `gemmkit.matmul` takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gemmkit.distributed.matmul import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from gemmkit.distributed.ranks import (
    BEFORE_SUM,
    Ranks,
    accumulator_of,
    check_keywords,
    check_tensors,
    dtypes,
    even_lengths,
    lengths_of,
    meet,
    multiply,
    new,
    offsets,
    planned,
    ranks_of,
)
from gemmkit.distributed.transport import Sent, check_sends, pass_on, why_not_symmetric
from gemmkit.lang.errors import ConfigError
from gemmkit.layouts.matrices import Matrix

if TYPE_CHECKING:
    from gemmkit.kernels.config import Config

# --------------------------------------------------------------------------------------------------
# ``ring_matmul``: D = A B, of a B that is too large for one GPU and stays shared out: its shards go round, K in turns.
#
# Each rank has some rows of A and of D, and some rows of B. In every turn it multiplies by the shard of B that it has,
# while that shard goes on to the rank before it and the next arrives from the rank behind: two shards at a time are all
# it holds.

#: Components that see a k or a whole operand: a turn has a part of K.
_OF_K = "condition", "observe_a", "global_a_layout", "global_b_layout"


def ring_matmul(a: Any, b_shard: Any, c: Any = None, *, group: object = None, lengths: Any = None, out: Any = None,
                **components: Any) -> Any:
    """Compute this rank's rows of D = A B + C; each rank has some rows of A and some of B's K rows.

    Args:
        a: (M_r, K), this rank's rows of A; M_r may differ between ranks.
        b_shard: (K_r, N), this rank's rows of B.
        c, out: (M_r, N), this rank's, as of `gemmkit.matmul`.
        group: a process group; None is the default one.
        lengths: K_r of every rank; None: all are as long as this one.
        components: as for `gemmkit.matmul`. Transforms of D and the epilogue act on the whole sums, in the last turn.
            Transforms of A and B see no coordinates, because a turn's k begins at 0.

    Returns:
        D's rows, (M_r, N). They are added up in the accumulator's dtype from this rank's shard of K on, round to the one
        before it: the same bits in every call, and others than on one GPU where sums round.

    Raises:
        As `all_gather_matmul`; ConfigError for a component that has to see all of K at once.

    >>> import torch, torch.distributed as dist, gemmkit
    >>> from gemmkit import distributed
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> with gemmkit.emulate():
    ...     distributed.ring_matmul(torch.tensor([[1.0, 2.0]]), torch.ones(2, 2)).tolist()
    [[3.0, 3.0]]
    >>> dist.destroy_process_group()
    """
    ranks = ranks_of(group)
    sizes: tuple[int, ...] = ()

    def facts() -> dict[str, Any]:
        nonlocal sizes
        check_keywords("ring_matmul", components, refused=_OF_K)
        check_tensors(a=a, b_shard=b_shard, c=c, out=out)
        check_sends(ranks, a)
        for name in BEFORE_SUM:
            if getattr(components.get(name), "with_coordinates", False):
                raise ConfigError(f"{name}={components[name]!r} sees coordinates, and a turn of the ring has a part of K, "
                                  "from 0 on; all_gather_matmul has all of K at once")
        sizes = lengths_of(ranks, b_shard.shape[0], lengths, "b_shard", "rows")
        if sum(sizes) != a.shape[1]:
            raise ValueError(f"a has {a.shape[1]} columns, and the shards of b {sum(sizes)} rows ({sizes}); both must be K")
        return {"lengths": sizes, "N": b_shard.shape[1], **dtypes(a=a, b_shard=b_shard, c=c, out=out)}

    def make() -> Any:
        made = planned(a[:, :sizes[ranks.rank]], b_shard, c, out, None, components)
        given = made.config.global_d_layout.storage
        adds = accumulator_of(made.config, given)
        for last in (False, True):
            _turn(planned, a[:, :sizes[ranks.rank]], b_shard, new(a, (a.shape[0], b_shard.shape[1]), adds),
                  new(a, (a.shape[0], b_shard.shape[1]), given if last else adds), last, components)
        return given, adds

    given, adds = meet(ranks, "ring_matmul", a, facts, components, make)
    first, rows, columns = offsets(sizes), a.shape[0], b_shard.shape[1]
    out = new(a, (rows, columns), given) if out is None else out
    held, total = b_shard.contiguous(), c
    for turn in range(ranks.size):
        of, following = (ranks.rank + turn) % ranks.size, (ranks.rank + turn + 1) % ranks.size
        last, sent = turn == ranks.size - 1, Sent()
        arriving = held
        if not last:
            arriving = new(b_shard, (sizes[following], columns), b_shard.dtype)
            pass_on(ranks, sent, held, arriving)
        target = out if last else new(a, (rows, columns), adds)
        _turn(multiply, a[:, first[of]:first[of + 1]], held, total, target, last, components)
        sent.wait()
        held, total = arriving, target
    return out


def _turn(compute: Any, a: Any, b: Any, total: Any, out: Any, last: bool, components: dict[str, Any]) -> Any:
    """One shard's product, upon what there is; what acts on sums waits for the last."""
    acting = components if last else {name: value for name, value in components.items() if name in BEFORE_SUM}
    return compute(a, b, total, out, None, acting)


#: Rows of D up to which every rank gets all of them (decoding).
FEW_ROWS = 128
_AXES = {"rows": 0, "columns": 1}


class DistributedMatrix(Matrix):
    """A matrix of which each rank has some rows (``by="rows"``), some columns ("columns"), or all ("all").

    Args:
        local: this rank's part, a tensor of two dimensions.
        by: "rows", "columns" or "all".
        over: a one-dimensional ``DeviceMesh``, a process group, or None for the default group.
        lengths: how many rows or columns each rank has; None: all as many as this one.

    ``gemmkit.matmul(a, b)`` takes one for A, for B or for both; a plain tensor with it is the same on all ranks. D is a
    `DistributedMatrix` (`explain` says which call computes it, and how D is shared).

    >>> import torch, torch.distributed as dist, gemmkit
    >>> from gemmkit.distributed import DistributedMatrix
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> with gemmkit.emulate():
    ...     a = DistributedMatrix(torch.ones(2, 3), "rows")
    ...     gemmkit.matmul(a, torch.ones(3, 2)).local.tolist()
    [[3.0, 3.0], [3.0, 3.0]]
    >>> dist.destroy_process_group()
    """

    def __init__(self, local: Any, by: str, over: Any = None, lengths: Any = None):
        if by not in ("rows", "columns", "all"):
            raise ValueError(f"by={by!r}: 'rows', 'columns' or 'all' is needed")
        check_tensors(local=local)
        self.local, self.by, self.mesh = local, by, over if hasattr(over, "get_group") else None
        if self.mesh is not None and self.mesh.ndim != 1:
            raise ValueError(f"over has {self.mesh.ndim} dimensions; a matrix is shared over one dimension: give "
                             "mesh['name']")
        self.group = over.get_group() if self.mesh is not None else over
        ranks = ranks_of(self.group)
        shape = list(local.shape)
        self.lengths: tuple[int, ...] | None = None
        if by == "all":
            if lengths is not None:
                raise ValueError(f"lengths={lengths!r}: every rank has all of it")
        else:
            axis = _AXES[by]
            self.lengths = tuple(lengths) if lengths is not None else (shape[axis],) * ranks.size
            if len(self.lengths) != ranks.size or self.lengths[ranks.rank] != shape[axis]:
                raise ValueError(f"lengths={lengths!r}: one for each of {ranks.size} ranks is needed, and this one (rank "
                                 f"{ranks.rank}) has {shape[axis]} {by}")
            shape[axis] = sum(self.lengths)
        self.array, self.shape = local, tuple(shape)

    @property
    def dtype(self) -> Any:
        return self.local.dtype

    @property
    def T(self) -> DistributedMatrix:
        """The transpose; nothing moves."""
        by = {"rows": "columns", "columns": "rows", "all": "all"}[self.by]
        return DistributedMatrix(self.local.mT, by, self.mesh if self.mesh is not None else self.group, self.lengths)

    @property
    def layout(self) -> Any:                              # type: ignore[override]
        """Raises TypeError: calls that ask for it compute on one device."""
        raise TypeError("a DistributedMatrix is what gemmkit.matmul multiplies; other calls take its local part")

    @classmethod
    def whole(cls, x: Any, by: str, over: Any = None) -> DistributedMatrix:
        """This rank's part of a tensor that every rank has, cut as ``torch.chunk`` cuts it. The part is a view."""
        check_tensors(x=x)
        if not isinstance(by, str) or by not in _AXES:
            return cls(x, by, over)
        ranks = ranks_of(over.get_group() if hasattr(over, "get_group") else over)
        lengths = even_lengths(x.shape[_AXES[by]], ranks.size)
        return cls(x.split(list(lengths), _AXES[by])[ranks.rank], by, over, lengths)

    @classmethod
    def from_dtensor(cls, x: object) -> DistributedMatrix:
        """Of a ``DTensor`` with one placement, ``Shard(0)``, ``Shard(1)`` or ``Replicate()``; its local part is not copied.

        Raises TypeError for what is no DTensor, ValueError for other placements.
        """
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if not isinstance(x, DTensor):
            raise TypeError(f"x: got {type(x).__name__}; a torch.distributed.tensor.DTensor is needed")
        placement: Any = x.placements[0] if len(x.placements) == 1 and x.ndim == 2 else None
        if isinstance(placement, Replicate):
            return cls(x.to_local(), "all", x.device_mesh)
        if type(placement) is not Shard or placement.dim not in (0, 1):
            raise ValueError(f"x has the placements {x.placements} in {x.ndim} dimensions; a matrix with one of Shard(0), "
                             "Shard(1) and Replicate() is needed; DTensor.redistribute makes one")
        lengths = even_lengths(x.shape[placement.dim], x.device_mesh.size())
        return cls(x.to_local(), ("rows", "columns")[placement.dim], x.device_mesh, lengths)

    def to_dtensor(self) -> Any:
        """The ``DTensor`` over the matrix's ``DeviceMesh``; the local part is not copied.

        Raises ValueError without a mesh, and where lengths are not those of ``torch.chunk``, which a DTensor has.
        """
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if self.mesh is None:
            raise ValueError("the matrix is over a process group, and a DTensor needs a DeviceMesh: give one as over=")
        placement = Replicate() if self.by == "all" else Shard(_AXES[self.by])
        if self.by != "all" and self.lengths != even_lengths(self.shape[_AXES[self.by]], self.mesh.size()):
            raise ValueError(f"lengths are {self.lengths}, and a DTensor's are "
                             f"{even_lengths(self.shape[_AXES[self.by]], self.mesh.size())}")
        return DTensor.from_local(self.local, self.mesh, [placement], run_check=False, shape=torch.Size(self.shape),
                                  stride=(self.shape[1], 1))

    def product(self, a: object, b: object, c: object, conf: Config | None, out: object, stream: object,
                **components: object) -> DistributedMatrix:
        """What `gemmkit.matmul` returns for these operands."""
        if conf is not None or out is not None or stream is not None:
            raise TypeError("a product of a DistributedMatrix takes no conf, out or stream; the calls of "
                            "gemmkit.distributed do")
        how = _way(a, b, components)
        return how.compute(c)

    def __repr__(self) -> str:
        return f"<DistributedMatrix of shape {self.shape}, {self.local.dtype}, by {self.by}>"


class ProductExplanation(NamedTuple):
    """The call that computes a product, why, how D is shared out, and which way its operands go."""

    call: str
    why: str
    result: str
    way: str

    def __str__(self) -> str:
        whose = "every rank has all of D" if self.result == "all" else f"D is shared by {self.result}"
        return f"{self.call}: {self.why}; {whose}; {self.way}"


class _Way(NamedTuple):
    explanation: ProductExplanation
    compute: Callable[[Any], DistributedMatrix]


def explain(a: object, b: object, **components: object) -> ProductExplanation:
    """How `gemmkit.matmul` computes a product of which an operand is a `DistributedMatrix`. Nothing is computed or sent.

    Raises what the product raises for these operands.

    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> print(explain(DistributedMatrix(torch.ones(2, 3), "rows"), torch.ones(3, 2)))
    matmul: each rank has its rows of A and all of B; D is shared by rows; nothing is sent
    >>> dist.destroy_process_group()
    """
    return _way(a, b, components).explanation


def _way(a: Any, b: Any, components: dict[str, Any]) -> _Way:
    given = next((x for x in (a, b) if isinstance(x, DistributedMatrix)), None)
    if given is None:
        raise TypeError("a and b: one of them at least has to be a DistributedMatrix")
    over = given.mesh if given.mesh is not None else given.group
    for name, x in (("a", a), ("b", b)):
        if isinstance(x, Matrix) and not isinstance(x, DistributedMatrix):
            raise TypeError(f"{name} is a {type(x).__name__}; a DistributedMatrix can be multiplied by a DistributedMatrix "
                            "or a tensor")
    left = a if isinstance(a, DistributedMatrix) else DistributedMatrix(a, "all", over)
    right = b if isinstance(b, DistributedMatrix) else DistributedMatrix(b, "all", over)
    ranks = ranks_of(given.group)
    if ranks_of(left.group) is not ranks_of(right.group):
        raise ValueError("a and b are shared over different groups")
    if left.shape[1] != right.shape[0]:
        raise ValueError(f"a has shape {left.shape} and b has shape {right.shape}: a has {left.shape[1]} columns and b "
                         f"{right.shape[0]} rows; both must be K")
    rows, cut = left.shape[0], (left.by, right.by)
    group, local_a, local_b = given.group, left.local, right.local

    def made(call: str, why: str, result: str, compute: Callable[[Any], Any], lengths: Any = None) -> _Way:
        def run(c: Any) -> DistributedMatrix:
            return DistributedMatrix(compute(_local_c(c, result, lengths)), result, over, lengths)

        return _Way(ProductExplanation(call, why, result, _sent(call, ranks, local_a.device)), run)

    def alone(c: object) -> Any:
        return multiply(local_a, local_b, c, None, None, components)

    if cut == ("all", "all"):
        return made("matmul", "each rank has all of A and B", "all", alone)
    if cut == ("rows", "all"):
        return made("matmul", "each rank has its rows of A and all of B", "rows", alone, left.lengths)
    if cut == ("all", "columns"):
        return made("matmul", "each rank has all of A and its columns of B", "columns", alone, right.lengths)
    if cut == ("rows", "columns"):
        return made("all_gather_matmul", "A's rows are gathered, each rank has its columns of B", "columns",
                    lambda c: all_gather_matmul(local_a, local_b, c, group=group, lengths=left.lengths, **components),
                    right.lengths)
    if cut == ("rows", "rows"):
        return made("ring_matmul", "each rank has its rows of A, and B's shards go round", "rows",
                    lambda c: ring_matmul(local_a, local_b, c, group=group, lengths=right.lengths, **components),
                    left.lengths)
    if cut == ("columns", "columns"):
        if components:
            raise ValueError("a and b are both shared by columns, which the transposed ring computes, and "
                             f"{', '.join(components)} would see D transposed; share a by rows")
        return made("ring_matmul", "the transpose: each rank has its columns of B, and A's shards go round", "columns",
                    lambda c: ring_matmul(local_b.mT, local_a.mT, None if c is None else c.mT, group=group,
                                          lengths=left.lengths).mT, right.lengths)
    lengths = left.lengths if left.by == "columns" else right.lengths
    assert lengths is not None
    begin, end = offsets(lengths)[ranks.rank:ranks.rank + 2]
    if left.by == "all":
        local_a = local_a[:, begin:end]
    elif right.by == "all":
        local_b = local_b[begin:end]
    elif left.lengths != right.lengths:
        raise ValueError(f"a's columns are shared as {left.lengths} and b's rows as {right.lengths}; both must be K")
    if rows <= FEW_ROWS:
        return made("matmul_all_reduce", f"each rank has its part of K, and D has few rows ({rows})", "all",
                    lambda c: matmul_all_reduce(local_a, local_b, c, group=group, **components))
    return made("matmul_reduce_scatter", "each rank has its part of K", "rows",
                lambda c: matmul_reduce_scatter(local_a, local_b, c, group=group, **components),
                even_lengths(rows, ranks.size))


def _sent(call: str, ranks: Ranks, device: torch.device) -> str:
    """Which way a call takes, as far as a rank knows alone."""
    if call == "matmul":
        return "nothing is sent"
    plain = f"sent over {ranks.backend(device) or 'no backend'}"
    if call == "ring_matmul":
        return plain
    why = why_not_symmetric(ranks, device)
    return "pushed by copy engines while the kernel computes, where the GPUs reach each other" if why is None else (
        f"{plain}, since {why}")


def _local_c(c: object, result: str, lengths: Sequence[int]) -> Any:
    if c is None:
        return None
    if not isinstance(c, DistributedMatrix) or c.by != result or c.lengths != lengths:
        raise ValueError(f"c: {c!r}; a DistributedMatrix by {result} (lengths {lengths}) is needed, as D is")
    return c.local
