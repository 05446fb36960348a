//! Ranks of a communicator, as processes: started here, or by a launcher.

use std::env;
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Child, Command};

use doorbell_collectives::bootstrap::{self, Group, Launch, Rendezvous};
use doorbell_collectives::{Communicator, Options, Rank};
use doorbell_softroce_ibverbs::{api, last_open_error};
use doorbell_verbs::Library;

use crate::Error;

/// Runs `rank` in each of `ranks` processes of this program, and returns when all have ended. Under mpirun, srun or torchrun, or where `DOORBELL_RANK` is set, this process is one rank of those that there are.
///
/// # Errors
/// What `rank` says; where the ranks were started here, that one of them has failed.
pub fn as_ranks(
    ranks: u32,
    progress_thread: bool,
    rank: impl FnOnce(&Communicator) -> Result<(), Error>,
) -> Result<(), Error> {
    if Launch::from_env().is_err() {
        return start(ranks);
    }
    let options = Options {
        progress_thread,
        ..Options::from_env()?
    };
    let device = Library::new(api()).open("soft0");
    // The library's error has an errno, the soft device knows the reason.
    let device = device.map_err(|error| format!("{error} {}", last_open_error().unwrap_or_default()))?;
    let comm = Communicator::new(&[device], Group::from_env()?, options)?;
    rank(&comm)?;
    Ok(comm.destroy()?)
}

/// Processes that are killed if they are not waited for.
struct Ranks(Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // It may have ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn start(ranks: u32) -> Result<(), Error> {
    let patience = bootstrap::Options::default().patience;
    let serving = Rendezvous::open(IpAddr::V4(Ipv4Addr::LOCALHOST), ranks)?.spawn(patience)?;
    let mut started = Ranks(Vec::new());
    for rank in (0..ranks).map(Rank) {
        let mut command = Command::new(env::current_exe()?);
        command.args(env::args_os().skip(1));
        command.envs(Launch::variables(serving.id(), rank, ranks));
        started.0.push(command.spawn()?);
    }
    for (rank, child) in started.0.iter_mut().enumerate() {
        let status = child.wait()?;
        if !status.success() {
            return Err(format!("rank {rank}: {status}").into());
        }
    }
    Ok(serving.wait()?)
}
