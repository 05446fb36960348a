//! Fits cost parameters to measurements: pure functions for calibration and tests.
//!
//! The ranks of a ring send concurrently to the next rank: *hops*, one after another, and a *burst*
//! of concurrent messages. So the measurements include all costs of collectives.

use crate::cost::{ByteCosts, DataMover, FarMessages, Link, MARKS, MessageCost, Scale};
use crate::protocol::EAGER_BYTES;

/// Messages of an operation with many, for latency.
pub const MANY: u32 = 4;

/// Minimum share of a hop in an operation of one: on a busy machine several may have taken less
/// time, and a hop without cost would make the tuner use the maximum number of messages.
const MIN_HOP_SHARE: f64 = 8.0;
/// The same while no other rank sends.
const MIN_ISOLATED_HOP_SHARE: f64 = 4.0;

/// Consecutive hops of one length.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Hops {
    /// Bytes of a message.
    pub bytes: u64,
    /// The number of hops.
    pub messages: u32,
    /// Duration of the operation, ns.
    pub ns: f64,
}

/// Measurements of one protocol.
// fields: one per measured pattern.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Messages {
    /// An operation of one hop of negligible length, ns.
    pub one_ns: f64,
    /// One of [`MANY`] hops.
    pub many_ns: f64,
    /// An operation of one hop to another rank and one back.
    pub ping_pong_ns: f64,
    /// An operation of [`MANY`] hops to another rank and as many back, alternately (ping-pong).
    pub ping_pongs_ns: f64,
    /// An operation of one message to another rank.
    pub single_ns: f64,
    /// An operation that sends so many such messages, and then receives as many; at least two.
    pub burst: (u32, f64),
    /// An operation of one hop of so many bytes, more than eager; of Simple only.
    pub long: Option<Hops>,
    /// Messages one way in an operation of a mark's length that has longer ones in `isolated`; of
    /// Simple only.
    pub far: Option<(u64, Hops)>,
    /// Hops of messages from memory, by the [mark](MARKS) that they measure.
    pub resident: Vec<(u64, Hops)>,
    /// Hops of messages that were received by the previous hop.
    pub forwarded: Vec<(u64, Hops)>,
    /// Hops of messages from memory that are reduced on arrival.
    pub reduced: Vec<(u64, Hops)>,
    /// The same, from the first rank to the second only; of Simple only.
    pub isolated_reduced: Vec<(u64, Hops)>,
    /// Hops of messages from memory that a later step reduces; of Simple only.
    pub gathered: Vec<(u64, Hops)>,
    /// The same, from the first rank to the second only; of Simple only.
    pub isolated_gathered: Vec<(u64, Hops)>,
    /// Hops of messages from memory, from the first rank to the second only.
    pub isolated: Vec<(u64, Hops)>,
}

impl Messages {
    /// Duration of a hop while no other rank sends: α.
    fn isolated_hop_ns(&self) -> f64 {
        let alpha = self.alpha();
        ((self.ping_pongs_ns - self.ping_pong_ns) / f64::from(2 * (MANY - 1)))
            .clamp(alpha / MIN_ISOLATED_HOP_SHARE, alpha)
    }

    fn alpha(&self) -> f64 {
        ((self.many_ns - self.one_ns) / f64::from(MANY - 1)).clamp(self.one_ns / MIN_HOP_SHARE, self.one_ns)
    }

    fn overhead_ns(&self) -> f64 {
        self.one_ns - self.alpha()
    }

    /// The wait for the acknowledgement of granted messages: from an operation with one hop and one
    /// with several.
    fn confirm(&self, begin_ns: f64, grant_ns: f64) -> Option<f64> {
        let one = self.long?;
        let (_, several) = self
            .resident
            .iter()
            .find(|(_, hops)| hops.bytes == one.bytes && hops.messages > 1)?;
        let hop = (several.ns - one.ns) / f64::from(several.messages - 1);
        Some((one.ns - hop - begin_ns - grant_ns).clamp(0.0, one.ns / 2.0))
    }

