//! Every mix of memories, operations and sizes, byte for byte; and what is to be refused, cut off or taken back.

use std::net::IpAddr;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use doorbell_verbs_sys::{IBV_WC_REM_ACCESS_ERR, IBV_WC_SUCCESS};

use crate::Options;
use crate::end::{Card, DEPTH, End, Op, Part};
use crate::far::Far;

/// Before and behind what is written, bytes that are to stay.
const GUARD: usize = 64;
/// Where ranges begin: on a boundary, and off it.
const OFFSETS: [usize; 2] = [4096, 4096 + 13];

/// A WRITE with immediate data is one without, but for its end: it need not be as long.
const LONGEST_WITH_IMMEDIATE: usize = 16 << 20;

/// Two ends that are connected.
struct Pair {
    near: End,
    far: Far,
    /// The far end's.
    card: Card,
    /// Patterns so far: each has its own.
    seed: u64,
}

impl Pair {
    fn new(options: &Options, address: IpAddr, two: bool, len: usize) -> Result<Self> {
        let near = End::new(len, options.gpus)?;
        let (mut far, card) = if two {
            Far::spawn(address, len, options.gpus)?
        } else {
            let end = End::new(len, options.gpus)?;
            let card = end.card()?;
            (Far::Here(Box::new(end)), card)
        };
        near.connect(&card)?;
        far.connect(&near.card()?)?;
        Ok(Self {
            near,
            far,
            card,
            seed: 1,
        })
    }

    fn seed(&mut self) -> u64 {
        self.seed += 1;
        self.seed
    }

    /// The far end's address for a part of its memory.
    fn to(&self, part: Part) -> (u64, u32) {
        let (addr, rkey) = self.card.regions[part.region];
        (addr + part.at as u64, rkey)
    }

    /// One request between two parts of the same length, and what it did.
    fn exchange(&mut self, op: Op, here: Part, there: Part, inline: bool) -> Result<()> {
        let len = here.len;
        let seeds = [self.seed(), self.seed(), self.seed(), self.seed()];
        let before = |part: Part| Part {
            at: part.at - GUARD,
            len: GUARD,
            ..part
        };
        let behind = |part: Part| Part {
            at: part.at + part.len,
            len: GUARD,
            ..part
        };
        if op == Op::Read {
            self.far.fill(there, seeds[0])?;
            let memory = &self.near.regions[here.region].memory;
            for (part, seed) in [(here, seeds[1]), (before(here), seeds[2]), (behind(here), seeds[3])] {
                memory.fill(part.at, part.len, seed)?;
            }
            self.near.post(op, &[here], self.to(there), false)?;
            self.near.done()?;
            for (part, seed) in [(here, seeds[0]), (before(here), seeds[2]), (behind(here), seeds[3])] {
                let differs = memory.differs(part.at, part.len, seed)?;
                ensure!(differs.is_none(), "byte {} of {part:?} is wrong", differs.unwrap_or(0));
            }
            return Ok(());
        }
        self.near.regions[here.region].memory.fill(here.at, len, seeds[0])?;
        for (part, seed) in [(there, seeds[1]), (before(there), seeds[2]), (behind(there), seeds[3])] {
            self.far.fill(part, seed)?;
        }
        match op {
            Op::Send => self.far.receive(there)?,
            Op::WriteImm => self.far.receive(Part { len: 0, ..there })?,
            _ => {}
        }
        self.near.post(op, &[here], self.to(there), inline)?;
        if op != Op::Write {
            let received = self.far.received()?;
            ensure!(received as usize == len, "{received} bytes were received");
        }
        self.near.done()?;
        for (part, seed) in [(there, seeds[0]), (before(there), seeds[2]), (behind(there), seeds[3])] {
            let differs = self.far.differs(part, seed)?;
            ensure!(differs.is_none(), "byte {} of {part:?} is wrong", differs.unwrap_or(0));
        }
        Ok(())
    }
}

/// Does all of it; whether all was right.
pub(crate) fn run(options: &Options, address: IpAddr) -> Result<bool> {
    let mut right = true;
    let ways = [
        ("one process", false, options.one),
        ("two processes", true, options.two),
    ];
    for (way, two, wanted) in ways {
        if !wanted {
            continue;
        }
        for (name, what, part) in PARTS {
            if options.only.as_deref().is_some_and(|only| only != name) {
                continue;
            }
            let since = Instant::now();
            let result = part(options, address, two);
            let seconds = since.elapsed().as_secs_f64();
            match result {
                Ok(Some(said)) => println!("PASS {way}: {what}{said}, {seconds:.1} s"),
                Ok(None) => {}
                Err(error) => {
                    println!("FAIL {way}: {what}: {error:#}");
                    right = false;
                }
            }
        }
    }
    Ok(right)
}

