"""Operators of `gemmkit.torch` in the emulator and on a GPU: results, derivatives, fake kernels, batches."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

import gemmkit as gk  # noqa: E402
import gemmkit.torch  # noqa: E402
from gemmkit.epilogues import GELU, Bias, Elementwise, Scale, SiLU, Softmax, Tanh  # noqa: E402
from gemmkit.layouts.matrices import unwrapped  # noqa: E402
from gemmkit.torch.autograd import EpilogueRecipe, partials, recorded  # noqa: E402
from gemmkit.torch.product import is_eager, product, summed_to  # noqa: E402
from tests.support import torch_operators  # noqa: E402
from tests.support.patches import Seeded  # noqa: E402

pytestmark = pytest.mark.sample(12)

CASES = torch_operators.cases()
COUNTER = itertools.count()
F = torch.nn.functional


def drawn(*shape: int, dtype: Any = torch.float32) -> Any:
    random = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=random, dtype=dtype)


# -- every operator ---------------------------------------------------------------------------------------------------

def test_there_are_as_many_as_the_issue_asks_for() -> None:
    """(Of `is_exact` ones derivatives are compared with differences; PyTorch's own checks are of all.)"""
    assert sum(case.is_exact for case in CASES) >= 60 and len({str(case) for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_operators(case: torch_operators.Case, in_the_emulator: None) -> None:
    torch_operators.check(case, "cpu", fast=True, opcheck=str(case) in ("bias, gelu-float64", "c-float64", "stack of B-float64"))


@pytest.mark.gpu
@pytest.mark.sample(40)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_operators_on_a_gpu(case: torch_operators.Case) -> None:
    torch_operators.check(case, "cuda", fast=False, opcheck=True)


# -- the product ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("of", [(False, False), (True, False), (False, True), (True, True)])
def test_conjugated_operands_have_derivatives(of: tuple[bool, bool], in_the_emulator: None) -> None:
    a, b = (drawn(*shape, dtype=torch.complex128).requires_grad_() for shape in ((2, 3), (3, 2)))
    assert torch.autograd.gradcheck(lambda a, b: product(a, b, conj_a=of[0], conj_b=of[1]), (a, b), fast_mode=True)


def test_a_lazily_conjugated_tensor_is_resolved(in_the_emulator: None) -> None:
    a, b = drawn(3, 2, dtype=torch.complex64), drawn(3, 4, dtype=torch.complex64)
    torch.testing.assert_close(gk.torch.matmul(a.mH, b), a.mH @ b)


def test_a_gradient_lies_as_its_operand(in_the_emulator: None) -> None:
    """Autograd would copy it to where it adds up."""
    a, weight = drawn(5, 3).requires_grad_(), drawn(4, 3).requires_grad_()
    gk.torch.matmul(a, weight.mT).sum().backward()
    assert weight.grad.stride() == weight.stride() and a.grad.stride() == a.stride()
    torch.testing.assert_close(weight.grad, a.detach().sum(0).expand(4, 3))


def test_one_matrix_of_a_stack_gets_its_gradient_by_one_product(in_the_emulator: None, replaced: Seeded) -> None:
    a, b = drawn(3, 5, 4).requires_grad_(), drawn(4, 2).requires_grad_()
    d = gk.torch.matmul(a, b)
    seen: list[Any] = []
    from gemmkit.torch import product as module

    replaced(module, "product", lambda a, b, *more: seen.append((a.shape, b.shape)) or product(a, b, *more))
    d.sum().backward()
    assert seen == [((3, 5, 2), (2, 4)), ((4, 15), (15, 2))]
    torch.testing.assert_close(b.grad, a.detach().sum((0, 1))[:, None].expand(4, 2))


@pytest.mark.parametrize("layout", [gk.layouts.RowMajor, gk.layouts.ColMajor])
def test_a_configuration(layout: Any, in_the_emulator: None) -> None:
    tile = gk.Tile(M=16, N=16, K=16)
    conf = gk.get_config(operator=gk.operators.FPUOp(M=16, N=16), global_a_layout=gk.layouts.RowMajor("float32"),
                         global_b_layout=gk.layouts.RowMajor("float32"), global_d_layout=layout("float32"), block_shape=tile,
                         warps_per_block=1, compute_warp=tile, epilogue=SiLU())
    f = gk.torch.op(conf, name=f"tests::by_{layout.__name__}")
    a, b = drawn(5, 3).requires_grad_(), drawn(3, 4).requires_grad_()
    d = f(a, b)
    assert d.mT.is_contiguous() == (layout is gk.layouts.ColMajor)
    torch.testing.assert_close(d, F.silu(a @ b))
    for x, y in zip(torch.autograd.grad(d.sum(), (a, b)), torch.autograd.grad(F.silu(a @ b).sum(), (a, b))):
        torch.testing.assert_close(x, y)
    torch.library.opcheck(f._plain.operator, (a, b, None), test_utils=("test_schema", "test_faketensor"))


def test_a_wider_result(in_the_emulator: None) -> None:
    """Its gradient is not rounded to the operands' dtype before it is multiplied."""
    f = gk.torch.op(name="tests::wider", dtype=torch.float32, operator=gk.operators.FPUOp(
        M=16, N=16, dtype=np.float16, accumulator=np.float32))
    a, b = torch.full((2, 2), 1e-3, dtype=torch.float16).requires_grad_(), torch.ones(2, 2, dtype=torch.float16)
    d = f(a, b)
    assert d.dtype == torch.float32
    d.backward(torch.full((2, 2), 1e5))                    # beyond float16
    assert torch.isinf(a.grad).all() and a.grad.dtype == torch.float16
    a.grad = None
    f(a, b * 2.0 ** -12).backward(torch.full((2, 2), 1e5))
    torch.testing.assert_close(a.grad, torch.full((2, 2), 2e5 * 2.0 ** -12, dtype=torch.float16))


@pytest.mark.sample(2, at=1)
@pytest.mark.parametrize("of", ["a product", "an operator with an epilogue"])
def test_derivatives_of_every_order(of: str, in_the_emulator: None) -> None:
    a, b = (drawn(*shape, dtype=torch.float64).requires_grad_() for shape in ((2, 3), (3, 2)))
    f = product if of == "a product" else gk.torch.op(name="tests::second", epilogue=Tanh())
    assert torch.autograd.gradgradcheck(f, (a, b), fast_mode=True)


@pytest.mark.parametrize(("M", "N", "K"), [(0, 3, 2), (3, 0, 2), (3, 2, 0), (1, 1, 1), (17, 13, 19)])
def test_sizes(M: int, N: int, K: int, in_the_emulator: None) -> None:
    a, b, bias = drawn(M, K).requires_grad_(), drawn(K, N).requires_grad_(), drawn(N).requires_grad_()
    f = gk.torch.op(name=f"tests::sized{M}x{N}x{K}", epilogue=lambda bias: Bias(bias) | SiLU())
    found = torch.autograd.grad(f(a, b, bias).sum(), (a, b, bias))
    expected = torch.autograd.grad(F.silu(a @ b + bias).sum(), (a, b, bias))
    for x, y in zip(found, expected):
        torch.testing.assert_close(x, y)


def test_views_and_tensors_at_odd_addresses(in_the_emulator: None) -> None:
    base = drawn(200)
    a, b = base[1:61].view(10, 6)[::2, 1:4], base[63:75].view(4, 3).mT
    a, b = a.requires_grad_(), b.requires_grad_()
    d = gk.torch.matmul(a, b)
    torch.testing.assert_close(d, a @ b)
    for x, y in zip(torch.autograd.grad(d.sum(), (a, b)), torch.autograd.grad((a @ b).sum(), (a, b))):
        torch.testing.assert_close(x, y)


# -- derivatives ------------------------------------------------------------------------------------------------------

def test_a_derivative_of_the_users(in_the_emulator: None) -> None:
    """It is asked for in place of the epilogue's own, with the product's elements and the operands."""
    a, b, bias = drawn(5, 3).requires_grad_(), drawn(3, 4).requires_grad_(), drawn(4).requires_grad_()
    f = gk.torch.op(name="tests::straight_through", epilogue=lambda bias: Bias(bias) | Elementwise(lambda x: 1 if x > 0 else 0),
                    derivative=lambda x, bias: (torch.full_like(x, 3.0), torch.full_like(x, 2.0)))
    f(a, b, bias).sum().backward()
    torch.testing.assert_close(a.grad, 3 * b.detach().sum(1).expand(5, 3))
    torch.testing.assert_close(bias.grad, torch.full((4,), 10.0))


def test_a_branch_is_taken_element_by_element(in_the_emulator: None) -> None:
    def steps(x: Any) -> Any:
        if x < -1:
            return -1.0
        if x > 1 or x == 0:
            return x * x
        return x

    a = torch.tensor([[-2.0, -0.5, 0.5, 2.0]]).requires_grad_()
    f = gk.torch.op(name="tests::steps", epilogue=Elementwise(steps))
    f(a, torch.eye(4)).sum().backward()
    assert a.grad.tolist() == [[0.0, 1.0, 1.0, 4.0]]


def test_what_is_depended_on_alike_has_one_derivative() -> None:
    """A bias has the product's, computed once; an operand that is read otherwise has its own."""
    x, bias, slope = torch.randn(5, 4, dtype=torch.float64), torch.randn(4), torch.randn(5)
    (of_x, of_bias), shapes = partials(EpilogueRecipe.of(lambda bias: Bias(bias) | GELU()), x, [bias])
    assert of_x is of_bias and tuple(shapes[0]) == (1, 4)
    (of_x, of_slope), _ = partials(EpilogueRecipe.of(torch_operators._leaky), x, [slope])
    torch.testing.assert_close(of_x, torch.where(x > 0, 1.0, slope.to(x.dtype)[:, None]))
    torch.testing.assert_close(of_slope, torch.where(x > 0, 0.0, x))
    constant = partials(EpilogueRecipe.of(Scale(-1.5)), x, [])[0][0]
    assert constant.dtype == torch.float64 and float(constant) == -1.5


def test_gradients_are_summed_in_a_wider_dtype() -> None:
    many = torch.ones(3, 4099, 2, dtype=torch.float16)
    assert summed_to(many, (3, 1, 2), torch.float32).tolist() == [[[4099.0] * 2]] * 3
    assert summed_to(many, (1, 2), torch.float32).tolist() == [[3 * 4099.0] * 2]
    assert summed_to(many, many.shape, torch.float32).dtype == torch.float32
    assert summed_to(many, many.shape) is many


def test_an_unknown_function_is_named(in_the_emulator: None) -> None:
    a = drawn(2, 2).requires_grad_()
    d = gk.torch.op(name="tests::gamma", epilogue=Elementwise(lambda x: math.lgamma(x)))
    with pytest.raises(TypeError, match=r"math\.lgamma, whose derivative is not known; give derivative="):
        d(a.abs(), a).sum().backward()


def halved(x: Any) -> Any:
    while x > 1.0:
        x = x * 0.5
    return x


def test_a_loop_whose_end_depends_on_an_element_is_refused(in_the_emulator: None) -> None:
    """It would have no last branch."""
    a = drawn(2, 2).requires_grad_()
    d = gk.torch.op(name="tests::halved", epilogue=Elementwise(halved))
    with pytest.raises(TypeError, match="more than 64 branches, or a loop whose end depends on an element"):
        d(a, a).sum().backward()


@pytest.mark.parametrize(("told", "why"), [
    (dict(operator=gk.operators.LOG_SUM_EXP), "combines all products"),
    (dict(operator=gk.operators.OR_AND), "combines all products"),
    (dict(operator=gk.operators.Semiring(max, lambda x, y: math.sqrt(x * x + 0 * math.lgamma(y + 1)), 0.0, sample=(0.0,))),
     "its mul calls what has no known derivative"),
    (dict(epilogue=Softmax()), "Softmax sees more than one element"),
    (dict(epilogue=GELU(), operator=gk.operators.MIN_PLUS), "has an epilogue"),
    (dict(transform_global_to_shared_a=gk.transforms.Map(lambda x: x * x)), "transform_global_to_shared_a="),
    (dict(operator=gk.operators.QUATERNION), "adjoint is not known"),
])
def test_what_has_no_derivative_says_why(told: dict[str, Any], why: str) -> None:
    f = gk.torch.op(name=f"tests::none{next(COUNTER)}", **told)
    with pytest.raises(NotImplementedError, match=f"{f.name} has no derivative: .*{why}"):
        f.derivative.check(f.name)


SQUARE = np.ones((16, 16), np.float32)


@pytest.mark.parametrize(("made", "kind", "why"), [
    (gk.functions.BlockSparse(SQUARE, np.ones((1, 1), bool), (16, 16)), NotImplementedError, "condition= and observe_a="),
    (gk.layouts.Gather(SQUARE, np.zeros(16, np.int32)), TypeError, "global_a_layout: Gathered.* has no form known")])
def test_rows_by_index_and_empty_blocks_have_no_derivative(made: Any, kind: type, why: str) -> None:
    keywords = unwrapped(made, SQUARE, (None, None), {})[2]
    with pytest.raises(kind, match=why):
        recorded(drawn(16, 16).requires_grad_(), drawn(16, 4), None, None, None, None, keywords)


def test_a_mask_is_no_operand_of_an_operator() -> None:
    with pytest.raises(TypeError, match="makes a BlockSparse, whose mask an operator of PyTorch does not take"):
        gk.torch.op(name="tests::sparse", a=lambda x: gk.functions.BlockSparse(x, np.ones((1, 1), bool), (16, 16)))


def test_what_has_no_derivative_computes(in_the_emulator: None) -> None:
    f = gk.torch.op(name="tests::logsumexp", operator=gk.operators.LOG_SUM_EXP)
    a, b = drawn(3, 4), drawn(4, 2)
    torch.testing.assert_close(f(a, b), torch.logsumexp(a[:, :, None] + b, 1))
    with pytest.raises(NotImplementedError, match="combines all products"):
        f(a.requires_grad_(), b)


# -- gemmkit.matmul ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("keywords", "reference"), [
    ({}, lambda x: x), ({"epilogue": GELU()}, F.gelu), ({"epilogue": Scale(2.0)}, lambda x: 2 * x)])
@pytest.mark.parametrize("has_c", [False, True])
def test_matmul_is_recorded(keywords: dict[str, Any], reference: Any, has_c: bool, in_the_emulator: None) -> None:
    """(`gemmkit.matmul` comes to `recorded` with tensors on a GPU.)"""
    a, b = drawn(5, 3).requires_grad_(), drawn(3, 4).requires_grad_()
    c = drawn(5, 4).requires_grad_() if has_c else None
    d = recorded(a, b, c, None, None, None, keywords)
    expected = reference(a @ b if c is None else a @ b + c)
    torch.testing.assert_close(d, expected)
    inputs = (a, b) if c is None else (a, b, c)
    for x, y in zip(torch.autograd.grad(d.sum(), inputs), torch.autograd.grad(expected.sum(), inputs)):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(("given", "kind", "words"), [
    (dict(out=1), ValueError, "out= is given.*cannot be recorded"),
    (dict(stream=1), ValueError, "stream= is given"),
    (dict(b=np.eye(3)), TypeError, "b is ndarray"),
    (dict(keywords=dict(epilogue=Softmax())), NotImplementedError, "gemmkit.matmul has no derivative: Softmax"),
    (dict(keywords=dict(global_d_layout=gk.layouts.Symmetric(gk.layouts.RowMajor("float32")))), NotImplementedError,
     "gemmkit.matmul has no derivative: global_d_layout=Symmetric"),
])
def test_what_cannot_be_recorded(given: dict[str, Any], kind: type[Exception], words: str) -> None:
    call = {**dict(a=drawn(3, 3).requires_grad_(), b=drawn(3, 3), c=None, conf=None, out=None, stream=None, keywords={}), **given}
    with pytest.raises(kind, match=words):
        recorded(**call)


@pytest.mark.parametrize("kind", ["field", "composed", "captured"])
def test_a_captured_tensor_loses_no_gradient(kind: str, in_the_emulator: None) -> None:
    """It is no operand: its gradient would be missing, and all else be there."""
    a, b, bias = drawn(3, 3).requires_grad_(), drawn(3, 3), drawn(3).requires_grad_()
    epilogue = {"field": lambda: Bias(bias), "composed": lambda: Bias(bias) | Tanh(),
                "captured": lambda: gk.epilogues.Elementwise(lambda x, m, n: x * bias[n])}[kind]()
    f = gk.torch.op(name=f"tests::captured_{kind}", epilogue=epilogue)
    for call in (lambda: recorded(a, b, None, None, None, None, {"epilogue": epilogue}), lambda: f(a, b)):
        with pytest.raises(NotImplementedError, match=r"bias.* requires a gradient, and only operands get one"):
            call()
    with torch.no_grad():
        assert f(a, b).shape == (3, 3)


def test_a_second_derivative_of_a_recorded_call(in_the_emulator: None) -> None:
    """What is kept of the product is a result of the call."""
    a, b = drawn(3, 3).requires_grad_(), drawn(3, 3)

    def second(d: Any) -> Any:
        (first,) = torch.autograd.grad(d.sum(), a, create_graph=True)
        return torch.autograd.grad(first.square().sum(), a)[0]

    torch.testing.assert_close(second(recorded(a, b, None, None, None, None, {"epilogue": Tanh()})), second(torch.tanh(a @ b)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["plain", "c", "gelu", "min-plus"])
def test_matmul_of_tensors_that_require_a_gradient(name: str) -> None:
    a, b, c = (drawn(*shape).cuda().requires_grad_() for shape in ((65, 33), (33, 17), (65, 17)))
    found, expected = {
        "plain": lambda: (gk.matmul(a, b), a @ b),
        "c": lambda: (gk.matmul(a, b, c), a @ b + c),
        "gelu": lambda: (gk.matmul(a, b, c, epilogue=GELU()), F.gelu(a @ b + c)),
        "min-plus": lambda: (gk.matmul(a, b, operator=gk.operators.MIN_PLUS), (a[:, :, None] + b).amin(1)),
    }[name]()
    for x, y in zip(torch.autograd.grad(found.sum(), (a, b)), torch.autograd.grad(expected.sum(), (a, b))):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_a_recorded_product_of_a_matrix_with_structure(in_the_emulator: None) -> None:
    b = drawn(3, 4).requires_grad_()
    d = recorded(drawn(3), b, None, None, None, None, {"global_a_layout": gk.layouts.Diagonal("float32"), "epilogue": Tanh()})
    expected = torch.tanh(drawn(3)[:, None] * b)
    torch.testing.assert_close(d, expected)
    for x, y in zip(torch.autograd.grad(d.sum(), b), torch.autograd.grad(expected.sum(), b)):
        torch.testing.assert_close(x, y)


def test_an_epilogue_of_parameters_is_made_once(in_the_emulator: None) -> None:
    made: list[Any] = []

    def biased(bias: Any) -> Any:
        made.append(bias)
        return Bias(bias)

    f = gk.torch.op(name="tests::parameters", epilogue=biased)
    made.clear()
    a, b, bias = drawn(5, 3), drawn(3, 4), torch.nn.Parameter(drawn(4))
    for _ in range(3):
        torch.testing.assert_close(f(a, b, bias), a @ b + bias)
    with torch.no_grad():
        bias.add_(1.0)
    torch.testing.assert_close(f(a, b, bias), a @ b + bias)
    assert len(made) == 1
    bias.data = drawn(4) * 3                                # other memory
    torch.testing.assert_close(f(a, b, bias), a @ b + bias)
    assert len(made) == 2 and len(f._of_parameters) == 1
    del bias
    assert not f._of_parameters


# -- what is wrong ----------------------------------------------------------------------------------------------------

def test_bad_definitions() -> None:
    taken = gk.torch.op(name="tests::taken")
    assert repr(taken) == "<torch operator tests::taken(a, b, c=None)>"
    for told, kind, words in (
            (dict(name="tests::taken"), ValueError, "there is an operator tests::taken already"),
            (dict(name="a b"), ValueError, "name='a b': a name such as"),
            (dict(name="tests::bad", epilogue=3), TypeError, "epilogue=3: an Epilogue"),
            (dict(name="tests::bad", epilogue=lambda x: x), TypeError, "an Epilogue is needed"),
            (dict(name="tests::bad", epilogue=lambda a: Bias(a)), TypeError, "operand a has the name"),
            (dict(name="tests::bad", tile=3), TypeError, "unknown keywords tile"),
            (dict(name="tests::bad", derivative=3), TypeError, "derivative=3: a function"),
            (dict(name="tests::bad", operator=gk.operators.FPUOp), gk.ConfigError, "an instance of Operator"),
            (dict(name="tests::bad", a=lambda x: 1 / 0), ZeroDivisionError, "division")):
        with pytest.raises(kind, match=words):
            gk.torch.op(**told)


def test_bad_calls(in_the_emulator: None) -> None:
    f = gk.torch.op(name="tests::called", epilogue=lambda bias: Bias(bias))
    a, b, bias = drawn(5, 3), drawn(3, 4), drawn(4)
    for call, kind, words in (
            (lambda: f(a, b), TypeError, "takes a, b, bias and c="),
            (lambda: f(a, a, bias), ValueError, "a has 3 columns and b 5 rows"),
            (lambda: f(a, b, bias, c=a), ValueError, "c has shape"),
            (lambda: f(a[0], b, bias), ValueError, "a has 1 dimensions"),
            (lambda: f(a, b, drawn(3)), ValueError, "bias has shape"),
            (lambda: f(a, b.to("meta"), bias), ValueError, "b is on meta and a on cpu"),
            (lambda: gk.torch.op(name="tests::real", dtype=torch.float32)(a.to(torch.complex64), b), TypeError, "imaginary part")):
        with pytest.raises(kind, match=words):
            call()
    assert f(*(x.to("meta") for x in (a, b, bias))).shape == (5, 4)


def test_a_tensor_on_the_cpu_is_for_the_emulator() -> None:
    with pytest.raises(TypeError, match=r"b is a tensor on cpu; move it to the GPU with \.cuda\(\)|a is a tensor on cpu"):
        gk.torch.matmul(drawn(2, 2), drawn(2, 2))


@pytest.mark.parametrize(("of_a", "of_b"), [((5,), (5,)), ((5,), (5, 3)), ((3, 5), (5,)), ((2, 3, 5), (5,)), ((5,), (2, 5, 3))])
def test_operands_of_one_dimension(of_a: tuple[int, ...], of_b: tuple[int, ...], in_the_emulator: None) -> None:
    a, b = (drawn(*shape).requires_grad_() for shape in (of_a, of_b))
    wanted = torch.matmul(a, b)
    c = drawn(*wanted.shape).requires_grad_()
    operands = recorded(a, b, None, None, None, None, {}), gk.torch.matmul(a, b, c) - c
    with_epilogue = recorded(a, b, c, None, None, None, {"epilogue": Scale(2.0)})
    gradients = torch.autograd.grad(wanted.sum(), (a, b))
    for made in (*operands, with_epilogue / 2 - c):
        assert made.shape == wanted.shape and torch.allclose(made, wanted, atol=1e-5)
        for found, known in zip(torch.autograd.grad(made.sum(), (a, b)), gradients):
            assert found.shape == known.shape and torch.allclose(found, known, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.complex64,
                                   torch.int8, torch.int32], ids=str)
def test_eager_calls_give_what_the_operator_gives(dtype: Any, in_the_emulator: None) -> None:
    a, b = (torch.arange(12).reshape(shape).to(dtype) for shape in ((3, 4), (4, 3)))
    eager, by_operator = gk.torch.matmul(a, b), torch.ops.gemmkit.product(a, b)
    assert is_eager((a, b)) and eager.dtype == by_operator.dtype
    torch.testing.assert_close(eager.to(torch.complex128), by_operator.to(torch.complex128))


def test_what_else_looks_at_a_call_has_the_operator(in_the_emulator: None) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Own(torch.Tensor):
        pass

    a = torch.ones(3, 3)
    assert is_eager((a, None, "plain", torch.nn.Parameter(a)))
    assert not any(map(is_eager, ((a.to("meta"),), (a.as_subclass(Own),), (torch.ones(3, 3, dtype=torch.complex64).conj(),))))
    seen: list[bool] = []

    def looked(x: Any) -> Any:
        seen.append(is_eager((x,)))
        return x * 1

    torch.func.vmap(looked)(a)
    with torch.profiler.profile():
        looked(a)
    with FakeTensorMode():
        looked(torch.ones(3, 3))
    with torch.device("cpu"):
        looked(a)
    with torch.autograd.forward_ad.dual_level():
        looked(a)
    torch.jit.trace(looked, (a,), check_trace=False)
    assert seen == [False] * 6 and is_eager((a,))
