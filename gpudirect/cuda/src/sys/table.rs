//! The table of driver functions, filled from `libcuda.so.1`. Symbols carry the version of their
//! prototype in `cuda.h` (`_v2`). Those of CUDA 11.4 are required; newer ones are `None` in older
//! drivers, which their callers report as an error.

use core::ffi::{c_char, c_float, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::error::Error as _;
use std::path::Path;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use super::*;

/// Generates the table, and `fill`, which resolves each function.
macro_rules! table {
    (
        required { $( fn $req:ident = $rsym:literal ( $($rarg:ident : $rty:ty),* ); )* }
        optional { $( fn $opt:ident = $osym:literal ( $($oarg:ident : $oty:ty),* ); )* }
    ) => {
        /// The driver's functions, named without `cu`; see NVIDIA's "CUDA Driver API".
        pub(crate) struct Table {
            $( pub(crate) $req: unsafe extern "C" fn($($rarg: $rty),*) -> Status, )*
            $( pub(crate) $opt: Option<unsafe extern "C" fn($($oarg: $oty),*) -> Status>, )*
        }

        /// Resolves every function; returns the first missing required symbol as the error.
        ///
        /// # Safety
        /// The library must be the CUDA driver, or implement its functions as specified.
        pub(crate) unsafe fn fill(library: &Library) -> Result<Table, &'static str> {
            Ok(Table {
                $( $req: {
                    // SAFETY: by the caller's promise the symbol is the driver's function of this
                    // name, whose prototype in cuda.h is the field's type.
                    let symbol = unsafe { library.get::<unsafe extern "C" fn($($rty),*) -> Status>($rsym.as_bytes()) };
                    *symbol.map_err(|_| $rsym)?
                }, )*
                $( $opt: {
                    // SAFETY: as above.
                    let symbol = unsafe { library.get::<unsafe extern "C" fn($($oty),*) -> Status>($osym.as_bytes()) };
                    symbol.ok().map(|function| *function)
                }, )*
            })
        }
    };
}

