//! GPU memory on queue pairs of the userspace device, with a stand-in for the GPU.

mod common;

use std::error::Error;
use std::process::{Command, ExitCode};
use std::sync::Arc;

use common::{Case, Outcome};
use doorbell_cuda::{Context, DeviceMemory, DevicePtr, Driver, HostMemory, Memory, Stream};
use doorbell_cuda_standin::{ExecutionMode, Standin, environment};
use doorbell_gpudirect::storage::{FileClient, FileServer};
use doorbell_gpudirect::{Arrivals, Flush, GpuMemory, GpuRegistration, Path, Refusal, Scope, SmallWindow, survey};
use doorbell_softroce_ibverbs::api;
use doorbell_verbs::exchange::{Exchange, Listener};
use doorbell_verbs::{CompletionQueue, Library, PeerReadWrite, PeerWrite, ProtectionDomain, QueuePair};

const TIMEOUT: std::time::Duration = std::time::Duration::from_secs(30);

macro_rules! cases {
    ($($case:ident),* $(,)?) => {
        const CASES: &[Case] = &[$((stringify!($case), $case)),*];
    };
}

cases! {
    staged_memory_is_written,
    gpu_memory_is_written_directly,
    best_path_is_taken_and_refusals_are_reported,
    foreign_memory_is_split_and_kept,
    nothing_is_left,
    small_window_refusals_are_reported_per_method,
    transfer_reports_parts_in_order,
    flush_by_read_completes,
    every_path_reports_its_refusal,
    a_file_is_served_into_gpu_memory,
}

/// Runs itself again with the variable by which the userspace device finds the driver.
fn main() -> ExitCode {
    if std::env::var_os("DOORBELL_CUDA_LIBRARY").is_none() {
        let program = std::env::current_exe().expect("the path of this program");
        let status = Command::new(program)
            .envs(environment(ExecutionMode::Prompt, 2))
            .status();
        return if status.expect("this program runs").success() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        };
    }
    common::run(CASES)
}

struct Setting {
    context: Context,
    stream: Stream,
    pd: ProtectionDomain,
    cq: CompletionQueue,
    qp: QueuePair,
}

impl Setting {
    fn new() -> Result<Self, Box<dyn Error>> {
        Self::of(Driver::load()?)
    }

    fn of(driver: Driver) -> Result<Self, Box<dyn Error>> {
        let context = driver.device(0)?.context()?;
        let stream = Stream::new(&context)?;
        let pd = Library::new(api()).open("soft0")?.protection_domain()?;
        let cq = pd.context().completion_queue(16)?;
        let prepared = pd
            .queue_pair(&cq)
            .max_send_wr(4)
            .max_recv_wr(4)
            .allow_remote_write()
            .allow_remote_read()
            .rc()?;
        let here = prepared.endpoint();
        let qp = prepared.connect(&here)?;
        Ok(Self {
            context,
            stream,
            pd,
            cq,
            qp,
        })
    }

    fn fill(&self, memory: &GpuMemory, bytes: &[u8]) -> Outcome {
        let host = HostMemory::alloc(&self.context, bytes.len())?;
        host.copy_in(0, bytes)?;
        self.stream.copy(memory.span(..bytes.len())?, host.all())?;
        Ok(self.stream.synchronize()?)
    }

    fn bytes(&self, memory: &GpuMemory) -> Result<Vec<u8>, Box<dyn Error>> {
        let host = HostMemory::alloc(&self.context, memory.len())?;
        self.stream.copy(host.all(), memory.all())?;
        self.stream.synchronize()?;
        let mut bytes = vec![0; memory.len()];
        host.copy_out(0, &mut bytes)?;
        Ok(bytes)
    }

    fn complete(&mut self) -> Outcome {
        loop {
            if let Some(done) = self.cq.poll()?.next() {
                done.result()?;
                return Ok(());
            }
        }
    }
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len)
        .map(|at| ((at * 31 + seed * 7 + at / 255) % 251) as u8)
        .collect()
}

/// A WRITE from one GPU memory to another by `path`, for a few lengths.
fn written(path: Path) -> Outcome {
    let mut setting = Setting::new()?;
    for len in [1, 4096, 70_001, 5 << 20] {
        let (from, into) = (
            GpuMemory::alloc(&setting.context, len)?,
            GpuMemory::alloc(&setting.context, len)?,
        );
        let bytes = pattern(len, 1);
        setting.fill(&from, &bytes)?;
        setting.fill(&into, &pattern(len, 2))?;
        let registration = GpuRegistration::new(&setting.pd).path(path);
        let (source, region) = registration.register(&from, PeerReadWrite)?.into_parts();
        let target = registration.register(&into, PeerReadWrite)?;
        assert_eq!((region.path(), target.region().path()), (path, path));

        region.push(.., &setting.stream)?.wait()?;
        setting.qp.post(|batch| {
            batch.write(source, target.remote()).signaled();
        })?;
        setting.complete()?;
        let mut arrivals = Arrivals::new(&setting.pd, target.region(), Scope::Owner)?;
        arrivals.publish(.., &setting.stream)?;
        assert!(setting.bytes(&into)? == bytes, "{len} bytes by {path}");
    }
    Ok(())
}

