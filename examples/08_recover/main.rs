//! Recovery from a failed connection: every message arrives, once and in order.
//!
//! ```text
//! cargo run --release -p doorbell-examples --bin 08_recover
//! ```
//!
//! When a request fails, its queue pair is in ERR, and all its requests complete as flushed and
//! return their buffers; the client replaces the queue pair. An acknowledged message may not have
//! been processed, so the server reports how many it has, and the client sends the rest again.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use doorbell::{
    Buffer, CompletionError, CompletionQueue, Context, Endpoint, Local, PreparedQueuePair, ProtectionDomain, QueuePair,
};
use doorbell_examples::{Error, report, soft_pair};

const TIMEOUT: Duration = Duration::from_secs(30);
const MESSAGES: u32 = 24;
/// How many messages the server has received when it drops its queue pair.
const FAIL_AFTER: u32 = 10;
/// Bytes of a message: its number.
const BYTES: usize = 4;
const WINDOW: u32 = 8;

fn main() -> ExitCode {
    report(run())
}

/// The control channel, in place of an exchange over TCP (see 04_exchange).
struct Control<Ours, Theirs> {
    to_peer: Sender<Ours>,
    from_peer: Receiver<Theirs>,
}

/// The server's reply: its endpoint, and how many messages it has.
type ServerState = (Endpoint, u32);

fn run() -> Result<(), Error> {
    let (sending, receiving) = soft_pair()?;
    let ((to_server, from_client), (to_client, from_server)) = (channel(), channel());
    let client = Control {
        to_peer: to_server,
        from_peer: from_server,
    };
    let server = Control {
        to_peer: to_client,
        from_peer: from_client,
    };
    thread::scope(|scope| {
        let server_thread = scope.spawn(|| serve(&receiving, server));
        let delivered = deliver(&sending, client);
        // A server failure is the cause of the client's.
        server_thread.join().map_err(|_| "the server panicked")??;
        delivered
    })?;
    println!("{MESSAGES} messages delivered, each once");
    Ok(())
}

fn completion_queue(context: &Context) -> Result<CompletionQueue, Error> {
    let channel = context.completion_channel()?;
    Ok(context.completion_queue_on(&channel, 4 * WINDOW)?)
}

fn prepare(pd: &ProtectionDomain, cq: &CompletionQueue) -> Result<PreparedQueuePair, Error> {
    let builder = pd.queue_pair(cq).max_send_wr(WINDOW).max_recv_wr(WINDOW);
    // 4.096 µs · 2^17 = 537 ms, and three retransmissions: it fails after two seconds.
    Ok(builder.timeout(17).retry_count(3).rc()?)
}

/// The client: sends all messages, over as many connections as needed.
fn deliver(context: &Context, control: Control<Endpoint, ServerState>) -> Result<(), Error> {
    let pd = context.protection_domain()?;
    let mut cq = completion_queue(context)?;
    let numbers = (0..MESSAGES).flat_map(u32::to_be_bytes).collect::<Vec<u8>>();
    let mut messages: VecDeque<Buffer> = pd.register_chunks(numbers, BYTES, Local)?.collect();
    loop {
        let qp = prepare(&pd, &cq)?;
        control.to_peer.send(qp.endpoint())?;
        let (server, has) = control.from_peer.recv_timeout(TIMEOUT)?;
        messages.retain(|message| number(message) >= has);
        println!("connected: the server has {has} messages");
        let mut qp = qp.connect(&server)?;
        let Some(failure) = send(&mut qp, &mut cq, &mut messages)? else {
            return Ok(());
        };
        println!("the server is gone: {}", failure.status);
        // The queue pair is dropped here. Memory, domain and completion queue stay usable.
    }
}

/// When one fails, all that were sent are put back in order, acknowledged ones too.
fn send(
    qp: &mut QueuePair,
    cq: &mut CompletionQueue,
    messages: &mut VecDeque<Buffer>,
) -> Result<Option<CompletionError>, Error> {
    let (mut in_flight, mut failure, mut sent) = (0, None, Vec::new());
    let deadline = Instant::now() + TIMEOUT;
    loop {
        while failure.is_none()
            && in_flight < WINDOW
            && let Some(message) = messages.pop_front()
        {
            qp.post(|batch| {
                batch.send(message).signaled();
            })?;
            in_flight += 1;
        }
        if in_flight == 0 {
            break;
        }
        for mut done in cq.wait(TIMEOUT)? {
            in_flight -= 1;
            // The first failure has the reason; those after it are flushed.
            failure = failure.or(done.check().err());
            sent.push(done.take().ok_or("a SEND gives its buffer back")?);
        }
        if Instant::now() > deadline {
            return Err("nothing completes".into());
        }
    }
    if failure.is_some() {
        sent.into_iter().rev().for_each(|message| messages.push_front(message));
    }
    Ok(failure)
}

/// The server: receives all messages in order, and once drops its queue pair without notice.
fn serve(context: &Context, control: Control<ServerState, Endpoint>) -> Result<(), Error> {
    let pd = context.protection_domain()?;
    let mut cq = completion_queue(context)?;
    let mut has = 0;
    for until in [FAIL_AFTER, MESSAGES] {
        let client = control.from_peer.recv_timeout(TIMEOUT)?;
        let mut qp = prepare(&pd, &cq)?;
        let inbox = pd.register_chunks(vec![0; BYTES * WINDOW as usize], BYTES, Local)?;
        qp.post_receives(|batch| inbox.for_each(|buffer| batch.receive(buffer)))?;
        let here = qp.endpoint();
        let mut qp = qp.connect(&client)?;
        // The client connects when it has the reply: by then this side is ready.
        control.to_peer.send((here, has))?;
        receive(&mut qp, &mut cq, &mut has, until)?;
        if has == MESSAGES {
            // A destroyed queue pair acknowledges nothing: this one stays until the client is done.
            return match control.from_peer.recv_timeout(TIMEOUT) {
                Err(RecvTimeoutError::Disconnected) => Ok(()),
                other => Err(format!("the client did not finish: {other:?}").into()),
            };
        }
        // The queue pair is dropped here, with messages received but not processed.
    }
    Err("there were to be more messages".into())
}

fn receive(qp: &mut QueuePair, cq: &mut CompletionQueue, has: &mut u32, until: u32) -> Result<(), Error> {
    let deadline = Instant::now() + TIMEOUT;
    while *has < until {
        for mut done in cq.wait(TIMEOUT)? {
            if done.qpn() != qp.qpn() || *has == until {
                // Of the dropped queue pair, or left unprocessed: the client sends it again.
                continue;
            }
            done.check()?;
            let message: Buffer = done.take().ok_or("a receive gives its buffer back")?;
            if number(&message) != *has {
                return Err(format!("message {} in place of {has}", number(&message)).into());
            }
            *has += 1;
            qp.receive(message)?;
        }
        // A wait also returns empty when completions of a dropped queue pair have arrived.
        if Instant::now() > deadline {
            return Err("the client stopped sending".into());
        }
    }
    Ok(())
}

fn number(message: &Buffer) -> u32 {
    u32::from_be_bytes([message[0], message[1], message[2], message[3]])
}
