//! The UDP link: moves datagrams between this device and others, in batches.
//!
//! A [`Link`] has two halves, each for a thread of its own, and [`LinkFiles`] to sleep on:
//! [`Transmit`] sends a [`TxBatch`], [`Receive`] fills an [`RxBatch`]. Capture ([`pcap`]) and fault
//! injection ([`fault`]) wrap the halves. What the ICRC covers but a packet does not hold is an
//! [`Envelope`]; the device gives each batch the [`Seal`] that computes the ICRC.

pub mod fault;
mod files;
mod halves;
mod interface;
mod multicast;
pub mod pcap;
mod port;
mod rx;
mod socket;
mod sys;
mod tx;

pub use files::LinkFiles;
pub use halves::BindError;
pub(crate) use halves::{ROCE_PORT, require_unicast};
pub use interface::PortState;
pub use multicast::MulticastSockets;
pub use port::Port;
pub use rx::{Datagram, RxBatch};
pub(crate) use tx::MAX_PACKET;
pub use tx::{Envelope, MAX_RUN, MAX_SEGMENTS, RunRef, Seal, Slot, TxBatch, UdpDestination};

use crate::host::CloseOnFork;
use doorbell_roce_proto::Instant;
use std::io;
use std::net::{SocketAddr, UdpSocket};

/// The sending half of a link.
pub trait Transmit: Send {
    /// Sends the packets of `batch`, and those delayed until `now`. Never blocks: what the socket
    /// has no space for stays in the batch, to be retried when it is writable. A packet that the
    /// host refuses is dropped, as by the network.
    ///
    /// # Errors
    /// Only when the link itself failed.
    fn transmit(&mut self, batch: &mut TxBatch, now: Instant) -> io::Result<()>;

    /// When to call `transmit` for a delayed packet, though there is nothing new.
    fn due(&self) -> Option<Instant> {
        None
    }
}

/// The receiving half of a link.
pub trait Receive: Send {
    /// Replaces the content of `batch` by received datagrams, without blocking. Returns the number
    /// of messages, each of one or more datagrams; 0 when none is queued.
    ///
    /// # Errors
    /// Only when the link itself failed.
    fn receive(&mut self, batch: &mut RxBatch) -> io::Result<usize>;
}

/// An open link.
pub struct Link {
    /// The address and UDP port it is bound to.
    pub local: SocketAddr,
    /// The MTU of its interface in bytes, IP header included.
    pub mtu: u32,
    /// The socket's receive buffer in bytes, with overhead of up to twice the datagrams' size.
    pub receive_buffer: usize,
    /// The sending half.
    pub tx: Box<dyn Transmit>,
    /// A second half for packets that may be reordered; `None` where a wrapper needs one order.
    pub acks: Option<Box<dyn Transmit>>,
    /// The receiving half.
    pub rx: Box<dyn Receive>,
    /// Receives from multicast groups as well.
    pub multicast: MulticastSockets,
    /// What to sleep on.
    pub files: LinkFiles,
    /// Reports changes of the port's state.
    pub port: Port,
}

impl Link {
    /// A UDP link on `addr`, a unicast address of this machine; port 0 lets the kernel choose. An
    /// IPv4-mapped IPv6 address counts as IPv4. Needs no privilege.
    ///
    /// # Errors
    /// When the address is in use, not available, not permitted or not unicast; see [`BindError`].
    pub fn udp(addr: SocketAddr) -> Result<Self, BindError> {
        halves::bind(addr)
    }

    /// A UDP link on a bound unicast socket. Fails when the kernel refuses its options.
    pub(crate) fn from_socket(socket: CloseOnFork<UdpSocket>) -> io::Result<Self> {
        halves::open(socket)
    }

    pub(crate) fn with_capture(mut self, capture: pcap::Capture) -> Self {
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

    /// Adds fault injection to sent packets, and an outage, whose time counts from `start`. After a
    /// capture, which then shows the wire.
    pub(crate) fn with_faults(mut self, faults: fault::FaultConfig, start: u64) -> Self {
        if faults.is_active() {
            let outage = fault::OutageClock::new(faults.down, start);
            self.tx = Box::new(fault::FaultTx::new(self.tx, faults, outage));
            if faults.down.is_some() {
                self.rx = Box::new(fault::OutageRx { inner: self.rx, outage });
                self.port.outage = outage;
            }
            // Equal seeds give equal faults to equal sequences: there must be one sequence.
            self.acks = None;
        }
        self
    }

    /// Waits for a datagram.
    #[cfg(test)]
    fn wait_readable(&self) {
        use nix::poll::{PollFd, PollFlags, poll};
        use std::os::fd::AsFd;

        let mut files = [PollFd::new(self.files.as_fd(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut files, 5000_u16), Ok(1), "no datagram");
    }
}
