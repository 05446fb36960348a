//! The library exports what NCCL does, what programs import of it, and has its name.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use crate::{clients, library};

/// The functions of NCCL 2.32.3.
const FUNCTIONS: &str = include_str!("../../exports");
/// What PyTorch imports of NCCL, by release, below comments.
const IMPORTS: [&str; 2] = [
    include_str!("../imports/torch-2.11.0"),
    include_str!("../imports/torch-2.15.0"),
];
/// It has no twin for profilers.
const ALONE: &str = "ncclResetDebugInitInternal";

fn readelf(option: &str) -> String {
    let output = Command::new("readelf").args(["-W", option]).arg(library()).output();
    let output = output.expect("readelf (binutils), which comes with a linker");
    assert!(output.status.success(), "readelf {option}");
    String::from_utf8(output.stdout).expect("readelf writes text")
}

#[test]
fn exactly_the_functions_of_nccl_and_their_twins_are_exported() {
    let table = readelf("--dyn-syms");
    let exported: BTreeSet<&str> = table
        .lines()
        .filter_map(|line| match line.split_whitespace().collect::<Vec<_>>()[..] {
            [_, _, _, _, "GLOBAL" | "WEAK", _, section, name] if section != "UND" => Some(name),
            _ => None,
        })
        .collect();
    let twins: Vec<String> = FUNCTIONS
        .lines()
        .filter(|name| *name != ALONE)
        .map(|name| format!("p{name}"))
        .collect();
    let expected: BTreeSet<&str> = FUNCTIONS.lines().chain(twins.iter().map(String::as_str)).collect();
    assert_eq!(expected.len(), 193);
    assert_eq!(exported, expected);
}

#[test]
fn it_has_the_name_that_programs_request_and_is_never_unloaded() {
    let dynamic = readelf("--dynamic");
    assert!(dynamic.contains("Library soname: [libnccl.so.2]"), "{dynamic}");
    assert!(dynamic.contains("NODELETE"), "{dynamic}");
}

/// What the dynamic loader says of a program or library when it resolves all of its symbols.
fn loaded(file: &Path) -> String {
    let output = Command::new("ldd").arg("-r").arg(file).output();
    let output = output.expect("ldd, which comes with glibc");
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).expect("ldd writes text"));
    said.concat()
}

/// A library that imports these, beside ours, as the loader sees it.
fn importing(names: &[&str]) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let [source, importer, ours] = ["importer.c", "importer.so", "libnccl.so.2"].map(|name| folder.path().join(name));
    symlink(library(), &ours).expect("the folder is empty");
    let declared: String = names.iter().map(|name| format!("void {name}(void);\n")).collect();
    let table = names.join(", ");
    fs::write(
        &source,
        format!("{declared}void (*const table[])(void) = {{ {table} }};\n"),
    )
    .expect("a file");
    let output = Command::new("cc")
        .args(["-shared", "-fPIC", "-Wl,-rpath,$ORIGIN", "-o"])
        .args([&importer, &source, &ours])
        .output()
        .expect("a C compiler, cc");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    loaded(&importer)
}

#[test]
fn what_pytorch_imports_is_resolved() {
    for (list, count) in IMPORTS.into_iter().zip([38, 51]) {
        let names: Vec<&str> = list.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(names.len(), count);
        let said = importing(&names);
        assert!(said.contains("libnccl.so.2 => "), "{said}");
        assert!(!said.contains("undefined symbol"), "{said}");
    }
    let said = importing(&["ncclAllReduce", "ncclOfNoRelease"]);
    assert!(
        said.contains("undefined symbol: ncclOfNoRelease") && !said.contains("ncclAllReduce"),
        "{said}"
    );
}

#[test]
fn what_the_c_client_imports_is_resolved() {
    let said = loaded(clients::client());
    assert!(
        said.contains("libnccl.so.2 => ") && !said.contains("undefined symbol"),
        "{said}"
    );
}
