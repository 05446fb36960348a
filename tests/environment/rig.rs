//! Runs the two ends of each operation, and says what came of it in a cell.

use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::time::{Duration, Instant};
use std::{fs, process, thread};

use anyhow::{Context, Result, bail};
use doorbell_tests::built;
use doorbell_tests::process::Process;
use tempfile::TempDir;

use crate::environments::{Cgroup, Environment, Needs, PLAIN, refuse_process_vm};

const TIMEOUT: Duration = Duration::from_secs(20);
/// The names by which the command is a classic tool.
const CLASSIC: [&str; 2] = ["ib_send_lat", "ib_write_lat"];

pub(crate) struct Rig<'a> {
    environment: &'a Environment,
    programs: &'a Path,
    cgroup: Option<Cgroup>,
    /// Of the outputs.
    folder: TempDir,
    /// Of this process and row alone.
    port: u16,
}

/// The command and its classic names, where every user can run them.
pub(crate) fn programs() -> Result<TempDir> {
    let folder = tempfile::tempdir()?;
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755))?;
    for name in CLASSIC.iter().chain(&["doorbell"]) {
        symlink(built().join("doorbell"), folder.path().join(name))?;
    }
    Ok(folder)
}

impl<'a> Rig<'a> {
    pub(crate) fn new(index: usize, environment: &'a Environment, programs: &'a Path) -> Result<Self> {
        let cgroup = (environment.needs == Needs::Cgroup).then(Cgroup::new).transpose()?;
        if environment.needs == Needs::Seccomp {
            refuse_process_vm()?;
        }
        let folder = tempfile::tempdir()?;
        // Readable by other users: it is the working directory.
        fs::set_permissions(folder.path(), Permissions::from_mode(0o755))?;
        // Below those that the kernel gives to clients.
        let port = 10_000 + (process::id() % 1000) as u16 * 20 + index as u16;
        let rig = Self {
            environment,
            programs,
            cgroup,
            folder,
            port,
        };
        for script in environment.server.iter().chain([&environment.client]) {
            let mut probe = rig.start("probe", script, &["/bin/true"], &[])?;
            if probe.wait(Instant::now() + TIMEOUT)? != Some(0) {
                bail!("{script}: {}", probe.output().trim());
            }
        }
        Ok(rig)
    }

    fn start(&self, name: &str, script: &str, words: &[&str], more: &[(&str, String)]) -> Result<Process> {
        let program = self.programs.join(words[0]).display().to_string();
        let all = ["sh", "-c", script, "sh", &program]
            .into_iter()
            .chain(words[1..].iter().copied());
        let mut variables = vec![
            ("DOORBELL_SOFT_PORT", self.port.to_string()),
            ("TMPDIR", "/tmp".to_owned()),
        ];
        let cgroup = self.cgroup.as_ref().map(|group| group.0.display().to_string());
        variables.extend(cgroup.map(|cgroup| ("CGROUP", cgroup)));
        variables.extend(more.iter().cloned());
        let all: Vec<_> = all.map(str::to_owned).collect();
        Process::start(&all, &variables, self.folder.path(), name)
    }

    fn start_server(&self, line: &str, more: &[(&str, String)]) -> Result<Process> {
        let words: Vec<_> = line.split(' ').collect();
        self.start("server", self.environment.server.unwrap_or(PLAIN), &words, more)
    }

    /// The client's output; an error is its one line.
    fn client(&self, server: &Process, line: &str, more: &[(&str, String)]) -> Result<String> {
        let words: Vec<_> = line.split(' ').collect();
        let mut variables = vec![("SERVER", server.id().to_string())];
        variables.extend(more.iter().cloned());
        let mut client = self.start("client", self.environment.client, &words, &variables)?;
        let status = client.wait(Instant::now() + TIMEOUT)?;
        let output = client.output();
        match status {
            Some(0) => Ok(output),
            Some(_) => bail!("fails: {}", complaint(&output)),
            None => bail!("no end in {TIMEOUT:?}: {}", complaint(&output)),
        }
    }
}

