"""What vLLM's pynccl.py and pynccl_wrapper.py import, as far as they use it: torch's tensors on the CUDA driver that
the environment names, and modules of vLLM. Loads those two files themselves."""

import contextlib
import ctypes
import enum
import importlib.util
import logging
import os
import pathlib
import pickle
import sys
import time
import types

_driver = ctypes.CDLL(os.environ["DOORBELL_CUDA_LIBRARY"])
_DEVICES = {}


def _cuda(function, *arguments):
    result = getattr(_driver, function)(*arguments)
    assert result == 0, f"{function}: {result}"


def _pointer(value=None):
    return ctypes.c_void_p(value)


@contextlib.contextmanager
def device_index(index):
    """The device is current in this thread from now on."""
    if index not in _DEVICES:
        _cuda("cuInit", 0)
        _DEVICES[index] = _pointer()
        _cuda("cuDevicePrimaryCtxRetain", ctypes.byref(_DEVICES[index]), index)
    _cuda("cuCtxSetCurrent", _DEVICES[index])
    yield


class dtype:
    def __init__(self, size, exponent=0, mantissa=0):
        self.size, self.exponent, self.mantissa = size, exponent, mantissa

    def encode(self, value):
        """The bits of a small positive number."""
        if self.exponent:
            power = value.bit_length() - 1
            fraction = (value - (1 << power) << self.mantissa) >> power
            value = power + (1 << self.exponent - 1) - 1 << self.mantissa | fraction
        return value.to_bytes(self.size, "little")


class Device:
    def __init__(self, name):
        self.index = int(name.removeprefix("cuda:"))

    def __eq__(self, other):
        return self.index == other.index


class Stream:
    def __init__(self):
        stream = _pointer()
        _cuda("cuStreamCreateWithPriority", ctypes.byref(stream), 1, 0)
        self.cuda_stream = stream.value

    def synchronize(self):
        _cuda("cuStreamSynchronize", _pointer(self.cuda_stream))


class Tensor:
    """Of one dimension, on a GPU. Its memory is not freed."""

    def __init__(self, dtype, count, device, address=None):
        self.dtype, self.shape, self.device, self.address = dtype, (count,), device, address
        if address is None:
            allocated = ctypes.c_uint64()
            _cuda("cuMemAlloc_v2", ctypes.byref(allocated), ctypes.c_size_t(max(count, 1) * dtype.size))
            self.address = allocated.value

    def data_ptr(self):
        return self.address

    def numel(self):
        return self.shape[0]

    def element_size(self):
        return self.dtype.size

    def __getitem__(self, which):
        which = which[0] if isinstance(which, tuple) else which
        start, stop, _ = which.indices(self.numel())
        return Tensor(self.dtype, stop - start, self.device, self.address + start * self.dtype.size)

    def set(self, values):
        return self.set_bytes(b"".join(map(self.dtype.encode, values)))

    def set_bytes(self, data):
        stream = _pointer(current_stream().cuda_stream)
        _cuda("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(self.address), data, ctypes.c_size_t(len(data)), stream)
        current_stream().synchronize()
        return self

    def bytes(self):
        data = ctypes.create_string_buffer(self.numel() * self.dtype.size)
        stream = _pointer(current_stream().cuda_stream)
        _cuda("cuMemcpyDtoHAsync_v2", data, ctypes.c_uint64(self.address), ctypes.c_size_t(len(data)), stream)
        current_stream().synchronize()
        return data.raw

    def copy_(self, other):
        size = ctypes.c_size_t(self.numel() * self.dtype.size)
        into, source = ctypes.c_uint64(self.address), ctypes.c_uint64(other.address)
        _cuda("cuMemcpyDtoDAsync_v2", into, source, size, _pointer(current_stream().cuda_stream))


class ReduceOp(enum.Enum):
    SUM, PRODUCT, MAX, MIN, AVG = range(5)


_stream = None


def current_stream():
    global _stream
    _stream = _stream or Stream()
    return _stream


class StatelessProcessGroup:
    """Whose ranks meet in a folder."""

    def __init__(self, rank, world_size, folder):
        self.rank, self.world_size, self.folder, self.turn = rank, world_size, pathlib.Path(folder), 0

    def broadcast_obj(self, value, src):
        place = self.folder / f"broadcast-{self.turn}"
        self.turn += 1
        if self.rank == src:
            new = place.with_suffix(".new")
            new.write_bytes(pickle.dumps(value))
            new.rename(place)
        while not place.exists():
            time.sleep(0.005)
        return pickle.loads(place.read_bytes())


def _module(name, **content):
    module = types.ModuleType(name)
    module.__path__ = []
    vars(module).update(content)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
    return module


DTYPES = {
    "int8": dtype(1),
    "uint8": dtype(1),
    "int32": dtype(4),
    "int64": dtype(8),
    "float16": dtype(2, 5, 10),
    "float32": dtype(4, 8, 23),
    "float64": dtype(8, 11, 52),
    "bfloat16": dtype(2, 8, 7),
    "float8_e4m3fn": dtype(1, 4, 3),
}
# Named by pynccl.py, which sends them as bytes.
_OTHERS = {name: dtype(1) for name in ("float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")}


def load(folder):
    """pynccl_wrapper.py and pynccl.py of this folder, as modules."""
    torch = _module("torch", dtype=dtype, device=Device, Tensor=Tensor, **DTYPES, **_OTHERS)
    torch.empty_like = lambda tensor: Tensor(tensor.dtype, tensor.numel(), tensor.device)
    torch.zeros = lambda count, device: Tensor(torch.float32, count, device).set_bytes(bytes(4 * count))
    _module("torch.accelerator", device_index=device_index)
    _module("torch.distributed", ProcessGroup=type("ProcessGroup", (), {}), ReduceOp=ReduceOp, isend="isend", irecv="irecv")
    log = logging.getLogger("vllm")
    log.info_once = log.warning_once = log.debug
    platform = types.SimpleNamespace(fp8_dtype=lambda: torch.float8_e4m3fn, is_rocm=lambda: False)
    _module("vllm")
    _module("vllm.envs", VLLM_DISABLE_PYNCCL=False, VLLM_USE_NCCL_SYMM_MEM=False)
    _module("vllm.logger", init_logger=lambda _: log)
    _module("vllm.platforms", current_platform=platform)
    _module("vllm.utils")
    _module("vllm.utils.nccl", find_nccl_library=lambda: os.environ["VLLM_NCCL_SO_PATH"])
    _module("vllm.utils.torch_utils", current_stream=current_stream)
    _module("vllm.distributed")
    _module("vllm.distributed.utils", StatelessProcessGroup=StatelessProcessGroup)
    _module("vllm.distributed.device_communicators")
    return [_file(folder, name) for name in ("pynccl_wrapper", "pynccl")]


def _file(folder, name):
    full = f"vllm.distributed.device_communicators.{name}"
    spec = importlib.util.spec_from_file_location(full, pathlib.Path(folder) / f"{name}.py")
    module = sys.modules[full] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
