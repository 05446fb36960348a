//! `cargo xtask vm -- CMD…`: runs a command in a guest whose kernel has RDMA over Ethernet in
//! software (rxe): Debian's kernel under QEMU's emulator, without root or KVM. Its root is the
//! host's file system, read-only under a layer that is dropped, so a command has the same paths as
//! outside.
//!
//! What a command finds in the guest:
//!
//! - it is root, with 4 CPUs, 2 GiB of memory, no limit on locked memory, and stdin empty;
//! - `rxe0` on `v0` with 10.9.0.1 and fd09::1; `v0` is paired with `v1` in the network namespace
//!   `peer`, with 10.9.0.2 and fd09::2: `ip netns exec peer CMD`. The kernel's rxe holds UDP port
//!   4791 in the first namespace, so a userspace device runs in `peer`;
//! - `/dev/infiniband` open to all users (`setpriv --reuid 65534 --clear-groups CMD` is an
//!   unprivileged one);
//! - perftest, ibverbs-utils, iproute2, rdma-core, `busybox`; `modprobe` for modules such as
//!   `sch_netem` or `dummy` (Debian builds no `siw`);
//! - the host's `PATH`, `HOME`, `LANG`, `CI`, `RUST_LOG`, `RUST_BACKTRACE`, `DOORBELL_*` and
//!   `--env`.
//!
//! A start takes seconds: `cargo xtask vm -- sh -c 'step 1 && step 2'` runs many steps in one
//! guest.
//! `ip link set v0 mtu 4200; ip -n peer link set v1 mtu 4200` takes rxe from an MTU of 1024 to
//! 4096. All timings in a guest are an emulator's.

mod cpio;
pub(crate) mod image;
pub(crate) mod job;
pub(crate) mod machine;
mod modules;

use crate::setup;
use anyhow::{Context, Result, bail};
use image::Image;
use job::Job;
use machine::{Options, Outcome, Sink};
use std::{
    env,
    ffi::{OsStr, OsString},
    io,
    os::unix::ffi::OsStrExt,
    time::Duration,
};

const HELP: &str = "\
Run a command in a guest with the kernel's rxe

Usage: cargo xtask vm [OPTIONS] -- CMD…

Options:
      --mtu BYTES         MTU of the veth below rxe0 [default: 1500]
      --timeout SECONDS   stop the guest after this time, with status 124 [default: 600]
      --env NAME[=VALUE]  set a variable for CMD, or pass it on
  -v, --verbose           show the guest's console on stderr
  -h, --help              show this

In the guest: rxe0 on 10.9.0.1 and fd09::1; network namespace `peer` with 10.9.0.2 and fd09::2 on the other end.
Files are this machine's; what CMD writes is dropped. The exit status is CMD's, 128 + n after signal n, 124 after
the timeout, 125 when the guest failed, 141 when the reader of the output is gone.
";

/// Exit status on timeout, as timeout(1).
const TIMED_OUT: u8 = 124;
/// Exit status when the output has no reader any more, as after SIGPIPE.
const UNREAD: u8 = 141;
/// Exit status when the guest, not the command, failed.
const GUEST_FAILED: u8 = 125;

/// Variables passed to the command, beside those that begin with [`PREFIX`].
const VARIABLES: &[&str] = &[
    "CI",
    "HOME",
    "LANG",
    "LOGNAME",
    "PATH",
    "RUST_BACKTRACE",
    "RUST_LOG",
    "USER",
];
const PREFIX: &[u8] = b"DOORBELL_";

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) command: Vec<OsString>,
    pub(crate) mtu: u32,
    pub(crate) limit: Duration,
    pub(crate) environment: Vec<(OsString, OsString)>,
    pub(crate) verbose: bool,
}

impl Request {
    pub(crate) fn new(command: Vec<OsString>) -> Self {
        Self {
            command,
            mtu: 1500,
            limit: Duration::from_secs(600),
            environment: Vec::new(),
            verbose: false,
        }
    }

    pub(crate) fn run(self, stdout: Sink, stderr: Sink) -> Result<Outcome> {
        setup::require_qemu()?;
        let image = Image::prepare(&crate::target_folder()?.join("vm"))?;
        if self.verbose {
            eprintln!("vm: {}", image.kernel_version);
        }
        let inherited = env::vars_os().filter(|(name, _)| is_handed_on(name));
        let job = Job {
            command: self.command,
            directory: env::current_dir().context("there is no current directory")?,
            environment: inherited.chain(self.environment).collect(),
            mtu: self.mtu,
        };
        machine::run(
            &image,
            &job,
            Options {
                limit: self.limit,
                verbose: self.verbose,
                stdout,
                stderr,
            },
        )
    }
}

