//! Sleep instead of poll.
//!
//! Polling has the shortest way from a completion to the program, and takes a processor. A completion queue made on a
//! [`CompletionChannel`](crate::CompletionChannel) can be slept on as well: by a thread, a task, or an event loop.
//!
//! ```no_run
//! use std::time::{Duration, Instant};
//! use doorbell_verbs::{CompletionQueue, Context, CompletionError};
//!
//! /// Polls as long as there is much to do, and sleeps else.
//! fn run(device: &Context) -> Result<(), Box<dyn std::error::Error>> {
//!     let channel = device.completion_channel()?;
//!     let mut cq = device.completion_queue_on(&channel, 1024)?;
//!     // One event for up to 16 completions, or what has come in 10 µs: where the device can, it saves interrupts.
//!     let _ = cq.moderate(16, 10);
//!     let mut busy = Instant::now();
//!     loop {
//!         let any = handle(&mut cq)?;
//!         if any {
//!             busy = Instant::now();
//!         } else if busy.elapsed() > Duration::from_micros(50) {
//!             // Arms the queue, looks once more, and sleeps: no completion is slept through.
//!             for done in cq.wait(Duration::from_secs(1))? {
//!                 println!("{:?}", done.result()?);
//!             }
//!             busy = Instant::now();
//!         }
//!     }
//! }
//!
//! fn handle(cq: &mut CompletionQueue) -> Result<bool, Box<dyn std::error::Error>> {
//!     let mut any = false;
//!     cq.poll()?.try_for_each(|done| {
//!         any = true;
//!         println!("{:?}", done.result()?);
//!         Ok::<_, CompletionError>(())
//!     })?;
//!     Ok(any)
//! }
//! ```
//!
//! - **Tasks**: `TokioChannel::wait` (feature `tokio`) is the same for tokio; `examples/03_tokio` serves eight clients with it.
//! - **Event loops**: a channel has a file descriptor ([`AsFd`](std::os::fd::AsFd)) that is readable when one of its queues has an event;
//!   [`try_next`](crate::CompletionChannel::try_next) then says which. [`arm`](crate::CompletionQueue::arm) the queue, and poll it *after* arming.
//! - **Only some messages**: [`wait_for`](crate::CompletionQueue::wait_for) with [`Notify::Solicited`](crate::Notify::Solicited) sleeps until one that its
//!   sender marked [`solicited`](crate::WorkRequest::solicited).
//! - **What happens unasked** (ports down, queue pairs in error) comes from [`Context::events`](crate::Context::events), which can be waited for likewise.
//!
//! # Units
//!
//! Timeouts are [`Duration`](std::time::Duration)s, `None` for never; [`moderate`](crate::CompletionQueue::moderate) takes completions and microseconds. To
//! wake a sleeping thread costs some 5 to 20 µs: polling that long before sleeping costs at most twice the best choice.
//!
//! # What goes wrong
//!
//! - *[`NoChannel`](crate::EventError::NoChannel).* The queue was made by [`completion_queue`](crate::Context::completion_queue), not
//!   [`completion_queue_on`](crate::Context::completion_queue_on).
//! - *A wait that gives nothing although its time is not up.* Completions of a queue pair dropped since end it too: go by the clock.
//! - *Sleeping on sends.* Unsignaled requests have no completion, and wake nobody.
//!
//! # Where the rules are
//!
//! Completion notification: IBTA vol 1, 11.4.2.2; ibv_req_notify_cq(3), ibv_get_cq_event(3), ibv_modify_cq(3).
