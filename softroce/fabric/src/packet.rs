//! Packets as switches see them.

/// Bytes on the link besides the UDP payload: Ethernet, IPv4 and UDP headers and FCS.
pub const FRAMING: u64 = 14 + 20 + 8 + 4;

/// The ECN field of the IP header (RFC 3168).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ecn {
    /// The transport does not react to marks: never marked.
    NotCapable,
    /// May be marked.
    Capable,
    /// Congestion experienced: marked.
    Marked,
}

/// The priority of a packet, each with a queue of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    /// Requests, responses and ACKs; PFC pauses it.
    Data,
    /// CNPs: sent before data, never paused.
    Control,
}

impl Class {
    /// Number of classes.
    pub const COUNT: usize = 2;
}

/// A packet under way.
#[derive(Clone, Debug)]
pub struct Packet {
    /// The sending host.
    pub src: usize,
    /// The receiving host.
    pub dst: usize,
    /// The UDP source port, by which ECMP distinguishes flows.
    pub src_port: u16,
    /// Priority.
    pub class: Class,
    /// ECN field.
    pub ecn: Ecn,
    /// IPv4 Identification.
    pub(crate) ident: u16,
    /// The UDP payload: BTH to ICRC.
    pub payload: Vec<u8>,
    /// The port at which the switch that holds it received it.
    pub(crate) ingress: usize,
}

impl Packet {
    /// Bytes on the link.
    pub fn bytes(&self) -> u64 {
        self.payload.len() as u64 + FRAMING
    }

    /// The destination QPN in the BTH.
    pub(crate) fn dest_qpn(&self) -> u32 {
        let at = |index: usize| u32::from(self.payload.get(index).copied().unwrap_or(0));
        at(5) << 16 | at(6) << 8 | at(7)
    }
}
