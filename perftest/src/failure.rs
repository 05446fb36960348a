//! Errors of the command, with their exit status.
//!
//! Every error ends here as one line with advice. The exit statuses are part of the command's
//! contract: 0 done, 1 the test failed, 2 bad usage; 130 is the convention for Ctrl-C.

use std::net::SocketAddr;
use std::process::ExitCode;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// A value out of range, contradicting options, an unknown device. Exit status 2.
    #[error("{0}")]
    Usage(String),
    /// The test failed: peer lost, wrong data, an address in use. Exit status 1.
    #[error("{0}")]
    Test(String),
    /// A device, or the system, refused what a test needs, before anything was measured. Exit
    /// status 1.
    #[error("{0}")]
    Refused(String),
    /// The connection to the peer broke, or the peer stopped sending. Exit status 1.
    #[error("peer {control} lost: {reason}")]
    Lost { control: SocketAddr, reason: String },
    /// A command could not be run. Exit statuses as in env(1): 127 when there is no such command,
    /// 126 when it cannot be started, 125 when this program failed before.
    #[error("{0}")]
    NotRun(String, u8),
    /// Ctrl-C. Exit status 130.
    #[error("interrupted")]
    Interrupted,
}

impl Failure {
    pub(crate) fn test(message: impl Into<String>) -> Self {
        Failure::Test(message.into())
    }

    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Failure::Usage(message.into())
    }

    /// Turns a test failure into one before the measurement.
    pub(crate) fn before_measuring(self) -> Self {
        match self {
            Failure::Test(reason) => Failure::Refused(reason),
            other => other,
        }
    }

    pub(crate) fn status(&self) -> u8 {
        match self {
            Failure::Test(_) | Failure::Refused(_) | Failure::Lost { .. } => 1,
            Failure::Usage(_) => 2,
            Failure::NotRun(_, status) => *status,
            Failure::Interrupted => 130,
        }
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.status())
    }
}

/// Control characters of another program's message, such as line breaks, become spaces.
pub(crate) fn one_line(message: &str) -> String {
    message
        .trim()
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

/// A test failure with the message of a library or of the system.
pub(crate) fn refused(error: impl std::fmt::Display) -> Failure {
    Failure::test(one_line(&error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_are_the_contracts() {
        assert_eq!(Failure::test("x").status(), 1);
        assert_eq!(Failure::usage("x").status(), 2);
        let lost = Failure::Lost {
            control: ([127, 0, 0, 1], 9).into(),
            reason: "it is gone".into(),
        };
        assert_eq!(
            (lost.status(), lost.to_string().as_str()),
            (1, "peer 127.0.0.1:9 lost: it is gone")
        );
        assert_eq!(Failure::Interrupted.status(), 130);
    }

    #[test]
    fn hostile_text_stays_one_line() {
        assert_eq!(one_line(" a\nb\x1b[31mc\t"), "a b [31mc");
    }
}
