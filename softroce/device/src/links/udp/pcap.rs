//! Packet capture: wrappers of both halves of a link that write the packets to a pcap file.
//!
//! Classic pcap with nanosecond time stamps and raw IP packets. IP and UDP headers are synthesized,
//! as a UDP socket shows neither: addresses, ports, don't-fragment and Identification. A received
//! packet's Identification is its index in the coalesced message: right for a sender that uses GSO.
//! A sent packet has its traffic class and hop limit, a received one 0 and 64 in their place.
//! The IPv4 UDP checksum is 0, for "none". A capture that cannot be written logs that once and
//! stops.
//!
//! The packets of a batch are one write(2), before they are sent or processed: what a process wrote
//! stays when it ends, however it does. Only the last batch is cut short if it ends in the write.

use super::{Envelope, Receive, RxBatch, Transmit, TxBatch, UdpDestination};
use crate::config::with_name;
use doorbell_roce_proto::Instant;
use doorbell_trust::create_file;
use std::fs::File;
use std::io::{self, Write};
use std::iter;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

#[cfg(test)]
mod tests;

/// "pcap with nanoseconds", in the byte order of the file.
const MAGIC: u32 = 0xa1b2_3c4d;
/// `LINKTYPE_RAW`: the packet begins with its IPv4 or IPv6 header.
const LINKTYPE_RAW: u32 = 101;
/// The longest packet stored; link packets are far shorter.
const SNAPLEN: u32 = 65535;
const MAX_HEADER: usize = 40 + 8;
/// The most captures of a process with one name.
const MAX_FILES: u32 = 10_000;

/// A capture file. Clones write to the same file.
#[derive(Clone)]
pub struct Capture {
    writer: Arc<Mutex<Writer>>,
}

impl Capture {
    /// Creates the file `path`, for this user alone. Where there is one already, as several
    /// processes may have the same environment, the name gets this process's id, and from its
    /// third capture a number.
    ///
    /// # Errors
    /// When the file cannot be created or written.
    pub fn create(path: &Path) -> io::Result<Self> {
        let (mut file, path) = create_new(path)?;
        file.write_all(&file_header())?;
        let writer = Writer {
            file: Some(file),
            path,
            records: Vec::new(),
        };
        Ok(Self {
            writer: Arc::new(Mutex::new(writer)),
        })
    }

    fn record<'a>(&self, packets: impl Iterator<Item = (Envelope, &'a [u8])>) {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let now = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        for (envelope, packet) in packets {
            writer.record(now, &envelope, packet);
        }
        writer.write();
    }
}

fn create_new(wanted: &Path) -> io::Result<(File, PathBuf)> {
    let pid = std::process::id();
    let own = iter::once(pid.to_string()).chain((2..MAX_FILES).map(|number| format!("{pid}-{number}")));
    let names = iter::once(wanted.to_owned()).chain(own.map(|name| with_name(wanted, &name)));
    for path in names {
        match create_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            created => return created.map(|file| (file, path)),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

fn file_header() -> [u8; 24] {
    let mut header = [0; 24];
    let version = u32::from(2u16) | u32::from(4u16) << 16;
    let fields = [MAGIC, version, 0, 0, SNAPLEN, LINKTYPE_RAW];
    for (to, field) in header.chunks_exact_mut(4).zip(fields) {
        to.copy_from_slice(&field.to_le_bytes());
    }
    header
}

struct Writer {
    /// None after a failed write.
    file: Option<File>,
    path: PathBuf,
    /// Those of a batch.
    records: Vec<u8>,
}

impl Writer {
    fn record(&mut self, now: Duration, envelope: &Envelope, packet: &[u8]) {
        let mut header = [0; 16 + MAX_HEADER];
        let Some(ip_header) = write_headers(&mut header[16..], envelope, packet) else {
            return;
        };
        // Both lengths fit: write_headers refuses others. Seconds wrap in 2106, as pcap's do.
        let len = (ip_header + packet.len()) as u32;
        let fields = [now.as_secs() as u32, now.subsec_nanos(), len, len];
        for (to, field) in header.chunks_exact_mut(4).zip(fields) {
            to.copy_from_slice(&field.to_le_bytes());
        }
        self.records.extend_from_slice(&header[..16 + ip_header]);
        self.records.extend_from_slice(packet);
    }

    /// Writes the records; stops the capture when that fails.
    fn write(&mut self) {
        let written = self.file.as_mut().map(|file| file.write_all(&self.records));
        self.records.clear();
        if let Some(Err(error)) = written {
            tracing::warn!(path = %self.path.display(), %error, "the packet capture stops: the file cannot be written");
            self.file = None;
        }
    }
}

/// Writes the IP and UDP headers of `packet` to the front of `to`; returns their length. `None` for
/// a packet that fits no datagram or an envelope of two address families.
fn write_headers(to: &mut [u8], envelope: &Envelope, packet: &[u8]) -> Option<usize> {
    let udp_len = u16::try_from(packet.len() + 8).ok()?;
    let mut udp = [0; 8];
    udp[..2].copy_from_slice(&envelope.src.port().to_be_bytes());
    udp[2..4].copy_from_slice(&envelope.dst.addr.port().to_be_bytes());
    udp[4..6].copy_from_slice(&udp_len.to_be_bytes());
    let ip_len = match (envelope.src.ip(), envelope.dst.addr.ip()) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            let header = ipv4_header(udp_len.checked_add(20)?, envelope, src, dst);
            to.get_mut(..header.len())?.copy_from_slice(&header);
            header.len()
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            let header = ipv6_header(udp_len, &envelope.dst, src, dst);
            to.get_mut(..header.len())?.copy_from_slice(&header);
            // Over IPv6 a checksum of 0 is an error. The pseudo-header is the two addresses (RFC
            // 8200, section 8.1), the length and the protocol, which is 17 for UDP.
            let sums = [
                ones_sum(&header[8..]),
                u32::from(udp_len),
                17,
                ones_sum(&udp),
                ones_sum(packet),
            ];
            let checksum = match !fold(sums.iter().map(|&sum| u64::from(sum)).sum()) {
                0 => 0xffff,
                sum => sum,
            };
            udp[6..].copy_from_slice(&checksum.to_be_bytes());
            header.len()
        }
        _ => return None,
    };
    to.get_mut(ip_len..ip_len + 8)?.copy_from_slice(&udp);
    Some(ip_len + 8)
}

