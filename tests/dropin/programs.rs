//! C programs, linked with rdma-core's library, on the drop-in.

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use tempfile::TempDir;

use crate::{address, built, doorbell, missing, stdout_of, texts};

const SIGNALS: [&str; 4] = ["-D_GNU_SOURCE", "-lrdmacm", "-libverbs", "-lpthread"];

/// Compiles one of the sources here; `None` where that is not possible.
pub(crate) fn compiled(source: &str, libraries: &[&str]) -> Option<(TempDir, PathBuf)> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let program = folder.path().join("program");
    let output = Command::new("cc")
        .args(["-std=gnu11", "-O1", "-Wall", "-Werror", "-o"])
        .arg(&program)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("dropin").join(source))
        .args(libraries)
        .output();
    let errors = match output {
        Ok(output) if output.status.success() => return Some((folder, program)),
        Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
        Err(error) => error.to_string(),
    };
    assert!(
        !errors.contains(": error:") || errors.contains("No such file"),
        "{source}: {errors}"
    );
    missing(&format!("a C compiler with libibverbs (gcc, libibverbs-dev): {errors}"));
    None
}

fn path(program: &Path) -> &str {
    program.to_str().expect("a plain path")
}

#[test]
fn a_linked_program_finds_all_that_it_calls() {
    let Some((_folder, program)) = compiled("client.c", &["-D_GNU_SOURCE", "-libverbs"]) else {
        return;
    };
    assert_eq!(stdout_of(&[path(&program)]), "");
}

#[test]
fn a_program_that_loads_the_library_finds_its_versions() {
    let Some((_folder, program)) = compiled("loader.c", &["-ldl", "-lpthread"]) else {
        return;
    };
    assert_eq!(stdout_of(&[path(&program)]), "");
}

#[test]
fn numbers_have_the_same_names_as_in_the_systems_library() {
    let Some((_folder, program)) = compiled("words.c", &["-libverbs"]) else {
        return;
    };
    let theirs = Command::new(&program).output().expect("it was just compiled");
    assert!(theirs.status.success());
    assert_eq!(stdout_of(&[path(&program)]), texts(&theirs).0);
}

/// Bit 3 for UDP, and 2 for IPv4 or 1 for IPv6, as mlx5's completions: UCX 1.13 drops what has
/// none.
#[test]
fn the_service_level_of_a_datagram_is_the_type_of_its_frame() {
    let Some((_folder, program)) = compiled("datagram.c", &["-libverbs"]) else {
        return;
    };
    assert_eq!(stdout_of(&[path(&program)]), "10\n");
    let output = doorbell(&["run", "--address", "::1", "--", path(&program)])
        .output()
        .expect("doorbell was built");
    assert_eq!(texts(&output), ("9\n".to_owned(), String::new()));
}

/// rping's server overwrites its one variable with the second of two ids, and creates two queue
/// pairs on it (EINVAL): a server that does not, has all of them.
#[test]
fn clients_that_connect_at_once_are_all_served() {
    let Some((_folder, program)) = compiled("at_once.c", &["-lrdmacm", "-libverbs", "-lpthread"]) else {
        return;
    };
    let here = address();
    let output = doorbell(&["run", "--address", &here, "--", path(&program), &here])
        .output()
        .expect("doorbell was built");
    assert!(output.status.success(), "{:?}", texts(&output));
}

/// The library prints nothing: errno reports the failure, `DOORBELL_LOG` enables logging.
#[test]
fn a_device_that_does_not_open_is_an_errno_value() {
    let Some((_folder, program)) = compiled("client.c", &["-D_GNU_SOURCE", "-libverbs"]) else {
        return;
    };
    let with = |variables: &str| {
        let script = format!("{variables} exec {}", path(&program));
        let output = doorbell(&["run", "--", "sh", "-c", &script])
            .output()
            .expect("doorbell was built");
        let (stdout, stderr) = texts(&output);
        (output.status.code(), stdout, stderr)
    };
    // Of the class E network, and no address of this host.
    let invalid = "DOORBELL_SOFT_ADDR=240.1.2.3";
    assert_eq!(with(invalid), (Some(2), "EADDRNOTAVAIL\n".into(), String::new()));
    let (status, _, log) = with(&format!("{invalid} DOORBELL_LOG=error"));
    assert_eq!(status, Some(2));
    assert!(log.contains("240.1.2.3") && log.lines().count() == 1, "{log}");
}

