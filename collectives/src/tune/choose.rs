//! The choice of algorithm, protocol, channels and slice length.

use core::fmt::{self, Write};

use super::{Overrides, Rule, TuningFile};
use crate::algorithm::Algorithm;
use crate::cost::{Compute, DataMover, Link, blocks, predict_ns};
use crate::plan::Collective;
use crate::protocol::LineProtocol;
use crate::simulate::{self, Fabric, Work};
use crate::types::{DataType, Protocol, Rank};

const CHANNELS: [u32; 4] = [1, 2, 4, 8];
/// Slice lengths considered, besides the whole block.
const SLICES: [u64; 6] = [32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20];
/// Longest slice where processors move the bytes: as long as the messages by which costs are
/// measured. Longer ones take up to twice as long as predicted.
const MAX_MOVED_SLICE: u64 = 256 << 10;
const MAX_SIMULATED: usize = 40;
/// Simulated candidates per algorithm and protocol; maximum ratio of formula times to the best.
const MAX_PER_VARIANT: usize = 10;
const PROMISING: f64 = 2.0;
/// Maximum ranks for simulation: above, formulas are accurate enough and a simulation takes long.
const MAX_SIMULATED_RANKS: u32 = 64;

/// The operation to choose for.
#[derive(Clone, PartialEq, Debug)]
pub struct TuningRequest {
    /// The collective.
    pub collective: Collective,
    /// Bytes, as [`Work::bytes`] counts them.
    pub bytes: u64,
    /// The elements' type.
    pub data: DataType,
    /// The root.
    pub root: Rank,
    /// Whether the order of a reduction must not depend on slices, blocks and channels.
    pub deterministic: bool,
}

/// How an operation is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Choice {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The protocol.
    pub protocol: Protocol,
    /// The number of channels.
    pub channels: u32,
    /// Maximum bytes of a block per slice.
    pub slice_bytes: u64,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let channels = if self.channels == 1 {
            "1 channel".to_owned()
        } else {
            format!("{} channels", self.channels)
        };
        write!(
            f,
            "{}, {}, {channels}, slices of {}",
            self.algorithm,
            self.protocol,
            Bytes(self.slice_bytes)
        )
    }
}

/// A candidate.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Candidate {
    /// The choice.
    pub choice: Choice,
    /// Time by the formula, ns.
    pub formula_ns: f64,
    /// Time by simulation, if it was simulated.
    pub simulated_ns: Option<f64>,
}

impl Candidate {
    /// The better of the two predictions, ns.
    #[must_use]
    pub fn predicted_ns(&self) -> f64 {
        self.simulated_ns.unwrap_or(self.formula_ns)
    }
}

/// Why there is no choice.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoChoice {
    /// No ranks.
    #[error("a collective needs one rank at least")]
    NoRanks,
    /// No algorithm is deterministic.
    #[error("no algorithm does {0} in an order that is the same for every element: do not set `deterministic`")]
    Deterministic(Collective),
}

/// A choice and its alternatives.
#[derive(Clone, PartialEq, Debug)]
pub struct Decision {
    /// The choice.
    pub choice: Choice,
    /// Predicted time, ns.
    pub predicted_ns: f64,
    /// The best candidate of each algorithm and protocol, the best first.
    pub candidates: Vec<Candidate>,
    /// The reason, in one line.
    pub reason: String,
}

impl Decision {
    /// The candidates as a table, and the reason below it.
    #[must_use]
    pub fn explain(&self) -> String {
        let mut text = format!(
            "{:<20} {:<8} {:>8} {:>9} {:>14} {:>14}\n",
            "#algorithm", "protocol", "channels", "slice", "formula[us]", "simulated[us]"
        );
        for Candidate {
            choice,
            formula_ns,
            simulated_ns,
        } in &self.candidates
        {
            let simulated = simulated_ns.map_or_else(|| "-".to_owned(), |ns| format!("{:.2}", ns / 1e3));
            let _ = writeln!(
                text,
                "{:<20} {:<8} {:>8} {:>9} {:>14.2} {simulated:>14}",
                choice.algorithm,
                choice.protocol,
                choice.channels,
                Bytes(choice.slice_bytes).to_string(),
                formula_ns / 1e3,
            );
        }
        text + &self.reason + "\n"
    }
}

/// The parameters of choices: all ranks have to choose alike, so one rank distributes them
/// ([`TuningFile`] has a text form for costs and rules).
#[derive(Clone, PartialEq, Debug)]
pub struct Tuner {
    /// Between ranks of one host.
    pub local: Link,
    /// Between hosts.
    pub remote: Link,
    /// Local work of a rank.
    pub compute: Compute,
    /// Maximum number of channels.
    pub channels: u32,
    /// Overrides for all operations.
    pub overrides: Overrides,
    /// Overrides for some operations.
    pub rules: Vec<Rule>,
}

