//! An established connection as the connection manager sees it. Data is sent by the queue pair.

use core::time::Duration;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use doorbell_verbs_sys as sys;
use sys::rdmacm;

use super::error::CmError;
use super::id::CmId;
use crate::qp::{Backend, PreparedQueuePair, Reliable};
use crate::wait::Deadline;

/// A connected queue pair's side of the manager (rdma_cm(7)); its descriptor is readable by events.
///
/// Dropping it disconnects (DREQ), without waiting; the local queue pair is not modified.
#[doc(alias = "rdma_cm_id")]
#[derive(Debug)]
pub struct Connection {
    pub(super) id: CmId,
    private_data: Vec<u8>,
    disconnected: bool,
}

/// An event of a connection (rdma_get_cm_event(3)).
#[doc(alias("rdma_cm_event_type", "rdma_cm_event"))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConnectionEvent {
    /// The peer has disconnected: [`flush`](crate::QueuePair::flush) returns what is in flight.
    #[doc(alias = "RDMA_CM_EVENT_DISCONNECTED")]
    Disconnected,
    /// The device is about to be removed: drop every object on it.
    #[doc(alias = "RDMA_CM_EVENT_DEVICE_REMOVAL")]
    DeviceRemoved,
    /// The address has moved to other hardware: the connection may be slow or broken.
    #[doc(alias = "RDMA_CM_EVENT_ADDR_CHANGE")]
    AddressChanged,
    /// The timewait state is over: no packet of the closed connection can be in flight.
    #[doc(alias = "RDMA_CM_EVENT_TIMEWAIT_EXIT")]
    TimewaitExit,
    /// Any other event, with its `rdma_cm_event_type`.
    Other(u32),
}

impl Connection {
    pub(super) fn new(id: CmId, private_data: Vec<u8>) -> Self {
        Self {
            id,
            private_data,
            disconnected: false,
        }
    }

    /// The peer's private data, of its REQ or REP, followed by zeros.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// The local address; `None` if it is of a family that the standard library does not support.
    #[doc(alias = "rdma_get_local_addr")]
    #[must_use]
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.id.local()
    }

    /// The peer's address; `None` if it is of a family that the standard library does not support.
    #[doc(alias = "rdma_get_peer_addr")]
    #[must_use]
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.id.peer()
    }

    /// Waits up to `timeout` for the next event; `None` when there is none (rdma_get_cm_event(3)).
    ///
    /// # Errors
    /// When the manager fails.
    #[doc(alias("rdma_get_cm_event", "rdma_ack_cm_event"))]
    pub fn next_event(&mut self, timeout: Duration) -> Result<Option<ConnectionEvent>, CmError> {
        let event = self.id.next_event(Deadline::after(timeout))?;
        Ok(event.map(|event| match event.kind {
            rdmacm::RDMA_CM_EVENT_DISCONNECTED => {
                self.disconnected = true;
                ConnectionEvent::Disconnected
            }
            rdmacm::RDMA_CM_EVENT_DEVICE_REMOVAL => ConnectionEvent::DeviceRemoved,
            rdmacm::RDMA_CM_EVENT_ADDR_CHANGE => ConnectionEvent::AddressChanged,
            rdmacm::RDMA_CM_EVENT_TIMEWAIT_EXIT => ConnectionEvent::TimewaitExit,
            other => ConnectionEvent::Other(other),
        }))
    }

    /// Disconnects, and waits for the peer's confirmation (rdma_disconnect(3)), not for requests.
    ///
    /// # Errors
    /// When the manager fails or the peer does not answer. The connection is closed in either case.
    #[doc(alias = "rdma_disconnect")]
    pub fn disconnect(mut self, timeout: Duration) -> Result<(), CmError> {
        if self.disconnected {
            return Ok(());
        }
        self.disconnected = true;
        let deadline = Deadline::after(timeout);
        self.id.disconnect()?;
        self.id
            .wait_event(rdmacm::RDMA_CM_EVENT_DISCONNECTED, "rdma_disconnect", deadline)?;
        Ok(())
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.id.as_fd()
    }
}

impl AsRawFd for Connection {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Also after the peer's own DREQ: this sends the DREP.
        if let Err(error) = self.id.disconnect() {
            tracing::debug!(%error, "the connection was gone before it was dropped");
        }
    }
}

pub(super) fn check_private_data(call: &'static str, private_data: &[u8], max: usize) -> Result<(), CmError> {
    let len = private_data.len();
    if len > max {
        return Err(CmError::PrivateData { call, len, max });
    }
    Ok(())
}

/// Checks that an object is on the path's device and port.
pub(super) fn check_device(id: &CmId, other_device: &str, other_port: u8) -> Result<(), CmError> {
    let (device, port) = (id.device()?, id.port());
    if device != other_device || port != other_port {
        return Err(CmError::OtherDevice {
            address: id.name(),
            device,
            port,
            other_device: other_device.to_owned(),
            other_port,
        });
    }
    Ok(())
}

/// Checks that the queue pair is on the path's device and port, and sets its P_Key index.
pub(super) fn bind_to_path<T: Reliable, B: Backend>(
    id: &CmId,
    qp: &mut PreparedQueuePair<T, B>,
) -> Result<(), CmError> {
    check_device(id, qp.device(), qp.port())?;
    Ok(qp.set_pkey_index(id.attributes(sys::IBV_QPS_INIT)?.pkey_index)?)
}
