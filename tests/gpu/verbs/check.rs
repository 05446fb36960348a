//! Every combination of memories, operations and sizes; and requests that are refused or fail.

use std::net::IpAddr;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use doorbell_verbs_sys::{IBV_WC_REM_ACCESS_ERR, IBV_WC_SUCCESS};

use crate::Options;
use crate::end::{DEPTH, End, EndpointInfo, Op, Part};
use crate::full_queue::FullQueue;
use crate::memory;
use crate::remote::RemoteEnd;

/// Guard bytes around the written range, which must not change.
const GUARD: usize = 64;
/// Range offsets: aligned, and unaligned.
const OFFSETS: [usize; 2] = [4096, 4096 + 13];

/// Its start is that of a plain WRITE, so it is not tested at full length.
const LONGEST_WITH_IMMEDIATE: usize = 16 << 20;

struct Pair {
    local: End,
    remote: RemoteEnd,
    info: EndpointInfo,
    /// The last pattern seed; each pattern has its own.
    seed: u64,
}

impl Pair {
    fn new(options: &Options, address: IpAddr, two: bool, len: usize) -> Result<Self> {
        let local = End::new(len, options.gpus)?;
        let (mut remote, info) = if two {
            RemoteEnd::spawn(address, len, options.gpus)?
        } else {
            let end = End::new(len, options.gpus)?;
            let info = end.info()?;
            (RemoteEnd::InProcess(Box::new(end)), info)
        };
        local.connect(&info)?;
        remote.connect(&local.info()?)?;
        Ok(Self {
            local,
            remote,
            info,
            seed: 1,
        })
    }

    fn seed(&mut self) -> u64 {
        self.seed += 1;
        self.seed
    }

    fn to(&self, part: Part) -> (u64, u32) {
        let (addr, rkey) = self.info.regions[part.region];
        (addr + part.at as u64, rkey)
    }

    /// One request between two parts of the same length, and its verification.
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
            self.remote.fill(there, seeds[0])?;
            let memory = &self.local.regions[here.region].memory;
            for (part, seed) in [(here, seeds[1]), (before(here), seeds[2]), (behind(here), seeds[3])] {
                memory.fill(part.at, part.len, seed)?;
            }
            self.local.post(op, &[here], self.to(there), false)?;
            self.local.done()?;
            for (part, seed) in [(here, seeds[0]), (before(here), seeds[2]), (behind(here), seeds[3])] {
                let differs = memory.differs(part.at, part.len, seed)?;
                ensure!(differs.is_none(), "byte {} of {part:?} is wrong", differs.unwrap_or(0));
            }
            return Ok(());
        }
        self.local.regions[here.region].memory.fill(here.at, len, seeds[0])?;
        for (part, seed) in [(there, seeds[1]), (before(there), seeds[2]), (behind(there), seeds[3])] {
            self.remote.fill(part, seed)?;
        }
        match op {
            Op::Send => self.remote.receive(there)?,
            Op::WriteImm => self.remote.receive(Part { len: 0, ..there })?,
            _ => {}
        }
        self.local.post(op, &[here], self.to(there), inline)?;
        if op != Op::Write {
            let received = self.remote.received()?;
            ensure!(received as usize == len, "{received} bytes were received");
        }
        self.local.done()?;
        for (part, seed) in [(there, seeds[0]), (before(there), seeds[2]), (behind(there), seeds[3])] {
            let differs = self.remote.differs(part, seed)?;
            ensure!(differs.is_none(), "byte {} of {part:?} is wrong", differs.unwrap_or(0));
        }
        Ok(())
    }
}

pub(crate) fn run(options: &Options, address: IpAddr) -> Result<bool> {
    let mut right = true;
    let stagings = [
        ("one process", false, options.one),
        ("two processes", true, options.two),
    ];
    for (staging, two, wanted) in stagings {
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
                Ok(Some(said)) => println!("PASS {staging}: {what}{said}, {seconds:.1} s"),
                Ok(None) => {}
                Err(error) => {
                    println!("FAIL {staging}: {what}: {error:#}");
                    right = false;
                }
            }
        }
    }
    Ok(right)
}

/// A check between two endpoints, in one process or in two; `None` if it does not apply.
type Check = fn(&Options, IpAddr, bool) -> Result<Option<String>>;

