//! Queue pairs connected by the connection manager (`-R`), before their QP information is
//! exchanged; without `-R` the exchange comes first.

use doorbell_verbs::{CompletionQueue, ProtectionDomain, QueuePair};

use super::super::printer::Printer;
use super::super::settings::Settings;
use super::super::wire::{ControlConnection, QpConnector};
use super::TestTransport;
use crate::failure::{Failure, one_line};
use crate::interrupt::Interrupt;

/// A queue pair while it is set up.
#[derive(Debug)]
pub(crate) enum QpSetup<T: TestTransport> {
    /// Connected when the peer's QP information is known.
    NotConnected(T::Prepared),
    Connected(Box<(QueuePair<T>, T::Destination)>),
}

/// Connects the queue pairs by the connection manager, one after the other between two barriers;
/// n-th to n-th. The control connection keeps the CM connections.
///
/// # Errors
/// [`Failure::Test`] when one cannot be connected; as [`ControlConnection::barrier`] otherwise.
pub(super) fn connect_by_cm<T: TestTransport>(
    prepared: Vec<T::Prepared>,
    (pd, cq): (&ProtectionDomain, &mut CompletionQueue),
    settings: &Settings,
    control: &mut ControlConnection,
    connector: Option<QpConnector>,
    printer: &Printer<'_>,
    interrupt: &Interrupt,
) -> Result<Vec<QpSetup<T>>, Failure> {
    let Some(mut connector) = connector else {
        return Ok(prepared.into_iter().map(QpSetup::NotConnected).collect());
    };
    if settings.is_server() {
        printer.waiting_for_queue_pairs()?;
    }
    control.cm_barrier()?;
    let mut connected = Vec::with_capacity(prepared.len());
    for qp in prepared {
        let announces = settings.goes_both_ways().then_some(&mut *cq);
        let (qp, connection) = T::connect_by_cm(qp, connector.next(interrupt)?, pd, announces)
            .map_err(|reason| Failure::test(format!("peer {}: {}", control.peer(), one_line(&reason))))?;
        connected.push(qp);
        if let Some(connection) = connection {
            control.keep_connected(connection);
        }
    }
    control.cm_barrier()?;
    Ok(connected)
}
