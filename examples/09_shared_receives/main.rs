//! One shared receive queue for all clients: buffers for what arrives at once, not per client.
//!
//! ```text
//! cargo run --release -p doorbell-examples --bin 09_shared_receives
//! ```
//!
//! The queue pairs of all clients consume receives of one queue; completions carry their tag.

#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use doorbell::{
    Buffer, CompletionQueue, Context, Endpoint, Local, PreparedQueuePair, QueueKind, QueuePair, ReliableConnection,
    SharedReceiveQueue, Success, WithSrq,
};
use doorbell_examples::{Error, report, soft_pair};

const TIMEOUT: Duration = Duration::from_secs(30);
const CLIENTS: u64 = 8;
const REQUESTS: u64 = 50;
/// Receives of all clients together. When they are used up, clients get RNR NAKs and send again.
const RECEIVES: u32 = 4;
/// Bytes of a message: a number.
const MESSAGE: usize = 8;
/// How many replies to one client may be in flight.
const REPLIES: u32 = 16;

fn main() -> ExitCode {
    report(run())
}

struct Server {
    cq: CompletionQueue,
    srq: SharedReceiveQueue,
    /// By client number.
    clients: Vec<QueuePair<WithSrq<ReliableConnection>>>,
}

fn run() -> Result<(), Error> {
    let (client_device, server_device) = soft_pair()?;
    let (mut server, clients) = connect(&client_device, &server_device)?;
    let answers: Result<u64, Error> = thread::scope(|scope| {
        let clients: Vec<_> = clients
            .into_iter()
            .map(|(client, server)| scope.spawn(move || client.run(&server)))
            .collect();
        let served = serve(&mut server);
        let answers = clients
            .into_iter()
            .map(|client| client.join().map_err(|_| "a client panicked")?)
            .sum();
        served.and(answers)
    });
    println!("{} answers to {CLIENTS} clients, by {RECEIVES} receives", answers?);
    Ok(())
}

/// The server with a queue pair for each client, and the clients, each with its server endpoint.
fn connect(client_device: &Context, server_device: &Context) -> Result<(Server, Vec<(Client, Endpoint)>), Error> {
    let pd = server_device.protection_domain()?;
    let channel = server_device.completion_channel()?;
    // The shared receives take their entries once, the replies for each client.
    let cq = server_device.completion_queue_on(&channel, RECEIVES + CLIENTS as u32 * REPLIES)?;
    let mut srq = pd.shared_receive_queue(RECEIVES).create()?;
    let buffers = pd.register_chunks(vec![0; MESSAGE * RECEIVES as usize], MESSAGE, Local)?;
    srq.post_receives(|batch| buffers.for_each(|buffer| batch.receive(buffer)))?;
    let mut server = Server {
        cq,
        srq,
        clients: Vec::new(),
    };
    let mut clients = Vec::new();
    for number in 0..CLIENTS {
        let client = Client::prepare(client_device)?;
        let builder = pd
            .queue_pair(&server.cq)
            .max_send_wr(REPLIES)
            .max_inline_data(MESSAGE as u32);
        let qp = builder.tag(number).shared_receive_queue(&server.srq).rc()?;
        // In place of an exchange over TCP: see 04_exchange.
        let here = qp.endpoint();
        server.clients.push(qp.connect(&client.qp.endpoint())?);
        clients.push((client, here));
    }
    Ok((server, clients))
}

fn serve(server: &mut Server) -> Result<(), Error> {
    let Server { cq, srq, clients } = server;
    let mut answered = 0;
    while answered < CLIENTS * REQUESTS {
        let mut any = false;
        for mut done in cq.wait(TIMEOUT)? {
            any = true;
            done.check()?;
            if done.queue() == QueueKind::Send {
                continue;
            }
            let client = &mut clients[done.tag() as usize];
            let request: Buffer = done.take().ok_or("a receive gives its buffer back")?;
            let number = request[..].try_into().map(u64::from_be_bytes)?;
            srq.receive(request)?;
            client.send_inline(&(number * number).to_be_bytes())?;
            answered += 1;
        }
        if !any {
            return Err("the clients stopped sending".into());
        }
    }
    Ok(())
}

struct Client {
    qp: PreparedQueuePair,
    cq: CompletionQueue,
}

impl Client {
    fn prepare(context: &Context) -> Result<Self, Error> {
        let pd = context.protection_domain()?;
        let channel = context.completion_channel()?;
        let cq = context.completion_queue_on(&channel, 32)?;
        let builder = pd.queue_pair(&cq).max_send_wr(16).max_recv_wr(1);
        let mut qp = builder.max_inline_data(MESSAGE as u32).rc()?;
        qp.receive(pd.register(vec![0; MESSAGE], Local)?)?;
        Ok(Self { qp, cq })
    }

    /// Sends its requests one by one. Returns how many were answered.
    fn run(self, server: &Endpoint) -> Result<u64, Error> {
        let Self { qp, mut cq } = self;
        let mut qp = qp.connect(server)?;
        for number in 1..=REQUESTS {
            qp.send_inline(&number.to_be_bytes())?;
            let mut reply = None;
            while reply.is_none() {
                let mut any = false;
                for mut done in cq.wait(TIMEOUT)? {
                    any = true;
                    if let Success::Receive { .. } = done.result()? {
                        let buffer: Buffer = done.take().ok_or("a receive gives its buffer back")?;
                        reply = Some(buffer[..].try_into().map(u64::from_be_bytes)?);
                        qp.receive(buffer)?;
                    }
                }
                if !any {
                    return Err("the server does not reply".into());
                }
            }
            if reply != Some(number * number) {
                return Err(format!("{reply:?} is not the square of {number}").into());
            }
        }
        Ok(REQUESTS)
    }
}
