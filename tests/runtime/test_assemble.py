from __future__ import annotations

import os
import stat
from collections import Counter

import pytest

from gemmkit.runtime import compile as module
from gemmkit.runtime import device
from gemmkit.runtime.compile import (
    Assembled,
    AssemblerError,
    ResourceUsage,
    assemble,
    candidates,
    disassemble,
    instruction_counts,
    parse_usage,
)

ARCH = device.target().arch_name

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    96 bytes stack frame, 120 bytes spill stores, 64 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 1024 bytes smem, 564 bytes cmem[0], 8 bytes cmem[2]
ptxas info    : Function properties for helper
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Compile time = 12.433 ms
"""


def script(folder, text, name="ptxas"):
    """An executable file that stands for a tool."""
    file = folder / name
    file.write_text(text)
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)


def too_old(folder):
    """A ptxas that is too old for anything, and notes each time it is asked."""
    return script(
        folder,
        f"#!/bin/sh\necho x >> {folder}/asked\n"
        "echo \"ptxas kernel.ptx, line 9; fatal : Unsupported .version 9.0; current version is '7.0'\" >&2\n"
        "exit 1\n",
    )


@pytest.fixture(autouse=True)
def forgetful(replaced):
    """No test sees which ptxas worked in another."""
    replaced(module, "_working", {})


def test_parse_usage_reads_every_figure():
    assert parse_usage(LOG) == ResourceUsage(
        registers=32,
        spill_stores=124,
        spill_loads=72,
        stack_bytes=96,
        static_shared_memory=1024,
        constant_memory=572,
    )


def test_parse_usage_of_a_text_without_registers_is_an_error():
    with pytest.raises(AssemblerError, match="did not say how many registers"):
        parse_usage("ptxas info    : 0 bytes gmem")


@pytest.mark.compile
def test_assembles_a_kernel(reverse):
    ptx, name = reverse
    assembled = assemble(ptx, ARCH)
    assert assembled.is_cubin
    assert name.encode() in assembled.cubin
    assert "ptxas" in assembled.assembler
    usage = assembled.usage
    assert usage.static_shared_memory == 64 * 4
    assert 0 < usage.registers < 64
    assert usage.spill_stores == usage.spill_loads == usage.stack_bytes == 0
    assert assembled.warnings == ()


@pytest.mark.compile
def test_spills_and_stack_are_seen(compile_ptx):
    from numba import cuda, float32, int32

    def crowd(out, n):
        values = cuda.local.array(64, float32)
        for i in range(64):
            values[i] = out[i] * out[i + 64]
        for i in range(64):
            out[i * n] = values[(i * n) % 64] + values[63 - i]

    ptx, _ = compile_ptx(crowd, float32[::1], int32)
    usage = assemble(ptx, ARCH, options=["-maxrregcount=16"]).usage
    assert usage.stack_bytes >= 64 * 4
    assert usage.spill_stores > 0
    assert usage.spill_loads > 0


def test_warnings_are_the_lines_that_report_lost_speed():
    line = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    assembled = Assembled(b"\x7fELF", parse_usage(LOG), "ptxas", LOG + line + "\n")
    assert assembled.warnings == (line,)


@pytest.mark.compile
def test_an_error_in_the_ptx_comes_with_the_message_of_ptxas(reverse):
    ptx, _ = reverse
    with pytest.raises(AssemblerError, match=r"(?s)ptxas.*failed.*kernel\.ptx, line \d+.*rett") as caught:
        assemble(ptx.replace("ret;", "rett;"), ARCH)
    assert candidates()[0] in str(caught.value)


def test_a_text_that_is_no_ptx_is_named():
    with pytest.raises(AssemblerError, match=r"no \.version line.*'hello'"):
        assemble("hello")


@pytest.mark.compile
def test_a_ptxas_too_old_is_passed_over_and_not_asked_again(reverse, tmp_path, environment):
    environment(GEMMKIT_PTXAS=too_old(tmp_path))
    ptx, _ = reverse
    for _ in range(2):
        assembled = assemble(ptx, ARCH)
        assert str(tmp_path) not in assembled.assembler
    assert (tmp_path / "asked").read_text().split() == ["x"]


@pytest.mark.compile
def test_a_ptxas_that_cannot_run_here_is_passed_over(reverse, tmp_path, environment):
    environment(GEMMKIT_PTXAS=script(tmp_path, "\x7fELF for another machine"))
    assert assemble(reverse[0], ARCH).is_cubin


@pytest.fixture
def tools(monkeypatch):
    """The tools that are found: `tools(ptxas)`, `tools()`."""
    return lambda *found: monkeypatch.setattr(module, "candidates", lambda name: found)


@pytest.mark.compile
def test_when_nothing_assembles_the_error_lists_what_was_tried(reverse, tmp_path, tools, gpus):
    tool = too_old(tmp_path)
    tools(tool)
    gpus(absence="no driver")
    with pytest.raises(AssemblerError, match=r"(?s)current version is '7\.0'.*no driver") as caught:
        assemble(reverse[0], ARCH)
    assert tool in str(caught.value)
    tools()
    with pytest.raises(AssemblerError, match=r"GEMMKIT_PTXAS.*Tried:\s+no ptxas was found"):
        assemble(reverse[0], ARCH)


def test_the_chosen_ptxas_comes_first(tmp_path, environment):
    tool = script(tmp_path, "#!/bin/sh\n")
    environment(GEMMKIT_PTXAS=tool)
    assert candidates()[0] == os.path.realpath(tool)
    environment(GEMMKIT_PTXAS=None)
    assert os.path.realpath(tool) not in candidates()


def test_cuda_home_and_path_are_searched_in_this_order(tmp_path, replaced, environment):
    homes = []
    for name in ("home", "path"):
        (tmp_path / name / "bin").mkdir(parents=True)
        homes.append(os.path.realpath(script(tmp_path / name / "bin", "#!/bin/sh\n")))
    replaced(module, "_wheel_folders", list)
    replaced(module, "_candidates", module._candidates.__wrapped__)
    environment(GEMMKIT_PTXAS=None, CUDA_PATH=None, CUDA_HOME=tmp_path / "home", PATH=tmp_path / "path" / "bin")
    assert list(candidates()[:2]) == homes


@pytest.mark.parametrize("tool", ["ptxas", "nvdisasm"])
def test_a_chosen_tool_that_is_not_there_is_an_error(tool, environment):
    environment(**{f"GEMMKIT_{tool.upper()}": "/nowhere/tool"})
    with pytest.raises(AssemblerError, match=rf"GEMMKIT_{tool.upper()}='/nowhere/tool' is not an executable"):
        candidates(tool)


@pytest.mark.compile
def test_disassembled_code_has_the_kernels_instructions(reverse):
    counts = instruction_counts(disassemble(assemble(reverse[0], ARCH).cubin))
    assert counts["BAR"] == 1
    assert counts["STS"] == 1
    assert counts["LDS"] == 1
    assert counts["STG"] == 1
    assert counts["EXIT"] >= 1
    assert counts["LDL"] == 0


def test_only_a_cubin_is_disassembled():
    with pytest.raises(AssemblerError, match="which no cubin does"):
        disassemble(b".version 9.0")


def test_an_nvdisasm_that_fails_is_quoted(tmp_path, tools):
    tool = script(tmp_path, "#!/bin/sh\necho not today >&2\nexit 3\n", "nvdisasm")
    tools(tool)
    with pytest.raises(AssemblerError, match="not today"):
        disassemble(b"\x7fELF")


@pytest.mark.compile
def test_ptx_counts_of_a_compiled_kernel(reverse):
    counts = instruction_counts(reverse[0], full=True)
    assert counts["bar.sync"] == 1
    assert counts["st.shared.f32"] == 1
    assert counts["st.global.f32"] == 1
    assert counts["ret"] == 1
    assert not any("param_" in opcode or opcode.startswith(".") for opcode in counts)


def test_ptx_counts_of_everything_that_is_no_instruction():
    """Directives, comments, labels, predicates, braces, and several statements to a line."""
    ptx = """
    // add.s32 in a comment; twice;
    .version 9.0
    .target sm_90a
    .global .align 4 .b8 table[4] = {1, 2, 3, 4};
    .visible .entry k(.param .u64 k_param_0)
    .maxntid 128, 1, 1
    {
        .reg .pred %p<2>;
        .loc 1 20 0
        ld.param.u64 %rd1, [k_param_0];
        { .reg .pred p; setp.ne.b32 p, %r1, 0; @p mbarrier.arrive.shared::cta.b64 _, [%r1]; }
    $L__BB0_1:
        @!%p1 bra $L__BB0_1;
        { // callseq 0, 0
        call.uni helper, (%r1);
        }
        ret;
    }
    .func helper(.param .b32 x) { add.s32 %r1, %r1, %r1; add.u32 %r1, %r1, %r1; ret; }
    """
    assert instruction_counts(ptx) == Counter(ld=1, setp=1, mbarrier=1, bra=1, call=1, ret=2, add=2)
    full = instruction_counts(ptx, full=True)
    assert full["mbarrier.arrive.shared::cta.b64"] == full["add.s32"] == full["call.uni"] == 1


def test_sass_counts_skip_predicates_and_encodings():
    sass = """
        .text.k:
            /*0000*/                   LDC R1, c[0x0][0x28] ;           /* 0x00000a00ff017b82 */
                                                                        /* 0x000fe20000000800 */
            /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
            /*0020*/              @UP1 UIADD3 UR4, UR4, 0x1, URZ ;
            /*0030*/                   HGMMA.64x256x16.F32 R24, gdesc[UR8], R24, gsb0 ;
        .L_x_1:
            /*0040*/                   BRA `(.L_x_1);
    """
    assert instruction_counts(sass) == Counter(LDC=1, LDG=1, UIADD3=1, HGMMA=1, BRA=1)
    assert instruction_counts(sass, full=True)["HGMMA.64x256x16.F32"] == 1


@pytest.mark.gpu
def test_the_driver_assembles_when_no_ptxas_is_there(reverse, tools):
    import cupy

    from gemmkit.runtime.launch import load

    tools()
    ptx, name = reverse
    assembled = assemble(ptx, ARCH)
    assert not assembled.is_cubin
    assert "driver" in assembled.assembler
    assert assembled.usage.static_shared_memory == 64 * 4
    assert assembled.usage.registers > 0
    out = cupy.full(64, cupy.nan, cupy.float32)
    parameters = ["u64", "u64", "i64", "i64", "u64", "i64", "i64", "i32", "f32"]
    bound = load(assembled.cubin, name).bind((1,), (64,), 0, parameters)
    bound.launch(cupy.cuda.get_current_stream().ptr, (0, 0, 64, 4, out.data.ptr, 64, 4, 64, 2.0))
    assert (out.get() == 2.0 * cupy.arange(63, -1, -1).get()).all()


@pytest.mark.gpu
def test_an_error_in_the_ptx_comes_with_the_message_of_the_driver(reverse, tools):
    tools()
    with pytest.raises(AssemblerError, match=r"(?s)the driver's assembler failed.*rett"):
        assemble(reverse[0].replace("ret;", "rett;"), ARCH)
