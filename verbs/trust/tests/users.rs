//! User ids in user namespaces, and variables of a set-user-ID program: in processes of their own,
//! which are this test's program again.

use std::env;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Output};

use doorbell_trust::{create_file, is_own_user, variable};

const OVERFLOW: u32 = 65_534;
/// Set in the processes that a test starts.
const INSIDE: &str = "DOORBELL_TEST_INSIDE";

fn is_root() -> bool {
    // SAFETY: geteuid(2) cannot fail.
    let root = unsafe { libc::geteuid() } == 0;
    if !root {
        println!("skipped: only root can set up other users' processes");
    }
    root
}

fn again(program: PathBuf, test: &str) -> Command {
    let mut command = Command::new(program);
    command.args(["--exact", test, "--ignored", "--nocapture"]);
    command.env(INSIDE, "yes");
    command
}

fn assert_passed(output: &Output) {
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

fn folder(name: &str) -> PathBuf {
    let folder = env::temp_dir().join(format!("doorbell-trust-{name}-{}", std::process::id()));
    fs::create_dir(&folder).unwrap();
    fs::set_permissions(&folder, Permissions::from_mode(0o755)).unwrap();
    folder
}

#[test]
fn own_user_where_every_user_is_mapped() {
    // SAFETY: geteuid(2) cannot fail.
    let own = unsafe { libc::geteuid() };
    assert!(is_own_user(own) && !is_own_user(own + 1));
}

/// A process whose user is not mapped sees itself and every stranger as the overflow user.
#[test]
fn the_overflow_user_is_never_ones_own() {
    let mut inside = again(env::current_exe().unwrap(), "is_without_mapping");
    // SAFETY: unshare(2) is async-signal-safe.
    unsafe {
        inside.pre_exec(|| match libc::unshare(libc::CLONE_NEWUSER) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    match inside.output() {
        Ok(output) => assert_passed(&output),
        Err(error) => println!("skipped: no user namespace here: {error}"),
    }
}

#[test]
#[ignore = "started by the_overflow_user_is_never_ones_own"]
fn is_without_mapping() {
    // SAFETY: geteuid(2) cannot fail.
    assert_eq!(unsafe { libc::geteuid() }, OVERFLOW);
    assert!(!is_own_user(OVERFLOW));
}

#[test]
fn variables_of_a_set_user_id_program_are_ignored() {
    if !is_root() {
        return;
    }
    let folder = folder("setuid");
    let program = folder.join("program");
    fs::copy(env::current_exe().unwrap(), &program).unwrap();
    fs::set_permissions(&program, Permissions::from_mode(0o4755)).unwrap();
    let output = again(program, "is_elevated")
        .uid(OVERFLOW)
        .gid(OVERFLOW)
        .current_dir("/")
        .output();
    fs::remove_dir_all(&folder).unwrap();
    assert_passed(&output.unwrap());
}

#[test]
#[ignore = "started by variables_of_a_set_user_id_program_are_ignored"]
fn is_elevated() {
    assert!(env::var_os(INSIDE).is_some());
    assert_eq!(variable(INSIDE), None);
}

#[test]
fn files_are_new_and_private() {
    let folder = folder("files");
    let (file, link) = (folder.join("file"), folder.join("link"));
    create_file(&file).unwrap();
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(create_file(&file).is_err());
    std::os::unix::fs::symlink(folder.join("elsewhere"), &link).unwrap();
    assert!(create_file(&link).is_err() && !folder.join("elsewhere").exists());
    fs::remove_dir_all(&folder).unwrap();
}
