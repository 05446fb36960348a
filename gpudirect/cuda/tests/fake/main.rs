//! The whole crate on a driver of the tests' own (`driver.c`), where there is no GPU: everything but what the hardware does.

#[path = "../suite/mod.rs"]
mod suite;

mod absent;
mod failures;

use std::ffi::{CString, c_char};
use std::fs;
use std::os::unix::process::parent_id;
use std::path::{Path, PathBuf};
use std::process::{self, Command};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use doorbell_cuda::{Absent, Driver};
use libloading::os::unix::Library;
use suite::{CASES, Verdict};

/// Everything that the driver of the tests counts.
const COUNTED: [&str; 11] = [
    "allocation",
    "mapping",
    "reservation",
    "host",
    "registered",
    "stream",
    "event",
    "module",
    "graph",
    "exec",
    "context",
];

/// A driver of the tests, which no other test has.
struct Fake {
    library: Library,
    path: PathBuf,
}

impl Fake {
    fn new() -> Self {
        static COMPILED: OnceLock<PathBuf> = OnceLock::new();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake/driver.c");
        Self::copy_of(COMPILED.get_or_init(|| compile("driver", &source)))
    }

    /// The dynamic loader gives each file a copy of its own of what the library knows.
    fn copy_of(compiled: &Path) -> Self {
        let path = unused("copy");
        fs::copy(compiled, &path).unwrap();
        // SAFETY: the library has no initialisers.
        let library = unsafe { Library::new(&path) }.unwrap();
        Self { library, path }
    }

    fn load(&self) -> Result<Driver, Absent> {
        // SAFETY: the driver of the tests does as NVIDIA's, in what it is called for here.
        unsafe { Driver::load_from(&self.path) }
    }

    fn function<T: Copy>(&self, name: &str) -> T {
        // SAFETY: the callers name functions of driver.c with their types.
        unsafe { *self.library.get::<T>(name.as_bytes()).unwrap() }
    }

    fn count(&self, name: &str) -> i32 {
        let name = CString::new(name).unwrap();
        // SAFETY: driver.c has it so.
        unsafe { self.function::<unsafe extern "C" fn(*const c_char) -> i32>("fake_count")(name.as_ptr()) }
    }

    /// The next call of `call` answers `code`.
    fn fail(&self, call: &str, code: i32) {
        let call = CString::new(call).unwrap();
        // SAFETY: driver.c has it so.
        unsafe { self.function::<unsafe extern "C" fn(*const c_char, i32)>("fake_fail")(call.as_ptr(), code) }
    }

    fn set_peers(&self, can: bool) {
        // SAFETY: driver.c has it so.
        unsafe { self.function::<unsafe extern "C" fn(i32)>("fake_peers")(can.into()) }
    }

    /// What the driver says when it is started.
    fn set_start(&self, devices: i32, version: i32) {
        // SAFETY: driver.c has it so.
        unsafe { self.function::<unsafe extern "C" fn(i32, i32)>("fake_start")(devices, version) }
    }

    fn number(&self, name: &str) -> i32 {
        // SAFETY: driver.c has it so, of the names that the callers give.
        unsafe { self.function::<unsafe extern "C" fn() -> i32>(name)() }
    }

    /// That everything has been given back.
    fn assert_nothing_left(&self, after: &str) {
        let left: Vec<_> = COUNTED.into_iter().filter(|name| self.count(name) != 0).collect();
        assert!(left.is_empty(), "{after}: left are {left:?}");
        assert_eq!(
            self.number("fake_mode"),
            0,
            "{after}: this thread's mode of capture has changed"
        );
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        // A file that stays behind in the folder of the build harms nobody.
        drop(fs::remove_file(&self.path));
    }
}

fn compile(name: &str, source: &Path) -> PathBuf {
    let library = unused(name);
    let status = Command::new("cc")
        .args([
            "-std=gnu11",
            "-O1",
            "-Wall",
            "-Werror",
            "-shared",
            "-fPIC",
            "-pthread",
            "-o",
        ])
        .args([&library, source])
        .status()
        .expect("a C compiler, cc");
    assert!(status.success(), "cc cannot compile {}", source.display());
    library
}

/// A file's name that no other test has, in a folder of the build.
fn unused(name: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fake-{name}-{}-{}-{next}.so", parent_id(), process::id()))
}

#[test]
fn the_suite() {
    for case in CASES {
        let fake = Fake::new();
        let driver = fake.load().unwrap();
        println!("{}", case.name);
        match (case.run)(driver) {
            Ok(Verdict::Passed) => {}
            Ok(Verdict::Skipped(why)) => panic!("{} was skipped: {why}", case.name),
            Err(error) => panic!("{}: {error}", case.name),
        }
        fake.assert_nothing_left(case.name);
    }
}
