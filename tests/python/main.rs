//! The Python package over its extension module: the tests of bindings/python/tests, by Python's
//! own unittest. A test that needs what this Python lacks is skipped there, with the reason;
//! `cargo xtask python` brings it.

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

use doorbell_tests::{built, environment};
use tempfile::TempDir;

/// The first that has NumPy, else the first that there is.
const PYTHONS: [&str; 2] = ["python3", "/usr/bin/python3"];
const BINDINGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../bindings/python");

fn succeeds(python: &str, statement: &str) -> bool {
    let mut command = Command::new(python);
    command
        .args(["-c", statement])
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

fn python() -> Option<&'static str> {
    let which = |statement| PYTHONS.into_iter().find(|python| succeeds(python, statement));
    which("import numpy").or_else(|| which("import sys; assert sys.version_info >= (3, 9)"))
}

/// A folder with the package as the wheel has it.
fn package() -> TempDir {
    let folder = TempDir::new().expect("a folder for the package");
    let package = folder.path().join("doorbell_rdma");
    fs::create_dir_all(package.join("bin")).expect("the folder is writable");
    for module in fs::read_dir(Path::new(BINDINGS).join("doorbell_rdma")).expect("the package's sources") {
        let module = module.expect("a source").path();
        if module.is_file() {
            let name = module.file_name().expect("a file has a name");
            fs::copy(&module, package.join(name)).expect("the folder is writable");
        }
    }
    symlink(built().join("libdoorbell_python.so"), package.join("_native.abi3.so")).expect("the folder is empty");
    symlink(built().join("doorbell"), package.join("bin/doorbell")).expect("the folder is empty");
    folder
}

/// Python in the folder of the tests, with the package beside what it imports otherwise.
fn with(python: &str, package: &TempDir) -> Command {
    let inherited = env::var_os("PYTHONPATH");
    let others = inherited.iter().flat_map(env::split_paths);
    let paths = [package.path().to_owned()].into_iter().chain(others);
    let mut command = Command::new(python);
    command
        .current_dir(Path::new(BINDINGS).join("tests"))
        .env(
            "PYTHONPATH",
            env::join_paths(paths).expect("no colon is in a temporary folder's name"),
        )
        .env("PYTHONDONTWRITEBYTECODE", "1");
    if let Some(libraries) = env::var_os("DOORBELL_TEST_CUDA_LIBRARIES") {
        command.env("LD_LIBRARY_PATH", libraries);
    }
    command
}

fn passes(module: &str) {
    let Some(python) = python() else {
        println!("skipped: there is no Python 3.9");
        return;
    };
    let package = package();
    let output = with(python, &package)
        .args(["-m", "unittest", "-v", module])
        .output()
        .expect("Python runs");
    let said = String::from_utf8_lossy(&output.stderr);
    println!("{said}");
    assert!(output.status.success(), "{module}: {}", output.status);
    // Version 3.12 and later have a status for no tests.
    assert!(!said.contains("Ran 0 tests"), "{module} has no tests");
}

#[test]
fn arrays() {
    passes("test_arrays");
}

#[test]
fn communicator() {
    passes("test_communicator");
}

#[test]
fn examples() {
    passes("test_examples");
}

#[test]
fn failures() {
    passes("test_failures");
}

#[test]
fn import() {
    passes("test_import");
}

#[test]
fn run() {
    passes("test_run");
}

#[test]
fn torch() {
    passes("test_torch");
}

/// PyTorch's own tests of torch.distributed, on its backend and then, all of them, on gloo.
#[test]
fn pytorch() {
    // Of which version it is known what passes.
    let version = "import torch, expecttest, numpy; assert torch.__version__.startswith('2.15.')";
    let package = package();
    let Some(python) = python().filter(|python| {
        with(python, &package)
            .args(["-c", version])
            .output()
            .is_ok_and(|output| output.status.success())
    }) else {
        println!("skipped: there is no PyTorch 2.15 with what its tests need");
        return;
    };
    let runs: &[&[&str]] = match environment::is_whole() {
        true => &[&["--full"], &["--full", "--backend", "gloo"]],
        false => &[&[]],
    };
    for arguments in runs {
        let status = with(python, &package)
            .arg("pytorch.py")
            .args(*arguments)
            // A device of its own.
            .env("DOORBELL_DEVICE", "soft?address=127.83.0.1")
            .status()
            .expect("Python runs");
        assert!(status.success(), "pytorch.py {arguments:?}: {status}");
    }
}
