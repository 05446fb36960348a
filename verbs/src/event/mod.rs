//! Events: what wakes a thread or task that sleeps.
//!
//! [`CompletionChannel`] reports completions, [`Events`] asynchronous events. Both are non-blocking
//! file descriptors: threads sleep in poll(2), tasks in their runtime (feature `tokio`).

pub(crate) mod channel;
mod leader;
mod reader;
#[cfg(feature = "tokio")]
mod tokio;

pub use channel::CompletionChannel;
pub use reader::{AsyncEvent, Events, PortEvent, QueuePairEvent, SharedReceiveQueueEvent};
#[cfg(feature = "tokio")]
pub use tokio::{TokioChannel, TokioEvents};
