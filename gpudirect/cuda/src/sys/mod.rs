//! Declarations of the CUDA driver API: types, constants, and the [`Table`] of functions.
//!
//! Written by hand: a status is a plain number, as a newer driver may return one that no enum has.
//! A test compares every size, offset and number with the `cudarc` crate.

mod table;
#[cfg(test)]
mod tests;

use core::ffi::{c_int, c_uint, c_void};
use core::ptr;

pub(crate) use table::{Table, fill, open};

/// The status of a driver call: `CUresult`.
pub(crate) type Status = c_int;
/// `CUdevice`; other `Raw` types are likewise the `CU` type of their name.
pub(crate) type RawDevice = c_int;
/// `CUdeviceptr`.
pub(crate) type Address = u64;
pub(crate) type RawContext = *mut c_void;
pub(crate) type RawStream = *mut c_void;
pub(crate) type RawEvent = *mut c_void;
pub(crate) type RawModule = *mut c_void;
pub(crate) type RawFunction = *mut c_void;
pub(crate) type RawGraph = *mut c_void;
pub(crate) type RawGraphExec = *mut c_void;
/// `CUgraphNode`.
pub(crate) type RawNode = *mut c_void;
pub(crate) type RawUserObject = *mut c_void;
/// `CUhostFn`.
pub(crate) type HostFunction = unsafe extern "C" fn(*mut c_void);
/// `CUmemGenericAllocationHandle`.
pub(crate) type AllocationHandle = u64;

/// `CUmemLocation`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Location {
    pub(crate) kind: c_uint,
    pub(crate) id: c_int,
}

/// `CUmemAllocationProp`, with its flags inlined.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct AllocationProp {
    pub(crate) kind: c_uint,
    pub(crate) handle_types: c_uint,
    pub(crate) location: Location,
    pub(crate) win32_metadata: *mut c_void,
    pub(crate) compression: u8,
    pub(crate) gpu_direct_rdma_capable: u8,
    pub(crate) usage: u16,
    pub(crate) reserved: [u8; 4],
}

impl AllocationProp {
    /// Zeroed, as an output parameter.
    pub(crate) const NONE: Self = Self {
        kind: 0,
        handle_types: 0,
        location: Location { kind: 0, id: 0 },
        win32_metadata: core::ptr::null_mut(),
        compression: 0,
        gpu_direct_rdma_capable: 0,
        usage: 0,
        reserved: [0; 4],
    };
}

/// `CUmemAccessDesc`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct AccessDesc {
    pub(crate) location: Location,
    pub(crate) flags: c_uint,
}

/// `CUipcMemHandle` and `CUipcEventHandle`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct IpcBytes(pub(crate) [u8; 64]);

/// `CUmemcpyAttributes`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct CopyAttributes {
    pub(crate) source_order: c_uint,
    pub(crate) source: Location,
    pub(crate) target: Location,
    pub(crate) flags: c_uint,
}

/// `CUlaunchConfig`.
#[repr(C)]
pub(crate) struct LaunchConfig {
    pub(crate) grid: [c_uint; 3],
    pub(crate) block: [c_uint; 3],
    pub(crate) shared: c_uint,
    pub(crate) stream: RawStream,
    pub(crate) attributes: *mut LaunchAttribute,
    pub(crate) count: c_uint,
}

/// `CUlaunchAttribute`: its value is a union of 64 bytes.
#[repr(C, align(8))]
pub(crate) struct LaunchAttribute {
    id: c_uint,
    padding: c_uint,
    value: [c_uint; 16],
}

impl LaunchAttribute {
    fn new<const N: usize>(id: c_uint, first: [c_uint; N]) -> Self {
        let mut value = [0; 16];
        value[..N].copy_from_slice(&first);
        Self { id, padding: 0, value }
    }

    /// `CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION`.
    pub(crate) fn cluster(blocks: c_uint) -> Self {
        Self::new(4, [blocks, 1, 1])
    }

