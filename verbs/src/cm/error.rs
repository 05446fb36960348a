//! What can go wrong with the connection manager.

use core::fmt;
use std::io;
use std::net::SocketAddr;

use doorbell_verbs_sys::LoadError;

use crate::error::{DeviceError, QueuePairError};

/// A connection that could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CmError {
    /// librdmacm or libibverbs could not be loaded.
    #[error(transparent)]
    Library(#[from] LoadError),
    /// There is no connection manager in this kernel, or not for this user.
    #[error(
        "rdma_create_event_channel: {0}; is there an RDMA device (`rdma link`), is the kernel's rdma_ucm module loaded (`modprobe rdma_ucm`), and may the user \
         open /dev/infiniband/rdma_cm?"
    )]
    Unavailable(#[source] io::Error),
    /// A call failed at once.
    #[error("{call}({address}): {error}; {}", call_advice(.error))]
    Call {
        /// The function.
        call: &'static str,
        /// The peer's address, or a listener's own.
        address: SocketAddr,
        /// What the library said.
        #[source]
        error: io::Error,
    },
    /// The peer, or the way to it, was not found.
    #[error(
        "{call}({address}): unreachable: {error}; check the address, the route (`ip route get`) and that the peer's RDMA device is up"
    )]
    Unreachable {
        /// The function whose effect failed.
        call: &'static str,
        /// The peer's address.
        address: SocketAddr,
        /// What the manager found.
        #[source]
        error: io::Error,
    },
    /// The peer has said no, or nobody listens there.
    #[error("rdma_connect({address}): {reason}")]
    Rejected {
        /// The peer's address.
        address: SocketAddr,
        /// Why.
        reason: Rejection,
        /// What it said with it, padded with zeros by most transports.
        private_data: Vec<u8>,
    },
    /// The time given is up.
    #[error("{call}({address}): no answer in the time given; is the peer running and answering requests?")]
    TimedOut {
        /// The function whose effect was waited for.
        call: &'static str,
        /// The peer's address.
        address: SocketAddr,
    },
    /// The peer disconnected before the connection was established.
    #[error("the peer {address} disconnected before the connection was established")]
    Disconnected {
        /// The peer's address.
        address: SocketAddr,
    },
    /// The device is gone, or was never there.
    #[error("the RDMA device to {address} has been removed")]
    DeviceRemoved {
        /// The peer's address.
        address: SocketAddr,
    },
    /// More private data than there is room for.
    #[error("{call}: {len} bytes of private data, of which at most {max} fit; send the rest when connected")]
    PrivateData {
        /// The function.
        call: &'static str,
        /// How many bytes were given.
        len: usize,
        /// How many there is room for.
        max: usize,
    },
    /// The queue pair was made on another device or port than the one that leads to the peer.
    #[error(
        "{address} is reached by port {port} of {device}, and the queue pair is on port {other_port} of {other_device}: make it on that device, with `.port({port})`"
    )]
    OtherDevice {
        /// The peer's address.
        address: SocketAddr,
        /// The device that leads there.
        device: String,
        /// Its port.
        port: u8,
        /// The queue pair's device.
        other_device: String,
        /// The queue pair's port.
        other_port: u8,
    },
    /// The device could not be queried.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The queue pair could not be connected.
    #[error(transparent)]
    Transition(#[from] QueuePairError),
}

fn call_advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => "another program listens there",
        io::ErrorKind::AddrNotAvailable => "it is no address of this machine",
        io::ErrorKind::NetworkUnreachable | io::ErrorKind::HostUnreachable => {
            "there is no route to it (`ip route get`)"
        }
        io::ErrorKind::PermissionDenied => "ports below 1024 need CAP_NET_BIND_SERVICE",
        _ if error.raw_os_error() == Some(ENODEV) => {
            "no RDMA device has that address, or leads there (`rdma link` shows each device's network interface)"
        }
        _ => "see rdma_cm(7)",
    }
}

/// errno of an address that no RDMA device has.
const ENODEV: i32 = 19;

/// Why a connection was rejected (IBTA vol 1, 12.6.7.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rejection {
    /// Nobody listens at that address and port.
    NoListener,
    /// The program that listens there has said no.
    ByPeer,
    /// The manager gave up, for want of one of its resources.
    Other(i32),
}

impl Rejection {
    /// From the status of the event: the standard's reason code, or on iWARP a negative errno.
    pub(super) fn of(status: i32) -> Self {
        match status {
            8 | ECONNREFUSED => Self::NoListener,
            28 => Self::ByPeer,
            other => Self::Other(other),
        }
    }
}

/// What iWARP says instead of reason 8.
const ECONNREFUSED: i32 = -111;

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoListener => {
                f.write_str("connection refused: nobody listens there; is the server running, and on this port?")
            }
            Self::ByPeer => f.write_str("the server rejected the connection"),
            Self::Other(reason) => write!(
                f,
                "the connection was rejected with reason {reason} (IBTA vol 1, 12.6.7.2)"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_what_is_wrong_where_and_what_to_do() {
        let address: SocketAddr = "10.9.0.1:7471".parse().unwrap();
        let refused = CmError::Rejected {
            address,
            reason: Rejection::of(8),
            private_data: Vec::new(),
        };
        assert_eq!(
            refused.to_string(),
            "rdma_connect(10.9.0.1:7471): connection refused: nobody listens there; is the server running, and on this port?"
        );
        let no_device = CmError::Call {
            call: "rdma_resolve_addr",
            address,
            error: io::Error::from_raw_os_error(ENODEV),
        };
        assert!(no_device.to_string().contains("no RDMA device has that address"));
        assert_eq!(Rejection::of(28), Rejection::ByPeer);
        assert_eq!(Rejection::of(10), Rejection::Other(10));
    }
}
