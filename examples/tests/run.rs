//! Runs the examples as users do: with both ends in one process, on soft devices.

#![forbid(unsafe_code)]

use std::process::{Command, Output};

fn run(program: &str) -> String {
    run_with(program, &[])
}

fn run_with(program: &str, arguments: &[&str]) -> String {
    let mut command = Command::new(program);
    command.args(arguments);
    // Without the variables of the developer's environment for soft devices.
    for name in ["DOORBELL_FAULTS", "DOORBELL_PCAP", "DOORBELL_LINK"] {
        command.env_remove(name);
    }
    let output = command.output().expect("the example was built with this test");
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{stdout}{stderr}", output.status);
    stdout
}

#[test]
fn the_sleeping_receiver_wakes_for_every_message_and_event() {
    let stdout = run(env!("CARGO_BIN_EXE_02_sleeping_receiver"));
    let lines: Vec<_> = stdout.lines().collect();
    assert_eq!(lines.len(), 6, "{stdout}");
    assert_eq!(lines[4], "message 4: 64 bytes");
    assert_eq!(lines[5], "a write with an invalid key: refused");
}

#[test]
fn datagrams_are_answered_without_connecting() {
    let stdout = run(env!("CARGO_BIN_EXE_05_datagrams"));
    let lines: Vec<_> = stdout.lines().collect();
    assert_eq!(lines.len(), 4, "{stdout}");
    for (number, line) in lines[..3].iter().enumerate() {
        assert!(
            line.starts_with(&format!("client {number}: 20 answers from queue pair 0x")),
            "{stdout}"
        );
    }
    assert_eq!(lines[3], "the server knew no client before its first request");
}

#[test]
fn tasks_serve_all_clients_though_packets_are_lost() {
    for device in ["soft", "soft?drop=0.01"] {
        assert_eq!(
            run_with(env!("CARGO_BIN_EXE_03_tokio"), &[device]),
            "8 clients, 50 values of each put and got\n"
        );
    }
}

#[test]
fn all_messages_arrive_once_though_their_server_goes_away() {
    let stdout = run(env!("CARGO_BIN_EXE_08_recover"));
    let lines: Vec<_> = stdout.lines().collect();
    let last = lines.len() - 1;
    assert_eq!(lines[0], "connected: the server has 0 messages");
    assert_eq!(
        lines[1..=2],
        [
            "the server is gone: transport retries exceeded",
            "connected: the server has 10 messages"
        ]
    );
    assert_eq!(lines[last], "24 messages delivered, each once", "{stdout}");
}

#[test]
fn all_clients_share_the_servers_receives() {
    assert_eq!(
        run(env!("CARGO_BIN_EXE_09_shared_receives")),
        "400 answers to 8 clients, by 4 receives\n"
    );
}

#[test]
fn memory_of_a_gpu_is_written_by_another_process() {
    for (path, shown) in [("auto", "device-copy"), ("staged", "staged")] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_07_gpu_write"));
        command.envs(doorbell_cuda_standin::environment(
            doorbell_cuda_standin::ExecutionMode::Prompt,
            2,
        ));
        let output = command.env("DOORBELL_GPU_PATH", path).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(stdout, format!("3145728 bytes written into memory of GPU 0, {shown}\n"));
    }
    // Without a GPU it reports that in one line.
    let mut command = Command::new(env!("CARGO_BIN_EXE_07_gpu_write"));
    let output = command
        .env("DOORBELL_CUDA_LIBRARY", "/no/such/library")
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(
        stderr.starts_with("no CUDA: ") && stderr.lines().count() == 1,
        "{stderr}"
    );
}

fn checkpoint(arguments: &[&str], gpu: bool) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_14_checkpoint"));
    let mode = doorbell_cuda_standin::ExecutionMode::Prompt;
    if gpu {
        command.envs(doorbell_cuda_standin::environment(mode, 1));
    } else {
        command.env("DOORBELL_CUDA_LIBRARY", "/no/such/library");
    }
    command.args(arguments).output().unwrap()
}

/// Saved from the host, loaded into a GPU, and the other way round; the sums are those of the file.
#[test]
fn a_checkpoint_is_saved_and_loaded_with_its_sums() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let name = file.to_str().unwrap();
    let mut sums = Vec::new();
    for gpu in [false, true] {
        let saved = checkpoint(&["save", name], gpu);
        assert!(saved.status.success(), "{saved:?}");
        let loaded = checkpoint(&["load", name], !gpu);
        assert!(loaded.status.success(), "{loaded:?}");
        let text = String::from_utf8(loaded.stdout).unwrap();
        let (head, rest) = text.split_once('\n').unwrap();
        assert!(head.starts_with("loaded 4 tensors, 47202308 bytes, by "), "{text}");
        assert_eq!(rest.lines().count(), 4, "{text}");
        sums.push(rest.to_owned());
    }
    assert_eq!(sums[0], sums[1]);
    // One bit of the last tensor.
    let bytes = std::fs::read(&file).unwrap();
    let mut wrong = bytes.clone();
    *wrong.last_mut().unwrap() ^= 1;
    std::fs::write(&file, wrong).unwrap();
    let output = checkpoint(&["load", name], true);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(
        output.status.code() == Some(1) && stderr.ends_with("tensor norm: wrong sum\n"),
        "{stderr}"
    );
    // A file that ends early.
    std::fs::write(&file, &bytes[..bytes.len() - 1]).unwrap();
    assert_eq!(checkpoint(&["load", name], false).status.code(), Some(1));
}

#[test]
fn hostile_headers_of_checkpoints_are_refused_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("hostile.safetensors");
    let place =
        |offsets: &str, shape: &str| format!(r#"{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}"#);
    let huge = u64::MAX.to_string();
    for (header, part) in [
        ("[]".to_owned(), "invalid type"),
        ("{\"a\":".to_owned(), "EOF"),
        (
            r#"{"a":{"dtype":"F31","shape":[4],"data_offsets":[0,16]}}"#.to_owned(),
            "tensor \"a\"",
        ),
        (place("[0,12]", "[4]"), "tensor \"a\""),
        (place("[0,16]", &format!("[{huge},{huge}]")), "tensor \"a\""),
        (place("[16,0]", "[4]"), "tensor \"a\""),
        (place("[0,-16]", "[4]"), "tensor \"a\""),
        (place("[0,16]", "[4.5]"), "tensor \"a\""),
        (place("[4,20]", "[4]"), "begins at 4"),
        (place("[0,32]", "[8]"), "tensors of 32 bytes in 16"),
        ("{}".to_owned(), "tensors of 0 bytes in 16"),
    ] {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend([0; 16]);
        std::fs::write(&file, bytes).unwrap();
        let output = checkpoint(&["load", file.to_str().unwrap()], false);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{header}: {stderr}");
        assert!(
            stderr.lines().count() == 1 && stderr.contains(part),
            "{header}: {stderr}"
        );
    }
    std::fs::write(&file, u64::MAX.to_le_bytes()).unwrap();
    let output = checkpoint(&["load", file.to_str().unwrap()], false);
    assert!(
        String::from_utf8(output.stderr)
            .unwrap()
            .contains("a header of 18446744073709551615 bytes")
    );
}
