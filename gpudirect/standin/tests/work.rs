//! Work of one process: kernels and graph branches that wait for each other, lost devices.

use std::thread;
use std::time::{Duration, Instant};

use doorbell_cuda::{
    Argument, Attribute, CaptureMode, Context, DeviceMemory, Driver, Error, Event, HostMemory, Kernel, Launch, Memory,
    Module, Stream, WaitCondition,
};
use doorbell_cuda_standin::{ExecutionMode, Standin};

type Result<T = ()> = std::result::Result<T, Error>;

const PTX: &str = ".visible .entry meet()\n.visible .entry gather(\n.visible .entry signals(\n";
const BLOCKS: u32 = 3;

struct Rank {
    context: Context,
    stream: Stream,
    memory: DeviceMemory,
    kernel: Kernel,
}

impl Rank {
    fn new(driver: Driver, device: usize, kernel: &str) -> Result<Self> {
        let devices = driver.devices()?;
        let context = devices[device].context()?;
        let peers: Vec<_> = devices
            .iter()
            .copied()
            .filter(|other| *other != context.device())
            .collect();
        let memory = DeviceMemory::options(&context).peers(&peers).alloc(4096)?;
        let stream = Stream::new(&context)?;
        stream.fill(memory.all(), 0)?;
        stream.synchronize()?;
        let kernel = Module::from_ptx(&context, PTX)?.kernel(kernel)?;
        Ok(Self {
            context,
            stream,
            memory,
            kernel,
        })
    }

    fn words(&self, from: usize, count: usize) -> Result<Vec<u32>> {
        let mut host = HostMemory::alloc(&self.context, 4 * count)?;
        self.stream
            .copy(host.all(), self.memory.span(from..from + 4 * count)?)?;
        let bytes = host.bytes_mut()?;
        Ok(bytes
            .as_chunks::<4>()
            .0
            .iter()
            .map(|word| u32::from_ne_bytes(*word))
            .collect())
    }
}

#[test]
fn kernels_of_two_ranks_wait_for_each_other() {
    for manner in [ExecutionMode::Prompt, ExecutionMode::Lazy] {
        let standin = Standin::load(manner);
        let driver = standin.driver().unwrap();
        let ranks: Vec<_> = (0..2).map(|rank| Rank::new(driver, rank, "meet").unwrap()).collect();
        let rounds = 50u32;
        for (rank, peer) in [(&ranks[0], &ranks[1]), (&ranks[1], &ranks[0])] {
            let (own, theirs, result) = (
                rank.memory.device_ptr(),
                peer.memory.device_ptr(),
                rank.memory.span(1024..).unwrap().device_ptr(),
            );
            // SAFETY: the flags and results of these blocks lie in memory accessible to both.
            unsafe {
                rank.kernel
                    .launch(
                        &rank.stream,
                        Launch::linear(BLOCKS, 256),
                        &[&own, &theirs, &result, &rounds],
                        &[rank.memory.all(), peer.memory.all()],
                    )
                    .unwrap();
            }
        }
        for rank in &ranks {
            assert_eq!(
                rank.words(1024, BLOCKS as usize).unwrap(),
                [rounds; BLOCKS as usize],
                "{manner:?}"
            );
        }
        drop(ranks);
        standin.assert_nothing_left("two ranks");
    }
}

#[test]
fn cooperative_blocks_are_all_resident() {
    let standin = Standin::load(ExecutionMode::Prompt);
    standin.set_attribute(Attribute::MultiprocessorCount as i32, 4);
    let rank = Rank::new(standin.driver().unwrap(), 0, "gather").unwrap();
    let launch = Launch {
        cooperative: true,
        ..Launch::linear(8, 128)
    };
    let (counter, result) = (rank.memory.device_ptr(), rank.memory.span(1024..).unwrap().device_ptr());
    // SAFETY: the counter and the results of 8 blocks lie in the memory.
    unsafe {
        rank.kernel
            .launch(&rank.stream, launch, &[&counter, &result], &[rank.memory.all()])
            .unwrap()
    };
    let expected: Vec<u32> = (0..8).map(|block| 8100 + block).collect();
    assert_eq!(rank.words(1024, 8).unwrap(), expected);

    let many = Launch {
        cooperative: true,
        ..Launch::linear(5, 512)
    };
    // SAFETY: refused, as this many blocks do not fit.
    let refused = unsafe { rank.kernel.launch(&rank.stream, many, &[&counter, &result], &[]) };
    assert_eq!(refused.unwrap_err().failure().unwrap().code, 720);
}

