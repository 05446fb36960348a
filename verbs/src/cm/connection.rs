//! An established connection: the manager's side of it. Data goes by the queue pair.

use core::time::Duration;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};

use doorbell_verbs_sys as sys;
use sys::rdmacm;

use super::error::CmError;
use super::id::Id;
use crate::qp::{Backend, PreparedQueuePair, Reliable};
use crate::wait::Deadline;

/// What the manager knows of a connected queue pair: who the peer is, and whether it is still there (rdma_cm(7)). Its descriptor is readable when there is an event.
///
/// Dropping it disconnects, without waiting for the peer. The queue pair is not touched by that; but a peer that hears of it will stop.
#[derive(Debug)]
pub struct Connection {
    id: Id,
    private_data: Vec<u8>,
    disconnected: bool,
}

/// Something that has happened to a connection (rdma_get_cm_event(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConnectionEvent {
    /// The peer has disconnected, or is gone: [`flush`](crate::QueuePair::flush) the queue pair to get back what is in flight.
    Disconnected,
    /// The device is about to be removed: everything on it must be dropped.
    DeviceRemoved,
    /// The address has moved to other hardware: the connection may be slow, or dead.
    AddressChanged,
    /// After a disconnection: no packet of the connection can be under way any more.
    TimewaitExit,
    /// An event that is none of these, by its number in `enum rdma_cm_event_type`.
    Other(u32),
}

impl Connection {
    pub(super) fn new(id: Id, private_data: Vec<u8>) -> Self {
        Self {
            id,
            private_data,
            disconnected: false,
        }
    }

    /// What the peer said when it connected or accepted, followed by zeros.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// This side's address; `None` if it is of a family that the standard library does not know.
    #[must_use]
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.id.local()
    }

    /// The peer's address; `None` if it is of a family that the standard library does not know.
    #[must_use]
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.id.peer()
    }

    /// The next event, for which it waits as long as `timeout`; `None` when there is none (rdma_get_cm_event(3)).
    ///
    /// # Errors
    /// When the manager fails.
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

    /// Disconnects, and waits as long as `timeout` until the peer has heard of it (rdma_disconnect(3)). What is in flight is for the caller to wait for before.
    ///
    /// # Errors
    /// When the manager fails or the peer does not answer. It is disconnected all the same.
    pub fn disconnect(mut self, timeout: Duration) -> Result<(), CmError> {
        if self.disconnected {
            return Ok(());
        }
        self.disconnected = true;
        let deadline = Deadline::after(timeout);
        self.id.disconnect()?;
        self.id
            .expect(rdmacm::RDMA_CM_EVENT_DISCONNECTED, "rdma_disconnect", deadline)?;
        Ok(())
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.id.as_fd()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Also after the peer's own: it answers that.
        if let Err(error) = self.id.disconnect() {
            tracing::debug!(%error, "the connection was gone before it was dropped");
        }
    }
}

/// Checks that private data is not longer than `max`.
pub(super) fn fits(call: &'static str, private_data: &[u8], max: usize) -> Result<(), CmError> {
    let len = private_data.len();
    if len > max {
        return Err(CmError::PrivateData { call, len, max });
    }
    Ok(())
}

/// Checks that the queue pair is on the device and port that lead to the peer, and puts it in the path's partition.
pub(super) fn prepare<T: Reliable, B: Backend>(id: &Id, qp: &mut PreparedQueuePair<T, B>) -> Result<(), CmError> {
    let (device, port) = (id.device()?, id.port());
    if device != qp.device() || port != qp.port() {
        return Err(CmError::OtherDevice {
            address: id.name(),
            device,
            port,
            other_device: qp.device().to_owned(),
            other_port: qp.port(),
        });
    }
    Ok(qp.join_partition(id.attributes(sys::IBV_QPS_INIT)?.pkey_index)?)
}
