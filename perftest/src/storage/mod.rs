//! `doorbell bw file`: files read into and written from host or GPU memory, held against the disk
//! and the bus, and against what programs do without Doorbell.
//!
//! Each round measures everything on the same bytes, in an order that rotates from round to round,
//! so that disturbances and caches below the disk favour none. A value is the median of its
//! rounds, a ratio that of the rounds' ratios.

mod args;
mod fetch;
mod scratch;
mod serve;
mod status;
mod subjects;
mod table;

use std::path::Path;
use std::time::Instant;

use doorbell_cuda::{Driver, HostMemory, Stream};
use doorbell_gpudirect::GpuMemory;
use doorbell_gpudirect::storage::{File, Storage, StorageOptions};
use doorbell_verbs::Memory;
use serde::Serialize;

use crate::failure::{Failure, one_line, refused};
use crate::interrupt::Interrupt;
use crate::limits::median;
use crate::report;

pub(crate) use args::{FileArgs, NOTES};
use scratch::Scratch;
use status::status;
pub(crate) use status::{StorageStatus, tried};
use subjects::{Place, Window};
use table::Row;

const DEFAULT_SIZE: u64 = 256 << 20;
/// Room in which a file of this command's own has windows at several offsets.
const WINDOWS: u64 = 4;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Subject {
    Disk,
    Bus,
    Dd,
    Plain,
    Doorbell,
}

const SUBJECTS: [Subject; 5] = [
    Subject::Disk,
    Subject::Bus,
    Subject::Dd,
    Subject::Plain,
    Subject::Doorbell,
];

impl Subject {
    fn name(self, write: bool) -> &'static str {
        match (self, write) {
            (Subject::Disk, false) => "disk_read",
            (Subject::Disk, true) => "disk_write",
            (Subject::Bus, false) => "bus_to_gpu",
            (Subject::Bus, true) => "bus_from_gpu",
            (Subject::Dd, false) => "dd_read",
            (Subject::Dd, true) => "dd_write",
            (Subject::Plain, false) => "read_copy",
            (Subject::Plain, true) => "copy_write",
            (Subject::Doorbell, false) => "doorbell_read",
            (Subject::Doorbell, true) => "doorbell_write",
        }
    }

    fn what(self, gpu: bool) -> &'static str {
        match self {
            Subject::Disk => "the disk's limit: threads with O_DIRECT, one for each request in flight",
            Subject::Bus => "the bus's limit: copies of pinned memory",
            Subject::Dd => "as dd(1) with O_DIRECT: one block after the other",
            Subject::Plain if gpu => "through the page cache into pinned memory, and a copy, in turn",
            Subject::Plain => "through the page cache",
            Subject::Doorbell => "Doorbell",
        }
    }
}

#[derive(Debug, Serialize)]
// fields: the keys of the JSON object
struct Report {
    tool: &'static str,
    version: &'static str,
    test: &'static str,
    file: String,
    /// `host` or `gpu`.
    memory: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu: Option<String>,
    bytes: u64,
    block_bytes: u64,
    depth: u16,
    rounds: u16,
    storage: StorageStatus,
    time: String,
    machine: report::Machine,
    results: Vec<Row>,
}

/// Measures and prints.
///
/// # Errors
/// [`Failure::Usage`] for a GPU or path that is not there; [`Failure::Test`] for wrong data, or
/// where a file cannot be read or written.
pub(crate) fn run(args: &FileArgs) -> Result<(), Failure> {
    match &args.remote.from {
        Some(host) => return fetch::run(args, host),
        None if args.remote.serve => return serve::run(args),
        None if args.remote.device.is_some() || args.soft.is_set() => {
            return Err(Failure::usage(
                "a device carries nothing between a file and this process: use --serve, or --from HOST",
            ));
        }
        None => {}
    }
    let interrupt = Interrupt::catch()?;
    let time = report::now();
    let mut bench = Bench::open(args)?;
    let mut results = bench.measure(args, false, &interrupt)?;
    if !args.no_write {
        results.extend(bench.measure(args, true, &interrupt)?);
    }
    let report = Report {
        tool: "doorbell",
        version: env!("CARGO_PKG_VERSION"),
        test: "file",
        file: one_line(&args.file.display().to_string()),
        memory: if args.gpu.is_some() { "gpu" } else { "host" },
        gpu: bench.gpu.clone(),
        bytes: bench.len as u64,
        block_bytes: args.block,
        depth: args.depth,
        rounds: args.rounds,
        storage: status(&bench.storage, &bench.file),
        time,
        machine: report::Machine::this(),
        results,
    };
    if args.json {
        return report::print_json(&report);
    }
    report::print_line(&text(&report))
}

