//! Exact and counting sources, and random damage.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::time::Duration;

use super::{AddressPair, IdentTracker, MAX_AHEAD, MAX_BEHIND, MAX_CANDIDATE_GAP, MAX_SEGMENTS, SETS, Verdict, WAYS};
use crate::icrc::Flow;
use crate::{Datagram, Ident, Instant};

const US: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 0, 2));

fn peer(n: u32) -> IpAddr {
    Ipv4Addr::from_bits(0x0a0a_0000 + n).into()
}

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

fn datagram(src: IpAddr, segment: u16, payload: &[u8]) -> Datagram<'_> {
    Datagram {
        src,
        dst: US,
        src_port: 7,
        dst_port: 4791,
        ident: Ident::Unknown { segment },
        traffic_class: 0,
        payload,
    }
}

fn packet(src: IpAddr, ident: u16, psn: u32) -> [u8; 20] {
    let mut packet = [0; 20];
    packet[..4].copy_from_slice(&[0x11, 0x40, 0xff, 0xff]);
    packet[8..12].copy_from_slice(&psn.to_be_bytes());
    Flow::new(src, US, 7, 4791).seal(ident, &mut packet);
    packet
}

fn check(tracker: &mut IdentTracker, now: Instant, src: IpAddr, ident: u16, segment: u16) -> Verdict {
    tracker.check(now, &datagram(src, segment, &packet(src, ident, now.0 as u32)))
}

/// A sender with Linux' rule for Identifications, as the module describes, with a 1 ms tick.
struct Counter {
    ident: u16,
    at: Instant,
}

impl Counter {
    fn next(&mut self, now: Instant, rng: &mut Rng) -> u16 {
        let ticks = now.0 / 1_000_000 - self.at.0 / 1_000_000;
        if ticks > 0 {
            self.at = now;
            self.ident = self.ident.wrapping_add(rng.below(ticks) as u16);
        }
        self.ident = self.ident.wrapping_add(1);
        self.ident
    }
}

#[test]
fn an_exact_source_loses_nothing() {
    let mut tracker = IdentTracker::default();
    let mut rng = Rng(1);
    let mut now = Instant::ZERO;
    for _ in 0..2000 {
        now = now + Duration::from_micros(rng.below(3_000_000));
        // A run of segments arrives in one or two pieces, so indexes may differ from the sender's.
        let (run, split) = (1 + rng.below(MAX_SEGMENTS.into()) as u16, rng.below(160) as u16);
        for ident in 0..run {
            let place = if ident < split { ident } else { ident - split };
            assert_eq!(
                check(&mut tracker, now, peer(1), ident, place),
                Verdict::Valid,
                "{ident} of {run} at {place}"
            );
        }
    }
}

#[test]
fn a_counting_source_loses_nothing() {
    for seed in 0..20 {
        let mut rng = Rng(seed);
        let mut tracker = IdentTracker::default();
        let mut now = Instant(rng.below(1 << 40));
        let mut counter = Counter {
            ident: rng.next() as u16,
            at: now,
        };
        for step in 0..2000 {
            now = now
                + match rng.below(50) {
                    0 => Duration::from_millis(rng.below(100_000)),
                    1..10 => Duration::from_micros(rng.below(5000)),
                    _ => Duration::from_nanos(rng.below(3000)),
                };
            let lost = if rng.below(20) == 0 {
                rng.below(MAX_AHEAD - 1)
            } else {
                0
            };
            for _ in 0..lost {
                counter.next(now, &mut rng);
            }
            let ident = counter.next(now, &mut rng);
            assert_eq!(
                check(&mut tracker, now, peer(1), ident, 0),
                Verdict::Valid,
                "seed {seed}, step {step}, {ident}"
            );
        }
    }
}

