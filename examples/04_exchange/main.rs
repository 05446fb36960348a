//! Two programs that share only a TCP address connect, and one writes to the other's memory.
//!
//! ```text
//! cargo run --release -p doorbell-examples --bin 04_exchange                  both ends here, on soft devices
//! 04_exchange mlx5_0 listen 0.0.0.0:18516                                     one end each, on the system's devices
//! 04_exchange mlx5_0 connect server:18516
//! ```
//!
//! A soft device (`soft0`) listens on loopback unless `DOORBELL_SOFT_ADDR` names another address.

#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use doorbell_verbs::exchange::{Exchange, Listener};
use doorbell_verbs::{Context, Local, PeerWrite, QueueKind, Remote, WriteAccess};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const TIMEOUT: Duration = Duration::from_secs(30);
const MESSAGE: &str = "Written into your memory by RDMA WRITE.";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let result = match *args {
        [] => both_ends(),
        [device, "listen", at] => listen(device, at),
        [device, "connect", to] => connect(device, to),
        _ => {
            eprintln!("usage: 04_exchange [DEVICE listen|connect ADDRESS:PORT]");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn listen(device: &str, at: &str) -> Result<()> {
    run_reader(&doorbell::open(device)?, &Listener::bind(at)?)
}

fn connect(device: &str, to: &str) -> Result<()> {
    run_writer(&doorbell::open(device)?, to)
}

fn both_ends() -> Result<()> {
    let listener = Listener::bind("127.0.0.1:0")?;
    let address = listener.local_addr().to_string();
    thread::scope(|scope| {
        let reader = scope.spawn(|| run_reader(&doorbell::open("soft")?, &listener));
        let written = run_writer(&doorbell::open("soft")?, &address);
        reader.join().map_err(|_| "the reader panicked")??;
        written
    })
}

/// Gives the connecting peer a key to its memory, and reads that after the peer's message.
fn run_reader(device: &Context, listener: &Listener) -> Result<()> {
    let pd = device.protection_domain()?;
    let mut cq = device.completion_queue(8)?;
    let mut qp = pd
        .queue_pair(&cq)
        .max_send_wr(4)
        .max_recv_wr(4)
        .allow_remote_write()
        .rc()?;
    let inbox = pd.register(vec![0; MESSAGE.len()], PeerWrite)?;
    qp.receive(pd.register(vec![0; 8], Local)?)?;

    let mut exchange = listener.accept(TIMEOUT)?;
    let (_qp, _) = exchange.pair(qp, &inbox.remote().to_bytes())?;

    // The message comes after the WRITE on the same queue pair, so the written data is there.
    wait(&mut cq, QueueKind::Receive)?;
    let mut message = vec![0; MESSAGE.len()];
    inbox.read_at(0, &mut message);
    let message = String::from_utf8(message)?;
    if message != MESSAGE {
        return Err(format!("another message: {message:?}").into());
    }
    println!("{message}");
    Ok(exchange.finish()?)
}

/// Writes to the memory that the peer gave a key to, and then sends a message.
fn run_writer(device: &Context, to: &str) -> Result<()> {
    let pd = device.protection_domain()?;
    let mut cq = device.completion_queue(8)?;
    let qp = pd
        .queue_pair(&cq)
        .max_send_wr(4)
        .max_recv_wr(4)
        .max_inline_data(4)
        .rc()?;
    let message = pd.register(MESSAGE.as_bytes().to_vec(), Local)?;

    let mut exchange = Exchange::connect(to, TIMEOUT)?;
    let (mut qp, peer_data) = exchange.pair(qp, b"")?;
    let inbox: Remote<WriteAccess> = Remote::from_bytes(peer_data.as_slice().try_into()?)?;

    qp.post(|batch| {
        batch.write(message, inbox);
        batch.send_inline(b"sent").signaled();
    })?;
    wait(&mut cq, QueueKind::Send)?;
    // Not earlier: a destroyed queue pair acknowledges nothing.
    Ok(exchange.finish()?)
}

fn wait(cq: &mut doorbell_verbs::CompletionQueue, queue: QueueKind) -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    while Instant::now() < deadline {
        for done in cq.poll()? {
            done.result()?;
            if done.queue() == queue {
                return Ok(());
            }
        }
    }
    Err(format!("nothing completed in {TIMEOUT:?}").into())
}
