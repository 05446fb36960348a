//! The link layer: moves UDP datagrams between this device and others, many at a time.
//!
//! A [`Link`] is two halves and a parker, each for a thread of its own: [`Transmit`] sends a [`TxBatch`],
//! [`Receive`] fills an [`RxBatch`], and [`Parker`] sleeps until there is something to do. Capture ([`pcap`]) and
//! fault injection ([`fault`]) are halves around halves: [`Link::with_capture`] and [`Link::with_faults`]. Put the
//! capture on first: it then shows what is really on the wire.
//!
//! No half knows the protocol. What the ICRC covers but a packet does not hold (addresses, ports, IPv4
//! Identification) is an [`Envelope`]; the device gives each batch the [`Seal`] that turns it into the ICRC.

pub mod fault;
mod interface;
mod park;
pub mod pcap;
mod rx;
mod socket;
mod sys;
mod tx;
mod udp;

pub use interface::{PortState, PortWatch};
pub use park::{Interest, Parker, Waker, Woken};
pub use rx::{Datagram, RxBatch};
pub use tx::{ARENA, Envelope, MAX_PACKET, MAX_RUN, MAX_SEGMENTS, RunRef, Seal, Slot, TxBatch};
pub(crate) use udp::definite;
pub use udp::{BindError, ROCE_PORT};

use crate::host::Unforked;
use doorbell_roce_proto::Instant;
use std::io;
use std::net::{SocketAddr, UdpSocket};

/// The sending half of a link.
pub trait Transmit: Send {
    /// Sends what waits in `batch`, and whatever a wrapper holds that is due at `now`. Never blocks: what the socket
    /// has no room for stays in the batch, to be tried again after [`Interest::ReceiveOrSend`]. A packet that the host
    /// refuses (too long, filtered, no route) is dropped as the network would drop it.
    ///
    /// # Errors
    ///
    /// Only when the link itself is broken.
    fn transmit(&mut self, batch: &mut TxBatch, now: Instant) -> io::Result<()>;

    /// When a held packet is due, and `transmit` wants to be called though there is nothing new.
    fn due(&self) -> Option<Instant> {
        None
    }
}

/// The receiving half of a link.
pub trait Receive: Send {
    /// Replaces what is in `batch` by what has come in, without blocking. Says how many messages came, each of one
    /// or more datagrams; 0 when nothing waits.
    ///
    /// # Errors
    ///
    /// Only when the link itself is broken.
    fn receive(&mut self, batch: &mut RxBatch) -> io::Result<usize>;
}

/// A link that is ready to use.
pub struct Link {
    /// The address and UDP port it is bound to.
    pub local: SocketAddr,
    /// The MTU of its interface in bytes, IP header included.
    pub mtu: u32,
    /// The room for datagrams that wait to be received, in bytes as the kernel accounts them (with its overhead, up to
    /// twice the datagrams' own). More than this on the way to one link can be lost.
    pub receive_buffer: usize,
    /// The sending half.
    pub tx: Box<dyn Transmit>,
    /// Another sending half, for packets whose order towards those of `tx` does not matter; `None` where a wrapper needs to see all in one order.
    pub acks: Option<Box<dyn Transmit>>,
    /// The receiving half.
    pub rx: Box<dyn Receive>,
    /// Where its progress thread sleeps.
    pub parker: Parker,
    /// What tells of changes of its interface, where anything does; the parker wakes for it.
    pub watch: Option<PortWatch>,
}

impl Link {
    /// A link over UDP on `addr`: one definite address of this machine, by convention on [`ROCE_PORT`]; port 0 lets
    /// the kernel choose. An IPv4-mapped IPv6 address counts as IPv4. Needs no privilege.
    ///
    /// # Errors
    ///
    /// When the address is taken, not here, not allowed or not one; see [`BindError`].
    pub fn udp(addr: SocketAddr) -> Result<Self, BindError> {
        udp::bind(addr)
    }

    /// A link over UDP on a socket that is bound to a definite address.
    ///
    /// # Errors
    ///
    /// What the kernel has against its options.
    pub fn over(socket: Unforked<UdpSocket>) -> io::Result<Self> {
        udp::open(socket)
    }

    /// The same link with all that it sends and receives written to `capture`.
    pub fn with_capture(mut self, capture: pcap::Capture) -> Self {
        let captured = |inner| -> Box<dyn Transmit> {
            Box::new(pcap::CaptureTx {
                inner,
                capture: capture.clone(),
            })
        };
        self.acks = self.acks.map(captured);
        self.tx = captured(self.tx);
        self.rx = Box::new(pcap::CaptureRx {
            inner: self.rx,
            capture,
        });
        self
    }

    /// The same link with `faults` on what it sends. Put on after a capture, so that the capture shows the wire.
    pub fn with_faults(mut self, faults: fault::FaultConfig) -> Self {
        if faults.is_active() {
            self.tx = Box::new(fault::FaultTx::new(self.tx, faults));
            // Equal seeds give equal faults to equal sequences: there must be one sequence.
            self.acks = None;
        }
        self
    }
}
