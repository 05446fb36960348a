//! Where the captures of a test are, and which of them stay.

use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

/// In the target folder.
const FOLDER: &str = "doorbell-test";

/// What `cargo` puts into a target folder.
const MARK: &str = "CACHEDIR.TAG";

/// The captures of one test, a file for each device.
#[derive(Debug)]
pub(crate) struct Captures {
    /// Before the device's number.
    stem: PathBuf,
    /// They were requested by name, so that they stay.
    named: bool,
    files: Vec<PathBuf>,
}

impl Captures {
    /// In `named`, or else in the target folder.
    pub(crate) fn new(test: &str, named: Option<&Path>) -> io::Result<Self> {
        let stem = match named {
            Some(file) => file.with_extension(""),
            None => {
                // One test may have several sets of devices, and run in several processes.
                static SETS: AtomicU32 = AtomicU32::new(1);
                let set = SETS.fetch_add(1, Ordering::Relaxed);
                folder().join(format!("{}-{}.{set}", file_name(test), process::id()))
            }
        };
        if let Some(folder) = stem.parent() {
            fs::create_dir_all(folder)?;
        }
        Ok(Self {
            stem,
            named: named.is_some(),
            files: Vec::new(),
        })
    }

    /// The file of the next device; one of an earlier run is removed.
    pub(crate) fn next_file(&mut self) -> PathBuf {
        let mut file = self.stem.clone().into_os_string();
        file.push(format!("-{}.pcap", self.files.len()));
        let file = PathBuf::from(file);
        // If it cannot be removed the device gets another name from it.
        let _ = fs::remove_file(&file);
        self.files.push(file.clone());
        file
    }

    /// All files, as a pattern of the shell.
    pub(crate) fn pattern(&self) -> String {
        format!("{}-*.pcap", self.stem.display())
    }

    /// Removes those that nothing refers to after a test that has passed.
    pub(crate) fn discard(&self) {
        if !self.named {
            self.files.iter().for_each(|file| {
                let _ = fs::remove_file(file);
            });
        }
    }
}

/// The target folder is that above the test program; without one, the folder of temporary files.
fn folder() -> PathBuf {
    let program = env::current_exe().unwrap_or_default();
    let target = program.ancestors().find(|folder| folder.join(MARK).exists());
    target.map_or_else(env::temp_dir, Path::to_owned).join(FOLDER)
}

fn file_name(test: &str) -> String {
    let allowed = |c: char| if c.is_alphanumeric() || c == '_' { c } else { '.' };
    test.replace("::", ".").chars().map(allowed).collect()
}
