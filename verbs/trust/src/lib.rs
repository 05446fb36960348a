//! What a process may trust on its host: its environment, and other processes of its user
//! (decision 071).

use std::env;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Whether the program has rights that the one which started it may lack: a set-user-ID program, or
/// one with file capabilities (`AT_SECURE` of getauxval(3)).
#[must_use]
pub fn has_elevated_rights() -> bool {
    // SAFETY: getauxval(3) has no requirements.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// An environment variable; none where the program [has elevated rights](has_elevated_rights), as
/// with secure_getenv(3).
#[must_use]
pub fn variable(name: &str) -> Option<OsString> {
    if has_elevated_rights() {
        return None;
    }
    env::var_os(name)
}

/// The same, if it is text.
#[must_use]
pub fn text_variable(name: &str) -> Option<String> {
    variable(name)?.into_string().ok()
}

/// Whether a user id that the kernel gives for another process (unix(7), `SO_PEERCRED`) or a file
/// shows that it is of this process's effective user.
#[must_use]
pub fn is_own_user(uid: u32) -> bool {
    // SAFETY: geteuid(2) cannot fail and touches no memory.
    let own = unsafe { libc::geteuid() };
    uid == own && is_definite(uid)
}

/// Whether a user id is that of one user. In a user namespace the kernel shows every user without a
/// mapping as the overflow user id, which then shows nothing: user_namespaces(7).
#[must_use]
pub fn is_definite(uid: u32) -> bool {
    uid != overflow_uid() || maps_every_user()
}

fn overflow_uid() -> u32 {
    const DEFAULT: u32 = 65_534;
    let text = fs::read_to_string("/proc/sys/kernel/overflowuid").unwrap_or_default();
    text.trim().parse().unwrap_or(DEFAULT)
}

/// Whether every user has a mapping in this process's user namespace; false where unknown.
fn maps_every_user() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let mapped = map.lines().filter_map(|line| line.split_whitespace().nth(2));
    // The highest id is none.
    mapped.filter_map(|count| count.parse::<u64>().ok()).sum::<u64>() >= u64::from(u32::MAX)
}

/// Creates a file for this user alone. It may not exist, not even as a symbolic link.
///
/// # Errors
/// Those of open(2): `AlreadyExists` where there is one.
pub fn create_file(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(path)
}
