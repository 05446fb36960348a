//! Queue pairs connected by the connection manager (`-R`), before their QP information is
//! exchanged; without `-R` the exchange comes first.

use doorbell_verbs::cm::Connection;
use doorbell_verbs::{QueuePair, ReliableConnection, UnreliableConnection, UnreliableDatagram, WithSrq};

use super::super::printer::Printer;
use super::super::wire::{CmEndpoint, ControlConnection, PendingConnection};
use crate::engine::transport::TestTransport;
use crate::failure::{Failure, one_line};
use crate::interrupt::Interrupt;

/// A queue pair with the destination of its messages, and the connection that it is on.
type Connected<T> = (QueuePair<T>, <T as TestTransport>::Destination, Connection);

/// A transport of the classic tools.
pub(crate) trait ClassicTransport: TestTransport {
    /// Connects a queue pair by the connection manager.
    ///
    /// # Errors
    /// As text, when the peer does not take part, the device refuses, or the manager does not
    /// connect this transport.
    fn connect_by_cm(_: Self::Prepared, _: PendingConnection) -> Result<Connected<Self>, String> {
        Err("the connection manager connects reliable queue pairs alone: leave -R out".to_owned())
    }
}

macro_rules! connects {
    ($transport:ty) => {
        impl ClassicTransport for $transport {
            fn connect_by_cm(prepared: Self::Prepared, pending: PendingConnection) -> Result<Connected<Self>, String> {
                let (qp, connection) = pending.connect(prepared).map_err(|e| e.to_string())?;
                Ok((qp, (), connection))
            }
        }
    };
}

connects!(ReliableConnection);
connects!(WithSrq<ReliableConnection>);
impl ClassicTransport for UnreliableConnection {}
impl ClassicTransport for UnreliableDatagram {}
impl ClassicTransport for WithSrq<UnreliableConnection> {}
impl ClassicTransport for WithSrq<UnreliableDatagram> {}

/// A queue pair while it is set up.
#[derive(Debug)]
pub(super) enum QpSetup<T: TestTransport> {
    NotConnected(T::Prepared),
    Connected(Box<(QueuePair<T>, T::Destination)>),
}

/// Connects the queue pairs by the connection manager, one after the other between two barriers;
/// n-th to n-th. The control connection keeps the CM connections.
///
/// # Errors
/// [`Failure::Test`] when one cannot be connected; as [`ControlConnection::barrier`] otherwise.
pub(super) fn connect_by_cm<T: ClassicTransport>(
    prepared: Vec<T::Prepared>,
    control: &mut ControlConnection,
    cm: Option<CmEndpoint>,
    is_server: bool,
    printer: &Printer<'_>,
    interrupt: &Interrupt,
) -> Result<Vec<QpSetup<T>>, Failure> {
    let Some(mut cm) = cm else {
        return Ok(prepared.into_iter().map(QpSetup::NotConnected).collect());
    };
    if is_server {
        printer.waiting_for_queue_pairs()?;
    }
    control.cm_barrier()?;
    let mut connected = Vec::with_capacity(prepared.len());
    for qp in prepared {
        let (qp, to, connection) = T::connect_by_cm(qp, cm.next(interrupt)?)
            .map_err(|reason| Failure::test(format!("peer {}: {}", control.peer(), one_line(&reason))))?;
        connected.push(QpSetup::Connected(Box::new((qp, to))));
        control.keep_connected(connection);
    }
    control.cm_barrier()?;
    Ok(connected)
}
