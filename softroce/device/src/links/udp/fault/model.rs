//! The fault of each packet: a pure function of the seed and the packet's number, without clock or
//! I/O, so that the simulator and the link share it.

use super::FaultConfig;
use doorbell_roce_proto::Instant;
use std::time::Duration;

/// The longest delay of a packet that is to be overtaken.
const REORDER_SPAN: Duration = Duration::from_micros(100);

/// One changed byte. A CRC-32 detects it for certain, as it is a burst of at most 8 bits; but the
/// ICRC does not cover a packet's fifth byte, of FECN and BECN.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Corruption {
    /// Which byte of the packet.
    pub offset: usize,
    /// What it is xored with; not 0.
    pub mask: u8,
}

impl Corruption {
    /// Changes the byte; nothing when the packet is too short.
    pub fn apply(self, packet: &mut [u8]) {
        if let Some(byte) = packet.get_mut(self.offset) {
            *byte ^= self.mask;
        }
    }
}

/// One arrival of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Delivery {
    /// When it arrives.
    pub at: Instant,
    /// How it is corrupted, if it is.
    pub corruption: Option<Corruption>,
    /// A switch marks it, if it is ECN-capable.
    pub marked: bool,
}

/// Decides the faults of one packet after another.
#[derive(Clone, Debug)]
pub struct FaultModel {
    config: FaultConfig,
    packets: u64,
    /// When the port has sent what it took, at its rate.
    free_at: Instant,
}

impl FaultModel {
    /// The model of `config`, before its first packet.
    pub fn new(config: FaultConfig) -> Self {
        Self {
            config,
            packets: 0,
            free_at: Instant::ZERO,
        }
    }

    /// For how long, from `now` on, the port sends what it took.
    pub(super) fn backlog(&self, now: Instant) -> Duration {
        self.free_at - now
    }

    /// When a packet of `len` bytes that the port takes at `now` has been sent.
    fn send(&mut self, now: Instant, len: usize) -> Instant {
        let nanoseconds = (len as u64 * 8 * 1_000_000_000).checked_div(self.config.rate);
        nanoseconds.map_or(now, |nanoseconds| {
            self.free_at = now.max(self.free_at) + Duration::from_nanos(nanoseconds);
            self.free_at
        })
    }

    /// The arrivals of the next packet, which is `len` bytes long and sent at `now`: none when it
    /// is dropped, two when it is duplicated. A duplicate is never corrupted and never reordered.
    pub fn decide(&mut self, now: Instant, len: usize) -> impl Iterator<Item = Delivery> + use<> {
        // One random stream per packet: the draws of one fault do not shift the others.
        let mut draw = Draw::new(self.config.seed, self.packets);
        self.packets += 1;
        let dropped = draw.happens(self.config.drop);
        let duplicated = draw.happens(self.config.duplicate);
        let reordered = draw.happens(self.config.reorder);
        let corrupted = draw.happens(self.config.corrupt) && len > 0;
        let held = Duration::from_nanos(1 + draw.below(REORDER_SPAN.as_nanos() as u64));
        let corruption = Corruption {
            offset: draw.below(len.max(1) as u64) as usize,
            mask: 1 + draw.below(255) as u8,
        };
        let marked = draw.happens(self.config.mark);
        let at = self.send(now, len) + self.config.delay;
        let original = Delivery {
            at: if reordered { at + held } else { at },
            corruption: corrupted.then_some(corruption),
            marked,
        };
        let duplicate = Delivery {
            at,
            corruption: None,
            marked,
        };
        let arrivals = [Some(original), duplicated.then_some(duplicate)];
        arrivals.into_iter().flatten().filter(move |_| !dropped)
    }

    /// Gives `arrive` each arrival of `packet`, corrupted where decided, with its time.
    pub fn apply<P>(&mut self, now: Instant, packet: P, mut arrive: impl FnMut(Instant, P))
    where
        P: Clone + AsRef<[u8]> + AsMut<[u8]>,
    {
        for delivery in self.decide(now, packet.as_ref().len()) {
            let mut copy = packet.clone();
            if let Some(corruption) = delivery.corruption {
                corruption.apply(copy.as_mut());
            }
            arrive(delivery.at, copy);
        }
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014); our own, so that seeds keep their meaning.
struct Draw {
    state: u64,
}

impl Draw {
    fn new(seed: u64, packet: u64) -> Self {
        let mut outer = Self { state: seed };
        let start = outer.next();
        let mut inner = Self {
            state: start ^ packet.wrapping_mul(0xD6E8_FEB8_6659_FD93),
        };
        Self { state: inner.next() }
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// True with the given probability. 53 bits, as many as an f64 in [0, 1) holds.
    fn happens(&mut self, probability: f64) -> bool {
        let uniform = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        uniform < probability
    }

    /// A number below `bound`, which is not 0.
    fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }
}
