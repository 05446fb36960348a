//! GPUs as scripts use them: `doorbell gpu`, and `--gpu` of the tests, with the stand-in for two
//! GPUs in place of NVIDIA's driver.
#![forbid(unsafe_code)]

mod common;

use std::process::Command;

use doorbell_cuda_standin::{ExecutionMode, environment};
use serde_json::Value;

use self::common::{doorbell, json_of, stderr};

fn with_gpus(line: &str) -> Command {
    let mut command = doorbell(line);
    command.envs(environment(ExecutionMode::Prompt, 2));
    command
}

#[test]
fn every_test_runs_between_any_memories_and_verifies() {
    for test in ["bw write", "bw read", "bw send", "lat write", "lat read", "lat send"] {
        for (gpus, size) in [("0,1", 70_000), ("0,host", 3), ("host,1", 4096), ("1", 1)] {
            let line = format!("{test} --gpu {gpus} -s {size} -n 20 --verify");
            let report = json_of(with_gpus(&line));
            assert_eq!(report["results"][0]["bytes"], size, "{line}: {report}");
            let (ours, theirs) = (gpus != "host,1", gpus != "0,host");
            assert_eq!(report.get("gpu").is_some(), ours, "{line}: {report}");
            assert_eq!(report.get("peer_gpu").is_some(), theirs, "{line}: {report}");
            assert_eq!(report["memory"] == "host", !ours, "{line}: {report}");
        }
    }
}

#[test]
fn staged_memory_is_reported() {
    let mut command = with_gpus("bw write --gpu 0,1 -s 2M -n 20");
    command.env("DOORBELL_GPU_PATH", "staged").args(["--json", "-v"]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(
        stderr(&output).contains("staged through the host"),
        "{}",
        stderr(&output)
    );
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["memory"], "staged");
    assert_eq!(report["gpu"]["memory"], "staged");
    assert_eq!(report["peer_gpu"]["number"], 1);
    let row = &report["results"][0];
    assert!(row["raw_copy_bytes_per_s"].as_f64().unwrap() > 0.0, "{row}");
}

#[test]
fn missing_support_is_one_line() {
    for (mut command, part) in [
        (doorbell("bw write --gpu 0 -n 5"), "libcuda.so.1"),
        (with_gpus("bw write --gpu 7 -n 5"), "there is no GPU 7"),
        (
            {
                let mut command = with_gpus("bw write --gpu 0 -n 5");
                command.env("DOORBELL_GPU_PATH", "tunnel");
                command
            },
            "'tunnel' is no path",
        ),
    ] {
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        let complaints = stderr(&output);
        assert!(
            complaints.lines().count() == 1 && complaints.contains(part),
            "{complaints}"
        );
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn a_forced_path_that_is_impossible_fails_with_the_reason() {
    let mut command = with_gpus("bw write --gpu 0 -n 5");
    let output = command.env("DOORBELL_GPU_PATH", "peermem").output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let complaints = stderr(&output);
    assert!(
        complaints.contains("peermem: soft0 is a device in software"),
        "{complaints}"
    );
}

#[test]
fn gpus_and_paths_are_listed() {
    let listing = json_of(with_gpus("gpu"));
    let gpus = listing["gpus"].as_array().unwrap();
    assert_eq!(gpus.len(), 2, "{listing}");
    assert_eq!(gpus[0]["peers"][0]["gpu"], 1);
    let soft: Vec<_> = listing["paths"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|pair| pair["device"] == "soft0")
        .collect();
    assert_eq!(soft.len(), 2, "{listing}");
    for pair in soft {
        let paths = pair["paths"].as_array().unwrap();
        let names: Vec<_> = paths.iter().map(|tried| tried["path"].as_str().unwrap()).collect();
        assert_eq!(names, ["dmabuf", "peermem", "device-copy", "staged"]);
        assert!(
            paths
                .iter()
                .all(|tried| tried["works"].as_bool().unwrap() != tried.get("why").is_some())
        );
        assert_eq!(pair["best"], "device-copy", "{pair}");
    }
}

#[test]
fn without_a_gpu_one_line_says_what_is_missing() {
    let output = doorbell("gpu").output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(output.stdout.is_empty(), "{output:?}");
    let complaints = stderr(&output);
    assert!(
        complaints.lines().count() == 1 && complaints.contains("no CUDA"),
        "{complaints}"
    );
    let listing = json_of(doorbell("gpu"));
    assert_eq!(listing["gpus"].as_array().map(Vec::len), Some(0));
    assert_eq!(listing["notes"].as_array().map(Vec::len), Some(1));
}
