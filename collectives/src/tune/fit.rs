//! From measurements to costs: pure functions, which a calibration calls at start-up and tests call with numbers of their own.
//!
//! What is measured are operations of nothing but messages, which a ring of ranks sends round at the same time, each one to the next: *hops*, one after another, and a *burst* of messages at once. So there is in the numbers
//! what is there in collectives: an operation's beginning and end, both directions at once, and memory that all ranks share.

use crate::cost::{Link, MARKS, MessageCost, Mover, Moves, Scale};
use crate::protocol::EAGER_BYTES;

/// Messages of an operation of many, where it is not their bytes that matter.
pub const MANY: u32 = 4;

/// A hop is at least such a part of an operation of one: on a busy machine more of them may have taken less time, and one that costs nothing would have everything sent in the most messages there are.
const LEAST: f64 = 8.0;
/// And at least such a part of it while nobody else sends.
const LEAST_ALONE: f64 = 4.0;

/// Hops of some length.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Hops {
    /// Bytes of a message.
    pub bytes: u64,
    /// How many there were.
    pub messages: u32,
    /// How long the operation took, ns.
    pub ns: f64,
}

/// What was measured of one protocol.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Messages {
    /// An operation of one hop without bytes to speak of, ns.
    pub one_ns: f64,
    /// One of [`MANY`] hops.
    pub many_ns: f64,
    /// One of one hop to another rank and one back.
    pub turn_ns: f64,
    /// One of [`MANY`] hops to another rank and as many back, by turns.
    pub turns_ns: f64,
    /// One of one message to another rank.
    pub given_ns: f64,
    /// One in which so many such messages are sent, each to another rank where there are others, and then as many received; at least two.
    pub burst: (u32, f64),
    /// One of one hop of so many bytes, which is longer than what is eager; of Simple alone.
    pub long: Option<Hops>,
    /// Hops of messages that lay in memory before, each beside the [mark](MARKS) that it is for.
    pub settled: Vec<(u64, Hops)>,
    /// Hops of messages that were received by the hop before.
    pub fresh: Vec<(u64, Hops)>,
    /// Hops of messages that lay in memory before, and are reduced as they come.
    pub reduced: Vec<(u64, Hops)>,
    /// Hops of messages that lay in memory before, all of the first rank to the second, while others have nothing to do.
    pub alone: Vec<(u64, Hops)>,
}

impl Messages {
    /// What a hop takes while nobody else sends: α.
    fn alone(&self) -> f64 {
        let alpha = self.alpha();
        ((self.turns_ns - self.turn_ns) / f64::from(2 * (MANY - 1))).clamp(alpha / LEAST_ALONE, alpha)
    }

    /// What each further hop takes, with all ranks sending.
    fn alpha(&self) -> f64 {
        ((self.many_ns - self.one_ns) / f64::from(MANY - 1)).clamp(self.one_ns / LEAST, self.one_ns)
    }

    /// What an operation takes beside its hops.
    fn around(&self) -> f64 {
        self.one_ns - self.alpha()
    }

    /// What an operation of a message that is granted waits for beside that, where one of none takes `begin_ns` and a grant `grant_ns`: by one of one hop, and one of several.
    fn confirm(&self, begin_ns: f64, grant_ns: f64) -> Option<f64> {
        let one = self.long?;
        let (_, several) = self
            .settled
            .iter()
            .find(|(_, hops)| hops.bytes == one.bytes && hops.messages > 1)?;
        let hop = (several.ns - one.ns) / f64::from(several.messages - 1);
        Some((one.ns - hop - begin_ns - grant_ns).clamp(0.0, one.ns / 2.0))
    }

    /// What a message costs, where an operation begins in `begin_ns` and something granted comes in `grant_ns`; `stored` if short ones are, of Simple.
    fn cost(&self, begin_ns: f64, grant_ns: f64, stored: bool) -> MessageCost {
        let (alpha, alone) = (self.alpha(), self.alone());
        // With many at once latency is paid for once, and the processor for each at both ends.
        let (messages, burst_ns) = self.burst;
        let busy = (burst_ns - self.one_ns) / f64::from(messages.max(2) - 1) / 2.0;
        let busy = busy.clamp(0.0, alone / 2.0);
        let confirm = self.confirm(begin_ns, grant_ns).filter(|_| stored);
        let rates = |hops: &[(u64, Hops)]| {
            let rate = |&(mark, hops): &(u64, Hops)| {
                let waits = if hops.bytes > EAGER_BYTES as u64 {
                    grant_ns + confirm.unwrap_or(0.0)
                } else {
                    0.0
                };
                let each = (hops.ns - self.around() - waits) / f64::from(hops.messages.max(1)) - alpha;
                (mark, each / hops.bytes.max(1) as f64)
            };
            Scale::of(&hops.iter().map(rate).collect::<Vec<_>>())
        };
        let settled = rates(&self.settled);
        let beta = settled.map_or(0.0, |scale| scale.ns_per_byte(LONG as f64, LONG as f64));
        let bytes = settled.map(|settled| Moves {
            settled,
            fresh: rates(&self.fresh).unwrap_or(settled),
            reduced: rates(&self.reduced).unwrap_or(settled),
            alone: rates(&self.alone).unwrap_or(settled),
        });
        if grant_ns == 0.0 || stored {
            return MessageCost {
                both_ns: alpha - alone,
                lone_ns: (self.given_ns - begin_ns - busy).clamp(0.0, alone),
                grant_ns,
                stored: grant_ns > 0.0,
                confirm_ns: confirm.unwrap_or(0.0),
                bytes,
                ..MessageCost::simple(alone, busy, busy, beta)
            };
        }
        // Where there are grants and confirmations, both ends always have something to send.
        MessageCost {
            grant_ns,
            // What was short waited for no grant.
            confirm_ns: (self.around() - begin_ns).max(0.0),
            quiet_ns: (self.given_ns - self.one_ns).max(0.0),
            bytes,
            ..MessageCost::simple(alpha, busy, busy, beta)
        }
    }
}

