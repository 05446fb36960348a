//! The guest's job, as the shell fragment that its init reads.
//!
//! The fragment sets `MTU` and `DIRECTORY`, defines a function `environment`, and makes the command
//! the positional parameters. Every value is quoted: bytes pass through unchanged.

use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStrExt,
    path::PathBuf,
};

#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) command: Vec<OsString>,
    /// Its working directory, the same path as on the host.
    pub(crate) directory: PathBuf,
    /// Its environment. Names satisfy [`is_variable_name`].
    pub(crate) environment: Vec<(OsString, OsString)>,
    /// MTU of both ends of the guest's veth, in bytes.
    pub(crate) mtu: u32,
}

impl Job {
    pub(crate) fn script(&self) -> Vec<u8> {
        let mut script = Vec::new();
        let mut line = |before: &[u8], value: &OsStr| {
            script.extend_from_slice(before);
            script.extend_from_slice(&quote(value));
            script.push(b'\n');
        };
        line(b"MTU=", self.mtu.to_string().as_ref());
        line(b"DIRECTORY=", self.directory.as_os_str());
        line(b"environment() { :", OsStr::new(""));
        for (name, value) in &self.environment {
            line(&[b"export ", name.as_bytes(), b"="].concat(), value);
        }
        script.extend_from_slice(b"}\n");
        script.extend_from_slice(b"set --");
        for argument in &self.command {
            script.push(b' ');
            script.extend_from_slice(&quote(argument));
        }
        script.push(b'\n');
        script
    }
}

/// Whether a shell can `export` this name.
pub(crate) fn is_variable_name(name: &OsStr) -> bool {
    let bytes = name.as_bytes();
    bytes.first().is_some_and(|first| !first.is_ascii_digit())
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'_')
}

/// A word that a POSIX shell reads as exactly these bytes.
fn quote(word: &OsStr) -> Vec<u8> {
    let mut quoted = vec![b'\''];
    for byte in word.as_bytes() {
        match byte {
            b'\'' => quoted.extend_from_slice(br"'\''"),
            other => quoted.push(*other),
        }
    }
    quoted.push(b'\'');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{os::unix::ffi::OsStringExt, process::Command};

    fn job(command: &[&[u8]]) -> Job {
        Job {
            command: command.iter().map(|word| OsString::from_vec(word.to_vec())).collect(),
            directory: "/with space/and'quote".into(),
            environment: vec![
                ("RUST_LOG".into(), "a=b,c \"d\" $e".into()),
                ("PATH".into(), "/usr/bin:/bin".into()),
            ],
            mtu: 4200,
        }
    }

    /// A real shell checks the result: it prints what it parsed, NUL-separated.
    fn read_by_a_shell(job: &Job) -> Vec<Vec<u8>> {
        let mut script = job.script();
        script.extend_from_slice(
            br#"environment; printf '%s\0' "$MTU" "$DIRECTORY" "$PATH" "$RUST_LOG"; printf '%s\0' "$@""#,
        );
        let output = Command::new("sh")
            .arg("-c")
            .arg(OsString::from_vec(script))
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output.stdout.split(|byte| *byte == 0).map(<[u8]>::to_vec).collect()
    }

    #[test]
    fn a_shell_reads_back_every_byte() {
        let hostile: &[&[u8]] = &[
            b"sh",
            b"-c",
            b"echo \"it's\" $HOME `id` \\ !",
            b"",
            b"two\nlines\n",
            b"  ",
            b"-n",
            b"*",
            b"\xff\xfe\x01",
        ];
        let read = read_by_a_shell(&job(hostile));
        assert_eq!(read[0], b"4200");
        assert_eq!(read[1], b"/with space/and'quote");
        assert_eq!(read[2], b"/usr/bin:/bin");
        assert_eq!(read[3], b"a=b,c \"d\" $e");
        assert_eq!(read[4..4 + hostile.len()], *hostile);
    }

    #[test]
    fn names_that_a_shell_cannot_export_are_detected() {
        for good in ["DOORBELL_LINK", "_", "a1"] {
            assert!(is_variable_name(OsStr::new(good)), "{good}");
        }
        for bad in ["", "1A", "A-B", "A B", "BASH_FUNC_x%%", "é"] {
            assert!(!is_variable_name(OsStr::new(bad)), "{bad}");
        }
    }
}
