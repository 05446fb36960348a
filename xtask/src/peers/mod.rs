//! `cargo xtask peers verbs`: bandwidth with 1 MiB messages and latency of 8 bytes between two
//! processes, of `doorbell` and its peers. Contests ([`contest`]) run round-robin, and the median
//! counts. What needs the kernel's rxe runs in the guest ([`crate::vm`]): those times are an
//! emulator's and compare with each other only.

mod coll;
mod contest;
mod process;
mod read;

use crate::{setup, vm::machine::Outcome, workspace};
use anyhow::{Context, Result, bail};
use contest::{CONTESTS, Contest, Environment};
use std::{
    env,
    ffi::OsString,
    fmt::Write as _,
    fs,
    io::{self, Write},
    process::Command,
    sync::mpsc,
};

const HELP: &str = "\
Compare the device and the collectives with their peers

Usage: cargo xtask peers verbs [OPTIONS]                 the device, by each peer's own tool
       cargo xtask peers coll [OPERATION]... [OPTIONS]   collectives, compared with Open MPI and gloo [default: all operations]

Options of verbs:
      --rounds N   runs of each; the median counts [default: 5]
      --no-guest   skip what needs the kernel's rxe
      --write      write the table to docs/RESULTS.md

Options of coll:
      --rounds N   runs of each; the median counts [default: 3]
      --ranks N,M  numbers of ranks [default: 2,3]
      --write      write the tables to docs/RESULTS.md

  -h, --help       show this

As root, Debian's packages of the peers are installed; what is missing is skipped with a warning.
";

const FILE: &str = "docs/RESULTS.md";
const BEGIN: &str = "<!-- begin peers -->\n";
const END: &str = "<!-- end peers -->\n";

/// Prefix of the lines by which the run in the guest reports a result.
const RESULT_PREFIX: &str = "peers-result ";

#[derive(Debug, PartialEq, Eq)]
struct Options {
    rounds: usize,
    guest: bool,
    write: bool,
    inside: bool,
}

/// Result of a contest: GB/s and microseconds, each where it could be measured.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Results {
    gigabytes: Option<f64>,
    micros: Option<f64>,
}

/// The command-line form. Returns the exit status.
pub(crate) fn main(arguments: lexopt::Parser) -> Result<u8> {
    let request = match parse(arguments)? {
        Request::Verbs(request) => request,
        Request::Collectives(options) => return coll::run(&options),
        Request::Help => {
            print!("{HELP}");
            return Ok(0);
        }
    };
    env::set_current_dir(workspace())?;
    if request.inside {
        for (index, results) in measure(Environment::Guest, request.rounds) {
            let text = |value: Option<f64>| value.map_or_else(|| "-".into(), |value| value.to_string());
            println!(
                "{RESULT_PREFIX}{index} {} {}",
                text(results.gigabytes),
                text(results.micros)
            );
        }
        return Ok(0);
    }
    for missing in setup::provide(&setup::PEERS)? {
        eprintln!("peers: {missing} is missing, and what needs it is left out");
    }
    build()?;
    let host = measure(Environment::Host, request.rounds);
    let guest = if request.guest {
        in_guest(request.rounds)?
    } else {
        Vec::new()
    };
    if host.is_empty() && guest.is_empty() {
        bail!("nothing could be measured");
    }
    let table = table(&host, &guest);
    print!("{table}");
    if request.write {
        let file = fs::read_to_string(FILE).with_context(|| format!("cannot read {FILE}"))?;
        fs::write(FILE, replaced(&file, BEGIN, END, &table)?).with_context(|| format!("cannot write {FILE}"))?;
    }
    Ok(0)
}

#[derive(Debug, PartialEq, Eq)]
enum Request {
    Help,
    Verbs(Options),
    Collectives(coll::Options),
}

fn parse(mut arguments: lexopt::Parser) -> Result<Request> {
    use lexopt::prelude::*;
    match arguments.next()? {
        Some(Short('h') | Long("help")) => Ok(Request::Help),
        Some(Value(what)) if what == "verbs" => parse_verbs(arguments),
        Some(Value(what)) if what == "coll" => coll::parse(arguments),
        _ => bail!("cargo xtask peers verbs|coll [OPTIONS]; see --help"),
    }
}

