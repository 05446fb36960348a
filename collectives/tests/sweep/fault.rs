//! A fault as a line of text: kind, rank and time.

use std::fmt;
use std::net::Ipv4Addr;

use doorbell_collectives::moe::Mode;
use doorbell_collectives::plan::Collective;
use doorbell_collectives::{Algorithm, Protocol};

pub(crate) const RANKS: u32 = 5;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Wire {
    SharedMemory,
    Udp,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Kind {
    Kill,
    Stop,
    /// All links of a rank.
    Cut,
    /// The link between two.
    Link,
}

impl Kind {
    pub(crate) const ALL: [Self; 4] = [Self::Kill, Self::Stop, Self::Cut, Self::Link];
}

/// A fault in an operation, at a step. Ranks are numbered as at the beginning.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    pub(crate) kind: Kind,
    pub(crate) rank: u32,
    pub(crate) peer: u32,
    /// Drive steps, or, where the operation reduces, reductions before the fault.
    pub(crate) step: u32,
    pub(crate) way: usize,
    pub(crate) protocol: Protocol,
}

/// What the ranks do when the fault happens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    Collective(Collective, Algorithm),
    /// A dispatch and its combine.
    Moe(Mode),
}

impl Way {
    /// Whether an operator is called in which the fault can happen.
    pub(crate) fn reduces(self) -> bool {
        matches!(self, Self::Collective(collective, _) if collective.reduces())
    }
}

/// The operations that can be started and then driven step by step, collectives by each supporting
/// algorithm.
pub(crate) fn variants() -> Vec<Way> {
    let not = [Collective::Barrier, Collective::AllToAllV];
    let all = Collective::ALL.iter().filter(|collective| !not.contains(collective));
    let by_all = |&collective: &Collective| Algorithm::of(collective).map(move |by| Way::Collective(collective, by));
    all.flat_map(by_all)
        .chain(Mode::ALL.iter().copied().map(Way::Moe))
        .collect()
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            kind,
            rank,
            peer,
            step,
            way,
            protocol,
        } = self;
        let protocol = Protocol::ALL.iter().position(|one| one == protocol).unwrap();
        write!(f, "{kind:?} {rank} {peer} {step} {way} {protocol}")
    }
}

impl Fault {
    pub(crate) fn read(text: &str) -> Self {
        let (kind, rest) = text.split_once(' ').unwrap();
        let words: Vec<u32> = rest.split(' ').map(|word| word.parse().unwrap()).collect();
        let named = |known: &&Kind| format!("{known:?}") == kind;
        Self {
            kind: *Kind::ALL.iter().find(named).unwrap(),
            rank: words[0],
            peer: words[1],
            step: words[2],
            way: words[3] as usize,
            protocol: Protocol::ALL[words[4] as usize],
        }
    }

    /// The rank that leaves the group. Of two that cannot reach each other it is the higher one.
    pub(crate) fn gone(&self) -> u32 {
        match self.kind {
            Kind::Link => self.rank.max(self.peer),
            _ => self.rank,
        }
    }

    pub(crate) fn way(&self) -> Way {
        variants()[self.way]
    }
}

/// A run with dispatch and combine for each mode.
pub(crate) fn runs_of_moe() -> Vec<u32> {
    let variants = variants();
    let moe = (0..variants.len()).filter(|&way| matches!(variants[way], Way::Moe(_)));
    // Each begins with another kind.
    moe.zip(0..)
        .map(|(way, kind)| (way + kind * variants.len()) as u32)
        .collect()
}

pub(crate) fn all() -> u32 {
    variants().len() as u32 * Kind::ALL.len() as u32
}

/// The faults of a run: all numbers of ranks from five down, each kind once, with one algorithm.
/// Runs 0 to `all() - 1` have each algorithm with each kind among each number of ranks.
pub(crate) fn faults(run: u32) -> Vec<Fault> {
    const STEPS: [u32; 12] = [0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 144, 610];
    let variants = variants().len() as u32;
    let mut state = run.wrapping_mul(0x9e37_79b9);
    let mut draw = |below: u32| {
        // Linear congruential generator with Knuth's constants; the upper bits suffice.
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % below
    };
    let mut left: Vec<u32> = (0..RANKS).collect();
    let fault = |index: u32| {
        let mut kind = Kind::ALL[((run / variants + index) % 4) as usize];
        if kind == Kind::Cut && left.len() == 2 {
            // Two ranks have only one link.
            kind = Kind::Link;
        }
        let rank = draw(left.len() as u32) as usize;
        let peer = (rank + 1 + draw(left.len() as u32 - 1) as usize) % left.len();
        let fault = Fault {
            kind,
            rank: left[rank],
            peer: left[peer],
            step: STEPS[draw(STEPS.len() as u32) as usize],
            way: (run % variants) as usize,
            protocol: Protocol::ALL[(run + index) as usize % Protocol::ALL.len()],
        };
        left.retain(|rank| *rank != fault.gone());
        fault
    };
    (0..RANKS - 1).map(fault).collect()
}

/// No two runs over UDP share one, as blocked routes remain.
pub(crate) fn address(wire: Wire, process: u32, run: u32, rank: u32) -> Ipv4Addr {
    let [_, _, high, low] = process.to_be_bytes();
    match wire {
        Wire::SharedMemory => Ipv4Addr::new(127, 64 + high % 32, low, 10 + (run % 240) as u8),
        Wire::Udp => Ipv4Addr::new(127, 100 + (run / 250) as u8, (run % 250) as u8, 10 + rank as u8),
    }
}