fn ipv4_header(total_len: u16, envelope: &Envelope, src: Ipv4Addr, dst: Ipv4Addr) -> [u8; 20] {
    const DONT_FRAGMENT: u16 = 0x4000;
    let mut header = [0; 20];
    (header[0], header[1]) = (0x45, envelope.dst.traffic_class);
    header[2..4].copy_from_slice(&total_len.to_be_bytes());
    header[4..6].copy_from_slice(&envelope.ident.to_be_bytes());
    header[6..8].copy_from_slice(&DONT_FRAGMENT.to_be_bytes());
    (header[8], header[9]) = (envelope.dst.hop_limit, 17);
    header[12..16].copy_from_slice(&src.octets());
    header[16..].copy_from_slice(&dst.octets());
    let checksum = !fold(ones_sum(&header).into());
    header[10..12].copy_from_slice(&checksum.to_be_bytes());
    header
}

fn ipv6_header(payload_len: u16, to: &UdpDestination, src: Ipv6Addr, dst: Ipv6Addr) -> [u8; 40] {
    let mut header = [0; 40];
    let class = to.traffic_class;
    (header[0], header[1]) = (0x60 | class >> 4, class << 4);
    header[4..6].copy_from_slice(&payload_len.to_be_bytes());
    (header[6], header[7]) = (17, to.hop_limit);
    header[8..24].copy_from_slice(&src.octets());
    header[24..].copy_from_slice(&dst.octets());
    header
}

/// The sum of big-endian 16-bit words (RFC 1071) of at most 64 KiB, an odd last byte padded.
fn ones_sum(bytes: &[u8]) -> u32 {
    let (words, rest) = bytes.as_chunks::<2>();
    let last = rest.first().map_or(0, |&byte| u32::from(byte) << 8);
    words
        .iter()
        .map(|&word| u32::from(u16::from_be_bytes(word)))
        .sum::<u32>()
        + last
}

fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// The sending half with a capture; see [`super::Link::with_capture`].
pub(super) struct CaptureTx {
    pub(super) inner: Box<dyn Transmit>,
    pub(super) capture: Capture,
}

impl Transmit for CaptureTx {
    fn transmit(&mut self, batch: &mut TxBatch, now: Instant) -> io::Result<()> {
        // Packets that a full socket left in the batch are in the file already.
        let captured = batch.captured;
        self.capture.record(batch.packets().skip(captured));
        batch.captured = batch.len();
        self.inner.transmit(batch, now)
    }

    fn due(&self) -> Option<Instant> {
        self.inner.due()
    }
}

pub(super) struct CaptureRx {
    pub(super) inner: Box<dyn Receive>,
    pub(super) capture: Capture,
}

impl Receive for CaptureRx {
    fn receive(&mut self, batch: &mut RxBatch) -> io::Result<usize> {
        let count = self.inner.receive(batch)?;
        self.capture.record(batch.datagrams().map(|datagram| {
            let envelope = Envelope {
                src: datagram.src,
                dst: UdpDestination {
                    traffic_class: datagram.traffic_class,
                    ..datagram.dst.into()
                },
                ident: datagram.segment,
            };
            (envelope, &*datagram.bytes)
        }));
        Ok(count)
    }
}
