//! Datagrams: one server, several clients, and no connections.
//!
//! ```text
//! cargo run --release -p doorbell-examples --bin 05_datagrams
//! ```
//!
//! A UD queue pair is in use as soon as it is made. Clients know the server's [`UdEndpoint`]; the server learns where a client is from the completion of its
//! question, and the header that lies in front of it in the buffer. Datagrams may be lost, and nobody is told: a client that hears nothing asks again.

#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use doorbell_examples::{Error, report, soft_pair};
use doorbell_verbs::{
    Buffer, CompletionQueue, Context, GRH_BYTES, Local, ProtectionDomain, Queue, QueuePair, Ud, UdEndpoint,
};

const CLIENTS: u32 = 3;
const QUESTIONS: u64 = 20;
/// The longest message here, in bytes.
const MESSAGE: usize = 8;
/// How long a client waits for an answer before it asks again.
const PATIENCE: Duration = Duration::from_millis(500);
/// How often it asks before it gives up.
const ATTEMPTS: u32 = 60;

fn main() -> ExitCode {
    report(run())
}

/// A queue pair for datagrams, with its receives posted.
struct Socket {
    pd: ProtectionDomain,
    qp: QueuePair<Ud>,
    cq: CompletionQueue,
}

impl Socket {
    fn open(context: &Context) -> Result<Self, Error> {
        let pd = context.protection_domain()?;
        let channel = context.completion_channel()?;
        let cq = context.completion_queue_on(&channel, 32)?;
        let mut qp = pd
            .queue_pair(&cq)
            .send_depth(16)
            .recv_depth(16)
            .max_inline(MESSAGE as u32)
            .ud()?;
        // Every receive has room for the header in front of the message.
        for _ in 0..16 {
            qp.receive(pd.register(vec![0; GRH_BYTES + MESSAGE], Local)?)?;
        }
        Ok(Self { pd, qp, cq })
    }
}

fn run() -> Result<(), Error> {
    let (asking, answering) = soft_pair()?;
    let mut server = Socket::open(&answering)?;
    let there = server.qp.endpoint();
    let unserved = AtomicU32::new(CLIENTS);
    let heard = thread::scope(|scope| {
        let serving = scope.spawn(|| serve(&mut server, &unserved));
        let clients: Vec<_> = (0..CLIENTS)
            .map(|_| {
                scope.spawn(|| {
                    let asked = Socket::open(&asking).and_then(|mut client| ask(&mut client, &there));
                    unserved.fetch_sub(1, Ordering::Relaxed);
                    asked
                })
            })
            .collect();
        let heard: Result<Vec<_>, Error> = clients
            .into_iter()
            .map(|client| client.join().map_err(|_| "a client panicked")?)
            .collect();
        serving.join().map_err(|_| "the server panicked")??;
        heard
    })?;
    for (number, answers) in heard.into_iter().enumerate() {
        println!("client {number}: {answers} answers from queue pair {}", there.qpn);
    }
    println!("the server knew none of them before they asked");
    Ok(())
}

/// Answers every question with its square, to wherever it came from, until all clients are served.
fn serve(server: &mut Socket, unserved: &AtomicU32) -> Result<(), Error> {
    let Socket { pd, qp, cq } = server;
    while unserved.load(Ordering::Relaxed) > 0 {
        for mut done in cq.wait(PATIENCE)? {
            done.result()?;
            let Some(datagram) = done.datagram() else { continue };
            let question: Buffer = done.take().ok_or("a receive gives its buffer back")?;
            let number = question[datagram.payload()].try_into().map(u64::from_be_bytes)?;
            // The way back. It may be dropped as soon as the answer is posted.
            let ah = pd.address_handle().reply_to(&datagram, &question)?;
            let answer = (number * number).to_be_bytes();
            qp.send_to_inline(&answer, &ah, datagram.source(), qp.endpoint().qkey)?;
            qp.receive(question)?;
        }
    }
    Ok(())
}

/// Asks its questions, one by one. How many were answered.
fn ask(client: &mut Socket, server: &UdEndpoint) -> Result<u64, Error> {
    let ah = client.pd.address_handle().to(server)?;
    for number in 1..=QUESTIONS {
        let mut attempts = 0;
        loop {
            if attempts == ATTEMPTS {
                return Err(format!("no answer to {number}").into());
            }
            attempts += 1;
            client
                .qp
                .send_to_inline(&number.to_be_bytes(), &ah, server.qpn, server.qkey)?;
            if heard(client, number * number)? {
                break;
            }
        }
    }
    Ok(QUESTIONS)
}

/// Whether this answer comes in time. Others are of questions asked more than once.
fn heard(client: &mut Socket, expected: u64) -> Result<bool, Error> {
    let deadline = Instant::now() + PATIENCE;
    let mut found = false;
    while !found && Instant::now() < deadline {
        for mut done in client.cq.wait(PATIENCE)? {
            done.result()?;
            if done.queue() == Queue::Send {
                continue;
            }
            let datagram = done.datagram().ok_or("what a UD queue pair receives is a datagram")?;
            let answer: Buffer = done.take().ok_or("a receive gives its buffer back")?;
            found |= answer[datagram.payload()] == expected.to_be_bytes();
            client.qp.receive(answer)?;
        }
    }
    Ok(found)
}