/// Each with its name for `--only`.
pub(crate) const PARTS: [(&str, &str, Check); 11] = [
    ("mixes", "every mix", mixes),
    ("lists", "scattered and gathered", lists),
    ("inline", "what is inline", inline),
    ("order", "many at once, and the order of what they write", order),
    ("over", "what is written over what came before", over),
    ("raw", "a READ of what is being written", read_after_write),
    ("key", "a wrong key is refused", refused),
    ("atomic", "an atomic is refused", atomic),
    ("full", "while a launch waits for space in a full queue", full),
    ("deregister", "a region that goes", deregistered),
    ("kill", "a remote end that is killed", killed),
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
    let names: Vec<_> = pair.local.regions.iter().map(|region| region.name.clone()).collect();
    for local in 0..names.len() {
        for remote in 0..names.len() {
            let (since, before) = (Instant::now(), count);
            let (one, other) = (&names[local], &names[remote]);
            for op in Op::MOVING {
                for (turn, len) in sizes(options).into_iter().enumerate() {
                    if op == Op::WriteImm && len > LONGEST_WITH_IMMEDIATE {
                        continue;
                    }
                    // All combinations of both offsets occur over the sizes.
                    let (at, to) = (OFFSETS[turn % 2], OFFSETS[turn / 2 % 2]);
                    let here = Part { region: local, at, len };
                    let there = Part {
                        region: remote,
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

/// The copies of this end while a call of the program waits for space in the queue of a stream that
/// waits, which holds the lock of its context.
fn full(options: &Options, address: IpAddr, two: bool) -> Result<Option<String>> {
    const LEN: usize = 1 << 20;
    if memory::is_copied_in_the_programs_context() {
        return Ok(None);
    }
    let mut pair = Pair::new(options, address, two, 2 << 20)?;
    let gpu = pair.local.regions.len() - 1;
    let part = Part {
        region: gpu,
        at: 4096,
        len: LEN,
    };
    // Imports are not made while a launch waits: what they need of the driver may wait for it.
    pair.exchange(Op::Read, part, part, false)?;
    let (here, there) = (pair.seed(), pair.seed());
    pair.local.regions[gpu].memory.fill(part.at, part.len, here)?;
    pair.remote.fill(part, there)?;
    let Some(queue) = FullQueue::start(options.gpus - 1)? else {
        return Ok(None);
    };
    let since = Instant::now();
    pair.local.post(Op::Read, &[part], pair.to(part), false)?;
    pair.local.done()?;
    let took = since.elapsed();
    ensure!(queue.release()?, "the copy waited for the launch");
    let differs = pair.local.regions[gpu].memory.differs(part.at, part.len, there)?;
    ensure!(differs.is_none(), "byte {} is wrong", differs.unwrap_or(0));
    Ok(Some(format!(", {LEN} bytes in {} us", took.as_micros())))
}

fn lists(options: &Options, address: IpAddr, two: bool) -> Result<Option<String>> {
    const PIECES: [usize; 4] = [100_001, 7, 300_000, 65_536];
    const TIMES: usize = 4;
    let mut pair = Pair::new(options, address, two, 2 << 20)?;
    let regions = pair.local.regions.len();
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
                pair.remote.fill(piece, *seed)?;
            } else {
                pair.local.regions[part.region].memory.fill(part.at, part.len, *seed)?;
                pair.remote.fill(piece, seed + 1000)?;
            }
            begin += part.len;
        }
        for _ in 0..TIMES {
            if op == Op::Send {
                pair.remote.receive(there)?;
            }
        }
        for _ in 0..TIMES {
            pair.local.post(op, &parts, pair.to(there), false)?;
        }
        if op == Op::Send {
            for _ in 0..TIMES {
                pair.remote.received()?;
            }
        }
        for _ in 0..TIMES {
            pair.local.done()?;
        }
        let mut begin = there.at;
        for (part, seed) in parts.iter().zip(&seeds) {
            let piece = Part {
                at: begin,
                len: part.len,
                ..there
            };
            let differs = if op == Op::Read {
                pair.local.regions[part.region]
                    .memory
                    .differs(part.at, part.len, *seed)?
            } else {
                pair.remote.differs(piece, *seed)?
            };
            ensure!(differs.is_none(), "{} of several pieces: {part:?}", op.name());
            begin += part.len;
        }
    }
    Ok(Some(String::new()))
}

fn inline(options: &Options, address: IpAddr, two: bool) -> Result<Option<String>> {
    let mut pair = Pair::new(options, address, two, 1 << 16)?;
    for remote in 0..pair.info.regions.len() {
        for op in [Op::Write, Op::Send] {
            for len in [1, 8, 33, 64] {
                let part = |region| Part { region, at: 4096, len };
                pair.exchange(op, part(0), part(remote), true)?;
            }
        }
    }
    Ok(Some(String::new()))
}

/// WRITEs to all kinds of memory, and a SEND: when it arrives, their data is there.
fn order(options: &Options, address: IpAddr, two: bool) -> Result<Option<String>> {
    const ROUNDS: u64 = 8;
    const LEN: usize = 300_000;
    let many = DEPTH as usize - 1;
    let mut pair = Pair::new(options, address, two, many * LEN + 8192)?;
    let (local, remote) = (pair.local.regions.len(), pair.info.regions.len());
    for round in 0..ROUNDS {
        let part = |index: usize, regions: usize| Part {
            region: (index + round as usize) % regions,
            at: 4096 + index * LEN,
            // Alternately long and short.
            len: if index.is_multiple_of(3) { 8 } else { LEN },
        };
        let seeds: Vec<u64> = (0..many).map(|_| pair.seed()).collect();
        for (index, seed) in seeds.iter().enumerate() {
            let here = part(index, local);
            pair.local.regions[here.region].memory.fill(here.at, here.len, *seed)?;
        }
        let word = Part {
            region: 0,
            at: 0,
            len: 8,
        };
        pair.remote.receive(word)?;
        for index in 0..many {
            let (here, there) = (part(index, local), part(index, remote));
            pair.local.post(Op::Write, &[here], pair.to(there), false)?;
        }
        pair.local.post(Op::Send, &[word], (0, 0), false)?;
        // Both endpoints may be driven by this thread.
        pair.remote.received()?;
        for (index, seed) in seeds.iter().enumerate() {
            let there = part(index, remote);
            let differs = pair.remote.differs(there, *seed)?;
            ensure!(
                differs.is_none(),
                "round {round}: WRITE {index}, {there:?}, was not there"
            );
        }
        for _ in 0..=many {
            pair.local.done()?;
        }
    }
    Ok(Some(String::new()))
}

/// Each WRITE overlaps the previous end: later bytes win. Repeated until a host target is pinned.
fn over(options: &Options, address: IpAddr, two: bool) -> Result<Option<String>> {
    const ROUNDS: usize = 12;
    /// Offset and length of each.
    const WRITES: [(usize, usize); 4] = [
        (4096, 300_000),
        (100_003, 500_000),
        (590_000, 90_001),
        (600_007, 262_144),
    ];
    let mut pair = Pair::new(options, address, two, 2 << 20)?;
    for local in 0..pair.local.regions.len() {
        for remote in 0..pair.info.regions.len() {
            for round in 0..ROUNDS {
                let mut at = 0;
                let mut seeds = Vec::new();
                for (to, len) in WRITES {
                    let here = Part { region: local, at, len };
                    seeds.push(pair.seed());
                    let seed = seeds[seeds.len() - 1];
                    pair.local.regions[local].memory.fill(at, len, seed)?;
                    at += len;
                    let there = Part {
                        region: remote,
                        at: to,
                        len,
                    };
                    pair.local.post(Op::Write, &[here], pair.to(there), false)?;
                }
                for _ in WRITES {
                    pair.local.done()?;
                }
                for (index, (start, len)) in WRITES.into_iter().enumerate() {
                    let end = WRITES.get(index + 1).map_or(start + len, |next| next.0);
                    let there = Part {
                        region: remote,
                        at: start,
                        len: end - start,
                    };
                    let differs = pair.remote.differs(there, seeds[index])?;
                    ensure!(
                        differs.is_none(),
                        "round {round}, from {local} to {remote}: byte {} of write {index} is wrong",
                        differs.unwrap_or(0)
                    );
                }
            }
        }
    }
    Ok(Some(String::new()))
}

/// A READ behind a WRITE returns the written bytes.
fn read_after_write(options: &Options, address: IpAddr, two: bool) -> Result<Option<String>> {
    let mut pair = Pair::new(options, address, two, 4 << 20)?;
    for remote in 0..pair.info.regions.len() {
        for len in [8, 100, 1 << 20] {
            let region = pair.local.regions.len() - 1;
            let (from, into) = (
                Part { region, at: 0, len },
                Part {
                    region: 0,
                    at: 2 << 20,
                    len,
                },
            );
            let there = Part {
                region: remote,
                at: 1 << 20,
                len,
            };
            let seed = pair.seed();
            pair.local.regions[region].memory.fill(0, len, seed)?;
            pair.local.post(Op::Write, &[from], pair.to(there), false)?;
            pair.local.post(Op::Read, &[into], pair.to(there), false)?;
            pair.local.done()?;
            pair.local.done()?;
            let differs = pair.local.regions[0].memory.differs(into.at, len, seed)?;
            ensure!(differs.is_none(), "{len} bytes were read before they were written");
        }
    }
    Ok(Some(String::new()))
}

/// An invalid key, and a range that is too long.
fn refused(options: &Options, address: IpAddr, two: bool) -> Result<Option<String>> {
    let len = 1 << 16;
    for wrong in [0, 1] {
        let pair = Pair::new(options, address, two, len)?;
        let gpu = pair.local.regions.len() - 1;
        let (addr, rkey) = pair.info.regions[gpu];
        let (addr, rkey) = [(addr, rkey ^ 1), (addr + 1, rkey)][wrong];
        let all = Part {
            region: gpu,
            at: 0,
            len,
        };
        pair.local.post(Op::Write, &[all], (addr, rkey), false)?;
        let status = pair.local.wait()?.status;
        ensure!(status == IBV_WC_REM_ACCESS_ERR, "status {status}");
    }
    Ok(Some(String::new()))
}

fn atomic(options: &Options, address: IpAddr, two: bool) -> Result<Option<String>> {
    let pair = Pair::new(options, address, two, 1 << 16)?;
    let gpu = pair.local.regions.len() - 1;
    let word = Part {
        region: 0,
        at: 0,
        len: 8,
    };
    let to = pair.to(Part { region: gpu, ..word });
    pair.local.post(Op::Atomic, &[word], to, false)?;
    let status = pair.local.wait()?.status;
    ensure!(status == IBV_WC_REM_ACCESS_ERR, "status {status}");
    Ok(Some(String::new()))
}

/// Outstanding WRITEs complete or fail, without other effects.
fn deregistered(options: &Options, address: IpAddr, two: bool) -> Result<Option<String>> {
    let len = 4 << 20;
    for _ in 0..4 {
        let mut pair = Pair::new(options, address, two, len)?;
        let gpu = pair.local.regions.len() - 1;
        let part = Part {
            region: gpu,
            at: 0,
            len,
        };
        for _ in 0..8 {
            pair.local.post(Op::Write, &[part], pair.to(part), false)?;
        }
        pair.remote.deregister(gpu)?;
        for _ in 0..8 {
            pair.local.wait()?;
        }
    }
    Ok(Some(String::new()))
}

/// The remote process dies during outstanding WRITEs to it and READs from it.
fn killed(options: &Options, address: IpAddr, two: bool) -> Result<Option<String>> {
    if !two {
        return Ok(None);
    }
    let len = 4 << 20;
    for op in [Op::Write, Op::Read] {
        let mut pair = Pair::new(options, address, true, len)?;
        let gpu = pair.local.regions.len() - 1;
        let part = Part {
            region: gpu,
            at: 0,
            len,
        };
        for _ in 0..DEPTH {
            pair.local.post(op, &[part], pair.to(part), false)?;
        }
        pair.remote.kill()?;
        let mut failed = 0;
        for _ in 0..DEPTH {
            failed += u32::from(pair.local.wait()?.status != IBV_WC_SUCCESS);
        }
        pair.local.post(Op::Write, &[part], pair.to(part), false)?;
        failed += u32::from(pair.local.wait()?.status != IBV_WC_SUCCESS);
        ensure!(failed > 0, "nothing failed");
    }
    // The local memory is still usable.
    let mut pair = Pair::new(options, address, true, len)?;
    let gpu = pair.local.regions.len() - 1;
    let part = Part {
        region: gpu,
        at: 4096,
        len: 1 << 20,
    };
    pair.exchange(Op::Write, part, part, false)?;
    Ok(Some(String::new()))
}
