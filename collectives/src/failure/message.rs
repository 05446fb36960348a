//! Wire format of the failure detector's messages, little endian. Lists are limited; out-of-range
//! input gives `None`.

use super::monitor::{Awaited, Report, Wait};
use super::verdict::{Cause, Stuck, Verdict};
use crate::bootstrap::{Reader, put_text};
use crate::plan::Collective;
use crate::types::Rank;

const MAX_WAITS: usize = 256;
const MAX_REACHES: usize = 4096;
const MAX_PENDING: usize = 64;
pub(super) const MAX_REASON: usize = 1024;

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Message {
    /// Requests a report within `timeout_ms`, after a link test if `test_links`.
    Query {
        number: u32,
        timeout_ms: u32,
        test_links: bool,
    },
    Reply {
        number: u32,
        report: Report,
    },
    Verdict(Verdict),
}

impl Message {
    pub(crate) fn encode(&self, to: &mut Vec<u8>) {
        match self {
            Self::Query {
                number,
                timeout_ms,
                test_links,
            } => {
                to.push(1);
                to.extend_from_slice(&number.to_le_bytes());
                to.extend_from_slice(&timeout_ms.to_le_bytes());
                to.push(u8::from(*test_links));
            }
            Self::Reply { number, report } => {
                to.push(2);
                to.extend_from_slice(&number.to_le_bytes());
                put_report(to, report);
            }
            Self::Verdict(verdict) => {
                to.push(3);
                put_verdict(to, verdict);
            }
        }
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut from = Reader(bytes);
        let message = match from.u8()? {
            1 => Self::Query {
                number: from.u32()?,
                timeout_ms: from.u32()?,
                test_links: flag(&mut from)?,
            },
            2 => Self::Reply {
                number: from.u32()?,
                report: report(&mut from)?,
            },
            3 => Self::Verdict(verdict(&mut from)?),
            _ => return None,
        };
        from.end()?;
        Some(message)
    }
}

fn put_report(to: &mut Vec<u8>, report: &Report) {
    to.extend_from_slice(&report.begun.to_le_bytes());
    to.extend_from_slice(&report.finished.to_le_bytes());
    let pending = &report.pending[..report.pending.len().min(MAX_PENDING)];
    to.push(pending.len() as u8);
    pending.iter().for_each(|kind| put_kind(to, *kind));
    let waits = report.waits.as_deref();
    to.push(u8::from(waits.is_some()));
    let waits = waits.unwrap_or_default();
    let waits = &waits[..waits.len().min(MAX_WAITS)];
    to.extend_from_slice(&(waits.len() as u16).to_le_bytes());
    waits.iter().for_each(|wait| put_wait(to, wait));
    to.push(u8::from(report.reachable.is_some()));
    let reachable = report.reachable.as_deref().unwrap_or_default();
    let reachable = &reachable[..reachable.len().min(MAX_REACHES)];
    to.extend_from_slice(&(reachable.len() as u16).to_le_bytes());
    reachable
        .iter()
        .for_each(|rank| to.extend_from_slice(&rank.0.to_le_bytes()));
}

fn report(from: &mut Reader) -> Option<Report> {
    let (begun, finished) = (from.u64()?, from.u64()?);
    let pending = usize::from(from.u8()?);
    let pending = (pending <= MAX_PENDING).then_some(0..pending)?;
    let pending = pending.map(|_| kind(from)).collect::<Option<_>>()?;
    let has_waits = flag(from)?;
    let waits = usize::from(from.u16()?);
    let waits = (waits <= if has_waits { MAX_WAITS } else { 0 }).then_some(0..waits)?;
    let waits = waits.map(|_| wait(from)).collect::<Option<_>>()?;
    let tried = flag(from)?;
    let reachable = usize::from(from.u16()?);
    let reachable = (reachable <= if tried { MAX_REACHES } else { 0 }).then_some(0..reachable)?;
    let reachable = reachable.map(|_| from.u32().map(Rank)).collect::<Option<_>>()?;
    (finished <= begun && finished < u64::MAX).then_some(Report {
        begun,
        finished,
        pending,
        waits: has_waits.then_some(waits),
        reachable: tried.then_some(reachable),
    })
}

