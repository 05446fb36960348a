//! The body of a rank's process.

use std::env;
use std::fs;
use std::net::Ipv4Addr;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use doorbell_collectives::bootstrap::Group;
use doorbell_collectives::executor::Config;

use doorbell_collectives::communicator::Call;
use doorbell_collectives::kernel::bf16;
use doorbell_collectives::moe::{Mode, MoeError, MoeOptions, Payload, Routing, Shape};
use doorbell_collectives::plan::Collective;
use doorbell_collectives::{
    Algorithm, CollectiveError, CommBuffer, Communicator, Options, Rank, ReduceOp, UserOperator,
};
use doorbell_softroce_ibverbs::api;
use doorbell_verbs::{Context, Library};
use nix::sys::signal::{Signal, raise};

use crate::fault::{Fault, Kind, Way, Wire, address};
use crate::run::{DEADLINE, LATE, TIMEOUT};

/// Link, process, run (which determine addresses), rank, and faults.
pub(crate) const ROLE: &str = "DOORBELL_SWEEP_RANK";
/// Marks a line as a reply, among the test harness's output.
pub(crate) const ANSWER: &str = "rank: ";
/// Elements of each part, not divisible by any number of ranks.
const COUNT: usize = 3001;

struct Me {
    name: u32,
    /// By rank: its initial number.
    names: Vec<u32>,
    wire: Wire,
    process: u32,
    run: u32,
}

#[test]
fn is_a_rank() {
    let Ok(role) = env::var(ROLE) else { return };
    let before = held();
    let words: Vec<_> = role.splitn(5, ' ').collect();
    let number = |word: &str| word.parse().unwrap();
    let me = Me {
        wire: if words[0] == "Udp" {
            Wire::Udp
        } else {
            Wire::SharedMemory
        },
        process: number(words[1]),
        run: number(words[2]),
        name: number(words[3]),
        names: Vec::new(),
    };
    let device = Library::new(api()).open("soft0").unwrap();
    let last = live(me, &device, words[4]);
    drop(device);
    // The kernel removes a thread from the list shortly after it was joined.
    let began = Instant::now();
    while held() != before && began.elapsed() < Duration::from_secs(2) {
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(held(), before, "descriptors, threads, shared mappings");
    println!("{ANSWER}{last}");
}

fn held() -> (Vec<String>, usize, usize) {
    let descriptors = fs::read_dir("/proc/self/fd").unwrap();
    let mut descriptors: Vec<_> = descriptors
        .filter_map(|entry| Some(fs::read_link(entry.ok()?.path()).ok()?.display().to_string()))
        // The descriptor of this listing.
        .filter(|target| !target.contains("/fd"))
        .collect();
    descriptors.sort();
    let (_, threads, shared) = crate::held::held();
    (descriptors, threads, shared)
}

/// Runs until its own fault, or until all faults have happened. Returns its last reply.
fn live(mut me: Me, device: &Context, faults: &str) -> &'static str {
    let options = Options {
        deadline: DEADLINE,
        calibrate: false,
        config: Config {
            // 134 ms, eight times.
            timeout: 15,
            ..Config::default()
        },
        ..Options::default()
    };
    let mut comm = Communicator::new(std::slice::from_ref(device), Group::from_env().unwrap(), options).unwrap();
    me.names = (0..comm.size()).collect();
    for (number, fault) in faults.split(';').map(Fault::read).enumerate() {
        let mut began = Instant::now();
        // A late rank may learn of the fault here already. The failed rank may have done its part:
        // then the next operation shows the fault, as it needs every link.
        let mut operations = || {
            all_reduce(&comm, number as u32 * 7)?;
            began = Instant::now();
            me.meet(&comm, &fault)?;
            began = Instant::now();
            all_reduce(&comm, 1)
        };
        let result = operations();
        let took = began.elapsed();
        let error = result
            .err()
            .unwrap_or_else(|| panic!("rank {} has noticed nothing of {fault}", me.name));
        if fault.rank == me.name && fault.kind != Kind::Link {
            return "gone";
        }
        let verdict = me.check_error(&fault, &error);
        assert!(took < DEADLINE + LATE, "{fault} took {took:?}: {error}");
        let again = comm.barrier().wait().unwrap_err();
        assert_eq!(again.culprit(), error.culprit());
        let left = comm.shrink(TIMEOUT);
        println!("{ANSWER}{number} {} {verdict}", took.as_millis());
        if fault.gone() == me.name {
            assert!(
                matches!(left, Err(CollectiveError::Shrink(_))),
                "{fault}: it is in a group of those who cannot reach it"
            );
            return "gone";
        }
        let left = left.unwrap_or_else(|e| panic!("{fault}: {error}: {e}"));
        me.names.retain(|name| *name != fault.gone());
        assert_eq!(left.size() as usize, me.names.len(), "{fault}: {error}");
        assert_eq!(me.names[left.rank().index()], me.name);
        comm = left;
    }
    all_reduce(&comm, 99).unwrap();
    comm.destroy().unwrap();
    "done"
}