/// However late the workers or the warp that signals for them are.
#[test]
fn each_signal_is_sent_once_and_in_order() {
    let standin = Standin::load(ExecutionMode::Prompt);
    let rank = Rank::new(standin.driver().unwrap(), 0, "signals").unwrap();
    for (give_rests, send_rests) in [(0u32, 0u32), (1, 0), (0, 1), (3, 5), (7, 2)] {
        let (count, result) = (5000u32, rank.memory.device_ptr());
        // SAFETY: two words of the memory are the result.
        unsafe {
            rank.kernel
                .launch(
                    &rank.stream,
                    Launch::linear(2, 1),
                    &[&result, &count, &give_rests, &send_rests],
                    &[rank.memory.all()],
                )
                .unwrap()
        };
        assert_eq!(
            rank.words(0, 2).unwrap(),
            [count, 0],
            "rests after {give_rests} given and {send_rests} sent"
        );
    }
}

/// Two branches alternate through a word; the last operation of one depends on the other.
#[test]
fn graph_branches_run_concurrently() {
    for manner in [ExecutionMode::Prompt, ExecutionMode::Lazy] {
        let standin = Standin::load(manner);
        let rank = Rank::new(standin.driver().unwrap(), 0, "meet").unwrap();
        let (stream, other) = (&rank.stream, Stream::new(&rank.context).unwrap());
        let (begun, done) = (Event::new(&rank.context).unwrap(), Event::new(&rank.context).unwrap());
        let (word, count) = (rank.memory.span(..4).unwrap(), rank.memory.span(64..68).unwrap());
        let graph = stream
            .capture(CaptureMode::ThreadLocal, &[&other], || {
                stream.record(&begun)?;
                stream.wait_value32(word, WaitCondition::Equal(1))?;
                stream.write_value32(word, 2)?;
                other.wait(&begun)?;
                other.write_value32(word, 1)?;
                other.wait_value32(word, WaitCondition::Equal(2))?;
                other.write_value32(count, 7)?;
                other.record(&done)?;
                stream.wait(&done)?;
                stream.copy(rank.memory.span(68..72)?, count)?;
                stream.fill(count, 0)?;
                stream.fill(word, 0)
            })
            .unwrap();
        assert_eq!(graph.node_count().unwrap(), 8);
        let exec = graph.instantiate().unwrap();
        for _ in 0..20 {
            stream.fill(rank.memory.span(68..72).unwrap(), 0).unwrap();
            exec.launch(stream).unwrap();
            assert_eq!(rank.words(64, 2).unwrap(), [0, 7], "{manner:?}");
        }
        // Launches of one graph are serialized, on any streams.
        exec.launch(stream).unwrap();
        exec.launch(&other).unwrap();
        exec.launch(stream).unwrap();
        assert_eq!(rank.words(64, 2).unwrap(), [0, 7]);
        other.synchronize().unwrap();

        // Work of a stream that is not joined to the first stream.
        let unjoined = stream.capture(CaptureMode::ThreadLocal, &[&other], || {
            stream.record(&begun)?;
            other.wait(&begun)?;
            other.fill(word, 1)?;
            stream.fill(count, 1)
        });
        assert_eq!(unjoined.unwrap_err().failure().unwrap().code, 904);
        stream.synchronize().unwrap();
        drop((exec, graph, other, rank, begun, done));
        standin.assert_nothing_left("a graph");
    }
}

#[test]
fn stream_waits_end_on_writes_by_streams_and_host() {
    for manner in [ExecutionMode::Prompt, ExecutionMode::Lazy] {
        let standin = Standin::load(manner);
        let rank = Rank::new(standin.driver().unwrap(), 0, "meet").unwrap();
        let host = HostMemory::alloc(&rank.context, 64).unwrap();
        let other = Stream::new(&rank.context).unwrap();
        rank.stream
            .wait_value64(rank.memory.span(..8).unwrap(), WaitCondition::AtLeast(5))
            .unwrap();
        rank.stream
            .wait_value32(host.span(..4).unwrap(), WaitCondition::AnyBit(8))
            .unwrap();
        other.write_value64(rank.memory.span(..8).unwrap(), 6).unwrap();
        assert!(!rank.stream.is_idle().unwrap());
        host.atomic_u32(0)
            .unwrap()
            .store(12, std::sync::atomic::Ordering::Release);
        rank.stream.synchronize().unwrap();
        other.synchronize().unwrap();
    }
}