fn flag(from: &mut Reader) -> Option<bool> {
    match from.u8()? {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    }
}

/// 0, or 1 + the index among all collectives.
fn put_kind(to: &mut Vec<u8>, kind: Option<Collective>) {
    let place = kind.and_then(|kind| Collective::ALL.iter().position(|one| *one == kind));
    to.push(place.map_or(0, |place| place as u8 + 1));
}

fn kind(from: &mut Reader) -> Option<Option<Collective>> {
    match usize::from(from.u8()?).checked_sub(1) {
        None => Some(None),
        Some(place) => Collective::ALL.get(place).copied().map(Some),
    }
}

fn put_wait(to: &mut Vec<u8>, wait: &Wait) {
    to.extend_from_slice(&wait.operation.to_le_bytes());
    to.extend_from_slice(&wait.connection.to_le_bytes());
    to.extend_from_slice(&wait.slice.to_le_bytes());
    to.extend_from_slice(&wait.step.to_le_bytes());
    to.extend_from_slice(&wait.peer.0.to_le_bytes());
    to.extend_from_slice(&wait.qpn.to_le_bytes());
    to.push(match wait.awaited {
        Awaited::Message => 0,
        Awaited::Credit => 1,
        Awaited::Acknowledgement => 2,
        Awaited::QueuePairFailed => 3,
    });
}

fn wait(from: &mut Reader) -> Option<Wait> {
    Some(Wait {
        operation: from.u64()?,
        connection: from.u32()?,
        slice: from.u64()?,
        step: from.u32()?,
        peer: Rank(from.u32()?),
        qpn: from.u32()?,
        awaited: match from.u8()? {
            0 => Awaited::Message,
            1 => Awaited::Credit,
            2 => Awaited::Acknowledgement,
            3 => Awaited::QueuePairFailed,
            _ => return None,
        },
    })
}

fn put_verdict(to: &mut Vec<u8>, verdict: &Verdict) {
    let mut ranks = |tag: u8, ranks: &[Rank]| {
        to.push(tag);
        ranks
            .iter()
            .for_each(|rank| to.extend_from_slice(&rank.0.to_le_bytes()));
    };
    match &verdict.cause {
        Cause::Aborted { rank, reason } => {
            ranks(0, &[*rank]);
            put_text(to, reason, MAX_REASON);
        }
        Cause::Died { rank, how } => {
            ranks(1, &[*rank]);
            put_text(to, how, MAX_REASON);
        }
        Cause::Left { rank } => ranks(2, &[*rank]),
        Cause::Stopped { rank } => ranks(3, &[*rank]),
        Cause::Mismatch {
            rank,
            kind,
            other,
            other_kind,
        } => {
            ranks(4, &[*rank, *other]);
            put_kind(to, Some(*kind));
            put_kind(to, Some(*other_kind));
        }
        Cause::CutOff { rank } => ranks(5, &[*rank]),
        Cause::Broken { rank, peer } => ranks(6, &[*rank, *peer]),
        Cause::Absent { rank, operation } => {
            ranks(7, &[*rank]);
            to.extend_from_slice(&operation.to_le_bytes());
        }
        Cause::Idle { rank } => ranks(8, &[*rank]),
        Cause::Lost { from, to } => ranks(9, &[*from, *to]),
        Cause::Slow { rank } => ranks(10, &[*rank]),
    }
    to.push(u8::from(verdict.stuck.is_some()));
    if let Some(Stuck { rank, kind, wait }) = &verdict.stuck {
        to.extend_from_slice(&rank.0.to_le_bytes());
        put_kind(to, *kind);
        put_wait(to, wait);
    }
}

