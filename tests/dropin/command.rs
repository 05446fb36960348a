//! `doorbell run` and `doorbell env` in scripts: exit statuses, signals, cleanup.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::{address, built, doorbell, run, stdout_of, texts};

#[test]
fn the_exit_status_is_the_commands() {
    assert_eq!(run(&["sh", "-c", "exit 7"]).status.code(), Some(7));
    assert_eq!(run(&["sh", "-c", "kill -9 $$"]).status.signal(), Some(9));
    assert_eq!(run(&["sh", "-c", "kill -TERM $$"]).status.signal(), Some(15));
    for (command, status) in [("/nowhere/to/be/found", 127), ("no-such-command", 127), ("/", 126)] {
        let output = run(&[command]);
        let (stdout, stderr) = texts(&output);
        assert_eq!(output.status.code(), Some(status), "{command}: {stderr}");
        assert!(stdout.is_empty() && stderr.lines().count() == 1, "{stderr}");
        assert!(stderr.starts_with(&format!("doorbell: {command}: ")), "{stderr}");
    }
}

#[test]
fn an_error_is_one_line() {
    for words in [
        &["run", "--link", "tube", "--", "true"][..],
        &["env", "--faults", "lose=1"],
    ] {
        let output = doorbell(words).output().expect("doorbell was built");
        let (stdout, stderr) = texts(&output);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {stderr}");
        assert!(stdout.is_empty() && stderr.lines().count() == 1, "{words:?}: {stderr}");
    }
    let mut command = doorbell(&["run", "--", "true"]);
    let output = command
        .env("DOORBELL_LIBRARY_DIR", "/nowhere")
        .output()
        .expect("doorbell was built");
    let (_, stderr) = texts(&output);
    assert_eq!(output.status.code(), Some(125));
    assert!(
        stderr.lines().count() == 1 && stderr.contains("/nowhere") && stderr.contains("cargo build"),
        "{stderr}"
    );
}

/// A signal from a process reaches the command once, and the folder is removed when it ends.
#[test]
fn signals_are_passed_on_and_nothing_is_left() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let script = "trap 'echo caught; exit 3' USR1; echo ready; while :; do sleep 0.05; done";
    let mut command = doorbell(&["run", "--", "sh", "-c", script]);
    let mut child = command
        .env("TMPDIR", folder.path())
        .spawn()
        .expect("doorbell was built");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    assert_eq!(lines.next().expect("a line").expect("text"), "ready");
    assert_eq!(fs::read_dir(folder.path()).expect("it is there").count(), 1);
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGUSR1).expect("it runs");
    assert_eq!(lines.map(|line| line.expect("text")).collect::<Vec<_>>(), ["caught"]);
    assert_eq!(child.wait().expect("it was started").code(), Some(3));
    assert_eq!(fs::read_dir(folder.path()).expect("it is there").count(), 0);
}

#[test]
fn a_signal_that_ends_the_command_ends_doorbell() {
    let mut child = doorbell(&["run", "--", "sh", "-c", "echo ready; exec sleep 600"])
        .spawn()
        .expect("doorbell was built");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("piped"))
        .read_line(&mut line)
        .expect("text");
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM).expect("it runs");
    assert_eq!(child.wait().expect("it was started").signal(), Some(15));
}

/// SIGKILL of `doorbell run` kills the command, too. The command's own children are not covered.
#[test]
fn a_command_does_not_outlive_a_doorbell_that_is_killed() {
    let script = "echo ready; for i in $(seq 200); do sleep 0.05; done; echo outlived";
    let mut child = doorbell(&["run", "--", "sh", "-c", script])
        .spawn()
        .expect("doorbell was built");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    assert_eq!(lines.next().expect("a line").expect("text"), "ready");
    child.kill().expect("it runs");
    assert_eq!(child.wait().expect("it was started").signal(), Some(9));
    // The pipe ends when all its writers are gone.
    assert!(lines.next().is_none(), "the command has outlived it");
}

/// nohup(1) and shells' background jobs: ignored signals stay ignored.
#[test]
fn ignored_signals_stay_ignored() {
    let script = format!(
        "trap '' HUP; exec {} run -- sh -c 'kill -HUP $$; echo alive'",
        built().join("doorbell").display()
    );
    let output = Command::new("sh").args(["-c", &script]).output().expect("a shell");
    assert_eq!(texts(&output).0, "alive\n");
}

