//! Connect two programs.
//!
//! Two queue pairs are connected when each knows the other's [`Endpoint`](crate::Endpoint): its port's address, its number, and where its sequence numbers
//! begin. How the endpoints get across is no business of verbs. Three ways:
//!
//! - [`exchange`](crate::exchange) over TCP, which needs nothing but a TCP port; below.
//! - [`cm`](crate::cm), the connection manager (rdma_cm(7)): by IP address, on the RDMA network itself. It needs librdmacm and the kernel's `rdma_ucm`, and
//!   meets any program that uses it.
//! - Any other: an endpoint is 32 bytes, [`Endpoint::to_bytes`](crate::Endpoint::to_bytes). Both sides call [`connect`](crate::PreparedQueuePair::connect).
//!
//! ```no_run
//! use std::time::Duration;
//! use doorbell_verbs::exchange::{Exchange, Listener};
//! use doorbell_verbs::{CompletionQueue, Library, Local, PreparedQueuePair, QueueKind, Remote, PeerWrite, WriteAccess};
//!
//! const PATIENCE: Duration = Duration::from_secs(10);
//!
//! /// Gives whoever comes a key to 4096 bytes of its memory, and waits until it is told that something is there.
//! fn server() -> Result<(), Box<dyn std::error::Error>> {
//!     let device = Library::system()?.open("mlx5_0")?;
//!     let pd = device.protection_domain()?;
//!     let mut cq = device.completion_queue(64)?;
//!     // The peer may write: through this queue pair, and to memory registered for it. Both must say so.
//!     let mut qp = pd.queue_pair(&cq).max_send_wr(16).max_recv_wr(16).allow_remote_write().rc()?;
//!     let inbox = pd.register(vec![0; 4096], PeerWrite)?;
//!     // Before the peer can send: a message that finds no receive has to be sent again.
//!     qp.receive(pd.register(vec![0; 64], Local)?)?;
//!
//!     let mut exchange = Listener::bind("0.0.0.0:18516")?.accept(PATIENCE)?;
//!     let (_qp, _said) = exchange.pair(qp, &inbox.remote().to_bytes())?;
//!     wait(&mut cq, QueueKind::Receive)?;
//!     // The peer's last request is acknowledged by a queue pair that is still there.
//!     exchange.finish()?;
//!     Ok(())
//! }
//!
//! fn client(device: &str, server: &str) -> Result<(), Box<dyn std::error::Error>> {
//!     let device = Library::system()?.open(device)?;
//!     let pd = device.protection_domain()?;
//!     let mut cq = device.completion_queue(64)?;
//!     let qp: PreparedQueuePair = pd.queue_pair(&cq).max_send_wr(16).max_recv_wr(16).max_inline_data(16).rc()?;
//!
//!     let mut exchange = Exchange::connect(server, PATIENCE)?;
//!     let (mut qp, said) = exchange.pair(qp, b"")?;
//!     let inbox: Remote<WriteAccess> = Remote::from_bytes(said.as_slice().try_into()?)?;
//!     qp.post(|batch| {
//!         batch.write_inline(b"hello", inbox);
//!         batch.send_inline(b"look").signaled();
//!     })?;
//!     wait(&mut cq, QueueKind::Send)?;
//!     exchange.finish()?;
//!     Ok(())
//! }
//!
//! /// Waits until a request of this queue is done.
//! fn wait(cq: &mut CompletionQueue, queue: QueueKind) -> Result<(), Box<dyn std::error::Error>> {
//!     loop {
//!         for done in cq.poll()? {
//!             done.result()?;
//!             if done.queue() == queue {
//!                 return Ok(());
//!             }
//!         }
//!     }
//! }
//! ```
//!
//! # Units
//!
//! - [`timeout`](crate::QueuePairBuilder::timeout) is an exponent: 4.096 µs · 2^*t*, 67 ms for the default 14. With
//!   [`retry_count`](crate::QueuePairBuilder::retry_count) *n* a silent peer is given up after at least (*n* + 1) of these; devices may take up to four times
//!   as long (9.7.6.1.3).
//! - [`min_rnr_timer`](crate::QueuePairBuilder::min_rnr_timer) is a code of table 46 (12: 0.64 ms); an [`rnr_retry`](crate::QueuePairBuilder::rnr_retry) of 7
//!   is for ever.
//! - Depths are requests, not bytes; a completion queue needs as many entries as all queues on it are deep together.
//!
//! # What goes wrong
//!
//! - *The first request fails with [`RetryExceeded`](crate::CompletionStatus::RetryExceeded).* It was sent before the peer had connected its own side, or to an address
//!   that does not reach it: GIDs of two kinds (one IPv4, one IPv6), a firewall on UDP port 4791, two fabrics.
//!   [`Exchange::pair`](crate::exchange::Exchange::pair) returns when both are connected; an exchange of one's own must wait for that, too.
//! - *`EINVAL` from ibv_modify_qp.* The error compares what was given with the table of attributes, and says what is missing or out of range.
//! - *The last request fails although the peer has the data.* The peer dropped its queue pair before it had acknowledged: end together, as
//!   [`finish`](crate::exchange::Exchange::finish) does.
//! - *[`PortDown`](crate::QueuePairError::PortDown).* Connecting would succeed, and nothing arrive; so it is refused at once.
//!
//! # Where the rules are
//!
//! States and attributes of queue pairs: IBTA vol 1, 10.3.1 and 11.2.5.2, ibv_modify_qp(3). Connection management: chapter 12, rdma_cm(7).