fn all_reduce(comm: &Communicator, seed: u32) -> Result<(), CollectiveError> {
    let mut data: Vec<u32> = (0..5000).map(|at| at * seed + comm.rank().0).collect();
    let sum = comm.all_reduce(&mut data, ReduceOp::Sum);
    sum.algorithm(Algorithm::FullMesh).wait()?;
    let p = comm.size();
    for (at, got) in data.into_iter().enumerate() {
        assert_eq!(got, at as u32 * seed * p + p * (p - 1) / 2);
    }
    Ok(())
}

impl Me {
    fn meet(&self, comm: &Communicator, fault: &Fault) -> Result<(), CollectiveError> {
        let collective = match fault.way() {
            Way::Collective(collective, _) => collective,
            Way::Moe(mode) => {
                return self.meet_moe(comm, fault, mode).map_err(|error| match error {
                    MoeError::Collective(error) => error,
                    other => panic!("{other}"),
                });
            }
        };
        let due = Arc::new(AtomicBool::new(false));
        let sum = self.operator(fault, Arc::clone(&due));
        let root = Rank(fault.step % comm.size());
        let (n, p) = (COUNT, comm.size() as usize);
        let at_root = |len| if comm.rank() == root { len } else { 0 };
        let buffers = |from: usize, into: usize| -> Result<_, CollectiveError> {
            let mut input = comm.alloc::<f32>(from)?;
            input.fill(1.0);
            Ok((input, comm.alloc::<f32>(into)?))
        };
        let call = match collective {
            Collective::AllReduce => {
                let (x, y) = buffers(n, n)?;
                comm.all_reduce_into(x, y, sum)
            }
            Collective::Reduce => {
                let (x, y) = buffers(n, at_root(n))?;
                comm.reduce_into(x, y, sum, root)
            }
            Collective::ReduceScatter => {
                let (x, y) = buffers(n * p, n)?;
                comm.reduce_scatter_into(x, y, sum)
            }
            Collective::Broadcast => {
                let (x, y) = buffers(n, n)?;
                comm.broadcast_into(x, y, root)
            }
            Collective::AllGather => {
                let (x, y) = buffers(n, n * p)?;
                comm.all_gather_into(x, y)
            }
            Collective::Gather => {
                let (x, y) = buffers(n, at_root(n * p))?;
                comm.gather_into(x, y, root)
            }
            Collective::Scatter => {
                let (x, y) = buffers(n * p, n)?;
                comm.scatter_into(x, y, root)
            }
            Collective::AllToAll => {
                let (x, y) = buffers(n * p, n * p)?;
                comm.all_to_all(x, y)
            }
            Collective::SendRecv => {
                let (x, y) = buffers(n, n)?;
                comm.send_receive(x, y)
            }
            other => panic!("{other} cannot be begun by itself"),
        };
        self.drive(comm, fault, call, &due)
    }

    /// Each token goes to one expert of each rank, from which its outputs are returned.
    fn meet_moe(&self, comm: &Communicator, fault: &Fault, mode: Mode) -> Result<(), MoeError> {
        let (ranks, tokens) = (comm.size(), 40);
        let shape = Shape::new(ranks, 2 * ranks, ranks, 512, tokens)?;
        let options = MoeOptions {
            shape,
            payload: Payload::Bf16,
            mode,
            capacity: None,
        };
        let chosen = (0..tokens).flat_map(|token| (0..ranks).map(move |rank| 2 * rank + token % 2));
        let chosen: Vec<u32> = chosen.collect();
        let routing = Routing::new(&shape, &chosen, &vec![1.0; chosen.len()])?;
        let given = vec![bf16::ONE; 512 * tokens as usize];
        let of = comm.expert_parallel(options)?;
        let mut left = (fault.rank == self.name).then_some(fault.step);
        let mut until = |test: &mut dyn FnMut() -> Result<bool, MoeError>| {
            while let Some(steps) = left {
                if steps == 0 {
                    left = None;
                    self.go(comm, fault);
                } else if test()? {
                    break;
                } else {
                    left = Some(steps - 1);
                }
            }
            Ok::<_, MoeError>(())
        };
        let mut sent = of.dispatch_send(&given, &routing)?;
        until(&mut || sent.test())?;
        let mut received = sent.receive()?;
        for at in 0..2 * ranks {
            let rows = received.rows().range(at % 2, Rank(at / 2));
            received.with_outputs(rows).1.fill(bf16::ONE);
        }
        let mut returned = received.combine_send()?;
        until(&mut || returned.test())?;
        until(&mut || Ok(false))?;
        returned.receive(&mut vec![bf16::ZERO; given.len()])
    }

