//! Who starts the members, kills some, and judges.

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::UdpSocket;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

use crate::{Pattern, Plan, RETRIES};

/// A step in which nobody dies takes no longer than this.
const PATIENCE: Duration = Duration::from_secs(120);
/// The UDP port of RoCEv2.
const PORT: u16 = 4791;

/// Runs the swarm.
///
/// # Errors
/// When anything is not as it must be.
pub(crate) fn run(plan: &Plan) -> Result<()> {
    let began = Instant::now();
    let shared = shared_memory();
    let mut swarm = Swarm::start(plan)?;
    let victims = swarm.live(plan);
    let summary = victims.and_then(|()| swarm.end());
    swarm.kill_all();
    let (moved, slowest) = summary?;
    nothing_left(plan, &shared)?;
    println!(
        "{} members of {} bytes each, {} killed, {} survived and moved {moved} bytes in {:.1} s; a death was noticed by all after {:.2} s at most",
        plan.processes,
        plan.bytes,
        swarm.killed.len(),
        plan.processes - swarm.killed.len(),
        began.elapsed().as_secs_f64(),
        slowest.as_secs_f64(),
    );
    Ok(())
}

struct Swarm {
    members: Vec<Child>,
    lines: Receiver<(usize, String)>,
    /// When each victim died.
    killed: HashMap<usize, Instant>,
    /// Survivors that have noticed, by victim.
    noticed: HashMap<usize, Vec<usize>>,
    /// How long a survivor may take to notice.
    bound: Duration,
    slowest: Duration,
    moved: HashMap<usize, u64>,
}

