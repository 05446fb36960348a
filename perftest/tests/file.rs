//! `doorbell bw file` and `doorbell gpu --storage` as scripts use them, on the CUDA stand-in.
#![forbid(unsafe_code)]

mod common;

use std::fs;
use std::path::Path;
use std::process::Stdio;

use doorbell_cuda_standin::{ExecutionMode, environment};
use serde_json::Value;

use self::common::server::Server;
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

fn from(server: &Server) -> String {
    format!("bw file --from 127.0.0.1 --port {} --device soft0", server.port)
}

#[test]
fn a_served_file_arrives_in_host_and_gpu_memory_and_is_measured_beside_a_local_one() {
    let (_folder, file) = folder_with_file();
    let mut server = Server::of_files(&file);
    let expected = format!("doorbell: bw file on soft0 serves {file} on 127.0.0.1:{}", server.port);
    assert_eq!(server.first_line, expected, "loopback alone");
    for gpu in ["", "--gpu 0"] {
        let mut command = doorbell(&format!(
            "{} data {gpu} --beside {file} -n 2 --block 64K",
            from(&server)
        ));
        command.envs(environment(ExecutionMode::Prompt, 1));
        let report = json_of(command);
        assert_eq!(names(&report), ["served_read", "dd_read", "read_copy", "doorbell_read"]);
        let of: Vec<_> = report["results"][0]["ratios"]
            .as_array()
            .expect("ratios")
            .iter()
            .collect();
        assert_eq!(of.len(), 3, "{report}");
        assert_eq!(
            (&report["bytes"], &report["device"]),
            (&Value::from(LEN), &Value::from("soft0"))
        );
        assert_eq!(report["link"], "soft-local", "{report}");
        // Three reads of each test, and the client's and the server's counts agree.
        let line = server.line();
        assert!(
            line.ends_with(&format!(" has left: {} bytes were sent", 3 * LEN)),
            "{line}"
        );
    }
    let report = json_of(doorbell(&format!("{} data --size 64K -n 3", from(&server))));
    assert_eq!(names(&report), ["served_read"]);
}

#[test]
fn what_is_not_served_and_ends_that_are_gone_are_one_line() {
    let (folder, file) = folder_with_file();
    fs::write(folder.path().join("empty"), b"").expect("a file");
    let server = Server::of_files(folder.path().to_str().expect("text"));
    let from = from(&server);
    for (line, status, part) in [
        (
            format!("{from} ../data"),
            1,
            "../data: the server: ../data: cannot open: Invalid cross-device link (os error 18): it is outside of what is served",
        ),
        (
            format!("{from} /etc/passwd"),
            1,
            "(os error 18): it is outside of what is served",
        ),
        (
            format!("{from} missing"),
            1,
            "missing: the server: missing: cannot open: No such file",
        ),
        (format!("{from} empty"), 2, "empty: there is nothing to read"),
        (
            format!("{from} data --size 2M"),
            2,
            "data: 2097152 bytes at offset 0: the file of 127.0.0.1:",
        ),
        (format!("{from} data --size 2M"), 2, &format!(" ends at offset {LEN}")),
        (
            format!("{from} data --beside {file}x"),
            2,
            "datax: cannot open: No such file",
        ),
        (
            format!("bw file {file} --device soft0"),
            2,
            "use --serve, or --from HOST",
        ),
        (
            format!("bw file --serve {file}x"),
            2,
            "datax: cannot be served: No such file",
        ),
        (
            "bw file --from 127.0.0.1 --port 1 data".to_owned(),
            1,
            "cannot reach 127.0.0.1 port 1: ",
        ),
    ] {
        let output = run(&line);
        let complaint = complaint(&output);
        assert_eq!(output.status.code(), Some(status), "{line}: {complaint:?}");
        assert!(
            complaint.len() == 1 && complaint[0].contains(part),
            "{line}: {complaint:?}"
        );
    }
}

/// A killed end is a line of the other, with the file and the offset; the server serves the next.
#[test]
fn a_killed_end_is_a_line_of_the_other() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("data");
    fs::File::create(&file)
        .and_then(|file| file.set_len(64 << 20))
        .expect("a file");
    let mut server = Server::of_files(file.to_str().expect("text"));
    let endless = format!("{} data -n 1000", from(&server));
    let mut client = doorbell(&endless).stderr(Stdio::piped()).spawn().expect("started");
    server.is_sending();
    client.kill().expect("killed");
    client.wait().expect("it has ended");
    let line = server.line();
    assert!(line.starts_with("doorbell: 127.0.0.1:"), "{line}");
    let is_between = line.contains(" has left: ");
    assert!(
        is_between || line.contains(": data: 67108864 bytes at offset 0: "),
        "{line}"
    );

    let output = server.interrupted(&mut doorbell(&endless), Server::kill);
    let complaint = complaint(&output);
    assert_eq!(output.status.code(), Some(1), "{complaint:?}");
    assert!(
        complaint.len() == 1 && complaint[0].contains("data: 67108864 bytes at offset 0: "),
        "{complaint:?}"
    );
}
