"""Calls of tensors that come again: what they are known by, and what they are known by no longer. The tensors are PyTorch's
own, on the CPU; the driver, and where they seem to lie, are stand-ins."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import gemmkit as gk  # noqa: E402
import gemmkit.torch as gt  # noqa: E402
from bench import stand_ins  # noqa: E402
from gemmkit.functions.rows import to_float8  # noqa: E402
from gemmkit.plans.launch import forget  # noqa: E402
from gemmkit.programs import plan as program_plan  # noqa: E402
from gemmkit.runtime import arrays  # noqa: E402
from gemmkit.runtime.arrays import ArrayKinds, Recogniser  # noqa: E402
from tests.support.checks import functions_run  # noqa: E402
from tests.support.known_calls import driven, tensors_of_a_gpu  # noqa: E402

M, N, K = 16, 32, 64


def half(*shape: int) -> Any:
    return torch.ones(shape, dtype=torch.float16)


def eight(*shape: int) -> Any:
    return torch.ones(shape).to(torch.float8_e4m3fn)


def counts(*shape: int) -> Any:
    return torch.zeros(shape, dtype=torch.int32)


@pytest.fixture(params=["checked", "by their keys"])
def recogniser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Recogniser:
    monkeypatch.setitem(arrays.KEYS, torch.Tensor, arrays._torch_keys())
    monkeypatch.setitem(arrays.KEYS, torch.nn.Parameter, arrays._torch_keys())
    if request.param != "checked":
        monkeypatch.setattr(arrays, "_guards", lambda torch: None)
    return Recogniser()


def complex_half() -> Any:
    return torch.ones(M, K, dtype=torch.complex64)


OTHERS: dict[str, Callable[[], Any]] = {
    "shape": lambda: half(M + 1, K), "strides": lambda: half(K, M).t(), "dtype": lambda: half(M, K).bfloat16(),
    "rank": lambda: half(1, M, K), "gradient": lambda: half(M, K).requires_grad_(),
    "parameter": lambda: torch.nn.Parameter(half(M, K)), "negated": lambda: torch._neg_view(half(M, K)),
    "place": lambda: half(M, K).to("meta"), "alignment": lambda: half(M * K + 1)[1:].view(M, K),
}


@pytest.mark.parametrize("name", OTHERS)
def test_tensors_are_told_apart(recogniser: Recogniser, name: str) -> None:
    given, other = (half(M, K), half(K, N)), (OTHERS[name](), half(K, N))
    kinds, at = recogniser(given)
    assert at == (given[0].data_ptr(), given[1].data_ptr())
    for _ in range(2):
        assert recogniser(other)[0] != kinds and recogniser(other) == recogniser(other)
        assert recogniser((half(M, K), half(K, N)))[0] == kinds
        assert recogniser((half(M, K),))[0] != kinds and recogniser((half(K, N), half(M, K)))[0] != kinds


def test_conjugates_are_told_apart(recogniser: Recogniser) -> None:
    kinds, _ = recogniser((complex_half(),))
    assert recogniser((complex_half().conj(),))[0] != kinds and recogniser((complex_half(),))[0] == kinds


def test_one_array_in_two_places_is_told_apart(recogniser: Recogniser) -> None:
    x = half(K, K)
    assert recogniser((x, half(K, K)))[0] != recogniser((x, x))[0] != recogniser((half(K, K), x))[0]
    assert recogniser((x, x))[0] == recogniser((half(K, K),) * 2)[0]


def test_recording_is_told_apart(recogniser: Recogniser) -> None:
    x = half(M, K).requires_grad_()
    recorded, _ = recogniser((x,))
    with torch.no_grad():
        kinds, _ = recogniser((x,))
        assert kinds != recorded and recogniser((half(M, K).requires_grad_(),))[0] == kinds
    assert recogniser((x,))[0] == recorded


def test_transforms_and_modes_are_told_apart(recogniser: Recogniser) -> None:
    """A tensor of a batch looks like one of it, and has no memory of its own."""
    kinds, _ = recogniser((half(K),))
    seen: list[Any] = []

    def look(x: Any) -> Any:
        seen.append(recogniser((x,))[0])
        return x

    torch.func.vmap(look)(half(3, K))
    torch.func.grad(lambda x: look(x).sum())(half(K).float())
    assert kinds not in seen and len(seen) == 2


def test_what_is_seen_first_in_another_mode_is_checked_in_this_one(recogniser: Recogniser) -> None:
    x = half(M, K)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kinds, _ = recogniser((x,))
    assert recogniser((x,))[0] == kinds
    assert not isinstance(kinds, ArrayKinds) or "_among_all" not in functions_run(lambda: recogniser((x,)))


def test_no_tensor_is_kept_alive(recogniser: Recogniser) -> None:
    import weakref

    x = half(M, K)
    recogniser((x,))
    reference = weakref.ref(x)
    del x
    assert reference() is None


def test_a_check_that_does_not_tell_a_difference_is_not_relied_on(monkeypatch: pytest.MonkeyPatch) -> None:
    if arrays._guards(torch) is None:
        pytest.skip("this PyTorch has no such check")
    real = torch._C._dynamo.guards.TensorGuards
    for missed in ("shape", "dtype", "requires_grad", "device"):
        class Careless:
            def __init__(self, like: Any, missed: str = missed, **options: Any):
                self.like, self.missed, self.check_all = like, missed, real(like, **options).check

            def check(self, x: Any) -> bool:
                others = {"shape", "dtype", "requires_grad", "device"} - {self.missed}
                return self.check_all(x) or (getattr(x, self.missed) != getattr(self.like, self.missed)
                                             and all(getattr(x, one) == getattr(self.like, one) for one in others))

        monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", Careless)
        arrays._guards.cache_clear()
        assert arrays._guards(torch) is None, missed
    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", SimpleNamespace)
    arrays._guards.cache_clear()
    assert arrays._guards(torch) is None
    monkeypatch.undo()
    arrays._guards.cache_clear()
    assert isinstance(Recogniser()((half(2),))[0], ArrayKinds)


# -- of a GPU's tensors --------------------------------------------------------------------------------------------------

class Launches:
    """How often something was launched."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *launch: Any) -> int:
        self.count += 1
        return 0


