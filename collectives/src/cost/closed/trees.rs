//! Trees: time until a member has its subtree's data, and until the subtree has the member's.

use super::{RankWork, Rates, Slice};
use crate::plan::Collective;

#[derive(Clone, Copy)]
struct Arrival {
    path: f64,
    wire_free: f64,
}

#[derive(Clone, Copy)]
enum Message {
    Same(f64),
    /// A contribution of this length; a partial result, if there are members below.
    Partial(f64, f64),
    Parts(f64),
}

impl Message {
    fn bytes(self, size: u32) -> f64 {
        match self {
            Self::Same(bytes) => bytes,
            Self::Partial(element, partial) => {
                if size == 1 {
                    element
                } else {
                    partial
                }
            }
            Self::Parts(bytes) => bytes * f64::from(size),
        }
    }
}

fn subtrees(size: u32) -> impl DoubleEndedIterator<Item = u32> {
    let bits = u32::BITS - size.saturating_sub(1).leading_zeros();
    (0..bits).map(move |bit| (size - (1 << bit)).min(1 << bit))
}

impl Rates {
    pub(super) fn tree(&self, collective: Collective, ranks: u32, n: f64) -> Slice {
        let part = n / f64::from(ranks);
        let levels = subtrees(ranks).count() as f64;
        let total = |message: Message| subtrees(ranks).map(|size| message.bytes(size)).sum::<f64>();
        let (same, partial) = (Message::Same(n), Message::Partial(n, n * self.wide));
        let collect = |message: Message, reduces: bool, copied: f64| {
            let into = total(message);
            let reducing = if reduces { into * self.gamma } else { 0.0 };
            RankWork {
                receives: levels,
                into,
                reducing,
                copied,
                ..RankWork::default()
            }
        };
        let spread = |message: Message, copied: f64| RankWork {
            sends: levels,
            out: total(message),
            copied,
            ..RankWork::default()
        };
        let leaf = |bytes: f64| RankWork {
            receives: 1.0,
            into: bytes,
            ..RankWork::default()
        };
        let longest = |message: Message| subtrees(ranks).map(|size| message.bytes(size)).fold(0.0, f64::max);
        let to_root = |message: Message, reduces: bool, copied: f64| {
            let root = collect(message, reduces, copied);
            // The root of the largest subtree has as much below, and sends it on.
            let out = longest(message);
            let below = RankWork {
                sends: 1.0,
                receives: levels - 1.0,
                out,
                into: root.into - out,
                reducing: (root.reducing - out * self.gamma).max(0.0),
                copied,
            };
            Slice::pipelined(
                self.up(ranks, message, reduces).path,
                self.load(root).max(self.load(below)),
            )
        };
        match collective {
            Collective::Reduce => to_root(partial, true, 0.0),
            Collective::Gather => to_root(Message::Parts(part), false, part),
            Collective::Broadcast => self.rooted(self.down(ranks, same), leaf(n), spread(same, n)),
            Collective::Scatter => {
                let parts = Message::Parts(part);
                self.rooted(self.down(ranks, parts), leaf(longest(parts)), spread(parts, part))
            }
            _ => {
                let (rising, falling) = if collective == Collective::Barrier {
                    (Message::Same(0.0), Message::Same(0.0))
                } else {
                    (partial, same)
                };
                let reduces = collective.reduces();
                let duty = RankWork {
                    sends: levels,
                    out: total(falling),
                    ..collect(rising, reduces, 0.0)
                };
                Slice::coupled(
                    self.up(ranks, rising, reduces).path + self.down(ranks, falling),
                    self.load(duty),
                )
            }
        }
    }

    fn up(&self, size: u32, message: Message, reduces: bool) -> Arrival {
        let gamma = if reduces { self.gamma } else { 0.0 };
        let mut arrival = Arrival {
            path: 0.0,
            wire_free: 0.0,
        };
        for below in subtrees(size) {
            let bytes = message.bytes(below);
            let begins = self.up(below, message, reduces).path + self.giving(bytes);
            arrival.wire_free = arrival.wire_free.max(begins) + bytes * self.wire;
            let takes = self.receive + bytes * (self.take + gamma);
            arrival.path = arrival.path.max(arrival.wire_free + self.latency) + takes;
        }
        arrival
    }

    /// Time from when a binomial tree's root has the data until the last member has its part.
    fn down(&self, size: u32, message: Message) -> f64 {
        let (mut posted, mut wire_free, mut last) = (0.0, 0.0f64, 0.0f64);
        for below in subtrees(size).rev() {
            let bytes = message.bytes(below);
            posted += self.giving(bytes);
            wire_free = wire_free.max(posted) + bytes * self.wire;
            let there = wire_free + self.latency + self.receive + bytes * self.take;
            last = last.max(there + self.down(below, message));
        }
        last.max(posted)
    }

    /// Half of the bytes through each tree; the path is that of the second child.
    pub(super) fn double_tree(&self, collective: Collective, ranks: u32, n: f64) -> Slice {
        let half = n / 2.0;
        let wide = half * self.wide;
        let below_root = f64::from((ranks - 1).ilog2());
        // The root sends to (or receives from) both trees, as inner members with both children.
        let down = (1.0 + below_root) * self.stage(2.0, 1.0, half);
        let inner = if ranks > 2 { wide } else { half };
        let up = |bytes: f64| self.stage(1.0, 2.0, bytes) + 2.0 * bytes * self.gamma;
        let lowest = if below_root > 0.0 {
            up(half) + (below_root - 1.0) * up(wide)
        } else {
            0.0
        };
        let rises = lowest + up(inner);
        let most = 2.0 * inner;
        let root = RankWork {
            sends: 2.0,
            out: n,
            copied: n,
            ..RankWork::default()
        };
        let spread = RankWork {
            sends: 2.0,
            receives: 2.0,
            out: n,
            into: n,
            ..RankWork::default()
        };
        let reduce = RankWork {
            sends: 2.0,
            receives: 2.0,
            out: most,
            into: most,
            reducing: most * self.gamma,
            copied: 0.0,
        };
        match collective {
            Collective::Broadcast => self.rooted(
                half * self.copy + down,
                if ranks > 2 {
                    spread
                } else {
                    RankWork {
                        sends: 0.0,
                        out: 0.0,
                        ..spread
                    }
                },
                root,
            ),
            Collective::Reduce => Slice::pipelined(rises, self.load(reduce)),
            _ => {
                let both = RankWork {
                    sends: 4.0,
                    receives: 4.0,
                    out: most + n,
                    into: most + n,
                    ..reduce
                };
                Slice::coupled(rises + down, self.load(both))
            }
        }
    }
}
