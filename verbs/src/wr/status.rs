//! Completion statuses, each with advice (IBTA vol 1, 11.6.2; ibv_poll_cq(3)).

use core::fmt;

use doorbell_verbs_sys as sys;

use crate::qp::QueueKind;
use crate::types::Qpn;

/// Why a request failed (`ibv_wc_status`; ibv_poll_cq(3); IBTA vol 1, 11.6.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[doc(alias = "ibv_wc_status")]
pub enum CompletionStatus {
    /// A receive was too short for the message, or a request longer than the path takes.
    #[doc(alias = "IBV_WC_LOC_LEN_ERR")]
    LocalLength,
    /// The queue pair's own state is inconsistent.
    #[doc(alias = "IBV_WC_LOC_QP_OP_ERR")]
    LocalQpOperation,
    /// A buffer's key does not cover it, or is of another protection domain.
    #[doc(alias = "IBV_WC_LOC_PROT_ERR")]
    LocalProtection,
    /// The queue pair entered ERR before this request completed.
    #[doc(alias = "IBV_WC_WR_FLUSH_ERR")]
    Flushed,
    /// A memory window could not be bound.
    #[doc(alias = "IBV_WC_MW_BIND_ERR")]
    WindowBind,
    /// The peer's response is invalid.
    #[doc(alias = "IBV_WC_BAD_RESP_ERR")]
    BadResponse,
    /// Memory lacks the local right needed.
    #[doc(alias = "IBV_WC_LOC_ACCESS_ERR")]
    LocalAccess,
    /// The peer's responder rejects the request as invalid.
    #[doc(alias = "IBV_WC_REM_INV_REQ_ERR")]
    RemoteInvalidRequest,
    /// The peer's memory does not allow the access.
    #[doc(alias = "IBV_WC_REM_ACCESS_ERR")]
    RemoteAccess,
    /// The peer failed to execute the request.
    #[doc(alias = "IBV_WC_REM_OP_ERR")]
    RemoteOperation,
    /// The peer does not respond: the retry count is exceeded.
    #[doc(alias = "IBV_WC_RETRY_EXC_ERR")]
    RetryExceeded,
    /// The peer has no receive posted: the RNR retry count is exceeded.
    #[doc(alias = "IBV_WC_RNR_RETRY_EXC_ERR")]
    RnrRetryExceeded,
    /// The peer aborted the operation.
    #[doc(alias = "IBV_WC_REM_ABORT_ERR")]
    RemoteAborted,
    /// The device failed.
    #[doc(alias = "IBV_WC_FATAL_ERR")]
    Fatal,
    /// A response took too long.
    #[doc(alias = "IBV_WC_RESP_TIMEOUT_ERR")]
    ResponseTimeout,
    /// Another error, with the code of `ibv_wc_status`.
    Other(u32),
}

impl CompletionStatus {
    pub(crate) fn from_sys(status: sys::ibv_wc_status) -> Self {
        match status {
            sys::IBV_WC_LOC_LEN_ERR => Self::LocalLength,
            sys::IBV_WC_LOC_QP_OP_ERR => Self::LocalQpOperation,
            sys::IBV_WC_LOC_PROT_ERR => Self::LocalProtection,
            sys::IBV_WC_WR_FLUSH_ERR => Self::Flushed,
            sys::IBV_WC_MW_BIND_ERR => Self::WindowBind,
            sys::IBV_WC_BAD_RESP_ERR => Self::BadResponse,
            sys::IBV_WC_LOC_ACCESS_ERR => Self::LocalAccess,
            sys::IBV_WC_REM_INV_REQ_ERR => Self::RemoteInvalidRequest,
            sys::IBV_WC_REM_ACCESS_ERR => Self::RemoteAccess,
            sys::IBV_WC_REM_OP_ERR => Self::RemoteOperation,
            sys::IBV_WC_RETRY_EXC_ERR => Self::RetryExceeded,
            sys::IBV_WC_RNR_RETRY_EXC_ERR => Self::RnrRetryExceeded,
            sys::IBV_WC_REM_ABORT_ERR => Self::RemoteAborted,
            sys::IBV_WC_FATAL_ERR => Self::Fatal,
            sys::IBV_WC_RESP_TIMEOUT_ERR => Self::ResponseTimeout,
            other => Self::Other(other),
        }
    }

