//! Whether the dynamic loader will load the drop-in library for a program.

use std::env;
use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::unistd::Uid;

/// The file of a command's name, as in execvp(3).
pub(crate) fn find(name: &OsStr) -> Option<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return Some(name.into());
    }
    let path = env::var_os("PATH")?;
    env::split_paths(&path)
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
}

/// Why a program will not use the userspace device, as far as its file shows.
pub(crate) fn why_not_usable(path: &Path) -> Option<&'static str> {
    let file = File::open(path).ok()?;
    let about = file.metadata().ok()?;
    const SET_USER: u32 = 0o4000;
    if about.mode() & SET_USER != 0 && about.uid() != Uid::current().as_raw() {
        return Some("it runs as another user, so that the dynamic loader ignores LD_LIBRARY_PATH");
    }
    let mut header = [0; 64];
    (&file).read_exact(&mut header).ok()?;
    why_elf_not_usable(&header, |at, to| file.read_exact_at(to, at).is_ok())
}

/// As [`why_not_usable`], for the header of an ELF file, of which `read` reads more at an offset;
/// `None` for other files, such as scripts.
fn why_elf_not_usable(header: &[u8; 64], read: impl Fn(u64, &mut [u8]) -> bool) -> Option<&'static str> {
    let half = |at: usize| u16::from_ne_bytes([header[at], header[at + 1]]);
    let long = |bytes: &[u8], at: usize| {
        let mut long = [0; 8];
        long.copy_from_slice(&bytes[at..at + 8]);
        u64::from_ne_bytes(long)
    };
    if header[..4] != *b"\x7fELF" {
        return None;
    }
    const CLASS_64: u8 = 2;
    let own = File::open("/proc/self/exe").and_then(|own| {
        let mut header = [0; 20];
        (&own).read_exact(&mut header)?;
        Ok(header)
    });
    if header[4] != CLASS_64 || own.is_ok_and(|own| own[18..20] != header[18..20]) {
        return Some("it is for another kind of processor than the drop-in library");
    }
    // The program headers: PT_INTERP names the dynamic loader, if there is one (elf(5)).
    const INTERP: u32 = 3;
    let (start, size, count) = (long(header, 32), u64::from(half(54)), u64::from(half(56)));
    for index in 0..count {
        let mut entry = [0; 56];
        if size < entry.len() as u64 || !read(start.checked_add(index * size)?, &mut entry) {
            return None;
        }
        if entry[..4] != INTERP.to_ne_bytes() {
            continue;
        }
        let mut loader = vec![0; long(&entry, 32).min(4096) as usize];
        let musl = read(long(&entry, 8), &mut loader) && loader.windows(4).any(|four| four == b"musl");
        return musl.then_some("it is linked with musl, and the drop-in library with glibc");
    }
    Some("it is linked statically, so that it loads no library")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elf(kind: u32, loader: &str) -> Vec<u8> {
        let own = std::fs::read("/proc/self/exe").unwrap();
        let mut file = own[..64].to_vec();
        file[32..40].copy_from_slice(&64_u64.to_ne_bytes());
        file[56..58].copy_from_slice(&1_u16.to_ne_bytes());
        let mut entry = [0; 56];
        entry[..4].copy_from_slice(&kind.to_ne_bytes());
        entry[8..16].copy_from_slice(&120_u64.to_ne_bytes());
        entry[32..40].copy_from_slice(&(loader.len() as u64).to_ne_bytes());
        file.extend(entry);
        file.extend(loader.bytes());
        file
    }

    fn judged(file: &[u8]) -> Option<&'static str> {
        let header: &[u8; 64] = file[..64].try_into().unwrap();
        why_elf_not_usable(header, |at, to| {
            let from = usize::try_from(at)
                .ok()
                .and_then(|at| file.get(at..at.checked_add(to.len())?));
            from.map(|from| to.copy_from_slice(from)).is_some()
        })
    }

    #[test]
    fn kinds_of_program_files_are_distinguished() {
        assert_eq!(judged(&elf(3, "/lib64/ld-linux-x86-64.so.2")), None);
        assert!(judged(&elf(3, "/lib/ld-musl-x86_64.so.1")).unwrap().contains("musl"));
        assert!(judged(&elf(1, "")).unwrap().contains("statically"));
        let mut other = elf(3, "");
        other[18] ^= 0xff;
        assert!(judged(&other).unwrap().contains("processor"));
        let mut script = elf(3, "");
        script[0] = b'#';
        assert_eq!(judged(&script), None);
    }

    #[test]
    fn a_truncated_elf_file_is_accepted() {
        let mut file = elf(1, "");
        file[56..58].copy_from_slice(&u16::MAX.to_ne_bytes());
        assert_eq!(judged(&file), None);
        file[32..40].copy_from_slice(&u64::MAX.to_ne_bytes());
        assert_eq!(judged(&file), None);
    }

    #[test]
    fn this_very_program_can_be_served() {
        assert_eq!(why_not_usable(&env::current_exe().unwrap()), None);
        assert!(find(OsStr::new("sh")).is_some_and(|path| why_not_usable(&path).is_none()));
        assert_eq!(find(OsStr::new("no such command")), None);
    }
}
