//! One pairing: how each end is started at each place, and what both come to.

use crate::{
    cases::{Case, Place},
    figures::{self, Figures},
};
use anyhow::{Context, Result, bail};
use doorbell_tests::{environment::kernel_gid, process::Process};
use nix::{
    sched::{CpuSet, sched_getaffinity},
    unistd::Pid,
};
use std::{
    fmt, fs,
    net::TcpListener,
    os::unix::fs::symlink,
    path::PathBuf,
    time::{Duration, Instant},
};

/// What one run may take: far more than any does.
const LIMIT: Duration = Duration::from_secs(120);
/// TCP ports of the tools, below those that the kernel gives out.
const PORTS: std::ops::Range<u16> = 30_100..32_700;
/// Runs that stock ends may spoil by themselves before it counts as a failure.
const CLOCKLESS: usize = 5;

/// An address that nobody else has: the connection manager's is the device's own.
const MANAGED: &str = "127.91.0.1";

/// Whose program an end is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Whose {
    /// The package's.
    Stock,
    /// Doorbell by the same name.
    Ours,
}

/// Who is at which end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Pairing {
    /// Whose server.
    pub(crate) server: Whose,
    /// Whose client.
    pub(crate) client: Whose,
}

impl Pairing {
    /// What all others are held against, and those.
    pub(crate) const ALL: [Pairing; 4] = {
        const fn pairing(server: Whose, client: Whose) -> Pairing {
            Pairing { server, client }
        }
        [
            pairing(Whose::Stock, Whose::Stock),
            pairing(Whose::Stock, Whose::Ours),
            pairing(Whose::Ours, Whose::Stock),
            pairing(Whose::Ours, Whose::Ours),
        ]
    };

    /// Those with one end of each.
    pub(crate) const MIXED: [Pairing; 2] = [Pairing::ALL[1], Pairing::ALL[2]];
}

impl fmt::Display for Pairing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |whose| match whose {
            Whose::Stock => "stock",
            Whose::Ours => "ours",
        };
        write!(f, "{} serves {}", name(self.server), name(self.client))
    }
}

/// What all runs share.
pub(crate) struct Rig {
    doorbell: PathBuf,
    /// Doorbell by the classic names; and outputs. Removed at the end.
    scratch: tempfile::TempDir,
    /// The processors that we may use.
    cores: Vec<usize>,
    next_port: u16,
    runs: usize,
}

impl Rig {
    /// One with this command.
    pub(crate) fn new(doorbell: PathBuf) -> Result<Self> {
        let scratch = tempfile::Builder::new().prefix("pairings-").tempdir()?;
        for verb in ["write", "read", "send", "atomic"] {
            for kind in ["bw", "lat"] {
                symlink(&doorbell, scratch.path().join(format!("ib_{verb}_{kind}")))?;
            }
        }
        Ok(Self {
            doorbell,
            scratch,
            cores: cores()?,
            next_port: PORTS.start,
            runs: 0,
        })
    }

    fn port(&mut self) -> Result<u16> {
        while PORTS.contains(&self.next_port) {
            let port = self.next_port;
            self.next_port += 1;
            if TcpListener::bind(("0.0.0.0", port)).is_ok() {
                return Ok(port);
            }
        }
        bail!("no TCP port of {PORTS:?} is left")
    }

    /// Where an end is to run, as taskset(1) has it: on its own, as an end that is moved from one core to another, or onto the other end's, measures that. A device in the process has a thread too. The last ones are
    /// taken, as the first have the interrupts; where there are too few it runs anywhere.
    fn cores_of(&self, place: Place, is_server: bool) -> Option<String> {
        let each = if place == Place::Rxe { 1 } else { 2 };
        let from = self.cores.len().checked_sub(2 * each)? + usize::from(!is_server) * each;
        let own: Vec<String> = self.cores[from..from + each].iter().map(usize::to_string).collect();
        Some(own.join(","))
    }

