"""The interpreter's control flow and memory: threads that part and meet, and what they may not do."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx_machine.faults import Fault, PtxError
from tests.ptx_machine.launch import run_ptx
from tests.ptx_machine.memory import Array

HEAD = """
.visible .entry run(.param .u64 run_param_0, .param .u32 run_param_1)
{
    .reg .pred %p<9>;
    .reg .b16 %h<9>;
    .reg .b32 %r<9>;
    .reg .b64 %d<9>;
    .shared .align 16 .b8 kept[256];
    .local .align 8 .b8 depot[16];
    ld.param.u64 %d1, [run_param_0];
    ld.param.u32 %r1, [run_param_1];
    mov.u32 %r2, %tid.x;
    mad.wide.u32 %d2, %r2, 4, %d1;
    mul.lo.u32 %r7, %r2, 4;
    mov.u32 %r6, kept;
    add.u32 %r6, %r6, %r7;
"""


def run(body: str, out: np.ndarray, number: int = 0, threads: int = 64, blocks: int = 1, **how: bool) -> np.ndarray:
    run_ptx(f"{HEAD}{body}\n}}", threads, blocks, [out, number], [Array(out, "out", **{"is_output": True, **how})])
    return out


def words(count: int = 64) -> np.ndarray:
    raw = np.zeros(count + 16, np.uint32)
    at = -raw.ctypes.data % 64 // 4
    return raw[at:at + count]


def test_loops_of_different_lengths_and_early_ends() -> None:
    """Thread t adds 1 t times; those beyond 40 end before the barrier, which waits for no thread that has ended."""
    out = run("""
    mov.u32 %r3, 0;
    setp.gt.u32 %p1, %r2, 40;
    @%p1 ret;
    mov.u32 %r4, 0;
$loop:
    setp.ge.u32 %p2, %r4, %r2;
    @%p2 bra $done;
    add.u32 %r3, %r3, 1;
    add.u32 %r4, %r4, 1;
    bra.uni $loop;
$done:
    bar.sync 0;
    st.global.u32 [%d2], %r3;
    ret;""", words())
    assert out[:41].tolist() == list(range(41)) and not out[41:].any()


def test_a_barrier_orders_and_a_warp_waits_for_its_lanes() -> None:
    """Threads that part before a barrier and a shuffle (the one path behind the other in the text, and jumping back) meet there."""
    out = run("""
    and.b32 %r3, %r2, 1;
    setp.eq.u32 %p1, %r3, 0;
    @%p1 bra $even;
    mov.u32 %r4, 100;
    bra.uni $meet;
$back:
    shfl.sync.idx.b32 %r5|%p2, %r4, 1, 31, -1;
    st.shared.u32 [%r6], %r5;
    bar.sync 0;
    xor.b32 %r7, %r2, 33;
    shl.b32 %r7, %r7, 2;
    mov.u32 %r8, kept;
    add.u32 %r8, %r8, %r7;
    ld.shared.u32 %r5, [%r8];
    add.u32 %r5, %r5, %r4;
    st.global.u32 [%d2], %r5;
    ret;
$even:
    mov.u32 %r4, 7;
    bra.uni $back;
$meet:
    bra.uni $back;""", words())
    assert out.tolist() == [107, 200] * 32


def test_registers_of_threads_that_do_not_run_stay() -> None:
    out = run("""
    mov.u32 %r3, 5;
    setp.lt.u32 %p1, %r2, 10;
    @%p1 mov.u32 %r3, %r2;
    @!%p1 st.global.u32 [%d2], %r3;
    @%p1 st.global.u32 [%d2], %r3;
    ret;""", words())
    assert out.tolist() == [*range(10), *[5] * 54]


def test_local_and_generic_memory() -> None:
    out = run("""
    mov.u64 %d3, depot;
    cvta.local.u64 %d4, %d3;
    st.local.u32 [%d3+4], %r2;
    ld.u32 %r3, [%d4+4];
    st.global.u32 [%d2], %r3;
    ret;""", words())
    assert out.tolist() == list(range(64))


def test_bytes_and_vectors() -> None:
    """Narrow values are extended by their sign; a vector is in order."""
    out = words()
    out[...] = np.arange(64) * 0x01010101 + 0x80
    before = out.copy()
    run("""
    ld.global.s8 %h1, [%d2];
    ld.global.v2.u16 {%h2, %h3}, [%d2];
    cvt.s32.s16 %r3, %h1;
    mov.b32 %r4, {%h2, %h3};
    xor.b32 %r3, %r3, %r4;
    st.global.u32 [%d2], %r3;
    ret;""", out)
    assert out.tolist() == (before.view(np.int8)[::4].astype(np.int32).view(np.uint32) ^ before).tolist()


FAULTS = {
    "out of bounds, by 1 threads": "ld.global.u32 %r3, [%d2+4];",
    "is in no array": "ld.global.u32 %r3, [%d2+4096];",
    "misaligned": "ld.global.u32 %r3, [%d2+2];",
    "written, and may not be": "st.global.u32 [%d2], %r2;",
    "shared memory: .* nothing has written there": "ld.shared.u32 %r3, [%r6];",
    "local memory: .* nothing has written there": "ld.local.u32 %r3, [depot];",
    "shared memory: 0x.* out of bounds": "st.shared.u32 [%r6+4096], %r2;",
    "at different barriers": "setp.lt.u32 %p1, %r2, 32;\n@%p1 bra $a;\nbar.sync 0;\nret;\n$a:\nbar.sync 0;\n",
    "run past the program's end": "setp.lt.u32 %p1, %r2, 32;\n@%p1 ret;\nbra.uni $end;\nret;\n$end:",
    "(?s)nobody can go on:.*threads wait for the rest of their warps at": (
        "setp.lt.u32 %p1, %r2, 8;\n@%p1 bra $a;\nbar.sync 0;\n$a:\nshfl.sync.idx.b32 %r3, %r2, 0, 31, -1;"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault: str) -> None:
    """With the instruction's line in the PTX."""
    with pytest.raises(Fault, match=fault) as caught:
        end = "" if fault.startswith("run past") else "\nret;"
        run(FAULTS[fault] + end, words(), is_output="may not" not in fault)
    assert "PTX line " in str(caught.value)


def test_padding_between_rows_is_out_of_bounds() -> None:
    """To the byte; but for arrays whose words may be read wholly, where it is poison."""
    matrix = words(80).reshape(8, 10)[:, :7]
    text = f"{HEAD}ld.global.u32 %r3, [%d1+28];\nret;\n}}"
    with pytest.raises(Fault, match="out of bounds"):
        run_ptx(text, 32, 1, [matrix, 0], [Array(matrix, "m")])
    narrow = words(80).view(np.uint16)[1:40]
    text = f"{HEAD}ld.global.u32 %r3, [%d1+-2];\nret;\n}}"
    with pytest.raises(Fault, match="out of bounds"):
        run_ptx(text, 32, 1, [narrow, 0], [Array(narrow, "n")])
    run_ptx(text, 32, 1, [narrow, 0], [Array(narrow, "n", reads_words=True)])


def test_what_is_written_goes_back_to_views() -> None:
    """Of arrays that share memory each sees the other's writes; what is not written stays."""
    base = np.zeros((6, 8), np.uint32)
    base[...] = np.arange(48).reshape(6, 8)
    view = base[::-2, 1:5]
    expected = base.copy()
    text = f"{HEAD}setp.lt.u32 %p1, %r2, 4;\nld.global.u32 %r3, [%d2];\nadd.u32 %r3, %r3, 1000;\n@%p1 st.global.u32 [%d2], %r3;\nret;\n}}"
    with pytest.raises(Fault, match="out of bounds|in no array"):
        run_ptx(text, 32, 1, [view, 0], [Array(view, "v", is_output=True)])
    text = text.replace("ld.global", "@%p1 ld.global")
    run_ptx(text, 32, 1, [view, 0], [Array(view, "v", is_output=True, is_written=False), Array(base[5], "row")])
    expected[5, 1:5] += 1000
    assert np.array_equal(base, expected)


def test_bad_launches() -> None:
    for threads, given, words_of in ((48, [words(), 0], "whole warps"), (64, [words()], "1 parameters given for 2")):
        with pytest.raises(PtxError, match=words_of):
            run_ptx(f"{HEAD}ret;\n}}", threads, 1, given, [given[0]])


SENDS = """.visible .entry sends(.param .u64 sends_param_0)
{{
    .reg .b32 %r<8>;
    .reg .b64 %rd<3>;
    .extern .shared .align 16 .b8 memory[];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, memory;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra $made;
    mbarrier.init.shared::cta.b64 [%r2], 1;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {nbytes};
$made:
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    mov.u32 %r3, %cluster_ctarank;
    xor.b32 %r4, %r3, 1;
    shl.b32 %r5, %r1, 2;
    add.u32 %r5, %r5, %r2;
    mad.lo.u32 %r6, %r3, 100, %r1;
    {{ .reg .b32 there, barrier; mapa.shared::cluster.u32 there, %r5, %r4; mapa.shared::cluster.u32 barrier, %r2, %r4;
       st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [there+16], %r6, [barrier]; }}
    {{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%r2], 0; @done bra over; bra again; over: }}
    ld.shared.u32 %r7, [%r5+16];
    ld.param.u64 %rd1, [sends_param_0];
    mad.lo.u32 %r6, %r3, 32, %r1;
    mad.wide.u32 %rd1, %r6, 4, %rd1;
    st.global.u32 [%rd1], %r7;
    {again}
    ret;
}}"""


def sent(nbytes: int, again: str = "") -> np.ndarray:
    out = np.full(64, 7, np.uint32)
    text = SENDS.format(nbytes=nbytes, again=again).replace(".reg .b64 %rd<3>;", ".reg .b64 %rd<3>; .reg .pred %p<3>;")
    run_ptx(text, 32, 2, [out], [out], shared_bytes=16 + 128, cluster=2)
    return out


def test_mbarriers_count_the_bytes_that_other_blocks_send() -> None:
    assert sent(128).tolist() == [*range(100, 132), *range(32)]


def test_more_arrivals_than_a_phase_has_are_a_fault() -> None:
    with pytest.raises(Fault, match="here is one more"):
        sent(128, "mbarrier.arrive.shared::cta.b64 _, [%r2]; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 4; "
                  "mbarrier.arrive.shared::cta.b64 _, [%r2];")


def test_a_place_without_a_barrier_is_a_fault() -> None:
    with pytest.raises(Fault, match="there is no mbarrier at"):
        sent(128, "mbarrier.arrive.shared::cta.b64 _, [%r2+8];")