impl Swarm {
    fn start(plan: &Plan) -> Result<Self> {
        let (send, lines) = mpsc::channel();
        let program = std::env::current_exe()?;
        // A member is killed by its parent's death as well: by the end of its stdin.
        let mut members = Vec::new();
        for index in 0..plan.processes {
            let mut member = Command::new(&program)
                .args(plan.to_args())
                .args(["--member", &index.to_string()])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .context("cannot start a member")?;
            let output = member.stdout.take().context("a member has no output")?;
            let send = send.clone();
            thread::spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    if send.send((index, line)).is_err() {
                        return;
                    }
                }
            });
            members.push(member);
        }
        // IBTA vol 1, 9.7.6.1.3: a timeout lasts up to four times what it says. Then there is time for the requester to send, and to be scheduled.
        let timeout = Duration::from_nanos(4096 << plan.timeout);
        let bound = 4 * timeout * (u32::from(RETRIES) + 1) + Duration::from_secs(5);
        Ok(Self {
            members,
            lines,
            killed: HashMap::new(),
            noticed: HashMap::new(),
            bound,
            slowest: Duration::ZERO,
            moved: HashMap::new(),
        })
    }

    /// From the first card to the last death that has been noticed.
    fn live(&mut self, plan: &Plan) -> Result<()> {
        let cards = self.each("cards ")?;
        let cards: Vec<Vec<&str>> = cards.iter().map(|cards| cards.split(' ').collect()).collect();
        for (index, member) in self.members.iter_mut().enumerate() {
            // A member's cards are in the order of the others.
            let of = |peer: usize| cards[peer].get(index - usize::from(index > peer)).copied();
            let peers: Option<Vec<_>> = (0..plan.processes).filter(|&peer| peer != index).map(of).collect();
            tell(
                member,
                &format!("peers {}", peers.context("a card is missing")?.join(" ")),
            )?;
        }
        self.each("ready")?;
        self.tell_all("go")?;
        let mut next = Instant::now() + plan.kill_every;
        let mut draws = 0;
        loop {
            let living = plan.processes - self.killed.len();
            let over = self.moved.len() == plan.processes && self.killed.len() >= plan.kills;
            if over && self.all_noticed() {
                return Ok(());
            }
            if let Some((index, line)) = self.next_line(Duration::from_millis(20))? {
                self.hear(index, &line)?;
            }
            self.no_death_overdue()?;
            if !over && living > 2 && Instant::now() >= next {
                next += plan.kill_every;
                let victim = self.choose(plan, draws);
                draws += 1;
                self.kill(victim)?;
            }
        }
    }

    /// One that lives, by the plan's seed.
    fn choose(&self, plan: &Plan, draw: u64) -> usize {
        let living: Vec<_> = (0..plan.processes)
            .filter(|index| !self.killed.contains_key(index))
            .collect();
        let mut bytes = [0; 8];
        Pattern::new(plan.seed, 0, 0, draw).fill(&mut bytes);
        living[u64::from_le_bytes(bytes) as usize % living.len()]
    }

    fn kill(&mut self, victim: usize) -> Result<()> {
        let member = &mut self.members[victim];
        member.kill()?;
        let status = member.wait()?;
        ensure!(
            status.signal() == Some(9),
            "member {victim} had ended before it was killed: {status}"
        );
        self.killed.insert(victim, Instant::now());
        self.noticed.insert(victim, Vec::new());
        self.moved.insert(victim, 0);
        Ok(())
    }

    /// A line from a member while all work.
    fn hear(&mut self, index: usize, line: &str) -> Result<()> {
        if self.killed.contains_key(&index) {
            return Ok(());
        }
        if let Some(moved) = line.strip_prefix("done ") {
            self.moved
                .insert(index, moved.parse().context("not a number of bytes")?);
            return Ok(());
        }
        let peer: usize = line
            .strip_prefix("lost ")
            .and_then(|peer| peer.parse().ok())
            .with_context(|| format!("member {index} says {line:?}"))?;
        let died = self
            .killed
            .get(&peer)
            .with_context(|| format!("member {index} takes member {peer} for dead, which lives"))?;
        self.slowest = self.slowest.max(died.elapsed());
        self.noticed.entry(peer).or_default().push(index);
        Ok(())
    }

    fn survivors(&self) -> usize {
        self.members.len() - self.killed.len()
    }

    fn all_noticed(&self) -> bool {
        let lives = |index: &&usize| !self.killed.contains_key(index);
        let survivors = self.survivors();
        self.noticed
            .values()
            .all(|by| by.iter().filter(lives).count() == survivors)
    }

    fn no_death_overdue(&self) -> Result<()> {
        for (victim, died) in &self.killed {
            let by = self.noticed.get(victim).map_or(&[][..], Vec::as_slice);
            let missing: Vec<_> = (0..self.members.len())
                .filter(|index| !self.killed.contains_key(index) && !by.contains(index))
                .collect();
            ensure!(
                missing.is_empty() || died.elapsed() < self.bound,
                "{:?} after the death of member {victim}, {missing:?} have not been told of it",
                self.bound
            );
        }
        Ok(())
    }

    /// The survivors leave in step; what they moved together, and how long the slowest took to notice a death.
    fn end(&mut self) -> Result<(u64, Duration)> {
        self.tell_all("quiet")?;
        self.each("quiet")?;
        self.tell_all("leave")?;
        for (index, left) in self
            .each("left ")?
            .iter()
            .enumerate()
            .filter(|(_, left)| !left.is_empty())
        {
            ensure!(left == "0", "member {index} has {left} descriptors more than before");
        }
        for (index, member) in self.members.iter_mut().enumerate() {
            if !self.killed.contains_key(&index) {
                let status = member.wait()?;
                ensure!(status.success(), "member {index}: {status}");
            }
        }
        Ok((self.moved.values().sum(), self.slowest))
    }

    /// Waits until each survivor has said a line that begins so; what follows, by member.
    fn each(&mut self, prefix: &str) -> Result<Vec<String>> {
        let deadline = Instant::now() + PATIENCE;
        let mut said = vec![None; self.members.len()];
        while said.iter().flatten().count() < self.survivors() {
            let left = deadline.saturating_duration_since(Instant::now());
            ensure!(!left.is_zero(), "not every member says {prefix:?} within {PATIENCE:?}");
            let Some((index, line)) = self.next_line(left.min(Duration::from_millis(100)))? else {
                continue;
            };
            match line.strip_prefix(prefix) {
                Some(rest) => said[index] = Some(rest.to_owned()),
                None => self.hear(index, &line)?,
            }
        }
        Ok(said.into_iter().map(Option::unwrap_or_default).collect())
    }

    /// The next line; `None` when none comes for so long.
    ///
    /// # Errors
    /// When a member has ended that was not killed.
    fn next_line(&mut self, wait: Duration) -> Result<Option<(usize, String)>> {
        match self.lines.recv_timeout(wait) {
            Ok(line) => return Ok(Some(line)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => thread::sleep(wait),
        }
        for (index, member) in self.members.iter_mut().enumerate() {
            if !self.killed.contains_key(&index)
                && let Some(status) = member.try_wait()?
                && !status.success()
            {
                bail!("member {index} ended: {status}");
            }
        }
        Ok(None)
    }

    fn tell_all(&mut self, line: &str) -> Result<()> {
        for (index, member) in self.members.iter_mut().enumerate() {
            if !self.killed.contains_key(&index) {
                tell(member, line).with_context(|| format!("member {index}"))?;
            }
        }
        Ok(())
    }

    /// Ends whatever still runs.
    fn kill_all(&mut self) {
        for member in &mut self.members {
            // It has ended already, or does now.
            let _ = member.kill();
            let _ = member.wait();
        }
    }
}

fn tell(member: &mut Child, line: &str) -> Result<()> {
    let input = member.stdin.as_mut().context("a member has no input")?;
    Ok(writeln!(input, "{line}")?)
}

/// What lies in shared memory.
fn shared_memory() -> Vec<std::ffi::OsString> {
    let entries = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let mut names: Vec<_> = entries.map(|entry| entry.file_name()).collect();
    names.sort();
    names
}

/// When all have gone: no socket by a name of the address, no new shared memory, and the port is free.
fn nothing_left(plan: &Plan, before: &[std::ffi::OsString]) -> Result<()> {
    let sockets = fs::read_to_string("/proc/net/unix")?;
    // The rest of the name is a version.
    let name = format!("/{}:{PORT}/", plan.address);
    if let Some(left) = sockets
        .lines()
        .find(|line| line.contains("@doorbell") && line.contains(&name))
    {
        bail!("a socket is left behind: {left}");
    }
    let after = shared_memory();
    if let Some(left) = after.iter().find(|name| !before.contains(name)) {
        bail!("shared memory is left behind: {}", left.display());
    }
    UdpSocket::bind((plan.address, PORT)).with_context(|| format!("{}:{PORT} is not free", plan.address))?;
    Ok(())
}
