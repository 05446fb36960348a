//! One process writes from the memory of a GPU into that of another process's GPU.
//!
//! ```text
//! cargo run --release -p doorbell-examples --bin 13_gpu_write             both processes here, on the soft device
//! 13_gpu_write mlx5_0 GPU listen 0.0.0.0:18516                             one each, on the system's devices
//! 13_gpu_write mlx5_0 GPU connect server:18516
//! ```
//!
//! It prints the path of the memory registration; without a GPU it reports what is missing.

#![forbid(unsafe_code)]

use std::process::{Command, ExitCode};
use std::time::Duration;

use doorbell::exchange::{Exchange, Listener};
use doorbell::gpudirect::cuda::{Driver, HostMemory, Memory, Stream};
use doorbell::gpudirect::{Arrivals, GpuMemory, Scope, register};
use doorbell::{Context, Local, PeerWrite, Remote, WriteAccess};
use doorbell_examples::{Error, report};

const TIMEOUT: Duration = Duration::from_secs(30);
const BYTES: usize = 3 << 20;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    report(match *args {
        [] => both_ends(),
        [device, gpu, "listen", at] => listen(device, gpu, at),
        [device, gpu, "connect", to] => connect(device, gpu, to),
        _ => {
            eprintln!("usage: 13_gpu_write [DEVICE GPU listen|connect ADDRESS:PORT]");
            return ExitCode::from(2);
        }
    })
}

fn both_ends() -> Result<(), Error> {
    // An initialised driver does not work in children of fork(2): they are new programs.
    let gpus = Driver::load()?.device_count();
    let listener = Listener::bind("127.0.0.1:0")?;
    let writer = (gpus - 1).min(1).to_string();
    let mut child = Command::new(std::env::current_exe()?)
        .args(["soft0", &writer, "connect", &listener.local_addr().to_string()])
        .spawn()?;
    let read = read(&doorbell::open("soft0")?, "0", &listener);
    if read.is_err() {
        // The end that failed first has reported the reason; no timeout needs to pass.
        drop(child.kill());
    }
    let status = child.wait()?;
    read?;
    if status.success() {
        Ok(())
    } else {
        Err("the other process failed".into())
    }
}

fn listen(device: &str, gpu: &str, at: &str) -> Result<(), Error> {
    read(&doorbell::open(device)?, gpu, &Listener::bind(at)?)
}

fn stream_of(gpu: &str) -> Result<Stream, Error> {
    let context = Driver::load()?.device(gpu.parse()?)?.context()?;
    Ok(Stream::new(&context)?)
}

/// The data written: different at nearby places.
fn pattern() -> Vec<u8> {
    (0..BYTES as u32).map(|at| (at ^ at >> 8 ^ at >> 16) as u8).collect()
}

/// Gives the connecting peer a key to GPU memory, and checks the content after the peer's write.
fn read(device: &Context, gpu: &str, listener: &Listener) -> Result<(), Error> {
    let stream = stream_of(gpu)?;
    let pd = device.protection_domain()?;
    let mut cq = device.completion_queue(8)?;
    let mut qp = pd
        .queue_pair(&cq)
        .max_send_wr(4)
        .max_recv_wr(4)
        .allow_remote_write()
        .rc()?;
    let inbox = register(&pd, &GpuMemory::alloc(stream.context(), BYTES)?, PeerWrite)?;
    let mut arrivals = Arrivals::new(&pd, inbox.region(), Scope::Owner)?;
    qp.receive(pd.register(vec![0; 1], Local)?)?;

    let mut exchange = listener.accept(TIMEOUT)?;
    let (_qp, _) = exchange.pair(qp, &inbox.remote().to_bytes())?;
    let arrived = cq.busy_poll(TIMEOUT)?.next().ok_or("nothing has arrived")?;
    arrived.check()?;

    // From here on work in the stream sees the written data.
    arrivals.publish(.., &stream)?;
    let host = HostMemory::alloc(stream.context(), BYTES)?;
    stream.copy(host.all(), inbox.region().memory().all())?;
    stream.synchronize()?;
    let mut found = vec![0; BYTES];
    host.copy_out(0, &mut found)?;
    if found != pattern() {
        return Err("other bytes than were written".into());
    }
    println!(
        "{BYTES} bytes written into memory of GPU {gpu}, {}",
        inbox.region().path()
    );
    Ok(exchange.finish()?)
}

fn connect(device: &str, gpu: &str, to: &str) -> Result<(), Error> {
    let stream = stream_of(gpu)?;
    let device = doorbell::open(device)?;
    let pd = device.protection_domain()?;
    let mut cq = device.completion_queue(8)?;
    let qp = pd.queue_pair(&cq).max_send_wr(4).max_recv_wr(4).rc()?;
    let (buffer, region) = register(&pd, &GpuMemory::alloc(stream.context(), BYTES)?, Local)?.into_parts();

    let mut exchange = Exchange::connect(to, TIMEOUT)?;
    let (mut qp, peer_data) = exchange.pair(qp, b"")?;
    let inbox: Remote<WriteAccess> = Remote::from_bytes(&peer_data)?;

    // Stands for a kernel's result: a copy into the memory, which must complete before it is sent.
    let host = HostMemory::alloc(stream.context(), BYTES)?;
    host.copy_in(0, &pattern())?;
    stream.copy(region.memory().all(), host.all())?;
    region.push(.., &stream)?.wait()?;
    qp.post(|batch| {
        batch.write(buffer, inbox).imm(0).signaled();
    })?;
    let written = cq.busy_poll(TIMEOUT)?.next().ok_or("the write is not complete")?;
    written.check()?;
    // Not earlier: a destroyed queue pair acknowledges nothing.
    Ok(exchange.finish()?)
}
