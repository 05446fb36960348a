use super::*;
use crate::links::udp::{Link, UdpDestination};
use std::net::SocketAddr;

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(bytes[at..at + 2].try_into().unwrap())
}

/// From the format's specification, not from the code under test.
fn parse(file: &[u8]) -> Vec<(Duration, Vec<u8>)> {
    assert_eq!(u32_at(file, 0), 0xa1b2_3c4d);
    assert_eq!(file[4..8], [2, 0, 4, 0]);
    assert_eq!(u32_at(file, 20), 101);
    let mut records = Vec::new();
    let mut rest = &file[24..];
    while !rest.is_empty() {
        let len = u32_at(rest, 8) as usize;
        assert_eq!(u32_at(rest, 12) as usize, len);
        let at = Duration::new(u32_at(rest, 0).into(), u32_at(rest, 4));
        records.push((at, rest[16..16 + len].to_vec()));
        rest = &rest[16 + len..];
    }
    records
}

/// 0xffff if the checksum that is in place is right (RFC 1071).
fn check(parts: &[&[u8]]) -> u16 {
    let mut bytes: Vec<u8> = parts.concat();
    bytes.resize(bytes.len().next_multiple_of(2), 0);
    let sum: u64 = bytes.chunks(2).map(|word| u64::from(u16_at(word, 0))).sum();
    (((sum % 0xffff) + 0xfffe) % 0xffff + 1) as u16
}

fn seal(packet: &mut [u8], _: &Envelope) {
    packet.last_chunk_mut::<4>().unwrap().fill(0xee);
}

fn captured(ip: &str, sizes: &[usize]) -> (Vec<u8>, u16) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("link.pcap");
    let link = Link::udp(SocketAddr::new(ip.parse().unwrap(), 0)).unwrap();
    let mut link = link.with_capture(Capture::create(&path).unwrap());
    let mut batch = TxBatch::new(link.local, seal);
    for &len in sizes {
        let mut slot = batch.slot().unwrap();
        slot[..len].fill(len as u8);
        let to = UdpDestination {
            addr: link.local,
            traffic_class: CLASS,
            hop_limit: 7,
        };
        slot.send(len, to);
    }
    link.tx.transmit(&mut batch, Instant::ZERO).unwrap();
    let mut incoming = RxBatch::new(link.local);
    let mut came = 0;
    while came < sizes.len() {
        link.wait_readable();
        assert!(link.rx.receive(&mut incoming).unwrap() > 0);
        came += incoming.datagrams().count();
    }
    let port = link.local.port();
    drop(link);
    (std::fs::read(&path).unwrap(), port)
}

const SIZES: [usize; 4] = [60, 60, 33, 4112];
const CLASS: u8 = 0xb9;

/// The traffic class and hop limit of a record; of received packets the hop limit is the default.
fn fields(number: usize) -> (u8, u8) {
    if number < SIZES.len() { (CLASS, 7) } else { (CLASS, 64) }
}

#[test]
fn both_directions_are_in_the_file_as_ipv4() {
    let before = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let (file, port) = captured("127.0.0.1", &SIZES);
    let records = parse(&file);
    assert_eq!(records.len(), 2 * SIZES.len());
    let idents = [0, 1, 2, 0, 0, 1, 2, 0];
    for (number, (at, packet)) in records.iter().enumerate() {
        let len = SIZES[number % SIZES.len()];
        assert!(*at >= before && *at < before + Duration::from_secs(60));
        assert_eq!((packet[0], packet[9]), (0x45, 17));
        assert_eq!((packet[1], packet[8]), fields(number));
        assert_eq!(usize::from(u16_at(packet, 2)), packet.len());
        assert_eq!((u16_at(packet, 4), u16_at(packet, 6)), (idents[number], 0x4000));
        assert_eq!(check(&[&packet[..20]]), 0xffff);
        assert_eq!(packet[12..20], [127, 0, 0, 1, 127, 0, 0, 1]);
        assert_eq!((u16_at(packet, 20), u16_at(packet, 22)), (port, port));
        assert_eq!((usize::from(u16_at(packet, 24)), u16_at(packet, 26)), (len + 8, 0));
        assert_eq!(packet.len(), 28 + len);
        assert!(packet[28..24 + len].iter().all(|&byte| byte == len as u8));
        assert_eq!(packet[24 + len..], [0xee; 4]);
    }
}