struct Bench {
    storage: Storage,
    file: File,
    /// Written; where FILE is a folder, read too.
    scratch: Option<Scratch>,
    place: Place,
    disk_blocks: Vec<Memory>,
    gpu: Option<String>,
    len: usize,
    file_len: u64,
}

impl Bench {
    fn open(args: &FileArgs) -> Result<Bench, Failure> {
        let mut options = StorageOptions::from_environment().map_err(usage)?;
        if let Some(path) = args.path {
            options = options.path(path);
        }
        let block = usize::try_from(args.block).unwrap_or(usize::MAX);
        let options = options.block(block).depth(args.depth.into());
        let stream = args.gpu.map(stream).transpose()?;
        let mut storage = match &stream {
            Some(stream) => options.on_stream(stream),
            None => options.host(),
        }
        .map_err(usage)?;

        let is_folder = args.file.is_dir();
        let folder = if is_folder {
            args.file.as_path()
        } else {
            parent(&args.file)
        };
        let existing = if is_folder {
            None
        } else {
            Some(File::open(&args.file).map_err(usage)?)
        };
        let file_len = match &existing {
            Some(file) => file.len().map_err(refused)?,
            None => args.size.unwrap_or(DEFAULT_SIZE).saturating_mul(WINDOWS),
        };
        let len = args.size.unwrap_or(DEFAULT_SIZE).min(file_len);
        if len == 0 {
            return Err(Failure::usage(format!(
                "{}: there is nothing to read",
                args.file.display()
            )));
        }
        let len = usize::try_from(len).map_err(refused)?;
        let needs_scratch = is_folder || !args.no_write;
        let scratch_len = if is_folder {
            usize::try_from(file_len).map_err(refused)?
        } else {
            len
        };
        let scratch = needs_scratch
            .then(|| Scratch::new(folder, scratch_len, &mut storage))
            .transpose()?;
        let file = match (existing, &scratch) {
            (Some(file), _) => file,
            (None, Some(scratch)) => File::open(scratch.path()).map_err(refused)?,
            (None, None) => return Err(Failure::usage("a folder, and no file in it")),
        };
        let gpu = stream.as_ref().map(|stream| stream.context().device().name());
        let gpu = gpu.transpose().map_err(refused)?.map(|name| one_line(&name));
        Ok(Bench {
            place: place(stream, len, block)?,
            disk_blocks: subjects::disk_blocks(block, args.depth.into()),
            storage,
            file,
            scratch,
            gpu,
            len,
            file_len,
        })
    }

    fn window(&self, args: &FileArgs, round: u16, write: bool) -> Window {
        // Another part of the file in each round; only its beginning is written.
        let windows = if write {
            1
        } else {
            (self.file_len / self.len as u64).max(1)
        };
        Window {
            offset: u64::from(round) % windows * self.len as u64,
            len: self.len,
            block: args.block as usize,
        }
    }

    fn measure(&mut self, args: &FileArgs, write: bool, interrupt: &Interrupt) -> Result<Vec<Row>, Failure> {
        let is_gpu = args.gpu.is_some();
        let subjects: Vec<Subject> = SUBJECTS
            .into_iter()
            .filter(|one| is_gpu || *one != Subject::Bus)
            .collect();
        let mut rates = vec![Vec::new(); subjects.len()];
        self.verify(self.window(args, 0, write), write)?;
        for round in 0..args.rounds {
            let window = self.window(args, round, write);
            for turn in 0..subjects.len() {
                if interrupt.requested() {
                    return Err(Failure::Interrupted);
                }
                let at = (turn + usize::from(round)) % subjects.len();
                let start = self.prepare(write)?;
                self.carry_out(subjects[at], window, write)?;
                rates[at].push(window.len as f64 / start.elapsed().as_secs_f64());
            }
        }
        self.verify(self.window(args, args.rounds, write), write)?;
        Ok(rows(&subjects, &rates, write))
    }

    /// The file that is read or written.
    fn path(&self, write: bool) -> &Path {
        match &self.scratch {
            Some(scratch) if write => scratch.path(),
            _ => self.file.path(),
        }
    }

