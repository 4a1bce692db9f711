"""Plans for C and C++ (`Plan.export`): headers that compilers take, launches that tell the driver what gemmkit's own tell it,
and on a GPU the example's result."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues, layouts
from gemmkit.plans.launch import Launch
from gemmkit.runtime.device import H100, PARAMETER_FORMATS, assumed, parameter_struct
from gemmkit.runtime.tensor_maps import Encoder
from tests.support.machines import MACHINES, whole

F16, F32 = np.dtype("f2"), np.dtype("f4")


def _include() -> Path:
    """A folder with cuda.h: of NVIDIA's wheels, of Triton's, or of a toolkit."""
    found = [Path("/usr/local/cuda/include"), *Path("/usr/local").glob("cuda-*/include")]
    for package, inside in (("nvidia", ("cu13/include", "cuda_runtime/include")), ("triton", ("backends/nvidia/include",))):
        spec = importlib.util.find_spec(package)
        found += [Path(root) / one for root in (spec and spec.submodule_search_locations) or () for one in inside]
    return next(folder for folder in found if (folder / "cuda.h").exists())


def _compile(source: Path, *flags: str) -> None:
    is_c = source.suffix == ".c"
    compiler = shutil.which("gcc" if is_c else "g++") or shutil.which("cc" if is_c else "c++")
    assert compiler is not None, "a C and a C++ compiler are needed"
    how = ["-std=c11" if is_c else "-std=c++11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I", str(source.parent)]
    made = subprocess.run([compiler, *how, "-isystem", str(_include()), str(source), *flags], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr


Made = tuple[tuple[Any, ...], dict[str, Any], Callable[..., np.ndarray]]


def _biased(rng: np.random.Generator) -> Made:
    a, b, bias = whole(rng, (264, 72), F16), whole(rng, (72, 136), F16), whole(rng, (136,), F16)
    return (a, b), dict(epilogue=epilogues.Bias(bias)), lambda a, b: a @ b + bias


def _fpu(rng: np.random.Generator) -> Made:
    a, b, c = whole(rng, (65, 33), F32), whole(rng, (33, 70), F32), whole(rng, (65, 70), F32)
    return (a, b, c), dict(epilogue=epilogues.Scale(np.float32(0.5))), lambda a, b, c: (a @ b + c) / 2


def _mixed(rng: np.random.Generator) -> Made:
    return (whole(rng, (256, 128), F16), whole(rng, (256, 128), F16).T, whole(rng, (256, 256), F32)), {}, lambda a, b, c: a @ b + c


def _split_k(rng: np.random.Generator) -> Made:
    return (whole(rng, (64, 4096), F16, 1), whole(rng, (4096, 64), F16, 1)), {}, lambda a, b: a @ b


def _normalised(rng: np.random.Generator) -> Made:
    def of(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        d = a.astype("f8") @ b
        return d / np.sqrt((d * d).mean(1, keepdims=True) + 1e-5)

    return (whole(rng, (64, 64), F16), whole(rng, (64, 4096), F16)), dict(
        epilogue=epilogues.RMSNorm(np.ones(4096, F16), 1e-5)), of


def _stack(rng: np.random.Generator) -> Made:
    a, b, c = whole(rng, (3, 128, 64), F16), whole(rng, (3, 64, 128), F16), whole(rng, (128, 128), F16)
    return (a, b), dict(epilogue=epilogues.Residual(c)), lambda a, b: a @ b + c


def _few_rows(rng: np.random.Generator) -> Made:
    return (whole(rng, (4, 1024), F16, 1), whole(rng, (1024, 1024), F16, 1).T), {}, lambda a, b: a @ b


MADE: dict[str, Callable[[np.random.Generator], Made]] = {
    "biased": _biased, "fpu": _fpu, "mixed": _mixed, "split_k": _split_k, "normalised": _normalised, "stack": _stack,
    "few_rows": _few_rows,
}


def _plan(name: str, rng: np.random.Generator) -> tuple[Any, tuple[Any, ...], np.ndarray]:
    arrays, keywords, expected = MADE[name](rng)
    return gk.plan(*arrays, **keywords), arrays, expected(*(x.astype("f8") for x in arrays))


def _exported(name: str, folder: Path, rng: np.random.Generator) -> tuple[Any, list[Path]]:
    with assumed(H100), gk.emulate(mapping="device"):
        run, _, _ = _plan(name, rng)
        return run, run.export(folder / "made", name)


# -- what the driver is told ------------------------------------------------------------------------------------------

#: A driver that writes down what it is told, as lines of JSON.
_DRIVER = r"""
#include "%(name)s.h"
static int made = 0;
CUresult cuModuleLoad(CUmodule *m, const char *path) { printf("{\"load\": \"%%s\"}\n", path); *m = (CUmodule)(size_t)++made; return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule m) { (void)m; return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) {
    printf("{\"entry\": \"%%s\"}\n", name); *f = (CUfunction)m; return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int value) {
    (void)f; printf("{\"attribute\": %%d, \"value\": %%d}\n", (int)a, value); return CUDA_SUCCESS; }