    /// `CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE`, with
    /// `CU_CLUSTER_SCHEDULING_POLICY_SPREAD`.
    pub(crate) fn spread_clusters() -> Self {
        Self::new(5, [1])
    }
}

/// The `extra` parameter of launches: a buffer with a kernel's parameters, or the first bytes of
/// them, and their number.
pub(crate) fn parameter_buffer(buffer: *mut c_void, bytes: &mut usize) -> [*mut c_void; 5] {
    // CU_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE and _END.
    let [pointer, size, end] = [1, 2, 0].map(ptr::without_provenance_mut);
    [pointer, buffer, size, ptr::from_mut(bytes).cast(), end]
}

pub(crate) mod status {
    use super::Status;

    pub(crate) const SUCCESS: Status = 0;
    pub(crate) const INVALID_VALUE: Status = 1;
    pub(crate) const OUT_OF_MEMORY: Status = 2;
    pub(crate) const DEINITIALIZED: Status = 4;
    pub(crate) const STUB_LIBRARY: Status = 34;
    pub(crate) const NO_DEVICE: Status = 100;
    pub(crate) const INVALID_IMAGE: Status = 200;
    pub(crate) const INVALID_CONTEXT: Status = 201;
    pub(crate) const NO_BINARY_FOR_GPU: Status = 209;
    pub(crate) const ECC_UNCORRECTABLE: Status = 214;
    pub(crate) const PEER_ACCESS_UNSUPPORTED: Status = 217;
    pub(crate) const INVALID_PTX: Status = 218;
    pub(crate) const NVLINK_UNCORRECTABLE: Status = 220;
    pub(crate) const JIT_COMPILER_NOT_FOUND: Status = 221;
    pub(crate) const UNSUPPORTED_PTX_VERSION: Status = 222;
    pub(crate) const OPERATING_SYSTEM: Status = 304;
    pub(crate) const NOT_READY: Status = 600;
    pub(crate) const ILLEGAL_ADDRESS: Status = 700;
    pub(crate) const LAUNCH_OUT_OF_RESOURCES: Status = 701;
    pub(crate) const LAUNCH_TIMEOUT: Status = 702;
    pub(crate) const PEER_ACCESS_ALREADY_ENABLED: Status = 704;
    pub(crate) const PEER_ACCESS_NOT_ENABLED: Status = 705;
    pub(crate) const CONTEXT_IS_DESTROYED: Status = 709;
    pub(crate) const ASSERT: Status = 710;
    pub(crate) const TOO_MANY_PEERS: Status = 711;
    pub(crate) const HARDWARE_STACK_ERROR: Status = 714;
    pub(crate) const LAUNCH_FAILED: Status = 719;
    pub(crate) const NOT_PERMITTED: Status = 800;
    pub(crate) const NOT_SUPPORTED: Status = 801;
    pub(crate) const SYSTEM_NOT_READY: Status = 802;
    pub(crate) const SYSTEM_DRIVER_MISMATCH: Status = 803;
    pub(crate) const COMPAT_NOT_SUPPORTED_ON_DEVICE: Status = 804;
    pub(crate) const STREAM_CAPTURE_UNSUPPORTED: Status = 900;
    pub(crate) const STREAM_CAPTURE_INVALIDATED: Status = 901;
    pub(crate) const STREAM_CAPTURE_WRONG_THREAD: Status = 908;
}

/// Whether the error is sticky: every later call of the process returns it.
pub(crate) fn is_sticky(status: Status) -> bool {
    matches!(
        status,
        status::ECC_UNCORRECTABLE
            | status::NVLINK_UNCORRECTABLE
            | status::ILLEGAL_ADDRESS
            | status::LAUNCH_TIMEOUT
            | status::CONTEXT_IS_DESTROYED
            | status::ASSERT
    ) || (status::HARDWARE_STACK_ERROR..=status::LAUNCH_FAILED).contains(&status)
}

