"""What runs is what is written: every way of changing code is seen, and what no key could tell apart is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues, layouts, operators, transforms
from gemmkit.components import Component, freeze
from gemmkit.epilogues import activations, elementwise
from gemmkit.lang import fingerprint
from gemmkit.lang.fingerprint import forget_readings
from gemmkit.runtime import compile as compiling
from gemmkit.runtime.cache import default_cache
from gemmkit.runtime.compile import bytes_digest
from tests.stale.fresh import Fresh
from tests.stale.kernel import ptx_of
from tests.stale.run import edited
from tests.support.machines import on_machines

EDITS = int(os.environ.get("GEMMKIT_EDITS", "100"))
SHARDS = 20


@pytest.mark.sample(20)
@pytest.mark.compile
@pytest.mark.parametrize("shard", range(SHARDS))
def test_drawn_edits_compile_to_what_a_fresh_process_compiles(shard: int, own_cache: Path) -> None:
    """`python -m tests.stale.run --edits 1000` draws more."""
    own = default_cache()
    with Fresh() as fresh:
        outcomes = list(edited(EDITS // SHARDS, shard, fresh))
    assert [o.edit for o in outcomes if o.is_stale] == [] and len(outcomes) == EDITS // SHARDS
    assert own.stats.builds > len(outcomes) // 2                              # edits are edits


# -- places -----------------------------------------------------------------------------------------------------------------

@pytest.mark.compile
def test_equal_lambdas_are_reported_where_each_is_written(tmp_path: Path) -> None:
    """In a slot of its own, and inside another component."""
    space: list[Any] = []
    for name, line in (("where_a", 3), ("where_b", 7)):
        names: dict[str, Any] = {"transforms": transforms}
        exec(compile("\n" * (line - 1) + "t = transforms.Map(lambda x: x.clipped(2))", f"{name}.py", "exec"), names)
        space.append((names["t"], f'File "{name}.py", line {line}'))
    for transform, place in space:
        for each in (transform, transforms.Identity() | transform):
            with pytest.raises(gk.ComponentError) as caught:
                ptx_of(each)
            assert place in str(caught.value)
    one, other = freeze(space[0][0]), freeze(space[1][0])
    assert one.fingerprint == other.fingerprint and str(one.type) == str(other.type)       # yet one kernel


# -- the user's modules, whatever they are called ------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["token", "code", "profile", "gemmkit_extras", "numpy_like", "cuda_helpers"])
def test_a_users_module_is_not_taken_for_the_standard_librarys(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.py"
    path.write_text("EPS = 1.0\ndef helper(x): return x + EPS\n")
    module = types.ModuleType(name)
    module.__file__ = str(path)
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, name, module)
    space = {name: module}
    exec(f"f = lambda x: {name}.helper(x) * {name}.EPS", space)
    transform = transforms.Map(space["f"])
    texts = [freeze(transform).fingerprint]
    module.EPS = 2.0                                                          # type: ignore[attr-defined]
    texts.append(freeze(transform).fingerprint)
    module.helper.__code__ = (lambda x: x - EPS).__code__                     # type: ignore[attr-defined, name-defined]  # noqa: F821
    texts.append(freeze(transform).fingerprint)
    assert len(set(texts)) == 3


# -- plans ------------------------------------------------------------------------------------------------------------------

@on_machines
def test_a_plan_and_a_conf_follow_the_code(machine: Any) -> None:
    """A constant, a captured array, the code of the function; the conf and the plan stay the same objects."""
    table = machine.array(np.arange(4, dtype=np.float32))
    space: dict[str, Any] = {"SCALE": 2.0, "table": table, "__name__": "users_program"}
    exec("def f(x, m, n): return x * SCALE + table[n]", space)
    conf = gk.get_config(operator=operators.FPUOp(M=16, N=16), global_a_layout=layouts.RowMajor("float32"),
                         epilogue=epilogues.Elementwise(space["f"]), block_shape=gk.Tile(M=16, N=16, K=8))
    a = machine.array(np.eye(4, dtype=np.float32))

    def expected(more: float = 0.0) -> np.ndarray:
        return np.eye(4) * space["SCALE"] + machine.numpy(space["table"]) + more

    with machine.session():
        plan = gk.plan(a, a, conf=conf)
        assert np.array_equal(machine.numpy(plan(a, a)), expected())
        fingerprints = [plan._compiled.arguments[0].fingerprint]
        for step, more in (("SCALE", 0.0), ("table", 0.0), ("code", 1.0)):
            if step == "SCALE":
                space["SCALE"] = 3.0
            elif step == "table":
                space["table"] = machine.array(np.ones(4, np.float32))
            else:
                exec("def g(x, m, n): return x * SCALE + table[n] + 1", space)
                space["f"].__code__ = space["g"].__code__
            assert not plan.stands()
            assert np.array_equal(machine.numpy(plan(a, a)), expected(more))
            assert np.array_equal(machine.numpy(gk.matmul(a, a, conf=conf)), expected(more)) and plan.stands()
            fingerprints.append(plan._compiled.arguments[0].fingerprint)
    assert fingerprints[1] == fingerprints[2] and len(set(fingerprints)) == 3  # another array is no other kernel


@pytest.mark.gpu
def test_keywords_follow_the_code_and_a_refused_call_leaves_the_context_usable() -> None:
    """On a GPU, where plans are remembered by their components' keys."""
    import cupy

    space: dict[str, Any] = {"SCALE": 2.0, "LIST": [2.0]}
    exec("def helper(x): return x * SCALE\ndef f(x): return helper(x) + 1", space)
    transform, a = transforms.Map(space["f"]), cupy.eye(40, dtype=cupy.float32)

    def product() -> Any:
        return gk.matmul(a, a, transform_regs_to_shared_d=transform).get()

    def was(scale: float, more: float) -> Any:
        return np.eye(40, dtype=np.float32) * scale + more

    assert np.array_equal(product(), was(2, 1)) and np.array_equal(product(), was(2, 1))
    space["SCALE"] = 4.0
    assert np.array_equal(product(), was(4, 1))
    space["helper"].__code__ = (lambda x: x * LIST[0]).__code__               # type: ignore[name-defined]  # noqa: F821
    with pytest.raises(gk.ComponentError, match="LIST is a list"):
        product()
    space["helper"].__code__ = (lambda x: x * SCALE - 1).__code__             # type: ignore[name-defined]  # noqa: F821
    assert np.array_equal(product(), was(4, 0))
    cupy.cuda.Device().synchronize()


