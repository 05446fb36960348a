//! One rank: how it joins its group, and what it does there.

use doorbell_collectives::bootstrap::{self, BootstrapError, Exchange, Group, Launch, UniqueId};
use doorbell_collectives::executor::Config;
use doorbell_collectives::tune::Overrides;
use doorbell_collectives::{Communicator, Options, Rank};
use serde::{Deserialize, Serialize};

use super::args::Operation;
use super::bind::bind;
use super::table::Report;
use super::{CollArgs, explain, gpu, measure, model_check, moe};
use crate::device::{self, Device, Reach};
use crate::diagnose::{self, Sources};
use crate::failure::{Failure, one_line, refused};
use crate::interrupt::Interrupt;
use crate::orchestrate;
use crate::report::{Caveats, LinkKind, ReportedWarning, Warning};

/// A rank started by the process at the other end of stdin.
pub(super) fn child(args: &CollArgs, rank: u32, ranks: u32) -> Result<(), Failure> {
    let interrupt = Interrupt::leave_to_parent()?;
    let token = orchestrate::adopt_until(interrupt.clone())
        .map_err(|_| Failure::usage("--rank is for doorbell itself: use --ranks"))?;
    let id: UniqueId = token
        .parse()
        .map_err(|_| Failure::usage("--rank is for doorbell itself: use --ranks"))?;
    let join = || Group::join(&id, Rank(rank), ranks, &bootstrap::Options::default());
    let own_processor = || {
        // The threads for a GPU need CPUs of their own.
        if !args.gpu {
            bind(args.bind, rank, ranks);
        }
    };
    match begin(args, rank, (Reach::Here, &interrupt), join, own_processor) {
        // The parent process reports it.
        Err(Failure::Interrupted) => Ok(()),
        done => with_rank(rank, done),
    }
}

/// # Errors
/// [`Failure::Usage`] without a launcher; else those of this rank.
pub(super) fn launched(args: &CollArgs) -> Result<(), Failure> {
    let launch = Launch::from_env().map_err(|e| match e {
        BootstrapError::NotLaunched => Failure::usage(
            "how many ranks? Give --ranks N to start them here, or start this by mpirun, srun or torchrun",
        ),
        other => Failure::usage(one_line(&other.to_string())),
    })?;
    let rank = launch.rank.0;
    let options = bootstrap::Options::from_env().map_err(|e| Failure::usage(one_line(&e.to_string())))?;
    let interrupt = Interrupt::catch()?;
    let join = || launch.join(&options);
    // Binding is up to the launcher.
    with_rank(rank, begin(args, rank, (Reach::Elsewhere, &interrupt), join, || {}))
}

/// Prefixes a failure with the rank.
fn with_rank<T>(rank: u32, result: Result<T, Failure>) -> Result<T, Failure> {
    result.map_err(|failure| match failure {
        Failure::Test(what) => Failure::Test(format!("rank {rank}: {what}")),
        Failure::Usage(what) => Failure::Usage(format!("rank {rank}: {what}")),
        other => other,
    })
}

/// A rank's link and device, sent to the other ranks.
#[derive(Serialize, Deserialize)]
struct ReachedBy {
    link: LinkKind,
    group: Option<u64>,
}

