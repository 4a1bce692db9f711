from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from gemmkit.runtime import arrays
from gemmkit.runtime import arrays as recognition
from gemmkit.runtime.arrays import (
    ArrayInfo,
    alignment,
    as_stream_handle,
    byte_range,
    current_stream,
    describe,
    empty_like,
    key_of,
    matcher,
    overlaps,
)


def info(shape, strides, dtype="f4", pointer=0x1000, device=0):
    return ArrayInfo(pointer, shape, strides, np.dtype(dtype), device, False, "cai")


class Interface:
    """An array that only has __cuda_array_interface__; its memory is NumPy's."""

    def __init__(self, array, **changes):
        self.array = array
        interface = {key: array.__array_interface__[key] for key in ("shape", "strides", "typestr", "data")}
        self.__cuda_array_interface__ = {"version": 3, **interface, **changes}


class Capsule:
    """An array that only has DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **arguments):
        return self.array.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.fixture
def library(monkeypatch):
    """library(name, **content): a module of that name, as if somebody had imported it."""

    def library(name, **content):
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    monkeypatch.setattr(arrays, "_READERS", {})
    monkeypatch.setattr(recognition, "KEYS", {})
    for cached in (arrays._from_torch, arrays._to_torch, arrays._any_library):
        cached.cache_clear()
    yield library
    for cached in (arrays._from_torch, arrays._to_torch, arrays._any_library):
        cached.cache_clear()


class CupyArray:
    def __init__(self, array, device=0):
        self.shape, self.strides, self.dtype = array.shape, array.strides, array.dtype
        self.data = SimpleNamespace(ptr=array.ctypes.data, device_id=device)


@pytest.fixture
def cupy(library):
    """As much of CuPy as is read."""
    current = SimpleNamespace(device=0)

    class Device:
        def __init__(self, ordinal):
            self.ordinal = ordinal

        def __enter__(self):
            self.before, current.device = current.device, self.ordinal

        def __exit__(self, *_):
            current.device = self.before

    cuda = SimpleNamespace(
        Device=Device,
        device=SimpleNamespace(get_device_id=lambda: current.device),
        get_current_stream=lambda ordinal: SimpleNamespace(ptr=100 + ordinal),
    )
    empty = lambda shape, dtype: CupyArray(np.empty(shape, dtype), current.device)  # noqa: E731
    return library("cupy", ndarray=CupyArray, cuda=cuda, empty=empty)


class TorchTensor:
    def __init__(self, array, dtype, device=0, **state):
        self.array, self.dtype, self.device = array, dtype, f"cuda:{device}"
        self.shape, self.layout, self.is_cuda, self.requires_grad = array.shape, "strided", True, False
        self.conjugated = self.negated = False
        self.ordinal = device
        vars(self).update(state)

    def stride(self):
        return tuple(stride // self.array.itemsize for stride in self.array.strides)

    def data_ptr(self):
        return self.array.ctypes.data

    def get_device(self):
        return self.ordinal

    def is_conj(self):
        return self.conjugated

    def is_neg(self):
        return self.negated


@pytest.fixture
def torch(library):
    """As much of PyTorch as is read; its dtypes are their names."""
    dtypes = {
        name: f"torch.{name}"
        for name in ("float32", "float16", "bfloat16", "float8_e4m3fn", "int8", "complex64")
    }
    module = library(
        "torch",
        Tensor=TorchTensor,
        strided="strided",
        is_grad_enabled=lambda: module.recording,
        recording=True,
        device=lambda kind, ordinal: ordinal,
        empty=lambda shape, dtype, device: TorchTensor(np.empty(shape), dtype, device),
        cuda=SimpleNamespace(current_stream=lambda ordinal: SimpleNamespace(cuda_stream=200 + ordinal)),
        _C=SimpleNamespace(),
        **dtypes,
    )
    return module


# -- NumPy ---------------------------------------------------------------------------------------------------


def test_numpy_arrays_are_on_no_device():
    a = np.zeros((3, 4), np.float32)
    assert describe(a) == ArrayInfo(a.ctypes.data, (3, 4), (4, 1), a.dtype, -1, False, "numpy", None)
    assert describe(a.T).strides == (1, 4)
    assert describe(a[::-1, ::2]).strides == (-4, 2)
    assert describe(a[::-1]).pointer == a.ctypes.data + 2 * 16
    assert describe(np.broadcast_to(np.float32(1), (5, 5))).strides == (0, 0)


def test_subclasses_scalars_and_empty_arrays():
    class Mine(np.ndarray):
        pass

    assert describe(np.zeros((2, 2)).view(Mine)).library == "numpy"
    assert describe(np.zeros(())).strides == ()
    assert describe(np.zeros((0, 7))).shape == (0, 7)


def test_readonly():
    a = np.zeros(3)
    a.flags.writeable = False
    assert describe(a).readonly


def test_small_floats_keep_their_dtype():
    assert describe(np.zeros((2, 2), ml_dtypes.bfloat16)).dtype == ml_dtypes.bfloat16
    assert describe(np.zeros((2, 2), ml_dtypes.float8_e4m3fn)).strides == (2, 1)


def test_strides_that_are_no_whole_elements():
    packed = np.zeros(4, np.dtype([("flag", "i1"), ("value", "f4")]))["value"]
    with pytest.raises(ValueError, match=r"b has strides \(5,\) bytes.*itemsize 4 .*b\.copy\(\)"):
        describe(packed, "b")


def test_foreign_byte_order():
    with pytest.raises(ValueError, match=r"a has dtype >f4, in another byte order"):
        describe(np.zeros(3, ">f4"))


@pytest.mark.parametrize("x", [[1.0, 2.0], 3.0, None, "a", np.ndarray, Interface])
def test_what_is_no_array_is_named_with_what_would_do(x):
    with pytest.raises(TypeError, match=r"b must be a CuPy array, a PyTorch tensor, .* or an object with .*; got builtins\."):
        describe(x, "b")


# -- CuPy ----------------------------------------------------------------------------------------------------


def test_cupy_arrays(cupy):
    a = np.zeros((6, 4), np.float16)
    assert describe(CupyArray(a[:, ::2], device=1)) == ArrayInfo(
        a.ctypes.data, (6, 2), (4, 2), a.dtype, 1, False, "cupy"
    )


def test_a_type_is_looked_up_once(cupy):
    describe(CupyArray(np.zeros(3)))
    assert arrays._READERS == {CupyArray: arrays._read_cupy}


def test_cupy_strides_that_are_no_whole_elements(cupy):
    packed = np.zeros(4, np.dtype([("flag", "i1"), ("value", "f4")]))["value"]
    with pytest.raises(ValueError, match=r"c has strides"):
        describe(CupyArray(packed), "c")


# -- PyTorch -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float32", np.float32),
        ("bfloat16", ml_dtypes.bfloat16),
        ("float8_e4m3fn", ml_dtypes.float8_e4m3fn),
        ("int8", np.int8),
    ],
)
def test_torch_tensors(torch, name, dtype):
    a = np.zeros((6, 4), dtype)
    tensor = TorchTensor(a.T, getattr(torch, name), device=2)
    assert describe(tensor) == ArrayInfo(a.ctypes.data, (4, 6), (1, 4), np.dtype(dtype), 2, False, "torch")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"is_cuda": False, "device": "meta"}, r"a is a tensor on meta; .*\.cuda\(\)"),
        ({"requires_grad": True}, r"a requires a gradient.*a\.detach\(\)"),
        ({"conjugated": True}, r"conjugated view.*a\.resolve_conj\(\)"),
        ({"negated": True}, r"negated view.*a\.resolve_neg\(\)"),
        ({"layout": "sparse_coo"}, r"layout sparse_coo.*to_dense"),
        ({"dtype": "torch.quint4x2"}, r"dtype torch\.quint4x2.*\.to\(\)"),
    ],
)
def test_tensors_that_a_kernel_cannot_read(torch, state, message):
    tensor = TorchTensor(np.zeros((2, 2), np.float32), torch.float32)
    vars(tensor).update(state)
    with pytest.raises(ValueError, match=message):
        describe(tensor)


def test_a_gradient_that_is_not_recorded_does_not_matter(torch):
    torch.recording = False
    tensor = TorchTensor(np.zeros((2, 2), np.float32), torch.float32, requires_grad=True)
    assert describe(tensor).library == "torch"


# -- the interfaces ------------------------------------------------------------------------------------------


def test_cuda_array_interface():
    a = np.zeros((3, 4), np.int16)
    found = describe(Interface(a[:, ::2], stream=7))
    assert found[:4] == (a.ctypes.data, (3, 2), (4, 2), a.dtype)
    assert (found.library, found.readonly, found.stream) == ("cai", False, 7)


def test_cuda_array_interface_without_strides_is_contiguous():
    assert describe(Interface(np.zeros((2, 3, 4), np.complex64))).strides == (12, 4, 1)
    a = Interface(np.zeros((2, 3)))
    del a.__cuda_array_interface__["strides"]
    assert describe(a).strides == (3, 1)


def test_cuda_array_interface_of_readonly_and_empty_memory():
    a = np.zeros(3)
    assert describe(Interface(a, data=(a.ctypes.data, True))).readonly
    assert describe(Interface(np.zeros((0, 4)), data=(0, False)))[:3] == (0, (0, 4), (4, 1))
    assert describe(Interface(np.zeros((0, 4)), data=(None, False))).pointer == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": object()}, "b is a masked array"),
        ({"version": 1}, "version 1 of __cuda_array_interface__"),
        ({"strides": (12, 3)}, r"strides \(12, 3\) bytes.*itemsize 4"),
        ({"typestr": ">f4"}, "another byte order"),
        ({"typestr": "|V2"}, r"typestr '\|V2', which names no number type.*ml_dtypes\.bfloat16"),
    ],
)
def test_cuda_array_interfaces_that_a_kernel_cannot_read(changes, message):
    with pytest.raises(ValueError, match=message):
        describe(Interface(np.zeros((2, 3), np.float32), **changes), "b")


def test_the_arrays_own_dtype_says_what_a_void_typestr_is():
    a = Interface(np.zeros((2, 3), ml_dtypes.bfloat16))
    assert a.__cuda_array_interface__["typestr"].endswith("V2")
    a.dtype = np.dtype(ml_dtypes.bfloat16)
    assert describe(a).dtype == ml_dtypes.bfloat16


def test_dlpack():
    a = np.zeros((3, 4), np.float32)
    assert describe(Capsule(a[:, ::2])) == ArrayInfo(
        a.ctypes.data, (3, 2), (4, 2), a.dtype, -1, False, "dlpack"
    )
    assert describe(Capsule(a)).strides == (4, 1)


def test_dlpack_that_its_owner_refuses():
    swapped = Capsule(np.zeros(3, ">f4"))
    with pytest.raises(ValueError, match=r"b cannot be read through DLPack \(.*\); pass a CuPy array"):
        describe(swapped, "b")


def test_with_several_devices_the_driver_says_which_holds_an_interfaces_memory(gpus, driver_calls):

    gpus(count=2, current=0)
    answers = {0x1000: (0, 1), 0: (1, None)}  # status and ordinal; the null of an empty array is unknown
    driver_calls(cuPointerGetAttribute=lambda attribute, pointer: answers[pointer])
    a = np.zeros((2, 3))
    assert describe(Interface(a, data=(0x1000, False))).device == 1
    assert describe(Interface(a, data=(0, False))).device == 0


# -- matcher -------------------------------------------------------------------------------------------------


def likes(make, others):
    """The matcher of make() knows another make() by its pointer, and none of the others; so do the keys."""
    pointer_of, same = matcher(make()), make()
    assert pointer_of(same) == describe(same).pointer
    key = key_of(make())[1]
    for keyed in (key_of, recognition.KEYS.get(type(same), key_of)):
        assert keyed(same) == (describe(same).pointer, key) and hash(keyed(same)[1]) == hash(key)
    for other in others:
        assert pointer_of(other) is None
        try:
            assert recognition.KEYS.get(type(other), key_of)(other)[1] != key
        except TypeError as error:
            assert "a must be" in str(error)


def test_matcher_of_numpy():
    readonly = np.zeros((2, 3))
    readonly.flags.writeable = False
    others = [np.zeros((3, 2)), np.zeros((3, 2)).T, np.zeros((2, 3), np.float32), readonly, [1.0]]
    likes(lambda: np.zeros((2, 3)), others)


def test_matcher_of_cupy(cupy):
    a = np.zeros((2, 3))
    others = [
        CupyArray(a.T),
        CupyArray(a, device=1),
        CupyArray(a.astype("f4")),
        CupyArray(np.zeros((3, 2)).T),
        a,
    ]
    likes(lambda: CupyArray(np.zeros((2, 3))), others)


def test_matcher_of_torch(torch):
    a = np.zeros((2, 3), np.float32)

    def make(array=a, dtype="torch.float32", **state):
        return TorchTensor(array, dtype, **state)

    def no_strides():
        raise RuntimeError("sparse tensors do not have strides")

    sparse = make(stride=no_strides)
    others = [
        sparse,
        make(a.T),
        make(np.zeros((3, 2), np.float32).T),
        make(dtype="torch.float16"),
        make(device=1),
        make(requires_grad=True),
        make(negated=True),
        a,
    ]
    likes(make, others)
    c = np.zeros((2, 3), np.complex64)
    likes(lambda: make(c, "torch.complex64"), [make(c, "torch.complex64", conjugated=True)])


def test_matcher_of_an_interface_ignores_its_stream():
    likes(lambda: Interface(np.zeros((2, 3)), stream=4), [Interface(np.zeros((3, 2))), np.zeros((2, 3))])
    pointer_of = matcher(Interface(np.zeros((2, 3)), stream=4))
    assert pointer_of(Interface(np.zeros((2, 3)), stream=5)) is not None


def test_matcher_refuses_what_describe_refuses():
    with pytest.raises(TypeError, match="b must be"):
        matcher([1.0], "b")


# -- new arrays ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("like", [np.zeros(3), Capsule(np.zeros(3)), describe(np.zeros(3))])
def test_empty_like_host_memory_is_numpy(like):
    made = empty_like(like, [4, 5], "float16")
    assert type(made) is np.ndarray
    assert (made.shape, made.dtype, made.strides) == ((4, 5), np.float16, (10, 2))


def test_empty_like_cupy_is_on_its_device(cupy):
    for ordinal in (0, 1):
        made = empty_like(CupyArray(np.zeros(3), ordinal), (4, 5), np.float32)
        assert describe(made)[1:6] == ((4, 5), (5, 1), np.float32, ordinal, False)
    assert cupy.cuda.device.get_device_id() == 0


def test_empty_like_torch_maps_the_dtype(torch):
    like = TorchTensor(np.zeros(3, np.float32), torch.float32, device=1)
    made = empty_like(like, (4, 5), ml_dtypes.bfloat16)
    assert (type(made), made.dtype, made.ordinal, made.shape) == (TorchTensor, "torch.bfloat16", 1, (4, 5))
    with pytest.raises(TypeError, match="PyTorch has no dtype complex128"):
        empty_like(like, (4, 5), np.complex128)


def test_empty_like_another_librarys_array_is_cupys_then_pytorchs(torch, library, request):
    other = info((3,), (1,))
    library("cupy")
    sys.modules["cupy"] = None  # an import of it fails
    assert type(empty_like(other, (2,), np.float32)) is TorchTensor
    arrays._any_library.cache_clear()
    request.getfixturevalue("cupy")
    assert type(empty_like(other, (2,), np.float32)) is CupyArray


# -- streams -------------------------------------------------------------------------------------------------


def test_current_streams(cupy, torch):
    assert current_stream("cupy", 1) == 101
    assert current_stream("torch", 1) == 201
    torch._C._cuda_getCurrentRawStream = lambda ordinal: 300 + ordinal
    assert current_stream("torch", 1) == 301
    assert current_stream("cai", 0, 5) == 5
    assert current_stream("cai", 0) == current_stream("dlpack", 0) == 0
    assert current_stream("numba", 0, 6) == 6


@pytest.mark.parametrize(("setting", "handle"), [(0, 0), (1, 2)])
def test_numbas_default_stream(monkeypatch, setting, handle):
    from numba import config

    monkeypatch.setattr(config, "CUDA_PER_THREAD_DEFAULT_STREAM", setting, raising=False)
    assert current_stream("numba", 0) == handle


@pytest.mark.parametrize(
    "stream",
    [
        11,
        SimpleNamespace(__cuda_stream__=lambda: (0, 11)),
        SimpleNamespace(__cuda_stream__=(0, 11)),
        SimpleNamespace(ptr=11),
        SimpleNamespace(cuda_stream=11),
    ],
)
def test_stream_handles(stream):
    assert as_stream_handle(stream) == 11


@pytest.mark.parametrize("stream", [None, True, 1.5, "default", object()])
def test_what_is_no_stream_is_named(stream):
    with pytest.raises(TypeError, match=r"queue must be a CUDA stream.*; got builtins\."):
        as_stream_handle(stream, "queue")


def test_a_negative_handle():
    with pytest.raises(ValueError, match=r"stream must be .*got -1"):
        as_stream_handle(-1)


# -- memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (info((8, 8), (8, 1)), 16),
        (info((8, 8), (1, 8)), 16),
        (info((8, 6), (6, 1)), 8),
        (info((8, 5), (5, 1)), 4),
        (info((8, 5), (5, 1), "f2"), 2),
        (info((1, 5), (5, 1)), 16),  # one row: its stride is never walked
        (info((8, 8), (8, 1), pointer=0x1004), 4),
        (info((8, 8), (8, 1), "f2", pointer=0x1001), 1),
        (info((8, 8), (-8, 1)), 16),
        (info((8, 8), (-6, 1)), 8),
        (info((8, 8), (0, 1)), 16),
        (info((8, 8), (8, 2), "f2"), 4),
        (info((), ()), 16),
        (info((0, 8), (8, 1), pointer=0), 16),
    ],
)
def test_alignment(array, expected):
    assert alignment(array) == expected


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (info((2, 3), (3, 1)), (0x1000, 0x1018)),
        (info((2, 3), (1, 100)), (0x1000, 0x1000 + 4 * 202)),
        (info((3,), (-1,), pointer=0x1008), (0x1000, 0x100C)),
        (info((4,), (0,)), (0x1000, 0x1004)),
        (info((), ()), (0x1000, 0x1004)),
        (info((3, 0), (1, 1)), (0x1000, 0x1000)),
    ],
)
def test_byte_range(array, expected):
    assert byte_range(array) == expected


def test_overlaps():
    whole = np.zeros((8, 8), np.float32)
    assert overlaps(describe(whole), describe(whole))
    assert overlaps(describe(whole), describe(whole.T))
    assert overlaps(describe(whole[3:5]), describe(whole[4:]))
    assert not overlaps(describe(whole[:4]), describe(whole[4:]))
    assert not overlaps(describe(whole), describe(np.zeros(3)))
    assert not overlaps(describe(whole), describe(whole[2:2]))
    assert overlaps(describe(whole[:, ::2]), describe(whole[:, 1::2]))  # conservative


# -- on a GPU ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_real_cupy_arrays():
    import cupy

    a = cupy.zeros((6, 4), cupy.float16)
    stream = cupy.cuda.Stream(non_blocking=True)
    expected = ArrayInfo(a.data.ptr, (6, 4), (4, 1), np.dtype("f2"), a.device.id, False, "cupy")
    assert describe(a) == expected
    assert describe(a.T).strides == (1, 4)
    assert matcher(a)(cupy.zeros((6, 4), cupy.float16)) is not None
    made = empty_like(a, (3, 2), np.complex64)
    assert isinstance(made, cupy.ndarray)
    assert (made.shape, made.dtype) == ((3, 2), np.complex64)
    with stream:
        assert current_stream("cupy", 0) == stream.ptr == as_stream_handle(stream)


@pytest.mark.gpu
def test_real_torch_tensors():
    import torch

    for dtype, expected in (
        (torch.float32, np.float32),
        (torch.bfloat16, ml_dtypes.bfloat16),
        (torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
        (torch.complex64, np.complex64),
    ):
        a = torch.zeros((6, 4), device="cuda").to(dtype)
        assert describe(a.T) == ArrayInfo(a.data_ptr(), (4, 6), (1, 4), np.dtype(expected), 0, False, "torch")
        assert matcher(a)(a.clone()) is not None
        assert matcher(a)(a[:3]) is None
        made = empty_like(a, (3, 2), expected)
        assert (made.dtype, made.device, tuple(made.shape)) == (dtype, a.device, (3, 2))
    z = torch.zeros((2, 2), dtype=torch.complex64, device="cuda")
    for bad, message in (
        (torch.zeros(2, device="cuda", requires_grad=True), r"\.detach\(\)"),
        (z.conj(), "resolve_conj"),
        (z.conj().imag, "resolve_neg"),
        (torch.zeros((2, 2), device="cuda").to_sparse(), "to_dense"),
    ):
        with pytest.raises(ValueError, match=message):
            describe(bad)
    assert describe(torch.zeros(2)).device == -1                # on the host: for the emulator alone
    dense = torch.zeros((2, 2), device="cuda")
    for other in (dense.to_sparse(), torch.zeros(2, 2), dense.clone().requires_grad_(), dense.half()):
        assert matcher(dense)(other) is None
    assert matcher(z)(z.conj()) is None
    assert matcher(z.real)(z.real) == z.data_ptr()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert current_stream("torch", 0) == stream.cuda_stream == as_stream_handle(stream)


@pytest.mark.gpu
def test_real_numba_arrays():
    from numba import cuda

    a = cuda.to_device(np.zeros((6, 4), np.float32))
    pointer = a.__cuda_array_interface__["data"][0]
    assert describe(a) == ArrayInfo(pointer, (6, 4), (4, 1), np.dtype("f4"), 0, False, "numba")
    made = empty_like(a, (3, 2), np.int32)
    assert type(made) is type(a)
    assert (made.shape, made.dtype) == ((3, 2), np.int32)
    stream = cuda.stream()
    assert as_stream_handle(stream) == int(stream) != 0
    assert as_stream_handle(cuda.default_stream()) == 0
    assert describe(a.bind(stream)).stream == int(stream)


@pytest.mark.gpu
def test_one_array_through_every_interface():
    """CuPy's memory as an anonymous owner of each interface would hand it on."""
    import cupy

    a = cupy.zeros((6, 4), cupy.float32)[:, ::2]

    class OnlyInterface:
        __cuda_array_interface__ = a.__cuda_array_interface__

    plain = describe(a)
    assert describe(OnlyInterface())[:6] == plain[:6]
    assert describe(Capsule(a))[:6] == plain[:6]
    assert isinstance(empty_like(Capsule(a), (2,), np.float32), cupy.ndarray)


@pytest.mark.gpu
def test_streams_of_cuda_core():
    from cuda.core import Device

    device = Device()
    device.set_current()                               # a context that another library made current is not enough
    stream = device.create_stream()
    assert as_stream_handle(stream) == int(stream.handle)