static void numbers(const char *name, const cuuint64_t *of, unsigned count) {
    printf(", \"%%s\": [", name);
    for (unsigned n = 0; n < count; n++) printf("%%s%%llu", n ? ", " : "", (unsigned long long)of[n]);
    printf("]");
}
static void narrow(const char *name, const cuuint32_t *of, unsigned count) {
    cuuint64_t wide[5];
    for (unsigned n = 0; n < count; n++) wide[n] = of[n];
    numbers(name, wide, count);
}
static unsigned maps = 0;
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *at, const cuuint64_t *dims,
    const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps, CUtensorMapInterleave interleave,
    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    memset(map, 0, sizeof *map);
    maps++;
    memcpy(map, &maps, sizeof maps);
    printf("{\"map\": %%u, \"at\": %%llu, \"kind\": [%%d, %%d, %%d, %%d, %%d]", maps, (unsigned long long)(size_t)at, (int)type, (int)interleave,
           (int)swizzle, (int)promotion, (int)fill);
    numbers("dims", dims, rank); numbers("strides", strides, rank - 1); narrow("box", box, rank); narrow("steps", steps, rank);
    printf("}\n");
    return CUDA_SUCCESS;
}
static const unsigned counts[] = {%(counts)s};
static const unsigned sizes[] = {%(sizes)s};
static unsigned launched = 0, parameter = 0;
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **parameters, void **extra) {
    printf("{\"launch\": %%d, \"function\": %%d, \"grid\": [%%u, %%u, %%u], \"block\": [%%u, %%u, %%u], \"shared\": %%u, \"attributes\": {", extra == NULL,
           (int)(size_t)f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ, c->sharedMemBytes);
    for (unsigned n = 0; n < c->numAttrs; n++)
        printf("%%s\"%%d\": [%%u, %%u, %%u]", n ? ", " : "", (int)c->attrs[n].id, c->attrs[n].value.clusterDim.x,
               c->attrs[n].value.clusterDim.y, c->attrs[n].value.clusterDim.z);
    printf("}, \"values\": [");
    for (unsigned n = 0; n < counts[launched]; n++) {
        printf("%%s\"", n ? ", " : "");
        for (unsigned b = 0; b < sizes[parameter]; b++) printf("%%02x", ((unsigned char *)parameters[n])[b]);
        printf("\""), parameter++;
    }
    printf("]}\n"), launched++;
    return CUDA_SUCCESS;
}
int main(void) {
    %(name)s_kernels k;
    const CUresult status = %(name)s_load(&k, "here");
    if (status != CUDA_SUCCESS) return 1;
    if (%(name)s_run(&k, NULL%(misaligned)s) != CUDA_ERROR_INVALID_VALUE) return 2;
    return %(name)s_run(&k, NULL%(given)s) != CUDA_SUCCESS;
}
"""


def _launches(run: Any) -> tuple[list[Launch], list[str]]:
    """A plan's launches as gemmkit binds them, with the arrays of components brought as an export brings them."""
    compiled = run._compiled
    slots = []
    for part, span in compiled.ranges.items():
        leaves = compiled.parts[part].leaves
        addresses = {info.pointer for info in compiled.parts[part].arrays if info.library != "workspace"}
        slots += [span.start + n for n, (code, value) in enumerate(leaves) if code == "u64" and value in addresses]
    first = compiled.launch(tuple(slots))
    return [first, *first.behind], [str(slot) for slot in slots]


