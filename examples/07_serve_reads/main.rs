//! A table that others READ whenever they like, while its owner sleeps: no request reaches its processor.
//!
//! ```text
//! cargo run --release -p doorbell-examples --bin 07_serve_reads
//! ```
//!
//! The server registers the table for reading and gives out its endpoint and the key. Each client keeps several READs under way, and cuts from the key the record it
//! wants; the server's device answers.

#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use doorbell_examples::{Error, report, soft_pair};
use doorbell_verbs::{
    Buffer, CompletionQueue, Context, Endpoint, Local, PreparedQueuePair, ProtectionDomain, Read, Remote, RemoteRead,
};

/// Longer than the server's device takes, on a busy machine too.
const PATIENCE: Duration = Duration::from_secs(30);
const CLIENTS: u64 = 3;
/// Bytes of a record.
const RECORD: usize = 4096;
const RECORDS: usize = 256;
/// How many records each client reads.
const READS: u64 = 500;
/// How many READs a client has under way.
const WINDOW: u8 = 8;

fn main() -> ExitCode {
    report(run())
}

/// The table, and what its queue pairs are made on.
struct Server {
    pd: ProtectionDomain,
    cq: CompletionQueue,
    table: Buffer<RemoteRead>,
}

impl Server {
    fn open(context: &Context) -> Result<Self, Error> {
        let pd = context.protection_domain()?;
        let cq = context.completion_queue(2 * CLIENTS as u32)?;
        let records = (0..RECORDS).flat_map(|number| [number as u8; RECORD]);
        let table = pd.register(records.collect::<Vec<u8>>(), RemoteRead)?;
        Ok(Self { pd, cq, table })
    }

    /// A queue pair for one client, who may READ as many records at once as its window has.
    fn prepare(&self) -> Result<PreparedQueuePair, Error> {
        let builder = self.pd.queue_pair(&self.cq).send_depth(1).recv_depth(1);
        Ok(builder.allow_remote_read().rd_atomic(WINDOW).rc()?)
    }
}

fn run() -> Result<(), Error> {
    let (asking, answering) = soft_pair()?;
    let server = Server::open(&answering)?;
    let key = server.table.remote();
    let (mut clients, mut served) = (Vec::new(), Vec::new());
    for number in 0..CLIENTS {
        // What an exchange over TCP would carry: see 04_exchange.
        let (client, theirs) = (Client::prepare(&asking)?, server.prepare()?);
        let (to_client, to_server) = (client.qp.endpoint(), theirs.endpoint());
        served.push(theirs.connect(&to_client)?);
        clients.push((number, client, to_server));
    }
    let read: Result<Vec<u64>, Error> = thread::scope(|scope| {
        let clients: Vec<_> = clients
            .into_iter()
            .map(|(number, client, server)| scope.spawn(move || client.read(number, &server, key)))
            .collect();
        // Meanwhile the server does nothing at all.
        clients
            .into_iter()
            .map(|client| client.join().map_err(|_| "a client panicked")?)
            .collect()
    });
    for (number, count) in read?.into_iter().enumerate() {
        println!("client {number}: {count} records read, each whole");
    }
    println!(
        "{} queue pairs served them without a request to the server",
        served.len()
    );
    Ok(())
}

struct Client {
    qp: PreparedQueuePair,
    cq: CompletionQueue,
    buffers: Vec<Buffer>,
}

impl Client {
    fn prepare(context: &Context) -> Result<Self, Error> {
        let pd = context.protection_domain()?;
        let channel = context.completion_channel()?;
        let cq = context.completion_queue_on(&channel, 32)?;
        let builder = pd.queue_pair(&cq).send_depth(WINDOW.into()).recv_depth(1);
        let qp = builder.rd_atomic(WINDOW).rc()?;
        let buffers = pd.register_chunks(vec![0; RECORD * usize::from(WINDOW)], RECORD, Local)?;
        Ok(Self {
            qp,
            cq,
            buffers: buffers.collect(),
        })
    }

    /// Reads records here and there, several at once. How many.
    fn read(self, number: u64, server: &Endpoint, table: Remote<Read>) -> Result<u64, Error> {
        let Self {
            qp,
            mut cq,
            mut buffers,
        } = self;
        let mut qp = qp.connect(server)?;
        let records: Vec<_> = table.chunks(RECORD as u64).collect();
        // Which record a request asked for, by its sequence: they are counted from 0.
        let wanted = |sequence: u64| ((sequence * 37 + number * 101) % RECORDS as u64) as usize;
        let mut done = 0;
        while done < READS {
            let mut next = qp.next_send();
            qp.post(|batch| {
                while next < READS
                    && let Some(buffer) = buffers.pop()
                {
                    batch.read(buffer, records[wanted(next)]).signalled();
                    next += 1;
                }
            })?;
            let before = done;
            for mut read in cq.wait(PATIENCE)? {
                read.result()?;
                let record: Buffer = read.take().ok_or("a READ gives its buffer back")?;
                if record.iter().any(|&byte| byte != wanted(read.sequence()) as u8) {
                    return Err(format!("client {number}: not record {}", wanted(read.sequence())).into());
                }
                buffers.push(record);
                done += 1;
            }
            if done == before {
                return Err("the server does not answer".into());
            }
        }
        Ok(done)
    }
}
