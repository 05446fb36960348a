//! `doorbell bw file --from`: a served file read over queue pairs, in turn with a local one.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::Path;
use std::time::Instant;

use doorbell_cuda::{HostMemory, Memory as _, Stream};
use doorbell_gpudirect::storage::FileClient;
use doorbell_gpudirect::{Arrivals, GpuBuffer, GpuMemory, Scope, register};
use doorbell_verbs::exchange::Exchange;
use doorbell_verbs::{Buffer, Memory, PeerWrite, ProtectionDomain};
use serde::Serialize;

use super::args::{FileArgs, RemoteArgs};
use super::serve::{CONNECT_TIMEOUT, Greeting};
use super::subjects::{Window, compare};
use super::table::{self, Row};
use super::{Bench, DEFAULT_SIZE, Subject, stream};
use crate::device::{self, Device, Reach, Side};
use crate::exchange::tcp;
use crate::failure::{Failure, one_line, refused};
use crate::interrupt::Interrupt;
use crate::limits::median;
use crate::report::{self, LinkKind};

const SERVED: &str = "served_read";
/// Of a local file, in turn with the served one.
const LOCAL: [Subject; 3] = [Subject::Dd, Subject::Plain, Subject::Doorbell];

#[derive(Debug, Serialize)]
// fields: the keys of the JSON object
struct Report {
    tool: &'static str,
    version: &'static str,
    test: &'static str,
    server: String,
    file: String,
    device: String,
    link: LinkKind,
    /// `host`, or how GPU memory is registered.
    memory: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu: Option<String>,
    bytes: u64,
    rounds: u16,
    time: String,
    machine: report::Machine,
    results: Vec<Row>,
}

/// Measures and prints.
///
/// # Errors
/// [`Failure::Usage`] for a GPU, device or host that is not there, and for bytes beyond the file;
/// [`Failure::Test`] for wrong data, and where the server does not send the file.
pub(super) fn run(args: &FileArgs, host: &str) -> Result<(), Failure> {
    let interrupt = Interrupt::catch()?;
    let time = report::now();
    let mut served = Served::open(args, host, &interrupt)?;
    let local = args.remote.beside.as_deref();
    let mut local = local.map(|file| beside(args, file, served.len)).transpose()?;
    let results = measure(args, &mut served, local.as_mut(), &interrupt)?;
    let report = Report {
        tool: "doorbell",
        version: env!("CARGO_PKG_VERSION"),
        test: "served_file",
        server: served.server.clone(),
        file: one_line(&args.file.display().to_string()),
        device: served.device.context.name().to_owned(),
        link: served.link,
        memory: served.inbox.name(),
        gpu: served.inbox.gpu()?,
        bytes: served.len as u64,
        rounds: args.rounds,
        time,
        machine: report::Machine::this(),
        results,
    };
    served.client.finish().map_err(refused)?;
    if args.json {
        return report::print_json(&report);
    }
    report::print_line(&text(&report))
}

fn measure(
    args: &FileArgs,
    served: &mut Served<'_>,
    mut local: Option<&mut Bench>,
    interrupt: &Interrupt,
) -> Result<Vec<Row>, Failure> {
    let subjects = if local.is_some() { 1 + LOCAL.len() } else { 1 };
    let mut rates = vec![Vec::new(); subjects];
    let first = served.window(0);
    served.read(first)?;
    if let Some(file) = &args.remote.beside {
        served.inbox.check(file, first)?;
    }
    for round in 0..args.rounds {
        let window = served.window(round);
        for turn in 0..subjects {
            if interrupt.requested() {
                return Err(Failure::Interrupted);
            }
            let at = (turn + usize::from(round)) % subjects;
            let prepare = || Ok(Instant::now());
            let start = local.as_ref().map_or_else(prepare, |bench| bench.prepare(false))?;
            match (&mut local, at) {
                (_, 0) => served.read(window)?,
                (Some(bench), at) => bench.carry_out(LOCAL[at - 1], window, false)?,
                (None, _) => {}
            }
            rates[at].push(window.len as f64 / start.elapsed().as_secs_f64());
        }
    }
    if let Some(file) = &args.remote.beside {
        let last = served.window(args.rounds - 1);
        served.inbox.check(file, last)?;
    }
    Ok(rows(&rates, args.gpu.is_some()))
}

