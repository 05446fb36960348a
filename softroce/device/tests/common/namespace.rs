//! A test's program again, in a network namespace of its own.

use std::env;
use std::process::Command;

/// Runs the ignored test `name` of this program there, if this machine permits that.
pub(crate) fn run_inside(name: &str) {
    let unshare = |arguments: &[&str]| Command::new("unshare").arg("-rn").args(arguments).output();
    if !unshare(&["true"]).is_ok_and(|output| output.status.success()) {
        return println!("skipped: this machine does not permit network namespaces");
    }
    let program = env::current_exe().unwrap();
    let output = unshare(&[program.to_str().unwrap(), "--exact", name, "--ignored", "--nocapture"]).unwrap();
    // Also where it has succeeded: it may have been skipped.
    print!("{}", String::from_utf8_lossy(&output.stdout));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
}

/// Runs ip(8) with each of `commands` inside; `false` where it is not installed.
pub(crate) fn configure(commands: &[&str]) -> bool {
    commands.iter().all(
        |arguments| match Command::new("ip").args(arguments.split(' ')).status() {
            Ok(status) => {
                assert!(status.success(), "ip {arguments}");
                true
            }
            Err(error) => {
                println!("skipped: ip(8): {error}");
                false
            }
        },
    )
}