    /// ns per byte of the receiver's own reductions, from what they add to an operation that only
    /// moves as many messages one way, at this rate. The sender moves a granted message while the
    /// one before it is reduced: reductions that are quicker than that add the last one only.
    fn isolated_reduction(&self, hops: &[(u64, Hops)], isolated: Scale) -> Option<Scale> {
        let rate = |&(mark, hops): &(u64, Hops)| {
            let (_, moved) = self.isolated.iter().find(|(at, _)| *at == mark)?;
            let (_, moving) = isolated.marks().find(|(at, _)| *at == mark)?;
            let (bytes, messages) = (hops.bytes.max(1) as f64, f64::from(hops.messages.max(1)));
            let (added, moving) = ((hops.ns - moved.ns).max(0.0), moving * bytes);
            let each = if hops.bytes <= EAGER_BYTES as u64 {
                added / messages
            } else if added > moving {
                moving + (added - moving) / messages
            } else {
                added
            };
            Some((mark, each / bytes))
        };
        Scale::of(&hops.iter().filter_map(rate).collect::<Vec<_>>())
    }

    /// What a message costs beside its bytes where near caches do not hold its operation, and the
    /// length of those that have it in what their bytes cost.
    fn far(&self) -> Option<FarMessages> {
        let (mark, short) = self.far?;
        let (_, long) = self.isolated.iter().find(|(at, _)| *at == mark)?;
        let more = short.messages.checked_sub(long.messages).filter(|more| *more > 0)?;
        Some(FarMessages {
            ns: ((short.ns - long.ns) / f64::from(more)).max(0.0),
            bytes: long.bytes,
            whole: mark,
        })
    }

    fn cost(&self, begin_ns: f64, grant_ns: f64) -> MessageCost {
        let (alpha, alone) = (self.alpha(), self.isolated_hop_ns());
        // A burst pays latency once, and processor time for each message at both ends.
        let (messages, burst_ns) = self.burst;
        let busy = (burst_ns - self.one_ns) / f64::from(messages.max(2) - 1) / 2.0;
        let busy = busy.clamp(0.0, alone / 2.0);
        let confirm = self.confirm(begin_ns, grant_ns);
        let rates = |hops: &[(u64, Hops)], is_one_way: bool| {
            let rate = |&(mark, hops): &(u64, Hops)| {
                let granted = hops.bytes > EAGER_BYTES as u64;
                let waits = if granted {
                    grant_ns + confirm.unwrap_or(0.0)
                } else {
                    0.0
                };
                // Granted messages that only leave follow each other by the sender's time; latency
                // is paid once.
                let (waits, hop) = match granted && is_one_way {
                    true => (waits + alone - busy, busy),
                    false => (waits, alpha),
                };
                let each = (hops.ns - self.overhead_ns() - waits) / f64::from(hops.messages.max(1)) - hop;
                (mark, each / hops.bytes.max(1) as f64)
            };
            Scale::of(&hops.iter().map(rate).collect::<Vec<_>>())
        };
        let resident = rates(&self.resident, false);
        let isolated = rates(&self.isolated, true);
        let beta = resident.map_or(0.0, |scale| scale.ns_per_byte(LONG as f64, LONG as f64));
        let bytes = resident.map(|resident| {
            let reduced = rates(&self.reduced, false).unwrap_or(resident);
            let gathered = rates(&self.gathered, false).unwrap_or(resident);
            let own = |hops, both: Scale| {
                let measured = isolated.and_then(|isolated| self.isolated_reduction(hops, isolated));
                measured.unwrap_or_else(|| both.above(&resident))
            };
            ByteCosts {
                resident,
                forwarded: rates(&self.forwarded, false).unwrap_or(resident),
                reduced,
                isolated_reduced: own(&self.isolated_reduced, reduced),
                gathered,
                isolated_gathered: own(&self.isolated_gathered, gathered),
                isolated: isolated.unwrap_or(resident),
                far: self.far().unwrap_or_default(),
            }
        });
        MessageCost {
            bidirectional_ns: alpha - alone,
            receive_only_ns: (self.single_ns - begin_ns - busy).clamp(0.0, alone),
            grant_ns,
            copied: grant_ns > 0.0,
            confirm_ns: confirm.unwrap_or(0.0),
            bytes,
            ..MessageCost::simple(alone, busy, busy, beta)
        }
    }
}

