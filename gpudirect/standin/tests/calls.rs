//! Driver functions that doorbell-cuda does not call yet, and pointer attributes.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::fs;
use std::os::fd::AsRawFd;
use std::ptr;

use doorbell_cuda::{
    Attribute, Context, DeviceMemory, DevicePtr, HostMemory, Memory, MemoryType, Stream, WritesOrdering,
};
use doorbell_cuda_standin::{ExecutionMode, Standin};
use libloading::os::unix::Library;

struct Setting {
    standin: Standin,
    context: Context,
    stream: Stream,
    library: Library,
}

impl Setting {
    fn new(manner: ExecutionMode) -> Self {
        let standin = Standin::load(manner);
        let context = standin.driver().unwrap().device(0).unwrap().context().unwrap();
        let stream = Stream::new(&context).unwrap();
        // SAFETY: it is already loaded.
        let library = unsafe { Library::new(standin.path()) }.unwrap();
        Self {
            standin,
            context,
            stream,
            library,
        }
    }

    fn function<T: Copy>(&self, name: &str) -> T {
        // SAFETY: the callers name functions with their types.
        unsafe { *self.library.get::<T>(name.as_bytes()).unwrap() }
    }
}

#[test]
fn fills_and_host_functions_run_in_order() {
    type Fill = unsafe extern "C" fn(u64, c_uint, usize, *mut c_void) -> c_int;
    type Call = unsafe extern "C" fn(*mut c_void, unsafe extern "C" fn(*mut c_void), *mut c_void) -> c_int;
    unsafe extern "C" fn double(word: *mut c_void) {
        // SAFETY: the word belongs to the test.
        unsafe { *word.cast::<u32>() *= 2 };
    }
    for manner in [ExecutionMode::Lazy, ExecutionMode::Prompt] {
        let setting = Setting::new(manner);
        let mut host = HostMemory::alloc(&setting.context, 16).unwrap();
        let memory = DeviceMemory::alloc(&setting.context, 16).unwrap();
        let stream = setting.stream.as_raw();
        let word = host.all().device_ptr().0 as usize;
        // SAFETY: the memory has four words, and the host's is owned by the test until the stream
        // is synchronized.
        unsafe {
            let fill = setting.function::<Fill>("cuMemsetD32Async");
            assert_eq!(fill(memory.device_ptr().0, 0x0102_0304, 4, stream), 0);
            assert_eq!(fill(memory.device_ptr().0 + 2, 0, 1, stream), 1);
            setting.stream.copy(host.all(), memory.all()).unwrap();
            let call = setting.function::<Call>("cuLaunchHostFunc");
            assert_eq!(call(stream, double, ptr::with_exposed_provenance_mut(word)), 0);
        }
        let bytes = host.bytes_mut().unwrap();
        assert_eq!(bytes[..8], [8, 6, 4, 2, 4, 3, 2, 1]);
    }
}

#[test]
fn memory_is_described() {
    let setting = Setting::new(ExecutionMode::Lazy);
    let memory = DeviceMemory::alloc(&setting.context, 5000).unwrap();
    let host = HostMemory::alloc(&setting.context, 5000).unwrap();
    let inside = DevicePtr(host.all().device_ptr().0 + 100);
    let info = setting.context.pointer_info(inside).unwrap().unwrap();
    assert_eq!((info.memory_type, info.device), (MemoryType::Host, 0));
    assert!(!info.is_mapped && !info.shares_by_fd && !info.shares_by_ipc && !info.is_gpu_direct);
    assert_eq!(info.allocation, Some((host.all().device_ptr(), 5000)));

    type Attributes = unsafe extern "C" fn(c_uint, *const c_int, *const *mut c_void, u64) -> c_int;
    let (mut kind, mut start, mut size) = (0u32, 0u64, 0usize);
    let into = [
        (&raw mut kind).cast(),
        (&raw mut start).cast(),
        (&raw mut size).cast::<c_void>(),
    ];
    let attributes_of = |address: u64| {
        // SAFETY: each attribute is written as its pointer's type.
        unsafe {
            setting.function::<Attributes>("cuPointerGetAttributes")(3, [2, 11, 12].as_ptr(), into.as_ptr(), address)
        }
    };
    assert_eq!(attributes_of(16), 0);
    assert_eq!(attributes_of(memory.device_ptr().0 + 7), 0);
    assert_eq!((kind, start, size), (2, memory.device_ptr().0, memory.mapped_len()));
}