impl Tuner {
    /// With these costs and no overrides.
    #[must_use]
    pub fn new(local: Link, remote: Link, compute: Compute, channels: u32) -> Self {
        Self {
            local,
            remote,
            compute,
            channels: channels.max(1),
            overrides: Overrides::default(),
            rules: Vec::new(),
        }
    }

    /// With a file's costs and rules instead.
    #[must_use]
    pub fn with_file(mut self, file: TuningFile) -> Self {
        self.local = file.local.unwrap_or(self.local);
        self.remote = file.remote.unwrap_or(self.remote);
        self.compute = file.compute.unwrap_or(self.compute);
        self.rules.extend(file.rules);
        self
    }

    /// Chooses for `question` among ranks on `hosts`. It takes some milliseconds: cache the result.
    ///
    /// # Errors
    /// [`NoChoice`]. Overrides that do not apply to the collective are ignored, as the reason
    /// states.
    pub fn choose(&self, question: &TuningRequest, hosts: &[u32], order: &[Rank]) -> Result<Decision, NoChoice> {
        if hosts.is_empty() {
            return Err(NoChoice::NoRanks);
        }
        let mut notes = Vec::new();
        let rule = self.rules.iter().find(|rule| rule.is_for(question, hosts.len() as u32));
        let forced = self.overrides.over(rule.map_or_else(Overrides::default, Rule::forced));
        let algorithms = Self::algorithms(question, &forced, &mut notes)?;
        let mut candidates = self.candidates(question, hosts, &algorithms, &forced);
        by_time(&mut candidates);
        if hosts.len() as u32 <= MAX_SIMULATED_RANKS {
            let enough = candidates[0].formula_ns * PROMISING;
            let mut tried = Vec::new();
            for candidate in &mut candidates {
                let way = (candidate.choice.algorithm, candidate.choice.protocol);
                let before = tried.iter().filter(|other| **other == way).count();
                if candidate.formula_ns <= enough && before < MAX_PER_VARIANT && tried.len() < MAX_SIMULATED {
                    candidate.simulated_ns = self.predict_ns(question, hosts, order, &candidate.choice);
                    tried.push(way);
                }
            }
            candidates[..].sort_by(|a, b| {
                (a.simulated_ns.is_none(), a.predicted_ns())
                    .partial_cmp(&(b.simulated_ns.is_none(), b.predicted_ns()))
                    .unwrap_or(core::cmp::Ordering::Equal)
            });
        }
        let mut seen = Vec::new();
        candidates.retain(|candidate| {
            let way = (candidate.choice.algorithm, candidate.choice.protocol);
            let new = !seen.contains(&way);
            seen.push(way);
            new
        });
        let best = candidates[0];
        if let Some(rule) = rule {
            notes.push(format!("the tuning file's rule for {rule} was followed"));
        }
        Ok(Decision {
            choice: best.choice,
            predicted_ns: best.predicted_ns(),
            reason: reason(&candidates, &forced, &notes),
            candidates,
        })
    }

    fn algorithms(
        question: &TuningRequest,
        forced: &Overrides,
        notes: &mut Vec<String>,
    ) -> Result<Vec<Algorithm>, NoChoice> {
        let collective = question.collective;
        let fits = |algorithm: &Algorithm| !question.deterministic || algorithm.deterministic(collective);
        let possible: Vec<Algorithm> = Algorithm::of(collective).filter(fits).collect();
        if possible.is_empty() {
            return Err(NoChoice::Deterministic(collective));
        }
        match forced.algorithm {
            Some(algorithm) if possible.contains(&algorithm) => Ok(vec![algorithm]),
            Some(algorithm) => {
                let why = if algorithm.supports(collective) {
                    "is not deterministic for"
                } else {
                    "does not do"
                };
                notes.push(format!("{algorithm} was selected, which {why} {collective}"));
                Ok(possible)
            }
            None => Ok(possible),
        }
    }