/// Message length whose rate is β where a single value is needed.
const LONG: u64 = MARKS[6];

/// Measurements of a link.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Calibration {
    /// By [`Protocol::Simple`](crate::Protocol::Simple).
    pub simple: Messages,
    /// By [`Protocol::Ll`](crate::Protocol::Ll).
    pub ll: Messages,
    /// By [`Protocol::Ll128`](crate::Protocol::Ll128).
    pub ll128: Messages,
}

impl Calibration {
    /// Duration of an operation besides its messages, ns: by LL, which needs no acknowledgement.
    #[must_use]
    pub fn begin_ns(&self) -> f64 {
        self.ll.overhead_ns()
    }

    /// The link. A grant is a short WRITE.
    #[must_use]
    pub fn link(&self, data_mover: DataMover) -> Link {
        let begin = self.begin_ns();
        Link {
            data_mover,
            simple: self.simple.cost(begin, self.ll.isolated_hop_ns().max(1.0)),
            ll: self.ll.cost(begin, 0.0),
            ll128: self.ll128.cost(begin, 0.0),
        }
    }
}

/// The median; 0 without samples.
#[must_use]
pub fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples.get(samples.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(around: f64, alpha: f64, busy: f64, waits: f64, beta: [f64; 4]) -> Messages {
        let hops = |beta: f64| {
            let hop = |&mark: &u64| {
                let (bytes, messages) = (mark / 4, 4);
                let waits = if bytes > EAGER_BYTES as u64 { waits } else { 0.0 };
                let ns = around + waits + 4.0 * (alpha + bytes as f64 * beta);
                (mark, Hops { bytes, messages, ns })
            };
            MARKS[2..].iter().map(hop).collect()
        };
        let one_way = |mark: u64, beta: f64| {
            let (bytes, messages) = (mark / 4, 4);
            let (waits, each) = match bytes > EAGER_BYTES as u64 {
                true => (waits + 0.8 * alpha - busy, busy),
                false => (0.0, alpha),
            };
            let ns = around + waits + 4.0 * (each + bytes as f64 * beta);
            (mark, Hops { bytes, messages, ns })
        };
        let one_way_hops = |beta: f64| MARKS[2..].iter().map(|&mark| one_way(mark, beta)).collect();
        // Of moving at half of `beta[0]`, and reductions that follow or overlap it.
        let reducing_hops = |own: f64| {
            let hop = |&mark: &u64| {
                let (mark, mut hops) = one_way(mark, beta[0] / 2.0);
                let (moving, own) = (hops.bytes as f64 * beta[0] / 2.0, hops.bytes as f64 * own);
                hops.ns += match hops.bytes > EAGER_BYTES as u64 {
                    true => own.min(moving) + 4.0 * (own - moving).max(0.0),
                    false => 4.0 * own,
                };
                (mark, hops)
            };
            MARKS[2..].iter().map(hop).collect()
        };
        let one_ns = around + alpha;
        Messages {
            one_ns,
            many_ns: around + f64::from(MANY) * alpha,
            ping_pong_ns: around + 1.6 * alpha,
            ping_pongs_ns: around + 1.6 * f64::from(MANY) * alpha,
            single_ns: one_ns + 50.0,
            burst: (MANY, one_ns + f64::from(MANY - 1) * 2.0 * busy),
            long: Some(Hops {
                bytes: MARKS[6] / 4,
                messages: 1,
                ns: around + waits + alpha + (MARKS[6] / 4) as f64 * beta[0],
            }),
            far: Some((MARKS[8], {
                let (bytes, messages) = (MARKS[4], 64);
                let (_, long) = one_way(MARKS[8], beta[0] / 2.0);
                let ns = long.ns + f64::from(messages - long.messages) * 300.0;
                Hops { bytes, messages, ns }
            })),
            resident: hops(beta[0]),
            forwarded: hops(beta[1]),
            reduced: hops(beta[2]),
            isolated_reduced: reducing_hops(beta[0] / 5.0),
            gathered: hops(beta[3]),
            isolated_gathered: reducing_hops(beta[0] * 0.6),
            isolated: one_way_hops(beta[0] / 2.0),
        }
    }

    #[test]
    fn costs_are_found_again() {
        let calibration = Calibration {
            // A grant, and an acknowledgement after 1200 ns.
            simple: measured(300.0, 900.0, 100.0, 320.0 + 1200.0, [0.05, 0.08, 0.09, 0.12]),
            ll: measured(300.0, 400.0, 150.0, 0.0, [0.2; 4]),
            ll128: measured(310.0, 420.0, 1000.0, 0.0, [0.15; 4]),
        };
        assert!((calibration.begin_ns() - 300.0).abs() < 1e-6);
        let link = calibration.link(DataMover::Processors);
        let near = |found: f64, expected: f64| assert!((found - expected).abs() < 1e-6, "{found} and not {expected}");
        let MessageCost {
            alpha_ns,
            send_ns,
            receive_ns,
            grant_ns,
            confirm_ns,
            ..
        } = link.simple;
        near(alpha_ns, 720.0);
        assert!(link.simple.copied && !link.ll.copied);
        near(link.ll.alpha_ns, 320.0);
        near(link.ll.bidirectional_ns, 80.0);
        near(send_ns, 100.0);
        near(receive_ns, 100.0);
        near(grant_ns, 320.0);
        near(confirm_ns, 1200.0);
        assert_eq!((link.simple.confirm_ns(16e3), link.simple.grant_ns(16e3)), (0.0, 0.0));
        near(link.simple.beta(64.0, 1e6, false, 1.0), 0.05);
        near(link.simple.beta(64.0, 1e6, false, 0.0), 0.025);
        // A quarter of the mark's messages have it in what their bytes cost.
        let far = 300.0 * (1.0 / 32e3 - 4.0 / MARKS[8] as f64);
        near(link.simple.beta(32e3, 4e6, false, 0.0), 0.025 + far);
        near(link.simple.beta(1e6, 64.0, true, 1.0), 0.08);
        near(link.simple.reducing(1e6, 64.0, true).unwrap(), 0.04);
        near(link.simple.reducing(1e6, 64.0, false).unwrap(), 0.01);
        near(link.simple.gathering(1e6, 64.0, true).unwrap(), 0.07);
        near(link.simple.gathering(1e6, 64.0, false).unwrap(), 0.03);
        near(link.simple.reducing(8e3, 64.0, false).unwrap(), 0.01);
        near(link.simple.beta_ns_per_byte, 0.05);
        assert_eq!((link.ll.grant_ns, link.ll.confirm_ns), (0.0, 0.0));
        near(link.ll128.send_ns, 168.0);
    }

    #[test]
    fn invalid_measurements_give_no_negative_time() {
        let wild = Messages {
            one_ns: 500.0,
            many_ns: 100.0,
            burst: (MANY, 10.0),
            resident: vec![(
                4096,
                Hops {
                    bytes: 1024,
                    messages: 4,
                    ns: 1.0,
                },
            )],
            ..Messages::default()
        };
        let calibration = Calibration {
            simple: wild.clone(),
            ll: wild,
            ll128: Messages::default(),
        };
        let link = calibration.link(DataMover::Processors);
        for cost in [link.simple, link.ll, link.ll128] {
            let all = [
                cost.alpha_ns,
                cost.send_ns,
                cost.receive_ns,
                cost.beta_ns_per_byte,
                cost.bidirectional_ns,
                cost.grant_ns,
                cost.confirm_ns,
                cost.send_only_ns,
                cost.beta(4096.0, 0.0, true, 0.5),
            ];
            assert!(all.iter().all(|ns| *ns >= 0.0 && ns.is_finite()), "{cost:?}");
        }
        assert_eq!(
            link.ll.alpha_ns + link.ll.bidirectional_ns,
            500.0 / MIN_HOP_SHARE,
            "a hop is not for nothing"
        );
        assert_eq!((median(vec![3.0, 1.0, 2.0]), median(Vec::new())), (2.0, 0.0));
    }
}
