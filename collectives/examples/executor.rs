//! Times of the executor for an all-reduce of f32, on the soft device; ranks are processes of this
//! host. For tuning: `doorbell coll` measures what users get.
//!
//! ```text
//! cargo run --release -p doorbell-collectives --example executor -- RANKS [ALGORITHM PROTOCOL CHANNELS SLICE BYTES ITERATIONS]…
//! ```
//!
//! Without a list it measures a built-in one. A line has rank 0's times of one operation in µs.

use std::error::Error;
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use doorbell_collectives::bootstrap::{Exchange, Group, Options, Rendezvous, UniqueId};
use doorbell_collectives::executor::{Config, Data, Engine, Operation, Tuning};
use doorbell_collectives::kernel::Function;
use doorbell_collectives::plan::Collective;
use doorbell_collectives::{Algorithm, DataType, Protocol, Rank, ReduceOp};
use doorbell_softroce_ibverbs::{DeviceConfig, api, configure};
use doorbell_verbs::Library;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Passes a child its rank, as `ID RANK RANKS`.
const CHILD: &str = "DOORBELL_EXECUTOR_RANK";

const LIST: &[&str] = &[
    "recursive-doubling ll 1 65536 8 20000",
    "recursive-doubling ll 1 65536 1024 10000",
    "recursive-doubling ll128 1 65536 8192 5000",
    "recursive-doubling simple 1 65536 8192 5000",
    "ring ll128 1 65536 65536 2000",
    "ring simple 1 65536 65536 2000",
    "ring simple 1 131072 1048576 300",
    "ring simple 2 131072 1048576 300",
    "ring simple 1 262144 67108864 10",
    "ring simple 2 262144 67108864 10",
];

struct Case {
    algorithm: Algorithm,
    tuning: Tuning,
    bytes: usize,
    iterations: usize,
}

fn cases(arguments: &[String]) -> Result<Vec<Case>> {
    let words: Vec<&str> = match arguments {
        [] => LIST.iter().flat_map(|case| case.split(' ')).collect(),
        given => given.iter().map(String::as_str).collect(),
    };
    words
        .chunks(6)
        .map(|case| {
            let [algorithm, protocol, channels, slice, bytes, iterations] = case else {
                return Err("a case has six words".into());
            };
            Ok(Case {
                algorithm: algorithm.parse()?,
                tuning: Tuning {
                    protocol: protocol.parse::<Protocol>()?,
                    channels: channels.parse()?,
                    slice: slice.parse()?,
                },
                bytes: bytes.parse()?,
                iterations: iterations.parse()?,
            })
        })
        .collect()
}

fn rank(id: &UniqueId, rank: Rank, ranks: u32, cases: &[Case]) -> Result<()> {
    configure(vec![DeviceConfig::new("soft0")])?;
    let device = Library::new(api()).open("soft0")?;
    let mut group = Group::join(id, rank, ranks, &Options::default())?;
    let mut engine = Engine::new(&[device], rank, ranks, Config::default(), group.control_mut())?;
    let order: Vec<_> = (0..ranks).map(Rank).collect();
    for case in cases {
        let schedule = case.algorithm.schedule(Collective::AllReduce, &order, Rank(0))?;
        let plan = engine.prepare(&*schedule)?;
        let segment = engine.allocate(2 * case.bytes.next_multiple_of(4096))?;
        let output = segment.len() / 2;
        let function = Function::new(DataType::F32, ReduceOp::Sum, ranks)?;
        let mut times = Vec::with_capacity(case.iterations);
        group.control_mut().barrier()?;
        for turn in 0..case.iterations + case.iterations / 10 + 2 {
            let began = Instant::now();
            // SAFETY: the segment is long enough, and not accessed otherwise.
            let ticket = unsafe {
                engine.submit(Operation {
                    plan,
                    function: function.clone(),
                    count: case.bytes as u64 / 4,
                    parts: None,
                    input: Data::Registered(segment.clone(), 0),
                    output: Data::Registered(segment.clone(), output),
                    scale: None,
                    tuning: case.tuning,
                    deadline: Some(Duration::from_secs(20)),
                })
            }?;
            engine.wait(ticket)?;
            if turn > case.iterations / 10 {
                times.push(began.elapsed());
            }
        }
        times.sort_unstable();
        let us = |time: Duration| time.as_secs_f64() * 1e6;
        let mean = us(times.iter().sum::<Duration>()) / times.len() as f64;
        if rank == Rank(0) {
            let Tuning {
                protocol,
                channels,
                slice,
            } = case.tuning;
            let at = |part: usize| us(times[times.len() * part / 1000]);
            let (bytes, last) = (case.bytes, us(times[times.len() - 1]));
            println!(
                "{ranks} ranks {:20} {protocol:8} {channels} {slice:8} {bytes:10} B: best {:9.2} median {:9.2} 99% {:9.2} 99.9% {:9.2} most {last:9.2} mean {mean:9.2} us",
                case.algorithm,
                at(0),
                at(500),
                at(990),
                at(999)
            );
        }
    }
    engine.close(group.control_mut())?;
    Ok(())
}

fn run() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let cases = cases(arguments.get(1..).unwrap_or_default())?;
    if let Ok(child) = std::env::var(CHILD) {
        let [id, of, ranks] = child.split(' ').collect::<Vec<_>>()[..] else {
            return Err("a child without a rank".into());
        };
        return rank(&id.parse()?, Rank(of.parse()?), ranks.parse()?, &cases);
    }
    let ranks: u32 = arguments.first().map_or(Ok(2), |ranks| ranks.parse())?;
    let serving = Rendezvous::open(IpAddr::V4(Ipv4Addr::LOCALHOST), ranks)?.spawn(Duration::from_secs(20))?;
    let mut children = Vec::new();
    for of in 0..ranks {
        let mut child = Command::new(std::env::current_exe()?);
        children.push(
            child
                .args(&arguments)
                .env(CHILD, format!("{} {of} {ranks}", serving.id()))
                .spawn()?,
        );
    }
    serving.wait()?;
    let mut failed = Vec::new();
    for (rank, mut child) in children.into_iter().enumerate() {
        let status = child.wait()?;
        if !status.success() {
            failed.push(format!("rank {rank}: {status}"));
        }
    }
    if failed.is_empty() {
        Ok(())
    } else {
        Err(failed.join(", ").into())
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
