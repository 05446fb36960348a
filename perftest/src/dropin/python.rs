//! The folders from which the Python of a command imports: packages there bring libraries.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::program;

/// `sys.path` of the command's interpreter; empty where it has none.
pub(super) fn import_folders(name: &OsStr, arguments: &[OsString]) -> Vec<PathBuf> {
    interpreter(name, arguments).map_or_else(Vec::new, |python| folders_of(&python))
}

/// The interpreter of a command: itself, that of its script, one among the words of a launcher such
/// as mpirun(1) or of a shell's line, or that of the active virtual environment, for shell scripts.
fn interpreter(name: &OsStr, arguments: &[OsString]) -> Option<PathBuf> {
    let command = program::find(name)?;
    if is_python(&command) {
        return Some(command);
    }
    let of_script = || first_line(&command).and_then(|line| of_first_line(&line));
    let of_words = || {
        let words = arguments
            .iter()
            .flat_map(|argument| argument.as_bytes().split(u8::is_ascii_whitespace));
        let mut words = words.map(OsStr::from_bytes).filter(|word| is_python(Path::new(word)));
        words.find_map(program::find)
    };
    let of_environment = || {
        let python = Path::new(&env::var_os("VIRTUAL_ENV")?).join("bin/python");
        python.is_file().then_some(python)
    };
    of_script().or_else(of_words).or_else(of_environment)
}

/// Whether a file is called `python`, `python3`, `python3.11`, …
fn is_python(path: &Path) -> bool {
    let name = path.file_name().and_then(OsStr::to_str);
    let version = name.and_then(|name| name.strip_prefix("python"));
    version.is_some_and(|version| version.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.'))
}

fn first_line(path: &Path) -> Option<Vec<u8>> {
    /// As much as the kernel reads (BINPRM_BUF_SIZE).
    const MOST: u64 = 256;
    let mut start = Vec::new();
    File::open(path).ok()?.take(MOST).read_to_end(&mut start).ok()?;
    start.split(|&byte| byte == b'\n').next().map(<[u8]>::to_vec)
}

/// As in `#!/venv/bin/python3` or `#!/usr/bin/env python3`.
fn of_first_line(line: &[u8]) -> Option<PathBuf> {
    let words = line.strip_prefix(b"#!")?.split(u8::is_ascii_whitespace);
    let mut words = words.filter(|word| !word.is_empty()).map(OsStr::from_bytes);
    words.find(|word| is_python(Path::new(word))).and_then(program::find)
}

fn folders_of(python: &Path) -> Vec<PathBuf> {
    let query = Command::new(python)
        .args(["-c", r"import sys; sys.stdout.write('\n'.join(sys.path))"])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output();
    let text = query.map(|output| output.stdout).unwrap_or_default();
    let lines = text.split(|&byte| byte == b'\n').map(OsStr::from_bytes);
    lines.filter(|line| !line.is_empty()).map(PathBuf::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interpreters_are_found_in_commands() {
        let of = |name: &str, words: &[&str]| {
            let words: Vec<OsString> = words.iter().map(OsString::from).collect();
            interpreter(OsStr::new(name), &words)
        };
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path.to_str().unwrap().to_owned()
        };
        let python = file("python3.11", "");
        let expected = Some(PathBuf::from(&python));
        assert_eq!(of(&python, &[]), expected);
        assert_eq!(of(&file("script", &format!("#!{python} -s\n")), &[]), expected);
        assert_eq!(
            of(&file("vllm", &format!("#!/usr/bin/env {python}\nrest")), &[]),
            expected
        );
        assert_eq!(of("sh", &["-n", "2", &python, "train.py"]), expected);
        assert_eq!(of("sh", &["-c", &format!("cd / && exec {python} train.py")]), expected);
        assert!(
            ["python-config", "pythonw", "ipython"]
                .iter()
                .all(|name| !is_python(Path::new(name)))
        );
    }
}