    fn candidates(
        &self,
        question: &TuningRequest,
        hosts: &[u32],
        algorithms: &[Algorithm],
        forced: &Overrides,
    ) -> Vec<Candidate> {
        let ranks = hosts.len() as u32;
        let link = if hosts.iter().all(|host| *host == hosts[0]) {
            &self.local
        } else {
            &self.remote
        };
        let mut found = Vec::new();
        for &algorithm in algorithms {
            let block = question.bytes as f64 / f64::from(blocks(algorithm, question.collective, ranks).max(1));
            // Blocks have whole elements: the longest may have one more.
            let whole = (block.ceil() as u64).max(1) + question.data.bytes() as u64 - 1;
            for &protocol in Protocol::ALL
                .iter()
                .filter(|protocol| forced.protocol.is_none_or(|forced| forced == **protocol))
            {
                // A message longer than a ring of slots waits for the receiver, as Simple does.
                let ring = |lines: LineProtocol| (lines.slots() as usize * lines.capacity()) as f64;
                let limit = protocol.lines().map_or(f64::INFINITY, ring);
                if forced.protocol.is_none() && block > limit {
                    continue;
                }
                let longest = match link.data_mover {
                    DataMover::Device => u64::MAX,
                    DataMover::Processors => MAX_MOVED_SLICE,
                };
                let shorter = SLICES.into_iter().filter(|&slice| slice < whole);
                let possible = shorter.chain([whole]).filter(|&slice| slice <= longest);
                let slices: Vec<u64> = forced
                    .slice_bytes
                    .map_or_else(|| possible.collect(), |slice| vec![slice.min(whole)]);
                for slice_bytes in slices {
                    let most = self
                        .channels
                        .min(whole.div_ceil(slice_bytes).min(u64::from(u32::MAX)) as u32);
                    let channels: Vec<u32> = forced.channels.map_or_else(
                        || CHANNELS.into_iter().filter(|&channels| channels <= most).collect(),
                        |channels| vec![channels.clamp(1, self.channels)],
                    );
                    for channels in channels {
                        let choice = Choice {
                            algorithm,
                            protocol,
                            channels,
                            slice_bytes,
                        };
                        let work = work(question, &choice);
                        if let Some(formula_ns) =
                            predict_ns(algorithm, question.collective, ranks, link, &self.compute, &work)
                        {
                            found.push(Candidate {
                                choice,
                                formula_ns,
                                simulated_ns: None,
                            });
                        }
                    }
                }
            }
        }
        found
    }

    /// The hosts as a fabric.
    #[must_use]
    pub fn fabric(&self, hosts: &[u32]) -> Fabric {
        let most = hosts
            .iter()
            .map(|host| hosts.iter().filter(|other| *other == host).count())
            .max()
            .unwrap_or(1);
        Fabric {
            hosts: hosts.to_vec(),
            ..Fabric::grouped(0, most as u32, self.local, self.remote, self.compute)
        }
    }

    /// Simulated time of `choice` for `question`, ns; `None` if the algorithm does not support it.
    #[must_use]
    pub fn predict_ns(&self, question: &TuningRequest, hosts: &[u32], order: &[Rank], choice: &Choice) -> Option<f64> {
        let schedule = choice
            .algorithm
            .schedule(question.collective, order, question.root)
            .ok()?;
        simulate::repeated_ns(schedule.as_ref(), &self.fabric(hosts), &work(question, choice)).ok()
    }
}

fn by_time(candidates: &mut [Candidate]) {
    candidates.sort_by(|a, b| a.predicted_ns().total_cmp(&b.predicted_ns()));
}

fn work(question: &TuningRequest, choice: &Choice) -> Work {
    Work {
        bytes: question.bytes,
        data: question.data,
        protocol: choice.protocol,
        channels: choice.channels,
        slice_bytes: choice.slice_bytes,
    }
}

fn reason(candidates: &[Candidate], forced: &Overrides, notes: &[String]) -> String {
    let best = candidates[0];
    let mut text = format!("{}: {:.2} us predicted", best.choice, best.predicted_ns() / 1e3);
    let other = candidates
        .iter()
        .find(|candidate| candidate.choice.algorithm != best.choice.algorithm);
    match other {
        Some(next) => {
            let times = next.predicted_ns() / best.predicted_ns();
            let _ = write!(
                text,
                ", {times:.2} times as quick as the next algorithm, {}",
                next.choice.algorithm
            );
        }
        None if forced.algorithm == Some(best.choice.algorithm) => text.push_str(", as its algorithm was selected"),
        None => text.push_str(", the only algorithm"),
    }
    for note in notes {
        let _ = write!(text, "; {note}");
    }
    text
}

/// Formats bytes as 256K or 3M where that is exact.
struct Bytes(u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")];
        match units
            .into_iter()
            .find(|(unit, _)| self.0 > 0 && self.0.is_multiple_of(*unit))
        {
            Some((unit, name)) => write!(f, "{}{name}", self.0 / unit),
            None => write!(f, "{}", self.0),
        }
    }
}

#[cfg(test)]
mod tests;