#[test]
fn ipv6_packets_have_a_right_checksum() {
    let (file, port) = captured("::1", &SIZES);
    let records = parse(&file);
    assert_eq!(records.len(), 2 * SIZES.len());
    for (number, (_, packet)) in records.iter().enumerate() {
        let len = SIZES[number % SIZES.len()];
        assert_eq!((packet[0] >> 4, packet[6]), (6, 17));
        assert_eq!(((u16_at(packet, 0) >> 4) as u8, packet[7]), fields(number));
        assert_eq!((usize::from(u16_at(packet, 4)), packet.len()), (len + 8, len + 48));
        assert_eq!((u16_at(packet, 40), u16_at(packet, 42)), (port, port));
        let pseudo = [&packet[8..40], &packet[4..6], &[0, 17]].concat();
        assert_eq!(check(&[&pseudo, &packet[40..]]), 0xffff);
    }
}

#[test]
fn what_a_full_socket_leaves_is_captured_once() {
    struct OneRun;
    impl Transmit for OneRun {
        fn transmit(&mut self, batch: &mut TxBatch, _now: Instant) -> io::Result<()> {
            batch.consume(1);
            Ok(())
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("link.pcap");
    let capture = Capture::create(&path).unwrap();
    let mut tx = CaptureTx {
        inner: Box::new(OneRun),
        capture,
    };
    let local = SocketAddr::from(([127, 0, 0, 1], 4791));
    let mut batch = TxBatch::new(local, seal);
    let lens = [100, 100, 50, 60, 70, 80];
    for &len in &lens[..4] {
        batch.slot().unwrap().send(len, local);
    }
    tx.transmit(&mut batch, Instant::ZERO).unwrap();
    for &len in &lens[4..] {
        batch.slot().unwrap().send(len, local);
    }
    while !batch.is_empty() {
        tx.transmit(&mut batch, Instant::ZERO).unwrap();
    }
    drop(tx);
    let records = parse(&std::fs::read(&path).unwrap());
    assert!(records.iter().map(|(_, packet)| packet.len() - 28).eq(lens));
}

#[test]
fn a_full_disk_ends_the_capture_and_not_the_traffic() {
    let capture = Capture {
        writer: Arc::new(Mutex::new(Writer {
            file: Some(File::options().write(true).open("/dev/full").unwrap()),
            path: "/dev/full".into(),
            records: Vec::new(),
        })),
    };
    let mut link = Link::udp("127.0.0.1:0".parse().unwrap())
        .unwrap()
        .with_capture(capture.clone());
    let mut batch = TxBatch::new(link.local, seal);
    for _ in 0..2 {
        batch.slot().unwrap().send(1000, link.local);
        link.tx.transmit(&mut batch, Instant::ZERO).unwrap();
        assert!(batch.is_empty());
        assert!(capture.writer.lock().unwrap().file.is_none());
    }
    let mut incoming = RxBatch::new(link.local);
    assert!(link.rx.receive(&mut incoming).unwrap() > 0);
    assert!(Capture::create(Path::new("/no such folder/file")).is_err());
}

/// As of a program that opens its devices again, or of a job of several.
#[test]
fn each_capture_of_a_name_is_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.pcap");
    let captures: Vec<_> = (0..4).map(|_| Capture::create(&path).unwrap()).collect();
    let paths = captures
        .iter()
        .map(|capture| capture.writer.lock().unwrap().path.clone());
    let files: std::collections::BTreeSet<_> = paths.filter(|path| path.is_file()).collect();
    assert!(files.len() == 4 && files.contains(&path), "{files:?}");
}
