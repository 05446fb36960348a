//! A soak: cycles of kills, stops and replacements until the time is over, then the accounts.
//!
//! What some members that are never killed use of the host after the first cycle is compared with
//! what they use in the end.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use crate::parent::{FAULTS, PORT, Swarm, send_line};
use crate::resources::{Sample, available_memory, port_holder, slots};
use crate::{Pattern, Plan};

/// Members, the last ones, that are only killed as port holders, and one of them not even then.
const WITNESSES: usize = 4;
/// Killed in one cycle.
pub(crate) const VICTIMS: usize = 3;
/// Stops in one cycle.
const STOPS: usize = 4;
/// Less than the retries of a queue pair last.
const LONGEST_STOP: Duration = Duration::from_millis(400);
/// Of the memory that is taken and returned again and again, at most.
const BALLAST: u64 = 1 << 30;
const PIECE: usize = 16 << 20;
/// How long a member's resources may take to be those of the beginning.
const QUIET_TIMEOUT: Duration = Duration::from_secs(5);
const HOLDER_TRIES: u32 = 10;

#[derive(Default)]
struct Tally {
    cycles: u64,
    kills: u64,
    holders: u64,
    stops: u64,
    /// Of each that was never killed: what it used after the first cycle.
    witnesses: Vec<(usize, Sample)>,
}

impl Swarm {
    /// Fails when an invariant is violated, or something grows.
    pub(crate) fn soak(&mut self, plan: &Plan, duration: Duration) -> Result<()> {
        ensure!(
            plan.processes > WITNESSES + VICTIMS,
            "a soak takes {} processes",
            WITNESSES + VICTIMS + 1
        );
        let began = Instant::now();
        self.connect_all(plan)?;
        let over = AtomicBool::new(false);
        let cycles = thread::scope(|scope| {
            scope.spawn(|| press_memory(&over));
            let cycles = self.cycles(plan, began + duration);
            over.store(true, Ordering::Relaxed);
            cycles
        });
        let tally = cycles?;
        let mut growths = Vec::new();
        let holder = self.port_holder(plan);
        for (index, before) in &tally.witnesses {
            // All others connect to the port holder.
            let connections = if holder == Some(*index) {
                plan.processes as u64
            } else {
                0
            };
            let mut after = Sample::of(self.members[*index].id())?;
            // Requests in progress are over soon, of which a loaded machine has more; leaks stay.
            let end = Instant::now() + QUIET_TIMEOUT;
            while after.growth(*before, connections).is_some() && Instant::now() < end {
                self.pump_for(Duration::from_millis(100))?;
                after = Sample::of(self.members[*index].id())?;
            }
            println!("soak: member {index}: {before:?} in the beginning, {after:?} in the end");
            growths.extend(after.growth(*before, connections));
        }
        let (used, living) = (slots(plan.address, PORT)?, self.living().len());
        let mut reports = [0_u64; 4];
        for report in self.shut_down()? {
            for (sum, number) in reports.iter_mut().zip(report.split(' ')) {
                *sum += number.parse::<u64>().context("a report")?;
            }
        }
        let [bytes, operations, sent, received] = reports;
        println!(
            "soak: {} processes, seed {}, {:.1} min: {operations} requests, {bytes} bytes and {received} of {sent} \
             datagrams verified",
            plan.processes,
            plan.seed,
            began.elapsed().as_secs_f64() / 60.0,
        );
        println!(
            "soak: survived {} kills ({} of the port holder) in {} cycles, {} stops, {FAULTS} at one member of four; a \
             death was detected after {:.2} s at most",
            tally.kills,
            tally.holders,
            tally.cycles,
            tally.stops,
            self.slowest.as_secs_f64()
        );
        println!("soak: {used} slots of {living} members");
        ensure!(used <= living, "{used} slots are in use, by {living} members");
        ensure!(growths.is_empty(), "members have grown: {}", growths.join("; "));
        Ok(())
    }

    fn cycles(&mut self, plan: &Plan, end: Instant) -> Result<Tally> {
        let mut random = Random(plan.seed, 0);
        let mut tally = Tally::default();
        while tally.cycles == 0 || Instant::now() < end {
            for _ in 0..STOPS {
                self.stop_one(&mut random)?;
                tally.stops += 1;
            }
            self.kill_some(plan, &mut random, &mut tally)?;
            while !self.all_detected() {
                self.pump(Duration::from_millis(20))?;
                self.check_overdue()?;
            }
            self.replace_killed(plan)?;
            tally.cycles += 1;
            // Members work for a while undisturbed.
            self.pump_for(Duration::from_millis(200 + random.below(800)))?;
            if tally.cycles == 1 {
                let last = self.members.len() - WITNESSES..self.members.len();
                let samples = last.map(|index| Ok((index, Sample::of(self.members[index].id())?)));
                tally.witnesses = samples.collect::<Result<_>>()?;
            }
        }
        Ok(tally)
    }

    fn pump(&mut self, wait: Duration) -> Result<()> {
        if let Some((index, line)) = self.next_line(wait)? {
            self.handle_line(index, &line)?;
        }
        Ok(())
    }

    fn pump_for(&mut self, time: Duration) -> Result<()> {
        let end = Instant::now() + time;
        while let Some(left) = end.checked_duration_since(Instant::now()) {
            self.pump(left.min(Duration::from_millis(20)))?;
        }
        Ok(())
    }

