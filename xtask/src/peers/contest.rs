//! The programs that are compared: how to run both ends of each, and where to read its result.

use super::{
    process::KillOnDrop,
    read::{self, FieldSelector},
};
use crate::target_folder;
use anyhow::{Context, Result, bail};
use std::{
    io,
    path::PathBuf,
    process::{Command, Output, Stdio},
    sync::atomic::{AtomicU16, Ordering},
    thread,
    time::{Duration, Instant},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Environment {
    Host,
    Guest,
}

pub(super) struct Contest {
    pub(super) environment: Environment,
    pub(super) name: &'static str,
    pub(super) path: &'static str,
    pub(super) operation: &'static str,
    tool: Tool,
}

#[derive(Clone, Copy)]
enum Tool {
    /// `doorbell bw` and `doorbell lat`, which run both ends themselves; the link.
    Doorbell(&'static str),
    /// perftest under `doorbell run`; the link.
    Dropin(&'static str),
    Rxe,
    Ucx(&'static str),
    /// libfabric's ping-pong, with this provider and this kind of endpoint.
    Fabric(&'static str, &'static str),
}

const fn host(name: &'static str, path: &'static str, operation: &'static str, tool: Tool) -> Contest {
    Contest {
        environment: Environment::Host,
        name,
        path,
        operation,
        tool,
    }
}

const fn guest(name: &'static str, path: &'static str, tool: Tool) -> Contest {
    Contest {
        environment: Environment::Guest,
        name,
        path,
        operation: "RDMA WRITE",
        tool,
    }
}

pub(super) const CONTESTS: [Contest; 11] = [
    host("doorbell", "between processes", "RDMA WRITE", Tool::Doorbell("local")),
    host(
        "ib_write",
        "the drop-in, between processes",
        "RDMA WRITE",
        Tool::Dropin("local"),
    ),
    host(
        "ucx_perftest",
        "shared memory (`posix,cma`)",
        "put",
        Tool::Ucx("posix,cma,self"),
    ),
    host(
        "fi_pingpong",
        "provider shm",
        "messages to and fro",
        Tool::Fabric("shm", "rdm"),
    ),
    host("doorbell", "UDP on loopback", "RDMA WRITE", Tool::Doorbell("udp")),
    host(
        "ib_write",
        "the drop-in, UDP on loopback",
        "RDMA WRITE",
        Tool::Dropin("udp"),
    ),
    host("ucx_perftest", "TCP on loopback", "put", Tool::Ucx("tcp,self")),
    host(
        "fi_pingpong",
        "provider tcp",
        "messages to and fro",
        Tool::Fabric("tcp", "msg"),
    ),
    guest("ib_write", "rxe0 at both ends", Tool::Rxe),
    guest("ib_write", "the drop-in, UDP on loopback", Tool::Dropin("udp")),
    guest("ib_write", "the drop-in, between processes", Tool::Dropin("local")),
];

/// Server ports, each used once, so that sockets of the last pair in TIME_WAIT do not interfere.
static PORT: AtomicU16 = AtomicU16::new(23_000);

const LIMIT: Duration = Duration::from_secs(60);
/// For a server to exit after its client.
const GRACE: Duration = Duration::from_secs(1);
/// How often a client retries while its server does not listen yet, and the delay between attempts.
const MAX_ATTEMPTS: u32 = 40;
const RETRY_DELAY: Duration = Duration::from_millis(100);

pub(super) struct Trial {
    /// None when the client's program starts its own server.
    server: Option<Vec<String>>,
    client: Vec<String>,
    variables: Vec<(&'static str, &'static str)>,
    field: FieldSelector,
}

impl Contest {
    /// Bandwidth in GB/s.
    pub(super) fn bandwidth(&self) -> Trial {
        let port = PORT.fetch_add(1, Ordering::Relaxed);
        // The guest's processor is emulated.
        let (bytes, count) = match self.environment {
            Environment::Host => ("1048576", "3000"),
            Environment::Guest => ("65536", "300"),
        };
        match self.tool {
            Tool::Doorbell(link) => doorbell("bw", link, bytes, count, read::PERFTEST_BW),
            Tool::Dropin(link) => self.perftest("ib_write_bw", Some(link), bytes, count, port, read::PERFTEST_BW),
            Tool::Rxe => self.perftest("ib_write_bw", None, bytes, count, port, read::PERFTEST_BW),
            Tool::Ucx(transports) => ucx(transports, "ucp_put_bw", bytes, "1000", port, read::UCX_BW),
            Tool::Fabric(provider, kind) => fabric(provider, kind, bytes, "1000", port, read::FABRIC_BW),
        }
    }

    /// Half of a round trip of 8 bytes, in microseconds.
    pub(super) fn latency(&self) -> Trial {
        let port = PORT.fetch_add(1, Ordering::Relaxed);
        let count = match self.environment {
            Environment::Host => "5000",
            Environment::Guest => "500",
        };
        match self.tool {
            Tool::Doorbell(link) => doorbell("lat", link, "8", count, read::DOORBELL_LAT),
            Tool::Dropin(link) => self.perftest("ib_write_lat", Some(link), "8", count, port, read::PERFTEST_LAT),
            Tool::Rxe => self.perftest("ib_write_lat", None, "8", count, port, read::PERFTEST_LAT),
            Tool::Ucx(transports) => ucx(transports, "ucp_put_lat", "8", count, port, read::UCX_LAT),
            Tool::Fabric(provider, kind) => fabric(provider, kind, "8", count, port, read::FABRIC_LAT),
        }
    }

    /// perftest on the drop-in library over a link, or on rxe0. In the guest the drop-in runs in
    /// its own network namespace, as rxe holds the port in the first.
    fn perftest(
        &self,
        tool: &str,
        link: Option<&str>,
        bytes: &str,
        count: &str,
        port: u16,
        field: FieldSelector,
    ) -> Trial {
        let mut line = Vec::new();
        if link.is_some() && self.environment == Environment::Guest {
            line.extend(["ip", "netns", "exec", "peer"].map(String::from));
        }
        match link {
            Some(link) => {
                line.extend([program(), "run".into(), "--link".into(), link.into(), "--".into()]);
                line.push(tool.into());
            }
            None => line.extend([tool, "-d", "rxe0"].map(String::from)),
        }
        let port = port.to_string();
        line.extend(["-F", "-s", bytes, "-n", count, "-p", &port].map(String::from));
        let mut client = line.clone();
        client.push("127.0.0.1".into());
        Trial {
            server: Some(line),
            client,
            variables: Vec::new(),
            field,
        }
    }
}

fn program() -> String {
    let target = target_folder().unwrap_or_else(|_| PathBuf::from("target"));
    target.join("release/doorbell").to_string_lossy().into_owned()
}

fn doorbell(test: &str, link: &'static str, bytes: &str, count: &str, field: FieldSelector) -> Trial {
    let mut client = vec![program()];
    client.extend([test, "write", "--no-progress", "-s", bytes, "-n", count].map(String::from));
    Trial {
        server: None,
        client,
        variables: vec![("DOORBELL_LINK", link)],
        field,
    }
}

fn ucx(transports: &'static str, test: &str, bytes: &str, count: &str, port: u16, field: FieldSelector) -> Trial {
    let port = port.to_string();
    let client = [
        "ucx_perftest",
        "127.0.0.1",
        "-p",
        &port,
        "-t",
        test,
        "-s",
        bytes,
        "-n",
        count,
        "-f",
    ];
    Trial {
        server: Some(["ucx_perftest", "-p", &port].map(String::from).into()),
        client: client.map(String::from).into(),
        variables: vec![("UCX_TLS", transports)],
        field,
    }
}

fn fabric(provider: &str, kind: &str, bytes: &str, count: &str, port: u16, field: FieldSelector) -> Trial {
    let port = port.to_string();
    let common = ["fi_pingpong", "-p", provider, "-e", kind, "-S", bytes, "-I", count].map(String::from);
    let with = |end: &[&str]| {
        let end = end.iter().map(|word| (*word).to_owned());
        common.iter().cloned().chain(end).collect::<Vec<_>>()
    };
    Trial {
        server: Some(with(&["-B", &port])),
        client: with(&["-P", &port, "127.0.0.1"]),
        variables: Vec::new(),
        field,
    }
}

impl Trial {
    /// Runs both ends and returns the client's result.
    pub(super) fn run(&self) -> Result<f64> {
        let Some(server) = &self.server else {
            return self.parse(&finish(self.start(&self.client)?)?);
        };
        let mut server = self.start(server)?;
        let mut last = String::new();
        for _ in 0..MAX_ATTEMPTS {
            thread::sleep(RETRY_DELAY);
            if let Some(status) = server.child.try_wait()? {
                bail!("the server ended early, with {status}: {last}");
            }
            let output = finish(self.start(&self.client)?)?;
            match self.parse(&output) {
                Ok(value) => return Ok(value),
                Err(error) => last = format!("{error:#}"),
            }
        }
        bail!("{last}")
    }

    fn start(&self, line: &[String]) -> Result<KillOnDrop> {
        let (name, arguments) = line.split_first().context("no program")?;
        let mut command = Command::new(name);
        command.args(arguments).envs(self.variables.iter().copied());
        KillOnDrop::spawn(command.stderr(Stdio::piped()), GRACE)
    }

    fn parse(&self, output: &Output) -> Result<f64> {
        let text = String::from_utf8_lossy(&output.stdout);
        if !output.status.success() {
            let errors = String::from_utf8_lossy(&output.stderr);
            let last_line = errors.lines().chain(text.lines()).rfind(|line| !line.trim().is_empty());
            bail!("ended with {}: {}", output.status, last_line.unwrap_or("no output"));
        }
        self.field.find(&text).context("no result in its output")
    }
}

/// Waits for a process that prints little, and kills it on timeout.
fn finish(mut process: KillOnDrop) -> Result<Output> {
    let mut output = Output {
        status: process.wait(Instant::now(), LIMIT)?,
        stdout: Vec::new(),
        stderr: Vec::new(),
    };
    if let (Some(mut stdout), Some(mut stderr)) = (process.child.stdout.take(), process.child.stderr.take()) {
        io::copy(&mut stdout, &mut output.stdout)?;
        io::copy(&mut stderr, &mut output.stderr)?;
    }
    Ok(output)
}
