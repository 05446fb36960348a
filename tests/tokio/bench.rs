//! Streams beside raw SENDs, by turns, between two processes on one device.
//!
//! ```text
//! cargo bench -p doorbell-tests --bench tokio [-- DEVICE]
//! ```

use std::env;
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use doorbell::exchange::{Exchange, Listener};
use doorbell::{Buffer, CompletionQueue, Context, Local, ProtectionDomain, QueueKind, QueuePair};
use doorbell_tokio::{RdmaListener, RdmaStream, StreamConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::runtime::Runtime;

type Error = Box<dyn std::error::Error>;
type Result<T = ()> = std::result::Result<T, Error>;

const TURNS: usize = 5;
const PING: usize = 64;
const PINGS: u32 = 20_000;
const SIZES: [u32; 3] = [16 << 10, 64 << 10, 256 << 10];
const TOTAL: u64 = 1 << 29;
const DEPTH: u16 = 32;
const TIMEOUT: Duration = Duration::from_secs(30);

/// What is measured; both processes go through the same list.
#[derive(Clone, Copy)]
enum Test {
    RawPing,
    StreamPing,
    Raw(u32),
    Copied(u32),
    Lent(u32),
}

fn tests() -> Vec<Test> {
    let pings = [Test::RawPing, Test::StreamPing];
    let bandwidths = SIZES
        .into_iter()
        .flat_map(|size| [Test::Raw(size), Test::Copied(size), Test::Lent(size)]);
    pings.into_iter().chain(bandwidths).collect()
}

fn main() -> Result {
    let arguments: Vec<_> = env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match arguments.as_slice() {
        [role, device, address] if role == "client" => client(&runtime, device, address.parse()?),
        [device] => server(&runtime, device),
        _ => server(&runtime, "soft0"),
    }
}

fn server(runtime: &Runtime, device: &str) -> Result {
    let context = doorbell::open(device)?;
    let mut listener = Listener::bind("127.0.0.1:0")?;
    let mut client = Reaped(
        Command::new(env::current_exe()?)
            .args(["client", device, &listener.local_addr().to_string()])
            .stdin(Stdio::null())
            .spawn()?,
    );
    let tests = tests();
    let mut figures = vec![Vec::new(); tests.len()];
    for _ in 0..TURNS {
        for (test, figures) in tests.iter().zip(&mut figures) {
            figures.push(serve(runtime, &context, &mut listener, *test)?);
        }
    }
    client.0.wait()?;
    print(&tests, figures);
    Ok(())
}

fn print(tests: &[Test], mut figures: Vec<Vec<f64>>) {
    let mut raw = 0.0;
    for (test, figures) in tests.iter().zip(&mut figures) {
        figures.sort_by(f64::total_cmp);
        let (least, median, most) = (figures[0], figures[TURNS / 2], figures[TURNS - 1]);
        let name = match test {
            Test::RawPing => format!("raw, {PING} B, half a round trip [us]"),
            Test::StreamPing => format!("stream, {PING} B, half a round trip [us]"),
            Test::Raw(size) => format!("raw, {size} B [MB/s]"),
            Test::Copied(size) => format!("stream, written and read, {size} B [MB/s]"),
            Test::Lent(size) => format!("stream, lent buffers, {size} B [MB/s]"),
        };
        if matches!(test, Test::RawPing | Test::Raw(_)) {
            raw = median;
        }
        println!(
            "{name:46} {median:10.2}  ({least:.2} to {most:.2})  {:.2} of raw",
            median / raw
        );
    }
}

struct Reaped(Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        // Without effect for one that has exited.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The receiving side, which measures. One exchange connects each test, so that both begin together.
fn serve(runtime: &Runtime, context: &Context, listener: &mut Listener, test: Test) -> Result<f64> {
    let pd = context.protection_domain()?;
    let mut exchange = listener.accept(TIMEOUT)?;
    match test {
        Test::RawPing => raw(context, &pd, &mut exchange, PING)?.pings(false),
        Test::Raw(size) => raw(context, &pd, &mut exchange, size as usize)?.receive_all(),
        Test::StreamPing | Test::Copied(_) | Test::Lent(_) => runtime.block_on(async {
            let mut listener = RdmaListener::bind("127.0.0.1:0", pd, config(test)).await?;
            send_address(context, &mut exchange, listener.local_addr())?;
            let stream = listener.accept().await?;
            match test {
                Test::StreamPing => stream_pings(stream, false).await,
                Test::Copied(size) => read_all(stream, size).await,
                _ => read_all_lent(stream).await,
            }
        }),
    }
}

fn client(runtime: &Runtime, device: &str, address: SocketAddr) -> Result {
    let context = doorbell::open(device)?;
    for _ in 0..TURNS {
        for test in tests() {
            let pd = context.protection_domain()?;
            let mut exchange = Exchange::connect(address, TIMEOUT)?;
            match test {
                Test::RawPing => drop(raw(&context, &pd, &mut exchange, PING)?.pings(true)?),
                Test::Raw(size) => raw(&context, &pd, &mut exchange, size as usize)?.send_all()?,
                Test::StreamPing | Test::Copied(_) | Test::Lent(_) => {
                    let to = receive_address(&context, &mut exchange)?;
                    runtime.block_on(async {
                        let stream = RdmaStream::connect(to, pd, config(test)).await?;
                        match test {
                            Test::StreamPing => stream_pings(stream, true).await.map(drop),
                            Test::Copied(size) => write_all(stream, size).await,
                            _ => write_all_lent(stream).await,
                        }
                    })?;
                }
            }
        }
    }
    Ok(())
}

fn config(test: Test) -> StreamConfig {
    match test {
        Test::Copied(size) | Test::Lent(size) => StreamConfig::default().chunk(size).chunks(DEPTH),
        _ => StreamConfig::default(),
    }
}

/// The exchange carries data beside endpoints: here a stream's address.
fn send_address(context: &Context, exchange: &mut Exchange, address: SocketAddr) -> Result {
    exchange_data(context, exchange, address.to_string().as_bytes()).map(drop)
}

fn receive_address(context: &Context, exchange: &mut Exchange) -> Result<SocketAddr> {
    Ok(String::from_utf8(exchange_data(context, exchange, b"")?)?.parse()?)
}

fn exchange_data(context: &Context, exchange: &mut Exchange, data: &[u8]) -> Result<Vec<u8>> {
    let pd = context.protection_domain()?;
    let cq = context.completion_queue(8)?;
    let qp = pd.queue_pair(&cq).max_send_wr(2).max_recv_wr(2).rc()?;
    Ok(exchange.pair(qp, data)?.1)
}

struct Raw {
    cq: CompletionQueue,
    qp: QueuePair,
    sending: Vec<Buffer>,
}

fn raw(context: &Context, pd: &ProtectionDomain, exchange: &mut Exchange, size: usize) -> Result<Raw> {
    let depth = usize::from(DEPTH);
    let cq = context.completion_queue(4 * u32::from(DEPTH))?;
    let mut qp = pd
        .queue_pair(&cq)
        .max_send_wr(DEPTH.into())
        .max_recv_wr(DEPTH.into())
        .max_inline_data(PING as u32)
        .rc()?;
    let mut buffers: Vec<_> = pd.register(vec![0; 2 * depth * size], Local)?.chunks(size).collect();
    let sending = buffers.split_off(depth);
    for buffer in buffers {
        qp.receive(buffer)?;
    }
    let (qp, _) = exchange.pair(qp, b"")?;
    Ok(Raw { cq, qp, sending })
}

impl Raw {
    fn pings(mut self, first: bool) -> Result<f64> {
        let bytes = [7; PING];
        if first {
            self.qp.send_inline(&bytes)?;
        }
        let began = Instant::now();
        let mut received = 0;
        while received < PINGS {
            for mut done in self.cq.poll()? {
                done.check()?;
                if done.queue() == QueueKind::Receive {
                    received += 1;
                    if let Some(buffer) = done.take::<Local>() {
                        self.qp.receive(buffer)?;
                    }
                    if received < PINGS || !first {
                        self.qp.send_inline(&bytes)?;
                    }
                }
            }
        }
        let us = began.elapsed().as_secs_f64() * 1e6 / f64::from(2 * PINGS);
        // The peer has the last one before the queue pair ends.
        std::thread::sleep(Duration::from_millis(20));
        Ok(us)
    }

    fn receive_all(mut self) -> Result<f64> {
        let mut received = 0;
        let mut began = None;
        while received < TOTAL {
            for mut done in self.cq.poll()? {
                done.check()?;
                began.get_or_insert_with(Instant::now);
                if let Some(buffer) = done.take::<Local>() {
                    received += buffer.len() as u64;
                    self.qp.receive(buffer)?;
                }
            }
        }
        let rate = megabytes_per_second(began);
        std::thread::sleep(Duration::from_millis(20));
        Ok(rate)
    }

    fn send_all(mut self) -> Result {
        let (mut sent, mut acknowledged) = (0, 0);
        let size = self.sending[0].len() as u64;
        while acknowledged < TOTAL {
            while sent < TOTAL
                && let Some(buffer) = self.sending.pop()
            {
                let signal = self.sending.len().is_multiple_of(8);
                self.qp.post(|batch| {
                    batch.send(buffer).signaled_if(signal);
                })?;
                sent += size;
            }
            for mut done in self.cq.poll()? {
                done.check()?;
                acknowledged += size;
                self.sending.extend(done.take::<Local>());
            }
        }
        Ok(())
    }
}

fn megabytes_per_second(began: Option<Instant>) -> f64 {
    let took = began.map_or(0.0, |began| began.elapsed().as_secs_f64());
    TOTAL as f64 / took / 1e6
}

async fn stream_pings(mut stream: RdmaStream, first: bool) -> Result<f64> {
    let mut bytes = [7; PING];
    let began = Instant::now();
    for _ in 0..PINGS {
        if first {
            stream.write_all(&bytes).await?;
        }
        stream.read_exact(&mut bytes).await?;
        if !first {
            stream.write_all(&bytes).await?;
        }
    }
    let us = began.elapsed().as_secs_f64() * 1e6 / f64::from(2 * PINGS);
    stream.shutdown().await?;
    Ok(us)
}

async fn read_all(mut stream: RdmaStream, size: u32) -> Result<f64> {
    let mut bytes = vec![0; size as usize];
    let mut began = None;
    let mut received = 0;
    while received < TOTAL {
        received += stream.read(&mut bytes).await? as u64;
        began.get_or_insert_with(Instant::now);
    }
    Ok(megabytes_per_second(began))
}

async fn read_all_lent(mut stream: RdmaStream) -> Result<f64> {
    let mut began = None;
    let mut received = 0;
    while received < TOTAL {
        received += stream.read_bytes().await?.map_or(0, |bytes| bytes.len()) as u64;
        began.get_or_insert_with(Instant::now);
    }
    Ok(megabytes_per_second(began))
}

async fn write_all(mut stream: RdmaStream, size: u32) -> Result {
    let bytes = vec![7; size as usize];
    for _ in 0..TOTAL / u64::from(size) {
        stream.write_all(&bytes).await?;
    }
    Ok(stream.shutdown().await?)
}

async fn write_all_lent(mut stream: RdmaStream) -> Result {
    let mut sent = 0;
    while sent < TOTAL {
        let chunk = stream.reserve(usize::MAX).await?;
        sent += chunk.len() as u64;
        stream.send(chunk).await?;
    }
    Ok(stream.shutdown().await?)
}