fn begin(
    args: &CollArgs,
    rank: u32,
    (reach, interrupt): (Reach, &Interrupt),
    join: impl FnOnce() -> Result<Group, BootstrapError>,
    bind: impl FnOnce(),
) -> Result<(), Failure> {
    let mut soft = args.soft.clone();
    soft.pcap = soft.pcap.filter(|_| rank == 0);
    let devices = device::open_all(&args.device, &soft, args.seed.wrapping_add(u64::from(rank)), reach)?;
    let options = options(args)?;
    let mut group = join().map_err(refused)?;
    if args.root().is_some_and(|root| root >= group.ranks()) {
        return Err(Failure::usage(format!(
            "rank {} cannot be the root of {} ranks",
            args.root,
            group.ranks()
        )));
    }
    let link = agree_on_link(&devices, &mut group)?;
    // GPU communicators report their own links.
    let of_host = if args.gpu { LinkKind::Hardware } else { link };
    let warnings = if rank == 0 {
        warn(&devices, of_host, &group, args.verbose)
    } else {
        Vec::new()
    };
    bind();
    let contexts: Vec<_> = devices.iter().map(|device| device.context.clone()).collect();
    let comm = Communicator::new(&contexts, group, options).map_err(refused)?;
    let names: Vec<_> = contexts.iter().map(|context| context.name()).collect();
    let device = names.join(",");
    if let Operation::Moe(part) = args.operation {
        let mut report = Report::new(part.name(), device, link);
        report.warnings = warnings;
        if args.gpu {
            return gpu::run_moe(args, part, comm, interrupt, report);
        }
        moe::run(args, part, moe::Ranks::OnHosts(&comm), interrupt, report)?;
    } else if args.explain {
        if rank == 0 {
            explain::run(args, &comm)?;
        }
    } else if args.measure {
        model_check::run(args, &comm)?;
    } else {
        let mut report = Report::new(args.collective().name(), device, link);
        report.warnings = warnings;
        if args.gpu {
            return gpu::run(args, comm, interrupt, report);
        }
        measure::run(args, &comm, interrupt, report)?;
    }
    comm.destroy().map_err(refused)
}

fn options(args: &CollArgs) -> Result<Options, Failure> {
    let from_env = Options::from_env().map_err(|e| Failure::usage(one_line(&e.to_string())))?;
    let mine = Overrides {
        algorithm: args.algorithm.0,
        protocol: args.protocol.0,
        channels: args.channels,
        slice_bytes: None,
    };
    let overrides = mine.over(from_env.overrides);
    let channels = overrides.channels.unwrap_or(0).max(from_env.config.channels).min(64);
    Ok(Options {
        config: Config {
            channels,
            ..from_env.config
        },
        deadline: args.deadline,
        deterministic: args.deterministic,
        overrides,
        ..from_env
    })
}

/// What carries the packets between all ranks: the softest link of any.
fn agree_on_link(devices: &[Device], group: &mut Group) -> Result<LinkKind, Failure> {
    let softest = devices.iter().max_by_key(|device| device.link);
    let mine = ReachedBy {
        link: softest.map_or(LinkKind::SoftUdp, |device| device.link),
        group: softest.and_then(|device| device.group),
    };
    let text = serde_json::to_vec(&mine).unwrap_or_default();
    let said = group.control_mut().all_gather(&text).map_err(refused)?;
    let all: Option<Vec<ReachedBy>> = said.iter().map(|one| serde_json::from_slice(one).ok()).collect();
    let Some(all) = all else {
        return Err(Failure::test(
            "another rank sent a message of an unknown version: run the same one everywhere",
        ));
    };
    if mine.group.is_some() && all.iter().all(|one| one.group == mine.group) {
        return Ok(LinkKind::SoftLocal);
    }
    Ok(all.iter().map(|one| one.link).max().unwrap_or(mine.link))
}

fn warn(devices: &[Device], link: LinkKind, group: &Group, verbose: bool) -> Vec<ReportedWarning> {
    let host = group.members().first().map(|member| &member.host);
    let here = group
        .members()
        .iter()
        .filter(|member| Some(&member.host) == host)
        .count();
    let mut warnings = diagnose::of_machine(&Sources::of_this_machine(), here);
    if link != LinkKind::Hardware {
        warnings.push(Warning::not_hardware(link));
    }
    let faults = devices.iter().find_map(|device| device.faults.as_deref());
    warnings.extend(faults.map(Warning::faults));
    let mut caveats = Caveats::new(verbose);
    caveats.add(warnings);
    caveats.finish()
}
