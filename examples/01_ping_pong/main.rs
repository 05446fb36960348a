//! A ping-pong with its latency, on the userspace device or on hardware.
//!
//! ```text
//! cargo run --release -p doorbell-examples --bin 01_ping_pong        both ends here
//! 01_ping_pong --device 'soft?drop=0.02'                             the same, with packet loss
//! 01_ping_pong --device mlx5_0 listen 0.0.0.0:18515                  one end each
//! 01_ping_pong --device mlx5_0 connect server:18515
//! ```

#![forbid(unsafe_code)]

use std::time::{Duration, Instant};
use std::{env, process, thread};

use anyhow::{Result, bail, ensure};
use doorbell::prelude::*;

const USAGE: &str = "\
usage: 01_ping_pong [--device DEVICE] [listen ADDRESS:PORT | connect ADDRESS:PORT]
  --device DEVICE   soft0, soft?drop=0.02, or hardware such as mlx5_0; else DOORBELL_DEVICE, or soft0
Without a command both ends are here, each with the device opened anew.";
const TIMEOUT: Duration = Duration::from_secs(30);
const BYTES: usize = 64;
const ROUNDS: usize = 2000;

fn main() {
    let args: Vec<String> = env::args().skip(1).collect();
    if let Err(error) = run(&args.iter().map(String::as_str).collect::<Vec<_>>()) {
        eprintln!("01_ping_pong: {error}");
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
        ["listen", at] => echo(&open()?, Listener::bind(at)?.accept(TIMEOUT)?)?,
        ["connect", to] => measure(&open()?, Exchange::connect(to, TIMEOUT)?)?,
        [] => {
            let (one, other, listener) = (open()?, open()?, Listener::bind("127.0.0.1:0")?);
            let address = listener.local_addr();
            thread::scope(|scope| {
                let echo = scope.spawn(|| echo(&one, listener.accept(TIMEOUT)?));
                measure(&other, Exchange::connect(address, TIMEOUT)?)?;
                echo.join().expect("the other end panicked")
            })?;
        }
        _ => bail!("{}: no such command; see --help", args.join(" ")),
    }
    Ok(())
}

/// Two receives, as the next message may come before the buffer of the last is posted again.
fn pair(device: &Context, exchange: Exchange) -> Result<Connection> {
    let pd = device.protection_domain()?;
    let receives = pd.register_chunks(vec![0; 2 * BYTES], BYTES, Local)?;
    Ok(exchange.connection(&pd, |qp| qp.max_inline_data(BYTES as u32), receives, b"")?)
}

/// Sends every message back.
fn echo(device: &Context, exchange: Exchange) -> Result<()> {
    let mut peer = pair(device, exchange)?;
    while let Some((_, message)) = peer.next_completion()? {
        peer.send_inline(&message)?;
        peer.receive(message)?;
    }
    Ok(peer.finish()?)
}

fn measure(device: &Context, exchange: Exchange) -> Result<()> {
    let mut peer = pair(device, exchange)?;
    let mut times = Vec::with_capacity(ROUNDS);
    for round in 0..ROUNDS {
        let message = [round as u8; BYTES];
        let start = Instant::now();
        peer.send_inline(&message)?;
        let (_, answer) = peer.wait(TIMEOUT)?;
        times.push(start.elapsed());
        ensure!(answer[..] == message, "message {round} came back changed");
        peer.receive(answer)?;
    }
    peer.finish()?;
    times.sort_unstable();
    let [least, median, p99] = [0, ROUNDS / 2, ROUNDS * 99 / 100].map(|at| times[at].as_secs_f64() * 1e6 / 2.0);
    println!("{ROUNDS} round trips of {BYTES} bytes on {}", device.name());
    println!("one way: min {least:.2} µs, p50 {median:.2} µs, p99 {p99:.2} µs");
    Ok(())
}
