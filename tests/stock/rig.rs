//! Runs rows: the command line of an end in each environment, and the run of one pair.

use crate::{
    cases::{Environment, FAULTS, LIMITS, Limit, Managed},
    judge,
    tool::{self, End, Gid, Suite},
};
use anyhow::{Result, bail};
use doorbell_tests::{
    environment::{kernel_gid, unprivileged},
    process::Process,
    scratch::Scratch,
};
use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Time limit of a row; far more than any takes, on a busy machine too: both ends of a pingpong
/// busy-poll, so that a round trip waits for time slices, 0.4 ms beside three busy processes on two
/// processors, and the longest has 100,000.
const LIMIT: Duration = Duration::from_secs(300);

/// This test's own: user 65534 runs the tools, and another user may have the default address.
const OWN: &str = "127.91.0.1";
/// Logs why a device could not be opened, which C tools cannot print.
const REASONS: (&str, &str) = ("DOORBELL_LOG", "error");

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    /// Both ends succeeded, and the output is right.
    Runs,
    /// The tool does not support the options; its message.
    NotOffered(String),
    /// Our device lacks a feature; the tool's message.
    Lacking(String),
    Fails(String),
}

impl Outcome {
    pub(crate) fn fails(&self) -> bool {
        matches!(self, Outcome::Fails(_))
    }

    /// Prints it with the programs' `output`, in one write, as others print concurrently.
    pub(crate) fn show(&self, what: &str, output: &str) {
        let line = match self {
            Outcome::Runs => format!("ok           {what}"),
            Outcome::NotOffered(why) => format!("not offered  {what}: {why}"),
            Outcome::Lacking(why) => format!("lacking      {what}: {why}"),
            Outcome::Fails(why) => format!("FAILED       {what}: {why}"),
        };
        print!("{line}\n{output}");
    }
}

pub(crate) struct Rig {
    doorbell: PathBuf,
    scratch: Scratch,
}

/// The soft device's address with RoCE v2 (decision 077): what other devices reach.
const SOFT_GID: u32 = 3;

struct EndEnvironment {
    prefix: Vec<String>,
    gid: Gid,
    /// Its IPv4 address, by which the tools connect: their servers listen on no other.
    host: &'static str,
}

impl Rig {
    /// Fails unless the command works.
    pub(crate) fn new(doorbell: PathBuf) -> Result<Self> {
        let scratch = Scratch::new("stock", 20_000..30_000)?;
        let rig = Self { doorbell, scratch };
        let mut words = rig.under_doorbell(&[]);
        words.push("true".to_owned());
        let mut tried = Process::start(&words, &[], &rig.folder("tried")?, "tried")?;
        if tried.wait(Instant::now() + LIMIT)? != Some(0) {
            bail!("{} does not work: {}", words.join(" "), tried.output().trim());
        }
        Ok(rig)
    }

    pub(crate) fn folder(&self, name: &str) -> Result<PathBuf> {
        self.scratch.folder(name)
    }

    /// The last lines of the output of a row's processes, if it failed.
    pub(crate) fn outputs_of(&self, folder: &str, outcome: &Outcome) -> String {
        if outcome.fails() {
            self.scratch.outputs(folder, &["server", "client"])
        } else {
            String::new()
        }
    }

    pub(crate) fn port(&self) -> Result<u16> {
        self.scratch.port()
    }

    /// `doorbell run` without any privilege, at [`OWN`] unless the options have an address.
    pub(crate) fn under_doorbell(&self, options: &[&str]) -> Vec<String> {
        let mut words = unprivileged();
        words.extend([self.doorbell.display().to_string(), "run".to_owned()]);
        if !options.contains(&"--address") {
            words.extend(["--address", OWN].map(str::to_owned));
        }
        words.extend(options.iter().map(|&word| word.to_owned()));
        words.push("--".to_owned());
        words
    }

    fn ends(&self, environment: Environment) -> Result<[EndEnvironment; 2]> {
        let soft = |options: &[&str], host| EndEnvironment {
            prefix: self.under_doorbell(options),
            gid: Gid {
                device: None,
                index: SOFT_GID,
            },
            host,
        };
        let twice = |options: &[&str]| [(); 2].map(|()| soft(options, "127.0.0.1"));
        Ok(match environment {
            Environment::Host => twice(&[]),
            Environment::Udp => twice(&["--link", "udp"]),
            Environment::Managed => [(); 2].map(|()| soft(&[], OWN)),
            Environment::Ipv6 => twice(&["--address", "::1"]),
            Environment::Wire { rxe_serves, ipv6 } => {
                let (ours, theirs) = if ipv6 {
                    ("fd09::2", "fd09::1")
                } else {
                    ("10.9.0.2", "10.9.0.1")
                };
                let mut soft = soft(&["--address", ours], "10.9.0.2");
                let namespace = ["ip", "netns", "exec", "peer"].map(str::to_owned);
                soft.prefix.splice(0..0, namespace);
                let rxe = EndEnvironment {
                    prefix: Vec::new(),
                    gid: Gid {
                        device: Some("rxe0"),
                        index: kernel_gid(theirs)?,
                    },
                    host: "10.9.0.1",
                };
                if rxe_serves { [rxe, soft] } else { [soft, rxe] }
            }
        })
    }

