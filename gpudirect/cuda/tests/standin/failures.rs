//! Driver errors: how they are reported, and that nothing is left half done.

use std::os::fd::AsFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use doorbell_cuda::collective::CollectiveKernels;
use doorbell_cuda::{
    CaptureMode, Context, DeviceMemory, Driver, Error, Event, HostMemory, KernelFile, Memory, Module, Stream,
};

use doorbell_cuda_standin::{ExecutionMode, Standin};

use crate::suite::PTX;

fn with_context(test: impl FnOnce(&Standin, Driver, &Context)) {
    let standin = Standin::load(ExecutionMode::Lazy);
    let driver = standin.driver().unwrap();
    let context = driver.device(0).unwrap().context().unwrap();
    test(&standin, driver, &context);
    assert_eq!(context.reap(), 0);
    drop(context);
    standin.assert_nothing_left("all is dropped");
}

#[test]
fn driver_errors_are_classified() {
    with_context(|standin, _, context| {
        let alloc = |code| {
            standin.fail("cuMemCreate", code);
            DeviceMemory::alloc(context, 100).unwrap_err()
        };
        // Retried after dropped memory has been reaped.
        standin.fail("cuMemCreate", 2);
        DeviceMemory::alloc(context, 100).unwrap();
        let error = DeviceMemory::alloc(context, (1 << 30) + 1).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory(_)));
        assert_eq!(
            error.to_string(),
            "cuMemCreate of 1075838976 bytes on GPU 0: CUDA_ERROR_OUT_OF_MEMORY (out of memory): free memory of this GPU (nvidia-smi lists its users) or request less"
        );
        assert!(matches!(alloc(801), Error::NotSupported(_)));
        for code in [217, 705, 711] {
            assert!(matches!(alloc(code), Error::NoPeerAccess(_)), "{code}");
        }
        for code in [214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719] {
            assert!(matches!(alloc(code), Error::Lost(_)), "{code}");
        }
        let other = alloc(1);
        assert!(matches!(other, Error::Driver { .. }));
        assert_eq!(
            other.to_string(),
            "cuMemCreate of 2097152 bytes on GPU 0: CUDA_ERROR_INVALID_VALUE (invalid argument)"
        );
        // A newer driver has codes unknown to this crate.
        let unknown = alloc(123_456);
        assert_eq!(unknown.failure().map(|failure| failure.code), Some(123_456));
        assert_eq!(
            unknown.to_string(),
            "cuMemCreate of 2097152 bytes on GPU 0: CUDA error 123456 (the driver does not describe it)"
        );
    });
}

#[test]
fn partial_failures_leak_nothing() {
    with_context(|standin, _, context| {
        let exported = DeviceMemory::alloc(context, 100).unwrap().export_fd().unwrap();
        let made = |kind: &str| match kind {
            "alloc" => DeviceMemory::alloc(context, 100).err(),
            "import" => DeviceMemory::import(context, exported.as_fd(), 100).err(),
            "host" => HostMemory::alloc(context, 100).err(),
            "register" => HostMemory::register(context, vec![0; 100].into()).err(),
            "stream" => Stream::new(context).err(),
            "event" => Event::new(context).err(),
            "module" => Module::from_ptx(context, PTX).err(),
            _ => unreachable!(),
        };
        for (kind, call) in [
            ("alloc", "cuMemGetAllocationGranularity"),
            ("alloc", "cuMemCreate"),
            ("alloc", "cuMemAddressReserve"),
            ("alloc", "cuMemMap"),
            ("alloc", "cuMemSetAccess"),
            ("import", "cuMemImportFromShareableHandle"),
            ("import", "cuMemGetAllocationPropertiesFromHandle"),
            ("import", "cuMemGetAllocationGranularity"),
            ("import", "cuMemMap"),
            ("import", "cuMemSetAccess"),
            ("host", "cuMemHostAlloc"),
            ("host", "cuMemHostGetDevicePointer_v2"),
            ("register", "cuMemHostRegister_v2"),
            ("register", "cuMemHostGetDevicePointer_v2"),
            ("stream", "cuStreamCreateWithPriority"),
            ("event", "cuEventCreate"),
            ("module", "cuModuleLoadDataEx"),
        ] {
            standin.fail(call, 1);
            let error = made(kind).unwrap_or_else(|| panic!("{kind} did not fail as {call} did"));
            let failure = error.failure().unwrap();
            assert_eq!(
                call.strip_suffix("_v2").unwrap_or(call),
                failure.call,
                "{kind}: {error}"
            );
            for counted in [
                "allocation",
                "mapping",
                "reservation",
                "host",
                "registered",
                "stream",
                "event",
                "module",
            ] {
                assert_eq!(standin.count(counted), 0, "{kind}, when {call} fails: {counted}");
            }
        }
    });
}

