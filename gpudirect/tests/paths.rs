//! GPU memory on queue pairs of the userspace device, with a stand-in for the GPU.

use std::error::Error;

use doorbell_cuda::{Context, HostMemory, Memory, Stream};
use doorbell_cuda_standin::{Manner, Standin};
use doorbell_gpudirect::{Arrivals, Flush, GpuMemory, GpuRegistration, Path, Refusal, Scope, survey};
use doorbell_softroce_ibverbs::api;
use doorbell_verbs::{CompletionQueue, Library, ProtectionDomain, QueuePair, RemoteReadWrite};

type Outcome = Result<(), Box<dyn Error>>;

/// A queue pair that is connected to itself, and a GPU.
struct Setting {
    context: Context,
    stream: Stream,
    pd: ProtectionDomain,
    cq: CompletionQueue,
    qp: QueuePair,
    _standin: Standin,
}

impl Setting {
    fn new() -> Result<Self, Box<dyn Error>> {
        let standin = Standin::load(Manner::Lazy);
        let context = standin.driver()?.device(0)?.context()?;
        let stream = Stream::new(&context)?;
        let pd = Library::new(api()).open("soft0")?.protection_domain()?;
        let cq = pd.context().completion_queue(16)?;
        let prepared = pd
            .queue_pair(&cq)
            .send_depth(4)
            .recv_depth(4)
            .allow_remote_write()
            .allow_remote_read()
            .rc()?;
        let here = prepared.endpoint();
        let qp = prepared.connect(&here)?;
        Ok(Self {
            _standin: standin,
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
            for done in self.cq.poll()? {
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

/// A WRITE from one GPU memory into another by `path`, of a few lengths.
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
        let (source, region) = registration.register(&from, RemoteReadWrite)?.into_parts();
        let target = registration.register(&into, RemoteReadWrite)?;
        assert_eq!((region.path(), target.region().path()), (path, path));

        region.push(.., &setting.stream)?.wait()?;
        setting.qp.post(|batch| {
            batch.write(source, target.remote()).signalled();
        })?;
        setting.complete()?;
        let mut arrivals = Arrivals::new(&setting.pd, target.region(), Scope::Owner)?;
        arrivals.publish(.., &setting.stream)?;
        assert!(setting.bytes(&into)? == bytes, "{len} bytes by {path}");
    }
    Ok(())
}

#[test]
fn staged_memory_is_written() -> Outcome {
    written(Path::Staged)
}

#[test]
fn a_transfer_tells_of_its_parts_in_order() -> Outcome {
    let setting = Setting::new()?;
    let len = (3 << 20) + 5;
    let memory = GpuMemory::alloc(&setting.context, len)?;
    let buffer = GpuRegistration::new(&setting.pd)
        .path(Path::Staged)
        .register(&memory, RemoteReadWrite)?;
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

#[test]
fn a_flush_by_read_comes_back() -> Outcome {
    let setting = Setting::new()?;
    let memory = GpuMemory::alloc(&setting.context, 4096)?;
    let buffer = GpuRegistration::new(&setting.pd)
        .path(Path::Staged)
        .register(&memory, RemoteReadWrite)?;
    let mut arrivals = Arrivals::by(&setting.pd, buffer.region(), Scope::Owner, Flush::Read)?;
    assert!(arrivals.flushes());
    for _ in 0..3 {
        arrivals.publish(.., &setting.stream)?;
    }
    Ok(())
}

#[test]
fn every_path_says_why_it_is_not_possible() -> Outcome {
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
        .register(&memory, RemoteReadWrite)
        .unwrap_err();
    let said = refused.to_string();
    assert_eq!(
        said,
        "memory of GPU 0 cannot be registered with soft0: dmabuf: soft0 is a device in software: no bus leads from it to the GPU; \
         peermem: dmabuf is forced; device-copy: dmabuf is forced; staged: dmabuf is forced"
    );
    Ok(())
}