fn rows(rates: &[Vec<f64>], is_gpu: bool) -> Vec<Row> {
    let Some((served, local)) = rates.split_first() else {
        return Vec::new();
    };
    let against = LOCAL.iter().zip(local);
    let ratios = against.filter_map(|(subject, rounds)| table::comparison(subject.name(false), rounds, served));
    let first = median(served.clone()).map(|bytes_per_s| Row {
        name: SERVED,
        what: "over queue pairs, from the server's disk",
        bytes_per_s,
        ratios: ratios.collect(),
    });
    let others = LOCAL.iter().zip(local).filter_map(|(subject, rounds)| {
        Some(Row {
            name: subject.name(false),
            what: subject.what(is_gpu),
            bytes_per_s: median(rounds.clone())?,
            ratios: Vec::new(),
        })
    });
    first.into_iter().chain(others).collect()
}

/// A local file, which is read as `doorbell bw file` reads it.
fn beside(args: &FileArgs, file: &Path, len: usize) -> Result<Bench, Failure> {
    let local = FileArgs {
        file: file.to_owned(),
        size: Some(len as u64),
        no_write: true,
        ..args.clone()
    };
    let bench = Bench::open(&local)?;
    if bench.len == len {
        return Ok(bench);
    }
    Err(Failure::usage(format!(
        "{}: has {} bytes, of which {len} at offset 0 are to be read: --beside needs the file that is served",
        one_line(&file.display().to_string()),
        bench.file_len
    )))
}

/// The served file, and where its bytes arrive.
struct Served<'a> {
    args: &'a FileArgs,
    client: FileClient,
    inbox: Inbox,
    device: Device,
    link: LinkKind,
    server: String,
    file_len: u64,
    len: usize,
}

impl<'a> Served<'a> {
    fn open(args: &'a FileArgs, host: &str, interrupt: &Interrupt) -> Result<Self, Failure> {
        let name = one_line(&args.file.display().to_string());
        let RemoteArgs { device, port, .. } = &args.remote;
        let device = device::open(device.as_deref(), &args.soft, 0, Side::Single, Reach::Elsewhere)?;
        let pd = device.context.protection_domain().map_err(refused)?;
        let (exchange, server) = connect(host, *port, interrupt)?;
        let mut client = FileClient::new(&pd, exchange).map_err(refused)?;
        let greeting: Greeting = serde_json::from_slice(client.data()).map_err(|_| {
            Failure::test(format!(
                "{server}: is no server of this command: start it with bw file --serve"
            ))
        })?;
        let file_len = client
            .len(&args.file)
            .map_err(|error| Failure::test(format!("{name}: {}", one_line(&error.to_string()))))?;
        let len = match args.size {
            Some(size) if size > file_len => {
                return Err(Failure::usage(format!(
                    "{name}: {size} bytes at offset 0: the file of {server} ends at offset {file_len}"
                )));
            }
            size => size.unwrap_or(DEFAULT_SIZE.min(file_len)),
        };
        if len == 0 {
            return Err(Failure::usage(format!("{name}: there is nothing to read")));
        }
        let len = usize::try_from(len).map_err(refused)?;
        let stream = args.gpu.map(stream).transpose()?;
        Ok(Self {
            inbox: Inbox::new(&pd, stream, len)?,
            args,
            client,
            link: Greeting::of(&device).link_to(&greeting),
            device,
            server,
            file_len,
            len,
        })
    }

    /// Another part of the file in each round.
    fn window(&self, round: u16) -> Window {
        let windows = self.file_len / self.len as u64;
        Window {
            offset: u64::from(round) % windows * self.len as u64,
            len: self.len,
            block: self.args.block as usize,
        }
    }

