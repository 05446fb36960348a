//! Detects lost wake-ups: conversations between two processes that sleep whenever they wait.
//!
//! `sleepers` starts two ends ([`end`]) and evaluates them. Each conversation has a completion
//! channel and a thread at either end, and pauses about as long as the device's progress thread
//! spins, so that sleep and wake-up race at every point. The queue pairs' timeout is long: a round
//! that takes half of it has *stalled*, by a lost wake-up.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::IpAddr;
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

mod end;

const USAGE: &str = "sleepers [--conversations N] [--seconds S] [--timeout EXPONENT] [--address IP] [--seed N] [--end initiator|responder]";

#[derive(Clone, Debug)]
pub(crate) struct Plan {
    conversations: usize,
    time: Duration,
    /// The queue pairs' timeout: 4.096 µs · 2^timeout.
    timeout: u8,
    address: IpAddr,
    seed: u64,
    end: Option<Role>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    /// Starts each round and measures it.
    Initiator,
    Responder,
}

impl Plan {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Self> {
        let mut plan = Self {
            conversations: 8,
            time: Duration::from_secs(10),
            timeout: 18,
            address: IpAddr::from([127, 0, 33, 1]),
            seed: 1,
            end: None,
        };
        while let Some(name) = args.next() {
            let value = args.next().with_context(|| format!("{name} needs a value"))?;
            let wrong = || format!("{name} {value}");
            match name.as_str() {
                "--conversations" => plan.conversations = value.parse().with_context(wrong)?,
                "--seconds" => plan.time = Duration::from_secs(value.parse().with_context(wrong)?),
                "--timeout" => plan.timeout = value.parse().with_context(wrong)?,
                "--address" => plan.address = value.parse().with_context(wrong)?,
                "--seed" => plan.seed = value.parse().with_context(wrong)?,
                "--end" => {
                    plan.end = Some(match value.as_str() {
                        "initiator" => Role::Initiator,
                        "responder" => Role::Responder,
                        _ => bail!("{}: no such end", wrong()),
                    });
                }
                _ => bail!("{name}: no such option"),
            }
        }
        if plan.conversations == 0 || !(1..=31).contains(&plan.timeout) {
            bail!("there must be a conversation, and a timeout of 1 to 31");
        }
        Ok(plan)
    }

    fn to_args(&self, end: &str) -> Vec<String> {
        [
            ("--conversations", self.conversations.to_string()),
            ("--seconds", self.time.as_secs().to_string()),
            ("--timeout", self.timeout.to_string()),
            ("--address", self.address.to_string()),
            ("--seed", self.seed.to_string()),
            ("--end", end.to_owned()),
        ]
        .into_iter()
        .flat_map(|(name, value)| [name.to_owned(), value])
        .collect()
    }

    /// A round that takes this long has stalled.
    pub(crate) fn stalled(&self) -> Duration {
        Duration::from_nanos(4096 << self.timeout) / 2
    }
}

fn main() -> ExitCode {
    let plan = match Plan::parse(std::env::args().skip(1)) {
        Ok(plan) => plan,
        Err(error) => {
            eprintln!("{error:#}\nusage: {USAGE}");
            return ExitCode::from(2);
        }
    };
    let result = match plan.end {
        Some(role) => end::run(&plan, role),
        None => evaluate(&plan),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("sleepers: {error:#}");
            ExitCode::FAILURE
        }
    }
}

struct End {
    process: Child,
    commands: ChildStdin,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl End {
    fn start(plan: &Plan, role: &str) -> Result<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .args(plan.to_args(role))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start an end")?;
        let (commands, output) = (process.stdin.take(), process.stdout.take());
        Ok(Self {
            process,
            commands: commands.context("no stdin")?,
            lines: BufReader::new(output.context("no stdout")?).lines(),
        })
    }

    /// The rest of the end's next line, which must begin with `word`.
    fn expect_line(&mut self, word: &str) -> Result<String> {
        let line = self.lines.next().context("an end has exited early")??;
        let rest = line.strip_prefix(word).with_context(|| format!("not {word}: {line}"))?;
        Ok(rest.trim().to_owned())
    }

    fn send_line(&mut self, line: &str) -> Result<()> {
        Ok(writeln!(self.commands, "{line}")?)
    }
}

impl Drop for End {
    fn drop(&mut self) {
        // Still running only if the other one has failed.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn evaluate(plan: &Plan) -> Result<()> {
    let (mut initiator, mut responder) = (End::start(plan, "initiator")?, End::start(plan, "responder")?);
    let (of_initiator, of_responder) = (initiator.expect_line("endpoints")?, responder.expect_line("endpoints")?);
    initiator.send_line(&of_responder)?;
    responder.send_line(&of_initiator)?;
    for end in [&mut initiator, &mut responder] {
        end.expect_line("ready")?;
    }
    responder.send_line("go")?;
    initiator.send_line("go")?;
    let statistics = initiator.expect_line("rounds")?;
    let ended = [initiator.process.wait()?, responder.process.wait()?];
    println!("{} conversations, rounds {statistics}", plan.conversations);
    ensure!(ended.iter().all(|status| status.success()), "an end has failed");
    ensure!(statistics.ends_with(" 0 stalls"), "a wake-up was lost");
    Ok(())
}
