//! The better kind of queue that a device has.

use std::io;

use super::{CompletionQueue, Extended};
use crate::context::Context;
use crate::error::CompletionQueueError;

/// A completion queue of the better kind that a device has: extended, or else classic (ibv_create_cq_ex(3), ibv_create_cq(3)). To be matched on once, for code
/// that is generic over the kind:
///
/// ```no_run
/// use doorbell_verbs::{BestCompletionQueue, CompletionQueue, Context, CqKind};
///
/// fn serve<Q: CqKind>(device: &Context, mut cq: CompletionQueue<Q>) -> Result<(), Box<dyn std::error::Error>> {
///     // Queue pairs are made on it, and completions taken, as of either.
///     # let _ = device;
///     cq.poll()?.for_each(|done| println!("{done:?}"));
///     Ok(())
/// }
///
/// # fn example(device: &Context) -> Result<(), Box<dyn std::error::Error>> {
/// match device.best_completion_queue(256)? {
///     BestCompletionQueue::Extended(cq) => serve(device, cq),
///     BestCompletionQueue::Classic(cq) => serve(device, cq),
/// }
/// # }
/// ```
#[derive(Debug)]
pub enum BestCompletionQueue {
    /// The device has extended queues.
    Extended(CompletionQueue<Extended>),
    /// It has none.
    Classic(CompletionQueue),
}

impl BestCompletionQueue {
    pub(crate) fn new(context: &Context, entries: u32) -> Result<Self, CompletionQueueError> {
        match context.extended_completion_queue(entries).create() {
            Ok(cq) => Ok(Self::Extended(cq)),
            Err(CompletionQueueError::Create { error, .. }) if error.kind() == io::ErrorKind::Unsupported => {
                context.completion_queue(entries).map(Self::Classic)
            }
            Err(error) => Err(error),
        }
    }
}
