//! Where rows run: how an end is started in each place, and the running of one pair.

use crate::{
    cases::{FAULTS, LIMITS, Limit, Managed, Place},
    judge,
    tool::{self, End, Gid, Suite},
};
use anyhow::{Result, bail};
use doorbell_tests::{
    environment::{kernel_gid, unprivileged},
    process::Process,
};
use std::{
    fs,
    net::{Ipv4Addr, Ipv6Addr, TcpListener},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU16, Ordering},
    time::{Duration, Instant},
};

/// What a row may take: far more than any does, on a machine that does much else.
const LIMIT: Duration = Duration::from_secs(120);
/// TCP ports of the tools: below those that the kernel gives out.
const PORTS: std::ops::Range<u16> = 20_000..30_000;

/// An address of loopback that nobody takes by default: the tools run as nobody, and the default address may be another user's.
const OWN: &str = "127.91.0.1";
/// Why a device could not be opened, which C tools cannot say.
const REASONS: (&str, &str) = ("DOORBELL_LOG", "error");
/// Lines of an output that are shown when it is of a failure.
const SHOWN: usize = 30;

/// How a row ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    /// Both ends were content, and so are we.
    Runs,
    /// The tool takes no such options, in its own words.
    NotOffered(String),
    /// The tool says what our device lacks.
    Lacking(String),
    /// Anything else.
    Fails(String),
}

impl Outcome {
    pub(crate) fn fails(&self) -> bool {
        matches!(self, Outcome::Fails(_))
    }

    /// Prints a line about it, and below it what the programs `said`: in one piece, whatever else prints.
    pub(crate) fn show(&self, what: &str, said: &str) {
        let line = match self {
            Outcome::Runs => format!("ok           {what}"),
            Outcome::NotOffered(why) => format!("not offered  {what}: {why}"),
            Outcome::Lacking(why) => format!("lacking      {what}: {why}"),
            Outcome::Fails(why) => format!("FAILED       {what}: {why}"),
        };
        print!("{line}\n{said}");
    }
}

/// What all rows share.
pub(crate) struct Rig {
    /// The `doorbell` command.
    doorbell: PathBuf,
    /// Where outputs go; removed at the end.
    scratch: tempfile::TempDir,
    ports: AtomicU16,
}

/// One end's surroundings.
struct Surroundings {
    /// What comes before the tool.
    prefix: Vec<String>,
    gid: Gid,
    /// Its IPv4 address, by which the tools find each other: their servers listen on no other.
    host: &'static str,
}

