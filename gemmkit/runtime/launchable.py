"""A kernel with any arguments, compiled and loaded when it is first launched.

Arguments are `Frozen` values: components, arrays, scalars, tensor maps. Numba flattens them into numbers; these stay as they
are, but for those that a launch puts in (addresses of arrays, tensor maps), which are found by `Launchable.slot`.

    kernel = Launchable(saxpy, [freeze_scalar(np.float32(2)), freeze_array(x), freeze_array(y)], threads=128, blocks=8,
                        target=gemmkit.runtime.device.current(), ordinal=0)
    launch = kernel.bind()                       # compiles, or finds the kernel in the cache
    launch.launch(stream, kernel.values)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gemmkit.runtime import device, workspace

if TYPE_CHECKING:
    from gemmkit.lang.freezing import Frozen


@dataclass
class Launchable:
    """``kernel`` on ``blocks`` thread blocks of ``threads`` threads, in clusters of ``cluster``.

    ``target`` is what it is compiled for, and ``ordinal`` the device that it is loaded on. With ``dependent`` a launch may
    begin before the kernel before it in the stream has ended; the kernel waits for that itself (``griddepcontrol.wait``).
    With ``waits`` blocks wait for each other: all must be on the device's multiprocessors at once, or `bind` refuses.
    ``registers`` says how many a thread of each warp ends with, where warps give and take some.
    """

    kernel: Callable[..., None]
    arguments: Sequence[Frozen]
    threads: int
    blocks: int
    target: device.DeviceInfo
    ordinal: int
    shared_bytes: int = 0
    cluster: int = 1
    blocks_per_sm: int = 1
    dependent: bool = False
    waits: bool = False
    registers: Sequence[int] | None = None
    formats: list[str] = field(init=False)
    values: list[Any] = field(init=False)
    _bound: Any = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        leaves = [leaf for argument in self.arguments for leaf in argument.leaves]
        self.formats, self.values = [code for code, _ in leaves], [value for _, value in leaves]

    def slot(self, argument: int) -> int | None:
        """Where the first number of the ``argument``-th argument stands among ``values``; None if it has none."""
        if not self.arguments[argument].leaves:
            return None
        return sum(len(before.leaves) for before in self.arguments[:argument])

    def forget_code(self) -> None:
        """Keep no function alive, nor the arrays that it captured: what was compiled is not looked at again."""
        for argument in self.arguments:
            argument.guards, argument.captures = (), ()

    def entry(self) -> Any:
        """The compiled kernel, found in the cache or compiled now (`gemmkit.runtime.compile.cubin_of`)."""
        from gemmkit.runtime.compile import cubin_of

        return cubin_of(self.kernel, self.arguments, self.threads, self.target, self.blocks_per_sm)

    def bind(self) -> Any:
        """The kernel as a `gemmkit.runtime.launch.BoundLaunch`: compiled, or found in the cache, and loaded, once.

        Raises CodeChanged where code has changed since the arguments were frozen, and what compiling and loading raise.
        """
        if self._bound is not None:
            return self._bound
        cluster = (self.cluster, 1, 1) if self.cluster > 1 else None
        with device.made_current(self.ordinal):
            kernel = _loaded(self.entry().cubin)
            bound = kernel.bind((self.blocks, 1, 1), (self.threads, 1, 1), self.shared_bytes, self.formats, cluster=cluster,
                                dependent=self.dependent, cooperative=self.waits)
            if self.waits:
                workspace.check_residency(kernel, self.ordinal, self.blocks, self.threads, self.shared_bytes,
                                          self.cluster)
            self._bound = bound
            return bound


_kernels: dict[tuple[int, bytes], Any] = {}


def _loaded(cubin: bytes) -> Any:
    """The kernel on the current device, loaded once."""
    from gemmkit.runtime.compile import ENTRY
    from gemmkit.runtime.launch import load

    key = (device.current_ordinal(), cubin)
    found = _kernels.get(key)
    return found if found is not None else _kernels.setdefault(key, load(cubin, ENTRY))
