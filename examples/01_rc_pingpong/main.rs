//! Ping-pong over RC, compatible with `ibv_rc_pingpong`: either end may be that program.
//!
//! ```text
//! cargo run --release -p doorbell-examples --bin 01_rc_pingpong                      both ends here, on soft devices
//! 01_rc_pingpong -d soft0                                                            the server, on the soft device
//! 01_rc_pingpong -d rxe0 -g 1 10.9.0.2                                               the client, on the kernel's device
//! ibv_rc_pingpong -d rxe0 -g 1 10.9.0.2                                              or this, to the same server
//! ```
//!
//! A soft device listens on loopback unless `DOORBELL_SOFT_ADDR` names another address.

#![forbid(unsafe_code)]

mod options;
mod pingpong;
mod rendezvous;

use std::process::ExitCode;
use std::thread;

use options::Options;
use rendezvous::Rendezvous;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn main() -> ExitCode {
    let options = match Options::parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("{error}\n{}", options::USAGE);
            return ExitCode::from(2);
        }
    };
    let result = if options.device.is_empty() {
        both_ends(&options)
    } else {
        one_end(&options)
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn one_end(options: &Options) -> Result<()> {
    let context = doorbell::open(&options.device)?;
    match &options.server {
        None => pingpong::run_server(&context, options, Rendezvous::listen(options.port)?),
        Some(server) => pingpong::run_client(&context, options, server),
    }
}

fn both_ends(options: &Options) -> Result<()> {
    let (server, client) = (doorbell::open("soft")?, doorbell::open("soft")?);
    // Any free port: only this process connects to it.
    let rendezvous = Rendezvous::listen(0)?;
    let options = Options {
        port: rendezvous.port()?,
        ..options.clone()
    };
    thread::scope(|scope| {
        let server_thread = scope.spawn(|| pingpong::run_server(&server, &options, rendezvous));
        pingpong::run_client(&client, &options, "127.0.0.1")?;
        server_thread.join().map_err(|_| "the server panicked")?
    })
}