    fn prepare(&self, write: bool) -> Result<Instant, Failure> {
        subjects::drop_cache(self.path(write)).map_err(refused)?;
        Ok(Instant::now())
    }

    fn carry_out(&mut self, subject: Subject, window: Window, write: bool) -> Result<(), Failure> {
        let path = self.path(write).to_owned();
        match subject {
            Subject::Disk => subjects::disk(&path, window, write, &mut self.disk_blocks),
            Subject::Bus => self.place.bus(window, write),
            Subject::Dd => subjects::dd(&path, window, write),
            Subject::Plain if write => self.place.copy_write(&path, window),
            Subject::Plain => self.place.read_copy(&path, window),
            Subject::Doorbell if !write => self.place.read(&mut self.storage, &self.file, window),
            Subject::Doorbell => match &self.scratch {
                Some(scratch) => self.place.write(&mut self.storage, &scratch.file, window),
                None => Ok(()),
            },
        }
    }

    /// Checks every byte of a window after Doorbell has read or written it.
    fn verify(&mut self, window: Window, write: bool) -> Result<(), Failure> {
        self.carry_out(Subject::Doorbell, window, write)?;
        self.place.check(self.path(write), window)?;
        if write {
            return Ok(());
        }
        self.place.read_in_parts(&mut self.storage, &self.file, window)?;
        self.place.check(self.path(write), window)
    }
}

fn place(stream: Option<Stream>, len: usize, block: usize) -> Result<Place, Failure> {
    let Some(stream) = stream else {
        return Ok(Place::Host(Memory::transparent_huge(len)));
    };
    let context = stream.context();
    Ok(Place::Gpu {
        memory: GpuMemory::alloc(context, len).map_err(refused)?,
        pinned: HostMemory::alloc(context, block).map_err(refused)?,
        stream,
    })
}

/// A stream of the GPU with this number.
pub(crate) fn stream(number: usize) -> Result<Stream, Failure> {
    let usage = |e: &dyn std::fmt::Display| Failure::usage(format!("--gpu {number}: {}", one_line(&e.to_string())));
    let driver = Driver::load().map_err(|e| usage(&e))?;
    let device = driver.device(number).map_err(|e| usage(&e))?;
    let stream = device.context().and_then(|context| {
        context.make_current()?;
        Stream::new(&context)
    });
    stream.map_err(refused)
}

fn usage(error: impl std::fmt::Display) -> Failure {
    Failure::usage(one_line(&error.to_string()))
}

fn parent(file: &Path) -> &Path {
    match file.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}

fn rows(subjects: &[Subject], rates: &[Vec<f64>], write: bool) -> Vec<Row> {
    let of = |wanted| {
        subjects
            .iter()
            .position(|one| *one == wanted)
            .map(|at| rates[at].as_slice())
    };
    let limit: Vec<f64> = match (of(Subject::Disk), of(Subject::Bus)) {
        (Some(disk), Some(bus)) => disk.iter().zip(bus).map(|(disk, bus)| disk.min(*bus)).collect(),
        (Some(disk), None) => disk.to_vec(),
        (None, _) => Vec::new(),
    };
    let rows = subjects.iter().zip(rates).filter_map(|(subject, own)| {
        let ratios = if *subject == Subject::Doorbell {
            let plain = of(Subject::Plain).unwrap_or_default();
            let dd = of(Subject::Dd).unwrap_or_default();
            [
                table::comparison("slower_limit", &limit, own),
                table::comparison(Subject::Dd.name(write), dd, own),
                table::comparison(Subject::Plain.name(write), plain, own),
            ]
            .into_iter()
            .flatten()
            .collect()
        } else {
            Vec::new()
        };
        Some(Row {
            name: subject.name(write),
            what: subject.what(of(Subject::Bus).is_some()),
            bytes_per_s: median(own.clone())?,
            ratios,
        })
    });
    rows.collect()
}

fn text(report: &Report) -> String {
    let gpu = table::of_gpu(report.gpu.as_deref());
    format!(
        "# {} bytes of {}, {} memory{gpu}, blocks of {} bytes, {} in flight, {} rounds\n{}{}",
        report.bytes,
        report.file,
        report.memory,
        report.block_bytes,
        report.depth,
        report.rounds,
        report.storage.lines("# "),
        table::lines(&report.results),
    )
}