#[test]
fn ipc_memory_is_opened_by_other_processes_only() {
    let setting = Setting::new(ExecutionMode::Prompt);
    setting.context.make_current().unwrap();
    let mut address = 0;
    let mut handle = [0u8; 64];
    // SAFETY: the pointers are to what the functions write.
    unsafe {
        let alloc = setting.function::<unsafe extern "C" fn(*mut u64, usize) -> c_int>("cuMemAlloc_v2");
        let get = setting.function::<unsafe extern "C" fn(*mut [u8; 64], u64) -> c_int>("cuIpcGetMemHandle");
        let open =
            setting.function::<unsafe extern "C" fn(*mut u64, [u64; 8], c_uint) -> c_int>("cuIpcOpenMemHandle_v2");
        let free = setting.function::<unsafe extern "C" fn(u64) -> c_int>("cuMemFree_v2");
        assert_eq!(alloc(&raw mut address, 5000), 0);
        assert_eq!(get(&raw mut handle, address + 9), 0);
        let mut words = [0u64; 8];
        for (word, bytes) in words.iter_mut().zip(handle.as_chunks::<8>().0) {
            *word = u64::from_ne_bytes(*bytes);
        }
        let mut opened = 0u64;
        assert_eq!(open(&raw mut opened, words, 1), 201);
        assert_eq!(open(&raw mut opened, [0; 8], 1), 1);
        assert_eq!(free(address + 1), 1);
        assert_eq!(free(address), 0);
        assert_eq!(free(address), 1);
    }
    assert_eq!(
        (
            setting.standin.count("allocation"),
            setting.standin.count("reservation")
        ),
        (0, 0)
    );
}

#[test]
fn dma_buf_is_emulated_by_a_file() {
    let setting = Setting::new(ExecutionMode::Prompt);
    let memory = DeviceMemory::alloc(&setting.context, 100_000).unwrap();
    let dma_buf = memory.span(5000..).unwrap().dma_buf().unwrap();
    assert_eq!((dma_buf.start.0, dma_buf.offset), (memory.device_ptr().0 + 4096, 904));
    let name = fs::read_link(format!("/proc/self/fd/{}", dma_buf.fd.as_raw_fd())).unwrap();
    assert!(name.to_string_lossy().contains("/dmabuf"), "{name:?}");
    // SAFETY: a new mapping is requested, which is refused.
    let mapped = unsafe {
        libc::mmap(
            ptr::null_mut(),
            4096,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            dma_buf.fd.as_raw_fd(),
            0,
        )
    };
    assert_eq!(mapped, libc::MAP_FAILED);
}

#[test]
fn modules_contain_the_kernels_of_their_ptx() {
    let setting = Setting::new(ExecutionMode::Lazy);
    type Load = unsafe extern "C" fn(*mut *mut c_void, *const c_char) -> c_int;
    type Find = unsafe extern "C" fn(*mut *mut c_void, *mut c_void, *const c_char) -> c_int;
    let (mut module, mut function) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: the pointers are to what the functions write, and all texts are NUL-terminated.
    unsafe {
        let load = setting.function::<Load>("cuModuleLoadData");
        let find = setting.function::<Find>("cuModuleGetFunction");
        assert_eq!(load(&raw mut module, c"\x7fELF".as_ptr()), 200);
        assert_eq!(load(&raw mut module, c".version 7.8".as_ptr()), 218);
        assert_eq!(
            load(
                &raw mut module,
                c".visible .entry meet(\n.visible .entry not_in_any_source(\n".as_ptr()
            ),
            0
        );
        assert_eq!(find(&raw mut function, module, c"meet".as_ptr()), 0);
        assert_eq!(
            setting.function::<unsafe extern "C" fn(*mut c_void) -> c_int>("cuFuncLoad")(function),
            0
        );
        assert_eq!(find(&raw mut function, module, c"gather".as_ptr()), 500);
        assert_eq!(find(&raw mut function, module, c"not_in_any_source".as_ptr()), 500);
        assert_eq!(
            setting.function::<unsafe extern "C" fn(*mut c_void) -> c_int>("cuModuleUnload")(module),
            0
        );
    }
    assert_eq!(setting.standin.count("module"), 0);
}

#[test]
fn device_attributes_can_be_set() {
    let setting = Setting::new(ExecutionMode::Lazy);
    let device = setting.context.device();
    assert!(device.has(Attribute::DmaBufSupported));
    setting.standin.set_attribute(Attribute::DmaBufSupported as i32, 0);
    assert!(!device.has(Attribute::DmaBufSupported));
    setting
        .standin
        .set_attribute(Attribute::GpuDirectRdmaWritesOrdering as i32, 200);
    assert_eq!(device.writes_ordering().unwrap(), WritesOrdering::AllDevices);
}

#[test]
fn device_addresses_are_host_accessible_on_request() {
    let standin = Standin::load(ExecutionMode::Prompt);
    standin.open();
    let context = standin.driver().unwrap().device(0).unwrap().context().unwrap();
    let stream = Stream::new(&context).unwrap();
    let memory = DeviceMemory::alloc(&context, 100).unwrap();
    stream.fill(memory.all(), 7).unwrap();
    stream.synchronize().unwrap();
    let at = ptr::with_exposed_provenance::<u8>(usize::try_from(memory.device_ptr().0).unwrap());
    // SAFETY: the stand-in has mapped it readable, and no work uses it now.
    assert_eq!(unsafe { at.add(99).read_volatile() }, 7);
}
