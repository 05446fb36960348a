//! Runs a row: its client on the device, the same client without, and each end killed.

use crate::{
    cases::{Case, Device, Ready, Run},
    read::Report,
};
use anyhow::{Context, Result, bail, ensure};
use doorbell_tests::{environment::unprivileged, process::Process, scratch::Scratch};
use std::{
    env, fs,
    net::{IpAddr, Ipv4Addr, UdpSocket},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

/// Of one run; far more than any takes, on a busy machine too.
const LIMIT: Duration = Duration::from_secs(60);
/// For the survivor of a kill to exit: the longest timeout is UCX's of UD, 30 s.
const SURVIVAL: Duration = Duration::from_secs(40);
/// The time that both ends of a lasting run have to connect.
const UNDER_WAY: Duration = Duration::from_millis(1500);

const ENDS: [&str; 2] = ["server", "client"];

/// Successive ports of a row.
pub(crate) const PORTS: u16 = 16;

/// What the lines of rows run beside the clients.
pub(crate) const FILES: [(&str, &str); 7] = [
    ("guest.s", include_str!("guest.s")),
    ("iser.sh", include_str!("iser.sh")),
    ("migrate.sh", include_str!("migrate.sh")),
    ("mpi.py", include_str!("mpi.py")),
    ("ring.c", include_str!("ring.c")),
    ("tensorpipe.py", include_str!("tensorpipe.py")),
    ("transfer.py", include_str!("transfer.py")),
];

/// What a row has shown.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    pub(crate) report: Report,
    pub(crate) beside: String,
    /// What the other end did when the server and when the client was killed.
    pub(crate) killed: [String; 2],
}

pub(crate) struct Rig {
    doorbell: PathBuf,
    wheels: Option<PathBuf>,
    scratch: Scratch,
    /// The device's address: not loopback, which libfabric does not use for RDMA.
    address: IpAddr,
    /// The device's UDP port: another user may have the usual one.
    port: u16,
}

/// Both ends of a run, the server first.
struct Ends {
    server: Option<Process>,
    client: Process,
}

impl Rig {
    pub(crate) fn new(doorbell: &Path, wheels: Option<&Path>) -> Result<Self> {
        let doorbell = fs::canonicalize(doorbell).with_context(|| format!("no command at {}", doorbell.display()))?;
        let scratch = Scratch::new("clients", 20_000..30_000)?;
        for (name, text) in FILES {
            fs::write(scratch.path().join(name), text)?;
        }
        // The tests of crates, which `cargo xtask clients` builds.
        let crates = env::current_exe()?.with_file_name("../crates");
        symlink(crates, scratch.path().join("crates"))?;
        let address = own_address().context("this host has no address but loopback's")?;
        let port = scratch.port()?;
        Ok(Self {
            doorbell,
            wheels: wheels.map(fs::canonicalize).transpose()?,
            scratch,
            address,
            port,
        })
    }

    /// Runs a row; if `whole`, also without RDMA and with each end killed. `name` is of a folder of
    /// its own.
    pub(crate) fn perform(&self, case: &Case, whole: bool, name: &str) -> Result<Outcome> {
        let report = self.report(&case.run, name)?;
        let beside = match case.beside.as_ref().filter(|_| whole) {
            Some(run) => self.report(run, &format!("{name}-beside"))?.figure,
            None => "–".to_owned(),
        };
        let mut killed = [(); 2].map(|()| "–".to_owned());
        if let Some(run) = case.lasting.as_ref().filter(|_| whole) {
            for (index, survivor) in killed.iter_mut().enumerate() {
                *survivor = self.killed(run, index, &format!("{name}-killed-{}", ENDS[index]))?;
            }
        }
        Ok(Outcome { report, beside, killed })
    }

    /// The last lines of the output of a row's processes.
    pub(crate) fn outputs(&self, name: &str) -> String {
        let parts = ["", "-beside", "-killed-server", "-killed-client"];
        let outputs = parts.map(|part| self.scratch.outputs(&format!("{name}{part}"), &ENDS));
        outputs.concat()
    }

    /// Runs both ends until they exit, as often as the row says.
    fn report(&self, run: &Run, name: &str) -> Result<Report> {
        let (mut servers, mut clients) = (String::new(), String::new());
        for _ in 0..run.times {
            let [server, client] = self.completed(run, name)?;
            servers += &server;
            clients += &client;
        }
        (run.read)(&servers, &clients)
    }

