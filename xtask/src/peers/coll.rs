//! `cargo xtask peers coll`: the collectives beside Open MPI over shared memory and gloo over TCP,
//! interleaved, on f32. The peers' programs (`tests/peers/collectives`) repeat an operation for
//! every size and print its mean time over all ranks.

use super::{Request, median, process::KillOnDrop, replaced};
use crate::{setup, target_folder, workspace};
use anyhow::{Context, Result, bail};
use std::{
    collections::BTreeMap,
    env,
    fmt::Write as _,
    fs,
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

/// The operations measured, by nccl-tests' names.
const OPERATIONS: [&str; 5] = ["allreduce", "allgather", "reduce-scatter", "broadcast", "alltoall"];
/// From 8 bytes to 64 MiB, in powers of two.
const FROM: &str = "8";
const TO: &str = "67108864";
/// The sizes written to the file; the terminal gets all.
const WRITTEN_SIZES: [u64; 11] = [
    8, 64, 512, 4096, 16384, 65_536, 262_144, 1_048_576, 4_194_304, 16_777_216, 67_108_864,
];
/// Time limit of one program for all sizes of an operation.
const LIMIT: Duration = Duration::from_secs(120);

const BEGIN: &str = "<!-- begin collective peers -->\n";
const END: &str = "<!-- end collective peers -->\n";

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Implementation {
    Doorbell,
    OpenMpi,
    Gloo,
}

const ALL: [Implementation; 3] = [Implementation::Doorbell, Implementation::OpenMpi, Implementation::Gloo];

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Options {
    pub(super) rounds: usize,
    pub(super) ranks: Vec<u32>,
    pub(super) operations: Vec<String>,
    pub(super) write: bool,
}

/// Microseconds by operation, ranks, bytes and implementation.
type Samples = BTreeMap<(usize, u32, u64, Implementation), Vec<f64>>;

pub(super) fn run(options: &Options) -> Result<u8> {
    env::set_current_dir(workspace())?;
    for missing in setup::provide(&setup::COLLECTIVE_PEERS)? {
        eprintln!("peers: {missing} is missing, and what needs it is left out");
    }
    super::build()?;
    let folder = target_folder()?.join("peers");
    fs::create_dir_all(&folder)?;
    let mut present = vec![Implementation::Doorbell];
    for (implementation, compiler, source, libraries) in [
        (Implementation::OpenMpi, "mpicc", "mpi.c", &[][..]),
        (Implementation::Gloo, "c++", "gloo.cc", &["-lgloo"][..]),
    ] {
        match compile(&folder, compiler, source, libraries) {
            Ok(()) => present.push(implementation),
            Err(error) => eprintln!("peers: {source}: {error:#}"),
        }
    }
    let mut samples = Samples::new();
    for round in 0..options.rounds {
        for (index, operation) in OPERATIONS.iter().enumerate() {
            if !options.operations.is_empty() && !options.operations.iter().any(|name| name == operation) {
                continue;
            }
            for &ranks in &options.ranks {
                for &implementation in &present {
                    match implementation.measure(&folder, operation, ranks, round) {
                        Ok(rows) => {
                            for (bytes, micros) in rows {
                                samples
                                    .entry((index, ranks, bytes, implementation))
                                    .or_default()
                                    .push(micros);
                            }
                        }
                        Err(error) => eprintln!("peers: {implementation:?}, {operation}, {ranks} ranks: {error:#}"),
                    }
                }
                eprintln!("peers: round {}, {operation}, {ranks} ranks: done", round + 1);
            }
        }
    }
    let medians: BTreeMap<_, _> = samples
        .into_iter()
        .filter_map(|(key, values)| Some((key, median(values)?)))
        .collect();
    if medians.is_empty() {
        bail!("nothing could be measured");
    }
    print!("{}", tables(&medians, &|_| true));
    if options.write {
        let file = fs::read_to_string(super::FILE).with_context(|| format!("cannot read {}", super::FILE))?;
        let shown = tables(&medians, &|bytes| WRITTEN_SIZES.contains(&bytes));
        fs::write(super::FILE, replaced(&file, BEGIN, END, &shown)?)?;
    }
    Ok(0)
}

fn compile(folder: &Path, compiler: &str, source: &str, libraries: &[&str]) -> Result<()> {
    let path = Path::new("tests/peers/collectives").join(source);
    let program = folder.join(source).with_extension("");
    let status = Command::new(compiler)
        .arg("-O2")
        .arg(&path)
        .arg("-o")
        .arg(&program)
        .args(libraries)
        .status()
        .with_context(|| format!("cannot run {compiler}"))?;
    if !status.success() {
        bail!("{compiler} ended with {status}");
    }
    Ok(())
}

impl Implementation {
    /// The mean time of one operation, in microseconds, for every size.
    fn measure(self, folder: &Path, operation: &str, ranks: u32, round: usize) -> Result<Vec<(u64, f64)>> {
        let count = ranks.to_string();
        let mut children = Vec::new();
        match self {
            Self::Doorbell => {
                let mut command = Command::new(target_folder()?.join("release/doorbell"));
                command.args(["coll", operation, "--ranks", &count, "-b", FROM, "-e", TO, "-f", "2"]);
                // No verification: the peers do none either, and results are verified elsewhere.
                command.args(["--check", "0"]);
                children.push(spawn(command)?);
            }
            Self::OpenMpi => {
                let mut command = Command::new("mpirun");
                command.args(["--allow-run-as-root", "--mca", "btl", "self,vader", "-n", &count]);
                let processors = thread::available_parallelism().map_or(1, |processors| processors.get());
                if ranks as usize > processors {
                    // A waiting rank yields, as ours does.
                    command.args([
                        "--oversubscribe",
                        "--bind-to",
                        "none",
                        "--mca",
                        "mpi_yield_when_idle",
                        "1",
                    ]);
                }
                command.arg(folder.join("mpi")).args([operation, FROM, TO, "2"]);
                children.push(spawn(command)?);
            }
            Self::Gloo => {
                let folder_of_ranks = folder.join(format!("gloo-{}-{operation}-{ranks}-{round}", std::process::id()));
                fs::create_dir_all(&folder_of_ranks)?;
                for rank in 0..ranks {
                    let mut command = Command::new(folder.join("gloo"));
                    command.args([operation, FROM, TO, "2"]);
                    command.env("GLOO_FOLDER", &folder_of_ranks);
                    command.env("GLOO_RANK", rank.to_string()).env("GLOO_RANKS", &count);
                    children.push(spawn(command)?);
                }
                let rows = finish(children);
                fs::remove_dir_all(&folder_of_ranks)?;
                return rows;
            }
        }
        finish(children)
    }
}

fn spawn(mut command: Command) -> Result<KillOnDrop> {
    KillOnDrop::spawn(&mut command, Duration::ZERO)
}

/// Waits for all processes and returns the rows that the first printed.
fn finish(mut children: Vec<KillOnDrop>) -> Result<Vec<(u64, f64)>> {
    let Some(stdout) = children.first_mut().and_then(|first| first.child.stdout.take()) else {
        bail!("nothing was started");
    };
    let reader = thread::spawn(move || std::io::read_to_string(stdout));
    let start = Instant::now();
    for child in &mut children {
        let status = child.wait(start, LIMIT)?;
        if !status.success() {
            bail!("ended with {status}");
        }
    }
    let text = reader.join().unwrap_or_else(|_| Ok(String::new()))?;
    let rows: Vec<_> = text.lines().filter_map(row).collect();
    if rows.is_empty() {
        bail!("no result in its output");
    }
    Ok(rows)
}

/// Parses a line of a peer's program, `OPERATION BYTES MICROSECONDS`, or of `doorbell coll`, whose
/// columns are nccl-tests': size, count, type, operator, root, time, … A broadcast has a root and
/// no operator; its in-place time is used, as the peers broadcast in place.
fn row(line: &str) -> Option<(u64, f64)> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let (bytes, micros) = match words[..] {
        [operation, bytes, micros] if OPERATIONS.contains(&operation) => (bytes, micros),
        [bytes, _, _, "none", root, _, _, _, _, micros, _, ..] if root != "-1" => (bytes, micros),
        [bytes, _, _, _, _, micros, _, ..] if bytes.starts_with(|first: char| first.is_ascii_digit()) => {
            (bytes, micros)
        }
        _ => return None,
    };
    Some((bytes.parse().ok()?, micros.parse().ok()?))
}

