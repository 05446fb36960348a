//! Many conversations between two processes that sleep whenever they wait: is anybody ever not woken?
//!
//! `sleepers` starts two ends and judges; `sleepers --end near|far` is one of them ([`end`]). Each conversation has a completion channel and a thread of its own at either end, and pauses of random length
//! about as long as the device's progress thread spins: so both go to sleep, and are woken, at all moments that there are. The queue pairs' timeout is long. Who is not woken is so by a
//! retransmission, or never: a round that takes half the timeout has *stalled*, and no other thing is as slow.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::IpAddr;
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

mod end;

/// How to call it.
const USAGE: &str =
    "sleepers [--conversations N] [--seconds S] [--timeout EXPONENT] [--address IP] [--seed N] [--end near|far]";

/// What is to be done; the ends are told the same.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    conversations: usize,
    /// For how long.
    time: Duration,
    /// The queue pairs' timeout: 4.096 µs · 2^timeout.
    timeout: u8,
    /// The address of both.
    address: IpAddr,
    /// Of pauses.
    seed: u64,
    /// This process is an end, and which.
    end: Option<Role>,
}

/// Which end of the conversations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    /// The one that begins each round and takes its time.
    Near,
    /// The one that answers.
    Far,
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
                        "near" => Role::Near,
                        "far" => Role::Far,
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

    /// The options by which an end is told the plan.
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

    /// A round that takes as long has stalled.
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
        None => judge(&plan),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("sleepers: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// An end, as its parent has it.
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

    /// The rest of the next line that it says, which begins with `word`.
    fn hear(&mut self, word: &str) -> Result<String> {
        let line = self.lines.next().context("an end has ended early")??;
        let rest = line.strip_prefix(word).with_context(|| format!("not {word}: {line}"))?;
        Ok(rest.trim().to_owned())
    }

    fn tell(&mut self, line: &str) -> Result<()> {
        Ok(writeln!(self.commands, "{line}")?)
    }
}

impl Drop for End {
    fn drop(&mut self) {
        // Nothing is left to kill unless the other one has failed.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Starts both ends and says what came of it.
fn judge(plan: &Plan) -> Result<()> {
    let (mut near, mut far) = (End::start(plan, "near")?, End::start(plan, "far")?);
    let (of_near, of_far) = (near.hear("cards")?, far.hear("cards")?);
    near.tell(&of_far)?;
    far.tell(&of_near)?;
    for end in [&mut near, &mut far] {
        end.hear("ready")?;
    }
    far.tell("go")?;
    near.tell("go")?;
    let told = near.hear("rounds")?;
    let ended = [near.process.wait()?, far.process.wait()?];
    println!("{} conversations, rounds {told}", plan.conversations);
    ensure!(ended.iter().all(|status| status.success()), "an end has failed");
    ensure!(told.ends_with(" 0 stalls"), "somebody was not woken");
    Ok(())
}