    /// SIGSTOP, and SIGCONT before its peers' retries are over.
    fn stop_one(&mut self, random: &mut Random) -> Result<()> {
        let index = random.below(self.members.len() as u64) as usize;
        let pid = self.members[index].id().cast_signed();
        let signal = |signal| {
            // SAFETY: kill(2) touches no memory. The child is not reaped, so the number is its own.
            unsafe { libc::kill(pid, signal) };
        };
        signal(libc::SIGSTOP);
        let pumped = self.pump_for(Duration::from_millis(
            50 + random.below(LONGEST_STOP.as_millis() as u64 - 50),
        ));
        signal(libc::SIGCONT);
        pumped
    }

    /// Tried again: a table of the kernel's is read in parts, between which entries move.
    fn port_holder(&self, plan: &Plan) -> Option<usize> {
        let pids: Vec<u32> = self.members.iter().map(std::process::Child::id).collect();
        let find = |_| {
            let holder = port_holder(plan.address, PORT, &pids);
            if holder.is_none() {
                thread::sleep(Duration::from_millis(20));
            }
            holder
        };
        let holder = (0..HOLDER_TRIES).find_map(find)?;
        pids.iter().position(|pid| *pid == holder)
    }

    /// Kills up to [`VICTIMS`] members at once; the port holder is one of them.
    fn kill_some(&mut self, plan: &Plan, random: &mut Random, tally: &mut Tally) -> Result<()> {
        let holder = self.port_holder(plan);
        let is_last = |index| matches!(tally.witnesses[..], [(last, _)] if last == index);
        if let Some(holder) = holder.filter(|&holder| !is_last(holder)) {
            self.kill(holder)?;
            tally.witnesses.retain(|(index, _)| *index != holder);
            (tally.kills, tally.holders) = (tally.kills + 1, tally.holders + 1);
        }
        for _ in 0..random.below(VICTIMS as u64) {
            let victim = self.choose_victim(plan, random.next());
            if victim < self.members.len() - WITNESSES {
                self.kill(victim)?;
                tally.kills += 1;
            }
        }
        Ok(())
    }

    /// New processes in the places of the killed, connected with all others.
    fn replace_killed(&mut self, plan: &Plan) -> Result<()> {
        let mut new: Vec<usize> = self.killed.keys().copied().collect();
        new.sort_unstable();
        if new.is_empty() {
            return Ok(());
        }
        let old = self.living();
        // What the dead have printed is in front of what their replacements print.
        while let Some((index, line)) = self.next_line(Duration::ZERO)? {
            self.handle_line(index, &line)?;
        }
        for &index in &new {
            self.replace(plan, index)?;
        }
        let names: Vec<_> = new.iter().map(usize::to_string).collect();
        self.send_to(&old, &format!("renew {}", names.join(" ")))?;
        let both = |of_old, of_new| -> Vec<(usize, &str)> {
            let old = old.iter().map(|&index| (index, of_old));
            old.chain(new.iter().map(|&index| (index, of_new))).collect()
        };
        let mut offers = self.wait_for_each(&both("offer ", "endpoints "))?;
        let endpoints = offers.split_off(old.len());
        let words = |texts: &[String]| -> Vec<Vec<String>> {
            texts
                .iter()
                .map(|text| text.split(' ').map(str::to_owned).collect())
                .collect()
        };
        let (offers, endpoints) = (words(&offers), words(&endpoints));
        // What `from` offers to `to`.
        let offer = |from: usize, to: usize| -> Option<&str> {
            let offered = match new.binary_search(&from) {
                Ok(at) => endpoints[at].get(to - usize::from(to > from)),
                Err(_) => offers[old.binary_search(&from).ok()?].get(new.binary_search(&to).ok()?),
            };
            offered.map(String::as_str)
        };
        let all = |to: usize, from: &[usize]| -> Result<String> {
            let offered: Option<Vec<_>> = from
                .iter()
                .filter(|from| **from != to)
                .map(|from| offer(*from, to))
                .collect();
            Ok(offered.context("attributes are missing")?.join(" "))
        };
        // The new ones are connected before the old ones send to them.
        let indices: Vec<usize> = (0..plan.processes).collect();
        for &index in &new {
            let line = format!("peers {}", all(index, &indices)?);
            send_line(&mut self.members[index], &line)?;
        }
        self.wait_for(&new, "ready")?;
        for &index in &old {
            let line = format!("accept {}", all(index, &new)?);
            send_line(&mut self.members[index], &line)?;
        }
        self.wait_for(&old, "connected")?;
        self.send_to(&new, "go")
    }
}

/// Numbers by the seed.
struct Random(u64, u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.1 += 1;
        let mut bytes = [0; 8];
        Pattern::new(self.0, usize::MAX, 0, self.1).fill(&mut bytes);
        u64::from_le_bytes(bytes)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

/// Takes a quarter of the available memory and returns it, again and again.
fn press_memory(over: &AtomicBool) {
    let pieces = (available_memory() / 4).min(BALLAST) as usize / PIECE;
    while !over.load(Ordering::Relaxed) {
        let mut ballast = Vec::new();
        for _ in 0..pieces {
            if over.load(Ordering::Relaxed) {
                return;
            }
            ballast.push(std::hint::black_box(vec![1_u8; PIECE]));
            thread::sleep(Duration::from_millis(20));
        }
    }
}