    /// Its meaning, and what to do.
    #[must_use]
    #[doc(alias = "ibv_wc_status_str")]
    pub const fn advice(self) -> &'static str {
        match self {
            Self::LocalLength => {
                "the message is longer than the receive buffer posted for it: post longer ones, or send less"
            }
            Self::LocalQpOperation => {
                "the request does not fit the queue pair's state or limits; it must be reset or recreated"
            }
            Self::LocalProtection => {
                "a buffer is not of the queue pair's protection domain, or was registered on another device"
            }
            Self::Flushed => {
                "an earlier failure, or this side itself, put the queue pair in the error state; see the first failure"
            }
            Self::WindowBind => "the memory window cannot be bound: check its region's rights",
            Self::BadResponse => "the peer answered out of order: is it really the peer, and is its device sound?",
            Self::LocalAccess => "a buffer lacks the right to be written locally",
            Self::RemoteInvalidRequest => {
                "the peer's queue pair does not take this operation: allow it there (allow_remote_read, …_write, …_atomic), check that the \
                 message fits its receive buffer, and that atomics are aligned"
            }
            Self::RemoteAccess => {
                "the peer's memory does not allow it: key, address, length or rights are wrong, or the region is gone (or the peer's queue \
                 pair lacks allow_remote_read, …_write or …_atomic)"
            }
            Self::RemoteOperation => "the peer's device failed while carrying it out",
            Self::RetryExceeded => {
                "the peer does not answer: it has gone, its queue pair is not (or no longer) connected to this one, or the network between \
                 drops its packets (GID, path MTU, firewall, PFC)"
            }
            Self::RnrRetryExceeded => {
                "the peer has no receive posted: post receives before the peer sends, or raise rnr_retry here"
            }
            Self::RemoteAborted => "the peer aborted the operation",
            Self::Fatal => "the device has failed: it must be reopened",
            Self::ResponseTimeout => "the peer's response took too long",
            Self::Other(_) => "see ibv_wc_status in verbs.h",
        }
    }
}

impl fmt::Display for CompletionStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::LocalLength => "local length error",
            Self::LocalQpOperation => "local queue pair operation error",
            Self::LocalProtection => "local protection error",
            Self::Flushed => "flushed",
            Self::WindowBind => "memory window bind error",
            Self::BadResponse => "bad response",
            Self::LocalAccess => "local access error",
            Self::RemoteInvalidRequest => "remote invalid request",
            Self::RemoteAccess => "remote access error",
            Self::RemoteOperation => "remote operation error",
            Self::RetryExceeded => "transport retries exceeded",
            Self::RnrRetryExceeded => "receiver-not-ready retries exceeded",
            Self::RemoteAborted => "remote abort",
            Self::Fatal => "fatal device error",
            Self::ResponseTimeout => "response timeout",
            Self::Other(code) => return write!(f, "completion status {code}"),
        };
        f.write_str(name)
    }
}

fn vendor_suffix(code: u32) -> String {
    match code {
        0 => String::new(),
        code => format!(" (vendor code {code:#x})"),
    }
}

/// An error completion, with the fields that are valid in it (ibv_poll_cq(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{queue:?} request {sequence} of queue pair {qpn}: {status}{}: {}", vendor_suffix(*.vendor_error), .status.advice())]
#[non_exhaustive]
#[doc(alias = "ibv_wc")]
pub struct CompletionError {
    /// Why.
    pub status: CompletionStatus,
    /// The device's own code (`vendor_err`).
    #[doc(alias = "vendor_err")]
    pub vendor_error: u32,
    /// The queue pair.
    pub qpn: Qpn,
    /// The work queue.
    pub queue: QueueKind,
    /// Which request of the queue, counted from 0.
    pub sequence: u64,
}
