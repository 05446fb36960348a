//! The two ends: the client sends a message, the server sends it back.

use std::io::{self, Write};
use std::time::Instant;

use doorbell::{Buffer, CompletionQueue, Context, Local, PreparedQueuePair, QueueKind, QueuePair, Success};

use crate::Result;
use crate::options::Options;
use crate::rendezvous::{Rendezvous, exchange_endpoints};

/// The message content of `ibv_rc_pingpong`, whose `-c` checks that every page begins with a zero.
const FILL: u8 = 0x7b;
const PAGE: usize = 4096;

/// An end before it is connected, with two buffers, so that one can receive while the other sends.
struct LocalEnd {
    completed: Completed,
    qp: PreparedQueuePair,
    spare: Buffer<Local>,
}

/// Buffers may return early: the reply may arrive before the own send is acknowledged.
struct Completed {
    cq: CompletionQueue,
    size: usize,
    sent: Option<Buffer<Local>>,
    received: Option<Buffer<Local>>,
}

/// With one receive posted: the first message may arrive as soon as the peer has the endpoint.
fn prepare(context: &Context, options: &Options) -> Result<LocalEnd> {
    let pd = context.protection_domain()?;
    let cq = context.completion_queue(4)?;
    let mut builder = pd.queue_pair(&cq).max_send_wr(2).max_recv_wr(2).mtu(options.mtu);
    if let Some(index) = options.gid_index {
        builder = builder.gid_index(index);
    }
    let mut qp = builder.rc()?;
    let message: Vec<u8> = (0..options.size)
        .map(|i| if i.is_multiple_of(PAGE) { 0 } else { FILL })
        .collect();
    qp.receive(pd.register(vec![0; options.size], Local)?)?;
    let spare = pd.register(message, Local)?;
    let completed = Completed {
        cq,
        size: options.size,
        sent: None,
        received: None,
    };
    Ok(LocalEnd { completed, qp, spare })
}

pub(crate) fn run_server(context: &Context, options: &Options, rendezvous: Rendezvous) -> Result<()> {
    let LocalEnd {
        mut completed,
        qp,
        mut spare,
    } = prepare(context, options)?;
    let ours = qp.endpoint();
    let mut qp = rendezvous.accept(&ours, |theirs| Ok(qp.connect(theirs)?))?;
    let start = Instant::now();
    for round in 0..options.times {
        let message = completed.wait(QueueKind::Receive)?;
        check(&message, round)?;
        // The next message may come as soon as this one is back.
        qp.receive(spare)?;
        send(&mut qp, message)?;
        spare = completed.wait(QueueKind::Send)?;
    }
    report("server", options, start)
}

pub(crate) fn run_client(context: &Context, options: &Options, server: &str) -> Result<()> {
    let LocalEnd {
        mut completed,
        qp,
        spare: mut message,
    } = prepare(context, options)?;
    let theirs = exchange_endpoints(server, options.port, &qp.endpoint())?;
    let mut qp = qp.connect(&theirs)?;
    let start = Instant::now();
    for round in 0..options.times {
        send(&mut qp, message)?;
        message = completed.wait(QueueKind::Send)?;
        let answer = completed.wait(QueueKind::Receive)?;
        if *answer != *message {
            return Err(format!("message {round} came back changed").into());
        }
        qp.receive(answer)?;
    }
    report("client", options, start)
}

fn send(qp: &mut QueuePair, message: Buffer<Local>) -> Result<()> {
    qp.post(|batch| {
        batch.send(message).signaled();
    })?;
    Ok(())
}

impl Completed {
    /// Waits for the request of `queue` that is in flight, and returns its buffer.
    fn wait(&mut self, queue: QueueKind) -> Result<Buffer<Local>> {
        loop {
            let back = if queue == QueueKind::Send {
                &mut self.sent
            } else {
                &mut self.received
            };
            if let Some(buffer) = back.take() {
                return Ok(buffer);
            }
            self.poll()?;
        }
    }

    fn poll(&mut self) -> Result<()> {
        for mut done in self.cq.poll()? {
            match done.result()? {
                Success::Receive { len, .. } if len as usize != self.size => {
                    return Err(format!(
                        "a message of {len} bytes instead of {}: give both ends the same -s",
                        self.size
                    )
                    .into());
                }
                Success::Receive { .. } => self.received = done.take(),
                _ => self.sent = done.take(),
            }
        }
        Ok(())
    }
}

/// Checks every byte; the first one of a page depends on the client's `-c`.
fn check(message: &[u8], round: u32) -> Result<()> {
    let right = |i: usize, byte: u8| byte == FILL || byte == 0 && i.is_multiple_of(PAGE);
    match message.iter().enumerate().find(|&(i, &byte)| !right(i, byte)) {
        None => Ok(()),
        Some((i, byte)) => Err(format!("byte {i} of message {round} is {byte:#04x}").into()),
    }
}

fn report(end: &str, options: &Options, start: Instant) -> Result<()> {
    let seconds = start.elapsed().as_secs_f64();
    let bytes = 2.0 * options.size as f64 * f64::from(options.times);
    let (rate, each) = (8.0 * bytes / seconds / 1e6, 1e6 * seconds / f64::from(options.times));
    writeln!(
        io::stdout(),
        "{end}: {bytes} bytes in {seconds:.3} s = {rate:.1} Mbit/s, {each:.2} µs per round trip"
    )?;
    Ok(())
}