fn staged_memory_is_written() -> Outcome {
    written(Path::Staged)
}

fn gpu_memory_is_written_directly() -> Outcome {
    written(Path::DeviceCopy)
}

fn best_path_is_taken_and_refusals_are_reported() -> Outcome {
    let setting = Setting::new()?;
    let memory = GpuMemory::alloc(&setting.context, 4096)?;
    let buffer = GpuRegistration::new(&setting.pd).register(&memory, PeerReadWrite)?;
    assert_eq!(buffer.region().path(), Path::DeviceCopy);
    let refused: Vec<_> = buffer.region().refused().iter().map(|refused| refused.path).collect();
    assert_eq!(refused, [Path::DmaBuf, Path::Peermem]);
    // The userspace device's copy is done when the request completes.
    assert_eq!(Flush::needed(buffer.region(), Scope::AllDevices)?, Flush::Copied);
    // Over the bus this GPU keeps the order for itself, and needs a driver flush for others.
    assert_eq!(Flush::of(setting.context.device(), Scope::Owner)?, Flush::InOrder);
    assert_eq!(Flush::of(setting.context.device(), Scope::AllDevices)?, Flush::Driver);
    Ok(())
}

fn foreign_memory_is_split_and_kept() -> Outcome {
    let setting = Setting::new()?;
    let owned = DeviceMemory::alloc(&setting.context, 1 << 20)?;
    let owner = Arc::new(owned);
    let kept = Arc::downgrade(&owner);
    let address = DevicePtr(owner.device_ptr().0 + 4096);
    // SAFETY: the owner keeps the memory, of which no references exist.
    let memory = unsafe { GpuMemory::wrap(&setting.context, address, 300_000, owner)? };
    let registration = GpuRegistration::new(&setting.pd);
    let (chunks, region) = registration.register_chunks(&memory, 100_000, PeerReadWrite)?;
    let chunks: Vec<_> = chunks.collect();
    let ranges: Vec<_> = chunks.iter().map(|chunk| region.range_of(chunk)).collect();
    assert_eq!(ranges, [0..100_000, 100_000..200_000, 200_000..300_000]);
    assert_eq!(region.path(), Path::DeviceCopy);
    drop((memory, region));
    // A buffer may still be accessed by a device, so it keeps the memory.
    assert!(kept.upgrade().is_some());
    drop(chunks);
    setting.context.reap();
    assert!(kept.upgrade().is_none());
    Ok(())
}

fn nothing_is_left() -> Outcome {
    // A driver of its own, with counters and maximally late execution.
    let standin = Standin::load(ExecutionMode::Lazy);
    let mut setting = Setting::of(standin.driver()?)?;
    let live = || ["allocation", "mapping", "host", "event"].map(|kind| standin.count(kind));
    let before = live();
    let memory = GpuMemory::alloc(&setting.context, 100_000)?;
    let registration = GpuRegistration::new(&setting.pd).path(Path::Staged);
    let target = registration.register(&memory, PeerReadWrite)?;
    let (source, region) = registration.register(&memory, PeerReadWrite)?.into_parts();
    region.push(.., &setting.stream)?.wait()?;
    let (first, second) = source.split_at(50_000);
    drop(second);
    setting.qp.post(|batch| {
        batch.write(first, target.remote()).signaled();
    })?;
    setting.complete()?;
    Arrivals::new(&setting.pd, target.region(), Scope::Owner)?.publish(.., &setting.stream)?;
    assert!(live() != before);
    drop((memory, target, region));
    setting.stream.synchronize()?;
    setting.context.reap();
    assert_eq!(live(), before);
    Ok(())
}

fn small_window_refusals_are_reported_per_method() -> Outcome {
    let setting = Setting::new()?;
    let memory = GpuMemory::alloc(&setting.context, 4096)?;
    // The stand-in's dma-buf cannot be mapped, like most of NVIDIA's.
    let no = SmallWindow::open(&memory).map(drop).unwrap_err();
    let ways: Vec<_> = no.refused.iter().map(|(way, _)| *way).collect();
    assert_eq!(ways, ["dma-buf", "coherent link", "gdrdrv"]);
    assert!(no.refused[0].1.starts_with("mmap(2) of the driver's dma-buf: "), "{no}");
    assert!(!no.to_string().contains('\n'));
    Ok(())
}

