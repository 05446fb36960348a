//! Messages of the failure detector, as JSON. Lists are limited; what is out of range gives `None`.

use serde::{Deserialize, Deserializer, Serialize};

use super::monitor::Report;
use super::verdict::Verdict;
use crate::bootstrap::one_line;

const MAX_WAITS: usize = 256;
const MAX_REACHES: usize = 4096;
const MAX_PENDING: usize = 64;
pub(super) const MAX_REASON: usize = 1024;

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
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
    pub(crate) fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut message: Self = serde_json::from_slice(bytes).ok()?;
        if let Self::Reply { report, .. } = &mut message {
            if report.finished > report.begun || report.finished == u64::MAX {
                return None;
            }
            report.pending.truncate(MAX_PENDING);
            report.waits.iter_mut().for_each(|waits| waits.truncate(MAX_WAITS));
            report
                .reachable
                .iter_mut()
                .for_each(|ranks| ranks.truncate(MAX_REACHES));
        }
        Some(message)
    }
}

/// A member's text, in one line of limited length.
pub(super) fn reason<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    String::deserialize(deserializer).map(|text| one_line(&text, MAX_REASON))
}

#[cfg(test)]
mod tests {
    use super::super::monitor::{Awaited, Wait};
    use super::super::verdict::{Cause, Stuck};
    use super::*;
    use crate::plan::Collective;
    use crate::types::Rank;

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
            let mut bytes = message.encode();
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
            let bytes = message.encode();
            for at in 0..bytes.len() {
                for value in [0, 0x7f, 0xff, b'9', b'"', b','] {
                    let mut broken = bytes.clone();
                    broken[at] = value;
                    if let Some(read) = Message::decode(&broken) {
                        assert_eq!(Message::decode(&read.encode()), Some(read));
                    }
                }
            }
        }
    }

    #[test]
    fn reports_are_limited_and_texts_are_of_one_line() {
        let report = Report {
            begun: 1000,
            pending: vec![None; 1000],
            waits: Some(Vec::new()),
            reachable: Some(vec![Rank(0); 5000]),
            ..Report::default()
        };
        let Some(Message::Reply { report, .. }) = Message::decode(&Message::Reply { number: 1, report }.encode())
        else {
            panic!("it is a reply");
        };
        assert_eq!(
            (report.pending.len(), report.reachable.unwrap().len()),
            (MAX_PENDING, MAX_REACHES)
        );
        for (begun, finished) in [(1, 2), (u64::MAX, u64::MAX)] {
            let report = Report {
                begun,
                finished,
                ..Report::default()
            };
            assert_eq!(Message::decode(&Message::Reply { number: 1, report }.encode()), None);
        }
        let of = |reason: String| Verdict {
            cause: Cause::Aborted { rank: Rank(0), reason },
            stuck: None,
        };
        let said = Message::Verdict(of(format!("a\nb{}", "c".repeat(2000))));
        let heard = Message::Verdict(of(format!("a b{}", "c".repeat(MAX_REASON - 3))));
        assert_eq!(Message::decode(&said.encode()), Some(heard));
    }
}