    pub(crate) fn pair(&self, name: &str, tool: &str, options: &str, environment: Environment) -> Result<Outcome> {
        let deadline = Instant::now() + LIMIT;
        let folder = self.folder(name)?;
        if let Some(&(.., why)) = FAULTS.iter().find(|fault| (fault.0, fault.1) == (tool, options)) {
            return Ok(Outcome::NotOffered(why.to_owned()));
        }
        if let Some(words) = tool::refusal(tool, options, &unprivileged(), &folder, deadline)? {
            return Ok(Outcome::NotOffered(words));
        }
        let suite = Suite::of(tool);
        let port = self.port()?;
        let [server, client] = self.ends(environment)?;
        let words = |environment: &EndEnvironment, end| {
            let own = suite.command(tool, options, end, port, &environment.gid);
            [environment.prefix.clone(), own].concat()
        };
        let pair = Pair {
            tool,
            server: words(&server, End::Server),
            client: words(&client, End::Client(server.host)),
            port,
            managed: options.split_whitespace().any(|word| word == "-R" || word == "-z"),
        };
        pair.run(&folder, deadline, |server, client| {
            judge::complaint(suite, options, server, client)
        })
    }

    pub(crate) fn managed(&self, name: &str, managed: &Managed) -> Result<Outcome> {
        let port = self.port()?;
        let words = |command: &str| {
            let command = command.replace("PORT", &port.to_string()).replace("HOST", OWN);
            let own = command.split_whitespace().map(str::to_owned);
            let prefix = self.under_doorbell(&[]);
            prefix.into_iter().chain(own).collect()
        };
        let pair = Pair {
            tool: managed.server.split(' ').next().unwrap_or_default(),
            server: words(managed.server),
            client: words(managed.client),
            port,
            managed: true,
        };
        pair.run(&self.folder(name)?, Instant::now() + LIMIT, |_, client| {
            judge::managed(managed.shows, client)
        })
    }
}

struct Pair<'a> {
    tool: &'a str,
    server: Vec<String>,
    client: Vec<String>,
    port: u16,
    /// Whether they connect by the connection manager, and not by TCP.
    managed: bool,
}

impl Pair<'_> {
    /// Runs both until they exit, or `deadline`; `complaint` checks their output.
    fn run(
        &self,
        folder: &Path,
        deadline: Instant,
        complaint: impl Fn(&str, &str) -> Option<String>,
    ) -> Result<Outcome> {
        let variables = [(REASONS.0, REASONS.1.to_owned())];
        let mut serving = Process::start(&self.server, &variables, folder, "server")?;
        let ready = if self.managed {
            serving.wait_idle(deadline)?
        } else {
            serving.wait_listening(self.port, deadline)?
        };
        if !ready {
            return failure(self.tool, "the server", &mut serving);
        }
        let mut client = Process::start(&self.client, &variables, folder, "client")?;
        for (who, process) in [("the client", &mut client), ("the server", &mut serving)] {
            if process.wait(deadline)? != Some(0) {
                return failure(self.tool, who, process);
            }
        }
        if let Some(left) = leftover(folder)? {
            return Ok(Outcome::Fails(format!("{left} is left behind")));
        }
        Ok(complaint(&serving.output(), &client.output()).map_or(Outcome::Runs, Outcome::Fails))
    }
}

/// Any file in a row's folder, which is its processes' TMPDIR, other than stdout and stderr.
fn leftover(folder: &Path) -> Result<Option<String>> {
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if !name.ends_with(".log") {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

fn failure(tool: &str, who: &str, process: &mut Process) -> Result<Outcome> {
    let output = process.output();
    for &(mark, limit) in LIMITS {
        if let Some(line) = output.lines().find(|line| line.contains(mark)) {
            let words = tool::reason_in(tool, line);
            return Ok(match limit {
                Limit::OfTheTool => Outcome::NotOffered(words),
                Limit::OfTheDevice => Outcome::Lacking(words),
            });
        }
    }
    let last = output
        .lines()
        .map(str::trim)
        .rfind(|line| line.chars().any(char::is_alphabetic));
    let how = match process.status()? {
        None => "does not end".to_owned(),
        Some(status) => format!("ends with {status}"),
    };
    Ok(Outcome::Fails(format!("{who} {how}: {}", last.unwrap_or("not a word"))))
}
