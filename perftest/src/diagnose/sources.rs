//! The files that the diagnosis reads: `/sys` and `/proc`, of this machine or below a folder.
//!
//! Nothing read is trusted: files are read up to a limit and never block, an invalid value counts
//! as missing, and text becomes one line without control characters.

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;

use nix::fcntl::OFlag;

use crate::failure::one_line;

/// The folder that holds `sys` and `proc` in tests of the whole command. Results judged by it carry
/// a warning.
const ROOT: &str = "DOORBELL_DIAGNOSE_ROOT";
/// Size limit of an attribute.
const ATTRIBUTE: u64 = 4096;
/// How much of a file with many lines is read: `/proc/stat` has the cores first.
const FILE: u64 = 1 << 20;
/// The most entries of a folder.
const ENTRIES: usize = 4096;

#[derive(Clone, Debug)]
pub(crate) struct Sources {
    root: PathBuf,
    fake: bool,
}

impl Sources {
    pub(crate) fn of_this_machine() -> Sources {
        match doorbell_trust::variable(ROOT) {
            Some(root) => Sources::below(root),
            None => Sources {
                root: "/".into(),
                fake: false,
            },
        }
    }

    pub(super) fn below(root: impl Into<PathBuf>) -> Sources {
        Sources {
            root: root.into(),
            fake: true,
        }
    }

    pub(super) fn fake(&self) -> Option<&Path> {
        self.fake.then_some(self.root.as_path())
    }

    /// An attribute, as one line; `None` if it is missing or empty.
    pub(super) fn text(&self, path: &str) -> Option<String> {
        let text = one_line(&self.read(path, ATTRIBUTE)?);
        (!text.is_empty()).then_some(text)
    }

    pub(super) fn number<T: FromStr>(&self, path: &str) -> Option<T> {
        self.text(path)?.parse().ok()
    }

    pub(super) fn lines(&self, path: &str) -> Vec<String> {
        let text = self.read(path, FILE).unwrap_or_default();
        text.lines().map(one_line).collect()
    }

    pub(super) fn names(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.root.join(folder)).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries
            .take(ENTRIES)
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect();
        names.sort();
        names
    }

    /// The target of a symbolic link, fully resolved, as a path for [`Sources::text`]; `None` where
    /// that is not below the root.
    pub(super) fn resolved(&self, path: &str) -> Option<String> {
        let root = fs::canonicalize(&self.root).ok()?;
        let target = fs::canonicalize(self.root.join(path)).ok()?;
        Some(target.strip_prefix(root).ok()?.to_str()?.to_owned())
    }

    fn read(&self, path: &str, most: u64) -> Option<String> {
        // Opening a pipe would block.
        let file: File = OpenOptions::new()
            .read(true)
            .custom_flags(OFlag::O_NONBLOCK.bits())
            .open(self.root.join(path))
            .ok()?;
        if !file.metadata().ok()?.is_file() {
            return None;
        }
        let mut bytes = Vec::new();
        // After a read error, what was read before is not the value.
        file.take(most).read_to_end(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// Whether a name is a single path component, so that it cannot lead out of a folder.
pub(crate) fn is_file_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == name)
}

/// Parses a list in the kernel's notation: `0-3,8,10-11`. Invalid and very large numbers are left
/// out.
pub(super) fn list(text: &str) -> Vec<usize> {
    const MAX_NUMBER: usize = 1 << 16;
    let mut numbers = Vec::new();
    for part in text.split(',') {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(from), Ok(to)) = (from.trim().parse::<usize>(), to.trim().parse::<usize>())
            && from <= to
            && to < MAX_NUMBER
        {
            numbers.extend(from..=to);
        }
    }
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}

pub(super) fn show_list(numbers: &[usize]) -> String {
    let mut parts = Vec::new();
    for run in numbers.chunk_by(|one, next| one + 1 == *next) {
        parts.push(match run {
            [one] => one.to_string(),
            [first, .., last] => format!("{first}-{last}"),
            [] => continue,
        });
    }
    parts.join(",")
}

#[cfg(test)]
pub(super) mod fake {
    use super::*;

    pub(crate) struct FakeMachine {
        folder: tempfile::TempDir,
    }