@pytest.fixture
def launches() -> Iterator[Launches]:
    """Within it tensors of the CPU are a GPU's."""
    made = Launches()
    with tensors_of_a_gpu(), stand_ins.gpu(made):
        forget()
        yield made
        forget()


def layer(activation: str | None = None) -> Any:
    return gt.Linear(K, N, activation=activation, dtype=torch.float16)


CALLS: dict[str, tuple[Callable[[], tuple[Any, ...]], Callable[..., Any], int]] = {
    "matmul": (lambda: (half(M, K), half(K, N)), gk.matmul, 6),
    "bias": (lambda: (half(M, K), half(K, N), half(N)),
             lambda a, b, bias: gk.matmul(a, b, epilogue=gk.epilogues.Bias(bias) | gk.epilogues.ReLU()), 34),
    "softmax": (lambda: (half(M, K),), gk.softmax, 9),
    "rmsnorm": (lambda: (half(M, K), half(K)), gk.rmsnorm, 9),
    "attention": (lambda: tuple(half(1, 2, M, K) for _ in range(3)), gk.attention, 8),
    "packed attention": (lambda: (*(half(2, M, K) for _ in range(3)), counts(3), counts(3)),
                         lambda q, k, v, *offsets: gk.attention(q, k, v, lengths=offsets), 8),
    "keys' lengths": (lambda: (*(half(2, 2, M, K) for _ in range(3)), counts(2)),
                      lambda q, k, v, lengths: gk.attention(q, k, v, key_lengths=lengths), 8),
    "pages": (lambda: (*(half(2, 2, M, K) for _ in range(3)), counts(2), counts(2, 3)),
              lambda q, k, v, lengths, pages: gk.attention(q, k, v, key_lengths=lengths, pages=pages), 8),
    "attention with logarithms": (lambda: tuple(half(1, 2, M, K) for _ in range(3)),
                                  lambda q, k, v: gk.attention(q, k, v, return_lse=True), 16),
    "torch.matmul": (lambda: (half(M, K), half(K, N)), gt.matmul, 10),
    "scaled rows": (lambda: (eight(M, K), eight(N, K).t(), torch.ones(M, 1), torch.ones(1, N)), gt.scaled_mm, 10),
    "scaled blocks": (lambda: (eight(M, K), eight(N, K).t(), torch.ones(M, 1), torch.ones(1, 1)), gt.scaled_mm, 10),
}


def run_in(call: Callable[[], object]) -> list[str]:
    """The functions that a call runs until it packs what it brings, which it does for new addresses alone."""
    gc.disable()                                           # what dies in between has functions of gemmkit, too
    try:
        found = functions_run(call)
    finally:
        gc.enable()
    return found[:found.index("image_of")] if "image_of" in found else found


