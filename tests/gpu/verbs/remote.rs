//! The remote endpoint: in this process, or in a child process controlled by a line protocol.

use std::io::{BufRead as _, BufReader, Lines, Write as _};
use std::net::IpAddr;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};
use doorbell_verbs_sys::IBV_WC_SUCCESS;

use crate::end::{End, EndpointInfo, Op, Part};

pub(crate) enum RemoteEnd {
    InProcess(Box<End>),
    Child {
        child: Child,
        commands: ChildStdin,
        replies: Lines<BufReader<ChildStdout>>,
    },
}

impl RemoteEnd {
    pub(crate) fn spawn(address: IpAddr, len: usize, gpus: usize) -> Result<(Self, EndpointInfo)> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["far", &address.to_string(), &len.to_string(), &gpus.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let commands = child.stdin.take().context("a pipe")?;
        let replies = BufReader::new(child.stdout.take().context("a pipe")?).lines();
        let mut remote = Self::Child {
            child,
            commands,
            replies,
        };
        let info = EndpointInfo::from_line(&remote.request("card")?)?;
        Ok((remote, info))
    }

    pub(crate) fn connect(&mut self, info: &EndpointInfo) -> Result<()> {
        match self {
            Self::InProcess(end) => end.connect(info),
            Self::Child { .. } => self.request(&format!("connect {}", info.to_line())).map(drop),
        }
    }

    pub(crate) fn fill(&mut self, part: Part, seed: u64) -> Result<()> {
        let Part { region, at, len } = part;
        match self {
            Self::InProcess(end) => end.regions[region].memory.fill(at, len, seed),
            Self::Child { .. } => self.request(&format!("fill {region} {at} {len} {seed}")).map(drop),
        }
    }

    pub(crate) fn differs(&mut self, part: Part, seed: u64) -> Result<Option<usize>> {
        let Part { region, at, len } = part;
        match self {
            Self::InProcess(end) => end.regions[region].memory.differs(at, len, seed),
            Self::Child { .. } => {
                let reply = self.request(&format!("differs {region} {at} {len} {seed}"))?;
                Ok(reply.parse().ok())
            }
        }
    }

    pub(crate) fn receive(&mut self, part: Part) -> Result<()> {
        let Part { region, at, len } = part;
        match self {
            Self::InProcess(end) => end.receive(&[part]),
            Self::Child { .. } => self.request(&format!("receive {region} {at} {len}")).map(drop),
        }
    }

    /// Waits for a receive to complete; returns the received bytes.
    pub(crate) fn received(&mut self) -> Result<u32> {
        match self {
            Self::InProcess(end) => Ok(end.done()?.byte_len),
            Self::Child { .. } => Ok(self.request("received")?.parse()?),
        }
    }

    /// After `count` receives, it replies to as many WRITEs with immediate by the same.
    pub(crate) fn pong(&mut self, from: Part, (addr, rkey): (u64, u32), count: u64) -> Result<()> {
        let Part { region, at, len } = from;
        self.send_command(&format!("pong {region} {at} {len} {addr} {rkey} {count}"))
    }

    pub(crate) fn kill(&mut self) -> Result<()> {
        if let Self::Child { child, .. } = self {
            child.kill()?;
            child.wait()?;
        }
        Ok(())
    }

    pub(crate) fn deregister(&mut self, region: usize) -> Result<()> {
        match self {
            Self::InProcess(end) => end.regions[region].deregister(),
            Self::Child { .. } => self.request(&format!("deregister {region}")).map(drop),
        }
    }

    fn send_command(&mut self, command: &str) -> Result<()> {
        if let Self::Child { commands, .. } = self {
            writeln!(commands, "{command}")?;
            commands.flush()?;
        }
        Ok(())
    }

    pub(crate) fn reply(&mut self) -> Result<String> {
        let Self::Child { replies, .. } = self else {
            bail!("no child process");
        };
        let reply = replies.next().context("the remote end is gone")??;
        match reply.strip_prefix("ok") {
            Some(rest) => Ok(rest.trim().to_owned()),
            None => bail!("the remote end says: {reply}"),
        }
    }

    fn request(&mut self, command: &str) -> Result<String> {
        self.send_command(command)?;
        self.reply()
    }
}

impl Drop for RemoteEnd {
    fn drop(&mut self) {
        if let Self::Child { child, commands, .. } = self {
            let sent = writeln!(commands, "quit").and_then(|()| commands.flush());
            if sent.is_err() {
                // It has already exited, or is about to.
                drop(child.kill());
            }
            drop(child.wait());
        }
    }
}

/// Runs the remote endpoint until the `quit` command.
pub(crate) fn run(address: IpAddr, len: usize, gpus: usize) -> Result<()> {
    crate::end::set_up(address)?;
    let mut end = End::new(len, gpus)?;
    for line in std::io::stdin().lines() {
        let line = line?;
        let mut out = std::io::stdout().lock();
        match obey(&mut end, &line) {
            Ok(None) => return Ok(()),
            Ok(Some(reply)) => writeln!(out, "ok {reply}")?,
            Err(error) => writeln!(out, "{error:#}")?,
        }
        out.flush()?;
    }
    Ok(())
}

fn obey(end: &mut End, line: &str) -> Result<Option<String>> {
    let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
    if word == "connect" {
        end.connect(&EndpointInfo::from_line(rest)?)?;
        return Ok(Some(String::new()));
    }
    let numbers: Vec<u64> = rest.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
    let number = |at: usize| numbers.get(at).copied().context("a number is missing");
    let part = || -> Result<Part> {
        Ok(Part {
            region: number(0)? as usize,
            at: number(1)? as usize,
            len: number(2)? as usize,
        })
    };
    let region = |at: usize| -> Result<usize> {
        let region = number(at)? as usize;
        ensure!(region < end.regions.len(), "no region {region}");
        Ok(region)
    };
    let reply = match word {
        "card" => end.info()?.to_line(),
        "fill" => {
            let part = part()?;
            end.regions[region(0)?].memory.fill(part.at, part.len, number(3)?)?;
            String::new()
        }
        "differs" => {
            let part = part()?;
            let differs = end.regions[region(0)?].memory.differs(part.at, part.len, number(3)?)?;
            differs.map_or_else(|| "no".to_owned(), |at| at.to_string())
        }
        "receive" => {
            end.receive(&[part()?])?;
            String::new()
        }
        "received" => end.done()?.byte_len.to_string(),
        "deregister" => {
            let region = region(0)?;
            end.regions[region].deregister()?;
            String::new()
        }
        "pong" => {
            let (part, to, count) = (part()?, (number(3)?, number(4)? as u32), number(5)?);
            pong(end, part, to, count)?;
            String::new()
        }
        "quit" => return Ok(None),
        _ => bail!("what is {word}?"),
    };
    Ok(Some(reply))
}

fn pong(end: &End, part: Part, to: (u64, u32), count: u64) -> Result<()> {
    let nothing = Part { len: 0, ..part };
    for _ in 0..2 {
        end.receive(&[nothing])?;
    }
    println!("ok");
    std::io::stdout().flush()?;
    let mut sent = 0;
    while sent < count {
        let wc = end.wait()?;
        ensure!(wc.status == IBV_WC_SUCCESS, "a completion with status {}", wc.status);
        if wc.opcode & doorbell_verbs_sys::IBV_WC_RECV != 0 {
            end.post(Op::WriteImm, &[part], to, false)?;
            end.receive(&[nothing])?;
            sent += 1;
        }
    }
    Ok(())
}
