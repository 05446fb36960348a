//! This crate's types and constants match those of `cudarc`, generated from CUDA's headers.

use core::mem::offset_of;

use cudarc::driver::sys as theirs;

use super::*;

macro_rules! same_layout {
    ($ours:ty, $theirs:ty $(, $our:ident = $their:ident)*) => {
        assert_eq!(size_of::<$ours>(), size_of::<$theirs>(), stringify!($ours));
        assert_eq!(align_of::<$ours>(), align_of::<$theirs>(), stringify!($ours));
        $(assert_eq!(offset_of!($ours, $our), offset_of!($theirs, $their), stringify!($ours.$our));)*
    };
}

#[test]
fn types() {
    same_layout!(Location, theirs::CUmemLocation, kind = type_, id = id);
    same_layout!(
        AllocationProp,
        theirs::CUmemAllocationProp,
        kind = type_,
        handle_types = requestedHandleTypes,
        location = location,
        win32_metadata = win32HandleMetaData,
        compression = allocFlags
    );
    let flags = offset_of!(theirs::CUmemAllocationProp, allocFlags);
    let capable = offset_of!(theirs::CUmemAllocationProp_st__bindgen_ty_1, gpuDirectRDMACapable);
    assert_eq!(offset_of!(AllocationProp, gpu_direct_rdma_capable), flags + capable);
    let usage = offset_of!(theirs::CUmemAllocationProp_st__bindgen_ty_1, usage);
    assert_eq!(offset_of!(AllocationProp, usage), flags + usage);
    same_layout!(AccessDesc, theirs::CUmemAccessDesc, location = location, flags = flags);
    same_layout!(IpcBytes, theirs::CUipcMemHandle);
    same_layout!(IpcBytes, theirs::CUipcEventHandle);
    same_layout!(
        CopyAttributes,
        theirs::CUmemcpyAttributes,
        source_order = srcAccessOrder,
        source = srcLocHint,
        target = dstLocHint,
        flags = flags
    );
    same_layout!(Address, theirs::CUdeviceptr);
    same_layout!(AllocationHandle, theirs::CUmemGenericAllocationHandle);
    same_layout!(RawDevice, theirs::CUdevice);
    same_layout!([u8; 16], theirs::CUuuid);
}

macro_rules! same_numbers {
    ($($ours:expr => $theirs:expr),* $(,)?) => { $(assert_eq!(i64::from($ours), $theirs as i64, stringify!($theirs));)* };
}

#[test]
fn answers() {
    use status::*;
    use theirs::CUresult::*;
    same_numbers! {
        SUCCESS => CUDA_SUCCESS, INVALID_VALUE => CUDA_ERROR_INVALID_VALUE, OUT_OF_MEMORY => CUDA_ERROR_OUT_OF_MEMORY, DEINITIALIZED => CUDA_ERROR_DEINITIALIZED,
        STUB_LIBRARY => CUDA_ERROR_STUB_LIBRARY, NO_DEVICE => CUDA_ERROR_NO_DEVICE, INVALID_IMAGE => CUDA_ERROR_INVALID_IMAGE, INVALID_CONTEXT => CUDA_ERROR_INVALID_CONTEXT,
        NO_BINARY_FOR_GPU => CUDA_ERROR_NO_BINARY_FOR_GPU, ECC_UNCORRECTABLE => CUDA_ERROR_ECC_UNCORRECTABLE, PEER_ACCESS_UNSUPPORTED => CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,
        INVALID_PTX => CUDA_ERROR_INVALID_PTX, NVLINK_UNCORRECTABLE => CUDA_ERROR_NVLINK_UNCORRECTABLE, JIT_COMPILER_NOT_FOUND => CUDA_ERROR_JIT_COMPILER_NOT_FOUND,
        UNSUPPORTED_PTX_VERSION => CUDA_ERROR_UNSUPPORTED_PTX_VERSION, OPERATING_SYSTEM => CUDA_ERROR_OPERATING_SYSTEM, NOT_READY => CUDA_ERROR_NOT_READY,
        ILLEGAL_ADDRESS => CUDA_ERROR_ILLEGAL_ADDRESS, LAUNCH_OUT_OF_RESOURCES => CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, LAUNCH_TIMEOUT => CUDA_ERROR_LAUNCH_TIMEOUT,
        PEER_ACCESS_ALREADY_ENABLED => CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, PEER_ACCESS_NOT_ENABLED => CUDA_ERROR_PEER_ACCESS_NOT_ENABLED,
        CONTEXT_IS_DESTROYED => CUDA_ERROR_CONTEXT_IS_DESTROYED, ASSERT => CUDA_ERROR_ASSERT, TOO_MANY_PEERS => CUDA_ERROR_TOO_MANY_PEERS,
        HARDWARE_STACK_ERROR => CUDA_ERROR_HARDWARE_STACK_ERROR, LAUNCH_FAILED => CUDA_ERROR_LAUNCH_FAILED, NOT_PERMITTED => CUDA_ERROR_NOT_PERMITTED,
        NOT_SUPPORTED => CUDA_ERROR_NOT_SUPPORTED, SYSTEM_NOT_READY => CUDA_ERROR_SYSTEM_NOT_READY, SYSTEM_DRIVER_MISMATCH => CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,
        COMPAT_NOT_SUPPORTED_ON_DEVICE => CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE, STREAM_CAPTURE_UNSUPPORTED => CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
        STREAM_CAPTURE_INVALIDATED => CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, STREAM_CAPTURE_WRONG_THREAD => CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
    }
}

