//! Many connections served by tasks of one thread, over one completion channel.
//!
//! ```text
//! cargo run --release -p doorbell-examples --bin 03_tokio
//! ```
//!
//! Every client sends a number and awaits its double. A [`TokioChannel`] needs the feature `tokio`.

#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use doorbell::{
    Buffer, CompletionQueue, Context, Local, Notify, PreparedQueuePair, ProtectionDomain, QueueKind, QueuePair,
    TokioChannel,
};
use doorbell_examples::{Error, soft_pair};

const CLIENTS: u64 = 8;
const ROUNDS: u64 = 50;
const WORD: usize = size_of::<u64>();
const TIMEOUT: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let result = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(Error::from)
        .and_then(|runtime| runtime.block_on(run()));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<(), Error> {
    let (ours, theirs) = soft_pair()?;
    let (clients, servers) = (Side::new(&ours)?, Side::new(&theirs)?);
    let mut tasks = Vec::new();
    for number in 0..CLIENTS {
        let (client, server) = (clients.prepare()?, servers.prepare()?);
        let (to_client, to_server) = (client.qp.endpoint(), server.qp.endpoint());
        tasks.push(tokio::spawn(run_server(server.connect(&to_client)?)));
        tasks.push(tokio::spawn(run_client(client.connect(&to_server)?, number)));
    }
    let all = async {
        // Kept until all are done: a dropped connection acknowledges no retransmission.
        let mut done = Vec::new();
        for task in tasks {
            done.push(task.await??);
        }
        Ok::<_, Error>(done)
    };
    tokio::time::timeout(TIMEOUT, all).await??;
    println!("{CLIENTS} clients, {ROUNDS} answers each");
    Ok(())
}

struct Side {
    pd: ProtectionDomain,
    channel: Arc<TokioChannel>,
}

struct Prepared {
    qp: PreparedQueuePair,
    cq: CompletionQueue,
    channel: Arc<TokioChannel>,
    message: Buffer,
}

/// With the buffers that are not in flight: at most one receives while another sends.
struct Connection {
    qp: QueuePair,
    cq: CompletionQueue,
    channel: Arc<TokioChannel>,
    received: Option<Buffer>,
    sent: Option<Buffer>,
}

impl Side {
    fn new(context: &Context) -> Result<Self, Error> {
        Ok(Self {
            pd: context.protection_domain()?,
            channel: Arc::new(TokioChannel::new(context.completion_channel()?)?),
        })
    }

    fn prepare(&self) -> Result<Prepared, Error> {
        let cq = self.pd.context().completion_queue_on(self.channel.channel(), 8)?;
        let mut qp = self
            .pd
            .queue_pair(&cq)
            .max_send_wr(4)
            .max_recv_wr(4)
            .signal_all()
            .rc()?;
        qp.receive(self.pd.register(vec![0; WORD], Local)?)?;
        Ok(Prepared {
            qp,
            cq,
            channel: Arc::clone(&self.channel),
            message: self.pd.register(vec![0; WORD], Local)?,
        })
    }
}

impl Prepared {
    fn connect(self, peer: &doorbell::Endpoint) -> Result<Connection, Error> {
        Ok(Connection {
            qp: self.qp.connect(peer)?,
            cq: self.cq,
            channel: self.channel,
            received: None,
            sent: Some(self.message),
        })
    }
}

impl Connection {
    async fn send(&mut self, number: u64) -> Result<(), Error> {
        let mut message = loop {
            match self.sent.take() {
                Some(message) => break message,
                None => self.completions().await?,
            }
        };
        message.copy_from_slice(&number.to_be_bytes());
        Ok(self.qp.send(message)?)
    }

    async fn receive(&mut self) -> Result<u64, Error> {
        let message = loop {
            match self.received.take() {
                Some(message) => break message,
                None => self.completions().await?,
            }
        };
        let number = u64::from_be_bytes(message[..].try_into()?);
        self.qp.receive(message)?;
        Ok(number)
    }

    async fn completions(&mut self) -> Result<(), Error> {
        for mut done in self.channel.completions(&mut self.cq, Notify::Any).await? {
            done.result()?;
            match done.queue() {
                QueueKind::Receive => self.received = done.take(),
                QueueKind::Send => self.sent = done.take(),
            }
        }
        Ok(())
    }

    /// Awaits the acknowledgement of the last send: dropping the connection would flush it.
    async fn finish(&mut self) -> Result<(), Error> {
        while self.sent.is_none() {
            self.completions().await?;
        }
        Ok(())
    }
}

async fn run_server(mut connection: Connection) -> Result<Connection, Error> {
    for _ in 0..ROUNDS {
        let number = connection.receive().await?;
        connection.send(2 * number).await?;
    }
    connection.finish().await?;
    Ok(connection)
}

async fn run_client(mut connection: Connection, client: u64) -> Result<Connection, Error> {
    for round in 0..ROUNDS {
        let number = client << 32 | round;
        connection.send(number).await?;
        let answer = connection.receive().await?;
        if answer != 2 * number {
            return Err(format!("client {client}: expected the double of {number}, got {answer}").into());
        }
    }
    connection.finish().await?;
    Ok(connection)
}
