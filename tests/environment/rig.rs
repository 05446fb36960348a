//! Runs the two ends of an operation in their environments, each with a deadline.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use doorbell_tests::built;
use doorbell_tests::process::Process;
use tempfile::TempDir;

use crate::environments::{Cgroup, Environment, Needs, PLAIN, refuse_process_vm};

/// Of each wait: much longer than an operation takes, much shorter than CI waits.
const TIMEOUT: Duration = Duration::from_secs(20);
/// The names by which the command is a classic tool.
const CLASSIC: [&str; 2] = ["ib_send_lat", "ib_write_lat"];
/// What a server prints before its client may start.
const READY: [&str; 2] = ["waits for a client", "Waiting for client"];

pub(crate) type Variables<'a> = &'a [(&'static str, &'a str)];

pub(crate) struct Rig<'a> {
    environment: &'a Environment,
    programs: &'a Path,
    cgroup: Option<Cgroup>,
    /// The working directory, and the outputs.
    folder: TempDir,
    /// Of this process and row alone, TCP and UDP.
    pub(crate) port: u16,
    /// The lines by which programs warned or said why they failed.
    pub(crate) said: BTreeSet<String>,
}

/// The programs and libraries, copied to where every user can run them.
pub(crate) fn programs() -> Result<TempDir> {
    let folder = shared_folder()?;
    let copies = ["doorbell", "libdoorbell_dropin.so", "libdoorbell_sysfs.so"].map(|name| built().join(name));
    for file in copies
        .iter()
        .map(|path| path.as_path())
        .chain([Path::new(env!("CARGO_BIN_EXE_cm"))])
    {
        let name = file.file_name().context("a program has a name")?;
        fs::copy(file, folder.path().join(name)).with_context(|| format!("cannot copy {}", file.display()))?;
    }
    for name in CLASSIC {
        symlink("doorbell", folder.path().join(name))?;
    }
    Ok(folder)
}

/// Readable by every user.
fn shared_folder() -> Result<TempDir> {
    let folder = tempfile::tempdir()?;
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755))?;
    Ok(folder)
}

impl<'a> Rig<'a> {
    pub(crate) fn new(index: usize, environment: &'a Environment, programs: &'a Path) -> Result<Self> {
        let cgroup = (environment.needs == Needs::Cgroup).then(Cgroup::new).transpose()?;
        if environment.needs == Needs::Seccomp {
            refuse_process_vm()?;
        }
        let rig = Self {
            environment,
            programs,
            cgroup,
            folder: shared_folder()?,
            // Below those that the kernel gives to clients; a group of ranks uses eight.
            port: 10_000 + (process::id() % 180) as u16 * 120 + index as u16 * 10,
            said: BTreeSet::new(),
        };
        for script in environment.server.iter().chain([&environment.client]) {
            let mut probe = rig.start("probe", script, "/bin/true", &[])?;
            if probe.wait(Instant::now() + TIMEOUT)? != Some(0) {
                bail!("{}", probe.output().trim());
            }
        }
        Ok(rig)
    }

    /// Starts the words of `line`.
    fn start(&self, name: &str, script: &str, line: &str, more: Variables) -> Result<Process> {
        let line = line.replace("PORT", &self.port.to_string());
        let words = ["sh", "-c", script, "sh"].into_iter().chain(line.split(' '));
        let words: Vec<_> = words.map(str::to_owned).collect();
        let mut variables = vec![
            ("DOORBELL_SOFT_PORT", self.port.to_string()),
            (
                "PATH",
                format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", self.programs.display()),
            ),
            ("TMPDIR", "/tmp".to_owned()),
        ];
        let cgroup = self.cgroup.as_ref().map(|group| group.folder().display().to_string());
        variables.extend(cgroup.map(|cgroup| ("CGROUP", cgroup)));
        variables.extend(more.iter().map(|&(name, value)| (name, value.to_owned())));
        Process::start(&words, &variables, self.folder.path(), name)
    }

    /// A server that waits for its client.
    pub(crate) fn server(&mut self, line: &str) -> Result<Process> {
        let ready = |_: &Self, server: &Process| READY.iter().any(|ready| server.output().contains(ready));
        self.start_server(line, &[], ready)
    }

    /// One that says nothing, and has the address once its device is open.
    pub(crate) fn first_rank(&mut self, line: &str, more: Variables) -> Result<Process> {
        self.start_server(line, more, |rig, server| {
            let ports = fs::read_to_string(format!("/proc/{}/net/udp", server.id())).unwrap_or_default();
            ports.contains(&format!(" 0100007F:{:04X} ", rig.port))
        })
    }

    fn start_server(
        &mut self,
        line: &str,
        more: Variables,
        is_ready: impl Fn(&Self, &Process) -> bool,
    ) -> Result<Process> {
        let script = self.environment.server.unwrap_or(PLAIN);
        let mut server = self.start("server", script, line, more)?;
        let deadline = Instant::now() + TIMEOUT;
        while !is_ready(self, &server) {
            if server.status()?.is_some() || Instant::now() > deadline {
                self.end(&mut server).context("the server")?;
                bail!("the server did not wait for a client: {:?}", server.output());
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }

    /// The client's output.
    pub(crate) fn client(&mut self, server: &Process, line: &str, more: Variables) -> Result<String> {
        let id = server.id().to_string();
        let variables: Vec<_> = more.iter().copied().chain([("SERVER", id.as_str())]).collect();
        let mut client = self.start("client", self.environment.client, line, &variables)?;
        self.end(&mut client).context("the client")
    }

    /// Waits for an exit with success, and notes what the program said in the one line that it may.
    pub(crate) fn end(&mut self, process: &mut Process) -> Result<String> {
        let status = process.wait(Instant::now() + TIMEOUT)?;
        let output = process.output();
        let lines: Vec<_> = output.lines().filter(|line| is_complaint(line)).collect();
        ensure!(lines.len() < 2, "{} lines: {}", lines.len(), lines.join(" / "));
        let said: Vec<_> = lines.iter().map(|line| self.portable(line)).collect();
        self.said.extend(said);
        match status {
            Some(0) => Ok(output),
            None => bail!("no end in {TIMEOUT:?}: {output:?}"),
            Some(status) if lines.is_empty() => bail!("status {status}, and nothing said: {output:?}"),
            Some(1) => bail!(Failed),
            Some(status) => bail!("status {status}: {}", lines[0]),
        }
    }

    /// Without what differs from run to run.
    fn portable(&self, line: &str) -> String {
        let line = line.trim().replace(&self.port.to_string(), "PORT");
        line.replace('|', "\\|")
    }
}

/// One line said why, and the exit status is a failed test's.
#[derive(Debug, thiserror::Error)]
#[error("fails")]
pub(crate) struct Failed;

/// A library's warning, or a program's reason; not advice about figures.
fn is_complaint(line: &str) -> bool {
    let names = CLASSIC.iter().chain(&["doorbell", "cm"]);
    let mut said = names.filter_map(|name| line.strip_prefix(name)?.strip_prefix(": "));
    let advice = |said: &str| said.starts_with("warning: ") || said.contains("waits for a client");
    ["WARN", "ERROR", "panicked"].iter().any(|mark| line.contains(mark)) || said.any(|said| !advice(said))
}