    fn drive(
        &self,
        comm: &Communicator,
        fault: &Fault,
        call: Call<'_, (CommBuffer<f32>, CommBuffer<f32>)>,
        due: &AtomicBool,
    ) -> Result<(), CollectiveError> {
        let Way::Collective(_, algorithm) = fault.way() else {
            unreachable!("a call is a collective");
        };
        let call = call.algorithm(algorithm).protocol(fault.protocol);
        let mut request = call.channels(2).slice(1024).start()?;
        if fault.rank == self.name {
            let mut turns = 0;
            while !due.load(Ordering::Relaxed) && (turns != fault.step || fault.way().reduces()) && !request.test()? {
                turns += 1;
            }
            // A rank that was stopped within a step has been absent.
            if fault.kind != Kind::Stop || !due.load(Ordering::Relaxed) {
                self.go(comm, fault);
            }
        }
        request.wait().map(drop)
    }

    /// A sum during which the rank dies or stops; a link is cut after the step.
    fn operator(&self, fault: &Fault, due: Arc<AtomicBool>) -> UserOperator {
        let (mine, kind, step) = (fault.rank == self.name, fault.kind, fault.step);
        let times = AtomicU32::new(0);
        UserOperator::new("sum", move |into: &mut [f32], from: &[f32]| {
            if mine && times.fetch_add(1, Ordering::Relaxed) == step {
                match kind {
                    Kind::Kill => raise(Signal::SIGKILL).unwrap(),
                    Kind::Stop => raise(Signal::SIGSTOP).unwrap(),
                    Kind::Cut | Kind::Link => {}
                }
                due.store(true, Ordering::Relaxed);
            }
            into.iter_mut().zip(from).for_each(|(a, b)| *a += b);
        })
    }

    fn go(&self, comm: &Communicator, fault: &Fault) {
        let rank = |name: &u32| self.names.iter().position(|one| one == name).unwrap();
        match fault.kind {
            Kind::Kill => raise(Signal::SIGKILL).unwrap(),
            Kind::Stop => raise(Signal::SIGSTOP).unwrap(),
            Kind::Cut => {
                let others = self.names.iter().filter(|name| **name != self.name);
                others.for_each(|name| self.cut(comm, Rank(rank(name) as u32), *name));
            }
            Kind::Link => self.cut(comm, Rank(rank(&fault.peer) as u32), fault.peer),
        }
    }

    fn cut(&self, comm: &Communicator, peer: Rank, name: u32) {
        if self.wire == Wire::SharedMemory {
            return comm.break_links(peer).unwrap();
        }
        let [one, other] = [self.name, name].map(|name| address(self.wire, self.process, self.run, name));
        let forbid = |from: Ipv4Addr, to: Ipv4Addr| {
            let (from, to) = (from.to_string(), to.to_string());
            let rule = ["rule", "add", "pref", "10", "from", &from, "to", &to, "prohibit"];
            assert!(Command::new("ip").args(rule).status().unwrap().success());
        };
        forbid(one, other);
        forbid(other, one);
    }

    /// Checks that an error describes the fault. Returns the agreed verdict.
    fn check_error(&self, fault: &Fault, error: &CollectiveError) -> String {
        let failure = error
            .failure()
            .unwrap_or_else(|| panic!("{fault}: no verdict: {error}"));
        let cause = &failure.verdict.cause;
        let culprit = self.names[cause.culprit().index()];
        match fault.kind {
            Kind::Link => {
                let ends = [fault.rank, fault.peer];
                assert!(ends.contains(&culprit), "{fault}: {error}");
                let excluded = cause.excluded().map(|rank| self.names[rank.index()]);
                assert_eq!(excluded, Some(fault.gone()), "{fault}: {error}");
            }
            _ => assert_eq!(culprit, fault.rank, "{fault}: {error}"),
        }
        let said = failure.to_string();
        assert!(said.contains("process ") && said.contains(" on "), "no host: {said}");
        said
    }
}
