//! `doorbell gpu`: the GPUs of this process, and for each adapter and GPU the paths between them,
//! and why others are not available.

use std::fmt::Write;
use std::path::Path as FilePath;

use doorbell_cuda::{Device, Driver, PeerLink, SmallCopies, WritesOrdering};
use doorbell_gpudirect::{Flush, GpuMemory, MAX_SMALL_COPY, Path, PathSurvey, Scope, SmallWindow, survey};
use doorbell_verbs::Context;
use serde::Serialize;

use crate::cli::GpuArgs;
use crate::device::{self, Side, Soft};
use crate::failure::{Failure, one_line, refused};
use crate::report::{self, LinkKind};
use crate::storage::{StorageStatus, stream, tried};

#[derive(Debug, Serialize)]
struct Listing {
    cuda: Option<String>,
    gpus: Vec<Entry>,
    paths: Vec<Pair>,
    /// Of the file of `--storage`, into each memory.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    storage: Vec<FileInto>,
    /// What could not be checked, and why.
    notes: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Entry {
    number: usize,
    name: String,
    uuid: String,
    pci: String,
    memory_bytes: usize,
    compute_capability: String,
    /// Its links to the other GPUs.
    peers: Vec<PeerReach>,
    /// The devices that see an adapter's writes in order without a flush: none, the owner, or all.
    writes_ordering: &'static str,
    /// How its kernels are made to see what an adapter has written.
    flush: String,
    /// Whether the CPU can map its memory, for small copies.
    small_copies: bool,
    /// The methods of small copies that are not available, and why.
    small_copies_refused: Vec<Reason>,
}

#[derive(Debug, Serialize)]
struct PeerReach {
    gpu: usize,
    /// `nvlink`, `pcie`, or `none`.
    link: &'static str,
}

#[derive(Debug, Serialize)]
struct Pair {
    device: String,
    link: LinkKind,
    gpu: usize,
    best: Option<&'static str>,
    paths: Vec<PathStatus>,
}

#[derive(Debug, Serialize)]
struct FileInto {
    file: String,
    /// The GPU; none for host memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu: Option<usize>,
    #[serde(flatten)]
    status: StorageStatus,
}

#[derive(Debug, Serialize)]
struct PathStatus {
    path: &'static str,
    works: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
}

#[derive(Debug, Serialize)]
struct Reason {
    way: &'static str,
    why: String,
}

/// Lists the GPUs and the paths. A missing GPU or RDMA library is a note, not an error.
///
/// # Errors
/// [`Failure::Usage`] when the options of the userspace devices are invalid; [`Failure::Test`] when
/// a GPU cannot be used, or stdout cannot be written.
pub(crate) fn run(args: &GpuArgs) -> Result<(), Failure> {
    let soft = Soft::configured(&args.soft, 0, Side::Single)?;
    let mut listing = Listing {
        cuda: None,
        gpus: Vec::new(),
        paths: Vec::new(),
        storage: Vec::new(),
        notes: Vec::new(),
    };
    match Driver::load() {
        Ok(driver) => {
            let version = driver.version();
            listing.cuda = Some(format!("{}.{}", version / 1000, version % 1000 / 10));
            query(driver, soft, &mut listing)?;
        }
        Err(absent) => listing.notes.push(one_line(&absent.to_string())),
    }
    if let Some(file) = &args.storage {
        listing.storage = storage(file, &listing.gpus)?;
    }
    if args.json {
        return report::print_result(&listing);
    }
    if !listing.gpus.is_empty() {
        report::print_line(&text(&listing))?;
    }
    for into in &listing.storage {
        let memory = into.gpu.map_or("host memory".to_owned(), |gpu| format!("GPU {gpu}"));
        report::print_line(&into.status.lines(&format!("{} into {memory}: ", into.file)))?;
    }
    for note in &listing.notes {
        eprintln!("doorbell: note: {note}");
    }
    Ok(())
}

/// By which path a file is read into host memory, and into that of each GPU.
fn storage(file: &FilePath, gpus: &[Entry]) -> Result<Vec<FileInto>, Failure> {
    let numbers = std::iter::once(None).chain(gpus.iter().map(|gpu| Some(gpu.number)));
    let into = numbers.map(|gpu| {
        let stream = gpu.map(stream).transpose()?;
        Ok(FileInto {
            file: one_line(&file.display().to_string()),
            gpu,
            status: tried(file, stream.as_ref()).map_err(Failure::Test)?,
        })
    });
    into.collect()
}

fn query(driver: Driver, soft: Soft, listing: &mut Listing) -> Result<(), Failure> {
    let devices = driver.devices().map_err(refused)?;
    let mut adapters = Vec::new();
    for (_, link, context) in device::open_each(soft, &mut listing.notes)? {
        match context {
            Ok(context) => adapters.push((context, link)),
            Err(why) => listing.notes.push(one_line(&why)),
        }
    }
    for gpu in &devices {
        listing.gpus.push(entry(*gpu, &devices).map_err(refused)?);
        let context = gpu.context().map_err(refused)?;
        for (adapter, link) in &adapters {
            let pair = adapter
                .protection_domain()
                .map_err(|e| e.to_string())
                .and_then(|pd| survey(&pd, &context).map_err(|e| e.to_string()))
                .map(|survey| pair(adapter, *link, *gpu, survey));
            match pair {
                Ok(pair) => listing.paths.push(pair),
                Err(why) => listing
                    .notes
                    .push(format!("{} and {gpu}: {}", adapter.name(), one_line(&why))),
            }
        }
    }
    Ok(())
}

fn entry(gpu: Device, all: &[Device]) -> Result<Entry, doorbell_cuda::Error> {
    let peers = all
        .iter()
        .filter(|other| **other != gpu)
        .map(|other| {
            let link = match gpu.peer(*other)? {
                Some(peer) if peer.link == PeerLink::NvLink => "nvlink",
                Some(_) => "pcie",
                None => "none",
            };
            Ok(PeerReach {
                gpu: other.ordinal(),
                link,
            })
        })
        .collect::<Result<_, doorbell_cuda::Error>>()?;
    let memory = GpuMemory::alloc(&gpu.context()?, MAX_SMALL_COPY)?;
    let refused = match SmallWindow::open(&memory) {
        Ok(_) => Vec::new(),
        Err(no) => no.refused,
    };
    Ok(Entry {
        number: gpu.ordinal(),
        name: one_line(&gpu.name()?),
        uuid: gpu.uuid()?.to_string(),
        pci: gpu.pci_bus_id()?,
        memory_bytes: gpu.total_memory()?,
        compute_capability: gpu.compute_capability()?.to_string(),
        peers,
        writes_ordering: match gpu.writes_ordering()? {
            WritesOrdering::None => "nobody",
            WritesOrdering::Owner => "owner",
            WritesOrdering::AllDevices => "all-devices",
        },
        flush: Flush::of(gpu, Scope::Owner)?.to_string(),
        small_copies: refused.is_empty(),
        small_copies_refused: refused
            .into_iter()
            .map(|(way, why)| Reason {
                way,
                why: one_line(&why),
            })
            .collect(),
    })
}

fn pair(adapter: &Context, link: LinkKind, gpu: Device, survey: PathSurvey) -> Pair {
    Pair {
        device: adapter.name().to_owned(),
        link,
        gpu: gpu.ordinal(),
        best: survey.best().map(doorbell_gpudirect::Path::name),
        paths: survey
            .paths
            .into_iter()
            .map(|(path, outcome)| PathStatus {
                path: path.name(),
                works: outcome.is_ok(),
                why: outcome.err().map(|why| one_line(&why.to_string())),
            })
            .collect(),
    }
}

fn text(listing: &Listing) -> String {
    let mut text = format!(
        "{:<5} {:<28} {:<14} {:>12} {:>8}  {}",
        "#gpu", "name", "PCI", "memory[MiB]", "compute", "uuid"
    );
    for gpu in &listing.gpus {
        // Writing into a String cannot fail.
        let _ = write!(
            text,
            "\n{:<5} {:<28} {:<14} {:>12} {:>8}  {}",
            gpu.number,
            gpu.name,
            gpu.pci,
            gpu.memory_bytes >> 20,
            gpu.compute_capability,
            gpu.uuid
        );
    }
    for gpu in &listing.gpus {
        let peers: Vec<_> = gpu
            .peers
            .iter()
            .map(|peer| format!("{} by {}", peer.gpu, peer.link))
            .collect();
        let peers = if peers.is_empty() {
            "there are none".to_owned()
        } else {
            peers.join(", ")
        };
        let _ = write!(text, "\nGPU {}: other GPUs: {peers}", gpu.number);
        let _ = write!(
            text,
            "\nGPU {}: flush of an adapter's writes: {}",
            gpu.number, gpu.flush
        );
        if gpu.small_copies {
            let _ = write!(text, "\nGPU {}: small copies by the processor: yes", gpu.number);
        }
        for refused in &gpu.small_copies_refused {
            let _ = write!(
                text,
                "\nGPU {}: small copies by the processor: not by {}: {}",
                gpu.number, refused.way, refused.why
            );
        }
    }
    for pair in &listing.paths {
        for tried in &pair.paths {
            let outcome = match &tried.why {
                Some(why) => format!("no: {why}"),
                None if pair.best == Some(tried.path) => "yes, the best".to_owned(),
                None => "yes".to_owned(),
            };
            let by = if tried.path == Path::DeviceCopy.name() && tried.why.is_none() {
                format!(
                    " (up to {} bytes by a block of the GPU, more by its copy engines)",
                    SmallCopies::MAX_BYTES
                )
            } else {
                String::new()
            };
            let _ = write!(
                text,
                "\n{} to GPU {}: {}: {outcome}{by}",
                pair.device, pair.gpu, tried.path
            );
        }
    }
    text
}