table! {
    required {
        fn init = "cuInit"(flags: c_uint);
        fn driver_get_version = "cuDriverGetVersion"(version: *mut c_int);
        fn get_error_name = "cuGetErrorName"(error: Status, name: *mut *const c_char);
        fn get_error_string = "cuGetErrorString"(error: Status, text: *mut *const c_char);

        fn device_get_count = "cuDeviceGetCount"(count: *mut c_int);
        fn device_get = "cuDeviceGet"(device: *mut RawDevice, ordinal: c_int);
        fn device_get_name = "cuDeviceGetName"(name: *mut c_char, len: c_int, device: RawDevice);
        fn device_get_uuid = "cuDeviceGetUuid_v2"(uuid: *mut [u8; 16], device: RawDevice);
        fn device_get_pci_bus_id = "cuDeviceGetPCIBusId"(id: *mut c_char, len: c_int, device: RawDevice);
        fn device_get_attribute = "cuDeviceGetAttribute"(value: *mut c_int, attribute: c_int, device: RawDevice);
        fn device_total_mem = "cuDeviceTotalMem_v2"(bytes: *mut usize, device: RawDevice);
        fn device_can_access_peer = "cuDeviceCanAccessPeer"(can: *mut c_int, device: RawDevice, peer: RawDevice);
        fn device_get_p2p_attribute = "cuDeviceGetP2PAttribute"(value: *mut c_int, attribute: c_int, from: RawDevice, to: RawDevice);

        fn primary_ctx_retain = "cuDevicePrimaryCtxRetain"(context: *mut RawContext, device: RawDevice);
        fn primary_ctx_release = "cuDevicePrimaryCtxRelease_v2"(device: RawDevice);
        fn ctx_create = "cuCtxCreate_v2"(context: *mut RawContext, flags: c_uint, device: RawDevice);
        fn ctx_destroy = "cuCtxDestroy_v2"(context: RawContext);
        fn ctx_get_current = "cuCtxGetCurrent"(context: *mut RawContext);
        fn ctx_get_device = "cuCtxGetDevice"(device: *mut RawDevice);
        fn ctx_push_current = "cuCtxPushCurrent_v2"(context: RawContext);
        fn ctx_pop_current = "cuCtxPopCurrent_v2"(context: *mut RawContext);
        fn ctx_set_current = "cuCtxSetCurrent"(context: RawContext);
        fn ctx_synchronize = "cuCtxSynchronize"();
        fn mem_get_info = "cuMemGetInfo_v2"(free: *mut usize, total: *mut usize);

        fn stream_create_with_priority = "cuStreamCreateWithPriority"(stream: *mut RawStream, flags: c_uint, priority: c_int);
        fn stream_destroy = "cuStreamDestroy_v2"(stream: RawStream);
        fn stream_synchronize = "cuStreamSynchronize"(stream: RawStream);
        fn stream_query = "cuStreamQuery"(stream: RawStream);
        fn stream_wait_event = "cuStreamWaitEvent"(stream: RawStream, event: RawEvent, flags: c_uint);

        fn event_create = "cuEventCreate"(event: *mut RawEvent, flags: c_uint);
        fn event_destroy = "cuEventDestroy_v2"(event: RawEvent);
        fn event_record = "cuEventRecord"(event: RawEvent, stream: RawStream);
        fn event_query = "cuEventQuery"(event: RawEvent);
        fn event_synchronize = "cuEventSynchronize"(event: RawEvent);
        fn event_elapsed_time = "cuEventElapsedTime"(milliseconds: *mut c_float, start: RawEvent, end: RawEvent);

        fn mem_get_allocation_granularity = "cuMemGetAllocationGranularity"(granularity: *mut usize, prop: *const AllocationProp, option: c_uint);
        fn mem_create = "cuMemCreate"(handle: *mut AllocationHandle, bytes: usize, prop: *const AllocationProp, flags: c_ulonglong);
        fn mem_release = "cuMemRelease"(handle: AllocationHandle);
        fn mem_address_reserve = "cuMemAddressReserve"(address: *mut Address, bytes: usize, alignment: usize, hint: Address, flags: c_ulonglong);
        fn mem_address_free = "cuMemAddressFree"(address: Address, bytes: usize);
        fn mem_map = "cuMemMap"(address: Address, bytes: usize, offset: usize, handle: AllocationHandle, flags: c_ulonglong);
        fn mem_unmap = "cuMemUnmap"(address: Address, bytes: usize);
        fn mem_set_access = "cuMemSetAccess"(address: Address, bytes: usize, accesses: *const AccessDesc, count: usize);

        fn mem_host_alloc = "cuMemHostAlloc"(address: *mut *mut c_void, bytes: usize, flags: c_uint);
        fn mem_free_host = "cuMemFreeHost"(address: *mut c_void);
        fn mem_host_register = "cuMemHostRegister_v2"(address: *mut c_void, bytes: usize, flags: c_uint);
        fn mem_host_unregister = "cuMemHostUnregister"(address: *mut c_void);
        fn mem_host_get_device_pointer = "cuMemHostGetDevicePointer_v2"(device: *mut Address, host: *mut c_void, flags: c_uint);

        fn memcpy_htod_async = "cuMemcpyHtoDAsync_v2"(to: Address, from: *const c_void, bytes: usize, stream: RawStream);
        fn memcpy_dtoh_async = "cuMemcpyDtoHAsync_v2"(to: *mut c_void, from: Address, bytes: usize, stream: RawStream);
        fn memcpy_dtod_async = "cuMemcpyDtoDAsync_v2"(to: Address, from: Address, bytes: usize, stream: RawStream);
        fn memcpy_async = "cuMemcpyAsync"(to: Address, from: Address, bytes: usize, stream: RawStream);
        fn memcpy_peer_async = "cuMemcpyPeerAsync"(to: Address, to_context: RawContext, from: Address, from_context: RawContext, bytes: usize, stream: RawStream);
        fn memset_d8_async = "cuMemsetD8Async"(to: Address, value: c_uchar, count: usize, stream: RawStream);

        fn module_load_data_ex = "cuModuleLoadDataEx"(module: *mut RawModule, image: *const c_void, count: c_uint, options: *mut c_uint, values: *mut *mut c_void);
        fn module_unload = "cuModuleUnload"(module: RawModule);
        fn module_get_function = "cuModuleGetFunction"(function: *mut RawFunction, module: RawModule, name: *const c_char);
        fn func_get_attribute = "cuFuncGetAttribute"(value: *mut c_int, attribute: c_int, function: RawFunction);
        fn func_set_attribute = "cuFuncSetAttribute"(function: RawFunction, attribute: c_int, value: c_int);
        fn launch_kernel = "cuLaunchKernel"(
            function: RawFunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint, shared: c_uint,
            stream: RawStream, parameters: *mut *mut c_void, extra: *mut *mut c_void
        );
        fn launch_cooperative_kernel = "cuLaunchCooperativeKernel"(
            function: RawFunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint, shared: c_uint,
            stream: RawStream, parameters: *mut *mut c_void
        );

        fn thread_exchange_capture_mode = "cuThreadExchangeStreamCaptureMode"(mode: *mut c_uint);
        fn stream_is_capturing = "cuStreamIsCapturing"(stream: RawStream, status: *mut c_uint);
        fn stream_get_capture_info = "cuStreamGetCaptureInfo_v2"(
            stream: RawStream, status: *mut c_uint, id: *mut u64, graph: *mut RawGraph, dependencies: *mut *const RawNode, count: *mut usize
        );
        fn stream_begin_capture = "cuStreamBeginCapture_v2"(stream: RawStream, mode: c_uint);
        fn stream_end_capture = "cuStreamEndCapture"(stream: RawStream, graph: *mut RawGraph);
        fn graph_destroy = "cuGraphDestroy"(graph: RawGraph);
        fn graph_get_nodes = "cuGraphGetNodes"(graph: RawGraph, nodes: *mut *mut c_void, count: *mut usize);
        fn graph_add_event_record_node = "cuGraphAddEventRecordNode"(node: *mut RawNode, graph: RawGraph, dependencies: *const RawNode, count: usize, event: RawEvent);
        fn graph_add_dependencies = "cuGraphAddDependencies"(graph: RawGraph, from: *const RawNode, to: *const RawNode, count: usize);
        fn graph_remove_dependencies = "cuGraphRemoveDependencies"(graph: RawGraph, from: *const RawNode, to: *const RawNode, count: usize);
        fn user_object_create = "cuUserObjectCreate"(object: *mut RawUserObject, pointer: *mut c_void, destroy: HostFunction, references: c_uint, flags: c_uint);
        fn user_object_release = "cuUserObjectRelease"(object: RawUserObject, count: c_uint);
        fn graph_retain_user_object = "cuGraphRetainUserObject"(graph: RawGraph, object: RawUserObject, count: c_uint, flags: c_uint);
        fn graph_instantiate = "cuGraphInstantiateWithFlags"(exec: *mut RawGraphExec, graph: RawGraph, flags: c_ulonglong);
        fn graph_exec_destroy = "cuGraphExecDestroy"(exec: RawGraphExec);
        fn graph_upload = "cuGraphUpload"(exec: RawGraphExec, stream: RawStream);
        fn graph_launch = "cuGraphLaunch"(exec: RawGraphExec, stream: RawStream);

        fn pointer_get_attribute = "cuPointerGetAttribute"(data: *mut c_void, attribute: c_int, address: Address);
        fn pointer_set_attribute = "cuPointerSetAttribute"(value: *const c_void, attribute: c_int, address: Address);
        fn mem_get_address_range = "cuMemGetAddressRange_v2"(base: *mut Address, bytes: *mut usize, address: Address);
        fn mem_retain_allocation_handle = "cuMemRetainAllocationHandle"(handle: *mut AllocationHandle, address: *mut c_void);
        fn mem_get_allocation_properties = "cuMemGetAllocationPropertiesFromHandle"(prop: *mut AllocationProp, handle: AllocationHandle);
        fn mem_export = "cuMemExportToShareableHandle"(shareable: *mut c_void, handle: AllocationHandle, kind: c_uint, flags: c_ulonglong);
        fn mem_import = "cuMemImportFromShareableHandle"(handle: *mut AllocationHandle, shareable: *mut c_void, kind: c_uint);
        fn ctx_enable_peer_access = "cuCtxEnablePeerAccess"(peer: RawContext, flags: c_uint);

        fn ipc_get_mem_handle = "cuIpcGetMemHandle"(handle: *mut IpcBytes, address: Address);
        fn ipc_open_mem_handle = "cuIpcOpenMemHandle_v2"(address: *mut Address, handle: IpcBytes, flags: c_uint);
        fn ipc_close_mem_handle = "cuIpcCloseMemHandle"(address: Address);
        fn ipc_get_event_handle = "cuIpcGetEventHandle"(handle: *mut IpcBytes, event: RawEvent);
        fn ipc_open_event_handle = "cuIpcOpenEventHandle"(event: *mut RawEvent, handle: IpcBytes);
    }
    optional {
        // CUDA 11.3.
        fn flush_gpu_direct_rdma_writes = "cuFlushGPUDirectRDMAWrites"(target: c_int, scope: c_int);
        // CUDA 11.7.
        fn mem_get_handle_for_address_range = "cuMemGetHandleForAddressRange"(handle: *mut c_void, address: Address, bytes: usize, kind: c_uint, flags: c_ulonglong);
        fn stream_write_value32 = "cuStreamWriteValue32_v2"(stream: RawStream, address: Address, value: u32, flags: c_uint);
        fn stream_write_value64 = "cuStreamWriteValue64_v2"(stream: RawStream, address: Address, value: u64, flags: c_uint);
        fn stream_wait_value32 = "cuStreamWaitValue32_v2"(stream: RawStream, address: Address, value: u32, flags: c_uint);
        fn stream_wait_value64 = "cuStreamWaitValue64_v2"(stream: RawStream, address: Address, value: u64, flags: c_uint);
        // CUDA 11.8.
        fn launch_kernel_ex = "cuLaunchKernelEx"(config: *const LaunchConfig, function: RawFunction, parameters: *mut *mut c_void, extra: *mut *mut c_void);
        // CUDA 12.0.
        fn stream_get_id = "cuStreamGetId"(stream: RawStream, id: *mut c_ulonglong);
        // CUDA 12.8, and the 13.0 version.
        fn memcpy_batch_async_v1 = "cuMemcpyBatchAsync"(
            to: *mut Address, from: *mut Address, bytes: *mut usize, count: usize, attributes: *mut CopyAttributes, indices: *mut usize, attribute_count: usize,
            failed: *mut usize, stream: RawStream
        );
        fn memcpy_batch_async_v2 = "cuMemcpyBatchAsync_v2"(
            to: *mut Address, from: *mut Address, bytes: *mut usize, count: usize, attributes: *mut CopyAttributes, indices: *mut usize, attribute_count: usize,
            stream: RawStream
        );
        // CUDA 12.1.
        fn ctx_get_flags = "cuCtxGetFlags"(flags: *mut c_uint);
        fn ctx_set_flags = "cuCtxSetFlags"(flags: c_uint);
        // CUDA 12.4.
        fn func_load = "cuFuncLoad"(function: RawFunction);
    }
}

/// Opens the library for the life of the process; on failure, the message of dlerror(3).
///
/// # Safety
/// The library's initialisers must have no requirements that the caller does not meet.
pub(crate) unsafe fn open(path: &Path) -> Result<&'static Library, String> {
    // SAFETY: the caller's promise.
    match unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) } {
        Ok(library) => Ok(Box::leak(Box::new(library))),
        Err(error) => {
            let message = error.source().map_or_else(|| error.to_string(), ToString::to_string);
            let name = path.display().to_string();
            Err(
                match message.strip_prefix(&name).and_then(|rest| rest.strip_prefix(": ")) {
                    Some(rest) => rest.to_owned(),
                    None => message,
                },
            )
        }
    }
}