#[test]
fn flags() {
    use theirs::*;
    same_numbers! {
        STREAM_NON_BLOCKING => CUstream_flags::CU_STREAM_NON_BLOCKING,
        EVENT_DISABLE_TIMING => CUevent_flags::CU_EVENT_DISABLE_TIMING,
        EVENT_INTERPROCESS => CUevent_flags::CU_EVENT_INTERPROCESS,
        CAPTURE_THREAD_LOCAL => CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        CAPTURE_RELAXED => CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
        CAPTURE_NONE => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE,
        CAPTURE_ACTIVE => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE,
        EVENT_WAIT_EXTERNAL => CUevent_wait_flags::CU_EVENT_WAIT_EXTERNAL,
        USER_OBJECT_NO_SYNC => CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC,
        USER_OBJECT_MOVE => CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE,
        ALLOCATION_PINNED => CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        HANDLE_POSIX_FD => CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0,
        LOCATION_DEVICE => CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        ACCESS_READ_WRITE => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        GRANULARITY_MINIMUM => CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM,
        HOST_PORTABLE => CU_MEMHOSTALLOC_PORTABLE, HOST_DEVICE_MAP => CU_MEMHOSTALLOC_DEVICEMAP,
        HOST_PORTABLE => CU_MEMHOSTREGISTER_PORTABLE, HOST_DEVICE_MAP => CU_MEMHOSTREGISTER_DEVICEMAP,
        JIT_ERROR_LOG => CUjit_option::CU_JIT_ERROR_LOG_BUFFER, JIT_ERROR_LOG_BYTES => CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        CTX_SYNC_MEMOPS => CUctx_flags::CU_CTX_SYNC_MEMOPS,
        IPC_LAZY_PEER_ACCESS => CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS,
        RANGE_DMA_BUF_FD => CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD,
        SOURCE_ORDER_STREAM => CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
        FLUSH_CURRENT_CONTEXT => CUflushGPUDirectRDMAWritesTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
        FLUSH_TO_OWNER => CUflushGPUDirectRDMAWritesScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER,
        FLUSH_TO_ALL_DEVICES => CUflushGPUDirectRDMAWritesScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES,
        WAIT_AT_LEAST => CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ,
        WAIT_EQUAL => CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_EQ,
        WAIT_ANY_BIT => CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_AND,
        P2P_PERFORMANCE_RANK => CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK,
        P2P_NATIVE_ATOMICS => CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED,
        pointer::MEMORY_TYPE => CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        pointer::SYNC_MEMOPS => CUpointer_attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS,
        pointer::BUFFER_ID => CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID,
        pointer::IS_MANAGED => CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
        pointer::DEVICE_ORDINAL => CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        pointer::IS_LEGACY_IPC_CAPABLE => CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
        pointer::IS_GPU_DIRECT_RDMA_CAPABLE => CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE,
    }
}

#[test]
fn attributes() {
    use crate::{Attribute as Ours, KernelAttribute};
    use theirs::CUdevice_attribute as Theirs;
    use theirs::CUfunction_attribute as OfKernels;
    same_numbers! {
        Ours::MaxSharedMemoryPerBlock as i32 => Theirs::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK,
        Ours::MultiprocessorCount as i32 => Theirs::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        Ours::Integrated as i32 => Theirs::CU_DEVICE_ATTRIBUTE_INTEGRATED,
        Ours::L2CacheSize as i32 => Theirs::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE,
        Ours::AsyncEngineCount as i32 => Theirs::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT,
        Ours::ComputeCapabilityMajor as i32 => Theirs::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        Ours::ComputeCapabilityMinor as i32 => Theirs::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        Ours::CooperativeLaunch as i32 => Theirs::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH,
        Ours::MaxSharedMemoryPerBlockOptin as i32 => Theirs::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        Ours::VirtualMemoryManagementSupported as i32 => Theirs::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        Ours::HandleTypePosixFileDescriptorSupported as i32 => Theirs::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        Ours::GpuDirectRdmaWithVmmSupported as i32 => Theirs::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
        Ours::GpuDirectRdmaSupported as i32 => Theirs::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED,
        Ours::GpuDirectRdmaFlushWritesOptions as i32 => Theirs::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS,
        Ours::GpuDirectRdmaWritesOrdering as i32 => Theirs::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING,
        Ours::CanUse64BitStreamMemOps as i32 => Theirs::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS,
        Ours::DmaBufSupported as i32 => Theirs::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED,
        Ours::IpcEventSupported as i32 => Theirs::CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED,
        KernelAttribute::MaxThreadsPerBlock as i32 => OfKernels::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
        KernelAttribute::SharedBytes as i32 => OfKernels::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
        KernelAttribute::LocalBytes as i32 => OfKernels::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES,
        KernelAttribute::Registers as i32 => OfKernels::CU_FUNC_ATTRIBUTE_NUM_REGS,
        KernelAttribute::MaxDynamicSharedBytes as i32 => OfKernels::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
    }
}
