//! The driver of doorbell-cuda's tests, as this crate's tests load it.

use std::path::{Path, PathBuf};
use std::process::{self, Command};
use std::sync::OnceLock;

use doorbell_cuda::{Context, Driver};

/// A GPU that the driver of the tests has.
pub(crate) fn context() -> Context {
    static LOADED: OnceLock<Driver> = OnceLock::new();
    let driver = *LOADED.get_or_init(|| {
        let library = compile();
        // SAFETY: the driver of the tests does as NVIDIA's, in what it is called for here.
        let driver = unsafe { Driver::load_from(&library) }.unwrap();
        std::fs::remove_file(&library).unwrap();
        driver
    });
    driver.device(0).unwrap().context().unwrap()
}

fn compile() -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda/tests/fake/driver.c");
    let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("driver-{}.so", process::id()));
    let status = Command::new("cc")
        .args(["-std=gnu11", "-O1", "-shared", "-fPIC", "-pthread", "-o"])
        .args([&library, &source])
        .status()
        .expect("a C compiler, cc");
    assert!(status.success(), "cc cannot compile {}", source.display());
    library
}