    /// An end's command line but for the peer, and its environment.
    fn end(&self, case: &Case, place: Place, whose: Whose, is_server: bool, port: u16) -> Result<End> {
        let mut words: Vec<String> = Vec::new();
        if let Some(cores) = self.cores_of(place, is_server) {
            words.extend(["taskset".to_owned(), "-c".to_owned(), cores]);
        }
        let mut variables = Vec::new();
        let on_rxe = matches!((place, is_server), (Place::Rxe, _) | (Place::Wire, true));
        if place == Place::Wire && !is_server {
            words.extend(["ip", "netns", "exec", "peer"].map(str::to_owned));
        }
        if !on_rxe {
            let address = match place {
                Place::Wire => Some("10.9.0.2"),
                Place::Managed => Some(MANAGED),
                Place::Host | Place::Udp | Place::Rxe => None,
            };
            let over_udp = place == Place::Udp;
            // The same for all ends; by shared memory a figure hangs on what else is in the machine's caches, and changes from run to run by more than any tool makes of it.
            variables.push(("DOORBELL_COPY", "vm".to_owned()));
            match whose {
                Whose::Stock => {
                    words.extend([self.doorbell.display().to_string(), "run".to_owned()]);
                    words.extend(
                        address
                            .into_iter()
                            .flat_map(|address| ["--address".to_owned(), address.to_owned()]),
                    );
                    words.extend(
                        over_udp
                            .then(|| ["--link".to_owned(), "udp".to_owned()])
                            .into_iter()
                            .flatten(),
                    );
                    words.push("--".to_owned());
                }
                Whose::Ours => {
                    variables.extend(address.map(|address| ("DOORBELL_SOFT_ADDR", address.to_owned())));
                    variables.extend(over_udp.then(|| ("DOORBELL_LINK", "udp".to_owned())));
                }
            }
        }
        words.push(match whose {
            Whose::Stock => case.tool.to_owned(),
            Whose::Ours => self.scratch.path().join(case.tool).display().to_string(),
        });
        words.extend(
            format!("{} -F -p {port}", case.options)
                .split_whitespace()
                .map(str::to_owned),
        );
        if on_rxe {
            words.extend([
                "-d".to_owned(),
                "rxe0".to_owned(),
                "-x".to_owned(),
                kernel_gid("10.9.0.1")?.to_string(),
            ]);
        }
        Ok(End { words, variables })
    }

    /// Runs a pairing once, and again where a stock end could not find out how fast the processor's clock goes: its figures are 0 then. The client's figures; and the server's where it has its own.
    pub(crate) fn run(&mut self, case: &Case, place: Place, pairing: Pairing) -> Result<Figures> {
        let mut clockless = 0;
        loop {
            let (server, client) = self.once(case, place, pairing)?;
            match figures::read(case, &client, pairing.client == Whose::Stock) {
                Ok(figures) => return Ok(figures),
                Err(_)
                    if clockless < CLOCKLESS
                        && [&server, &client]
                            .iter()
                            .any(|text| text.contains("Correlation coefficient")) =>
                {
                    clockless += 1
                }
                Err(why) => bail!("the client's figures: {why}"),
            }
        }
    }

    fn once(&mut self, case: &Case, place: Place, pairing: Pairing) -> Result<(String, String)> {
        let deadline = Instant::now() + LIMIT;
        let port = self.port()?;
        let folder = self.scratch.path().join(format!("run-{}", self.runs));
        self.runs += 1;
        fs::create_dir(&folder)?;
        let serving = self.end(case, place, pairing.server, true, port)?;
        let mut asking = self.end(case, place, pairing.client, false, port)?;
        let host = match place {
            Place::Host | Place::Udp => "127.0.0.1",
            Place::Managed => MANAGED,
            Place::Rxe | Place::Wire => "10.9.0.1",
        };
        asking.words.push(host.to_owned());
        let mut server = Process::start(&serving.words, &serving.variables, &folder, "server")?;
        let is_up = match place {
            Place::Managed => server.wait_idle(deadline)?,
            Place::Host | Place::Udp | Place::Rxe | Place::Wire => server.wait_listening(port, deadline)?,
        };
        if !is_up {
            bail!("the server does not listen: {}", last_words(&server.output()));
        }
        let mut client = Process::start(&asking.words, &asking.variables, &folder, "client")?;
        for (who, process) in [("client", &mut client), ("server", &mut server)] {
            match process.wait(deadline)? {
                Some(0) => {}
                Some(status) => bail!("the {who} ends with {status}: {}", last_words(&process.output())),
                None => bail!("the {who} does not end: {}", last_words(&process.output())),
            }
        }
        let outputs = (server.output(), client.output());
        fs::remove_dir_all(&folder).context("outputs cannot be removed")?;
        Ok(outputs)
    }
}

/// The processors that we may use, in their order.
fn cores() -> Result<Vec<usize>> {
    let allowed = sched_getaffinity(Pid::from_raw(0))?;
    Ok((0..CpuSet::count())
        .filter(|&core| allowed.is_set(core).unwrap_or(false))
        .collect())
}

/// A command line with its environment.
struct End {
    words: Vec<String>,
    variables: Vec<(&'static str, String)>,
}

/// The last line that says something.
fn last_words(output: &str) -> &str {
    let line = output
        .lines()
        .map(str::trim)
        .rfind(|line| line.chars().any(char::is_alphabetic));
    line.unwrap_or("not a word")
}