/// The command-line form. Returns the exit status.
pub(crate) fn main(arguments: lexopt::Parser) -> Result<u8> {
    let Some(request) = parse(arguments)? else {
        print!("{HELP}");
        return Ok(0);
    };
    let limit = request.limit;
    let outcome = request.run(Box::new(io::stdout()), Box::new(io::stderr()));
    // A wrong call ends with 2 in `main`; from here on all but the command's own are one of these.
    let outcome = outcome.unwrap_or_else(|error| Outcome::Failed {
        reason: format!("{error:#}"),
        console: Vec::new(),
    });
    Ok(match outcome {
        Outcome::Exited(status) => status,
        Outcome::TimedOut => {
            eprintln!("vm: stopped, the limit of {} s has passed", limit.as_secs());
            TIMED_OUT
        }
        Outcome::Unread => UNREAD,
        Outcome::Failed { reason, console } => {
            eprintln!("vm: {reason}");
            for line in console {
                eprintln!("vm: | {line}");
            }
            GUEST_FAILED
        }
    })
}

/// `None` when help was requested.
fn parse(mut arguments: lexopt::Parser) -> Result<Option<Request>> {
    use lexopt::prelude::*;
    let mut request = Request::new(Vec::new());
    while let Some(argument) = arguments.next()? {
        match argument {
            Short('h') | Long("help") => return Ok(None),
            Short('v') | Long("verbose") => request.verbose = true,
            Long("mtu") => {
                request.mtu = arguments.value()?.parse()?;
                // IPv6 requires 1280 (RFC 8200, section 5); veth takes up to 65535.
                if !(1280..=65535).contains(&request.mtu) {
                    bail!("--mtu is 1280 to 65535 bytes");
                }
            }
            Long("timeout") => request.limit = Duration::from_secs(arguments.value()?.parse()?),
            Long("env") => request.environment.push(variable(&arguments.value()?)?),
            Value(first) => {
                request.command.push(first);
                request.command.extend(arguments.raw_args()?);
            }
            other => return Err(other.unexpected().into()),
        }
    }
    if request.command.is_empty() {
        bail!("no command: cargo xtask vm -- CMD…");
    }
    Ok(Some(request))
}

/// `NAME=VALUE`, or `NAME` with its value from this process's environment.
fn variable(text: &OsStr) -> Result<(OsString, OsString)> {
    let bytes = text.as_bytes();
    let (name, value) = match bytes.iter().position(|byte| *byte == b'=') {
        Some(at) => (
            OsStr::from_bytes(&bytes[..at]),
            OsStr::from_bytes(&bytes[at + 1..]).to_owned(),
        ),
        None => (
            text,
            env::var_os(text).with_context(|| format!("--env {}: not set here", text.display()))?,
        ),
    };
    if !job::is_variable_name(name) {
        bail!("--env {}: not a variable's name", name.display());
    }
    Ok((name.to_owned(), value))
}

fn is_handed_on(name: &OsStr) -> bool {
    let listed = VARIABLES.iter().any(|listed| name == *listed);
    (listed || name.as_bytes().starts_with(PREFIX)) && job::is_variable_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(arguments: &[&str]) -> Result<Option<Request>> {
        parse(lexopt::Parser::from_args(arguments))
    }

    #[test]
    fn options_end_where_the_command_begins() {
        let request = parsed(&[
            "--mtu",
            "4200",
            "--timeout=7",
            "-v",
            "--",
            "ls",
            "--help",
            "-v",
            "--",
            "",
        ])
        .unwrap()
        .unwrap();
        assert_eq!(request.command, ["ls", "--help", "-v", "--", ""]);
        assert_eq!(
            (request.mtu, request.limit, request.verbose),
            (4200, Duration::from_secs(7), true)
        );
        let request = parsed(&["ls", "--mtu", "1"]).unwrap().unwrap();
        assert_eq!(request.command, ["ls", "--mtu", "1"], "the dashes may be left out");
    }

    #[test]
    fn a_wrong_call_is_refused() {
        for wrong in [
            &[] as &[&str],
            &["--"],
            &["--mtu", "68", "ls"],
            &["--mtu", "x", "ls"],
            &["--nope", "ls"],
            &["--env", "A-B=1", "ls"],
        ] {
            assert!(parsed(wrong).is_err(), "{wrong:?}");
        }
        assert!(parsed(&["--help"]).unwrap().is_none());
    }

    #[test]
    fn a_variable_keeps_all_after_its_first_equals_sign() {
        let (name, value) = variable(OsStr::new("A=b=c\n")).unwrap();
        assert_eq!(
            (name.as_os_str(), value.as_os_str()),
            (OsStr::new("A"), OsStr::new("b=c\n"))
        );
    }

    #[test]
    fn only_the_listed_variables_are_handed_on() {
        assert!(is_handed_on(OsStr::new("DOORBELL_LINK")) && is_handed_on(OsStr::new("PATH")));
        assert!(!is_handed_on(OsStr::new("SECRET")) && !is_handed_on(OsStr::new("DOORBELL_LINK-B")));
    }
}