/// Bytes of a message whose rate is β where there is to be but one.
const LONG: u64 = MARKS[6];

/// What was measured of a link.
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
    /// What an operation takes beside its messages, ns: by LL, which waits neither for a grant nor for a confirmation.
    #[must_use]
    pub fn begin_ns(&self) -> f64 {
        self.ll.around()
    }

    /// The link; `stored` if what is short by Simple is. A grant is a short WRITE, or stored as a message of LL is.
    #[must_use]
    pub fn link(&self, mover: Mover, stored: bool) -> Link {
        let begin = self.begin_ns();
        Link {
            mover,
            simple: self.simple.cost(begin, self.ll.alone().max(1.0), stored),
            ll: self.ll.cost(begin, 0.0, false),
            ll128: self.ll128.cost(begin, 0.0, false),
        }
    }
}

/// The median of what was measured; 0 of nothing.
#[must_use]
pub fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples.get(samples.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is measured where an operation takes `around` beside its messages, and each of them so long.
    fn measured(around: f64, alpha: f64, busy: f64, grant: f64, beta: [f64; 3]) -> Messages {
        let hops = |beta: f64| {
            let hop = |&mark: &u64| {
                let (bytes, messages) = (mark / 4, 4);
                let waits = if bytes > EAGER_BYTES as u64 { grant } else { 0.0 };
                let ns = around + waits + 4.0 * (alpha + bytes as f64 * beta);
                (mark, Hops { bytes, messages, ns })
            };
            MARKS[2..].iter().map(hop).collect()
        };
        let one_ns = around + alpha;
        Messages {
            one_ns,
            many_ns: around + f64::from(MANY) * alpha,
            turn_ns: around + 1.6 * alpha,
            turns_ns: around + 1.6 * f64::from(MANY) * alpha,
            given_ns: one_ns + 50.0,
            burst: (MANY, one_ns + f64::from(MANY - 1) * 2.0 * busy),
            long: None,
            settled: hops(beta[0]),
            fresh: hops(beta[1]),
            reduced: hops(beta[2]),
            alone: hops(beta[0] / 2.0),
        }
    }

    #[test]
    fn costs_are_found_again() {
        let calibration = Calibration {
            simple: measured(1500.0, 900.0, 100.0, 320.0, [0.05, 0.08, 0.09]),
            ll: measured(300.0, 400.0, 150.0, 0.0, [0.2; 3]),
            ll128: measured(310.0, 420.0, 1000.0, 0.0, [0.15; 3]),
        };
        assert!((calibration.begin_ns() - 300.0).abs() < 1e-6);
        let link = calibration.link(Mover::Receiver, false);
        let near = |found: f64, expected: f64| assert!((found - expected).abs() < 1e-6, "{found} and not {expected}");
        let MessageCost {
            alpha_ns,
            send_ns,
            receive_ns,
            grant_ns,
            confirm_ns,
            ..
        } = link.simple;
        near(alpha_ns, 900.0);
        near(link.simple.quiet_ns, 50.0);
        near(link.ll.alpha_ns, 320.0);
        near(link.ll.both_ns, 80.0);
        near(send_ns, 100.0);
        near(receive_ns, 100.0);
        near(grant_ns, 320.0);
        near(confirm_ns, 1500.0 - 300.0);
        near(link.simple.beta(64.0, 1e6, false, 1.0), 0.05);
        near(link.simple.beta(64.0, 1e6, false, 0.0), 0.025);
        near(link.simple.beta(1e6, 64.0, true, 1.0), 0.08);
        near(link.simple.reducing(1e6, 64.0).unwrap(), 0.04);
        near(link.simple.beta_ns_per_byte, 0.05);
        assert_eq!((link.ll.grant_ns, link.ll.confirm_ns), (0.0, 0.0));
        near(link.ll128.send_ns, 168.0);
    }

    #[test]
    fn nonsense_is_no_negative_time() {
        let wild = Messages {
            one_ns: 500.0,
            many_ns: 100.0,
            burst: (MANY, 10.0),
            settled: vec![(
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
        let link = calibration.link(Mover::Receiver, false);
        for cost in [link.simple, link.ll, link.ll128] {
            let all = [
                cost.alpha_ns,
                cost.send_ns,
                cost.receive_ns,
                cost.beta_ns_per_byte,
                cost.both_ns,
                cost.grant_ns,
                cost.confirm_ns,
                cost.quiet_ns,
                cost.beta(4096.0, 0.0, true, 0.5),
            ];
            assert!(all.iter().all(|ns| *ns >= 0.0 && ns.is_finite()), "{cost:?}");
        }
        assert_eq!(
            link.ll.alpha_ns + link.ll.both_ns,
            500.0 / LEAST,
            "a hop is not for nothing"
        );
        assert_eq!((median(vec![3.0, 1.0, 2.0]), median(Vec::new())), (2.0, 0.0));
    }
}
