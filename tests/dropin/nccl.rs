//! `doorbell run --nccl` and `doorbell env --nccl`: programs whose DT_RPATH leads to another NCCL.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use crate::{address, built, doorbell, missing, texts};

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

/// Such a program, beside another library; `None` without a compiler.
fn program(folder: &Path) -> Option<String> {
    let (other, program) = (folder.join("libnccl.so.2"), folder.join("program"));
    let source = "int ncclGetVersion(int *version) { *version = 7; return 0; }\n";
    let link = other.to_str().expect("a plain path");
    compile(&other, source, &["-shared", "-fPIC", "-Wl,-soname,libnccl.so.2"])?;
    compile(
        &program,
        PROGRAM,
        &[link, "-ldl", "-Wl,--disable-new-dtags,-rpath,$ORIGIN"],
    )?;
    Some(program.to_str().expect("a plain path").to_owned())
}

#[test]
fn no_other_nccl_is_loaded() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let Some(program) = program(folder.path()) else {
        return missing("a C compiler (gcc)");
    };
    let prints = |options: &[&str]| {
        let words = [&["run"], options, &["--", &program]].concat();
        texts(&doorbell(&words).output().expect("doorbell was built"))
    };
    assert_eq!(prints(&[]), ("7 7\n".into(), String::new()));
    assert_eq!(prints(&["--nccl"]), ("23007 23007\n".into(), String::new()));
}

/// Twice: the second time the library is listed already.
#[test]
fn a_shell_can_take_the_variables() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let Some(program) = program(folder.path()) else {
        return missing("a C compiler (gcc)");
    };
    let script = r#"eval "$("$1" env --nccl)"; eval "$("$1" env --nccl)"; "$2"; echo $LD_PRELOAD"#;
    let mut shell = Command::new("sh");
    shell
        .args(["-euc", script, "sh"])
        .arg(built().join("doorbell"))
        .arg(program);
    shell.env("DOORBELL_SOFT_ADDR", address()).env("TMPDIR", folder.path());
    shell
        .env_remove("XDG_RUNTIME_DIR")
        .env_remove("LD_LIBRARY_PATH")
        .env_remove("LD_PRELOAD");
    let (stdout, stderr) = texts(&shell.output().expect("a shell"));
    let lines: Vec<_> = stdout.lines().collect();
    let is_listed_once = |list: &str| list.matches("/libdoorbell_nccl.so").count() == 1;
    assert!(
        matches!(lines[..], ["23007 23007", list] if is_listed_once(list)),
        "{stdout}{stderr}"
    );
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
        stderr.starts_with("doorbell: no libdoorbell_nccl.so in ") && stderr.contains("the package doorbell-nccl"),
        "{stderr}"
    );
}
