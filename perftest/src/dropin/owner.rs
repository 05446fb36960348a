//! The owners of a folder of `doorbell run`, recorded in it, so that the next `doorbell run`
//! removes the folder of one that was killed.
//!
//! Each owner has a line with its PID and start time, which together are unique, and its PID
//! namespace: folders of other namespaces, or without a record, are left alone.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process;

use nix::errno::Errno;
use nix::sys::signal::kill;
use nix::unistd::Pid;

pub(super) const PREFIX: &str = "doorbell-run-";

const FILE: &str = "owners";

#[derive(Clone, PartialEq, Eq, Debug)]
struct Owner {
    namespace: String,
    pid: i32,
    start: u64,
}

impl Owner {
    fn of(pid: i32) -> Option<Self> {
        Some(Self {
            namespace: namespace()?,
            pid,
            start: life_of(pid)?.1,
        })
    }

    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        let owner = Self {
            namespace: words.next()?.to_owned(),
            pid: words.next()?.parse().ok().filter(|&pid| pid > 0)?,
            start: words.next()?.parse().ok()?,
        };
        words.next().is_none().then_some(owner)
    }

    fn is_gone(&self) -> bool {
        if namespace().as_ref() != Some(&self.namespace) {
            return false;
        }
        // It may have become another user's: then it cannot be signaled, and may not be visible in
        // /proc.
        kill(Pid::from_raw(self.pid), None) == Err(Errno::ESRCH)
            || life_of(self.pid).is_some_and(|(is_over, start)| is_over || start != self.start)
    }
}

fn namespace() -> Option<String> {
    let link = fs::read_link("/proc/self/ns/pid").ok()?;
    Some(link.to_string_lossy().into_owned())
}

/// Whether a process is a zombie, which some containers never reap, and its start time in ticks
/// since boot: fields 3 and 22 of proc(5), counted from the end of the name in parentheses, which
/// may contain anything.
fn life_of(pid: i32) -> Option<(bool, u64)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(") ")?;
    let start = rest.split_whitespace().nth(19)?.parse().ok()?;
    Some((rest.starts_with(['Z', 'X']), start))
}

pub(super) fn add(folder: &Path, pid: i32) -> io::Result<()> {
    // Without /proc owners cannot be identified, and no folder is removed.
    let Some(owner) = Owner::of(pid) else {
        return Ok(());
    };
    let mut file: File = OpenOptions::new().append(true).create(true).open(folder.join(FILE))?;
    // In one write, as another process may be reading.
    file.write_all(format!("{} {} {}\n", owner.namespace, owner.pid, owner.start).as_bytes())
}

pub(super) fn add_self(folder: &Path) -> io::Result<()> {
    add(folder, process::id().cast_signed())
}

/// Removes the folders of this user in `parent` whose owners are gone. Errors are ignored.
pub(super) fn sweep(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(PREFIX) && is_unneeded(&entry.path()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn is_unneeded(folder: &Path) -> bool {
    let is_ours = |there: &fs::Metadata| there.is_dir() && doorbell_trust::is_own_user(there.uid());
    if !fs::symlink_metadata(folder).is_ok_and(|there| is_ours(&there)) {
        return false;
    }
    let owners = fs::read_to_string(folder.join(FILE)).unwrap_or_default();
    let mut owners = owners.lines().map(Owner::parse).peekable();
    owners.peek().is_some() && owners.all(|owner| owner.is_some_and(|owner| owner.is_gone()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn unneeded_folders_are_removed() {
        let parent = tempfile::tempdir().unwrap();
        let folder = |name: &str| {
            let folder = parent.path().join(name);
            fs::create_dir(&folder).unwrap();
            folder
        };
        let mut gone = Command::new("true").spawn().unwrap();
        let left = folder("doorbell-run-left");
        add(&left, gone.id().cast_signed()).unwrap();
        let kept = ["ours", "both", "silent", "odd", "elsewhere"].map(|name| folder(&format!("{PREFIX}{name}")));
        let other = folder("another-run");
        add_self(&kept[0]).unwrap();
        add(&kept[1], gone.id().cast_signed()).unwrap();
        add_self(&kept[1]).unwrap();
        fs::write(kept[3].join(FILE), "who knows\n").unwrap();
        fs::write(kept[4].join(FILE), format!("pid:[1] {} 1\n", gone.id())).unwrap();
        add(&other, gone.id().cast_signed()).unwrap();
        gone.wait().unwrap();
        // An earlier process with a PID that another one has now.
        let mut earlier = Owner::of(process::id().cast_signed()).unwrap();
        assert!(!earlier.is_gone());
        earlier.start -= 1;
        assert!(earlier.is_gone());
        sweep(parent.path());
        assert!(!left.exists() && other.exists());
        assert!(kept.iter().all(|folder| folder.exists()));
    }
}
