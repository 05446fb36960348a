//! Share receives.
//!
//! A server with a thousand clients that posts 64 receives of 4 KiB for each has 256 MiB of buffers, nearly all of them idle. A *shared receive queue* is one
//! queue of receives for all of its queue pairs: whichever gets a message takes the next. There have to be as many as messages come at once.
//!
//! ```no_run
//! use doorbell_verbs::{Context, Endpoint, Local, QueueKind, QueuePair, ReliableConnection, WithSrq};
//!
//! const MESSAGE: usize = 4096;
//!
//! /// Answers every message with itself. `connect` gives a client the endpoint here, and its own back.
//! fn serve(device: &Context, connect: impl Fn(usize, Endpoint) -> Endpoint) -> Result<(), Box<dyn std::error::Error>> {
//!     let pd = device.protection_domain()?;
//!     // An entry for each receive, once, and for each request that may be under way to a client.
//!     let mut cq = device.completion_queue(1024 + 100 * 16)?;
//!     let mut srq = pd.shared_receive_queue(1024).create()?;
//!     let buffers = pd.register_chunks(vec![0; 1024 * MESSAGE], MESSAGE, Local)?;
//!     srq.post_receives(|batch| buffers.for_each(|buffer| batch.receive(buffer)))?;
//!
//!     let mut clients: Vec<QueuePair<WithSrq<ReliableConnection>>> = Vec::new();
//!     for number in 0..100 {
//!         // The tag says later whom a message is from.
//!         let prepared = pd.queue_pair(&cq).max_send_wr(16).tag(number).shared_receive_queue(&srq).rc()?;
//!         let client = connect(number as usize, prepared.endpoint());
//!         clients.push(prepared.connect(&client)?);
//!     }
//!     loop {
//!         for mut done in cq.poll()? {
//!             let (client, queue) = (done.tag() as usize, done.queue());
//!             if let Err(failure) = done.result() {
//!                 // One client has gone; the others have nothing to do with it.
//!                 eprintln!("client {client}: {failure}");
//!                 continue;
//!             }
//!             let Some(buffer) = done.take::<Local>() else { continue };
//!             if queue == QueueKind::Send {
//!                 srq.receive(buffer)?;
//!             } else {
//!                 clients[client].post(|batch| {
//!                     batch.send(buffer).signaled();
//!                 })?;
//!             }
//!         }
//!     }
//! }
//! ```
//!
//! # Units
//!
//! [`shared_receive_queue`](crate::ProtectionDomain::shared_receive_queue) takes receives; its completion queue has as many entries reserved once, however many
//! queue pairs share both. [`arm_limit`](crate::SharedReceiveQueue::arm_limit) takes receives, too: fewer than that left make an event, once.
//!
//! # What goes wrong
//!
//! - *Clients are slow, or fail with [`RnrRetryExceeded`](crate::CompletionStatus::RnrRetryExceeded).* The queue runs dry. Post more, or learn of it in time: arm the
//!   limit and wait for [`LimitReached`](crate::SharedReceiveQueueEvent::LimitReached).
//! - *One client takes all.* There is no share for each: a client that floods starves the others. Bound what each may have under way, by credits.
//! - *Buffers that don't come back.* A failed queue pair flushes what it had sent, and of receives at most the one that it held. The others were never its own.
//! - *Completions of a queue pair that was dropped.* Their receives may be lost to the queue until it goes: take the queue pair to the error state, wait for
//!   [`LastRequestReached`](crate::QueuePairEvent::LastRequestReached), poll, and then drop it. [`SharedReceiveQueue`](crate::SharedReceiveQueue) has the
//!   details.
//! - *[`post_receives`](crate::QueuePair::post_receives) does not compile.* Such a queue pair has no receives of its own.
//!
//! # Where the rules are
//!
//! Shared receive queues: IBTA vol 1, 10.2.9; their events: 11.6.3; ibv_create_srq(3), ibv_post_srq_recv(3), ibv_modify_srq(3).
