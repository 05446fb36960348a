//! Events: what wakes a thread or task that sleeps.
//!
//! A [`CompletionChannel`] reports completions of the queues created on it; [`Events`] reports
//! asynchronous events of the device and its objects. Both are file descriptors, always
//! non-blocking: threads sleep in poll(2), tasks in their runtime (feature `tokio`).

pub(crate) mod channel;
mod leader;
mod reader;
#[cfg(feature = "tokio")]
mod tokio;

pub use channel::CompletionChannel;
pub use reader::{AsyncEvent, Events, PortEvent, QueuePairEvent, SharedReceiveQueueEvent};
#[cfg(feature = "tokio")]
pub use tokio::{TokioChannel, TokioEvents};
