//! `doorbell bw file` and `doorbell gpu --storage` as scripts use them, on the CUDA stand-in.
#![forbid(unsafe_code)]

mod common;

use std::fs;
use std::path::Path;

use doorbell_cuda_standin::{ExecutionMode, environment};
use serde_json::Value;

use self::common::{complaint, doorbell, json_of, run};

/// Bytes in a folder of their own; no multiple of a block.
const LEN: usize = (1 << 20) + 4321;

fn folder_with_file() -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("data");
    let bytes: Vec<u8> = (0..LEN).map(|at| (at * 7 + at / 300) as u8).collect();
    fs::write(&file, bytes).expect("a file");
    let name = file.to_str().expect("text").to_owned();
    (folder, name)
}

fn names(report: &Value) -> Vec<&str> {
    let rows = report["results"].as_array().expect("rows");
    rows.iter().map(|row| row["name"].as_str().expect("a name")).collect()
}

fn entries(folder: &Path) -> usize {
    fs::read_dir(folder).expect("a folder").count()
}

#[test]
fn a_file_is_measured_beside_the_limits_and_left_as_it_was() {
    let (folder, file) = folder_with_file();
    let before = fs::read(&file).expect("read");
    for (gpu, reads) in [(false, 4), (true, 5)] {
        for path in ["io_uring", "pread"] {
            let gpu = if gpu { "--gpu 0" } else { "" };
            let mut command = doorbell(&format!(
                "bw file {file} {gpu} -n 2 --block 64K --depth 4 --path {path}"
            ));
            command.envs(environment(ExecutionMode::Prompt, 1));
            let report = json_of(command);
            assert_eq!(report["storage"]["path"], path, "{report}");
            assert_eq!(report["bytes"], LEN, "{report}");
            assert_eq!(names(&report).len(), 2 * reads, "{report}");
            let own = &report["results"][reads - 1];
            assert_eq!(own["name"], "doorbell_read", "{report}");
            assert_eq!(own["ratios"][0]["against"], "slower_limit", "{report}");
        }
    }
    assert!(fs::read(&file).expect("read") == before);
    assert_eq!(entries(folder.path()), 1, "what the command made is removed");

    let mut command = doorbell(&format!(
        "bw file {} -n 1 --size 128K --no-write",
        folder.path().display()
    ));
    command.envs(environment(ExecutionMode::Prompt, 1));
    assert_eq!(
        names(&json_of(command)),
        ["disk_read", "dd_read", "read_copy", "doorbell_read"]
    );
    assert_eq!(entries(folder.path()), 1, "what the command made is removed");
}

#[test]
fn refusals_are_one_line_and_usage() {
    let (_folder, file) = folder_with_file();
    for (line, part) in [
        (
            "bw file /nonexistent/file",
            "/nonexistent/file: cannot open: No such file or directory",
        ),
        (
            &format!("bw file {file} --block 1000"),
            "block = 1000: use a multiple of 65536",
        ),
        (
            &format!("bw file {file} --path cufile"),
            "cufile is forced, and refused: it is for GPU memory alone",
        ),
        (&format!("bw file {file} --gpu 0"), "libcuda.so.1"),
    ] {
        let output = run(line);
        let complaint = complaint(&output);
        assert_eq!(output.status.code(), Some(2), "{line}: {complaint:?}");
        assert!(
            complaint.len() == 1 && complaint[0].contains(part),
            "{line}: {complaint:?}"
        );
    }
}

#[test]
fn a_listing_says_by_which_path_and_why() {
    let (_folder, file) = folder_with_file();
    let mut command = doorbell(&format!("gpu --storage {file}"));
    command.envs(environment(ExecutionMode::Prompt, 1));
    command.env("DOORBELL_CUFILE_LIBRARY", "/nonexistent/libcufile.so.0");
    let listing = json_of(command);
    let storage = listing["storage"].as_array().expect("entries");
    assert_eq!(storage.len(), 2, "{listing}");
    assert_eq!(storage[0].get("gpu"), None, "{listing}");
    assert_eq!(storage[1]["gpu"], 0, "{listing}");
    assert_eq!(
        storage[0]["refused"][0]["why"], "it is for GPU memory alone",
        "{listing}"
    );
    let why = storage[1]["refused"][0]["why"].as_str().expect("a reason");
    assert!(why.starts_with("cannot load /nonexistent/libcufile.so.0: "), "{why}");
}