/// What there is to check between two ends, in one process or in two; `None` where it is nothing for the one or the other.
type Check = fn(&Options, IpAddr, bool) -> Result<Option<String>>;

/// Each with its name for `--only`.
pub(crate) const PARTS: [(&str, &str, Check); 10] = [
    ("mixes", "every mix", mixes),
    ("lists", "scattered and gathered", lists),
    ("inline", "what is inline", inline),
    ("order", "many at once, and the order of what they write", order),
    ("over", "what is written over what came before", over),
    ("raw", "a READ of what is being written", read_after_write),
    ("key", "a wrong key is refused", refused),
    ("atomic", "an atomic is refused", atomic),
    ("deregister", "a region that goes", deregistered),
    ("kill", "a far end that is killed", killed),
];

fn sizes(options: &Options) -> Vec<usize> {
    let short = [1, 7, 8, 63, 64, 255, 256, 1000, 4096];
    let long = [4097, 65_537, 256 << 10, (256 << 10) + 1, 1 << 20, (3 << 20) + 5];
    let longest = [16 << 20, (64 << 20) + 1, 256 << 20, 1 << 30];
    let all = short.into_iter().chain(long).chain(longest);
    all.filter(|&size| size <= options.largest).collect()
}

fn mixes(options: &Options, address: IpAddr, two: bool) -> Result<Option<String>> {
    let mut pair = Pair::new(options, address, two, options.largest + 3 * 4096)?;
    let mut count = 0;
    let names: Vec<_> = pair.near.regions.iter().map(|region| region.name.clone()).collect();
    for near in 0..names.len() {
        for far in 0..names.len() {
            let (since, before) = (Instant::now(), count);
            let (one, other) = (&names[near], &names[far]);
            for op in Op::MOVING {
                for (turn, len) in sizes(options).into_iter().enumerate() {
                    if op == Op::WriteImm && len > LONGEST_WITH_IMMEDIATE {
                        continue;
                    }
                    // All of both ends' boundaries come about, over the sizes.
                    let (at, to) = (OFFSETS[turn % 2], OFFSETS[turn / 2 % 2]);
                    let here = Part { region: near, at, len };
                    let there = Part {
                        region: far,
                        at: to,
                        len,
                    };
                    pair.exchange(op, here, there, false)
                        .with_context(|| format!("{} of {len} bytes, {one} and {other}", op.name()))?;
                    count += 1;
                }
            }
            let seconds = since.elapsed().as_secs_f64();
            println!("     {one} and {other}: {} exchanges, {seconds:.1} s", count - before);
        }
    }
    Ok(Some(format!(", {count} exchanges")))
}

/// Messages of several pieces, of the host and of GPUs, one behind the other.
fn lists(options: &Options, address: IpAddr, two: bool) -> Result<Option<String>> {
    const PIECES: [usize; 4] = [100_001, 7, 300_000, 65_536];
    const TIMES: usize = 4;
    let mut pair = Pair::new(options, address, two, 2 << 20)?;
    let regions = pair.near.regions.len();
    let targets = [0, regions - 1];
    for (op, region) in [Op::Write, Op::Read, Op::Send]
        .into_iter()
        .flat_map(|op| targets.map(|region| (op, region)))
    {
        let len: usize = PIECES.iter().sum();
        let there = Part { region, at: 64, len };
        let seeds: Vec<u64> = PIECES.iter().map(|_| pair.seed()).collect();
        let mut parts = Vec::new();
        let mut at = 0;
        for (index, len) in PIECES.into_iter().enumerate() {
            parts.push(Part {
                region: index % regions,
                at: 4096 + at,
                len,
            });
            at += len + 32;
        }
        let mut begin = there.at;
        for (part, seed) in parts.iter().zip(&seeds) {
            let piece = Part {
                at: begin,
                len: part.len,
                ..there
            };
            if op == Op::Read {
                pair.far.fill(piece, *seed)?;
            } else {
                pair.near.regions[part.region].memory.fill(part.at, part.len, *seed)?;
                pair.far.fill(piece, seed + 1000)?;
            }
            begin += part.len;
        }
        for _ in 0..TIMES {
            if op == Op::Send {
                pair.far.receive(there)?;
            }
        }
        for _ in 0..TIMES {
            pair.near.post(op, &parts, pair.to(there), false)?;
        }
        if op == Op::Send {
            for _ in 0..TIMES {
                pair.far.received()?;
            }
        }
        for _ in 0..TIMES {
            pair.near.done()?;
        }
        let mut begin = there.at;
        for (part, seed) in parts.iter().zip(&seeds) {
            let piece = Part {
                at: begin,
                len: part.len,
                ..there
            };
            let differs = if op == Op::Read {
                pair.near.regions[part.region]
                    .memory
                    .differs(part.at, part.len, *seed)?
            } else {
                pair.far.differs(piece, *seed)?
            };
            ensure!(differs.is_none(), "{} of several pieces: {part:?}", op.name());
            begin += part.len;
        }
    }
    Ok(Some(String::new()))
}