#[test]
fn no_work_after_device_loss() {
    for manner in [ExecutionMode::Prompt, ExecutionMode::Lazy] {
        let standin = Standin::load(manner);
        let rank = Rank::new(standin.driver().unwrap(), 0, "meet").unwrap();
        rank.stream
            .wait_value32(rank.memory.all(), WaitCondition::Equal(1))
            .unwrap();
        let event = Event::new(&rank.context).unwrap();
        rank.stream.record(&event).unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| rank.stream.synchronize());
            standin.lose(700);
            assert!(matches!(waiting.join().unwrap(), Err(Error::Lost(_))));
        });
        assert!(matches!(event.is_done(), Err(Error::Lost(_))));
        assert!(matches!(rank.stream.fill(rank.memory.all(), 1), Err(Error::Lost(_))));
        assert!(matches!(DeviceMemory::alloc(&rank.context, 1), Err(Error::Lost(_))));
    }
}

/// A kernel that waits for a peer that never arrives ends, and so does its stream.
#[test]
fn kernels_end_when_the_device_is_lost() {
    for manner in [ExecutionMode::Prompt, ExecutionMode::Lazy] {
        let standin = Standin::load(manner);
        let rank = Rank::new(standin.driver().unwrap(), 0, "meet").unwrap();
        let at = |offset: usize| rank.memory.span(offset..).unwrap().device_ptr();
        // SAFETY: the flags, the peer's flags and the results of these blocks lie in the memory.
        unsafe {
            let arguments: [&dyn Argument; 4] = [&at(0), &at(256), &at(1024), &1u32];
            let uses = &[rank.memory.all()];
            rank.kernel
                .launch(&rank.stream, Launch::linear(BLOCKS, 32), &arguments, uses)
                .unwrap();
        }
        thread::scope(|scope| {
            let waiting = scope.spawn(|| rank.stream.synchronize());
            standin.lose(719);
            assert!(matches!(waiting.join().unwrap(), Err(Error::Lost(_))));
        });
        let begun = Instant::now();
        while standin.count("work") > 0 {
            // By itself it times out after two minutes.
            assert!(begun.elapsed() < Duration::from_secs(60), "the kernel waits yet");
            thread::yield_now();
        }
    }
}

#[test]
fn first_launch_waits_for_the_device_with_implicit_synchronization() {
    let standin = Standin::load(ExecutionMode::Prompt);
    standin.set_implicit_synchronization(true);
    let rank = Rank::new(standin.driver().unwrap(), 0, "gather").unwrap();
    let (other, writer) = (Stream::new(&rank.context).unwrap(), Stream::new(&rank.context).unwrap());
    let word = rank.memory.span(512..516).unwrap();
    let launch = || {
        let (counter, result) = (rank.memory.device_ptr(), rank.memory.span(1024..).unwrap().device_ptr());
        // SAFETY: the counter and the result of one block lie in the memory.
        unsafe {
            rank.kernel
                .launch(&rank.stream, Launch::linear(1, 1), &[&counter, &result], &[])
                .unwrap()
        };
    };
    other.wait_value32(word, WaitCondition::Equal(1)).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            launch();
            assert!(other.is_idle().unwrap(), "it has not waited");
        });
        // Long enough that a launch that does not wait is usually detected.
        thread::sleep(Duration::from_millis(20));
        writer.write_value32(word, 1).unwrap();
    });
    // The second launch does not wait.
    other.wait_value32(word, WaitCondition::Equal(2)).unwrap();
    launch();
    rank.stream.synchronize().unwrap();
    assert!(!other.is_idle().unwrap());
    writer.write_value32(word, 2).unwrap();
    rank.context.synchronize().unwrap();
}

#[test]
fn streams_refuse_objects_of_another_device() {
    let standin = Standin::load(ExecutionMode::Lazy);
    let driver = standin.driver().unwrap();
    let (here, there) = (
        Rank::new(driver, 0, "gather").unwrap(),
        Rank::new(driver, 1, "gather").unwrap(),
    );
    let event = Event::new(&here.context).unwrap();
    assert_eq!(there.stream.record(&event).unwrap_err().failure().unwrap().code, 400);
    here.stream.record(&event).unwrap();
    there.stream.wait(&event).unwrap();
    let arguments: [&dyn Argument; 2] = [&here.memory.device_ptr(), &here.memory.device_ptr()];
    // SAFETY: refused before anything runs.
    let refused = unsafe { here.kernel.launch(&there.stream, Launch::linear(1, 1), &arguments, &[]) };
    assert_eq!(refused.unwrap_err().failure().unwrap().code, 400);
    there.stream.synchronize().unwrap();
}
