//! The best kind of completion queue that a device supports.

use std::io;

use super::{CompletionQueue, ExtendedCq};
use crate::context::Context;
use crate::error::CompletionQueueError;

/// A completion queue, extended if the device has them, otherwise classic (ibv_create_cq_ex(3),
/// ibv_create_cq(3)). Match on it once and run code that is generic over the kind:
///
/// ```no_run
/// use doorbell_verbs::{BestCompletionQueue, CompletionQueue, Context, CqKind};
///
/// fn serve<Q: CqKind>(device: &Context, mut cq: CompletionQueue<Q>) -> Result<(), Box<dyn std::error::Error>> {
///     // Queue pairs are created on it and completions polled as on either kind.
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
#[doc(alias("ibv_create_cq", "ibv_create_cq_ex"))]
#[derive(Debug)]
pub enum BestCompletionQueue {
    /// The device supports extended queues.
    Extended(CompletionQueue<ExtendedCq>),
    /// It does not.
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