fn inline(options: &Options, address: IpAddr, two: bool) -> Result<Option<String>> {
    let mut pair = Pair::new(options, address, two, 1 << 16)?;
    for far in 0..pair.card.regions.len() {
        for op in [Op::Write, Op::Send] {
            for len in [1, 8, 33, 64] {
                let part = |region| Part { region, at: 4096, len };
                pair.exchange(op, part(0), part(far), true)?;
            }
        }
    }
    Ok(Some(String::new()))
}

/// Many WRITEs on their way at once, to memory of all kinds by turns, and a SEND behind them: what it tells of is there.
fn order(options: &Options, address: IpAddr, two: bool) -> Result<Option<String>> {
    const ROUNDS: u64 = 8;
    const LEN: usize = 300_000;
    let many = DEPTH as usize - 1;
    let mut pair = Pair::new(options, address, two, many * LEN + 8192)?;
    let (near, far) = (pair.near.regions.len(), pair.card.regions.len());
    for round in 0..ROUNDS {
        let part = |index: usize, regions: usize| Part {
            region: (index + round as usize) % regions,
            at: 4096 + index * LEN,
            // Long and short by turns.
            len: if index.is_multiple_of(3) { 8 } else { LEN },
        };
        let seeds: Vec<u64> = (0..many).map(|_| pair.seed()).collect();
        for (index, seed) in seeds.iter().enumerate() {
            let here = part(index, near);
            pair.near.regions[here.region].memory.fill(here.at, here.len, *seed)?;
        }
        let word = Part {
            region: 0,
            at: 0,
            len: 8,
        };
        pair.far.receive(word)?;
        for index in 0..many {
            let (here, there) = (part(index, near), part(index, far));
            pair.near.post(Op::Write, &[here], pair.to(there), false)?;
        }
        pair.near.post(Op::Send, &[word], (0, 0), false)?;
        // Both ends may be this thread's.
        pair.far.received()?;
        for (index, seed) in seeds.iter().enumerate() {
            let there = part(index, far);
            let differs = pair.far.differs(there, *seed)?;
            ensure!(
                differs.is_none(),
                "round {round}: WRITE {index}, {there:?}, was not there"
            );
        }
        for _ in 0..=many {
            pair.near.done()?;
        }
    }
    Ok(Some(String::new()))
}

/// WRITEs on their way together, of which each begins in what the one before writes and covers its end: the later ones' bytes are there in the end. As often as it takes for the target to be pinned, where it is the host's.
fn over(options: &Options, address: IpAddr, two: bool) -> Result<Option<String>> {
    const ROUNDS: usize = 12;
    /// Where each begins, and how long it is.
    const WRITES: [(usize, usize); 4] = [
        (4096, 300_000),
        (100_003, 500_000),
        (590_000, 90_001),
        (600_007, 262_144),
    ];
    let mut pair = Pair::new(options, address, two, 2 << 20)?;
    for near in 0..pair.near.regions.len() {
        for far in 0..pair.card.regions.len() {
            for round in 0..ROUNDS {
                let mut at = 0;
                let mut seeds = Vec::new();
                for (to, len) in WRITES {
                    let here = Part { region: near, at, len };
                    seeds.push(pair.seed());
                    let seed = seeds[seeds.len() - 1];
                    pair.near.regions[near].memory.fill(at, len, seed)?;
                    at += len;
                    let there = Part {
                        region: far,
                        at: to,
                        len,
                    };
                    pair.near.post(Op::Write, &[here], pair.to(there), false)?;
                }
                for _ in WRITES {
                    pair.near.done()?;
                }
                for (index, (start, len)) in WRITES.into_iter().enumerate() {
                    let end = WRITES.get(index + 1).map_or(start + len, |next| next.0);
                    let there = Part {
                        region: far,
                        at: start,
                        len: end - start,
                    };
                    let differs = pair.far.differs(there, seeds[index])?;
                    ensure!(
                        differs.is_none(),
                        "round {round}, from {near} to {far}: byte {} of write {index} is wrong",
                        differs.unwrap_or(0)
                    );
                }
            }
        }
    }
    Ok(Some(String::new()))
}