@pytest.mark.parametrize("suffix", ["c", "cpp"])
@pytest.mark.parametrize("name", MADE)
def test_a_launch_tells_the_driver_what_gemmkits_own_tells_it(name: str, suffix: str, tmp_path: Path, rng: np.random.Generator) -> None:
    run, files = _exported(name, tmp_path, rng)
    launches, slots = _launches(run)
    kernels = [one.kernel for one in launches]
    spaces = launches[0].spaces
    assert [path.name for path in files] == [f"{name}.h", *(f"{name}_{n}.cubin" for n in range(len(kernels))), f"{name}_example.cpp"]
    addresses = {which: 0x10_0000 * (which + 1) for which in range(4 + len(slots) + len(spaces))}
    start = 0x70_0000_0000
    for n, space in enumerate(spaces, 4 + len(slots)):
        addresses[n], start = start, start + -(-space.nbytes // 256) * 256
    taken = [which for which in range(4 + len(slots)) if any(put.which == which for one in launches for put in one.puts)]
    given = [addresses[which] for which in taken] + [0x70_0000_0000] * bool(spaces)
    sizes = [struct.calcsize("=" + PARAMETER_FORMATS[code][0]) for one in kernels for code in one.formats]
    program = tmp_path / f"program.{suffix}"
    program.write_text(_DRIVER.replace("CUresult cu", 'extern "C" CUresult cu' if suffix == "cpp" else "CUresult cu") % dict(
        name=name, given="".join(f", {at}ull" for at in given), misaligned="".join(f", {at + 2}ull" for at in given),
        counts=", ".join(str(len(one.formats)) for one in kernels), sizes=", ".join(map(str, sizes))))
    _compile(program, "-I", str(tmp_path / "made"), "-o", str(tmp_path / "program"))
    told = [json.loads(line) for line in subprocess.run([tmp_path / "program"], capture_output=True, text=True, check=True).stdout.splitlines()]
    assert [one["load"] for one in told if "load" in one] == [f"here/{path.name}" for path in files[1:-1]]
    assert {one["entry"] for one in told if "entry" in one} == {"gemmkit_kernel"}
    assert [(one["attribute"], one["value"]) for one in told if "attribute" in one] == [(8, one.shared_bytes) for one in kernels]
    maps = {one["map"]: one for one in told if "map" in one}
    seen = [one for one in told if "launch" in one]
    assert len(seen) == len(launches) and len(maps) == sum(
        isinstance(put.encoder, Encoder) for one in launches for put in one.puts)
    for number, (launch, one) in enumerate(zip(launches, seen), 1):
        kernel = launch.kernel
        assert (one["launch"], one["function"], one["shared"]) == (1, number, kernel.shared_bytes)
        assert one["grid"] == [kernel.blocks, 1, 1] and one["block"] == [kernel.threads, 1, 1]
        wanted = {"4": [kernel.cluster, 1, 1]} if kernel.cluster > 1 else {}
        wanted |= {"6": [1, 0, 0]} if kernel.dependent else {}
        assert one["attributes"] == (wanted | ({"2": [1, 0, 0]} if kernel.waits else {}))
        puts = {put.slot: put for put in launch.puts}
        for slot, (code, value, found) in enumerate(zip(kernel.formats, kernel.values, map(bytes.fromhex, one["values"]))):
            put = puts.get(slot)
            if put is not None and isinstance(put.encoder, Encoder):
                _check_map(maps[int.from_bytes(found[:4], "little")], put.encoder, addresses[put.which] + put.offset)
                continue
            value = value if put is None else addresses[put.which] + put.offset
            assert found == struct.pack("=" + PARAMETER_FORMATS[code][0], value), (slot, code, value, found)


def _check_map(told: Any, encoder: Encoder, address: int) -> None:
    from cuda.bindings import driver

    dtype, dims, strides, box, swizzle, window = encoder.arguments
    kinds = {"float16": "FLOAT16", "float32": "FLOAT32"}
    kind = getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kinds[dtype.name]}")
    swizzled = getattr(driver.CUtensorMapSwizzle, "CU_TENSOR_MAP_SWIZZLE_" + (f"{swizzle}B" if swizzle else "NONE"))
    assert told["at"] == address and told["kind"] == [int(kind), 0, int(swizzled), 3, 0] and window is None
    assert told["dims"] == list(dims) and told["box"] == list(box) and told["steps"] == [1] * len(box)
    assert told["strides"] == [step if extent > 1 else 16 for step, extent in zip(strides, dims[1:])]


def _parameters_of(cubin: bytes) -> list[int]:
    """The size of each parameter, as the cubin itself says (EIATTR_KPARAM_INFO of its .nv.info section)."""
    sections_at, = struct.unpack_from("<Q", cubin, 40)
    entry_size, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, sections_at + n * entry_size) for n in range(count)]
    texts = headers[names][4]
    found = {}
    for name, _, _, _, at, size in headers:
        title = cubin[texts + name:cubin.index(b"\0", texts + name)]
        if title != b".nv.info.gemmkit_kernel":
            continue
        here = at
        while here < at + size:
            form, attribute, length = struct.unpack_from("<BBH", cubin, here)
            here += 4
            if attribute == 0x17:
                _, ordinal, _, packed = struct.unpack_from("<IHHI", cubin, here)
                found[ordinal] = packed >> 18
            here += length if form == 4 else 0
    return [found[n] for n in sorted(found)]


