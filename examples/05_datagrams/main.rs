//! Datagrams: one server, several clients, and no connections.
//!
//! ```text
//! cargo run --release -p doorbell-examples --bin 05_datagrams
//! ```
//!
//! A UD queue pair is ready as soon as it is created. Clients know the server's [`UdEndpoint`]; the
//! server learns a client's address from the completion of its request, and from the GRH in front
//! of it in the buffer. Datagrams may be lost: a client without a reply sends again.

#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use doorbell::{
    Buffer, CompletionQueue, Context, GRH_BYTES, Local, ProtectionDomain, QueueKind, QueuePair, UdEndpoint,
    UnreliableDatagram,
};
use doorbell_examples::{Error, report, soft_pair};

const CLIENTS: u32 = 3;
const REQUESTS: u64 = 20;
const MESSAGE: usize = 8;
const TIMEOUT: Duration = Duration::from_millis(500);
const ATTEMPTS: u32 = 60;

fn main() -> ExitCode {
    report(run())
}

struct Socket {
    pd: ProtectionDomain,
    qp: QueuePair<UnreliableDatagram>,
    cq: CompletionQueue,
}

impl Socket {
    fn open(context: &Context) -> Result<Self, Error> {
        let pd = context.protection_domain()?;
        let channel = context.completion_channel()?;
        let cq = context.completion_queue_on(&channel, 32)?;
        let mut qp = pd
            .queue_pair(&cq)
            .max_send_wr(16)
            .max_recv_wr(16)
            .max_inline_data(MESSAGE as u32)
            .ud()?;
        // Every receive has space for the GRH in front of the message.
        for _ in 0..16 {
            qp.receive(pd.register(vec![0; GRH_BYTES + MESSAGE], Local)?)?;
        }
        Ok(Self { pd, qp, cq })
    }
}

fn run() -> Result<(), Error> {
    let (client_device, server_device) = soft_pair()?;
    let mut server = Socket::open(&server_device)?;
    let server_endpoint = server.qp.endpoint();
    let active_clients = AtomicU32::new(CLIENTS);
    let replies = thread::scope(|scope| {
        let server_thread = scope.spawn(|| serve(&mut server, &active_clients));
        let clients: Vec<_> = (0..CLIENTS)
            .map(|_| {
                scope.spawn(|| {
                    let result =
                        Socket::open(&client_device).and_then(|mut client| run_client(&mut client, &server_endpoint));
                    active_clients.fetch_sub(1, Ordering::Relaxed);
                    result
                })
            })
            .collect();
        let replies: Result<Vec<_>, Error> = clients
            .into_iter()
            .map(|client| client.join().map_err(|_| "a client panicked")?)
            .collect();
        server_thread.join().map_err(|_| "the server panicked")??;
        replies
    })?;
    for (number, answers) in replies.into_iter().enumerate() {
        println!(
            "client {number}: {answers} answers from queue pair {}",
            server_endpoint.qpn
        );
    }
    println!("the server knew no client before its first request");
    Ok(())
}

/// Replies to every request with its square, until all clients are done.
fn serve(server: &mut Socket, active_clients: &AtomicU32) -> Result<(), Error> {
    let Socket { pd, qp, cq } = server;
    while active_clients.load(Ordering::Relaxed) > 0 {
        for mut done in cq.wait(TIMEOUT)? {
            done.result()?;
            let Some(datagram) = done.datagram() else { continue };
            let request: Buffer = done.take().ok_or("a receive gives its buffer back")?;
            let number = request[datagram.payload()].try_into().map(u64::from_be_bytes)?;
            // The address of the sender. It may be dropped as soon as the reply is posted.
            let ah = pd.address_handle().reply_to(&datagram, &request)?;
            let reply = (number * number).to_be_bytes();
            qp.send_to_inline(&reply, &ah, datagram.source(), qp.endpoint().qkey)?;
            qp.receive(request)?;
        }
    }
    Ok(())
}

/// Sends its requests one by one. Returns how many were answered.
fn run_client(client: &mut Socket, server: &UdEndpoint) -> Result<u64, Error> {
    let ah = client.pd.address_handle().to(server)?;
    for number in 1..=REQUESTS {
        let mut attempts = 0;
        loop {
            if attempts == ATTEMPTS {
                return Err(format!("no reply to {number}").into());
            }
            attempts += 1;
            client
                .qp
                .send_to_inline(&number.to_be_bytes(), &ah, server.qpn, server.qkey)?;
            if reply_arrived(client, number * number)? {
                break;
            }
        }
    }
    Ok(REQUESTS)
}

/// Whether the expected reply arrives in time. Other replies are of requests sent more than once.
fn reply_arrived(client: &mut Socket, expected: u64) -> Result<bool, Error> {
    let deadline = Instant::now() + TIMEOUT;
    let mut found = false;
    while !found && Instant::now() < deadline {
        for mut done in client.cq.wait(TIMEOUT)? {
            done.result()?;
            if done.queue() == QueueKind::Send {
                continue;
            }
            let datagram = done.datagram().ok_or("what a UD queue pair receives is a datagram")?;
            let reply: Buffer = done.take().ok_or("a receive gives its buffer back")?;
            found |= reply[datagram.payload()] == expected.to_be_bytes();
            client.qp.receive(reply)?;
        }
    }
    Ok(found)
}