#[test]
fn devices_without_peer_access() {
    with_context(|standin, driver, context| {
        standin.set_peers(false);
        let other = driver.device(1).unwrap();
        assert_eq!(context.device().peer(other).unwrap(), None);
        let error = DeviceMemory::options(context).peers(&[other]).alloc(100).unwrap_err();
        assert!(matches!(error, Error::NoPeerAccess(_)));
        assert!(
            error
                .to_string()
                .starts_with("cuDeviceCanAccessPeer of GPU 1 to GPU 0: "),
            "{error}"
        );
        let there = other.context().unwrap();
        assert!(matches!(
            context.enable_peer_access(&there),
            Err(Error::NoPeerAccess(_))
        ));
        standin.set_peers(true);
        context.enable_peer_access(&there).unwrap();
        DeviceMemory::options(context)
            .peers(&[other, context.device()])
            .alloc(100)
            .unwrap();
    });
}

#[test]
fn newer_functions_are_optional() {
    let standin = Standin::load_without(ExecutionMode::Lazy, &["cuMemGetHandleForAddressRange"]);
    let context = standin.driver().unwrap().device(0).unwrap().context().unwrap();
    let memory = DeviceMemory::alloc(&context, 100).unwrap();
    let error = memory.all().dma_buf().unwrap_err();
    assert_eq!(
        error.to_string(),
        "the driver here (CUDA 13.0) has no cuMemGetHandleForAddressRange: a newer one is needed"
    );
}

#[test]
fn the_thread_keeps_its_context() {
    with_context(|standin, driver, context| {
        let other = driver.device(1).unwrap().context().unwrap();
        assert_eq!(standin.depth(), 0);
        drop(DeviceMemory::alloc(context, 100).unwrap());
        assert_eq!(standin.depth(), 0, "a call left its context behind");
        other.make_current().unwrap();
        let stream = Stream::new(context).unwrap();
        let memory = DeviceMemory::alloc(context, 100).unwrap();
        stream.fill(memory.all(), 1).unwrap();
        standin.fail("cuMemsetD8Async", 1);
        stream.fill(memory.all(), 1).unwrap_err();
        drop((memory, stream));
        assert_eq!(standin.depth(), 1);
        context.synchronize().unwrap();
        other.synchronize().unwrap();
        assert_eq!(standin.depth(), 1);
    });
}

#[test]
fn failed_stream_keeps_no_resources() {
    with_context(|standin, _, context| {
        let stream = Stream::new(context).unwrap();
        let memory = DeviceMemory::alloc(context, 100).unwrap();
        let mut host = HostMemory::alloc(context, 100).unwrap();
        stream.fill(memory.all(), 5).unwrap();
        stream.copy(host.all(), memory.all()).unwrap();
        standin.fail("cuStreamSynchronize", 700);
        assert!(matches!(stream.synchronize(), Err(Error::Lost(_))));
        standin.fail("cuStreamSynchronize", 700);
        assert!(
            matches!(host.bytes_mut(), Err(Error::Lost(_))),
            "it is not known whether the copy was done"
        );
        // The driver works again, and the pending streams were kept.
        assert_eq!(host.bytes_mut().unwrap(), [5; 100]);
        standin.fail("cuStreamQuery", 700);
        drop(memory);
        assert_eq!(standin.count("mapping"), 0);
    });
}

