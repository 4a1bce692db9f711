"""Gradients of drawn operators: epilogues, structures and semirings x stacks x strides x `torch.func`, against PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import gemmkit as gk  # noqa: E402
import gemmkit.torch  # noqa: E402
from gemmkit.torch.autograd import recorded  # noqa: E402
from tests.support.torch_operators import EPILOGUES, SEMIRINGS, STRUCTURES  # noqa: E402

func: Any = torch.func
NAMES = [("epilogue", name) for name in EPILOGUES] + [("structure", name) for name in STRUCTURES] + 4 * [
    ("semiring", name) for name in SEMIRINGS]
_made: dict[tuple[str, str], Any] = {}


# -- what is drawn ----------------------------------------------------------------------------------------------------

class Drawn:
    """An operator, what PyTorch computes in its place, and tensors of a drawn shape, stack and order in memory."""

    def __init__(self, seed: int, device: str = "cpu"):
        self.random, self.device = Random(seed), device
        self.generator = torch.Generator().manual_seed(seed)
        self.kind, self.name = self.random.choice(NAMES)
        is_complex = self.kind == "structure" and "unit" not in self.name and self.random.random() < 0.3
        self.dtype = torch.complex128 if is_complex else torch.float64
        M, N, K = (self.random.choice((0, 1, 2, 3, 4, 5)) for _ in "MNK")
        self.stack = [self.random.randint(1, 2) for _ in range(self.random.choice((0, 0, 1, 1, 1, 2)))]
        told: dict[str, Any] = {}
        shapes: list[tuple[int, ...]] = [(M, K), (K, N)]
        if self.kind == "epilogue":
            make, self.after, given = EPILOGUES[self.name]
            sizes = {5: M, 4: N}                                                   # what M and N are in EPILOGUES
            shapes += [tuple(sizes[n] for n in shape) for shape in given]
            told = {} if make is None else {"epilogue": make}
        elif self.kind == "structure":
            told, self.before, given = STRUCTURES[self.name]
            shapes = [tuple({5: M, 4: N}[n] for n in shape) for shape in given]
        else:
            told = {"operator": SEMIRINGS[self.name][0]}
        if "diagonal" in self.name:
            self.stack = []
        self.told = told
        self.inputs = [self.tensor((*self.part_of_stack(), *shape) if n < 2 else shape) for n, shape in enumerate(shapes)]
        self.c: Any = None
        if self.kind != "semiring" and self.random.random() < 0.3:
            self.c = self.tensor((*torch.broadcast_shapes(*(x.shape[:-2] for x in self.inputs[:2])), M, N))

    def part_of_stack(self) -> list[int]:
        """A stack that can be broadcast to the drawn one."""
        whole = self.stack[self.random.choice((0, 0, 0, len(self.stack))):]
        return [1 if self.random.random() < 0.2 else n for n in whole]

    def tensor(self, shape: tuple[int, ...]) -> Any:
        """A leaf that lies in memory in a drawn order, with steps, or anew for each row."""
        order = list(range(len(shape)))
        self.random.shuffle(order)
        step = self.random.choice((1, 1, 2))
        made = torch.randn([shape[n] * step for n in order], generator=self.generator, dtype=self.dtype).to(self.device)
        made = made[tuple(slice(None, None, step) for _ in shape)].permute([order.index(n) for n in range(len(shape))])
        return made.requires_grad_()

    def gradient(self, d: Any) -> Any:
        """A gradient of a result: of some order, or of stride 0."""
        made = self.tensor(tuple(d.shape)).detach().to(d.dtype)
        return made if self.random.random() < 0.7 or not made.dim() else made[..., :1].expand(d.shape)

    def ours(self) -> Callable[..., Any]:
        count = len(self.inputs)
        if self.kind != "structure" and count == 2 and self.random.random() < 0.4:
            return lambda a, b, c=None: recorded(a, b, c, None, None, None, dict(self.told))
        key = self.kind, self.name
        if key not in _made:
            _made[key] = gk.torch.op(name=f"tests::drawn{len(_made)}", **self.told)
        made = _made[key]
        return lambda *x: made(*x[:count], c=x[count] if len(x) > count else None)

    def theirs(self, a: Any, b: Any, *more: Any) -> Any:
        if self.kind == "semiring":
            semiring = SEMIRINGS[self.name][0]
            product = {"widest path": torch.minimum, "max-times": torch.mul}.get(self.name, torch.add)
            every = product(a[..., :, :, None], b[..., None, :, :])
            nobody = torch.full_like(every[..., :1, :] if every.shape[-2] else every.sum(-2, keepdim=True), semiring.zero)
            every = torch.cat((nobody, every), -2)
            return every.amin(-2) if self.name == "min-plus" else every.amax(-2)
        if self.kind == "structure":
            return self.before(a, b, None) + (more[0] if more else 0)
        operands, c = more[:len(self.inputs) - 2], more[len(self.inputs) - 2:]
        return self.after(a @ b + c[0] if c else a @ b, *operands)


def same(found: Any, expected: Any) -> None:
    for x, y in zip(found, expected, strict=True):
        if y is not None:
            assert x is not None and x.shape == y.shape and x.dtype == y.dtype
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


# -- what is compared -------------------------------------------------------------------------------------------------

def compare(seed: int, device: str = "cpu") -> None:
    drawn = Drawn(seed, device)
    inputs = [*drawn.inputs, *(() if drawn.c is None else (drawn.c,))]
    ours, theirs = drawn.ours(), drawn.theirs
    d, expected = ours(*inputs), theirs(*inputs)
    same([d], [expected])
    grad = drawn.gradient(d)
    how = drawn.random.choice(("backward", "backward", "twice", "vmap", "vmap", "vjp"))
    if how == "backward":
        wanted = [x for x in inputs if drawn.random.random() < 0.8] or inputs[:1]
        same(torch.autograd.grad(d, wanted, grad), torch.autograd.grad(expected, wanted, grad))
    elif how == "twice":
        toward = [drawn.gradient(x) for x in inputs]

        def second(d: Any) -> Any:
            first = torch.autograd.grad(d, inputs, grad, create_graph=True)
            total = sum((x * y.conj()).real.sum() for x, y in zip(first, toward))
            return torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True) if total.requires_grad else ()

        same(second(d), second(expected))
    elif how == "vmap":
        size = drawn.random.choice((1, 2, 2))
        dims = [drawn.random.choice((0, 0, -1, None)) for _ in inputs]
        dims = [0, *dims[1:]] if set(dims) == {None} else dims
        many = [x.detach() if dim is None else torch.stack([x.detach() * (n + 1) for n in range(size)], dim)
                for x, dim in zip(inputs, dims)]
        many = [x.requires_grad_() for x in many]
        d, expected = (func.vmap(f, in_dims=tuple(dims))(*many) for f in (ours, theirs))
        same([d], [expected])
        grad = drawn.gradient(d)
        same(torch.autograd.grad(d, many, grad), torch.autograd.grad(expected, many, grad))
    else:
        given = [x.detach() for x in inputs]
        same(func.vjp(ours, *given)[1](grad), func.vjp(theirs, *given)[1](grad))


@pytest.mark.sample(16)
@pytest.mark.parametrize("seed", range(200))
def test_drawn_gradients(seed: int, in_the_emulator: None) -> None:
    compare(seed)
