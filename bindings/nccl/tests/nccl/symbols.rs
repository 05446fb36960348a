//! The library exports what NCCL does, and has its name.

use std::collections::BTreeSet;
use std::process::Command;

use crate::library;

/// The functions of NCCL 2.32.3.
const FUNCTIONS: &str = include_str!("../../exports");
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