@pytest.mark.parametrize("name", CALLS)
def test_a_known_call_launches_once_and_runs_few_functions(launches: Launches, name: str) -> None:
    make, call, most = CALLS[name]
    sets = [make() for _ in range(3)]
    for given in sets:
        call(*given), call(*given)
    before = launches.count
    for given in sets:
        found = run_in(lambda given=given: call(*given))                                        # type: ignore[misc]
        assert len(found) <= most, " ".join(found)
    assert launches.count == before + len(sets)


def whole(*numbers: int) -> Any:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("return_lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("kind", ["", "lengths", "pages", "packed"])
def test_a_known_attention_brings_what_a_first_one_does(launches: Launches, monkeypatch: pytest.MonkeyPatch, kind: str,
                                                        return_lse: bool) -> None:
    """In the same places: addresses of q, k and v, of what counts their rows, and of the results."""
    brought: list[tuple[Any, ...]] = []

    def started(*how: Any) -> Any:
        start = real(*how)

        def looked_at(stream: int, values: tuple[Any, ...]) -> None:
            brought.append(values)
            start(stream, values)

        return looked_at

    real = program_plan.started
    monkeypatch.setattr(program_plan, "started", started)
    shape = (3, M, K) if kind == "packed" else (2, 3, M, K)
    q, k, v = half(*shape), *(half(4, 3, M, K) if kind == "pages" else half(*shape) for _ in "kv")
    more: dict[str, Any] = {"lengths": lambda: dict(key_lengths=whole(3, 2)), "packed": lambda: dict(lengths=(whole(0, 5, M), whole(0, 9, M))),
                            "pages": lambda: dict(key_lengths=whole(3, 2), pages=whole(3, 2, 1, 0).view(2, 2))}.get(kind, dict)()
    found = [gk.attention(q, k, v, return_lse=return_lse, mask=gk.masks.Window(5), **more) for _ in range(3)]
    places = [{x.data_ptr(): name for name, x in (dict(zip(("out", "lse"), results)) if return_lse else {"out": results}).items()}
              for results in found]
    first, *others = ([of.get(x, x) for x in values] for of, values in zip(places, brought))
    assert len(others) == 2 and all(other == first for other in others)
    assert first[:4] == ["out", q.data_ptr(), k.data_ptr(), v.data_ptr()] and ("lse" in first) == return_lse


@pytest.mark.parametrize("name", CALLS)
def test_a_known_call_is_refused_where_a_first_one_is(launches: Launches, name: str) -> None:
    make, call, _ = CALLS[name]
    given = make()
    call(*given), call(*given)
    before = launches.count
    for _ in range(2):
        if name != "torch.matmul" and "scaled" not in name:    # which compute their values
            with pytest.raises(ValueError, match="lazy view"):
                call(torch._neg_view(given[0]), *given[1:])
        with pytest.raises((ValueError, TypeError)):
            call(given[0][..., :-1], *given[1:]) if len(given) > 1 else call(given[0].long())
    assert launches.count == before


@pytest.mark.parametrize("shapes", [((M, 1), (1, N)), ((1, 1), (1, 1)), ((M, 2), (2, 1)), ((M, 2), (2, N))], ids=str)
def test_a_known_scaled_product_brings_its_own_scales(shapes: Any) -> None:
    """Also where one tensor is both, or has been both: their addresses are among the kernel's parameters."""
    a, b = eight(M, 2 * N * 4), eight(N, 2 * N * 4).t()
    with tensors_of_a_gpu(), driven() as driver:
        for again in range(3):
            scales = [torch.ones(shape) for shape in shapes]
            if again == 0 and shapes[0] == shapes[1]:
                scales[1] = scales[0]
            for _ in range(2):
                driver.launches.clear()
                gt.scaled_mm(a, b, *scales)
                ((_, _, parameters),) = driver.launches
                assert all(x.data_ptr().to_bytes(8, "little") in parameters for x in scales)


@pytest.mark.parametrize("symmetric", [True, False])
def test_known_layers_of_packed_weights_bring_their_own(symmetric: bool) -> None:
    """Two layers of one kind in turn, a unit of both, and of one of them twice: each brings its tensors' addresses."""
    from tests.support.checkpoints import drawn

    with tensors_of_a_gpu(), driven() as driver, torch.no_grad():
        layers = [gt.QuantisedLinear.from_checkpoint(drawn("awq", 64, 32, 32, symmetric=symmetric, seed=n)) for n in range(3)]
        counts: list[int] = []
        for one, other in ((0, 1), (1, 2), (2, 2), (2, 0), (0, 1), (2, 1), (1, 1)):
            x = half(M, K)
            for call, of in ((lambda: layers[one](x), (one,)), (lambda: gt.glu(x, layers[one], layers[other]), (one, other))):
                driver.launches.clear()
                counts.append(len(run_in(call)))
                ((_, _, parameters),) = driver.launches
                tensors = [x, *(y for n in of for y in layers[n].buffers())]
                assert all(y.data_ptr().to_bytes(8, "little") in parameters for y in tensors)
        assert max(counts[-6:-1]) <= 40, counts        # (of one layer twice the addresses are told apart)


@pytest.mark.parametrize("block", [128, None])
def test_known_rows_are_quantised_with_their_own_scales(block: Any) -> None:
    kept: list[Any] = []
    with tensors_of_a_gpu(), driven() as driver:
        for rows in (3, 3, 5, 3):
            x = half(rows, 256)
            driver.launches.clear()
            found = run_in(lambda x=x: kept.append(to_float8(x, block=block)))                         # type: ignore[misc]
            q, scales = kept[-1]
            ((_, _, parameters),) = driver.launches
            assert (q.shape, q.dtype, scales.shape) == (x.shape, torch.float8_e4m3fn, (rows, 1 if block is None else 2))
            assert all(y.data_ptr().to_bytes(8, "little") in parameters for y in (x, q, scales))
        assert len(found) <= 16, found


@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_known_layer_is_recorded_where_a_gradient_is_wanted(launches: Launches, activation: str | None) -> None:
    own, x = layer(activation), half(M, K)
    for _ in range(3):
        with torch.no_grad():
            assert own(x).grad_fn is None
        found = own(x)
        assert found.grad_fn is not None and found.shape == (M, N) and found.requires_grad
    with torch.no_grad():
        assert len(run_in(lambda: own(x))) <= 10
    own.requires_grad_(False)
    assert own(x).grad_fn is None and own(x.clone().requires_grad_()).grad_fn is not None


def test_a_known_product_is_recorded_where_a_gradient_is_wanted(launches: Launches) -> None:
    a, b = half(M, K), half(K, N)
    for _ in range(3):
        assert gt.matmul(a, b).grad_fn is None
        found = gt.matmul(a, b.clone().requires_grad_())
        assert found.grad_fn is not None
        before = launches.count
        found.sum().backward()
        assert launches.count == before + 1                    # dB alone


def test_a_known_stack_is_recorded_as_a_stack(launches: Launches) -> None:
    """By the operator, which knows what gradients of stacks are; each is one launch."""
    a, b, w = half(3, M, K), half(3, K, N), half(3, K, N).requires_grad_()
    for _ in range(3):
        assert gt.matmul(a, b).grad_fn is None
        found = gt.matmul(a, w)
        assert found.grad_fn.name() != "_EagerBackward"
        before, w.grad = launches.count, None
        found.sum().backward()
        assert (launches.count, w.grad.shape) == (before + 1, w.shape)


def test_what_looks_at_calls_sees_known_ones(launches: Launches) -> None:
    """A mode, a profiler, autocast and a transform: the operator is called, and known calls stay known."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, f: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(f))
            return f(*args, **(kwargs or {}))

    names: list[str] = []
    a, b, own = half(M, K), half(K, N), layer()
    with torch.no_grad():
        for _ in range(3):
            gt.matmul(a, b), own(a)
        with Seen():
            gt.matmul(a, b), own(a)
        assert {"gemmkit.product.default", "gemmkit.linear.default"} <= set(names)
        with torch.profiler.profile() as profile:
            gt.matmul(a, b)
        assert any("gemmkit::product" in event.name for event in profile.events())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert gt.matmul(a, b).dtype == own(a).dtype == torch.bfloat16
        assert torch.func.vmap(gt.matmul, (0, None))(half(3, M, K), b).shape == (3, M, N)
        assert gt.matmul(a, b).dtype == own(a).dtype == torch.float16


@pytest.mark.parametrize("name", ["key_starts", "key_lengths", "pages"])
def test_a_known_packed_call_takes_no_more_than_a_first_one(launches: Launches, name: str) -> None:
    q, k, v, offsets, counted = half(3, M, K), half(3, M, K), half(3, M, K), (whole(0, 5, M), whole(0, 9, M)), whole(3, 2)
    for _ in range(2):
        gk.attention(q, k, v, lengths=offsets)
    with pytest.raises(ValueError, match=name):
        gk.attention(q, k, v, lengths=offsets, **{name: counted})
