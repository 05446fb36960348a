//! Queue pairs that the connection manager connects (`-R`): before their keys are told, where those of other tests come after.

use doorbell_verbs::QueuePair;

use super::super::printer::Printer;
use super::super::wire::{Conversation, Managed};
use super::Service;
use crate::failure::{Failure, one_line};
use crate::interrupt::Interrupt;

/// A queue pair on its way to the other end.
#[derive(Debug)]
pub(super) enum Joined<T: Service> {
    /// It has a way to go: the other end's key says where.
    Not(T::Prepared),
    /// It is there.
    Yes(Box<(QueuePair<T>, T::To)>),
}

/// Connects queue pairs by the connection manager, if there is one: one after the other, between two meetings of the ends. The n-th of one end gets the n-th of the other, and the
/// conversation keeps them connected.
///
/// # Errors
/// [`Failure::Test`] when one cannot be connected; as [`Conversation::barrier`] otherwise.
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