/// With and without SA_RESTART, and O_NONBLOCK.
#[test]
fn signals_end_the_waits_for_events_as_they_end_read() {
    let Some((_folder, program)) = compiled("signals.c", &SIGNALS) else {
        return;
    };
    assert_eq!(stdout_of(&[path(&program), "waits"]), "");
}

/// With signalfd(2) or sigwait(3): else the signal's default action ends the process.
#[test]
fn signals_that_a_program_has_blocked_are_left_to_it() {
    let Some((_folder, program)) = compiled("signals.c", &SIGNALS) else {
        return;
    };
    assert_eq!(stdout_of(&[path(&program), "threads"]), "");
}

/// A set-user-ID program obeys no variable of its caller; without the bit, the same one does.
#[test]
fn a_set_user_id_program_ignores_the_environment() {
    if !nix::unistd::geteuid().is_root() {
        return missing("only root can make a program another user's");
    }
    let libraries = tempfile::tempdir().expect("a temporary folder");
    let link = libraries.path().join("libibverbs.so.1");
    symlink(built().join("libdoorbell_dropin.so"), link).expect("the folder is empty");
    let rpath = format!("-Wl,-rpath,{}", libraries.path().display());
    let Some((folder, program)) = compiled("secure.c", &[&rpath, "-libverbs"]) else {
        return;
    };
    let permit = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).expect("it is ours");
    permit(libraries.path(), 0o755);
    permit(folder.path(), 0o777);
    let capture = folder.path().join("capture.pcap");
    let run_with_mode = |mode| {
        permit(&program, mode);
        let output = Command::new(&program)
            .env("DOORBELL_PCAP", &capture)
            .uid(65534)
            .gid(65534)
            .output()
            .expect("it was just compiled");
        assert!(output.status.success(), "{output:?}");
        texts(&output).0
    };
    let mode = run_with_mode(0o4755);
    if mode != "1\n" {
        return missing("a temporary folder without nosuid");
    }
    assert!(!capture.exists(), "root wrote a file that its caller named");
    assert_eq!(run_with_mode(0o755), "0\n");
    assert!(capture.exists());
}

/// The command of a role of `manager.c`.
fn manager(program: &Path, role: &str, here: &str) -> Command {
    let mut command = doorbell(&["run", "--", path(program), role, here, "7471"]);
    command.env("DOORBELL_SOFT_ADDR", here);
    command
}

/// Started, and ready for two clients in sequence.
fn listening(mut command: Command) -> Child {
    let mut server = command.spawn().expect("doorbell was built");
    let mut ready = String::new();
    BufReader::new(server.stdout.as_mut().expect("it is piped"))
        .read_line(&mut ready)
        .expect("it writes text");
    assert_eq!(ready, "ready\n");
    server
}

fn succeeds(server: Child) {
    let output = server.wait_with_output().expect("it was started");
    let (_, stderr) = texts(&output);
    assert!(
        output.status.success() && stderr.is_empty(),
        "{}\n{stderr}",
        output.status
    );
}

/// A port has one owner, and the peer of a killed end is notified.
#[test]
fn processes_of_one_address_connect() {
    let Some((_folder, program)) = compiled("manager.c", &["-lrdmacm", "-libverbs"]) else {
        return;
    };
    let here = address();
    let server = listening(manager(&program, "listen", &here));
    for (what, succeeds) in [("busy", true), ("die", false), ("connect", true)] {
        let output = manager(&program, what, &here).output().expect("doorbell was built");
        let (_, stderr) = texts(&output);
        assert!(
            output.status.success() == succeeds && stderr.is_empty(),
            "{what}: {}\n{stderr}",
            output.status
        );
    }
    succeeds(server);
}