fn parse_verbs(mut arguments: lexopt::Parser) -> Result<Request> {
    use lexopt::prelude::*;
    let mut request = Options {
        rounds: 5,
        guest: true,
        write: false,
        inside: false,
    };
    while let Some(argument) = arguments.next()? {
        match argument {
            Short('h') | Long("help") => return Ok(Request::Help),
            Long("rounds") => request.rounds = arguments.value()?.parse()?,
            Long("no-guest") => request.guest = false,
            Long("write") => request.write = true,
            Long("inside") => request.inside = true,
            other => return Err(other.unexpected().into()),
        }
    }
    if request.rounds == 0 {
        bail!("--rounds is 1 at least");
    }
    Ok(Request::Verbs(request))
}

fn build() -> Result<()> {
    let status = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["build", "--release", "--locked"])
        .args([
            "-p",
            "doorbell-perftest",
            "-p",
            "doorbell-dropin",
            "-p",
            "doorbell-sysfs",
        ])
        .status()
        .context("cannot run cargo")?;
    if !status.success() {
        bail!("cannot build what is to be measured");
    }
    Ok(())
}

/// Round-robin; the medians of contests that succeeded, by index in [`CONTESTS`].
fn measure(environment: Environment, rounds: usize) -> Vec<(usize, Results)> {
    let here: Vec<(usize, &Contest)> = CONTESTS
        .iter()
        .enumerate()
        .filter(|(_, contest)| contest.environment == environment)
        .collect();
    let mut taken: Vec<(Vec<f64>, Vec<f64>)> = here.iter().map(|_| Default::default()).collect();
    for round in 0..rounds {
        for ((_, contest), (gigabytes, micros)) in here.iter().zip(&mut taken) {
            for (trial, results) in [(contest.bandwidth(), gigabytes), (contest.latency(), micros)] {
                // A contest that fails in the first round is left out; a later failure loses that
                // round only.
                if round > 0 && results.is_empty() {
                    continue;
                }
                let Contest { name, path, .. } = contest;
                match trial.run() {
                    Ok(value) => {
                        eprintln!("peers: {name}, {path}: {value:.2}");
                        results.push(value);
                    }
                    Err(error) => eprintln!("peers: {name}, {path}: {error:#}"),
                }
            }
        }
    }
    here.iter()
        .zip(taken)
        .map(|((index, _), (gigabytes, micros))| {
            let results = Results {
                gigabytes: median(gigabytes),
                micros: median(micros),
            };
            (*index, results)
        })
        .filter(|(_, results)| *results != Results::default())
        .collect()
}

/// Runs the contests that need rxe, by this program in the guest.
fn in_guest(rounds: usize) -> Result<Vec<(usize, Results)>> {
    let program = env::current_exe().context("cannot find this program")?;
    let mut command: Vec<OsString> = vec![program.into()];
    command.extend(["peers", "verbs", "--inside", "--rounds"].map(OsString::from));
    command.push(rounds.to_string().into());
    let mut request = crate::vm::Request::new(command);
    request.mtu = 4200;
    request
        .environment
        .push(("CARGO_MANIFEST_DIR".into(), workspace().join("xtask").into()));
    if let Some(target) = env::var_os("CARGO_TARGET_DIR") {
        request.environment.push(("CARGO_TARGET_DIR".into(), target));
    }
    let (sender, received) = mpsc::channel();
    match request.run(Box::new(Capture(sender)), Box::new(io::stderr()))? {
        Outcome::Exited(0) => {}
        Outcome::Exited(status) => bail!("the run in the guest ended with {status}"),
        Outcome::TimedOut => bail!("the guest ran past its limit"),
        Outcome::Unread => bail!("stdout was closed"),
        Outcome::Failed { reason, .. } => bail!("{reason}"),
    }
    let output: Vec<u8> = received.into_iter().flatten().collect();
    Ok(String::from_utf8_lossy(&output)
        .lines()
        .filter_map(parse_result)
        .collect())
}

