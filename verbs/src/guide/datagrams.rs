//! Send datagrams.
//!
//! A UD queue pair talks to any number of others without connecting: one queue pair, where RC needs one per peer. What it gives up: a message is one packet, at
//! most the path MTU; it may be lost, and nobody is told; there are SEND and receive alone, neither READ nor WRITE.
//!
//! ```no_run
//! use std::time::Duration;
//! use doorbell_verbs::{Context, GRH_BYTES, Local, QueueKind, UdEndpoint};
//!
//! const MESSAGE: usize = 64;
//!
//! /// Answers every datagram with its own bytes, to wherever it came from.
//! fn echo(device: &Context) -> Result<(), Box<dyn std::error::Error>> {
//!     let pd = device.protection_domain()?;
//!     let mut cq = device.completion_queue_on(&device.completion_channel()?, 256)?;
//!     let mut qp = pd.queue_pair(&cq).ud()?;
//!     println!("reached at {:02x?}", qp.endpoint().to_bytes());
//!     // Room for the 40 bytes of header in front of every datagram.
//!     let chunk = GRH_BYTES + MESSAGE;
//!     for buffer in pd.register_chunks(vec![0; 64 * chunk], chunk, Local)? {
//!         qp.receive(buffer)?;
//!     }
//!     loop {
//!         for mut done in cq.wait(None)? {
//!             done.result()?;
//!             let datagram = done.datagram();
//!             let Some(buffer) = done.take::<Local>() else { continue };
//!             let Some(datagram) = datagram else {
//!                 // An answer has left: its buffer is for receiving again.
//!                 qp.receive(buffer)?;
//!                 continue;
//!             };
//!             // The way back, from the completion and the header in the buffer. It may be dropped as soon as the post has returned.
//!             let ah = pd.address_handle().reply_to(&datagram, &buffer)?;
//!             let qkey = qp.endpoint().qkey;
//!             qp.post(|batch| {
//!                 batch.send_to(buffer.part(datagram.payload()), &ah, datagram.source(), qkey).signaled();
//!             })?;
//!         }
//!     }
//! }
//!
//! /// Asks until there is an answer.
//! fn ask(device: &Context, server: &UdEndpoint, question: &[u8]) -> Result<Vec<u8>, Box<dyn std::error::Error>> {
//!     let pd = device.protection_domain()?;
//!     let mut cq = device.completion_queue_on(&device.completion_channel()?, 64)?;
//!     let mut qp = pd.queue_pair(&cq).max_send_wr(16).max_recv_wr(16).max_inline_data(MESSAGE as u32).ud()?;
//!     qp.receive(pd.register(vec![0; GRH_BYTES + MESSAGE], Local)?)?;
//!     let ah = pd.address_handle().to(server)?;
//!     for _attempt in 0..5 {
//!         qp.send_to_inline(question, &ah, server.qpn, server.qkey)?;
//!         for mut done in cq.wait(Duration::from_millis(200))? {
//!             done.result()?;
//!             if let (QueueKind::Receive, Some(datagram), Some(answer)) = (done.queue(), done.datagram(), done.take::<Local>()) {
//!                 return Ok(answer[datagram.payload()].to_vec());
//!             }
//!         }
//!     }
//!     Err("no answer".into())
//! }
//! ```
//!
//! # Units
//!
//! - [`GRH_BYTES`](crate::GRH_BYTES), 40, lie in front of every datagram received, whether there was a header or not; [`payload`](crate::Datagram::payload) is
//!   the range behind them.
//! - [`max_datagram`](crate::QueuePair::max_datagram) is the port's MTU in bytes: 1024 on Ethernet of 1500.
//! - Numbers of queue pairs are 24 bits, [`QKey`](crate::QKey)s 32, of which the highest is for privileged processes.
//!
//! # What goes wrong
//!
//! - *Nothing arrives.* A wrong Q_Key, no receive posted, a receive too short, a GID of another kind: each drops the datagram in silence. The sender's
//!   completion says only that it has left.
//! - *[`NoRoomForHeader`](crate::RejectReason::NoRoomForHeader).* The receive is shorter than the header, so that nothing could ever arrive in it.
//! - *[`DatagramTooLong`](crate::RejectReason::DatagramTooLong).* One packet is the limit; cut longer messages, or connect.
//! - *A failed send stops the queue.* UD goes to the SQE state, not ERR: receives go on, and [`resume`](crate::QueuePair::resume) lets it send again.
//! - *Making an address handle for each answer costs a call into the kernel on most devices.* Keep those of known peers, by their GID.
//!
//! # Where the rules are
//!
//! Unreliable datagrams: IBTA vol 1, 9.8.3; Q_Keys: 10.2.5; the header: 8.3; ibv_create_ah(3), ibv_create_ah_from_wc(3). Multicast (ibv_attach_mcast(3)) is not
//! offered.
