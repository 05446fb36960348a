//! Errors of the connection manager.

use core::fmt;
use std::io;
use std::net::SocketAddr;

use doorbell_verbs_sys::LoadError;

use crate::ah::AddressHandleError;
use crate::error::{DeviceError, QueuePairError};
use crate::types::QKey;

/// A connection could not be established.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CmError {
    /// librdmacm or libibverbs could not be loaded.
    #[error(transparent)]
    Library(#[from] LoadError),
    /// This kernel has no connection manager, or the user may not open it.
    #[error(
        "rdma_create_event_channel: {0}; is there an RDMA device (`rdma link`), is the kernel's rdma_ucm module loaded (`modprobe rdma_ucm`), and may the user \
         open /dev/infiniband/rdma_cm?"
    )]
    Unavailable(io::Error),
    /// A call failed immediately.
    #[error("{call}({address}): {error}; {}", call_advice(.error))]
    Call {
        /// The function.
        call: &'static str,
        /// The peer's address, or a listener's own.
        address: SocketAddr,
        /// The library's error.
        error: io::Error,
    },
    /// The peer, or a route to it, was not found.
    #[error(
        "{call}({address}): unreachable: {error}; check the address, the route (`ip route get`) and that the peer's RDMA device is up"
    )]
    #[doc(alias(
        "RDMA_CM_EVENT_UNREACHABLE",
        "RDMA_CM_EVENT_ADDR_ERROR",
        "RDMA_CM_EVENT_ROUTE_ERROR",
        "RDMA_CM_EVENT_CONNECT_ERROR"
    ))]
    Unreachable {
        /// The function that started the operation.
        call: &'static str,
        /// The peer's address.
        address: SocketAddr,
        /// The manager's error.
        error: io::Error,
    },
    /// The peer has rejected the connection, or no program listens there.
    #[doc(alias = "RDMA_CM_EVENT_REJECTED")]
    #[error("rdma_connect({address}): {reason}")]
    Rejected {
        /// The peer's address.
        address: SocketAddr,
        /// The reason.
        reason: Rejection,
        /// The private data of its REJ, padded with zeros by most transports.
        private_data: Vec<u8>,
    },
    /// The timeout expired.
    #[error("{call}({address}): no answer in the time given; is the peer running and answering requests?")]
    TimedOut {
        /// The function that started the operation.
        call: &'static str,
        /// The peer's address.
        address: SocketAddr,
    },
    /// The peer disconnected before the connection was established.
    #[doc(alias = "RDMA_CM_EVENT_DISCONNECTED")]
    #[error("the peer {address} disconnected before the connection was established")]
    Disconnected {
        /// The peer's address.
        address: SocketAddr,
    },
    /// The device has been removed, or never existed.
    #[doc(alias = "RDMA_CM_EVENT_DEVICE_REMOVAL")]
    #[error("the RDMA device to {address} has been removed")]
    DeviceRemoved {
        /// The peer's address.
        address: SocketAddr,
    },
    /// The private data is too long.
    #[error("{call}: {len} bytes of private data, of which at most {max} fit; send the rest when connected")]
    PrivateData {
        /// The function.
        call: &'static str,
        /// Bytes given.
        len: usize,
        /// Maximum.
        max: usize,
    },
    /// The queue pair is on another device or port than the path to the peer.
    #[error(
        "{address} is reached by port {port} of {device}, and the queue pair is on port {other_port} of {other_device}: make it on that device, with `.port({port})`"
    )]
    OtherDevice {
        /// The peer's address.
        address: SocketAddr,
        /// The device of the path.
        device: String,
        /// Its port.
        port: u8,
        /// The queue pair's device.
        other_device: String,
        /// The queue pair's port.
        other_port: u8,
    },
    /// The queue pair of a datagram service has another Q_Key than the manager announces.
    #[error(
        "the queue pair's Q_Key is {qkey}, and that of a resolved service {}: make it with `.qkey(QKey::RDMA_UDP)`",
        QKey::RDMA_UDP
    )]
    OtherQKey {
        /// The queue pair's.
        qkey: QKey,
    },
    /// The address handle of a datagram service could not be created.
    #[error(transparent)]
    AddressHandle(#[from] AddressHandleError),
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

/// errno when no RDMA device has the address.
const ENODEV: i32 = 19;

/// Why a connection was rejected (IBTA vol 1, 12.6.7.2).
#[doc(alias = "RDMA_CM_EVENT_REJECTED")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rejection {
    /// No program listens at that address and port (reason 8).
    NoListener,
    /// The listening program rejected the connection (reason 28).
    ByPeer,
    /// Any other reason, such as a lack of the manager's resources.
    Other(i32),
}

impl Rejection {
    /// From the event's status: the standard's reason code, or on iWARP a negative errno.
    pub(super) fn of(status: i32) -> Self {
        match status {
            8 | ECONNREFUSED => Self::NoListener,
            28 => Self::ByPeer,
            other => Self::Other(other),
        }
    }

    /// From the status of a SIDR_REP (IBTA vol 1, 12.11.2).
    pub(super) fn of_service(status: i32) -> Self {
        match status {
            1 => Self::NoListener,
            2 => Self::ByPeer,
            other => Self::Other(other),
        }
    }
}

/// iWARP's equivalent of reason 8.
const ECONNREFUSED: i32 = -111;

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoListener => {
                f.write_str("connection refused: no program listens there; is the server running, and on this port?")
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
            "rdma_connect(10.9.0.1:7471): connection refused: no program listens there; is the server running, and on this port?"
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
