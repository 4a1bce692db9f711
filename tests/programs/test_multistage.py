"""Derived kernels without wgmma in the emulator: drawn programs, operands that cp.async copies by the narrower, what is refused."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit.programs.multistage import CopiedTile
from gemmkit.programs.plan import planned
from gemmkit.runtime.device import H100, assumed
from tests.support import chains
from tests.support import programs as listing

F16, F32, BF16 = np.float16, np.float32, ml_dtypes.bfloat16
A100 = dataclasses.replace(H100, name="an A100", arch=(8, 0), sm_count=108, shared_memory_per_block=166912,
                           shared_memory_per_sm=167936)
RTX = dataclasses.replace(H100, name="an RTX 5090", arch=(12, 0), sm_count=170, shared_memory_per_block=101376,
                          shared_memory_per_sm=102400)
DEVICES = A100, RTX, H100
SMALL = gk.Mapping({"n": 64}, warpgroups=1, kernel="multistage")


def drawn(*shape: int, dtype: Any = F16, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(sum(shape)).standard_normal(shape) * scale).astype(dtype)


def empty(*shape: int, dtype: Any = F16) -> np.ndarray:
    return np.full(shape, np.nan, dtype)


def aligned(rows: int, columns: int, of: int, dtype: Any = F16) -> np.ndarray:
    """A matrix whose rows begin at multiples of ``of`` elements and of no more."""
    stride = -(-columns // of) * of
    stride += of if stride // of % 2 == 0 else 0
    return drawn(rows, stride, dtype=dtype)[:, :columns]


def heads(count: int, rows: int, places: int, d: int = 64, dtype: Any = F16) -> list[np.ndarray]:
    shapes = (count, rows, d), (count, places, d), (count, places, d)
    return [*(drawn(*shape, dtype=dtype) for shape in shapes), empty(count, rows, d, dtype=dtype)]


def checked(program: Any, arrays: list[np.ndarray], mapping: gk.Mapping, seed: int | None = None, **components: Any) -> Any:
    plan = chains.check(program, arrays, mapping, seed, **components)
    assert plan.is_multistage and plan.blocks == plan.module.tiles(plan.sizes) and "wgmma" not in plan.text
    return plan


@pytest.mark.kin(1)
@pytest.mark.sample(40)
@pytest.mark.parametrize("seed", range(80))
def test_drawn(seed: int) -> None:
    program, arrays, mapping, more = listing.drawn_case(seed)
    mapping = listing.multistage(mapping)
    if seed % 2 and program is not listing.product_and_sums:
        mapping = listing.doubled(mapping)
    with assumed(DEVICES[seed % 3]):
        try:
            checked(program, arrays, mapping, seed, **more)
        except gk.ConfigError as error:                # stages of two loops, or of wide blocks, may be too much
            sums_up = seed % 2 and "where rounds add up rows or columns" in str(error)
            assert sums_up or "bytes of shared memory" in str(error)


@pytest.mark.kin(1)
@pytest.mark.sample(80, at=35)
@pytest.mark.parametrize("draw", [chains.drawn_case, chains.drawn_lengths, chains.drawn_shares], ids=lambda draw: draw.__name__)
@pytest.mark.parametrize("seed", range(120))
def test_drawn_chains(draw: Any, seed: int) -> None:
    program, arrays, mapping, more = draw(seed)
    try:
        checked(program, arrays, listing.multistage(mapping), seed, **more)
    except gk.ConfigError as error:
        if not (mapping.blocks and "registers of a thread" in str(error)):             # blocks that are Hopper's
            assert mapping.splits and "splits=" in str(error) and program.function.__name__ in chains.NO_SHARES


@pytest.mark.kin(1)
@pytest.mark.sample(4)
@pytest.mark.parametrize("m, n, k", [(1, 1, 1), (1, 8, 8), (0, 8, 8), (131, 137, 167), (64, 67, 64), (129, 67, 33)])
def test_odd_sizes(m: int, n: int, k: int) -> None:
    checked(listing.gemm, [aligned(m, k, 8), aligned(k, n, 8), empty(m, n)], gk.Mapping(kernel="multistage"))


@pytest.mark.kin(1)
@pytest.mark.parametrize("of, copied", [(2, "vector=2"), (4, "vector=4"), (8, None)])
@pytest.mark.parametrize("columns", [72, 71])
def test_rows_that_begin_at_fewer_bytes_are_copied_by_fewer(of: int, copied: str | None, columns: int) -> None:
    """And where a row ends within a copy, what is behind it is not looked at."""
    plan = checked(listing.gemm, [aligned(40, columns, of), aligned(columns, 80, of), empty(40, 80)], SMALL, 3)
    (line,) = (line for line in plan.text.splitlines() if line.startswith("a_tile"))
    assert ("vector=" in line) == (copied is not None) and (copied or "") in line
    assert ("clipped=True" in line) == (columns % of != 0)
    checked(listing.transposed, [aligned(70, 68, of), aligned(35, 70, of), empty(68, 35, dtype=F32)], SMALL, 3)


@pytest.mark.kin(1)
@pytest.mark.parametrize("warpgroups", [1, 2, 3])
@pytest.mark.parametrize("blocks, stages", [({"n": 64, "k": 32}, 2), ({"n": 192, "k": 96}, 2), ({"n": 64, "k": 64}, 5)])
@pytest.mark.sample(5, at=1)
def test_a_mapping_changes_no_result(warpgroups: int, blocks: dict[str, int], stages: int) -> None:
    mapping = gk.Mapping(blocks, warpgroups=warpgroups, stages=stages, kernel="multistage")
    if warpgroups == 3 and blocks["n"] == 192:
        mapping = dataclasses.replace(mapping, blocks={"n": 128, "k": 96})
    k, n = mapping.blocks["k"] * stages + 8, mapping.blocks["n"] + 8          # around the ring, and beyond a tile
    plan = checked(listing.gemm, [drawn(100, k), drawn(k, n), empty(100, n, dtype=F32)], mapping, warpgroups)
    assert f"CopyRing(stages={stages})" in plan.text


@pytest.mark.kin(1)
@pytest.mark.sample(3, at=0)
@pytest.mark.parametrize("warpgroups", [1, 2, 3])
def test_a_warpgroup_has_twice_as_many_rows(warpgroups: int) -> None:
    """What a warp loads of B serves both halves of them."""
    mapping = listing.doubled(gk.Mapping(warpgroups=warpgroups, kernel="multistage"))
    b, rows = drawn(72, 72, scale=0.1), 128 * warpgroups + 7
    plan = checked(listing.residual, [drawn(rows, 72), b, drawn(rows, 72), empty(rows, 72), empty(rows, 72, dtype=F32)], mapping, 3)
    assert "MmaProduct(a_tile, b_tile, parts=2)" in plan.text and plan.text.count("    finish(sizes, d, e, c, m") == 2
    checked(listing.transposed, [drawn(72, 72), drawn(35, 72), empty(72, 35)], mapping, 3)
    if warpgroups < 3:
        checked(listing.dual, [drawn(40, 72), b, drawn(72, 72, scale=0.1), empty(40, 72)], mapping, 3, gate=listing.silu_times)
    with pytest.raises(gk.ConfigError, match="where rounds add up rows or columns, a warpgroup has 64"):
        listing.product_and_sums.plan(drawn(200, 72), b, empty(200, 72), empty(200, dtype=F32), mapping=mapping)


@pytest.mark.parametrize("dtype, out", [(BF16, BF16), (F16, BF16), (BF16, F32)])
@pytest.mark.kin(1)
def test_dtypes(dtype: Any, out: Any) -> None:
    operands = [drawn(70, 72, dtype=dtype), drawn(72, 80, dtype=dtype)]
    with gk.emulate():
        listing.gemm(*operands, got := empty(70, 80, dtype=out), mapping=SMALL)
    exact = listing.gemm.reference(*operands, got)
    assert np.abs(got.astype(float) - exact).max() <= (2e-5 if out == F32 else 2 ** -7) * np.abs(exact).max()
    q, k, v, o = heads(1, 70, 33, dtype=BF16)
    with gk.emulate():
        listing.attention(q, k, v, o, 0.125, mapping=SMALL)
    assert np.abs(o.astype(float) - listing.attention.reference(q, k, v, o, 0.125)).max() < 2e-2


@pytest.mark.kin(1)
def test_stacks_and_sums_of_rows() -> None:
    arrays = [drawn(2, 40, 72), drawn(72, 72), drawn(2), drawn(2, 72), empty(2, 40, 72), empty(2, 40, dtype=F32)]
    checked(listing.batched, arrays, SMALL, 1)
    checked(listing.batched, [arrays[0][:0], arrays[1], arrays[2][:0], arrays[3][:0], empty(0, 40, 72), empty(0, 40, dtype=F32)], SMALL)


@pytest.mark.kin(1)
def test_results_that_are_views() -> None:
    whole = empty(67, 83)
    checked(listing.gemm, [drawn(67, 40), drawn(40, 80), whole[:, 1:81]], SMALL)
    assert np.isnan(whole[:, 0]).all() and np.isnan(whole[:, 81:]).all()
    checked(listing.gemm, [drawn(67, 40), drawn(40, 40), empty(40, 67).T], SMALL)
    wide = empty(67, 96)                               # octets, and the last columns of a tile are the neighbour's
    plan = checked(listing.gemm, [drawn(67, 40), drawn(40, 72), wide[:, 8:80]], SMALL)
    assert "out_d = OctetOut('float16', clipped=True)" in plan.text
    assert np.isnan(wide[:, :8]).all() and np.isnan(wide[:, 80:]).all()


@pytest.mark.kin(1)
def test_heads_of_multiples_of_32() -> None:
    """The stages' lines may have 64 bytes: half of what TMA's have."""
    checked(listing.attention, heads(1, 40, 50, 96), SMALL, 2, scale=0.125, visible=chains.window)
    checked(listing.attention, heads(1, 70, 70, 32), SMALL, 2, scale=0.125)


# -- which kernel it is -----------------------------------------------------------------------------------------------------------

def test_a_gpu_has_what_it_can() -> None:
    arrays = [np.zeros((40, 48), F16), np.zeros((48, 56), F16), np.zeros((40, 56), F16)]
    for device, which in ((H100, False), (A100, True), (RTX, True), (dataclasses.replace(H100, arch=(8, 9)), True),
                          (dataclasses.replace(H100, arch=(10, 0)), True)):
        with assumed(device):
            plan = listing.gemm.plan(*arrays)
            assert plan.is_multistage == which and plan.mapping.kernel == ("multistage" if which else "")
            assert plan.module.SHARED_BYTES <= (device.shared_memory_per_block if not which else device.shared_memory_per_sm // 2)
            assert listing.gemm.plan(*arrays, mapping=plan.mapping).text == plan.text
    hopper = listing.gemm.plan(*arrays, mapping=gk.Mapping(kernel="warp_specialised"))
    assert hopper.text == listing.gemm.plan(*arrays).text and "wgmma" in hopper.text
    turing = dataclasses.replace(H100, name="a T4", arch=(7, 5))
    for mapping in (gk.Mapping(), gk.Mapping(kernel="multistage")):
        with assumed(turing), pytest.raises(gk.ConfigError, match="8.0 or above, but a T4 has 7.5"):
            listing.gemm.plan(*arrays, mapping=mapping)
    with assumed(A100), pytest.raises(gk.ConfigError, match="need compute capability 9.0, but an A100 has 8.0; use"):
        listing.gemm.plan(*arrays, mapping=gk.Mapping(kernel="warp_specialised"))


def test_what_is_said_derives_the_same_text() -> None:
    for program, arrays, more in ((listing.attention, heads(2, 100, 300), dict(scale=0.125, visible=chains.causal)),
                                  (listing.mlp, [drawn(70, 64), drawn(3, 64, 64), drawn(3, 64), empty(70, 64)], {}),
                                  (listing.lstm, [drawn(70, 72), drawn(72, 72), drawn(70, 40), drawn(40, 72), drawn(72), empty(70, 72)], {})):
        with assumed(A100):
            plan = program.plan(*arrays, **more)
            assert program.plan(*arrays, mapping=plan.mapping, **more).text == plan.text
            assert plan.mapping == eval(repr(plan.mapping), {"Mapping": gk.Mapping})


@pytest.mark.kin(1)
def test_rounds_are_split_over_blocks_where_multiprocessors_are_idle() -> None:
    with assumed(A100):
        plan = listing.attention.plan(*heads(1, 16, 2000), 0.125)
    assert plan.mapping.splits == 7 and plan.blocks == 7 and plan.merge is not None    # of 4 rounds each
    checked(listing.attention, heads(1, 16, 200), dataclasses.replace(SMALL, splits=3), 3, scale=0.125)


@pytest.mark.kin(1)
def test_a_text_is_edited_and_run() -> None:
    a, b, d = drawn(70, 72), drawn(72, 80), empty(70, 80, dtype=F32)
    text = listing.gemm.plan(a, b, d, mapping=SMALL).text
    edited = text.replace("out_d.store(acc,", "out_d.store(doubled(acc),") + (
        "\n\ndef doubled(values):\n    return apply(twice, values)\n\n\ndef twice(x, i):\n    return 2.0 * x\n")
    edited = edited.replace("from gemmkit.programs.collectives", "from gemmkit.lang.registers import apply\nfrom gemmkit.programs.collectives")
    with gk.emulate():
        listing.gemm.plan(a, b, d, mapping=SMALL, text=edited).run(dict(a=a, b=b, d=d))
    np.testing.assert_allclose(d, 2 * listing.gemm.reference(a, b, d), atol=1e-3)


# -- refused ----------------------------------------------------------------------------------------------------------------------

A, B, D = np.zeros((40, 48), F16), np.zeros((48, 56), F16), np.zeros((40, 56), F16)


@pytest.mark.parametrize("said, words", [
    (dict(cluster={"m": 2}), "multicast, which this kernel does not"), (dict(ahead=True), "ahead=True, kernel='multistage'"),
    (dict(across=True), "across=True, kernel='multistage'"), (dict(turns=True), "warps need no turns"),
    (dict(blocks={"m": 64}), "so 128 are needed, or 256"), (dict(blocks={"m": 256, "n": 192}), "128 columns fit"),
    (dict(blocks={"k": 48}), "a multiple of 32 up to 256"), (dict(blocks={"n": 96}), "64, 128, 192 or 256"),
    (dict(stages=1), "filled while another is read, so 2"), (dict(blocks={"k": 128}, stages=16), "bytes of shared memory"),
    (dict(splits=2), "use smaller blocks, or gemmkit.matmul"), (dict(descending=True), "tiles of whole rows")])
def test_mappings_of_tiles_that_cannot_be(said: dict[str, Any], words: str) -> None:
    with pytest.raises(gk.ConfigError, match=words):
        listing.gemm.plan(A, B, D, mapping=gk.Mapping(**said, kernel="multistage"))


@pytest.mark.parametrize("said, words", [
    (dict(ahead=True), "done where they stand"), (dict(across=True), "a block has one tile"), (dict(turns=True), "need no turns"),
    (dict(cluster={"m": 2}), "blocks alone"), (dict(stages=1), "filled while another is read"),
    (dict(stages={"q": 2}), "one tile, and copies it once"), (dict(stages={"k": 2, "v": 3}), "k has 2 stages, and others 3"),
    (dict(blocks={"n": 24}), "a multiple of 16"), (dict(blocks={"n": 256}), "registers of a thread"),
    (dict(places={"k": "registers"}), "threads copy to shared memory")])
def test_mappings_of_chains_that_cannot_be(said: dict[str, Any], words: str) -> None:
    with pytest.raises(gk.ConfigError, match=words):
        listing.attention.plan(*heads(1, 70, 90, 128), 0.125, mapping=gk.Mapping(**said, kernel="multistage"))


def test_names_of_kernels() -> None:
    with pytest.raises(gk.ConfigError, match="kernel='mma'.*'warp_specialised' or 'multistage'"):
        gk.Mapping(kernel="mma")
    with pytest.raises(gk.ConfigError, match=r"Mapping\(kernel='multistage'\): only products have it"):
        chains_of_none()


def chains_of_none() -> None:
    @gk.program
    def doubled(x: Any, y: Any) -> None:
        for m in gk.programs.parallel(x.rows):
            y[m] = 2.0 * x[m]

    doubled.plan(np.zeros((4, 8), F32), np.zeros((4, 8), F32), mapping=gk.Mapping(kernel="multistage"))


def test_operands_that_cannot_be_copied() -> None:
    mapping = gk.Mapping(kernel="multistage")
    with pytest.raises(ValueError, match="a is an operand of a product, and cp.async cannot copy it: its rows begin at odd elements"):
        listing.gemm.plan(np.zeros((40, 47), F16), np.zeros((47, 56), F16), D, mapping=mapping)
    with pytest.raises(ValueError, match="b is an operand.*not contiguous along axis 1"):
        listing.gemm.plan(A, np.zeros((56, 48), F16).T, D, mapping=mapping)
    with pytest.raises(ValueError, match="copy_blocks: the derived kernel uses this name"):
        named(gk.Mapping(kernel="multistage"))
    named(gk.Mapping())                                # which no other text has


def named(mapping: gk.Mapping) -> None:
    source = inspect.getsource(listing.gemm.function).replace("b[", "copy_blocks[").replace("b.c", "copy_blocks.c").replace(", b:", ", copy_blocks:")
    scope: dict[str, Any] = {"gp": gk.programs, "Any": Any}
    exec(source.replace("@gk.program\n", ""), scope)
    planned(gk.program(scope["gemm"]), dict(a=A, copy_blocks=B, d=D), mapping, None)


def test_what_the_collectives_say() -> None:
    tile = CopiedTile("float16", 48, 96, 0, 9216, 128)
    assert (tile.line, tile.vectors, tile.all_lines, tile.at_once) == (32, 4, 144, 32)