    /// The output of both ends, which must succeed.
    fn completed(&self, run: &Run, name: &str) -> Result<[String; 2]> {
        let deadline = Instant::now() + LIMIT;
        let mut ends = self.start(run, name, deadline)?;
        let client = ends.client.wait(deadline)?;
        ensure!(client == Some(0), "the client {}", ending(client));
        let server = match &mut ends.server {
            Some(server) => {
                let status = server.wait(deadline)?;
                ensure!(status == Some(0), "the server {}", ending(status));
                server.output()
            }
            None => String::new(),
        };
        Ok([server, ends.client.output()])
    }

    /// Kills one end in the middle, and measures when the other exits.
    fn killed(&self, run: &Run, index: usize, name: &str) -> Result<String> {
        let ends = self.start(run, name, Instant::now() + LIMIT)?;
        let mut both = [ends.server.context("no server to kill")?, ends.client];
        if let Some(shown) = run.under_way {
            let is_shown = both[1].wait_shown(shown, Instant::now() + LIMIT)?;
            ensure!(is_shown, "the client has not shown {shown:?}");
        }
        thread::sleep(UNDER_WAY);
        for (process, end) in both.iter_mut().zip(ENDS) {
            let status = process.status()?;
            ensure!(status.is_none(), "the {end} {} before any is killed", ending(status));
        }
        both[index].signal(libc::SIGKILL);
        let killed = Instant::now();
        let status = both[1 - index].wait(killed + SURVIVAL)?;
        let took = killed.elapsed().as_secs_f64();
        Ok(match status {
            None => format!("still runs after {} s", SURVIVAL.as_secs()),
            Some(status) => format!("ends with {status} after {took:.1} s"),
        })
    }

    fn start(&self, run: &Run, name: &str, deadline: Instant) -> Result<Ends> {
        let folder = self.scratch.folder(name)?;
        let port = self.scratch.ports(PORTS)?;
        let environment = self.environment(run)?;
        let start = |line: &str, end| Process::start(&self.words(run, line, port), &environment, &folder, end);
        let server = match &run.server {
            None => None,
            Some((line, ready)) => {
                let mut server = start(line, ENDS[0])?;
                let is_ready = match ready {
                    Ready::Listening => server.wait_listening(port, deadline)?,
                    Ready::Idle => server.wait_idle(deadline)?,
                    Ready::Shows(line) => server.wait_shown(line, deadline)?,
                };
                if !is_ready {
                    bail!("the server is not ready, and {}", ending(server.status()?));
                }
                Some(server)
            }
        };
        let client = start(&run.client, ENDS[1])?;
        Ok(Ends { server, client })
    }

    /// A line of a row, without any privilege, on the device's address if it uses it.
    fn words(&self, run: &Run, line: &str, port: u16) -> Vec<String> {
        let (address, rails): (_, &[&str]) = match run.device {
            Device::None | Device::One => (self.address, &[]),
            Device::Rails(faults) => (IpAddr::from(Ipv4Addr::LOCALHOST), faults),
        };
        let line = line
            .replace("PORT", &port.to_string())
            .replace("HOST", &address.to_string())
            .replace("FILES", &self.scratch.path().display().to_string());
        let mut words = unprivileged();
        if run.device != Device::None {
            words.extend([self.doorbell.display().to_string(), "run".to_owned()]);
            words.extend(["--address".to_owned(), address.to_string()]);
            words.extend(rails.iter().map(|&option| option.to_owned()));
            words.extend(["--udp-port".to_owned(), self.port.to_string(), "--".to_owned()]);
        }
        words.extend(["sh".to_owned(), "-c".to_owned(), line]);
        words
    }

    fn environment(&self, run: &Run) -> Result<Vec<(&'static str, String)>> {
        // Logs why a device could not be opened, which C programs cannot print.
        let log = ("DOORBELL_LOG", "error");
        let variables = run.variables.iter().chain([&log]);
        let mut variables: Vec<_> = variables.map(|&(name, value)| (name, value.to_owned())).collect();
        if run.from_wheels {
            let wheels = self
                .wheels
                .as_ref()
                .context("its packages are in no folder: --wheels")?;
            variables.push(("PYTHONPATH", wheels.display().to_string()));
        }
        Ok(variables)
    }
}

fn ending(status: Option<i32>) -> String {
    match status {
        None => "does not end".to_owned(),
        Some(status) => format!("ends with {status}"),
    }
}

/// This host's address on its default route. Connecting a UDP socket sends nothing.
fn own_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("198.51.100.1:9").ok()?;
    let address = socket.local_addr().ok()?.ip();
    (!address.is_loopback()).then_some(address)
}