#[test]
fn memory_that_cannot_be_unpinned_is_kept() {
    let standin = Standin::load(ExecutionMode::Lazy);
    let context = standin.driver().unwrap().device(0).unwrap().context().unwrap();
    let owner = Arc::new(vec![0u8; 100]);
    let at = NonNull::from(owner.as_slice()).cast::<u8>();
    // SAFETY: the owner keeps this many bytes.
    let host = unsafe { HostMemory::register_raw(&context, at, owner.len(), owner.clone()) }.unwrap();
    standin.fail("cuMemHostUnregister", 1);
    drop(host);
    assert_eq!(Arc::strong_count(&owner), 2, "devices may still write it");
}

#[test]
fn dropping_a_context_first_does_not_wait() {
    for work_is_done in [true, false] {
        let standin = Standin::load(ExecutionMode::Lazy);
        let context = standin.driver().unwrap().device(0).unwrap().context().unwrap();
        let stream = Stream::new(&context).unwrap();
        let memory = DeviceMemory::alloc(&context, 100).unwrap();
        let event = Event::new(&context).unwrap();
        stream.fill(memory.all(), 1).unwrap();
        drop(memory);
        stream.record(&event).unwrap();
        if work_is_done {
            event.synchronize().unwrap();
        }
        drop((event, stream, context));
        // Resources still in use are left to the driver, which frees them with the context.
        assert_eq!(standin.count("mapping"), if work_is_done { 0 } else { 1 });
        assert_eq!(standin.count("context"), 0);
    }
}

#[test]
fn foreign_stream_is_not_destroyed() {
    with_context(|standin, _, context| {
        let theirs = Stream::new(context).unwrap();
        let owner = Arc::new(());
        // SAFETY: the stream outlives the value made from it here.
        let stream = unsafe { Stream::from_raw(context, theirs.as_raw(), owner.clone()) };
        let memory = DeviceMemory::alloc(context, 100).unwrap();
        stream.fill(memory.all(), 1).unwrap();
        drop(memory);
        assert_eq!(standin.count("mapping"), 1);
        assert_eq!(context.reap(), 1);
        stream.synchronize().unwrap();
        assert_eq!(standin.count("mapping"), 0);

        // While its owner captures it, it is not queried: that would invalidate the capture.
        let memory = DeviceMemory::alloc(context, 100).unwrap();
        stream.fill(memory.all(), 1).unwrap();
        theirs
            .capture(CaptureMode::Relaxed, &[], || {
                drop(memory);
                assert_eq!(context.reap(), 1);
                Ok(())
            })
            .unwrap();
        stream.synchronize().unwrap();
        assert_eq!(standin.count("mapping"), 0);
        // Nor is it idle if a capture elsewhere forbids the query, or the status is unknown.
        for code in [906, 999] {
            let memory = DeviceMemory::alloc(context, 100).unwrap();
            stream.fill(memory.all(), 1).unwrap();
            standin.fail("cuStreamQuery", code);
            drop(memory);
            assert_eq!(standin.count("mapping"), 1);
            stream.synchronize().unwrap();
            assert_eq!(standin.count("mapping"), 0);
        }

        drop(stream);
        assert_eq!(standin.count("stream"), 1);
        assert_eq!(Arc::strong_count(&owner), 1);

        // The legacy default stream, which has no handle, takes copies one by one. SAFETY: no
        // stream of that name is used.
        let default = unsafe { Stream::from_raw(context, ptr::null_mut(), owner.clone()) };
        assert!(default.as_raw().is_null());
    });
}

/// A driver older than the assembler compiles PTX.
#[test]
fn machine_code_that_the_driver_does_not_know_is_no_failure() {
    with_context(|standin, _, context| {
        let load = || {
            let kernels = CollectiveKernels::of(context);
            kernels
                .load(KernelFile::Moe, |_| true)
                .map(|()| standin.count("module"))
        };
        assert_eq!(load().unwrap(), 1, "machine code of all kernels");
        for code in [200, 209] {
            standin.fail("cuModuleLoadDataEx", code);
            assert_eq!(load().unwrap(), 10, "PTX, a module for each kernel");
        }
        standin.fail("cuModuleLoadDataEx", 304);
        let error = load().unwrap_err();
        assert_eq!(error.failure().map(|failure| failure.code), Some(304), "{error}");
    });
}