/// A READ behind a WRITE finds what that wrote.
fn read_after_write(options: &Options, address: IpAddr, two: bool) -> Result<Option<String>> {
    let mut pair = Pair::new(options, address, two, 4 << 20)?;
    for far in 0..pair.card.regions.len() {
        for len in [8, 100, 1 << 20] {
            let region = pair.near.regions.len() - 1;
            let (from, into) = (
                Part { region, at: 0, len },
                Part {
                    region: 0,
                    at: 2 << 20,
                    len,
                },
            );
            let there = Part {
                region: far,
                at: 1 << 20,
                len,
            };
            let seed = pair.seed();
            pair.near.regions[region].memory.fill(0, len, seed)?;
            pair.near.post(Op::Write, &[from], pair.to(there), false)?;
            pair.near.post(Op::Read, &[into], pair.to(there), false)?;
            pair.near.done()?;
            pair.near.done()?;
            let differs = pair.near.regions[0].memory.differs(into.at, len, seed)?;
            ensure!(differs.is_none(), "{len} bytes were read before they were written");
        }
    }
    Ok(Some(String::new()))
}

/// A key that is none, and a range that is too long.
fn refused(options: &Options, address: IpAddr, two: bool) -> Result<Option<String>> {
    let len = 1 << 16;
    for wrong in [0, 1] {
        let pair = Pair::new(options, address, two, len)?;
        let gpu = pair.near.regions.len() - 1;
        let (addr, rkey) = pair.card.regions[gpu];
        let (addr, rkey) = [(addr, rkey ^ 1), (addr + 1, rkey)][wrong];
        let all = Part {
            region: gpu,
            at: 0,
            len,
        };
        pair.near.post(Op::Write, &[all], (addr, rkey), false)?;
        let status = pair.near.wait()?.status;
        ensure!(status == IBV_WC_REM_ACCESS_ERR, "status {status}");
    }
    Ok(Some(String::new()))
}

fn atomic(options: &Options, address: IpAddr, two: bool) -> Result<Option<String>> {
    let pair = Pair::new(options, address, two, 1 << 16)?;
    let gpu = pair.near.regions.len() - 1;
    let word = Part {
        region: 0,
        at: 0,
        len: 8,
    };
    let to = pair.to(Part { region: gpu, ..word });
    pair.near.post(Op::Atomic, &[word], to, false)?;
    let status = pair.near.wait()?.status;
    ensure!(status == IBV_WC_REM_ACCESS_ERR, "status {status}");
    Ok(Some(String::new()))
}

/// The target goes while WRITEs are on their way to it: they complete, or fail, and nothing else happens.
fn deregistered(options: &Options, address: IpAddr, two: bool) -> Result<Option<String>> {
    let len = 4 << 20;
    for _ in 0..4 {
        let mut pair = Pair::new(options, address, two, len)?;
        let gpu = pair.near.regions.len() - 1;
        let part = Part {
            region: gpu,
            at: 0,
            len,
        };
        for _ in 0..8 {
            pair.near.post(Op::Write, &[part], pair.to(part), false)?;
        }
        pair.far.deregister(gpu)?;
        for _ in 0..8 {
            pair.near.wait()?;
        }
    }
    Ok(Some(String::new()))
}

/// The far end dies while WRITEs are on their way, and READs from it.
fn killed(options: &Options, address: IpAddr, two: bool) -> Result<Option<String>> {
    if !two {
        return Ok(None);
    }
    let len = 4 << 20;
    for op in [Op::Write, Op::Read] {
        let mut pair = Pair::new(options, address, true, len)?;
        let gpu = pair.near.regions.len() - 1;
        let part = Part {
            region: gpu,
            at: 0,
            len,
        };
        for _ in 0..DEPTH {
            pair.near.post(op, &[part], pair.to(part), false)?;
        }
        pair.far.kill()?;
        let mut failed = 0;
        for _ in 0..DEPTH {
            failed += u32::from(pair.near.wait()?.status != IBV_WC_SUCCESS);
        }
        pair.near.post(Op::Write, &[part], pair.to(part), false)?;
        failed += u32::from(pair.near.wait()?.status != IBV_WC_SUCCESS);
        ensure!(failed > 0, "nothing failed");
    }
    // The memory here is as good as before.
    let mut pair = Pair::new(options, address, true, len)?;
    let gpu = pair.near.regions.len() - 1;
    let part = Part {
        region: gpu,
        at: 4096,
        len: 1 << 20,
    };
    pair.exchange(Op::Write, part, part, false)?;
    Ok(Some(String::new()))
}