#[test]
fn flags_reach_the_command_and_its_own_are_left_alone() {
    let words = [
        "run",
        "--udp-port",
        "14791",
        "--address",
        "127.0.0.78",
        "env",
        "-u",
        "HOME",
    ];
    let output = doorbell(&words).output().expect("doorbell was built");
    let (stdout, stderr) = texts(&output);
    for line in ["DOORBELL_SOFT_ADDR=127.0.0.78", "DOORBELL_SOFT_PORT=14791"] {
        assert!(stdout.lines().any(|l| l == line), "{line}: {stdout}{stderr}");
    }
    assert!(!stdout.lines().any(|line| line.starts_with("HOME=")), "{stdout}");
    let path = stdout_of(&["sh", "-c", "echo $LD_LIBRARY_PATH"]);
    assert!(path.trim_end().ends_with("/lib"), "{path}");
}

/// As on a system that is read-only but for the user's own folder.
#[test]
fn a_command_runs_where_temporary_files_cannot_be_made() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut command = Command::new(built().join("doorbell"));
    command.args(["run", "true"]).env("DOORBELL_SOFT_ADDR", address());
    command
        .env("TMPDIR", "/proc/none")
        .env("XDG_RUNTIME_DIR", folder.path());
    let output = command.output().expect("the doorbell command");
    assert!(output.status.success(), "{:?}", texts(&output));
    assert_eq!(
        fs::read_dir(folder.path()).expect("a folder").count(),
        0,
        "it is removed"
    );
}

#[test]
fn a_shell_can_take_the_variables() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let doorbell = built().join("doorbell");
    let shell = |script: &str| {
        let mut command = Command::new("sh");
        command
            .args(["-euc", script, "sh"])
            .arg(&doorbell)
            .env("DOORBELL_SOFT_ADDR", address());
        command.env("TMPDIR", folder.path()).env_remove("XDG_RUNTIME_DIR");
        command.env_remove("LD_LIBRARY_PATH").env_remove("LD_PRELOAD");
        command.stderr(Stdio::inherit()).output().expect("a shell")
    };
    // Twice: the second time the folder exists, and no entry may appear twice.
    let script = r#"eval "$("$1" env)"; eval "$("$1" env)"; cat /sys/class/infiniband/soft0/node_type; echo $LD_LIBRARY_PATH; echo $LD_PRELOAD"#;
    let (stdout, _) = texts(&shell(script));
    let lines: Vec<_> = stdout.lines().collect();
    assert!(
        matches!(lines[..], ["1: CA", path, preload] if !path.contains(':') && !preload.contains(':')),
        "{stdout}"
    );
    let (plain, _) = texts(&shell(r#""$1" env --plain"#));
    assert!(
        plain.lines().any(|line| line.starts_with("LD_LIBRARY_PATH=/")),
        "{plain}"
    );
    // A folder that others can write to is not used: their files would run as us.
    let mine = fs::read_dir(folder.path())
        .expect("it is there")
        .next()
        .expect("a folder")
        .expect("it can be read");
    let mode = |mode| fs::set_permissions(mine.path(), std::os::unix::fs::PermissionsExt::from_mode(mode));
    mode(0o777).expect("it is ours");
    let script = r#""$1" env 2>&1 && exit 1; exit 0"#;
    let (refused, _) = texts(&shell(script));
    assert!(refused.contains("others can write to it"), "{refused}");
}

/// A command may change its user, who then needs the libraries and the files; and a file that
/// another user could write would be run by this one.
#[test]
fn others_can_read_the_folder_and_not_change_it() {
    let doorbell = built().join("doorbell");
    let script = r#"
        umask $1
        exec "$2" run -- sh -c 'umask; find "${LD_LIBRARY_PATH%%:*}/.." \
            \( -type f ! -perm 644 -o -type d ! -perm 755 \) -exec ls -ld {} +'"#;
    for mask in ["0000", "0077"] {
        let mut command = Command::new("sh");
        command.args(["-euc", script, "sh", mask]).arg(&doorbell);
        command.env("DOORBELL_SOFT_ADDR", address());
        let output = command.output().expect("a shell");
        assert_eq!(texts(&output), (format!("{mask}\n"), String::new()));
    }
}

#[test]
fn a_program_that_cannot_be_served_is_reported() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (source, program) = (folder.path().join("static.c"), folder.path().join("static"));
    fs::write(&source, "int main(void) { return 5; }\n").expect("it can be written");
    let compiled = Command::new("cc")
        .arg("-static")
        .arg(&source)
        .arg("-o")
        .arg(&program)
        .status();
    if !compiled.is_ok_and(|status| status.success()) {
        return crate::missing("a C compiler with a static libc (gcc, libc6-dev)");
    }
    let output = run(&[program.to_str().expect("a plain path")]);
    let (_, stderr) = texts(&output);
    assert_eq!(output.status.code(), Some(5));
    assert!(
        stderr.contains("linked statically") && stderr.lines().count() == 1,
        "{stderr}"
    );
}