def test_a_plan_without_code_of_the_users_has_nothing_to_look_at() -> None:
    a = np.eye(4, dtype=np.float32)
    with gk.emulate():
        assert gk.plan(a, a).stands is None
        assert gk.plan(a, a, epilogue=epilogues.Bias(np.ones(4, np.float32)) | epilogues.ReLU()).stands is None


def test_a_transform_that_begins_to_want_coordinates() -> None:
    """What a component remembers of its function's signature does not outlive the code."""
    space: dict[str, Any] = {}
    exec("def f(x): return x\ndef g(x, i, j): return x + i", space)
    transform = transforms.Map(space["f"])
    a = np.eye(4, dtype=np.float32)
    with gk.emulate():
        conf = gk.get_config(operator=operators.FPUOp(M=16, N=16), global_a_layout=layouts.RowMajor("float32"),
                             transform_regs_to_shared_d=transform, block_shape=gk.Tile(M=16, N=16, K=8))
        assert np.array_equal(gk.matmul(a, a, conf=conf), a)
        space["f"].__code__ = space["g"].__code__
        assert np.array_equal(gk.matmul(a, a, conf=conf), a + np.arange(4)[:, None])


@pytest.mark.compile
def test_code_that_changes_while_it_is_compiled_is_not_kept(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    own = default_cache()
    space: dict[str, Any] = {"SCALE": 2.0}
    exec("f = lambda x: x * SCALE", space)
    transform = transforms.Map(space["f"])
    compiled = compiling.to_ptx

    def interrupted(*arguments: Any) -> str:
        text = compiled(*arguments)
        space["SCALE"] = 5.0
        return text

    with monkeypatch.context() as patch:
        patch.setattr(compiling, "to_ptx", interrupted)
        with pytest.raises(compiling.CodeChanged):
            ptx_of(transform)
    assert own.info().entries == 0
    assert "0f40A00000" in ptx_of(transform)                                  # 5.0


@pytest.mark.compile
def test_a_patched_function_of_gemmkits_is_not_kept_under_the_unpatched_key(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    transform = transforms.Map(activations.relu)
    before = ptx_of(transform)
    with monkeypatch.context() as patch:
        patch.setattr(activations.relu, "__code__", (lambda x: x * 3).__code__)
        texts = []
        for _ in range(2):
            try:
                texts.append(ptx_of(transform))
            except compiling.CodeChanged:                                     # seen, and everything read anew
                continue
        assert texts and before not in texts
    for _ in range(2):
        try:
            assert ptx_of(transform) == before
        except compiling.CodeChanged:
            continue


def _with_another_code(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(activations.relu, "__code__", activations.gelu.__code__)


def _with_another_default(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(activations.relu, "__defaults__", (1,))


def _with_another_name(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(activations, "relu", activations.gelu)


def _with_another_method(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(epilogues.Default, "__call__", lambda *_: None)


def _with_another_attribute(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(epilogues.Default, "unheard_of", 1, raising=False)


def _with_a_hidden_built_in(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(elementwise, "max", min, raising=False)


_REPLACED = [_with_another_code, _with_another_default, _with_another_name, _with_another_method, _with_another_attribute,
             _with_a_hidden_built_in]


@pytest.mark.parametrize("replace", _REPLACED)
def test_whatever_of_gemmkit_is_replaced_has_a_key_of_its_own(replace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts and keys hold gemmkit's code by name and by the digest of its source: none is that of the unreplaced code."""
    def texts() -> list[str]:
        return [freeze(epilogues.Default()).fingerprint, freeze(transforms.Map(activations.silu)).fingerprint,
                fingerprint.package_digest()]

    if not fingerprint.packages_stand():
        forget_readings()
    before = texts()
    with monkeypatch.context() as patch:
        replace(patch)
        assert not fingerprint.packages_stand()
        forget_readings()
        assert fingerprint.packages_stand() and not set(texts()) & set(before)
    assert not fingerprint.packages_stand()
    forget_readings()
    assert fingerprint.packages_stand() and texts() == before


def test_what_was_replaced_before_the_first_kernel_is_seen() -> None:
    """A cubin under the unreplaced code's key would be what other processes find on disk."""
    program = """
        import gemmkit as gk
        from gemmkit.kernels import simt as kernel
        from gemmkit.lang import fingerprint as package_state

        before = package_state.packages_stand(), package_state.package_digest()
        kernel.registers = range
        from gemmkit.lang.fingerprint import forget_readings
        seen = package_state.packages_stand()
        forget_readings()
        print(before[0], seen, package_state.package_digest() == before[1])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False", "False"], done.stderr[-2000:]


def test_what_gemmkit_remembers_is_in_no_key() -> None:
    """The divisions of tiles that a process has asked for stood in the text of every kernel that may ask for one, so that
    another process compiled it again (seen at 224fc6a: what was emulated before decided on the key)."""
    from gemmkit.kernels.collectives.operand import Operand
    from gemmkit.lang.fingerprint import Reader
    from gemmkit.tiling import division

    def text() -> str:
        reader = Reader()
        reader._open = [Operand]
        forget_readings()
        return reader.component_class(Operand, Component)

    before = text()
    division(gk.Tile(M=56, N=24), gk.Tile(M=7, N=3), 4)
    assert text() == before


# -- what no key could tell apart ---------------------------------------------------------------------------------------------




# -- tools --------------------------------------------------------------------------------------------------------------------

def test_a_compiler_is_known_by_its_bytes(tmp_path: Path) -> None:
    one, other, large = (tmp_path / name for name in ("ptxas", "copy", "large"))
    one.write_bytes(b"release 13.0")
    other.write_bytes(b"release 13.0")
    assert bytes_digest(str(one)) == bytes_digest(str(other))
    one.write_bytes(b"release 13.1")                                          # updated in place
    assert bytes_digest(str(one)) != bytes_digest(str(other))
    content = np.random.default_rng(0).bytes(6 * 2**20)
    large.write_bytes(content)
    before = bytes_digest(str(large))
    large.write_bytes(bytes(len(content) - 2**21) + content[-2**21:])
    assert bytes_digest(str(large)) != before


def test_all_compilers_are_in_the_key() -> None:
    text = compiling.versions()
    assert all(name in text for name in ("numba-cuda=", "NVVM=", "ptxas=", "Python="))


def test_a_newer_source_on_disk_than_was_imported_is_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint.package_digest()
    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "_imported", (("edited.py", 1, 2),))
        newer = fingerprint.package_digest()
        assert len({before, newer, fingerprint.package_digest(of_process=False)}) == 3
        patch.setattr(fingerprint, "_PROCESS", b"another")
        assert fingerprint.package_digest() not in (before, newer)
    assert fingerprint.package_digest() == before


def test_a_module_that_is_loaded_from_a_newer_file_changes_the_key(tmp_path: Path) -> None:
    """Modules are loaded when they are used: what a process compiled before a file changed has another key than later."""
    copy = tmp_path / "gemmkit"
    shutil.copytree(Path(compiling.__file__).parents[1], copy, ignore=shutil.ignore_patterns("__pycache__"))
    program = """
        import os, gemmkit
        from gemmkit.lang.fingerprint import package_digest
        first = package_digest()
        file = os.path.join(os.path.dirname(gemmkit.__file__), "epilogues", "fast.py")
        assert file.startswith(os.getcwd())
        open(file, "a").write("tanh = None\\n")
        kept = package_digest()                          # nothing that could have the newer text is loaded
        assert gemmkit.epilogues.fast.tanh is None
        print(first == kept, first == package_digest())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.stdout.split() == ["True", "False"], done.stderr[-2000:]


# -- what it costs --------------------------------------------------------------------------------------------------------------

def test_looking_again_is_one_expression() -> None:
    """Two functions, two constants and a class: 15 comparisons, no loop, nothing hashed."""
    space: dict[str, Any] = {"SCALE": 2.0}
    exec("def helper(x): return x * SCALE\ndef f(x): return helper(x) + SCALE", space)
    stand = freeze(transforms.Map(space["f"])).guards
    (facts,) = [guards for guards in stand if guards]
    assert facts.ready()() and not facts.ready().__code__.co_consts[1:2] == ("loop",)
    assert len(facts.facts) < 16
    space["SCALE"] = 4.0
    assert not facts.stand()