    fn read(&mut self, window: Window) -> Result<(), Failure> {
        let into = match &self.inbox {
            Inbox::Host(buffer) => buffer.remote(),
            Inbox::Gpu { buffer, .. } => buffer.remote(),
        };
        let count = self.client.read_at(&self.args.file, window.offset, into);
        let count = count.map_err(refused)?;
        if count < window.len as u64 {
            return Err(Failure::test(format!(
                "{}: ends at offset {}, before {}",
                one_line(&self.args.file.display().to_string()),
                window.offset + count,
                window.offset + window.len as u64
            )));
        }
        self.inbox.publish()
    }
}

fn connect(host: &str, port: u16, interrupt: &Interrupt) -> Result<(Exchange, String), Failure> {
    let name = one_line(host);
    let addresses: Vec<SocketAddr> = (host, port)
        .to_socket_addrs()
        .map_err(|e| Failure::usage(format!("cannot resolve the server '{name}': {e}")))?
        .collect();
    let (stream, peer) = tcp::connect(&addresses, None, interrupt, |last| {
        format!(
            "cannot reach {name} port {port}: {last}: start `doorbell bw file --serve` there, and --bind its address"
        )
    })?;
    let exchange = Exchange::over(stream, CONNECT_TIMEOUT).map_err(refused)?;
    Ok((exchange, peer.to_string()))
}

/// Memory of this process that the server's adapter writes.
enum Inbox {
    Host(Buffer<PeerWrite>),
    Gpu {
        memory: GpuMemory,
        buffer: GpuBuffer<PeerWrite>,
        arrivals: Arrivals,
        stream: Stream,
    },
}

impl Inbox {
    fn new(pd: &ProtectionDomain, stream: Option<Stream>, len: usize) -> Result<Self, Failure> {
        let Some(stream) = stream else {
            let buffer = pd.register(Memory::transparent_huge(len), PeerWrite);
            return Ok(Self::Host(buffer.map_err(refused)?));
        };
        let memory = GpuMemory::alloc(stream.context(), len).map_err(refused)?;
        let buffer = register(pd, &memory, PeerWrite).map_err(refused)?;
        let arrivals = Arrivals::new(pd, buffer.region(), Scope::Owner).map_err(refused)?;
        Ok(Self::Gpu {
            memory,
            buffer,
            arrivals,
            stream,
        })
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Host(_) => "host",
            Self::Gpu { buffer, .. } => buffer.region().path().name(),
        }
    }

    fn gpu(&self) -> Result<Option<String>, Failure> {
        match self {
            Self::Host(_) => Ok(None),
            Self::Gpu { stream, .. } => {
                let name = stream.context().device().name().map_err(refused)?;
                Ok(Some(one_line(&name)))
            }
        }
    }

    /// What has arrived is visible to kernels, and copied there where GPU memory is staged.
    fn publish(&mut self) -> Result<(), Failure> {
        if let Self::Gpu { arrivals, stream, .. } = self {
            arrivals.publish(.., stream).map_err(refused)?;
            stream.synchronize().map_err(refused)?;
        }
        Ok(())
    }

    /// Compares its bytes with those of a local file.
    fn check(&self, path: &Path, window: Window) -> Result<(), Failure> {
        match self {
            Self::Host(buffer) => compare(path, window, |at, bytes| {
                buffer.read_at(at, bytes);
                Ok(())
            }),
            Self::Gpu { memory, stream, .. } => {
                let host = HostMemory::alloc(stream.context(), window.block).map_err(refused)?;
                compare(path, window, |at, bytes| {
                    stream
                        .copy(host.span(..bytes.len())?, memory.span(at..at + bytes.len())?)
                        .and_then(|()| stream.synchronize())?;
                    host.copy_out(0, bytes)
                })
            }
        }
    }
}

fn text(report: &Report) -> String {
    let gpu = table::of_gpu(report.gpu.as_deref());
    format!(
        "# {} bytes of {} from {}, {} ({}), {} memory{gpu}, {} rounds{}",
        report.bytes,
        report.file,
        report.server,
        report.device,
        report.link.name(),
        report.memory,
        report.rounds,
        table::lines(&report.results),
    )
}
