//! The parent: starts the members, kills some, and evaluates.

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

/// Time limit of a step without a kill.
const TIMEOUT: Duration = Duration::from_secs(120);
const PORT: u16 = 4791;

/// Fails when an invariant is violated.
pub(crate) fn run(plan: &Plan) -> Result<()> {
    let began = Instant::now();
    let shared = shared_memory();
    let mut swarm = Swarm::start(plan)?;
    let victims = swarm.run_traffic(plan);
    let summary = victims.and_then(|()| swarm.shut_down());
    swarm.kill_all();
    let (moved, slowest) = summary?;
    check_leaks(plan, &shared)?;
    println!(
        "{} members of {} bytes each, {} killed, {} survived and moved {moved} bytes in {:.1} s; a death was detected by all after {:.2} s at most",
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
    killed: HashMap<usize, Instant>,
    /// Survivors that have reported the loss, by victim.
    detected: HashMap<usize, Vec<usize>>,
    /// Time limit for a survivor to report a loss.
    detection_limit: Duration,
    slowest: Duration,
    moved: HashMap<usize, u64>,
}

impl Swarm {
    fn start(plan: &Plan) -> Result<Self> {
        let (send, lines) = mpsc::channel();
        let program = std::env::current_exe()?;
        // A member also exits on its parent's death: at the end of its stdin.
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
        // IBTA vol 1, 9.7.6.1.3: a timeout lasts up to four times its value. 5 s more for sending
        // and scheduling.
        let timeout = Duration::from_nanos(4096 << plan.timeout);
        let detection_limit = 4 * timeout * (u32::from(RETRIES) + 1) + Duration::from_secs(5);
        Ok(Self {
            members,
            lines,
            killed: HashMap::new(),
            detected: HashMap::new(),
            detection_limit,
            slowest: Duration::ZERO,
            moved: HashMap::new(),
        })
    }

    /// From the exchange of attributes to the last reported loss.
    fn run_traffic(&mut self, plan: &Plan) -> Result<()> {
        let endpoints = self.wait_for_all("endpoints ")?;
        let endpoints: Vec<Vec<&str>> = endpoints
            .iter()
            .map(|endpoints| endpoints.split(' ').collect())
            .collect();
        for (index, member) in self.members.iter_mut().enumerate() {
            // A member's attributes are in the order of the other members.
            let of = |peer: usize| endpoints[peer].get(index - usize::from(index > peer)).copied();
            let peers: Option<Vec<_>> = (0..plan.processes).filter(|&peer| peer != index).map(of).collect();
            send_line(
                member,
                &format!("peers {}", peers.context("endpoint information is missing")?.join(" ")),
            )?;
        }
        self.wait_for_all("ready")?;
        self.send_to_all("go")?;
        let mut next = Instant::now() + plan.kill_every;
        let mut draws = 0;
        loop {
            let living = plan.processes - self.killed.len();
            let over = self.moved.len() == plan.processes && self.killed.len() >= plan.kills;
            if over && self.all_detected() {
                return Ok(());
            }
            if let Some((index, line)) = self.next_line(Duration::from_millis(20))? {
                self.handle_line(index, &line)?;
            }
            self.check_overdue()?;
            if !over && living > 2 && Instant::now() >= next {
                next += plan.kill_every;
                let victim = self.choose_victim(plan, draws);
                draws += 1;
                self.kill(victim)?;
            }
        }
    }

    /// A living member, chosen by the plan's seed.
    fn choose_victim(&self, plan: &Plan, random: u64) -> usize {
        let living: Vec<_> = (0..plan.processes)
            .filter(|index| !self.killed.contains_key(index))
            .collect();
        let mut bytes = [0; 8];
        Pattern::new(plan.seed, 0, 0, random).fill(&mut bytes);
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
        self.detected.insert(victim, Vec::new());
        self.moved.insert(victim, 0);
        Ok(())
    }

    fn handle_line(&mut self, index: usize, line: &str) -> Result<()> {
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
            .with_context(|| format!("member {index} printed {line:?}"))?;
        let died = self
            .killed
            .get(&peer)
            .with_context(|| format!("member {index} reports member {peer} as dead, which is alive"))?;
        self.slowest = self.slowest.max(died.elapsed());
        self.detected.entry(peer).or_default().push(index);
        Ok(())
    }

    fn survivors(&self) -> usize {
        self.members.len() - self.killed.len()
    }

    fn all_detected(&self) -> bool {
        let lives = |index: &&usize| !self.killed.contains_key(index);
        let survivors = self.survivors();
        self.detected
            .values()
            .all(|by| by.iter().filter(lives).count() == survivors)
    }

    fn check_overdue(&self) -> Result<()> {
        for (victim, died) in &self.killed {
            let by = self.detected.get(victim).map_or(&[][..], Vec::as_slice);
            let missing: Vec<_> = (0..self.members.len())
                .filter(|index| !self.killed.contains_key(index) && !by.contains(index))
                .collect();
            ensure!(
                missing.is_empty() || died.elapsed() < self.detection_limit,
                "{:?} after the death of member {victim}, {missing:?} have not detected it",
                self.detection_limit
            );
        }
        Ok(())
    }

    /// The survivors leave; returns the bytes moved, and the longest time to detect a death.
    fn shut_down(&mut self) -> Result<(u64, Duration)> {
        self.send_to_all("quiet")?;
        self.wait_for_all("quiet")?;
        self.send_to_all("leave")?;
        for (index, left) in self
            .wait_for_all("left ")?
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

    /// Waits until each survivor has printed a line with this prefix; returns the rest, by member.
    fn wait_for_all(&mut self, prefix: &str) -> Result<Vec<String>> {
        let deadline = Instant::now() + TIMEOUT;
        let mut lines = vec![None; self.members.len()];
        while lines.iter().flatten().count() < self.survivors() {
            let left = deadline.saturating_duration_since(Instant::now());
            ensure!(
                !left.is_zero(),
                "not every member printed {prefix:?} within {TIMEOUT:?}"
            );
            let Some((index, line)) = self.next_line(left.min(Duration::from_millis(100)))? else {
                continue;
            };
            match line.strip_prefix(prefix) {
                Some(rest) => lines[index] = Some(rest.to_owned()),
                None => self.handle_line(index, &line)?,
            }
        }
        Ok(lines.into_iter().map(Option::unwrap_or_default).collect())
    }

    /// `None` on timeout; an error when a member exited that was not killed.
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

    fn send_to_all(&mut self, line: &str) -> Result<()> {
        for (index, member) in self.members.iter_mut().enumerate() {
            if !self.killed.contains_key(&index) {
                send_line(member, line).with_context(|| format!("member {index}"))?;
            }
        }
        Ok(())
    }

    fn kill_all(&mut self) {
        for member in &mut self.members {
            // It has exited already, or does now.
            let _ = member.kill();
            let _ = member.wait();
        }
    }
}

fn send_line(member: &mut Child, line: &str) -> Result<()> {
    let input = member.stdin.as_mut().context("a member has no input")?;
    Ok(writeln!(input, "{line}")?)
}

fn shared_memory() -> Vec<std::ffi::OsString> {
    let entries = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let mut names: Vec<_> = entries.map(|entry| entry.file_name()).collect();
    names.sort();
    names
}

/// Fails on abstract sockets of the address, new shared memory, or a used port.
fn check_leaks(plan: &Plan, before: &[std::ffi::OsString]) -> Result<()> {
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
