use super::*;
use proptest::prelude::*;

const LOCAL: &str = "127.0.0.1:4791";

/// Writes the Identification and the destination's port in place of the ICRC.
fn seal(packet: &mut [u8], envelope: &Envelope) {
    let at = packet.len() - 4;
    packet[at..at + 2].copy_from_slice(&envelope.ident.to_be_bytes());
    packet[at + 2..].copy_from_slice(&envelope.dst.addr.port().to_be_bytes());
}

fn batch() -> TxBatch {
    TxBatch::new(LOCAL.parse().unwrap(), seal)
}

fn peer(number: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 10_000 + number))
}

fn push(batch: &mut TxBatch, len: usize, fill: u8, dst: impl Into<UdpDestination>) -> bool {
    let Some(mut slot) = batch.slot() else {
        return false;
    };
    slot[..len].fill(fill);
    slot.send(len, dst);
    true
}

fn shapes(batch: &TxBatch) -> Vec<(usize, usize)> {
    batch.runs().map(|run| (run.packets, run.segment)).collect()
}

#[test]
fn a_message_becomes_a_first_packet_and_runs_of_middles() {
    let mut batch = batch();
    assert!(push(&mut batch, 4128, 0, peer(0)));
    for _ in 0..20 {
        assert!(push(&mut batch, 4112, 1, peer(0)));
    }
    assert!(push(&mut batch, 1000, 2, peer(0)));
    // FIRST is longer than what follows, which ends its run; 15 × 4112 is what fits into one IPv4
    // datagram.
    assert_eq!(shapes(&batch), [(2, 4128), (15, 4112), (5, 4112)]);
}

#[test]
fn a_run_ends_at_another_destination_a_longer_packet_and_the_segment_limit() {
    let mut batch = batch();
    for (len, dst) in [(100, 0), (100, 1), (101, 1), (50, 1), (50, 1)] {
        assert!(push(&mut batch, len, 0, peer(dst)));
    }
    assert_eq!(shapes(&batch), [(1, 100), (1, 100), (2, 101), (1, 50)]);
    batch.clear();
    for _ in 0..MAX_SEGMENTS + 1 {
        assert!(push(&mut batch, 44, 0, peer(0)));
    }
    assert_eq!(shapes(&batch), [(MAX_SEGMENTS, 44), (1, 44)]);
}

#[test]
fn a_run_has_one_traffic_class_and_one_hop_limit() {
    let mut batch = batch();
    let to = |(traffic_class, hop_limit)| UdpDestination {
        traffic_class,
        hop_limit,
        ..peer(0).into()
    };
    let fields = [(0, 64), (0, 64), (8, 64), (8, 64), (8, 64), (8, 1), (0, 64)];
    for fields in fields {
        assert!(push(&mut batch, 44, 0, to(fields)));
    }
    assert_eq!(shapes(&batch), [(2, 44), (3, 44), (1, 44), (1, 44)]);
    assert_eq!(batch.runs().next().unwrap().dst, peer(0).into());
    batch.separate();
    assert!(batch.runs().map(|run| run.dst).eq(fields.map(to)));
}

#[test]
fn a_dropped_slot_adds_nothing_and_a_full_batch_offers_none() {
    let mut batch = batch();
    batch.slot().unwrap().fill(7);
    assert!(batch.is_empty());
    let mut packets = 0;
    while push(&mut batch, MAX_PACKET, 0, peer(0)) {
        packets += 1;
    }
    // Two more would fit, but only as a run of two.
    assert_eq!(shapes(&batch), [(15, MAX_PACKET); 4]);
    assert_eq!(batch.len(), packets);
    batch.consume(usize::MAX);
    assert!(batch.is_empty() && batch.slot().is_some());
}

#[test]
fn separated_packets_are_sealed_for_identification_zero() {
    let mut batch = batch();
    for fill in 0..3 {
        assert!(push(&mut batch, 64, fill, peer(3)));
    }
    batch.consume(0);
    let idents = |batch: &TxBatch| batch.packets().map(|(_, packet)| packet[61]).collect::<Vec<_>>();
    assert_eq!(idents(&batch), [0, 1, 2]);
    batch.separate();
    assert_eq!(idents(&batch), [0, 0, 0]);
    assert!(push(&mut batch, 64, 3, peer(3)));
    assert_eq!(shapes(&batch), [(1, 64); 4]);
    assert!(batch.packets().map(|(_, packet)| packet[0]).eq(0..4));
}

proptest! {
    /// For any packets, and any consumption in between, the runs hold exactly the packets pushed,
    /// in order, each sealed for its index, and each run is one that the kernel takes.
    #[test]
    fn runs_cover_the_packets_pushed_in_order(
        packets in prop::collection::vec((prop_oneof![4usize..300, Just(1040), Just(4112), Just(MAX_PACKET)], 0u16..3), 1..300),
        consume_every in 1usize..40,
        separate_at in prop::option::of(0usize..300),
    ) {
        let mut batch = batch();
        let mut expected = Vec::new();
        let mut seen = Vec::new();
        let take = |batch: &mut TxBatch, runs: usize, seen: &mut Vec<(usize, u16, u8)>| {
            let mut left = 0;
            for run in batch.runs().take(runs) {
                assert!(run.bytes.len() <= MAX_RUN && run.packets <= MAX_SEGMENTS && run.segment <= MAX_PACKET);
                assert_eq!(run.bytes.len().div_ceil(run.segment), run.packets);
                left += run.packets;
            }
            for (envelope, packet) in batch.packets().take(left) {
                let mut sealed = packet.to_vec();
                seal(&mut sealed, &envelope);
                assert_eq!(&sealed, packet);
                assert_eq!(envelope.src, LOCAL.parse().unwrap());
                let fill = if packet.len() > 4 { packet[0] } else { 0 };
                seen.push((packet.len(), envelope.dst.addr.port() - 10_000, fill));
            }
            batch.consume(runs);
        };
        for (at, &(len, dst)) in packets.iter().enumerate() {
            let fill = at as u8;
            if separate_at == Some(at) {
                batch.separate();
            }
            if !push(&mut batch, len, fill, peer(dst)) {
                take(&mut batch, usize::MAX, &mut seen);
                prop_assert!(push(&mut batch, len, fill, peer(dst)));
            }
            expected.push((len, dst, if len > 4 { fill } else { 0 }));
            if at % consume_every == 0 {
                take(&mut batch, 1, &mut seen);
            }
        }
        take(&mut batch, usize::MAX, &mut seen);
        prop_assert!(batch.is_empty());
        prop_assert_eq!(seen, expected);
    }
}
