//! Runs one pairing: the command line of each end in each environment, and their results.

use crate::{
    cases::{Case, Environment},
    results::{self, Results},
};
use anyhow::{Context, Result, bail};
use doorbell_tests::{environment::kernel_gid, process::Process, scratch::Scratch};
use nix::{
    sched::{CpuSet, sched_getaffinity},
    unistd::Pid,
};
use std::{
    fmt, fs,
    os::unix::fs::symlink,
    path::PathBuf,
    time::{Duration, Instant},
};

const LIMIT: Duration = Duration::from_secs(120);
/// Runs that a stock end may spoil by itself before it counts as a failure.
const MAX_CLOCK_FAILURES: usize = 5;

/// An address of this test's own: the connection manager's is the device's.
const MANAGED: &str = "127.91.0.1";

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Implementation {
    Stock,
    Ours,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Pairing {
    pub(crate) server: Implementation,
    pub(crate) client: Implementation,
}

impl Pairing {
    /// The reference first, then the others.
    pub(crate) const ALL: [Pairing; 4] = {
        const fn pairing(server: Implementation, client: Implementation) -> Pairing {
            Pairing { server, client }
        }
        [
            pairing(Implementation::Stock, Implementation::Stock),
            pairing(Implementation::Stock, Implementation::Ours),
            pairing(Implementation::Ours, Implementation::Stock),
            pairing(Implementation::Ours, Implementation::Ours),
        ]
    };

    pub(crate) const MIXED: [Pairing; 2] = [Pairing::ALL[1], Pairing::ALL[2]];
}

impl fmt::Display for Pairing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |implementation| match implementation {
            Implementation::Stock => "stock",
            Implementation::Ours => "ours",
        };
        write!(f, "{} serves {}", name(self.server), name(self.client))
    }
}

pub(crate) struct Rig {
    doorbell: PathBuf,
    /// Doorbell under the classic names; and outputs. Removed at the end.
    scratch: Scratch,
    cores: Vec<usize>,
    runs: usize,
}

impl Rig {
    pub(crate) fn new(doorbell: PathBuf) -> Result<Self> {
        let scratch = Scratch::new("pairings", 30_100..32_700)?;
        for verb in ["write", "read", "send", "atomic"] {
            for kind in ["bw", "lat"] {
                symlink(&doorbell, scratch.path().join(format!("ib_{verb}_{kind}")))?;
            }
        }
        Ok(Self {
            doorbell,
            scratch,
            cores: cores()?,
            runs: 0,
        })
    }

    /// A taskset(1) list: pinned apart, as migration would be measured; the last ones, as the first
    /// have the interrupts; not pinned with too few. An in-process device has a thread, too.
    fn cores_of(&self, environment: Environment, is_server: bool) -> Option<String> {
        let each = if environment == Environment::Rxe { 1 } else { 2 };
        let from = self.cores.len().checked_sub(2 * each)? + usize::from(!is_server) * each;
        let own: Vec<String> = self.cores[from..from + each].iter().map(usize::to_string).collect();
        Some(own.join(","))
    }