#[test]
fn late_packets_of_a_counting_source_are_accepted() {
    let mut tracker = IdentTracker::default();
    for ident in [1000, 1003, 1001, 1002, 1003, 1004, 1004 - MAX_BEHIND] {
        assert_eq!(
            check(&mut tracker, Instant::ZERO, peer(1), ident, 0),
            Verdict::Valid,
            "{ident}"
        );
    }
    assert_eq!(
        check(&mut tracker, Instant::ZERO, peer(1), 1004 - MAX_BEHIND - 1, 0),
        Verdict::Unproven
    );
}

/// A source that counts from elsewhere is accepted at the second packet, if it follows the first.
#[test]
fn a_jump_costs_one_packet() {
    let mut tracker = IdentTracker::default();
    let now = Instant::ZERO;
    let mut at = |ident, millis| check(&mut tracker, now + Duration::from_millis(millis), peer(1), ident, 0);
    assert_eq!(at(1000, 0), Verdict::Valid);
    assert_eq!(at(30_000, 0), Verdict::Unproven);
    assert_eq!(at(30_000, 0), Verdict::Unproven, "a duplicate proves nothing");
    assert_eq!(
        at(30_000 + MAX_CANDIDATE_GAP as u16 + 1, 0),
        Verdict::Unproven,
        "too far after it"
    );
    assert_eq!(at(30_066, 0), Verdict::Valid);
    assert_eq!(at(30_067, 0), Verdict::Valid);
    assert_eq!(at(1001, 0), Verdict::Unproven, "the old count is forgotten");
    // Retransmitted after a timeout, in which the kernel's counter may have moved on.
    assert_eq!(at(50_000, 10), Verdict::Unproven);
    assert_eq!(at(50_500, 510), Verdict::Valid);
}

#[test]
fn an_exact_source_may_become_a_counting_one_and_back() {
    let mut tracker = IdentTracker::default();
    let mut at = |ident| check(&mut tracker, Instant::ZERO, peer(1), ident, 0);
    assert_eq!([at(0), at(0), at(500), at(501), at(502)], {
        use Verdict::{Unproven, Valid};
        [Valid, Valid, Unproven, Valid, Valid]
    });
    assert_eq!([at(0), at(1), at(127), at(0), at(3)], [Verdict::Valid; 5]);
    assert_eq!(at(MAX_SEGMENTS), Verdict::Unproven);
}

/// The counts in the module's text, over all Identifications.
#[test]
fn as_many_identifications_are_plausible_as_documented() {
    let plausible = |source: &AddressPair, now| {
        (0..=u16::MAX)
            .filter(|&ident| source.clone().evaluate(ident, 3, now) == Verdict::Valid)
            .count()
    };
    let exact = AddressPair::new(1, 0, 3, Instant::ZERO);
    let counting = AddressPair::new(1, 20_000, 3, Instant::ZERO);
    let second = Instant(1_000_000_000);
    assert_eq!(plausible(&exact, Instant::ZERO), 128);
    assert_eq!(plausible(&exact, second), 128);
    assert_eq!(plausible(&counting, Instant::ZERO), 4162);
    assert_eq!(plausible(&counting, second), 5162);
    assert_eq!(plausible(&counting, Instant(90 * second.0)), 65536);
}

/// 5 % of a million packets are damaged at random: none passes (0.004 expected), and no intact one
/// is refused, unless because of a damaged one (0 seen).
#[test]
fn damage_is_refused() {
    let mut rng = Rng(7);
    let mut tracker = IdentTracker::default();
    let mut now = Instant::ZERO;
    let mut counter = Counter { ident: 77, at: now };
    let flows = [peer(1), peer(2)].map(|src| Flow::new(src, US, 7, 4791));
    let mut template = packet(peer(1), 0, 0);
    let [mut corrupt, mut unproven] = [0; 2];
    for n in 0..1_000_000u32 {
        now = now + Duration::from_nanos(rng.below(20_000));
        let which = (n & 1) as usize;
        let ident = if which == 0 { counter.next(now, &mut rng) } else { 0 };
        template[8..12].copy_from_slice(&n.to_be_bytes());
        flows[which].seal(ident, &mut template);
        // The first packet of each source is accepted with any Identification.
        let damaged = n > 1 && rng.below(20) == 0;
        let mut bytes = template;
        if damaged {
            // From one flipped bit to noise, but not in the byte that is not covered.
            for _ in 0..1 + rng.below(4) {
                let at = [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19][rng.below(19) as usize];
                bytes[at] ^= 1 + rng.below(255) as u8;
            }
        }
        let verdict = tracker.check(now, &datagram(peer(1 + which as u32), 0, &bytes));
        if !damaged || bytes == template {
            assert_eq!(verdict, Verdict::Valid, "packet {n}");
        } else {
            assert_ne!(verdict, Verdict::Valid, "damaged packet {n}");
            *(if verdict == Verdict::Corrupt {
                &mut corrupt
            } else {
                &mut unproven
            }) += 1;
        }
    }
    assert!(corrupt > 49_000, "{corrupt}");
    assert!(unproven < 20, "{unproven}, 0.8 expected");
}