fn verdict(from: &mut Reader) -> Option<Verdict> {
    let tag = from.u8()?;
    let rank = Rank(from.u32()?);
    let cause = match tag {
        0 => Cause::Aborted {
            rank,
            reason: from.text(MAX_REASON)?,
        },
        1 => Cause::Died {
            rank,
            how: from.text(MAX_REASON)?,
        },
        2 => Cause::Left { rank },
        3 => Cause::Stopped { rank },
        4 => Cause::Mismatch {
            rank,
            other: Rank(from.u32()?),
            kind: kind(from)??,
            other_kind: kind(from)??,
        },
        5 => Cause::CutOff { rank },
        6 => Cause::Broken {
            rank,
            peer: Rank(from.u32()?),
        },
        7 => Cause::Absent {
            rank,
            operation: from.u64()?,
        },
        8 => Cause::Idle { rank },
        9 => Cause::Lost {
            from: rank,
            to: Rank(from.u32()?),
        },
        10 => Cause::Slow { rank },
        _ => return None,
    };
    let stuck = if flag(from)? {
        Some(Stuck {
            rank: Rank(from.u32()?),
            kind: kind(from)?,
            wait: wait(from)?,
        })
    } else {
        None
    };
    Some(Verdict { cause, stuck })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages() -> Vec<Message> {
        let wait = Wait {
            operation: 17,
            connection: 2,
            slice: u64::MAX,
            step: 5,
            peer: Rank(3),
            qpn: 0x11,
            awaited: Awaited::Credit,
        };
        let report = Report {
            begun: 18,
            finished: 16,
            pending: vec![Some(Collective::AllReduce), None],
            waits: Some(vec![wait; 3]),
            reachable: Some(vec![Rank(0), Rank(5)]),
        };
        let (rank, other) = (Rank(1), Rank(2));
        let causes = [
            Cause::Aborted {
                rank,
                reason: "é".repeat(10),
            },
            Cause::Died {
                rank,
                how: String::new(),
            },
            Cause::Left { rank },
            Cause::Stopped { rank },
            Cause::Mismatch {
                rank,
                kind: Collective::AllReduce,
                other,
                other_kind: Collective::Barrier,
            },
            Cause::CutOff { rank },
            Cause::Broken { rank, peer: other },
            Cause::Absent { rank, operation: 9 },
            Cause::Idle { rank },
            Cause::Lost { from: rank, to: other },
            Cause::Slow { rank },
        ];
        let stuck = Stuck {
            rank: other,
            kind: Some(Collective::Reduce),
            wait,
        };
        let mut all = vec![
            Message::Query {
                number: 1,
                timeout_ms: 50,
                test_links: false,
            },
            Message::Query {
                number: 1,
                timeout_ms: 50,
                test_links: true,
            },
            Message::Reply { number: 1, report },
            Message::Reply {
                number: 2,
                report: Report::default(),
            },
        ];
        for cause in causes {
            for stuck in [None, Some(stuck)] {
                let cause = cause.clone();
                all.push(Message::Verdict(Verdict { cause, stuck }));
            }
        }
        all
    }

    #[test]
    fn messages_round_trip_and_truncated_ones_are_rejected() {
        for message in messages() {
            let mut bytes = Vec::new();
            message.encode(&mut bytes);
            assert_eq!(Message::decode(&bytes), Some(message.clone()));
            for cut in 0..bytes.len() {
                assert_eq!(Message::decode(&bytes[..cut]), None, "{message:?} cut to {cut}");
            }
            bytes.push(0);
            assert_eq!(Message::decode(&bytes), None);
        }
    }

    #[test]
    fn corrupt_bytes_never_panic() {
        for message in messages() {
            let mut bytes = Vec::new();
            message.encode(&mut bytes);
            for at in 0..bytes.len() {
                for value in [0, 1, 0x7f, 0xff] {
                    let mut broken = bytes.clone();
                    broken[at] = value;
                    if let Some(read) = Message::decode(&broken) {
                        let mut again = Vec::new();
                        read.encode(&mut again);
                        assert_eq!(Message::decode(&again), Some(read));
                    }
                }
            }
        }
    }
}
