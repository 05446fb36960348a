//! Machines without CUDA, or with an unusable one: one line that says what is missing.

use std::path::Path;

use doorbell_cuda::{Driver, LoadError};
use doorbell_cuda_standin::{ExecutionMode, Standin};

fn said(absent: Result<Driver, LoadError>) -> String {
    let said = absent.unwrap_err().to_string();
    assert!(!said.contains('\n'), "{said}");
    said
}

#[test]
fn no_library() {
    // SAFETY: there is no such library.
    let absent = unsafe { Driver::load_from(Path::new("libdoorbell-is-not-there.so.1")) };
    assert_eq!(
        said(absent),
        "no CUDA: cannot load libdoorbell-is-not-there.so.1: cannot open shared object file: No such file or directory; \
         NVIDIA's driver is needed for GPUs"
    );
}

/// Without a driver, as in CI, loading fails; anywhere, the first result is final.
#[test]
fn the_system() {
    match (Driver::load(), Driver::load()) {
        (Err(first), Err(second)) => {
            assert!(first.to_string().starts_with("no CUDA: "), "{first}");
            assert_eq!(first.to_string(), second.to_string());
        }
        (first, second) => assert_eq!(first.unwrap(), second.unwrap()),
    }
}

#[test]
fn a_library_without_the_functions() {
    let standin = Standin::load_without(ExecutionMode::Lazy, &["cuDriverGetVersion"]);
    assert_eq!(
        said(standin.driver()),
        "no CUDA: the driver here is too old, its libcuda.so.1 has no cuDriverGetVersion: one for CUDA 11.4 (version 470) or newer is needed"
    );
}

#[test]
fn an_old_driver() {
    let standin = Standin::load(ExecutionMode::Lazy);
    standin.set_start(2, 11020);
    assert_eq!(
        said(standin.driver()),
        "no CUDA: the driver here is for CUDA 11.2: one for CUDA 11.4 (version 470) or newer is needed"
    );
}

#[test]
fn no_device() {
    let standin = Standin::load(ExecutionMode::Lazy);
    standin.set_start(0, 13000);
    assert_eq!(
        said(standin.driver()),
        "no CUDA: the driver has no GPU for this process (see CUDA_VISIBLE_DEVICES, and the container's devices)"
    );
}

#[test]
fn driver_fails_to_initialize() {
    let standin = Standin::load(ExecutionMode::Lazy);
    standin.fail("cuInit", 34);
    assert_eq!(
        said(standin.driver()),
        "no CUDA: cuInit of the driver: CUDA_ERROR_STUB_LIBRARY (CUDA driver is a stub library); this is the toolkit's stub, for linking only: take its \
         folder out of LD_LIBRARY_PATH"
    );
    // Also for numbers that the driver does not describe.
    standin.fail("cuInit", 803);
    let said = said(standin.driver());
    assert!(
        said.starts_with(
            "no CUDA: cuInit of the driver: CUDA error 803 (the driver does not describe it); the kernel's module"
        ),
        "{said}"
    );
    assert_eq!(standin.driver().unwrap().device_count(), 2);
}
