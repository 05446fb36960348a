//! The far end: in this process, or in one of its own that does as it is told line by line.

use std::io::{BufRead as _, BufReader, Lines, Write as _};
use std::net::IpAddr;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};
use doorbell_verbs_sys::IBV_WC_SUCCESS;

use crate::end::{Card, End, Op, Part};

/// What is asked of the far end.
pub(crate) enum Far {
    /// This process is both; the queue pair and the memory are others.
    Here(Box<End>),
    There {
        child: Child,
        commands: ChildStdin,
        answers: Lines<BufReader<ChildStdout>>,
    },
}

impl Far {
    /// In a process of its own. Gives its card.
    pub(crate) fn spawn(address: IpAddr, len: usize, gpus: usize) -> Result<(Self, Card)> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["far", &address.to_string(), &len.to_string(), &gpus.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let commands = child.stdin.take().context("a pipe")?;
        let answers = BufReader::new(child.stdout.take().context("a pipe")?).lines();
        let mut far = Self::There {
            child,
            commands,
            answers,
        };
        let card = Card::from_line(&far.ask("card")?)?;
        Ok((far, card))
    }

    pub(crate) fn connect(&mut self, card: &Card) -> Result<()> {
        match self {
            Self::Here(end) => end.connect(card),
            Self::There { .. } => self.ask(&format!("connect {}", card.to_line())).map(drop),
        }
    }

    /// Has it fill its memory with a pattern.
    pub(crate) fn fill(&mut self, part: Part, seed: u64) -> Result<()> {
        let Part { region, at, len } = part;
        match self {
            Self::Here(end) => end.regions[region].memory.fill(at, len, seed),
            Self::There { .. } => self.ask(&format!("fill {region} {at} {len} {seed}")).map(drop),
        }
    }

    /// Where its memory is not the pattern.
    pub(crate) fn differs(&mut self, part: Part, seed: u64) -> Result<Option<usize>> {
        let Part { region, at, len } = part;
        match self {
            Self::Here(end) => end.regions[region].memory.differs(at, len, seed),
            Self::There { .. } => {
                let answer = self.ask(&format!("differs {region} {at} {len} {seed}"))?;
                Ok(answer.parse().ok())
            }
        }
    }

    pub(crate) fn receive(&mut self, part: Part) -> Result<()> {
        let Part { region, at, len } = part;
        match self {
            Self::Here(end) => end.receive(&[part]),
            Self::There { .. } => self.ask(&format!("receive {region} {at} {len}")).map(drop),
        }
    }

    /// Waits for a receive to complete: how many bytes it got.
    pub(crate) fn received(&mut self) -> Result<u32> {
        match self {
            Self::Here(end) => Ok(end.done()?.byte_len),
            Self::There { .. } => Ok(self.ask("received")?.parse()?),
        }
    }

    /// Has it answer `count` WRITEs with immediate by such of its own, from one of its regions to one of the other end's, after `count` receives.
    pub(crate) fn pong(&mut self, from: Part, (addr, rkey): (u64, u32), count: u64) -> Result<()> {
        let Part { region, at, len } = from;
        self.tell(&format!("pong {region} {at} {len} {addr} {rkey} {count}"))
    }

    /// Ends a process that is the far end, as by a crash.
    pub(crate) fn kill(&mut self) -> Result<()> {
        if let Self::There { child, .. } = self {
            child.kill()?;
            child.wait()?;
        }
        Ok(())
    }

    pub(crate) fn deregister(&mut self, region: usize) -> Result<()> {
        match self {
            Self::Here(end) => end.regions[region].deregister(),
            Self::There { .. } => self.ask(&format!("deregister {region}")).map(drop),
        }
    }

    fn tell(&mut self, command: &str) -> Result<()> {
        if let Self::There { commands, .. } = self {
            writeln!(commands, "{command}")?;
            commands.flush()?;
        }
        Ok(())
    }

    /// Waits for the answer to what was told.
    pub(crate) fn answer(&mut self) -> Result<String> {
        let Self::There { answers, .. } = self else {
            bail!("nobody to answer");
        };
        let answer = answers.next().context("the far end is gone")??;
        match answer.strip_prefix("ok") {
            Some(rest) => Ok(rest.trim().to_owned()),
            None => bail!("the far end says: {answer}"),
        }
    }

    fn ask(&mut self, command: &str) -> Result<String> {
        self.tell(command)?;
        self.answer()
    }
}

impl Drop for Far {
    fn drop(&mut self) {
        if let Self::There { child, commands, .. } = self {
            let told = writeln!(commands, "quit").and_then(|()| commands.flush());
            if told.is_err() {
                // It is gone already, or will be.
                drop(child.kill());
            }
            drop(child.wait());
        }
    }
}

/// Is the far end until it is told to quit.
pub(crate) fn run(address: IpAddr, len: usize, gpus: usize) -> Result<()> {
    crate::end::set_up(address)?;
    let mut end = End::new(len, gpus)?;
    for line in std::io::stdin().lines() {
        let line = line?;
        let mut out = std::io::stdout().lock();
        match obey(&mut end, &line) {
            Ok(None) => return Ok(()),
            Ok(Some(answer)) => writeln!(out, "ok {answer}")?,
            Err(error) => writeln!(out, "{error:#}")?,
        }
        out.flush()?;
    }
    Ok(())
}

fn obey(end: &mut End, line: &str) -> Result<Option<String>> {
    let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
    if word == "connect" {
        end.connect(&Card::from_line(rest)?)?;
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
    let answer = match word {
        "card" => end.card()?.to_line(),
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
    Ok(Some(answer))
}

/// Answers WRITEs with immediate by such.
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
