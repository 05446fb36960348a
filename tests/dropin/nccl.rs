//! `doorbell run --nccl`: programs whose DT_RPATH leads to another NCCL.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use crate::{built, doorbell, missing, texts};

/// Prints the version, as the library that it is linked with says, and as one that is opened.
const PROGRAM: &str = "#include <dlfcn.h>\n#include <stdio.h>\n\
    int ncclGetVersion(int *version);\n\
    int main(void) {\n\
        int linked = 0, opened = 0;\n\
        int (*function)(int *) = (int (*)(int *))dlsym(dlopen(\"libnccl.so.2\", RTLD_NOW), \"ncclGetVersion\");\n\
        ncclGetVersion(&linked);\n\
        function(&opened);\n\
        printf(\"%d %d\\n\", linked, opened);\n\
    }\n";

/// Compiles a file; `None` without a compiler.
fn compile(file: &Path, source: &str, options: &[&str]) -> Option<()> {
    let text = file.with_extension("c");
    fs::write(&text, source).expect("a file");
    let mut compiler = Command::new("cc");
    compiler.arg("-o").args([file, &text]).args(options);
    compiler.status().is_ok_and(|status| status.success()).then_some(())
}

#[test]
fn no_other_nccl_is_loaded() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (other, program) = (folder.path().join("libnccl.so.2"), folder.path().join("program"));
    let source = "int ncclGetVersion(int *version) { *version = 7; return 0; }\n";
    let link = other.to_str().expect("a plain path");
    let built_both = compile(&other, source, &["-shared", "-fPIC", "-Wl,-soname,libnccl.so.2"]).and_then(|()| {
        compile(
            &program,
            PROGRAM,
            &[link, "-ldl", "-Wl,--disable-new-dtags,-rpath,$ORIGIN"],
        )
    });
    if built_both.is_none() {
        return missing("a C compiler (gcc)");
    }
    let prints = |options: &[&str]| {
        let words = [&["run"], options, &["--", program.to_str().expect("a plain path")]].concat();
        texts(&doorbell(&words).output().expect("doorbell was built"))
    };
    assert_eq!(prints(&[]), ("7 7\n".into(), String::new()));
    assert_eq!(prints(&["--nccl"]), ("23007 23007\n".into(), String::new()));
}

#[test]
fn a_missing_library_is_one_line() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for library in ["libdoorbell_dropin.so", "libdoorbell_sysfs.so"] {
        symlink(built().join(library), folder.path().join(library)).expect("the folder is empty");
    }
    let mut command = doorbell(&["run", "--nccl", "--", "true"]);
    let output = command.env("DOORBELL_LIBRARY_DIR", folder.path()).output();
    let output = output.expect("doorbell was built");
    let (_, stderr) = texts(&output);
    assert_eq!(
        (output.status.code(), stderr.lines().count()),
        (Some(125), 1),
        "{stderr}"
    );
    assert!(
        stderr.starts_with("doorbell: no libdoorbell_nccl.so in ") && stderr.contains("cargo build"),
        "{stderr}"
    );
}