/// The lines by which a program says why it failed.
fn complaint(output: &str) -> String {
    let is_complaint = |line: &&str| {
        let names = CLASSIC.iter().chain(&["doorbell"]);
        let mut said = names.filter_map(|name| line.strip_prefix(name)?.strip_prefix(": "));
        said.next().is_some_and(|said| !said.starts_with("warning"))
    };
    let lines: Vec<_> = output.lines().filter(is_complaint).collect();
    match lines[..] {
        [line] => line.to_owned(),
        [] => format!("nothing said: {output:?}"),
        _ => format!("{} lines: {}", lines.len(), lines.join(" / ")),
    }
}

/// What came of it, and whether a library warned.
fn cell(what: &str, output: &str) -> String {
    match output.lines().filter(|line| line.contains("WARN")).count() {
        0 => what.to_owned(),
        1 => format!("{what}, one warning"),
        more => format!("{what}, {more} warnings"),
    }
}

fn link(json: &str) -> &str {
    let link = json
        .split_once(r#""link":""#)
        .and_then(|(_, rest)| rest.split_once('"'));
    match link.map(|(link, _)| link) {
        Some("soft-local") => "shared memory",
        Some("soft-udp") => "UDP",
        other => other.unwrap_or("no link"),
    }
}

fn wait_until_it_waits(server: &mut Process) -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    while !["waits for a client", "Waiting for client"]
        .iter()
        .any(|line| server.output().contains(line))
    {
        if server.status()?.is_some() || Instant::now() > deadline {
            bail!("no server: {}", complaint(&server.output()));
        }
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// A process opens the default device while another has it open.
pub(crate) fn join(rig: &mut Rig) -> Result<String> {
    let mut server = rig.start_server(&format!("doorbell bw write --server --port {}", rig.port), &[])?;
    wait_until_it_waits(&mut server)?;
    let output = rig.client(&server, "doorbell run -- printenv DOORBELL_SOFT_ADDR", &[])?;
    let address = output.lines().last().context("no address")?;
    Ok(match address {
        "127.0.0.1" => cell("same address", &output),
        other => cell(other, &output),
    })
}

pub(crate) fn traffic(rig: &mut Rig) -> Result<String> {
    let port = rig.port;
    let mut server = rig.start_server(&format!("doorbell bw write --server --port {port}"), &[])?;
    wait_until_it_waits(&mut server)?;
    let line = format!("doorbell bw write 127.0.0.1 --port {port} -n 20 --verify --json");
    let output = rig.client(&server, &line, &[])?;
    Ok(cell(link(&output), &output))
}

fn classic(rig: &Rig, line: &str) -> Result<String> {
    let line = format!("{line} -F -n 20 -p {}", rig.port);
    let mut server = rig.start_server(&line, &[])?;
    wait_until_it_waits(&mut server)?;
    let output = rig.client(&server, &format!("{line} 127.0.0.1"), &[])?;
    Ok(cell("works", &output))
}

pub(crate) fn manager(rig: &mut Rig) -> Result<String> {
    classic(rig, "ib_send_lat -R")
}

pub(crate) fn perftest(rig: &mut Rig) -> Result<String> {
    classic(rig, "ib_write_lat")
}

/// Two ranks, as torchrun starts them.
pub(crate) fn bootstrap(rig: &mut Rig) -> Result<String> {
    const LINE: &str = "doorbell coll allreduce -b 64K -e 64K -n 10 --json";
    let variables = |rank: &str| {
        [
            ("RANK", rank),
            ("LOCAL_RANK", rank),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", &rig.port.to_string()),
            ("DOORBELL_SECRET", "0123456789abcdef"),
            ("DOORBELL_CALIBRATE", "no"),
        ]
        .map(|(name, value)| (name, value.to_owned()))
    };
    let mut first = rig.start_server(LINE, &variables("0"))?;
    let output = rig.client(&first, LINE, &variables("1"))?;
    if first.wait(Instant::now() + TIMEOUT)? != Some(0) {
        bail!("fails: {}", complaint(&first.output()));
    }
    Ok(cell(link(&first.output()), &output))
}
