//! Go on after a failure.
//!
//! When a request on a connection fails, its [`CompletionError`](crate::CompletionError) says why, and its queue pair is in the error state: whatever is in flight, and
//! whatever is still posted, completes as [`Flushed`](crate::CompletionStatus::Flushed), with its buffers. Nothing else has broken. Memory, its keys, protection domain
//! and completion queue are as good as before; a new queue pair, connected anew, is all that it takes.
//!
//! ```no_run
//! use std::collections::VecDeque;
//! use std::time::Duration;
//! use doorbell_verbs::{Buffer, CompletionQueue, Endpoint, CompletionError, ProtectionDomain, QueuePair, CompletionStatus};
//!
//! type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
//!
//! /// Delivers all messages, in their order, over as many connections as it takes. `meet` gives the peer an endpoint, and gives back the peer's, and how many messages it has.
//! fn deliver(
//!     pd: &ProtectionDomain,
//!     cq: &mut CompletionQueue,
//!     meet: impl Fn(Endpoint) -> Result<(Endpoint, usize)>,
//!     mut messages: VecDeque<Buffer>,
//! ) -> Result<()> {
//!     let all = messages.len();
//!     for attempt in 0..10 {
//!         // Waits 67 ms · 8 and more for a peer that is silent.
//!         let prepared = pd.queue_pair(cq).max_send_wr(32).max_recv_wr(1).timeout(14).retry_count(7).rc()?;
//!         let (peer, has) = meet(prepared.endpoint())?;
//!         // What the peer has need not be sent again; those that it has not are all still here.
//!         let skip = has.saturating_sub(all - messages.len()).min(messages.len());
//!         messages.drain(..skip);
//!         let mut qp = prepared.connect(&peer)?;
//!         let Some(failure) = send(&mut qp, cq, &mut messages)? else { return Ok(()) };
//!         match failure.status {
//!             // The peer is silent, or slow: it may come back.
//!             CompletionStatus::RetryExceeded | CompletionStatus::RnrRetryExceeded => std::thread::sleep(Duration::from_millis(100 << attempt)),
//!             // Anything else would fail again.
//!             _ => return Err(failure.into()),
//!         }
//!         // The queue pair is dropped here.
//!     }
//!     Err("the peer does not come back".into())
//! }
//!
//! /// Sends messages until all are acknowledged or one fails; then all that were sent are back in their place.
//! fn send(qp: &mut QueuePair, cq: &mut CompletionQueue, messages: &mut VecDeque<Buffer>) -> Result<Option<CompletionError>> {
//!     let (mut failure, mut sent, mut in_flight) = (None, Vec::new(), 0);
//!     while in_flight > 0 || (failure.is_none() && !messages.is_empty()) {
//!         while failure.is_none() && qp.free_send_slots() > 0 && let Some(message) = messages.pop_front() {
//!             qp.post(|batch| {
//!                 batch.send(message).signaled();
//!             })?;
//!             in_flight += 1;
//!         }
//!         for mut done in cq.poll()? {
//!             in_flight -= 1;
//!             // The first failure has the reason; those after it are flushed.
//!             failure = failure.or(done.check().err());
//!             sent.extend(done.take());
//!         }
//!     }
//!     if failure.is_some() {
//!         sent.into_iter().rev().for_each(|message| messages.push_front(message));
//!     }
//!     Ok(failure)
//! }
//! ```
//!
//! # What a failure says
//!
//! | [`CompletionStatus`](crate::CompletionStatus) | what happened | what to do |
//! |---|---|---|
//! | [`Flushed`](crate::CompletionStatus::Flushed) | an earlier request failed, or [`flush`](crate::QueuePair::flush) was called | look at the first failure |
//! | [`RetryExceeded`](crate::CompletionStatus::RetryExceeded) | the peer is silent | connect again, after a while |
//! | [`RnrRetryExceeded`](crate::CompletionStatus::RnrRetryExceeded) | the peer has no receive posted | connect again; send less, or have it post more |
//! | [`RemoteAccess`](crate::CompletionStatus::RemoteAccess), [`RemoteInvalidRequest`](crate::CompletionStatus::RemoteInvalidRequest) | the peer's device refuses | a mistake in the program, or a key that is gone |
//! | [`LocalLength`](crate::CompletionStatus::LocalLength), [`LocalProtection`](crate::CompletionStatus::LocalProtection), [`LocalAccess`](crate::CompletionStatus::LocalAccess) | this side's device refuses | a mistake in the program |
//! | [`Fatal`](crate::CompletionStatus::Fatal) | the device has failed | open it again |
//!
//! The side that is refused something learns it by a completion. The other side learns it by an event ([`AccessError`](crate::QueuePairEvent::AccessError),
//! from [`Context::events`](crate::Context::events)), and its receives are flushed.
//!
//! # What goes wrong
//!
//! - *A message is lost, or comes twice.* An acknowledgement says that the peer's device has a message, not that its program has seen it; and a request that
//!   failed may have been carried out, its acknowledgement lost. Neither side alone can tell: number the messages, and have the receiver say how far it came.
//! - *Completions of the old queue pair turn up.* Those that a poll had fetched before it was dropped are still given, with [`qpn`](crate::Completion::qpn)
//!   saying whose they are. All later ones are not, and their buffers are dropped.
//! - *[`CompletionQueueTooSmall`](crate::QueuePairError::CompletionQueueTooSmall) for the new queue pair.* The entries of the old one are free when the queue
//!   has been seen empty: poll it, or give it room for two.
//! - *The old packets.* A new queue pair has another number and begins at another sequence number, by chance; what is left of the old connection in the network
//!   fits neither.
//! - *One keeps a reset queue pair.* There is no way back from ERR here but a new one: what peers know of the old one is void anyway.
//!
//! # Where the rules are
//!
//! The error state: IBTA vol 1, 10.3.1.7; completion errors: 11.6.2; asynchronous events: 11.6.3; ibv_poll_cq(3), ibv_get_async_event(3).