struct Capture(mpsc::Sender<Vec<u8>>);

impl Write for Capture {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.send(bytes.to_vec()).map_err(|_| io::ErrorKind::BrokenPipe)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn parse_result(line: &str) -> Option<(usize, Results)> {
    let mut words = line.strip_prefix(RESULT_PREFIX)?.split(' ');
    let index = words.next()?.parse().ok().filter(|index| *index < CONTESTS.len())?;
    let mut value = || words.next().map(|word| word.parse().ok());
    let results = Results {
        gigabytes: value()?,
        micros: value()?,
    };
    Some((index, results))
}

fn table(host: &[(usize, Results)], guest: &[(usize, Results)]) -> String {
    let mut text = String::new();
    for (title, note, rows) in [
        ("On one host", "1 MiB messages; half a round trip of 8 bytes", host),
        (
            "In the guest, emulated: to be compared with each other only",
            "64 KiB messages; half a round trip of 8 bytes",
            guest,
        ),
    ] {
        if rows.is_empty() {
            continue;
        }
        let _ = writeln!(text, "{title} ({note}):\n");
        let _ = writeln!(
            text,
            "| program | path | operation | GB/s | µs |\n|---|---|---|---|---|"
        );
        for (index, results) in rows {
            let Contest {
                name, path, operation, ..
            } = &CONTESTS[*index];
            let cell = |value: Option<f64>| value.map_or_else(|| "–".into(), |value| format!("{value:.2}"));
            let (gigabytes, micros) = (cell(results.gigabytes), cell(results.micros));
            let _ = writeln!(text, "| `{name}` | {path} | {operation} | {gigabytes} | {micros} |");
        }
        text.push('\n');
    }
    text
}

fn replaced(file: &str, begin: &str, end: &str, table: &str) -> Result<String> {
    let marks = file.split_once(begin).and_then(|(before, rest)| {
        let (_, after) = rest.split_once(end)?;
        Some((before, after))
    });
    let (before, after) = marks.with_context(|| format!("{FILE} has no marks for the table of peers"))?;
    Ok(format!("{before}{begin}\n{table}{end}{after}"))
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Request> {
        parse(lexopt::Parser::from_args(line.split_whitespace()))
    }

    #[test]
    fn options_are_parsed() {
        let Request::Verbs(request) = parsed("verbs --rounds 3 --no-guest").unwrap() else {
            panic!("not the verbs");
        };
        assert_eq!((request.rounds, request.guest, request.write), (3, false, false));
        for help in ["--help", "verbs --help", "coll -h"] {
            assert_eq!(parsed(help).unwrap(), Request::Help, "{help}");
        }
        for wrong in ["", "sockets", "verbs --rounds 0", "verbs verbs", "verbs --nope"] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn results_of_the_guest_are_parsed() {
        let results = Results {
            gigabytes: Some(1.5),
            micros: None,
        };
        assert_eq!(parse_result("peers-result 2 1.5 -"), Some((2, results)));
        assert_eq!(parse_result("peers-result 99 1.5 -"), None);
        assert_eq!(parse_result("ib_write_bw says"), None);
    }

    #[test]
    fn the_table_replaces_the_old_one() {
        let table = table(
            &[(
                0,
                Results {
                    gigabytes: Some(12.345),
                    micros: None,
                },
            )],
            &[],
        );
        let file = replaced(
            "a\n<!-- begin peers -->\nold\n<!-- end peers -->\nb\n",
            BEGIN,
            END,
            &table,
        )
        .unwrap();
        assert!(
            file.starts_with("a\n") && file.ends_with("b\n") && !file.contains("old"),
            "{file}"
        );
        assert!(
            file.contains("| 12.35 | – |") || file.contains("| 12.34 | – |"),
            "{file}"
        );
        assert!(replaced("no marks", BEGIN, END, &table).is_err());
    }
}
