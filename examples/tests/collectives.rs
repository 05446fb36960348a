//! Runs the examples of collectives as users do: they start their ranks, or are started as ranks.

#![forbid(unsafe_code)]

use std::net::TcpListener;
use std::process::{Command, Output, Stdio};

/// Without the developer's variables for soft devices, collectives and launchers.
fn example(program: &str, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars() {
        let launchers = ["DOORBELL_", "OMPI_", "SLURM_", "PMIX_", "MASTER_", "RANK", "WORLD_SIZE"];
        if launchers.iter().any(|prefix| name.starts_with(prefix)) {
            command.env_remove(name);
        }
    }
    let [_, _, high, low] = std::process::id().to_be_bytes();
    command.env("DOORBELL_SOFT_ADDR", format!("127.{}.{low}.9", 32 + high % 128));
    command.args(args);
    command
}

fn lines(output: &Output) -> Vec<String> {
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{stdout}{stderr}", output.status);
    stdout.lines().map(str::to_owned).collect()
}

fn run(program: &str, args: &[&str]) -> Vec<String> {
    lines(
        &example(program, args)
            .output()
            .expect("the example was built with this test"),
    )
}

#[test]
fn a_matrix_product_of_uneven_shares_is_right() {
    let rows = "509 rows over 3 ranks, 170 and 170 and 169 each: the product is right";
    assert_eq!(run(env!("CARGO_BIN_EXE_10_matrix_multiply"), &[]), [rows]);
    let rows = "509 rows over 1 ranks, 509 each: the product is right";
    assert_eq!(run(env!("CARGO_BIN_EXE_10_matrix_multiply"), &["--ranks", "1"]), [rows]);
}

#[test]
fn training_over_ranks_matches_a_single_rank() {
    let lines = run(env!("CARGO_BIN_EXE_11_data_parallel"), &[]);
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(lines[0].starts_with("251 samples over 3 ranks, 120 steps: the loss fell from "));
    assert_eq!(
        lines[1],
        "the same weights on all ranks, and within 0.00001 of those of a single rank"
    );
}

#[test]
fn a_sharded_optimiser_gives_the_bits_of_a_whole_one() {
    for ranks in ["2", "3"] {
        let lines = run(env!("CARGO_BIN_EXE_12_sharded_optimiser"), &["--ranks", ranks]);
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[0].starts_with(&format!("1009 parameters over {ranks} ranks")));
        assert_eq!(lines[1], "to the bit as by an optimiser that is not sharded");
    }
}

#[test]
fn under_a_launcher_an_example_is_one_rank() {
    // Rank 0 listens at the first free one of the eight ports from this one.
    let port = TcpListener::bind("127.0.0.1:0")
        .and_then(|free| free.local_addr())
        .unwrap()
        .port();
    let port = port.min(65_000).to_string();
    let rank = |rank: &str| {
        let mut command = example(env!("CARGO_BIN_EXE_10_matrix_multiply"), &[]);
        command.envs([("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2")]);
        command.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let [first, second] = ["0", "1"]
        .map(rank)
        .map(|rank| lines(&rank.wait_with_output().unwrap()));
    assert_eq!(first, ["509 rows over 2 ranks, 255 and 254 each: the product is right"]);
    assert!(second.is_empty(), "{second:?}");
}

#[test]
fn bad_usage_and_failures_have_different_exit_codes() {
    let program = env!("CARGO_BIN_EXE_10_matrix_multiply");
    for args in [&["--ranks", "0"][..], &["--ranks"], &["quickly"]] {
        let output = example(program, args).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("usage: 10_matrix_multiply"));
    }
    let help = example(program, &["--help"]).output().unwrap();
    assert_eq!(help.status.code(), Some(0));
    let output = example(program, &["--device", "soft7"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("not all ranks succeeded"));
}
