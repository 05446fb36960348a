//! Stream WRITEs into a peer's memory.
//!
//! An RDMA WRITE needs no receive and wakes nobody: it is the cheapest way to move bulk data. What it lacks is a word to the other side, that data has come,
//! and a word back, that there is room for more. *Immediate data* is the first: the last WRITE of a message carries 32 bits, which complete a receive over
//! there. *Credits* are the second: the reader says how many slots of its window it has emptied.
//!
//! ```no_run
//! use std::time::Duration;
//! use doorbell_verbs::{Buffer, CompletionQueue, Local, BufferPool, ProtectionDomain, QueuePair, Remote, Success, WriteAccess};
//!
//! const CHUNK: usize = 64 << 10;
//! const SLOTS: u32 = 16;
//!
//! /// Writes all of `input` into the peer's window of `SLOTS` slots, a chunk each.
//! fn stream(
//!     pd: &ProtectionDomain,
//!     qp: &mut QueuePair,
//!     cq: &mut CompletionQueue,
//!     window: Remote<WriteAccess>,
//!     mut input: impl std::io::Read,
//! ) -> Result<(), Box<dyn std::error::Error>> {
//!     let slots: Vec<_> = window.chunks(CHUNK as u64).collect();
//!     // One registration for all buffers: registering costs microseconds and more, and pins memory.
//!     let mut free = BufferPool::from_iter(pd.register_chunks(vec![0; CHUNK * SLOTS as usize], CHUNK, Local)?);
//!     // Credits come as immediate data of messages without bytes; each takes a receive, which needs a buffer.
//!     for byte in pd.register_chunks(vec![0; SLOTS as usize], 1, Local)? {
//!         qp.receive(byte)?;
//!     }
//!     let (mut number, mut credits) = (0, SLOTS);
//!     let mut ended = false;
//!     while !ended || credits < SLOTS {
//!         // As many chunks as there are credits and buffers for, in one batch: one doorbell.
//!         let mut chunks = Vec::new();
//!         while !ended && (chunks.len() as u32) < credits {
//!             let Some(mut chunk) = free.pop() else { break };
//!             let len = input.read(&mut chunk)?;
//!             if len == 0 {
//!                 ended = true;
//!                 free.push(chunk);
//!             } else {
//!                 chunks.push((chunk, len));
//!             }
//!         }
//!         let count = chunks.len() as u32;
//!         qp.post(|batch| {
//!             for (at, (chunk, len)) in (1..).zip(chunks) {
//!                 let write = batch.write(chunk.part(..len), slots[(number % SLOTS) as usize]).imm(number);
//!                 // The last one's completion confirms those before it: one completion for the batch.
//!                 if at == count {
//!                     write.signaled();
//!                 }
//!                 number += 1;
//!             }
//!         })?;
//!         credits -= count;
//!         for mut done in cq.wait(Duration::from_secs(10))? {
//!             match done.result()? {
//!                 Success::Receive { imm: Some(emptied), .. } => {
//!                     credits += emptied;
//!                     let byte: Buffer = done.take().ok_or("a receive has a buffer")?;
//!                     qp.receive(byte)?;
//!                 }
//!                 // A WRITE, its own completion or one confirmed by a later one: its buffer is free again.
//!                 _ => free.extend(done.take()),
//!             }
//!         }
//!     }
//!     Ok(())
//! }
//! ```
//!
//! The reader: `examples/06_stream_writes`.
//!
//! # Units
//!
//! - A message is at most 2^31 bytes (9.7.7), or [`max_message_bytes`](crate::PortAttr::max_message_bytes) of the port. From some tens of KiB on, a WRITE keeps
//!   a fast link busy by itself; below, batches do.
//! - How many bytes must be under way to fill a link: its rate times the round trip. 100 Gbit/s and 10 µs make 125 KB.
//! - Between two processes of one host a device in software copies once, straight to where it belongs, what lies in [`Memory::shared`](crate::Memory::shared); other memory goes a longer way.
//! - Immediate data is 32 bits, and arrives as a number: the same on machines of either byte order.
//!
//! # What goes wrong
//!
//! - *The reader sees old bytes.* It looked before the completion told it: data of a WRITE may become visible in any order (9.5), and only a completion at the
//!   reader says that it is all there. The writer's own completion says that the peer's device has the data.
//! - *[`RnrRetryExceeded`](crate::CompletionStatus::RnrRetryExceeded), or a stall of milliseconds.* WRITEs with immediate data consume receives. Post as many as the
//!   writer may have under way, and post each again before its credit is given.
//! - *[`RemoteAccess`](crate::CompletionStatus::RemoteAccess).* The memory was registered without [`PeerWrite`](crate::PeerWrite), the peer's queue pair was made
//!   without [`allow_remote_write`](crate::QueuePairBuilder::allow_remote_write), the range goes beyond the region, or the region is gone.
//! - *[`QueueFull`](crate::RejectReason::QueueFull).* Nobody polls: slots are freed by completions alone. The refused batch comes back with its buffers.
//! - *Everything signaled is slow.* A completion costs about as much as a small WRITE. Unsignaled requests are confirmed, and their buffers come back, with
//!   the next completion of the same queue; the library signals one every half queue if nobody does.
//!
//! # Where the rules are
//!
//! RDMA WRITE: IBTA vol 1, 9.4.3; ordering: 9.5; unsignaled requests: 10.8.6; ibv_post_send(3), ibv_wr_post(3).