impl Rig {
    /// One with this command, which must work at all.
    pub(crate) fn new(doorbell: PathBuf) -> Result<Self> {
        let scratch = tempfile::Builder::new().prefix("stock-").tempdir()?;
        // The tools run as nobody, who may come in here.
        fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755))?;
        let rig = Self {
            doorbell,
            scratch,
            ports: AtomicU16::new(PORTS.start),
        };
        let mut words = rig.under_doorbell(&[]);
        words.push("true".to_owned());
        let mut tried = Process::start(&words, &[], &rig.folder("tried")?, "tried")?;
        if tried.wait(Instant::now() + LIMIT)? != Some(0) {
            bail!("{} does not work: {}", words.join(" "), tried.output().trim());
        }
        Ok(rig)
    }

    /// A folder for the outputs of one row, in which nobody may write.
    pub(crate) fn folder(&self, name: &str) -> Result<PathBuf> {
        let folder = self.scratch.path().join(name);
        fs::create_dir_all(&folder)?;
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777))?;
        Ok(folder)
    }

    /// The ends of what the processes of a row wrote, where it failed; else nothing.
    pub(crate) fn outputs_of(&self, folder: &str, outcome: &Outcome) -> String {
        if !outcome.fails() {
            return String::new();
        }
        let ends = ["server", "client"].map(|end| {
            let file = self.scratch.path().join(folder).join(end).with_extension("log");
            let text = fs::read(file).unwrap_or_default();
            indented(&format!("{end}: "), &String::from_utf8_lossy(&text))
        });
        ends.concat()
    }

    /// A TCP port that nobody uses, and no other row is given.
    pub(crate) fn port(&self) -> Result<u16> {
        loop {
            let port = self.ports.fetch_add(1, Ordering::Relaxed);
            if !PORTS.contains(&port) {
                bail!("no TCP port of {PORTS:?} is left");
            }
            let free = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
                .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)));
            if free.is_ok() {
                return Ok(port);
            }
        }
    }

    /// `doorbell run` with these options, without any privilege; at [`OWN`] unless they have an address.
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

    /// The two ends' surroundings: the server's, the client's.
    fn ends(&self, place: Place) -> Result<[Surroundings; 2]> {
        let soft = |options: &[&str], host| Surroundings {
            prefix: self.under_doorbell(options),
            gid: Gid { device: None, index: 0 },
            host,
        };
        let twice = |options: &[&str]| [(); 2].map(|()| soft(options, "127.0.0.1"));
        Ok(match place {
            Place::Host => twice(&[]),
            Place::Udp => twice(&["--link", "udp"]),
            Place::Managed => [(); 2].map(|()| soft(&[], OWN)),
            Place::Ipv6 => twice(&["--address", "::1"]),
            Place::Wire { rxe_serves, ipv6 } => {
                let (ours, theirs) = if ipv6 {
                    ("fd09::2", "fd09::1")
                } else {
                    ("10.9.0.2", "10.9.0.1")
                };
                let mut soft = soft(&["--address", ours], "10.9.0.2");
                let namespace = ["ip", "netns", "exec", "peer"].map(str::to_owned);
                soft.prefix.splice(0..0, namespace);
                let rxe = Surroundings {
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

    /// Runs one pair.
    pub(crate) fn pair(&self, name: &str, tool: &str, options: &str, place: Place) -> Result<Outcome> {
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
        let [server, client] = self.ends(place)?;
        let words = |surroundings: &Surroundings, end| {
            let own = suite.command(tool, options, end, port, &surroundings.gid);
            [surroundings.prefix.clone(), own].concat()
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

    /// Runs a pair that finds itself by the connection manager.
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

/// Two ends that are ready to be started.
struct Pair<'a> {
    tool: &'a str,
    server: Vec<String>,
    client: Vec<String>,
    port: u16,
    /// Whether they find each other by the connection manager, and not by TCP.
    managed: bool,
}

impl Pair<'_> {
    /// Runs both until they end, or `deadline`; `complaint` reads what they wrote.
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
        let mut asking = Process::start(&self.client, &variables, folder, "client")?;
        for (who, process) in [("the client", &mut asking), ("the server", &mut serving)] {
            if process.wait(deadline)? != Some(0) {
                return failure(self.tool, who, process);
            }
        }
        if let Some(left) = leftover(folder)? {
            return Ok(Outcome::Fails(format!("{left} is left behind")));
        }
        Ok(complaint(&serving.output(), &asking.output()).map_or(Outcome::Runs, Outcome::Fails))
    }
}

/// The last lines of what a program wrote, each below what is told of its row.
pub(crate) fn indented(who: &str, text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let shown = &lines[lines.len().saturating_sub(SHOWN)..];
    shown.iter().map(|line| format!("    {who}{line}\n")).collect()
}

/// Anything in a row's folder, which is its processes' TMPDIR, but what they wrote to stdout and stderr.
fn leftover(folder: &Path) -> Result<Option<String>> {
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if !name.ends_with(".log") {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

/// What is told of an end that did not end well.
fn failure(tool: &str, who: &str, process: &mut Process) -> Result<Outcome> {
    let output = process.output();
    for &(mark, limit) in LIMITS {
        if let Some(line) = output.lines().find(|line| line.contains(mark)) {
            let words = tool::words_of(tool, line);
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
