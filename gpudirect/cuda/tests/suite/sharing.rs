//! Exported, imported and wrapped memory.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;

use doorbell_cuda::{Attribute, DeviceMemory, DevicePtr, Driver, Error, Foreign, Memory, MemoryType};

use super::{Outcome, Setting, pattern};

pub(super) fn by_descriptor(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let bytes = pattern((3 << 20) + 1, 7);
    let memory = setting.device(&bytes)?;
    let fd = memory.export_fd()?;
    let imported = DeviceMemory::import(&setting.context, fd.as_fd(), bytes.len())?;
    drop(fd);
    assert_ne!(imported.device_ptr(), memory.device_ptr());
    assert_eq!(imported.device(), memory.device());
    assert_eq!(imported.mapped_len(), memory.mapped_len());
    setting.stream.fill(memory.span(100..200)?, 1)?;
    drop(memory);
    let got = setting.read(&imported)?;
    assert!(got[..100] == bytes[..100] && got[100..200] == [1; 100] && got[200..] == bytes[200..]);
    drop(imported);
    setting.finish()
}

pub(super) fn not_memory(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let null = File::open("/dev/null")?;
    let refused = DeviceMemory::import(&setting.context, null.as_fd(), 4096);
    assert!(refused.is_err(), "{refused:?}");
    let fd = DeviceMemory::alloc(&setting.context, 4096)?.export_fd()?;
    let longer = DeviceMemory::import(&setting.context, fd.as_fd(), 64 << 20);
    assert!(longer.is_err(), "{longer:?}");
    let empty = DeviceMemory::import(&setting.context, fd.as_fd(), 0);
    assert!(matches!(empty, Err(Error::Empty)));
    DeviceMemory::import(&setting.context, fd.as_fd(), 4096)?;
    setting.finish()
}

pub(super) fn foreign(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let bytes = pattern(10_000, 2);
    let owner = Arc::new(setting.device(&bytes)?);
    let at = DevicePtr(owner.device_ptr().0 + 1000);
    // SAFETY: the owner keeps this many bytes.
    let memory = unsafe { Foreign::wrap(&setting.context, at, 5000, owner.clone())? };
    assert_eq!((memory.device_ptr(), memory.len()), (at, 5000));
    assert_eq!(memory.device()?, setting.context.device());
    assert!(setting.read(&memory)? == bytes[1000..6000]);
    let (fd, offset) = memory.export_fd()?;
    assert_eq!(offset, 1000);
    let imported = DeviceMemory::import(&setting.context, fd.as_fd(), bytes.len())?;
    assert!(setting.read(&imported)? == bytes);
    let ipc = memory.ipc_handle();
    assert!(ipc.is_err(), "mapped memory has no handle of the older kind");

    setting.keep_busy(50)?;
    setting.stream.fill(memory.all(), 4)?;
    drop(memory);
    assert_eq!(
        Arc::strong_count(&owner),
        2,
        "the owner was let go of while work was to come"
    );
    setting.stream.synchronize()?;
    assert_eq!(setting.context.reap(), 0);
    assert_eq!(Arc::strong_count(&owner), 1);

    // SAFETY: refused, as there is no CUDA memory.
    let nowhere = unsafe { Foreign::wrap(&setting.context, DevicePtr(4096), 4, Arc::new(())) };
    assert!(nowhere.is_err());
    setting.finish()
}

pub(super) fn pointers(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let memory = DeviceMemory::alloc(&setting.context, 5000)?;
    let inside = memory.span(77..)?.device_ptr();
    let info = setting
        .context
        .pointer_info(inside)?
        .ok_or("the driver does not know its own memory")?;
    assert_eq!(info.memory_type, MemoryType::Device);
    assert_eq!(info.device, 0);
    assert_eq!(info.allocation, Some((memory.device_ptr(), memory.mapped_len())));
    assert!(info.is_mapped && info.shares_by_fd && !info.shares_by_ipc);
    assert_eq!(info.is_gpu_direct, memory.is_gpu_direct());
    let other = DeviceMemory::alloc(&setting.context, 1)?;
    let other = setting.context.pointer_info(other.device_ptr())?.ok_or("as above")?;
    assert_ne!(info.buffer_id, other.buffer_id);

    let vector = [0u8; 100];
    assert_eq!(
        setting.context.pointer_info(DevicePtr(vector.as_ptr().addr() as u64))?,
        None
    );
    assert_eq!(setting.context.pointer_info(DevicePtr(0))?, None);
    setting.finish()
}

pub(super) fn dma_bufs(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let memory = DeviceMemory::alloc(&setting.context, 5000)?;
    let result = memory.span(4097..)?.dma_buf();
    if setting.context.device().has(Attribute::DmaBufSupported) {
        let dma_buf = result?;
        assert_eq!(dma_buf.start.0 + dma_buf.offset as u64, memory.device_ptr().0 + 4097);
        assert!(dma_buf.offset + 5000 - 4097 <= dma_buf.len && dma_buf.len <= memory.mapped_len());
    } else {
        let error = result.unwrap_err();
        assert!(
            matches!(error, Error::Missing { .. } | Error::NotSupported(_)),
            "{error}"
        );
    }
    assert!(matches!(memory.span(..0)?.dma_buf(), Err(Error::Empty)));
    setting.finish()
}

pub(super) fn nothing_is_left(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let round = || -> Result<(), Box<dyn std::error::Error>> {
        let memory = setting.device(&pattern(100, 1))?;
        let fd = memory.export_fd()?;
        let imported = DeviceMemory::import(&setting.context, fd.as_fd(), 100)?;
        setting.stream.fill(imported.all(), 1)?;
        Ok(())
    };
    round()?;
    setting.stream.synchronize()?;
    let (before, _) = setting.context.memory_info()?;
    for _ in 0..500 {
        round()?;
    }
    setting.stream.synchronize()?;
    assert_eq!(setting.context.reap(), 0);
    let (after, _) = setting.context.memory_info()?;
    // Other programs may use the same device: 500 leaks would take a thousand megabytes.
    assert!(
        after + (256 << 20) > before,
        "{before} bytes were free, and then {after}"
    );
    setting.finish()
}
