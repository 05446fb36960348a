//! Queue pairs connected by the connection manager (`-R`), before their QP information is
//! exchanged; without `-R` the exchange comes first.

use doorbell_verbs::QueuePair;

use super::super::printer::Printer;
use super::super::wire::{Conversation, Managed};
use super::Service;
use crate::failure::{Failure, one_line};
use crate::interrupt::Interrupt;

/// A queue pair while it is set up.
#[derive(Debug)]
pub(super) enum Joined<T: Service> {
    /// Not connected: the peer's QP information names the destination.
    Not(T::Prepared),
    /// Connected by the connection manager.
    Yes(Box<(QueuePair<T>, T::To)>),
}

/// Connects the queue pairs by the connection manager, if there is one: one after the other,
/// between two barriers. The n-th of one end is connected to the n-th of the other; the control
/// connection keeps the CM connections.
///
/// # Errors
/// [`Failure::Test`] when one cannot be connected; as [`ControlConnection::barrier`] otherwise.
pub(super) fn join<T: Service>(
    prepared: Vec<T::Prepared>,
    conversation: &mut Conversation,
    managed: Option<Managed>,
    is_server: bool,
    printer: &Printer<'_>,
    interrupt: &Interrupt,
) -> Result<Vec<Joined<T>>, Failure> {
    let Some(mut managed) = managed else {
        return Ok(prepared.into_iter().map(Joined::Not).collect());
    };
    if is_server {
        printer.waiting_for_queue_pairs()?;
    }
    conversation.rendezvous()?;
    let mut joined = Vec::with_capacity(prepared.len());
    for qp in prepared {
        let (qp, to, connection) = T::join(qp, managed.next(interrupt)?)
            .map_err(|reason| Failure::test(format!("peer {}: {}", conversation.peer(), one_line(&reason))))?;
        joined.push(Joined::Yes(Box::new((qp, to))));
        conversation.keep(connection);
    }
    conversation.rendezvous()?;
    Ok(joined)
}
