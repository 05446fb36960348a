//! The secret of a group of processes, and where they get it.

use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use hmac::{KeyInit, Mac};
use nix::fcntl::OFlag;

use super::auth::{BLOCK, HmacSha256};

/// The fewest bytes of a secret that a user gives: a shorter one can be guessed from a recorded
/// handshake.
const MIN_SECRET: usize = 16;
/// The most bytes of a secret file that are read.
const MAX_TEXT: u64 = 4096;

/// Random bytes of the kernel.
///
/// # Errors
/// When `/dev/urandom` cannot be read.
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// A 128-bit secret shared by the members of a group. It authenticates them and is never sent;
/// `Debug` does not show it, and it cannot be compared, so no comparison of it can stop early.
#[derive(Clone, Copy)]
pub struct Secret([u8; 16]);

impl Secret {
    /// A random secret.
    ///
    /// # Errors
    /// When `/dev/urandom` cannot be read.
    pub fn random() -> io::Result<Self> {
        random().map(Self)
    }

    /// Derives a secret from values that all members have, by HMAC-SHA-256. It is as secret as
    /// these.
    #[must_use]
    pub fn derived(words: &[&str]) -> Self {
        let mut mac = HmacSha256::new(&[0; BLOCK].into());
        for word in words {
            // The length separates the words: "a", "bc" is not "ab", "c".
            mac.update(&(word.len() as u64).to_le_bytes());
            mac.update(word.as_bytes());
        }
        let mut secret = [0; 16];
        secret.copy_from_slice(&mac.finalize().into_bytes()[..16]);
        Self(secret)
    }

    /// The secret of the job that `words` name, of a user's text: `DOORBELL_SECRET`, that of the
    /// file `DOORBELL_SECRET_FILE`, the key that Open MPI makes for each job, or that of
    /// `~/.config/doorbell/secret`, which is made if it does not exist. `variable` reads the
    /// environment; an empty variable counts as unset.
    ///
    /// # Errors
    /// A [`SecretError`] that names the variable or file that cannot be used.
    pub fn of_job(words: &[&str], variable: impl Fn(&'static str) -> Option<String>) -> Result<Self, SecretError> {
        let get = |name| variable(name).filter(|value| !value.is_empty());
        let of_job = |text: &str| Self::derived(&[words, &[text]].concat());
        if let Some(text) = get("DOORBELL_SECRET") {
            return (text.len() >= MIN_SECRET)
                .then(|| of_job(&text))
                .ok_or(SecretError::Short);
        }
        let unusable = |file: PathBuf| move |error| SecretError::File { file, error };
        if let Some(file) = get("DOORBELL_SECRET_FILE").map(PathBuf::from) {
            return read(&file).map(|text| of_job(&text)).map_err(unusable(file));
        }
        // mpirun makes 128 random bits for each job, for its own transports.
        if let Some(key) = get("OMPI_MCA_orte_precondition_transports") {
            return Ok(of_job(&key));
        }
        let home = || get("HOME").map(|home| Path::new(&home).join(".config"));
        let folder = get("XDG_CONFIG_HOME").map(PathBuf::from).or_else(home);
        let file = folder.ok_or(SecretError::NoHome)?.join("doorbell/secret");
        read_or_make(&file).map(|text| of_job(&text)).map_err(unusable(file))
    }

    /// As [`of_job`](Self::of_job), with the environment of this process.
    ///
    /// # Errors
    /// As [`of_job`](Self::of_job).
    pub fn from_env(words: &[&str]) -> Result<Self, SecretError> {
        Self::of_job(words, doorbell_trust::text_variable)
    }

    /// Its bytes, for ids that members are given.
    #[must_use]
    pub const fn bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// From its bytes.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// There is no secret.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// The text in `DOORBELL_SECRET` can be guessed.
    #[error("DOORBELL_SECRET: it should have at least {MIN_SECRET} characters")]
    Short,
    /// A file cannot be used.
    #[error("{}: {error}", file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        error: io::Error,
    },
    /// No folder of this user is known.
    #[error("HOME is not set")]
    NoHome,
}

/// The text of a file that only this user can read.
///
/// # Errors
/// Those of the system; `PermissionDenied` for a file that others can read, and `InvalidData` for
/// one that is too short.
fn read(file: &Path) -> io::Result<String> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits())
        .open(file)?;
    let metadata = file.metadata()?;
    let refused = |kind, why| Err(io::Error::new(kind, why));
    if !metadata.is_file() || !doorbell_trust::is_own_user(metadata.uid()) || metadata.mode() & 0o077 != 0 {
        let why = "it should be a file of this user that no other can read or write (chmod 600)";
        return refused(io::ErrorKind::PermissionDenied, why);
    }
    let mut text = String::new();
    file.take(MAX_TEXT).read_to_string(&mut text)?;
    let text = text.trim_end();
    if text.len() < MIN_SECRET {
        return refused(io::ErrorKind::InvalidData, "it should hold at least 16 characters");
    }
    Ok(text.to_owned())
}

/// As [`read`]; a file that does not exist is made, with a random secret. All processes that do so
/// at once read the same.
fn read_or_make(file: &Path) -> io::Result<String> {
    match read(file) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        read => return read,
    }
    if let Some(folder) = file.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    let bytes = u128::from_be_bytes(random()?);
    let mine = file.with_extension(format!("{:032x}", u128::from_be_bytes(random()?)));
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    writeln!(options.open(&mine)?, "{bytes:032x}")?;
    // The file appears whole, and the first one stays.
    let linked = fs::hard_link(&mine, file);
    fs::remove_file(&mine)?;
    match linked {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(e),
        _ => read(file),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::thread;

    use super::*;

    #[test]
    fn derived_secrets_depend_on_every_word_and_its_length() {
        let words = [&["a", "bc"][..], &["ab", "c"], &["abc"], &["a", "bc", ""], &["a", "bd"]];
        let all = words.map(|words| *Secret::derived(words).bytes());
        for (i, one) in all.iter().enumerate() {
            assert_eq!(all.iter().position(|other| other == one), Some(i));
        }
        assert_eq!(*Secret::derived(&["a", "bc"]).bytes(), all[0]);
        assert_eq!(format!("{:?}", Secret::derived(&["a"])), "Secret(..)");
    }

    #[test]
    fn processes_that_make_the_file_at_once_read_one_secret() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config/doorbell/secret");
        let texts = thread::scope(|scope| {
            let make = || scope.spawn(|| read_or_make(&file).unwrap());
            let all: Vec<_> = (0..8).map(|_| make()).collect();
            all.into_iter().map(|one| one.join().unwrap()).collect::<Vec<_>>()
        });
        assert!(
            texts.iter().all(|text| *text == texts[0] && text.len() == 32),
            "{texts:?}"
        );
        assert_eq!(file.metadata().unwrap().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(file.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn files_that_others_can_read_or_choose_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("secret");
        read_or_make(&file).unwrap();
        let link = folder.path().join("link");
        symlink(&file, &link).unwrap();
        assert!(read_or_make(&link).is_err(), "a symbolic link");
        assert!(read_or_make(folder.path()).is_err(), "a folder");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        let said = read_or_make(&file).unwrap_err();
        assert!(said.to_string().contains("chmod 600"), "{said}");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(&file, "short\n").unwrap();
        let said = read_or_make(&file).unwrap_err();
        assert!(said.to_string().contains("16 characters"), "{said}");
    }
}
