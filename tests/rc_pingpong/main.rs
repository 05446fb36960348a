//! Ping-pong over RC that is compatible with `ibv_rc_pingpong`: either end may be that program, on
//! another device. For the guest's script of that name, and by hand:
//!
//! ```text
//! rc_pingpong -d soft0                        the server, on the userspace device
//! ibv_rc_pingpong -d rxe0 -g 1 10.9.0.2       the client, on the kernel's
//! ```

#![forbid(unsafe_code)]

mod options;
mod pingpong;
mod rendezvous;

use std::process::ExitCode;

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
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    let context = doorbell::open(&options.device)?;
    match &options.server {
        None => pingpong::run_server(&context, options, Rendezvous::listen(options.port)?),
        Some(server) => pingpong::run_client(&context, options, server),
    }
}
