//! `cargo xtask install-classic DIR`: links named like perftest's tools to the release binary.

use crate::{ci, target_folder};
use anyhow::{Context, Result, bail, ensure};
use std::{
    fs,
    io::ErrorKind,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

const HELP: &str = "\
Link the classic names (ib_write_bw, …) to the doorbell command

Usage: cargo xtask install-classic [OPTIONS] DIR

Arguments:
  DIR          folder of the links; created if missing

Options:
      --force  replace existing files of these names, but not folders
  -h, --help   show this

Exit status: 0 when the links exist, 2 on bad usage or a failure.
";

const NAMES: [&str; 8] = [
    "ib_write_bw",
    "ib_write_lat",
    "ib_read_bw",
    "ib_read_lat",
    "ib_send_bw",
    "ib_send_lat",
    "ib_atomic_bw",
    "ib_atomic_lat",
];

/// The command-line form. Returns the exit status.
pub(crate) fn main(mut arguments: lexopt::Parser) -> Result<u8> {
    use lexopt::prelude::*;
    let (mut folder, mut force) = (None, false);
    while let Some(argument) = arguments.next()? {
        match argument {
            Short('h') | Long("help") => {
                print!("{HELP}");
                return Ok(0);
            }
            Long("force") => force = true,
            Value(path) if folder.is_none() => folder = Some(PathBuf::from(path)),
            other => return Err(other.unexpected().into()),
        }
    }
    let Some(folder) = folder else {
        bail!("where to? cargo xtask install-classic DIR")
    };
    let binary = target_folder()?.join("release/doorbell");
    if !binary.exists() {
        let build = ["build", "--release", "--locked", "--package", "doorbell-perftest"];
        let status = ci::command(&build).status().context("cannot run cargo")?;
        ensure!(status.success(), "cargo build: {status}");
    }
    ensure!(binary.exists(), "{} was not built", binary.display());
    install(&folder, &binary, force)?;
    println!("{} links in {} to {}", NAMES.len(), folder.display(), binary.display());
    Ok(0)
}

/// Makes all links, or none when one cannot be made.
fn install(folder: &Path, binary: &Path, force: bool) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let links: Vec<PathBuf> = NAMES.iter().map(|name| folder.join(name)).collect();
    for link in &links {
        match fs::symlink_metadata(link) {
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => return Err(e).with_context(|| format!("cannot read {}", link.display())),
            Ok(there) if there.is_dir() => bail!("{} is a folder", link.display()),
            Ok(_) if force || is_ours(link) => {}
            Ok(_) => bail!(
                "{} is there already and is no link to doorbell: --force replaces it",
                link.display()
            ),
        }
    }
    for link in &links {
        match fs::remove_file(link) {
            Err(e) if e.kind() != ErrorKind::NotFound => {
                return Err(e).with_context(|| format!("cannot replace {}", link.display()));
            }
            _ => symlink(binary, link).with_context(|| format!("cannot make {}", link.display()))?,
        }
    }
    Ok(())
}

/// Whether `link` points to a `doorbell` binary, of this or another build.
fn is_ours(link: &Path) -> bool {
    fs::read_link(link).is_ok_and(|target| target.file_name().is_some_and(|name| name == "doorbell"))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let path = std::env::temp_dir().join(format!("install-classic-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Folder(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            drop(fs::remove_dir_all(&self.0));
        }
    }

    #[test]
    fn links_are_made_and_made_again() {
        let folder = Folder::new("made");
        for binary in ["/old/doorbell", "/new/doorbell"] {
            install(&folder.0.join("bin"), Path::new(binary), false).unwrap();
            for name in NAMES {
                assert_eq!(
                    fs::read_link(folder.0.join("bin").join(name)).unwrap(),
                    Path::new(binary)
                );
            }
        }
    }

    #[test]
    fn foreign_files_are_kept() {
        let folder = Folder::new("stays");
        let binary = Path::new("/new/doorbell");
        fs::write(folder.0.join("ib_send_lat"), "theirs").unwrap();
        let error = install(&folder.0, binary, false).unwrap_err().to_string();
        assert!(error.contains("ib_send_lat") && error.contains("--force"), "{error}");
        assert!(!folder.0.join("ib_write_bw").exists() && fs::symlink_metadata(folder.0.join("ib_write_bw")).is_err());
        assert_eq!(fs::read_to_string(folder.0.join("ib_send_lat")).unwrap(), "theirs");
        install(&folder.0, binary, true).unwrap();
        assert_eq!(fs::read_link(folder.0.join("ib_send_lat")).unwrap(), binary);
        fs::remove_file(folder.0.join("ib_read_bw")).unwrap();
        fs::create_dir(folder.0.join("ib_read_bw")).unwrap();
        assert!(
            install(&folder.0, binary, true)
                .unwrap_err()
                .to_string()
                .contains("is a folder")
        );
    }
}