fn tables(medians: &BTreeMap<(usize, u32, u64, Implementation), f64>, shown: &dyn Fn(u64) -> bool) -> String {
    let mut text = String::new();
    let groups: std::collections::BTreeSet<(usize, u32)> = medians
        .keys()
        .map(|(operation, ranks, ..)| (*operation, *ranks))
        .collect();
    for (operation, ranks) in groups {
        let _ = writeln!(text, "{}, {ranks} ranks, f32, µs:\n", OPERATIONS[operation]);
        text.push_str("| bytes | doorbell | Open MPI | gloo | of Open MPI | of gloo |\n|---|---|---|---|---|---|\n");
        let sizes: std::collections::BTreeSet<u64> = medians
            .keys()
            .filter(|key| (key.0, key.1) == (operation, ranks))
            .map(|key| key.2)
            .collect();
        for bytes in sizes.into_iter().filter(|bytes| shown(*bytes)) {
            let of = |implementation| medians.get(&(operation, ranks, bytes, implementation)).copied();
            let [ours, mpi, gloo] = ALL.map(of);
            let cell = |value: Option<f64>| value.map_or_else(|| "–".into(), |value| format!("{value:.2}"));
            let ratio = |theirs: Option<f64>| cell(ours.zip(theirs).map(|(ours, theirs)| ours / theirs));
            let cells = [cell(ours), cell(mpi), cell(gloo), ratio(mpi), ratio(gloo)];
            let _ = writeln!(text, "| {bytes} | {} |", cells.join(" | "));
        }
        text.push('\n');
    }
    text
}

