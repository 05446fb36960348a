//! The parent: starts the members, kills some, and evaluates.

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::UdpSocket;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

use crate::{Pattern, Plan, RETRIES};

/// Time limit of a step without a kill.
const TIMEOUT: Duration = Duration::from_secs(120);
pub(crate) const PORT: u16 = 4791;
/// Of the members with link faults.
pub(crate) const FAULTS: &str = "drop=0.005,duplicate=0.005,reorder=0.005,corrupt=0.002";

/// Fails when an invariant is violated.
pub(crate) fn run(plan: &Plan) -> Result<()> {
    let began = Instant::now();
    let shared = shared_memory();
    let mut swarm = Swarm::start(plan)?;
    let result = match plan.soak {
        Some(duration) => swarm.soak(plan, duration),
        None => swarm.run_traffic(plan).and_then(|()| swarm.shut_down().map(drop)),
    };
    swarm.kill_all();
    result?;
    check_leaks(plan, &shared)?;
    if plan.soak.is_some() {
        return Ok(());
    }
    let (moved, slowest) = (swarm.moved.values().sum::<u64>(), swarm.slowest);
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

pub(crate) struct Swarm {
    pub(crate) members: Vec<Child>,
    lines: Receiver<(usize, String)>,
    /// For the threads that read the members' output.
    output: Sender<(usize, String)>,
    pub(crate) killed: HashMap<usize, Instant>,
    /// Survivors that have reported the loss, by victim.
    detected: HashMap<usize, Vec<usize>>,
    /// Time limit for a survivor to report a loss.
    detection_limit: Duration,
    pub(crate) slowest: Duration,
    moved: HashMap<usize, u64>,
}

impl Swarm {
    fn start(plan: &Plan) -> Result<Self> {
        let (output, lines) = mpsc::channel();
        let members = (0..plan.processes).map(|index| start_member(plan, index, &output));
        let members = members.collect::<Result<_>>()?;
        // IBTA vol 1, 9.7.6.1.3: a timeout lasts up to four times its value. 5 s more for sending
        // and scheduling.
        let timeout = Duration::from_nanos(4096 << plan.timeout);
        let detection_limit = 4 * timeout * (u32::from(RETRIES) + 1) + Duration::from_secs(5);
        Ok(Self {
            members,
            lines,
            output,
            killed: HashMap::new(),
            detected: HashMap::new(),
            detection_limit,
            slowest: Duration::ZERO,
            moved: HashMap::new(),
        })
    }

    /// From the exchange of attributes to the last reported loss.
    fn run_traffic(&mut self, plan: &Plan) -> Result<()> {
        self.connect_all(plan)?;
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

    /// Exchanges the attributes of all members, and starts the traffic.
    pub(crate) fn connect_all(&mut self, plan: &Plan) -> Result<()> {
        let all = self.living();
        let endpoints = self.wait_for(&all, "endpoints ")?;
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
        self.wait_for(&all, "ready")?;
        self.send_to(&all, "go")
    }

    /// A living member, chosen by the plan's seed.
    pub(crate) fn choose_victim(&self, plan: &Plan, random: u64) -> usize {
        let living = self.living();
        let mut bytes = [0; 8];
        Pattern::new(plan.seed, 0, 0, random).fill(&mut bytes);
        living[u64::from_le_bytes(bytes) as usize % living.len()]
    }

    pub(crate) fn kill(&mut self, victim: usize) -> Result<()> {
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

    pub(crate) fn handle_line(&mut self, index: usize, line: &str) -> Result<()> {
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

    pub(crate) fn living(&self) -> Vec<usize> {
        let living = (0..self.members.len()).filter(|index| !self.killed.contains_key(index));
        living.collect()
    }

    /// A new process in the place of a killed one, whose end all survivors have detected.
    pub(crate) fn replace(&mut self, plan: &Plan, index: usize) -> Result<()> {
        self.members[index] = start_member(plan, index, &self.output)?;
        self.killed.remove(&index);
        self.detected.remove(&index);
        Ok(())
    }

    pub(crate) fn all_detected(&self) -> bool {
        let lives = |index: &&usize| !self.killed.contains_key(index);
        let survivors = self.living().len();
        self.detected
            .values()
            .all(|by| by.iter().filter(lives).count() == survivors)
    }

    pub(crate) fn check_overdue(&self) -> Result<()> {
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

    /// The survivors leave; returns what each has reported.
    pub(crate) fn shut_down(&mut self) -> Result<Vec<String>> {
        let living = self.living();
        self.send_to(&living, "quiet")?;
        let reports = self.wait_for(&living, "quiet ")?;
        self.send_to(&living, "leave")?;
        for (index, left) in living.iter().zip(self.wait_for(&living, "left ")?) {
            ensure!(left == "0", "member {index} has {left} descriptors more than before");
        }
        for index in living {
            let status = self.members[index].wait()?;
            ensure!(status.success(), "member {index}: {status}");
        }
        Ok(reports)
    }

    /// Waits until each of these has printed a line with this prefix; returns the rests, in order.
    pub(crate) fn wait_for(&mut self, members: &[usize], prefix: &str) -> Result<Vec<String>> {
        let expected: Vec<_> = members.iter().map(|&index| (index, prefix)).collect();
        self.wait_for_each(&expected)
    }

    /// As [`wait_for`](Self::wait_for), with a prefix for each member.
    pub(crate) fn wait_for_each(&mut self, expected: &[(usize, &str)]) -> Result<Vec<String>> {
        let deadline = Instant::now() + TIMEOUT;
        let prefixes: HashMap<_, _> = expected.iter().copied().collect();
        let mut lines = HashMap::new();
        while lines.len() < expected.len() {
            let left = deadline.saturating_duration_since(Instant::now());
            ensure!(
                !left.is_zero(),
                "not every member printed one of {prefixes:?} within {TIMEOUT:?}"
            );
            let Some((index, line)) = self.next_line(left.min(Duration::from_millis(100)))? else {
                continue;
            };
            match prefixes.get(&index).and_then(|prefix| line.strip_prefix(prefix)) {
                Some(rest) => drop(lines.insert(index, rest.to_owned())),
                None => self.handle_line(index, &line)?,
            }
        }
        Ok(expected.iter().filter_map(|(index, _)| lines.remove(index)).collect())
    }

    /// `None` on timeout; an error when a member exited that was not killed.
    pub(crate) fn next_line(&mut self, wait: Duration) -> Result<Option<(usize, String)>> {
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

    pub(crate) fn send_to(&mut self, members: &[usize], line: &str) -> Result<()> {
        for &index in members {
            send_line(&mut self.members[index], line).with_context(|| format!("member {index}"))?;
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

/// Starts a member, and a thread that passes on its output. In a soak one member of four has link
/// faults, and another one uses UDP only.
fn start_member(plan: &Plan, index: usize, output: &Sender<(usize, String)>) -> Result<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    // A member also exits on its parent's death: at the end of its stdin.
    command
        .args(plan.to_args())
        .args(["--member", &index.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    match index % 4 {
        2 if plan.soak.is_some() => drop(command.env("DOORBELL_LINK", "udp")),
        3 if plan.soak.is_some() => drop(command.env("DOORBELL_FAULTS", format!("{FAULTS},seed={index}"))),
        _ => {}
    }
    let mut member = command.spawn().context("cannot start a member")?;
    let (lines, output) = (member.stdout.take().context("a member has no output")?, output.clone());
    thread::spawn(move || {
        for line in BufReader::new(lines).lines().map_while(Result::ok) {
            if output.send((index, line)).is_err() {
                return;
            }
        }
    });
    Ok(member)
}

pub(crate) fn send_line(member: &mut Child, line: &str) -> Result<()> {
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