@pytest.mark.parametrize("name", MADE)
def test_members_are_the_cubins_parameters(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """One for each, of its size, at the launcher's offsets. The driver is given pointers to them: in its own buffer a tensor
    map may lie at another offset."""
    run, files = _exported(name, tmp_path, rng)
    launches, _ = _launches(run)
    asserted = re.findall(r"offsetof\(\w+_(\d)_parameters, \w+\) == (\d+)", files[0].read_text())
    for n, launch in enumerate(launches):
        sizes = [struct.calcsize("=" + PARAMETER_FORMATS[code][0]) for code in launch.kernel.formats]
        assert _parameters_of(files[1 + n].read_bytes()) == sizes
        _, offsets = parameter_struct(tuple(launch.kernel.formats))
        assert [int(at) for number, at in asserted if int(number) == n] == list(offsets)


@pytest.mark.parametrize("name", MADE)
def test_the_example_compiles(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    _, files = _exported(name, tmp_path, rng)
    _compile(files[-1], "-c", "-o", str(tmp_path / "example.o"))


# -- what is refused --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["", "a b", "2d", "int", "class", "a-b"])
def test_a_name_that_is_no_word_of_c_is_refused(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    with gk.emulate():
        run, _, _ = _plan("fpu", rng)
    with pytest.raises(ValueError, match="a word of C is needed"):
        run.export(tmp_path, name)
    assert not list(tmp_path.iterdir())


def test_what_has_no_kernel_or_no_folder_is_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    (tmp_path / "file").write_text("")
    a = np.ones((8, 8), F32)
    with gk.emulate():
        with pytest.raises(ValueError, match="has no work, so it has no kernel"):
            gk.plan(a[:0], a).export(tmp_path / "none")
        with pytest.raises(ValueError, match="is a file; a folder is needed"):
            gk.plan(a, a).export(tmp_path / "file")
        with pytest.raises(ValueError, match=r"a has the strides \(-8, 1\); strides of 0 or more are needed"):
            gk.plan(a[::-1], a).export(tmp_path / "none")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_arrays_of_a_layout_are_arguments(tmp_path: Path, rng: np.random.Generator) -> None:
    with assumed(H100), gk.emulate(mapping="device"):
        run = gk.plan(layouts.DiagonalMatrix(whole(rng, (64,), F16)), whole(rng, (64, 64), F16))
        text = run.export(tmp_path, "scaled")[0].read_text()
    assert "scaled_run(const scaled_kernels *k, CUstream stream, CUdeviceptr out, CUdeviceptr a, CUdeviceptr b)" in text
    assert "   a: float16, shape (64,), strides (1,) elements; at a multiple of" in text


# -- on a GPU -----------------------------------------------------------------------------------------------------------

def _driver() -> str:
    """The libcuda that this process has loaded."""
    return next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libcuda.so" in line)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MADE)
def test_the_examples_result_is_right(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """Built with a C++ compiler and libcuda, run in a process of its own."""
    machine = MACHINES["gpu"]
    arrays, keywords, expected = MADE[name](rng)
    held: list[np.ndarray] = []

    def there(x: Any) -> Any:
        held.append(x)
        return machine.array(x)

    if (epilogue := keywords.get("epilogue")) is not None:
        fields = {field: there(value) if isinstance(value, np.ndarray) else value for field, value in vars(epilogue).items()
                  if field in type(epilogue).__dataclass_fields__}
        keywords = dict(epilogue=type(epilogue)(**fields))
    run = gk.plan(*map(machine.array, arrays), **keywords)
    files = run.export(tmp_path, name)
    program = tmp_path / "example"
    _compile(files[-1], "-o", str(program), _driver())
    paths = []
    for n, array in enumerate([*arrays, *held]):
        paths.append(tmp_path / f"{n}.bin")
        paths[-1].write_bytes(array.tobytes("A"))
    subprocess.run([program, tmp_path, *paths, tmp_path / "out.bin"], check=True, timeout=60)
    wanted = expected(*(x.astype("f8") for x in arrays))
    like = run(*map(machine.array, arrays))
    out = np.frombuffer((tmp_path / "out.bin").read_bytes(), machine.numpy(like).dtype).reshape(wanted.shape)
    assert np.array_equal(out, machine.numpy(like))
    assert np.allclose(out, wanted, rtol=2e-3, atol=0)