fn transfer_reports_parts_in_order() -> Outcome {
    let setting = Setting::new()?;
    let len = (3 << 20) + 5;
    let memory = GpuMemory::alloc(&setting.context, len)?;
    let buffer = GpuRegistration::new(&setting.pd)
        .path(Path::Staged)
        .register(&memory, PeerReadWrite)?;
    let mut transfer = buffer.region().push(7.., &setting.stream)?;
    let (mut at, mut parts) = (7, 0);
    while let Some(part) = transfer.next_part()? {
        assert_eq!(part.start, at);
        (at, parts) = (part.end, parts + 1);
    }
    assert!(transfer.is_taken() && transfer.ready()?.is_none());
    assert_eq!(at, len);
    assert!(parts >= 4, "{parts} parts");
    assert_eq!(buffer.region().range_of(buffer.buffer()), 0..len);
    assert!(buffer.region().push(..=len, &setting.stream).is_err());
    Ok(())
}

fn flush_by_read_completes() -> Outcome {
    let setting = Setting::new()?;
    let memory = GpuMemory::alloc(&setting.context, 4096)?;
    let buffer = GpuRegistration::new(&setting.pd)
        .path(Path::Staged)
        .register(&memory, PeerReadWrite)?;
    let mut arrivals = Arrivals::by(&setting.pd, buffer.region(), Scope::Owner, Flush::Read)?;
    assert!(arrivals.needs_flush());
    for _ in 0..3 {
        arrivals.publish(.., &setting.stream)?;
    }
    Ok(())
}

fn every_path_reports_its_refusal() -> Outcome {
    let setting = Setting::new()?;
    let survey = survey(&setting.pd, &setting.context)?;
    let paths: Vec<_> = survey.paths.iter().map(|(path, _)| *path).collect();
    assert_eq!(paths, Path::ALL);
    for path in [Path::DmaBuf, Path::Peermem] {
        let why = survey
            .paths
            .iter()
            .find(|(tried, _)| *tried == path)
            .map(|(_, outcome)| outcome);
        assert!(matches!(why, Some(Err(Refusal::Software { .. }))), "{path}: {why:?}");
    }
    let memory = GpuMemory::alloc(&setting.context, 4096)?;
    let refused = GpuRegistration::new(&setting.pd)
        .path(Path::DmaBuf)
        .register(&memory, PeerReadWrite)
        .unwrap_err();
    let said = refused.to_string();
    assert_eq!(
        said,
        "memory of GPU 0 cannot be registered with soft0: dmabuf: soft0 is a device in software: no bus connects it to the GPU; \
         peermem: dmabuf is forced; device-copy: dmabuf is forced; staged: dmabuf is forced"
    );
    Ok(())
}

/// By the copies that the userspace device has the GPU make.
fn a_file_is_served_into_gpu_memory() -> Outcome {
    const LEN: usize = 3_000_001;
    let setting = Setting::new()?;
    let folder = tempfile::tempdir()?;
    std::fs::write(folder.path().join("weights"), pattern(LEN, 1))?;
    let listener = Listener::bind("127.0.0.1:0")?;
    let address = listener.local_addr();
    let memory = GpuMemory::alloc(&setting.context, LEN + 100)?;
    setting.stream.fill(memory.all(), 0xa5)?;
    setting.stream.synchronize()?;
    let inbox = GpuRegistration::new(&setting.pd)
        .path(Path::DeviceCopy)
        .register(&memory, PeerWrite)?;
    let mut arrivals = Arrivals::new(&setting.pd, inbox.region(), Scope::Owner)?;
    std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            let server = FileServer::new(folder.path())?;
            let pd = Library::new(api())
                .open("soft0")
                .and_then(|device| device.protection_domain())
                .expect("a device");
            server.serve(&pd, listener.accept(TIMEOUT)?)
        });
        let mut client = FileClient::new(&setting.pd, Exchange::connect(address, TIMEOUT)?)?;
        let count = client.read_at("weights", 1, inbox.remote())?;
        client.finish()?;
        let sent = server.join().expect("the server ends")?;
        assert_eq!((count, sent), (LEN as u64 - 1, LEN as u64 - 1));
        Ok::<(), Box<dyn Error>>(())
    })?;
    arrivals.publish(.., &setting.stream)?;
    let bytes = setting.bytes(&memory)?;
    assert!(bytes[..LEN - 1] == pattern(LEN, 1)[1..], "other bytes than the file's");
    assert!(bytes[LEN - 1..].iter().all(|byte| *byte == 0xa5));
    Ok(())
}
