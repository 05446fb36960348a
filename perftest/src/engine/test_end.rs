//! One connected end of a test: a completion queue and the queue pairs on it.

use std::time::Duration;

use doorbell_verbs::cm::Connection;
use doorbell_verbs::{
    CompletionError as Completed, CompletionQueue, Completions, PostError, QueuePair, SharedReceiveQueue,
};

use super::transport::TestTransport;
use crate::failure::{Failure, one_line, refused};

/// Longest sleep on the completion channel, so that Ctrl-C and a lost peer are noticed.
const SLEEP: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(crate) struct TestQp<T: TestTransport> {
    /// The connected queue pair. The tag of its completions is its index.
    pub(crate) qp: QueuePair<T>,
    /// Destination of its datagrams (UD).
    pub(crate) to: T::Destination,
    /// The peer and its queue pair, as messages name them.
    pub(crate) peer: String,
}

impl<T: TestTransport> TestQp<T> {
    #[cold]
    pub(crate) fn failed(&self, failure: &Completed) -> Failure {
        Failure::test(format!("{}: {}", self.peer, one_line(&failure.to_string())))
    }

    #[cold]
    pub(crate) fn lost(&self, index: u64) -> Failure {
        Failure::test(format!(
            "{}: message {index} or its answer was lost: this transport repeats nothing",
            self.peer
        ))
    }

    #[cold]
    pub(crate) fn refused(&self, refused: &PostError) -> Failure {
        let reason = one_line(&refused.to_string());
        Failure::test(format!("cannot post to {}: {reason}", self.peer))
    }
}

#[derive(Debug)]
pub(crate) struct TestEnd<T: TestTransport> {
    /// Receives the completions of all sends and receives.
    pub(crate) cq: CompletionQueue,
    pub(crate) qps: Vec<TestQp<T>>,
    /// The shared receive queue of transports that have one.
    pub(crate) shared: Option<SharedReceiveQueue>,
    /// The connections of the connection manager, held while their queue pairs are in use.
    pub(crate) connections: Vec<Connection>,
}

/// Polls a completion queue; with `sleeps` waits up to 50 ms on its completion channel. Inlined, as
/// it is part of the loop of every message.
#[inline(always)]
pub(crate) fn completions(cq: &mut CompletionQueue, sleeps: bool) -> Result<Completions<'_>, Failure> {
    if sleeps {
        return wait(cq);
    }
    cq.poll().map_err(refused)
}

#[inline(never)]
fn wait(cq: &mut CompletionQueue) -> Result<Completions<'_>, Failure> {
    cq.wait(SLEEP).map_err(refused)
}
