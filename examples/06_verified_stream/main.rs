//! A stream of RDMA WRITEs with flow control, whose reader verifies the checksum of the whole.
//!
//! ```text
//! cargo run --release -p doorbell-examples --bin 06_verified_stream              both ends here
//! 06_verified_stream --device 'soft?drop=0.01'                                   the same, with packet loss
//! 06_verified_stream --device mlx5_0 receive 0.0.0.0:18517 > copy                one end each
//! 06_verified_stream --device mlx5_0 send server:18517 < file
//! ```
//!
//! Each WRITE fills a slot of the reader's window and carries its number as immediate data, which
//! wakes the reader; the reader returns a credit for each slot that it has emptied. The last
//! message is a SEND of the length and the checksum.

#![forbid(unsafe_code)]

use std::io::{self, Read, Write};
use std::time::{Duration, Instant};
use std::{env, process, thread};

use anyhow::{Result, bail, ensure};
use doorbell::prelude::*;

const USAGE: &str = "\
usage: 06_verified_stream [--device DEVICE] [receive ADDRESS:PORT > FILE | send ADDRESS:PORT < FILE]
  --device DEVICE   soft0, soft?drop=0.01, or hardware such as mlx5_0; else DOORBELL_DEVICE, or soft0
Without a command 32 MiB go from one end to another here, each with the device opened anew.";
const TIMEOUT: Duration = Duration::from_secs(30);
const CHUNK: usize = 64 << 10;
/// Slots of the reader's window: how many chunks may be in flight or unread.
const SLOTS: u32 = 16;

fn main() {
    let args: Vec<String> = env::args().skip(1).collect();
    if let Err(error) = run(&args.iter().map(String::as_str).collect::<Vec<_>>()) {
        eprintln!("06_verified_stream: {error}");
        process::exit(1);
    }
}

fn run(args: &[&str]) -> Result<()> {
    let (device, command) = match args {
        ["--device", device, command @ ..] => (Some(*device), command),
        command => (None, command),
    };
    let open = || device.map_or_else(doorbell::open_from_env, doorbell::open);
    match *command {
        ["--help"] => println!("{USAGE}"),
        ["receive", at] => receive(&open()?, Listener::bind(at)?.accept(TIMEOUT)?, io::stdout())?,
        ["send", to] => send(&open()?, Exchange::connect(to, TIMEOUT)?, io::stdin())?,
        [] => {
            let (from, to, listener) = (open()?, open()?, Listener::bind("127.0.0.1:0")?);
            let address = listener.local_addr();
            let data: Vec<u8> = (0..32 << 20).map(|at: u32| (at ^ at >> 8 ^ at >> 16) as u8).collect();
            let mut copy = Vec::new();
            thread::scope(|scope| {
                let receiver = scope.spawn(|| receive(&to, listener.accept(TIMEOUT)?, &mut copy));
                let sent = send(&from, Exchange::connect(address, TIMEOUT)?, &data[..]);
                receiver.join().expect("the receiver panicked").and(sent)
            })?;
            ensure!(copy == data, "the copy differs");
        }
        _ => bail!("{}: no such command; see --help", args.join(" ")),
    }
    Ok(())
}

/// FNV-1a, of 64 bits.
fn checksum(sum: u64, bytes: &[u8]) -> u64 {
    let add = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(sum, add)
}

fn send(device: &Context, exchange: Exchange, mut input: impl Read) -> Result<()> {
    let pd = device.protection_domain()?;
    // For credits, which have no payload.
    let receives = pd.register_chunks(vec![0; SLOTS as usize], 1, Local)?;
    let mut peer = exchange.connection(&pd, |qp| qp.max_inline_data(16), receives, b"")?;
    let window: Remote<WriteAccess> = Remote::from_bytes(peer.peer_data())?;
    let slots: Vec<_> = window.chunks(CHUNK as u64).collect();
    let mut free: Vec<_> = pd
        .register_chunks(vec![0; CHUNK * SLOTS as usize], CHUNK, Local)?
        .collect();
    let (mut next, mut credits, mut end) = (0, SLOTS, false);
    let (mut total, mut sum, start) = (0, 0, Instant::now());
    // Until every slot is empty again: the reader has all.
    while !end || credits < SLOTS {
        while !end
            && credits > 0
            && let Some(mut chunk) = free.pop()
        {
            let len = input.read(&mut chunk)?;
            end = len == 0;
            if !end {
                (total, sum) = (total + len as u64, checksum(sum, &chunk[..len]));
                let slot = slots[(next % SLOTS) as usize];
                peer.post(|batch| drop(batch.write(chunk.part(..len), slot).imm(next)))?;
                (next, credits) = (next.wrapping_add(1), credits - 1);
            }
        }
        match peer.wait(TIMEOUT)? {
            (Success::Receive { imm: Some(emptied), .. }, credit) => {
                credits += emptied;
                peer.receive(credit)?;
            }
            (_, chunk) => free.push(chunk),
        }
    }
    peer.send_inline(&[total.to_be_bytes(), sum.to_be_bytes()].concat())?;
    peer.finish()?;
    let rate = total as f64 / start.elapsed().as_secs_f64() / 1e6;
    eprintln!("{total} bytes, checksum {sum:016x}, verified by the reader: {rate:.0} MB/s");
    Ok(())
}

fn receive(device: &Context, exchange: Exchange, mut output: impl Write) -> Result<()> {
    let pd = device.protection_domain()?;
    let window = pd.register(vec![0; CHUNK * SLOTS as usize], PeerWrite)?;
    // Consumed by WRITEs, and at last by the message of length and checksum.
    let receives = pd.register_chunks(vec![0; 16 * (SLOTS as usize + 1)], 16, Local)?;
    let mut peer = exchange.connection(&pd, |qp| qp.allow_remote_write(), receives, &window.remote().to_bytes())?;
    let mut chunk = vec![0; CHUNK];
    let (mut next, mut total, mut sum) = (0, 0, 0);
    loop {
        let (success, message) = peer.wait(TIMEOUT)?;
        let Success::ReceiveWrite { len, imm } = success else {
            ensure!(
                message[..] == [u64::to_be_bytes(total), u64::to_be_bytes(sum)].concat(),
                "the checksum is wrong"
            );
            break;
        };
        ensure!(imm == next, "chunk {imm} in place of {next}");
        let chunk = &mut chunk[..len as usize];
        window.read_at((next % SLOTS) as usize * CHUNK, chunk);
        (next, total, sum) = (next.wrapping_add(1), total + u64::from(len), checksum(sum, chunk));
        output.write_all(chunk)?;
        peer.receive(message)?;
        peer.post(|batch| drop(batch.send_inline(&[]).imm(1)))?;
    }
    Ok(peer.finish()?)
}
