"""An exporter of DLPack over bytes, with what NumPy cannot export: every type, device and flag."""

import ctypes

CPU, CUDA = 1, 2
READ_ONLY = 1


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Versioned(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Array:
    """One dimension of elements with this type of DLPack, over a bytearray."""

    def __init__(self, memory, code, bits, *, device=CPU, flags=0, offset=0, stride=None, version=(1, 0)):
        self.memory = memory
        self.device = device
        self.pinned = (ctypes.c_char * len(memory)).from_buffer(memory)
        count = (len(memory) - offset) * 8 // bits // (stride or 1)
        self.shape = (ctypes.c_int64 * 1)(count)
        self.strides = None if stride is None else (ctypes.c_int64 * 1)(stride)
        tensor = Tensor(ctypes.addressof(self.pinned), (device, 0), 1, code, bits, 1, self.shape, self.strides, offset)
        self.exported = Versioned(version, None, None, flags, tensor)

    def __dlpack_device__(self):
        return self.device, 0

    def __dlpack__(self, *, max_version=None):
        if max_version is None:
            return _new_capsule(ctypes.addressof(self.exported.tensor), b"dltensor", None)
        return _new_capsule(ctypes.addressof(self.exported), b"dltensor_versioned", None)


class Unversioned(Array):
    """As exporters were before there were versions."""

    def __dlpack__(self):
        return super().__dlpack__()