/// The connection manager's device is open until the process ends, by exit or a signal.
#[test]
fn captures_are_complete_however_a_program_ends() {
    let Some((_folder, program)) = compiled("manager.c", &["-lrdmacm", "-libverbs"]) else {
        return;
    };
    let captured = |role: &str, here: &str| {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut command = manager(&program, role, here);
        command.env("DOORBELL_PCAP", folder.path().join("link.pcap"));
        (folder, command)
    };
    for ends in [["connect", "abort"], ["term", "die"]] {
        let here = address();
        let (of_server, command) = captured("listen", &here);
        let server = listening(command);
        let of_clients = ends.map(|end| {
            let (folder, mut command) = captured(end, &here);
            let (_, stderr) = texts(&command.output().expect("doorbell was built"));
            assert_eq!(stderr, "", "{end}");
            (end, folder)
        });
        succeeds(server);
        for (end, folder) in of_clients.into_iter().chain([("listen", of_server)]) {
            // `doorbell run` itself has one, too.
            let files = fs::read_dir(folder.path()).expect("a folder").flatten();
            let bytes: Vec<u8> = files.flat_map(|file| fs::read(file.path()).expect("a file")).collect();
            // The request, and its answer.
            for message in [b"what\0", b"vhat\0"] {
                assert!(
                    bytes.windows(5).any(|found| found == message),
                    "{end}: {} bytes",
                    bytes.len()
                );
            }
        }
    }
}

/// The Python script moves memory between two processes by the C library; on GPUs, tensors.
#[test]
fn the_script_for_tensors_runs_on_memory_of_the_host() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("gpu/tensors.py");
    let stdout = stdout_of(&["python3", path(&script), "--host"]);
    assert!(
        stdout.lines().count() == 18 && stdout.lines().all(|line| line.starts_with("PASS ")),
        "{stdout}"
    );
}

/// As with an adapter, where each context is an open file of its own.
#[test]
fn a_forked_child_opens_the_device_again() {
    let Some((_folder, program)) = compiled("forked.c", &["-D_GNU_SOURCE", "-libverbs"]) else {
        return;
    };
    let group = address().replacen("127", "239", 1);
    assert_eq!(stdout_of(&[path(&program), &group]), "");
}

/// rdma-core's own program: every message of a sender, in another process of the same address and
/// on another device of the interface, which receive with the first at the same time.
#[test]
fn multicast_reaches_the_processes_of_every_device() {
    if Command::new("mckey").arg("-h").output().is_err() {
        return missing("mckey (rdmacm-utils)");
    }
    let (here, there) = (address(), address());
    let group = here.replacen("127", "239", 1);
    let mckey = |at: &str, options: &[&str]| {
        let line_buffered = [
            "run",
            "--address",
            at,
            "--",
            "stdbuf",
            "-oL",
            "mckey",
            "-m",
            &group,
            "-b",
            at,
        ];
        let mut command = doorbell(&[&line_buffered[..], options].concat());
        command.env_remove("DOORBELL_SOFT_ADDR");
        command
    };
    let receivers = [&here, &there].map(|at| {
        let mut receiver = mckey(at, &[]).spawn().expect("doorbell was built");
        let mut lines = BufReader::new(receiver.stdout.take().expect("it is piped")).lines();
        let joined = lines
            .by_ref()
            .map_while(Result::ok)
            .any(|line| line.contains("joined dgid"));
        assert!(joined, "{at}");
        (receiver, lines)
    });
    let output = mckey(&here, &["-s"]).output().expect("doorbell was built");
    let (stdout, stderr) = texts(&output);
    assert!(
        stdout.contains("return status 0") && stderr.is_empty(),
        "{stdout}{stderr}"
    );
    for (mut receiver, lines) in receivers {
        let lines: Vec<_> = lines.map_while(Result::ok).collect();
        assert!(lines.iter().any(|line| line == "return status 0"), "{lines:?}");
        assert!(receiver.wait().expect("it was started").success());
    }
}

#[test]
fn atomic_write_and_flush_are_as_on_rxe() {
    let Some((_folder, program)) = compiled("placement.c", &["-libverbs"]) else {
        return;
    };
    // IBV_WC_REM_INV_REQ_ERR is 9, IBV_WC_REM_ACCESS_ERR 10; -2 is a refusal when posted.
    let expected = "atomic write 0 stored\nunaligned 9\nflush of range 0, region 0\nrefused 10 10 10 -2\n";
    assert_eq!(stdout_of(&[path(&program)]), expected);
}
