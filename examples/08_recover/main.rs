//! A connection that fails, and what was under way on it: every message arrives, once and in order, though the server goes away in between.
//!
//! ```text
//! cargo run --release -p doorbell-examples --bin 08_recover
//! ```
//!
//! When a request fails, its queue pair is in the error state, and all that is posted to it completes as flushed: with its buffers. The client collects them,
//! drops the queue pair, and makes another. That its device acknowledged a message does not mean that the server has looked at it, so the server says how many
//! it has; what comes after is sent again, from the same buffers.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use doorbell_examples::{Error, report, soft_pair};
use doorbell_verbs::{
    Buffer, CompletionQueue, Context, Endpoint, Failure, Local, PreparedQueuePair, ProtectionDomain, QueuePair,
};

/// Longer than the other end takes, on a busy machine too.
const PATIENCE: Duration = Duration::from_secs(30);
const MESSAGES: u32 = 24;
/// How many messages the server has when it goes away.
const GONE_AT: u32 = 10;
/// Bytes of a message: its number.
const BYTES: usize = 4;
/// How many messages are under way at once.
const WINDOW: u32 = 8;

fn main() -> ExitCode {
    report(run())
}

/// How the two ends meet: in place of an exchange over TCP (see 04_exchange).
struct Meeting<Ours, Theirs> {
    to_peer: Sender<Ours>,
    from_peer: Receiver<Theirs>,
}

/// What the server answers: where it is, and how many messages it has.
type Answer = (Endpoint, u32);

fn run() -> Result<(), Error> {
    let (sending, receiving) = soft_pair()?;
    let ((to_server, from_client), (to_client, from_server)) = (channel(), channel());
    let client = Meeting {
        to_peer: to_server,
        from_peer: from_server,
    };
    let server = Meeting {
        to_peer: to_client,
        from_peer: from_client,
    };
    thread::scope(|scope| {
        let serving = scope.spawn(|| serve(&receiving, server));
        let delivered = deliver(&sending, client);
        // If the server failed, that is why the client did.
        serving.join().map_err(|_| "the server panicked")??;
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
    let builder = pd.queue_pair(cq).send_depth(WINDOW).recv_depth(WINDOW);
    // Waits 4.096 µs · 2^17 = 537 ms for an acknowledgement, and asks three times more: the peer is given up after two seconds.
    Ok(builder.timeout(17).retry_count(3).rc()?)
}

/// The client: sends all messages, over as many connections as it takes.
fn deliver(context: &Context, meeting: Meeting<Endpoint, Answer>) -> Result<(), Error> {
    let pd = context.protection_domain()?;
    let mut cq = completion_queue(context)?;
    let numbers = (0..MESSAGES).flat_map(u32::to_be_bytes).collect::<Vec<u8>>();
    let mut messages: VecDeque<Buffer> = pd.register_chunks(numbers, BYTES, Local)?.collect();
    loop {
        let qp = prepare(&pd, &cq)?;
        meeting.to_peer.send(qp.endpoint())?;
        let (server, has) = meeting.from_peer.recv_timeout(PATIENCE)?;
        messages.retain(|message| number(message) >= has);
        println!("connected: the server has {has} messages");
        let mut qp = qp.connect(&server)?;
        let Some(failure) = send(&mut qp, &mut cq, &mut messages)? else {
            return Ok(());
        };
        println!("the server is gone: {}", failure.status);
        // The queue pair goes here. Memory, domain and completion queue are as good as before.
    }
}

/// Sends all messages in turn. When one fails, all that were sent are put back in their order, those acknowledged too.
fn send(
    qp: &mut QueuePair,
    cq: &mut CompletionQueue,
    messages: &mut VecDeque<Buffer>,
) -> Result<Option<Failure>, Error> {
    let (mut in_flight, mut failure, mut sent) = (0, None, Vec::new());
    let deadline = Instant::now() + PATIENCE;
    loop {
        while failure.is_none()
            && in_flight < WINDOW
            && let Some(message) = messages.pop_front()
        {
            qp.post(|batch| {
                batch.send(message).signalled();
            })?;
            in_flight += 1;
        }
        if in_flight == 0 {
            break;
        }
        for mut done in cq.wait(PATIENCE)? {
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

/// The server: receives all messages in turn, and once goes away without a word.
fn serve(context: &Context, meeting: Meeting<Answer, Endpoint>) -> Result<(), Error> {
    let pd = context.protection_domain()?;
    let mut cq = completion_queue(context)?;
    let mut has = 0;
    for until in [GONE_AT, MESSAGES] {
        let client = meeting.from_peer.recv_timeout(PATIENCE)?;
        let mut qp = prepare(&pd, &cq)?;
        let inbox = pd.register_chunks(vec![0; BYTES * WINDOW as usize], BYTES, Local)?;
        qp.post_receives(|batch| inbox.for_each(|buffer| batch.receive(buffer)))?;
        let here = qp.endpoint();
        let mut qp = qp.connect(&client)?;
        // The client connects when it has the answer: by then this side is ready.
        meeting.to_peer.send((here, has))?;
        receive(&mut qp, &mut cq, &mut has, until)?;
        if has == MESSAGES {
            // A queue pair that is gone acknowledges nothing: this one stays until the client has ended the meeting.
            return match meeting.from_peer.recv_timeout(PATIENCE) {
                Err(RecvTimeoutError::Disconnected) => Ok(()),
                other => Err(format!("the client is not content: {other:?}").into()),
            };
        }
        // The queue pair goes here, with what it has received and nobody has looked at.
    }
    Err("there were to be more messages".into())
}

/// Receives messages until there are `until` of them.
fn receive(qp: &mut QueuePair, cq: &mut CompletionQueue, has: &mut u32, until: u32) -> Result<(), Error> {
    let deadline = Instant::now() + PATIENCE;
    while *has < until {
        for mut done in cq.wait(PATIENCE)? {
            if done.qpn() != qp.qpn() || *has == until {
                // Of the queue pair that is gone, or to be left unread: the client will send it again.
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
        // By the clock: a wait also ends with nothing when completions of a queue pair that is gone have come.
        if Instant::now() > deadline {
            return Err("the client says nothing more".into());
        }
    }
    Ok(())
}

fn number(message: &Buffer) -> u32 {
    u32::from_be_bytes([message[0], message[1], message[2], message[3]])
}