    /// An end's command line but for the peer, and its environment.
    fn end(
        &self,
        case: &Case,
        environment: Environment,
        implementation: Implementation,
        is_server: bool,
        port: u16,
    ) -> Result<End> {
        let mut words: Vec<String> = Vec::new();
        if let Some(cores) = self.cores_of(environment, is_server) {
            words.extend(["taskset".to_owned(), "-c".to_owned(), cores]);
        }
        let mut variables = Vec::new();
        let on_rxe = matches!(
            (environment, is_server),
            (Environment::Rxe, _) | (Environment::Wire, true)
        );
        if environment == Environment::Wire && !is_server {
            words.extend(["ip", "netns", "exec", "peer"].map(str::to_owned));
        }
        if !on_rxe {
            let address = match environment {
                Environment::Wire => Some("10.9.0.2"),
                Environment::Managed => Some(MANAGED),
                Environment::Host | Environment::Udp | Environment::Rxe => None,
            };
            let over_udp = environment == Environment::Udp;
            // The same for all: with shared memory results depend on the contents of caches.
            variables.push(("DOORBELL_COPY", "ring".to_owned()));
            match implementation {
                Implementation::Stock => {
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
                Implementation::Ours => {
                    variables.extend(address.map(|address| ("DOORBELL_SOFT_ADDR", address.to_owned())));
                    variables.extend(over_udp.then(|| ("DOORBELL_LINK", "udp".to_owned())));
                }
            }
        }
        words.push(match implementation {
            Implementation::Stock => case.tool.to_owned(),
            Implementation::Ours => self.scratch.path().join(case.tool).display().to_string(),
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

    /// Runs a pairing once, and again where a stock end could not measure the clock rate: its
    /// results are 0 then. Returns the client's result; and the server's where it has its own.
    pub(crate) fn run(&mut self, case: &Case, environment: Environment, pairing: Pairing) -> Result<Results> {
        let mut clock_failures = 0;
        loop {
            let (server, client) = self.once(case, environment, pairing)?;
            match results::read(case, &client, pairing.client == Implementation::Stock) {
                Ok(results) => return Ok(results),
                Err(_)
                    if clock_failures < MAX_CLOCK_FAILURES
                        && [&server, &client]
                            .iter()
                            .any(|text| text.contains("Correlation coefficient")) =>
                {
                    clock_failures += 1
                }
                Err(why) => bail!("the client's results: {why}"),
            }
        }
    }

    fn once(&mut self, case: &Case, environment: Environment, pairing: Pairing) -> Result<(String, String)> {
        let deadline = Instant::now() + LIMIT;
        let port = self.scratch.port()?;
        let folder = self.scratch.path().join(format!("run-{}", self.runs));
        self.runs += 1;
        fs::create_dir(&folder)?;
        let serving = self.end(case, environment, pairing.server, true, port)?;
        let mut client_end = self.end(case, environment, pairing.client, false, port)?;
        let host = match environment {
            Environment::Host | Environment::Udp => "127.0.0.1",
            Environment::Managed => MANAGED,
            Environment::Rxe | Environment::Wire => "10.9.0.1",
        };
        client_end.words.push(host.to_owned());
        let mut server = Process::start(&serving.words, &serving.variables, &folder, "server")?;
        let is_up = match environment {
            Environment::Managed => server.wait_idle(deadline)?,
            Environment::Host | Environment::Udp | Environment::Rxe | Environment::Wire => {
                server.wait_listening(port, deadline)?
            }
        };
        if !is_up {
            bail!("the server does not listen: {}", last_line(&server.output()));
        }
        let mut client = Process::start(&client_end.words, &client_end.variables, &folder, "client")?;
        for (who, process) in [("client", &mut client), ("server", &mut server)] {
            match process.wait(deadline)? {
                Some(0) => {}
                Some(status) => bail!("the {who} ends with {status}: {}", last_line(&process.output())),
                None => bail!("the {who} does not end: {}", last_line(&process.output())),
            }
        }
        let outputs = (server.output(), client.output());
        fs::remove_dir_all(&folder).context("outputs cannot be removed")?;
        Ok(outputs)
    }
}

fn cores() -> Result<Vec<usize>> {
    let allowed = sched_getaffinity(Pid::from_raw(0))?;
    Ok((0..CpuSet::count())
        .filter(|&core| allowed.is_set(core).unwrap_or(false))
        .collect())
}

struct End {
    words: Vec<String>,
    variables: Vec<(&'static str, String)>,
}

fn last_line(output: &str) -> &str {
    let line = output
        .lines()
        .map(str::trim)
        .rfind(|line| line.chars().any(char::is_alphabetic));
    line.unwrap_or("no output")
}
