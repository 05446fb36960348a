//! The small programs that a new user would write: alone, as separate processes, with packet loss,
//! and with one line for what is wrong.

#![forbid(unsafe_code)]

use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};
use std::thread;

const PING_PONG: &str = env!("CARGO_BIN_EXE_01_ping_pong");
const KEY_VALUE: &str = env!("CARGO_BIN_EXE_04_key_value");
const STREAM: &str = env!("CARGO_BIN_EXE_06_verified_stream");
const LOST_RANK: &str = env!("CARGO_BIN_EXE_13_lost_rank");

/// Without the developer's variables, on a loopback address of this process.
fn command(program: &str, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("DOORBELL_")) {
        command.env_remove(name);
    }
    let [_, _, high, low] = std::process::id().to_be_bytes();
    command.env("DOORBELL_SOFT_ADDR", format!("127.{}.{low}.10", 32 + high % 128));
    command.args(args);
    command
}

fn output(program: &str, args: &[&str]) -> Output {
    command(program, args)
        .output()
        .expect("the example was built with this test")
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// An address that was free a moment ago.
fn address() -> String {
    let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    free.unwrap().to_string()
}

/// A server, killed when this is dropped.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn each_explains_itself_and_refuses_in_one_line() {
    for program in [PING_PONG, KEY_VALUE, STREAM, LOST_RANK] {
        assert!(stdout(&output(program, &["--help"])).starts_with("usage: "));
        let what: [(&[&str], &str); 3] = [
            (&["nonsense"], "nonsense: no such "),
            (&["--device", "soft?drop=2"], "drop=2: expected a fraction from 0 to 1"),
            (&["--device", "mlx9_9"], "mlx9_9"),
        ];
        for (args, message) in what {
            let mut refused = command(program, args);
            // For 13_lost_rank, whose ranks open the device.
            refused.envs([("DOORBELL_RANK", "0"), ("DOORBELL_RANKS", "2"), ("DOORBELL_ID", "none")]);
            let refused = refused.output().unwrap();
            let text = stderr(&refused);
            assert_eq!(refused.status.code(), Some(1), "{text}");
            assert!(text.lines().count() == 1 && text.contains(message), "{text}");
        }
    }
}

#[test]
fn messages_come_back_on_a_device_by_a_flag_or_a_variable() {
    let shown = |output: Output| {
        let text = stdout(&output);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert!(lines[0].starts_with("2000 round trips of 64 bytes on soft"), "{text}");
        assert!(
            lines[1].starts_with("one way: min ") && lines[1].ends_with(" µs"),
            "{text}"
        );
    };
    shown(output(PING_PONG, &["--device", "soft?drop=0.002&seed=7"]));
    let address = address();
    let soft = |args: &[&str]| {
        let mut command = command(PING_PONG, args);
        command.env("DOORBELL_DEVICE", "soft");
        command
    };
    let mut listening = soft(&["listen", &address]).spawn().unwrap();
    shown(soft(&["connect", &address]).output().unwrap());
    assert!(listening.wait().unwrap().success());
}

#[test]
fn what_one_client_has_put_another_gets() {
    let alone = "500 values put by one client and got by another\n";
    assert_eq!(stdout(&output(KEY_VALUE, &[])), alone);
    let lossy = output(KEY_VALUE, &["--device", "soft?drop=0.002&seed=7"]);
    assert_eq!(stdout(&lossy), alone);
}

#[test]
fn clients_of_a_key_value_server_are_processes() {
    let address = address();
    let _server = Server(command(KEY_VALUE, &["serve", &address]).spawn().unwrap());
    thread::scope(|scope| {
        for client in ["a", "b", "c"] {
            let address = &address;
            scope.spawn(move || {
                for value in [client.repeat(216), String::new(), client.to_owned()] {
                    stdout(&output(KEY_VALUE, &["put", address, client, &value]));
                    let got = stdout(&output(KEY_VALUE, &["get", address, client]));
                    assert_eq!(got.trim_end(), value);
                }
            });
        }
    });
    let refusal = |args: &[&str]| {
        let refused = output(KEY_VALUE, args);
        assert_eq!(refused.status.code(), Some(1), "{refused:?}");
        stderr(&refused)
    };
    let refused = "04_key_value: \"\" is refused: it is empty, or its slot is taken\n";
    assert_eq!(refusal(&["put", &address, "", "value"]), refused);
    let long = refusal(&["put", &address, &"long".repeat(9), "value"]);
    assert!(long.ends_with(": too long, or it is not ASCII\n"), "{long}");
    assert_eq!(refusal(&["get", &address, "d"]), "04_key_value: d: no such key\n");
}

#[test]
fn a_stream_is_verified_in_spite_of_packet_loss() {
    for device in ["soft0", "soft?drop=0.01&seed=7"] {
        let alone = output(STREAM, &["--device", device]);
        assert!(alone.status.success(), "{alone:?}");
        let text = stderr(&alone);
        assert!(text.starts_with("33554432 bytes, checksum "), "{text}");
    }
    let address = address();
    // Longer than the window, and not a multiple of a chunk.
    let file = STREAM;
    let receiving = command(STREAM, &["receive", &address])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut sending = command(STREAM, &["send", &address]);
    let mut sending = sending.stdin(std::fs::File::open(file).unwrap()).spawn().unwrap();
    let received = receiving.wait_with_output().unwrap();
    assert!(sending.wait().unwrap().success() && received.status.success());
    assert!(received.stdout == std::fs::read(file).unwrap(), "another file");
}

#[test]
fn the_other_ranks_finish_without_the_one_that_was_killed() {
    let done = output(LOST_RANK, &[]);
    let text = stdout(&done);
    let mut lines: Vec<_> = text.lines().collect();
    lines.sort_unstable();
    let line = |rank: u32| format!("rank {rank} has finished with ranks [0, 2, 3], every sum right");
    // The ranks of the new communicator are in the order of the old ones.
    assert_eq!(lines, [line(0), line(2), line(3)], "{done:?}");
    assert!(stderr(&done).contains("rank 1 ("), "{done:?}");
    let refused = output(LOST_RANK, &["--ranks", "1"]);
    assert_eq!(stderr(&refused), "13_lost_rank: --ranks 1: no rank would be left\n");
}
