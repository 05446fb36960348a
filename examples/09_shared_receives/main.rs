//! One queue of receives for all clients: as many buffers as messages come at once, and not as many as that for each client.
//!
//! ```text
//! cargo run --release -p doorbell-examples --bin 09_shared_receives
//! ```
//!
//! The server posts its receives to a shared receive queue, from which the queue pairs of all clients take them. Which client a message is from says its
//! completion, by the tag that the client's queue pair was given.

#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use doorbell_examples::{Error, report, soft_pair};
use doorbell_verbs::{
    Buffer, CompletionQueue, Context, Endpoint, Local, PreparedQueuePair, Queue, QueuePair, Rc, SharedReceive,
    SharedReceiveQueue, Success,
};

/// Longer than the other end takes, on a busy machine too.
const PATIENCE: Duration = Duration::from_secs(30);
const CLIENTS: u64 = 8;
const QUESTIONS: u64 = 50;
/// Receives, of all clients together. When they are used up, clients are asked to send again.
const RECEIVES: u32 = 4;
/// Bytes of a message: a number.
const MESSAGE: usize = 8;
/// How many answers to one client may be under way.
const ANSWERS: u32 = 16;

fn main() -> ExitCode {
    report(run())
}

struct Server {
    cq: CompletionQueue,
    srq: SharedReceiveQueue,
    /// By the number of the client.
    clients: Vec<QueuePair<SharedReceive<Rc>>>,
}

fn run() -> Result<(), Error> {
    let (asking, answering) = soft_pair()?;
    let (mut server, clients) = connect(&asking, &answering)?;
    let answers: Result<u64, Error> = thread::scope(|scope| {
        let clients: Vec<_> = clients
            .into_iter()
            .map(|(client, server)| scope.spawn(move || client.ask(&server)))
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

/// The server with a queue pair for each client, and the clients, with what they connect to.
fn connect(asking: &Context, answering: &Context) -> Result<(Server, Vec<(Client, Endpoint)>), Error> {
    let pd = answering.protection_domain()?;
    let channel = answering.completion_channel()?;
    // The shared receives take their entries once, the answers for each client.
    let cq = answering.completion_queue_on(&channel, RECEIVES + CLIENTS as u32 * ANSWERS)?;
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
        let client = Client::prepare(asking)?;
        let builder = pd.queue_pair(&server.cq).send_depth(ANSWERS).max_inline(MESSAGE as u32);
        let qp = builder.tag(number).shared_receive(&server.srq).rc()?;
        // What an exchange over TCP would carry: see 04_exchange.
        let here = qp.endpoint();
        server.clients.push(qp.connect(&client.qp.endpoint())?);
        clients.push((client, here));
    }
    Ok((server, clients))
}

/// Answers every question with its square.
fn serve(server: &mut Server) -> Result<(), Error> {
    let Server { cq, srq, clients } = server;
    let mut answered = 0;
    while answered < CLIENTS * QUESTIONS {
        let mut any = false;
        for mut done in cq.wait(PATIENCE)? {
            any = true;
            done.check()?;
            if done.queue() == Queue::Send {
                continue;
            }
            let client = &mut clients[done.tag() as usize];
            let question: Buffer = done.take().ok_or("a receive gives its buffer back")?;
            let number = question[..].try_into().map(u64::from_be_bytes)?;
            // For whoever asks next.
            srq.receive(question)?;
            client.send_inline(&(number * number).to_be_bytes())?;
            answered += 1;
        }
        if !any {
            return Err("the clients ask nothing more".into());
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
        let builder = pd.queue_pair(&cq).send_depth(16).recv_depth(1);
        let mut qp = builder.max_inline(MESSAGE as u32).rc()?;
        qp.receive(pd.register(vec![0; MESSAGE], Local)?)?;
        Ok(Self { qp, cq })
    }

    /// Asks its questions one by one. How many were answered.
    fn ask(self, server: &Endpoint) -> Result<u64, Error> {
        let Self { qp, mut cq } = self;
        let mut qp = qp.connect(server)?;
        for number in 1..=QUESTIONS {
            qp.send_inline(&number.to_be_bytes())?;
            let mut answer = None;
            while answer.is_none() {
                let mut any = false;
                for mut done in cq.wait(PATIENCE)? {
                    any = true;
                    if let Success::Receive { .. } = done.result()? {
                        let buffer: Buffer = done.take().ok_or("a receive gives its buffer back")?;
                        answer = Some(buffer[..].try_into().map(u64::from_be_bytes)?);
                        qp.receive(buffer)?;
                    }
                }
                if !any {
                    return Err("the server does not answer".into());
                }
            }
            if answer != Some(number * number) {
                return Err(format!("{answer:?} is not the square of {number}").into());
            }
        }
        Ok(QUESTIONS)
    }
}
