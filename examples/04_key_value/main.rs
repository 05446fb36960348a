//! A key-value server: a GET is RDMA READs, without the server's CPU; a PUT is a SEND. Without
//! arguments a server and three clients run here; `--help` lists the commands of separate ones.

#![forbid(unsafe_code)]

use std::sync::atomic::{Ordering, fence};
use std::{env, process, sync::Mutex, thread, time::Duration};

use anyhow::{Result, bail, ensure};
use doorbell::prelude::*;

const USAGE: &str = "\
usage: 04_key_value [--device DEVICE] [serve ADDRESS:PORT | put SERVER:PORT KEY VALUE | get SERVER:PORT KEY]
  --device DEVICE   soft0, soft?drop=0.02, or hardware such as mlx5_0; else DOORBELL_DEVICE, or soft0
Without a command a server and three clients run here. A key has 1 to 32 bytes, a value up to 216.";
const TIMEOUT: Duration = Duration::from_secs(30);
const SLOTS: usize = 1024;
/// A slot is a version, odd while the rest changes, and a key and a value, padded.
const SLOT: usize = 8 + KEY + VALUE;
const KEY: usize = 32;
const VALUE: usize = 216;

fn main() {
    let args: Vec<String> = env::args().skip(1).collect();
    if let Err(error) = run(&args.iter().map(String::as_str).collect::<Vec<_>>()) {
        eprintln!("04_key_value: {error}");
        process::exit(1);
    }
}

fn run(args: &[&str]) -> Result<()> {
    let (device, command) = match args {
        ["--device", device, command @ ..] => (doorbell::open(device), command),
        command => (doorbell::open_from_env(), command),
    };
    match *command {
        ["--help"] => println!("{USAGE}"),
        ["serve", at] => serve(&device?, &Listener::bind(at)?)?,
        ["put", server, key, value] => Client::connect(&device?, server)?.put(key, value)?,
        ["get", server, key] => println!("{}", Client::connect(&device?, server)?.get(key)?),
        [] => demo(&device?)?,
        _ => bail!("{}: no such command; see --help", args.join(" ")),
    }
    Ok(())
}

/// A server and two clients: what one has put, the other gets.
fn demo(device: &Context) -> Result<()> {
    let (listener, server) = (Listener::bind("127.0.0.1:0")?, device.clone());
    let address = listener.local_addr().to_string();
    thread::spawn(move || serve(&server, &listener).expect("the server failed"));
    let (mut one, mut other) = (Client::connect(device, &address)?, Client::connect(device, &address)?);
    for value in (0..500).map(|number| "value".repeat(number % 40)) {
        one.put("key", &value)?;
        ensure!(other.get("key")? == value, "not what was put");
    }
    println!("500 values put by one client and got by another");
    Ok(())
}

/// Serves each client by a thread with a queue pair of its own.
fn serve(device: &Context, listener: &Listener) -> Result<()> {
    let pd = device.protection_domain()?;
    let table = pd.register(vec![0; SLOTS * SLOT], PeerRead)?;
    let key = table.remote().to_bytes();
    let slots: Vec<_> = table.chunks(SLOT).map(Mutex::new).collect();
    let serve = |exchange: Exchange| -> Result<()> {
        let inbox = pd.register(vec![0; KEY + VALUE], Local)?;
        let mut client = exchange.connection(&pd, |qp| qp.allow_remote_read().max_inline_data(1), [inbox], &key)?;
        while let Some((_, entry)) = client.next_completion()? {
            let stored = store(&slots, &entry);
            // Before the answer, after which the client may send again.
            client.receive(entry)?;
            client.send_inline(&[stored.into()])?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        for exchange in listener.incoming(TIMEOUT) {
            let (exchange, serve) = (exchange?, &serve);
            scope.spawn(move || serve(exchange).unwrap_or_else(|error| eprintln!("a client: {error}")));
        }
        Ok(())
    })
}

/// Writes as a seqlock does. Returns false for no key, or one whose slot another key has.
fn store(slots: &[Mutex<Buffer<PeerRead>>], entry: &[u8]) -> bool {
    let mut slot = slots[place(&entry[..KEY])].lock().expect("no thread panics");
    if entry[0] == 0 || slot[8] != 0 && slot[8..][..KEY] != entry[..KEY] {
        return false;
    }
    let version = slot[..8].try_into().map_or(0, u64::from_be_bytes);
    slot.store_u64(0, (version + 1).to_be(), Ordering::Relaxed);
    fence(Ordering::Release);
    slot.write_at(8, entry);
    slot.store_u64(0, (version + 2).to_be(), Ordering::Release);
    true
}

fn place(key: &[u8]) -> usize {
    key.iter()
        .fold(0, |hash, &byte| (31 * hash + usize::from(byte)) % SLOTS)
}

struct Client {
    peer: Connection,
    slots: Vec<Remote<ReadAccess>>,
    parts: Vec<Buffer>,
}

impl Client {
    fn connect(device: &Context, server: &str) -> Result<Self> {
        let pd = device.protection_domain()?;
        let [answer, before, entry, after] = [1, 8, KEY + VALUE, 8].map(|len| pd.register(vec![0; len], Local));
        let exchange = Exchange::connect(server, TIMEOUT)?;
        let peer = exchange.connection(&pd, |qp| qp.max_inline_data(SLOT as u32), [answer?], b"")?;
        let slots = Remote::from_bytes(peer.peer_data())?.chunks(SLOT as u64).collect();
        let parts = vec![before?, entry?, after?];
        Ok(Self { peer, slots, parts })
    }

    fn put(&mut self, key: &str, value: &str) -> Result<()> {
        let entry = format!("{key:\0<KEY$}{value:\0<VALUE$}");
        ensure!(entry.len() == KEY + VALUE, "{key}: too long, or it is not ASCII");
        self.peer.send_inline(entry.as_bytes())?;
        let (_, answer) = self.peer.wait(TIMEOUT)?;
        let stored = answer[0] == 1;
        self.peer.receive(answer)?;
        ensure!(stored, "{key:?} is refused: it is empty, or its slot is taken");
        Ok(())
    }

    /// READs the version, the entry and the version again, until nothing was stored between.
    fn get(&mut self, key: &str) -> Result<String> {
        let wanted = format!("{key:\0<KEY$}").into_bytes();
        let (version, entry) = self.slots[place(&wanted)].split_at(8);
        loop {
            for (part, remote) in self.parts.drain(..).zip([version, entry, version]) {
                self.peer.read(part, remote)?;
            }
            self.parts = (0..3).map(|_| Ok(self.peer.wait(TIMEOUT)?.1)).collect::<Result<_>>()?;
            if self.parts[0][..] == self.parts[2][..] && self.parts[0][7].is_multiple_of(2) {
                let entry = &self.parts[1][..];
                ensure!(entry[..KEY] == *wanted, "{key}: no such key");
                return Ok(String::from_utf8_lossy(&entry[KEY..]).trim_end_matches('\0').to_owned());
            }
        }
    }
}