/// Whether a query's status means that the work is over: done, or failed with its context. Any
/// other status may concern something else, such as a capture that forbids the query.
pub(crate) fn is_complete(status: Status) -> bool {
    status == status::SUCCESS || is_sticky(status)
}

/// `CU_STREAM_NON_BLOCKING`: no synchronization with the legacy default stream.
pub(crate) const STREAM_NON_BLOCKING: c_uint = 1;

pub(crate) const EVENT_DISABLE_TIMING: c_uint = 2;
pub(crate) const EVENT_INTERPROCESS: c_uint = 4;

pub(crate) const CAPTURE_THREAD_LOCAL: c_uint = 1;
pub(crate) const CAPTURE_RELAXED: c_uint = 2;
/// `CU_STREAM_CAPTURE_STATUS_NONE`.
pub(crate) const CAPTURE_NONE: c_uint = 0;
/// `CU_STREAM_CAPTURE_STATUS_ACTIVE`.
pub(crate) const CAPTURE_ACTIVE: c_uint = 1;

/// `CU_EVENT_WAIT_EXTERNAL`.
pub(crate) const EVENT_WAIT_EXTERNAL: c_uint = 1;
/// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`.
pub(crate) const USER_OBJECT_NO_SYNC: c_uint = 1;
/// `CU_GRAPH_USER_OBJECT_MOVE`.
pub(crate) const USER_OBJECT_MOVE: c_uint = 1;

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
pub(crate) const ALLOCATION_PINNED: c_uint = 1;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub(crate) const HANDLE_POSIX_FD: c_uint = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub(crate) const LOCATION_DEVICE: c_uint = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
pub(crate) const ACCESS_READ_WRITE: c_uint = 3;
/// `CU_MEM_ALLOC_GRANULARITY_MINIMUM`.
pub(crate) const GRANULARITY_MINIMUM: c_uint = 0;

pub(crate) const HOST_PORTABLE: c_uint = 1;
pub(crate) const HOST_DEVICE_MAP: c_uint = 2;

pub(crate) const JIT_ERROR_LOG: c_uint = 5;
pub(crate) const JIT_ERROR_LOG_BYTES: c_uint = 6;

/// `CU_CTX_SYNC_MEMOPS`.
pub(crate) const CTX_SYNC_MEMOPS: c_uint = 0x80;
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
pub(crate) const IPC_LAZY_PEER_ACCESS: c_uint = 1;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
pub(crate) const RANGE_DMA_BUF_FD: c_uint = 1;
/// `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`.
pub(crate) const SOURCE_ORDER_STREAM: c_uint = 1;
/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX`.
pub(crate) const FLUSH_CURRENT_CONTEXT: c_int = 0;
pub(crate) const FLUSH_TO_OWNER: c_int = 100;
pub(crate) const FLUSH_TO_ALL_DEVICES: c_int = 200;

/// `CU_STREAM_WAIT_VALUE_GEQ`.
pub(crate) const WAIT_AT_LEAST: c_uint = 0;
pub(crate) const WAIT_EQUAL: c_uint = 1;
/// `CU_STREAM_WAIT_VALUE_AND`.
pub(crate) const WAIT_ANY_BIT: c_uint = 2;
pub(crate) const P2P_PERFORMANCE_RANK: c_int = 1;
pub(crate) const P2P_NATIVE_ATOMICS: c_int = 3;

/// `CUpointer_attribute`.
pub(crate) mod pointer {
    use core::ffi::c_int;

    pub(crate) const MEMORY_TYPE: c_int = 2;
    pub(crate) const SYNC_MEMOPS: c_int = 6;
    pub(crate) const BUFFER_ID: c_int = 7;
    pub(crate) const IS_MANAGED: c_int = 8;
    pub(crate) const DEVICE_ORDINAL: c_int = 9;
    pub(crate) const IS_LEGACY_IPC_CAPABLE: c_int = 10;
    pub(crate) const IS_GPU_DIRECT_RDMA_CAPABLE: c_int = 15;
}