pub(super) fn parse(mut arguments: lexopt::Parser) -> Result<Request> {
    use lexopt::prelude::*;
    let mut options = Options {
        rounds: 3,
        ranks: vec![2, 3],
        operations: Vec::new(),
        write: false,
    };
    while let Some(argument) = arguments.next()? {
        match argument {
            Short('h') | Long("help") => return Ok(Request::Help),
            Long("rounds") => options.rounds = arguments.value()?.parse()?,
            Long("ranks") => {
                let list = arguments.value()?.string()?;
                options.ranks = list.split(',').map(str::parse).collect::<Result<_, _>>()?;
            }
            Long("write") => options.write = true,
            Value(value) => {
                let name = value.string()?;
                if !OPERATIONS.contains(&name.as_str()) {
                    bail!("there is no operation {name:?}: one of {}", OPERATIONS.join(", "));
                }
                options.operations.push(name);
            }
            other => return Err(other.unexpected().into()),
        }
    }
    if options.rounds == 0 || options.ranks.iter().any(|ranks| !(2..=64).contains(ranks)) {
        bail!("--rounds is 1 at least, --ranks from 2 to 64");
    }
    Ok(Request::Collectives(options))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_parsed() {
        assert_eq!(row("allreduce 8 0.156"), Some((8, 0.156)));
        assert_eq!(
            row(
                "     1048576        262144     f32     sum      -1    34.56    1.00    1.00      0    34.10    1.00    1.00      0"
            ),
            Some((1_048_576, 34.56))
        );
        assert_eq!(
            row("64 16 f32 none 0 0.12 0.53 0.53 0 0.09 0.71 0.71 0"),
            Some((64, 0.09)),
            "in place"
        );
        for line in [
            "#   size   count  type  redop  root  time  algbw",
            "something else",
            "",
            "barrier 8 1",
        ] {
            assert_eq!(row(line), None, "{line}");
        }
    }

    #[test]
    fn a_table_has_ratios() {
        let medians = BTreeMap::from([
            ((0, 2, 8, Implementation::Doorbell), 1.0),
            ((0, 2, 8, Implementation::OpenMpi), 2.0),
        ]);
        let text = tables(&medians, &|_| true);
        assert!(text.contains("| 8 | 1.00 | 2.00 | – | 0.50 | – |"), "{text}");
        assert!(!tables(&medians, &|bytes| bytes > 8).contains("| 8 |"));
    }

    #[test]
    fn options_are_parsed() {
        let parsed = |line: &str| parse(lexopt::Parser::from_args(line.split_whitespace()));
        let Request::Collectives(options) = parsed("allreduce --ranks 3 --rounds 1 --write").unwrap() else {
            panic!("not the collectives");
        };
        assert_eq!((options.rounds, options.ranks, options.write), (1, vec![3], true));
        for wrong in ["dance", "--ranks 1", "--rounds 0", "--nope"] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }
}
