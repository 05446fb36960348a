//! Memory and events shared between two processes, possibly on two GPUs.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::{env, io};

use doorbell_cuda::{
    DeviceMemory, DevicePtr, Driver, Error, Event, EventHandle, Foreign, IpcHandle, Memory, MemoryType, Stream,
};
use libloading::os::unix::Library;

use crate::suite::{Case, Outcome, Setting, pattern};

pub(crate) const CHILD: &str = "--child";
const BYTES: usize = 5_000_000;

pub(crate) const CASES: &[Case] = &[
    Case {
        name: "processes::descriptor",
        run: descriptor,
    },
    Case {
        name: "processes::ipc",
        run: ipc,
    },
];

/// A second process modifies memory passed as its standard input, and records an event.
fn descriptor(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let bytes = pattern(BYTES, 1);
    let memory = setting.device(&bytes)?;
    setting.stream.synchronize()?;
    let event = Event::interprocess(&setting.context)?;
    setting.stream.record(&event)?;
    let handle = hex(&event.handle()?.0);
    let status = Command::new(env::current_exe()?)
        .args([CHILD, "descriptor", &handle])
        .stdin(Stdio::from(memory.export_fd()?))
        .status()?;
    assert!(status.success(), "the second process: {status}");
    setting.stream.wait(&event)?;
    let got = setting.read(&memory)?;
    assert!(
        got[..1000] == [7; 1000] && got[1000..] == bytes[1000..],
        "the other process wrote it otherwise"
    );
    setting.finish()
}

/// A second process modifies memory from `cuMemAlloc`, such as PyTorch's.
fn ipc(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    setting.context.make_current()?;
    let name = env::var_os("DOORBELL_CUDA_LIBRARY").unwrap_or_else(|| "libcuda.so.1".into());
    // SAFETY: the driver, which is already loaded.
    let library = unsafe { Library::new(name)? };
    type Alloc = unsafe extern "C" fn(*mut u64, usize) -> i32;
    type Free = unsafe extern "C" fn(u64) -> i32;
    // SAFETY: these are the functions' prototypes.
    let (alloc, free) = unsafe {
        (
            library.get::<Alloc>(b"cuMemAlloc_v2")?,
            library.get::<Free>(b"cuMemFree_v2")?,
        )
    };
    let mut address = 0;
    // SAFETY: the context is current, and the pointer is to a local address.
    assert_eq!(unsafe { alloc(&raw mut address, BYTES) }, 0);
    // SAFETY: it stays allocated until it is freed below.
    let memory = unsafe { Foreign::wrap(&setting.context, DevicePtr(address + 256), BYTES - 256, Arc::new(()))? };
    let info = setting
        .context
        .pointer_info(memory.device_ptr())?
        .ok_or("the driver does not know its memory")?;
    assert_eq!(info.memory_type, MemoryType::Device);
    assert!(info.shares_by_ipc && !info.is_mapped && !info.shares_by_fd);
    memory.all().set_sync_memops()?;
    // SAFETY: refused, as the allocation is shorter.
    assert!(unsafe { Foreign::wrap(&setting.context, DevicePtr(address), 64 << 20, Arc::new(())) }.is_err());

    setting.stream.fill(memory.all(), 1)?;
    setting.stream.synchronize()?;
    let (handle, offset) = memory.ipc_handle()?;
    assert_eq!(
        offset as u64,
        address + 256 - info.allocation.ok_or("no allocation")?.0.0
    );
    let mut child = Command::new(env::current_exe()?)
        .args([CHILD, "ipc", &hex(&handle.0), &offset.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    // The child reports that it is done, and closes the memory before it exits.
    let mut said = String::new();
    child.stdout.take().ok_or("no pipe")?.read_to_string(&mut said)?;
    assert!(child.wait()?.success() && said == "done", "{said}");
    let got = setting.read(&memory)?;
    assert!(got[..1000] == [7; 1000] && got[1000..].iter().all(|byte| *byte == 1));
    drop(memory);
    setting.stream.synchronize()?;
    // SAFETY: allocated above, and no longer used.
    assert_eq!(unsafe { free(address) }, 0);
    setting.finish()
}

/// The second process, possibly on the second GPU.
pub(crate) fn child(arguments: &[String]) -> Result<(), Box<dyn std::error::Error>> {
    let driver = Driver::load()?;
    let device = driver.device(driver.device_count() - 1)?;
    let reaches = device.ordinal() == 0 || device.peer(driver.device(0)?)?.is_some();
    let context = if reaches { device } else { driver.device(0)? }.context()?;
    let stream = Stream::new(&context)?;
    match arguments {
        [kind, event] if kind == "descriptor" => {
            let fd: OwnedFd = io::stdin().as_fd().try_clone_to_owned()?;
            let memory = DeviceMemory::import(&context, fd.as_fd(), BYTES)?;
            assert_eq!(memory.device().map(|device| device.ordinal()), Some(0));
            let home = driver.device(0)?.context()?;
            let event = Event::open(&home, &EventHandle(unhex(event)?))?;
            // Another process's event is waited for and recorded by streams of its own device.
            let theirs = Stream::new(&home)?;
            theirs.wait(&event)?;
            if context != home {
                assert!(matches!(stream.wait(&event), Err(Error::ForeignEvent { event: 0, .. })));
            }
            let ours = Event::new(&home)?;
            theirs.record(&ours)?;
            stream.wait(&ours)?;
            stream.fill(memory.span(..1000)?, 7)?;
            stream.synchronize()?;
            theirs.record(&event)?;
            theirs.synchronize()?;
        }
        [kind, handle, offset] if kind == "ipc" => {
            // SAFETY: the first process waits for this one before it frees the memory.
            let memory = unsafe { Foreign::open(&context, &IpcHandle(unhex(handle)?))? };
            let offset: usize = offset.parse()?;
            stream.fill(memory.span(offset..offset + 1000)?, 7)?;
            drop(memory);
            stream.synchronize()?;
            assert_eq!(context.reap(), 0);
            io::stdout().write_all(b"done")?;
        }
        _ => return Err("no such case".into()),
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Result<[u8; 64], Box<dyn std::error::Error>> {
    let bytes: Vec<u8> = (0..text.len())
        .step_by(2)
        .map(|at| {
            text.get(at..at + 2)
                .ok_or("half a byte")
                .and_then(|byte| u8::from_str_radix(byte, 16).map_err(|_| "no byte"))
        })
        .collect::<Result<_, _>>()?;
    Ok(bytes.try_into().map_err(|_| "not a handle")?)
}