/// Unproven sources, one packet each, fill the table, but evict proven ones last.
#[test]
fn unproven_sources_do_not_evict_proven_ones() {
    let mut tracker = IdentTracker::default();
    for ident in 1000..1002 {
        assert_eq!(check(&mut tracker, Instant::ZERO, peer(1), ident, 0), Verdict::Valid);
    }
    for n in 0..20 * (SETS * WAYS) as u32 {
        assert_eq!(
            check(&mut tracker, Instant(u64::from(n)), peer(1000 + n), 9, 0),
            Verdict::Valid
        );
    }
    // Still in the table, or this would be accepted as a first packet.
    assert_eq!(
        check(&mut tracker, Instant::ZERO, peer(1), 40_000, 0),
        Verdict::Unproven
    );
}

#[test]
fn known_identifications_and_ipv6_need_no_history() {
    let mut tracker = IdentTracker::default();
    let bytes = packet(peer(1), 4711, 1);
    let known = |ident| Datagram {
        ident: Ident::Known(ident),
        ..datagram(peer(1), 0, &bytes)
    };
    assert_eq!(tracker.check(Instant::ZERO, &known(4711)), Verdict::Valid);
    assert_eq!(tracker.check(Instant::ZERO, &known(4712)), Verdict::Corrupt);

    let here: IpAddr = Ipv6Addr::LOCALHOST.into();
    let mut bytes = bytes;
    Flow::new(here, here, 7, 4791).seal(0, &mut bytes);
    for segment in [0, 5] {
        let datagram = Datagram {
            dst: here,
            ..datagram(here, segment, &bytes)
        };
        assert_eq!(tracker.check(Instant::ZERO, &datagram), Verdict::Valid);
        for cut in 0..bytes.len() {
            let cut = Datagram {
                payload: &bytes[..cut],
                ..datagram
            };
            assert_eq!(tracker.check(Instant::ZERO, &cut), Verdict::Corrupt);
        }
    }
}

/// A dual-stack socket reports the same peer as an IPv6 address.
#[test]
fn mapped_addresses_are_the_same_source() {
    let mut tracker = IdentTracker::default();
    assert_eq!(check(&mut tracker, Instant::ZERO, peer(1), 1000, 0), Verdict::Valid);
    let mapped = |address: IpAddr| match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().into(),
        v6 @ IpAddr::V6(_) => v6,
    };
    let bytes = packet(peer(1), 40_000, 1);
    let datagram = Datagram {
        src: mapped(peer(1)),
        dst: mapped(US),
        ..datagram(peer(1), 0, &bytes)
    };
    assert_eq!(tracker.check(Instant::ZERO, &datagram), Verdict::Unproven);
}

/// Too short to hold an ICRC, and from a new pair.
#[test]
fn runts_are_corrupt() {
    let mut tracker = IdentTracker::default();
    for len in 0..4 {
        assert_eq!(
            tracker.check(Instant::ZERO, &datagram(peer(1), 0, &[0xff; 4][..len])),
            Verdict::Corrupt
        );
    }
}
