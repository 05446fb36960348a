//! Let peers READ from one's memory.
//!
//! The device answers READs: their server takes no part, posts nothing, and may sleep or compute. All it does is to register memory as
//! [`PeerRead`](crate::PeerRead), to make its queue pairs with [`allow_remote_read`](crate::QueuePairBuilder::allow_remote_read), and to give the key away.
//!
//! ```no_run
//! use std::time::Duration;
//! use doorbell_verbs::exchange::{Exchange, Listener};
//! use doorbell_verbs::{Buffer, Context, Local, ReadAccess, Remote, PeerRead};
//!
//! const RECORD: usize = 4096;
//!
//! fn serve(device: &Context, table: Vec<u8>) -> Result<(), Box<dyn std::error::Error>> {
//!     let pd = device.protection_domain()?;
//!     // Nothing is sent from here: one entry for each queue is enough, and each client takes two.
//!     let cq = device.completion_queue(128)?;
//!     let table = pd.register(table, PeerRead)?;
//!     let listener = Listener::bind("0.0.0.0:18517")?;
//!     let mut clients = Vec::new();
//!     while clients.len() < 64 {
//!         let mut exchange = listener.accept(Duration::from_secs(60))?;
//!         let qp = pd.queue_pair(&cq).max_send_wr(1).max_recv_wr(1).allow_remote_read().max_rd_atomic(16).rc()?;
//!         // As long as a client's queue pair lives, the client can read.
//!         clients.push(exchange.pair(qp, &table.remote().to_bytes())?.0);
//!     }
//!     std::thread::park();
//!     Ok(())
//! }
//!
//! /// Reads the records of these numbers, as many at once as the two devices allow.
//! fn read(device: &Context, server: &str, wanted: &[u64]) -> Result<Vec<Buffer>, Box<dyn std::error::Error>> {
//!     let pd = device.protection_domain()?;
//!     let mut cq = device.completion_queue(256)?;
//!     let prepared = pd.queue_pair(&cq).max_send_wr(64).max_recv_wr(1).rc()?;
//!     let mut exchange = Exchange::connect(server, Duration::from_secs(10))?;
//!     let (mut qp, said) = exchange.pair(prepared, b"")?;
//!     let table: Remote<ReadAccess> = Remote::from_bytes(said.as_slice().try_into()?)?;
//!
//!     let mut buffers = pd.register_chunks(vec![0; RECORD * wanted.len()], RECORD, Local)?;
//!     let mut wanted = wanted.iter();
//!     let mut records = Vec::new();
//!     while buffers.len() > 0 || qp.free_send_slots() < 64 {
//!         let room = qp.free_send_slots() as usize;
//!         qp.post(|batch| {
//!             for (number, buffer) in wanted.by_ref().zip(buffers.by_ref()).take(room) {
//!                 if let Some(record) = table.slice(number * RECORD as u64, RECORD as u64) {
//!                     batch.read(buffer, record).signaled();
//!                 }
//!             }
//!         })?;
//!         for mut done in cq.poll()? {
//!             done.result()?;
//!             records.extend(done.take());
//!         }
//!     }
//!     Ok(records)
//! }
//! ```
//!
//! # Units
//!
//! - [`max_rd_atomic`](crate::QueuePairBuilder::max_rd_atomic) is a number of requests: how many READs and atomics a queue pair serves at once, and how many it may
//!   have outstanding. Connecting takes the smaller of the two ends'; more may be posted, and wait in the queue. Default 16, or what the device has.
//! - Offsets and lengths of a [`Remote`](crate::Remote) are bytes; [`slice`](crate::Remote::slice) is `None` beyond its end, so that a wrong offset does not
//!   cost the connection.
//!
//! # What goes wrong
//!
//! - *One wrong READ, and the queue pair is dead.* That is how the standard wants it (9.9.3): a refused request takes both queue pairs to the error state. See
//!   [`recover`](super::recover).
//! - *Torn records.* A READ is not atomic towards the processor that owns the memory: only 8 aligned bytes are. Give each record a version before and after it,
//!   and read again where they differ; or never change what is out, and publish the key to another record instead.
//! - *A SEND posted after a READ overtakes it.* A READ's data arrives after later SENDs may have left: where one depends on the other, post it with
//!   [`fence`](crate::WorkRequest::fence) (10.8.3.3), or after the READ's completion.
//! - *READs are slower than WRITEs.* Each waits a round trip, and few are outstanding: raise `rd_atomic`, read longer ranges, or have the server write.
//! - *Who has the key can read.* A key is 32 bits, checked with the protection domain of the queue pair: one domain per group of clients that may see the same.
//!   To give and take rights one by one, bind a [`MemoryWindow`](crate::MemoryWindow).
//!
//! # Where the rules are
//!
//! RDMA READ: IBTA vol 1, 9.4.4; atomics: 9.4.5; outstanding READs: 9.4.4 and 11.2.5.2; rights and keys: 10.6; ibv_reg_mr(3), ibv_post_send(3).
