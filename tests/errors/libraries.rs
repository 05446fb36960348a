//! Error messages of a process without librdmacm, or with a libibverbs that is too old: this
//! program again, with such an environment.

use std::path::Path;
use std::process::{Command, Stdio};

use doorbell_verbs::Library;
use doorbell_verbs::cm::ConnectionManager;

/// Names the library that the child loads.
const CHILD: &str = "DOORBELL_ERRORS_LOAD";
const PREFIX: &str = "error: ";

/// A library of the name, without symbols.
const OLD: &str = "";
/// An auditor of the dynamic loader (rtld-audit(7)) that hides librdmacm.
const HIDING: &str = r#"
    #include <stdint.h>
    #include <string.h>
    unsigned int la_version(unsigned int version) { return version; }
    char *la_objsearch(const char *name, uintptr_t *cookie, unsigned int flag) {
        return strstr(name, "librdmacm") ? 0 : (char *)name;
    }
"#;

/// In the child: loads the library, and prints the error.
pub(crate) fn is_child() -> bool {
    let error = match std::env::var(CHILD).as_deref() {
        Ok("libibverbs") => Library::system().err().map(|error| error.to_string()),
        Ok("librdmacm") => ConnectionManager::system().err().map(|error| error.to_string()),
        _ => return false,
    };
    println!("\n{PREFIX}{}", error.unwrap_or_default());
    true
}

pub(crate) fn without_librdmacm() -> String {
    child("librdmacm", "LD_AUDIT", "hiding.so", HIDING)
}

pub(crate) fn old_libibverbs() -> String {
    child("libibverbs", "LD_LIBRARY_PATH", "libibverbs.so.1", OLD)
}

/// The error of a child that loads `library` while `variable` names the library `file` made of
/// `source`, or its directory.
fn child(library: &str, variable: &str, file: &str, source: &str) -> String {
    let directory = tempfile::tempdir().unwrap();
    let made = directory.path().join(file);
    compile(source, &made);
    let value = if variable == "LD_AUDIT" {
        &made
    } else {
        directory.path()
    };
    let output = Command::new(std::env::current_exe().unwrap())
        .arg("--nocapture")
        .env(CHILD, library)
        .env(variable, value)
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let text = stdout.lines().find_map(|line| line.strip_prefix(PREFIX));
    text.unwrap_or_else(|| panic!("{stdout}\n{}", String::from_utf8_lossy(&output.stderr)))
        .to_owned()
}

/// Compiles a shared library with the C compiler that Rust links with.
fn compile(source: &str, made: &Path) {
    let file = made.with_extension("c");
    std::fs::write(&file, source).unwrap();
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .args([made, &file])
        .stdin(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success(), "cc: {status}");
}

/// Calls `f` with a locked-memory limit of `bytes`.
pub(crate) fn with_locked_memory<R>(bytes: u64, f: impl FnOnce() -> R) -> R {
    let mut before = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `before` may be written.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut before) }, 0);
    let set = |rlim_cur| {
        let limit = libc::rlimit { rlim_cur, ..before };
        // SAFETY: `limit` is read; the soft limit may be anything up to the hard one.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit) }, 0);
    };
    set(bytes.min(before.rlim_max));
    let result = f();
    set(before.rlim_cur);
    result
}