    impl FakeMachine {
        pub(crate) fn with<'a>(files: impl IntoIterator<Item = (&'a str, &'a str)>) -> FakeMachine {
            let machine = FakeMachine {
                folder: tempfile::tempdir().unwrap(),
            };
            for (path, content) in files {
                machine.put(path, content);
            }
            machine
        }

        pub(crate) fn put(&self, path: &str, content: impl AsRef<[u8]>) {
            let path = self.folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }

        pub(crate) fn link(&self, path: &str, to: &str) {
            let path = self.folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::os::unix::fs::symlink(self.folder.path().join(to), path).unwrap();
        }

        pub(crate) fn path(&self) -> &Path {
            self.folder.path()
        }

        pub(crate) fn sources(&self) -> Sources {
            Sources::below(self.folder.path())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::diagnose::sources::fake::FakeMachine;

    #[test]
    fn lists_are_parsed_as_formatted() {
        for (text, numbers) in [
            ("0-3", vec![0, 1, 2, 3]),
            ("0,2-3,8", vec![0, 2, 3, 8]),
            ("5", vec![5]),
            ("", vec![]),
        ] {
            assert_eq!(list(text), numbers, "{text}");
            assert_eq!(show_list(&numbers), text);
        }
        for text in ["-", "3-1", "x", "0-99999999999", "1--2"] {
            assert!(list(text).is_empty(), "{text}");
        }
        assert_eq!(list("x, 1 ,2-"), [1]);
    }

    #[test]
    fn every_value_is_one_short_line() {
        let machine = FakeMachine::with([
            ("sys/a", "one\n\u{1b}[2Jtwo\n"),
            ("sys/empty", " \n"),
            ("sys/n", "12\n"),
        ]);
        machine.put("sys/huge", vec![b'9'; 1 << 22]);
        machine.put("sys/bytes", [0xff, 0x00, 0x80, b'x']);
        let sources = machine.sources();
        assert_eq!(sources.text("sys/a").as_deref(), Some("one  [2Jtwo"));
        assert_eq!((sources.text("sys/empty"), sources.text("sys/none")), (None, None));
        assert_eq!(sources.number::<u32>("sys/n"), Some(12));
        assert_eq!(sources.text("sys/huge").unwrap().len(), 4096);
        assert_eq!(sources.number::<u64>("sys/huge"), None);
        assert!(!sources.text("sys/bytes").unwrap().contains(char::is_control));
        assert!(sources.lines("sys/huge").iter().all(|line| line.len() <= 1 << 20));
        // A folder and a pipe are no attributes, and opening the pipe does not block.
        assert_eq!(sources.text("sys"), None);
        nix::unistd::mkfifo(&machine.path().join("sys/pipe"), nix::sys::stat::Mode::S_IRUSR).unwrap();
        assert_eq!(sources.text("sys/pipe"), None);
        std::os::unix::fs::symlink("/dev/zero", machine.path().join("sys/zero")).unwrap();
        assert_eq!(sources.text("sys/zero"), None);
        // Root can read a file without read permission.
        if !nix::unistd::geteuid().is_root() {
            fs::set_permissions(machine.path().join("sys/n"), fs::Permissions::from_mode(0o0)).unwrap();
            assert_eq!(sources.number::<u32>("sys/n"), None);
        }
    }

    #[test]
    fn links_are_followed_to_what_is_below_the_root() {
        let machine = FakeMachine::with([("sys/devices/pci/0000:00:01.0/numa_node", "1")]);
        machine.link("sys/class/x/device", "sys/devices/pci/0000:00:01.0");
        std::os::unix::fs::symlink("/etc", machine.path().join("sys/out")).unwrap();
        let sources = machine.sources();
        assert_eq!(
            sources.resolved("sys/class/x/device").as_deref(),
            Some("sys/devices/pci/0000:00:01.0")
        );
        assert_eq!(
            (sources.resolved("sys/out"), sources.resolved("sys/none")),
            (None, None)
        );
    }

    #[test]
    fn names_with_paths_are_refused() {
        assert!(is_file_name("mlx5_0") && is_file_name("rocep23s0f0"));
        for name in ["", ".", "..", "../x", "a/b", "/etc", "a/"] {
            assert!(!is_file_name(name), "{name}");
        }
    }
}
