"""What ``help`` and editors show of public functions: every parameter by its name, with a row of its own."""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues, layouts
from gemmkit.functions import lstm_cell, plan_grouped, select
from gemmkit.kernels.config import KEYWORDS, ChosenFields, Config
from gemmkit.lang.numba_hooks import Atom
from gemmkit.ptx import memory

FUNCTIONS = {name: made for space in (gk, gk.functions, gk.blas, gk.tiling) for name in space.__all__
             if inspect.isfunction(made := getattr(space, name)) or isinstance(made, Atom)}
PRODUCTS = (gk.matmul, gk.plan, gk.explain, gk.glu, gk.grouped, plan_grouped, gk.tune)


def test_functions_are_found() -> None:
    assert len(FUNCTIONS) > 20 and {"matmul", "attention", "gemmEx", "lstm_cell"} <= set(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_is_named_and_has_a_row(name: str) -> None:
    parameters = inspect.signature(FUNCTIONS[name]).parameters.values()
    assert not [x.name for x in parameters if x.kind is x.VAR_KEYWORD and x.annotation in ("Any", "object")]
    doc = inspect.getdoc(FUNCTIONS[name]) or ""
    rows = re.findall(r"^    (\w+): \S", doc[doc.index("Args:"):].split("\n\n")[0], re.MULTILINE)
    assert {x.name for x in parameters} <= set(rows) and len(rows) == len(set(rows))


def test_device_functions_have_their_signatures() -> None:
    assert list(inspect.signature(gk.tiling.parallelise).parameters) == ["tile", "tiling", "index", "count", "order"]
    assert list(inspect.signature(memory.load_global).parameters)[:2] == ["view", "axis"]


@pytest.mark.parametrize("function", PRODUCTS)
def test_products_name_all_keywords(function: Any) -> None:
    parameters = inspect.signature(function).parameters
    assert set(KEYWORDS) <= set(parameters)
    assert parameters["epilogue"].annotation == "Epilogue | None"


def test_a_configuration_names_all_fields() -> None:
    named = set(inspect.signature(gk.get_config).parameters)
    assert named == {field.name for field in Config.fields()} | {"gemm_shape", "device"}
    assert set(ChosenFields.__annotations__) <= named


@pytest.mark.parametrize("kind", [epilogues.Bias, layouts.Padded, gk.masks.Window, gk.Config])
def test_a_component_has_the_signature_of_its_fields(kind: type) -> None:
    found = inspect.signature(kind)
    assert list(found.parameters) == list(inspect.signature(kind.__init__).parameters)[1:]               # type: ignore[misc]
    assert not any(x.kind in (x.VAR_KEYWORD, x.VAR_POSITIONAL) for x in found.parameters.values())


# -- a wrong keyword --------------------------------------------------------------------------------------------------

A, W = np.ones((5, 7), np.float32), np.ones((7, 3), np.float32)


@pytest.mark.parametrize(("name", "call"), [
    ("matmul", lambda **more: gk.matmul(A, W, **more)), ("matmul", lambda **more: gk.plan(A, W, **more)),
    ("matmul", lambda **more: gk.explain(A, W, **more)), ("glu", lambda **more: gk.glu(A, W, W, **more)),
    ("glu", lambda **more: gk.glu(A, "no array", W, **more)), ("grouped", lambda **more: gk.grouped([A], [W], **more)),
    ("grouped", lambda **more: plan_grouped([A], [W], **more)), ("einsum", lambda **more: gk.einsum("ij,jk->ik", A, W, **more)),
    ("select", lambda **more: select(A, W, **more)), ("lstm_cell", lambda **more: lstm_cell(A, A, None, W, W, **more)),
    ("get_config", lambda **more: gk.get_config(operator=gk.operators.FPUOp(), global_a_layout=layouts.RowMajor("f4"), **more))])
def test_a_wrong_keyword_is_refused_by_name(name: str, call: Any) -> None:
    with gk.emulate(), pytest.raises(TypeError, match=rf"{name}\(\) got (unknown (keywords|fields)|an unexpected keyword argument) '?epilog\b"):
        call(epilog=1)


def test_none_is_as_if_it_were_not_given() -> None:
    nothing: dict[str, Any] = dict.fromkeys(KEYWORDS)
    with gk.emulate():
        assert np.array_equal(gk.matmul(A, W, **nothing), gk.matmul(A, W))
        assert np.array_equal(gk.plan(A, W, **nothing)(A, W), gk.matmul(A, W))
        assert np.array_equal(gk.glu(A, W, W, **nothing), gk.glu(A, W, W))
        assert np.array_equal(gk.grouped([A], [W], **nothing)[0], gk.matmul(A, W))
    given = dict(operator=gk.operators.FPUOp(), global_a_layout=layouts.RowMajor("f4"))
    assert gk.get_config(**given, **dict.fromkeys(ChosenFields.__annotations__)) == gk.get_config(**given)  # type: ignore[arg-type]
