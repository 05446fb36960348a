//! A table that peers READ at any time while its owner sleeps: its CPU is not involved.
//!
//! ```text
//! cargo run --release -p doorbell-examples --bin 07_serve_reads
//! ```
//!
//! The server registers the table for reading and gives out its endpoint and the key. Each client
//! keeps several READs in flight, each of one record; the server's device responds.

#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use doorbell_examples::{Error, report, soft_pair};
use doorbell_verbs::{
    Buffer, CompletionQueue, Context, Endpoint, Local, PeerRead, PreparedQueuePair, ProtectionDomain, ReadAccess,
    Remote,
};

const TIMEOUT: Duration = Duration::from_secs(30);
const CLIENTS: u64 = 3;
/// Bytes of a record.
const RECORD: usize = 4096;
const RECORDS: usize = 256;
const READS: u64 = 500;
/// How many READs a client keeps in flight.
const WINDOW: u8 = 8;

fn main() -> ExitCode {
    report(run())
}

struct Server {
    pd: ProtectionDomain,
    cq: CompletionQueue,
    table: Buffer<PeerRead>,
}

impl Server {
    fn open(context: &Context) -> Result<Self, Error> {
        let pd = context.protection_domain()?;
        let cq = context.completion_queue(2 * CLIENTS as u32)?;
        let records = (0..RECORDS).flat_map(|number| [number as u8; RECORD]);
        let table = pd.register(records.collect::<Vec<u8>>(), PeerRead)?;
        Ok(Self { pd, cq, table })
    }

    fn prepare(&self) -> Result<PreparedQueuePair, Error> {
        let builder = self.pd.queue_pair(&self.cq).max_send_wr(1).max_recv_wr(1);
        Ok(builder.allow_remote_read().max_rd_atomic(WINDOW).rc()?)
    }
}

fn run() -> Result<(), Error> {
    let (client_device, server_device) = soft_pair()?;
    let server = Server::open(&server_device)?;
    let key = server.table.remote();
    let (mut clients, mut served) = (Vec::new(), Vec::new());
    for number in 0..CLIENTS {
        // In place of an exchange over TCP: see 04_exchange.
        let (client, theirs) = (Client::prepare(&client_device)?, server.prepare()?);
        let (to_client, to_server) = (client.qp.endpoint(), theirs.endpoint());
        served.push(theirs.connect(&to_client)?);
        clients.push((number, client, to_server));
    }
    let read: Result<Vec<u64>, Error> = thread::scope(|scope| {
        let clients: Vec<_> = clients
            .into_iter()
            .map(|(number, client, server)| scope.spawn(move || client.read(number, &server, key)))
            .collect();
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
        let builder = pd.queue_pair(&cq).max_send_wr(WINDOW.into()).max_recv_wr(1);
        let qp = builder.max_rd_atomic(WINDOW).rc()?;
        let buffers = pd.register_chunks(vec![0; RECORD * usize::from(WINDOW)], RECORD, Local)?;
        Ok(Self {
            qp,
            cq,
            buffers: buffers.collect(),
        })
    }

    /// Reads scattered records, several at once. Returns how many.
    fn read(self, number: u64, server: &Endpoint, table: Remote<ReadAccess>) -> Result<u64, Error> {
        let Self {
            qp,
            mut cq,
            mut buffers,
        } = self;
        let mut qp = qp.connect(server)?;
        let records: Vec<_> = table.chunks(RECORD as u64).collect();
        // The record of a request, by its sequence number, counted from 0.
        let wanted = |sequence: u64| ((sequence * 37 + number * 101) % RECORDS as u64) as usize;
        let mut done = 0;
        while done < READS {
            let mut next = qp.next_send();
            qp.post(|batch| {
                while next < READS
                    && let Some(buffer) = buffers.pop()
                {
                    batch.read(buffer, records[wanted(next)]).signaled();
                    next += 1;
                }
            })?;
            let before = done;
            for mut read in cq.wait(TIMEOUT)? {
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
