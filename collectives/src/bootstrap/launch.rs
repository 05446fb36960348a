//! Launchers: what mpirun, srun, torchrun and `doorbell` pass to their processes in the
//! environment.

use std::io;
use std::net::{IpAddr, SocketAddr};

use doorbell_rendezvous::Secret;

use super::error::BootstrapError;
use super::id::UniqueId;
use super::join::{JoinRequest, resolve};
use super::rendezvous::{Rendezvous, RendezvousServer};
use super::{Group, Options};
use crate::types::Rank;

/// Ports that rank 0 tries.
const PORTS: u16 = 8;
const LOOPBACK: &str = "127.0.0.1";

/// The launcher of this process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Launcher {
    /// `doorbell … --ranks N`, or a script that sets `DOORBELL_RANK`.
    Doorbell,
    /// Open MPI's mpirun.
    OpenMpi,
    /// Slurm's srun.
    Slurm,
    /// PyTorch's torchrun.
    Torchrun,
}

/// Where the ranks of a job meet.
#[derive(Clone, Debug)]
pub enum RendezvousPoint {
    /// At a rendezvous that is served already.
    Id(UniqueId),
    /// At one of eight ports of rank 0's host that all ranks derive from the environment.
    Derived {
        /// The host.
        host: String,
        /// The first port.
        port: u16,
        /// The secret that authenticates the job's ranks.
        secret: Secret,
    },
}

/// The launch parameters of a process.
///
/// | launcher | rank, ranks, local rank | where they meet |
/// |---|---|---|
/// | `doorbell … --ranks N`, or a script | `DOORBELL_RANK`, `DOORBELL_RANKS`, `DOORBELL_LOCAL_RANK` | `DOORBELL_ID` |
/// | torchrun | `RANK`, `WORLD_SIZE`, `LOCAL_RANK` | `MASTER_ADDR`, from port `MASTER_PORT` + 1 on |
/// | Open MPI's mpirun | `OMPI_COMM_WORLD_RANK`, `…_SIZE`, `…_LOCAL_RANK` | `MASTER_ADDR`, to be given with `-x` |
/// | Slurm's srun | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` or `SLURM_NTASKS`, `SLURM_LOCALID` | the first host of `SLURM_STEP_NODELIST` |
///
/// Ranks that are all on one host meet on its loopback address.
///
/// The first row whose rank and number of ranks are set applies, as launchers may be nested.
/// `DOORBELL_ID` names the rendezvous under any launcher; the process that made the id listens.
/// Without one, rank 0 listens at the first free one of eight ports, and the others try all: those
/// after `MASTER_PORT`, or eight below the ephemeral range that the job number selects.
///
/// An id has a random secret. Elsewhere it is `DOORBELL_SECRET`, the text of the file
/// `DOORBELL_SECRET_FILE`, or the random key that Open MPI makes for each job; without any of
/// these, the text of `~/.config/doorbell/secret`, which the first rank makes. It is derived for
/// each job: ranks of another job do not join.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The launcher.
    pub launcher: Launcher,
    /// The rank.
    pub rank: Rank,
    /// The number of ranks.
    pub ranks: u32,
    /// The rank among those on this host, where known.
    pub local_rank: Option<u32>,
    /// Where they meet.
    pub rendezvous: RendezvousPoint,
}

impl Launch {
    /// Reads this process' environment.
    ///
    /// # Errors
    /// As [`from_variables`](Self::from_variables).
    pub fn from_env() -> Result<Self, BootstrapError> {
        Self::from_variables(doorbell_trust::text_variable)
    }

    /// Reads variables through `variable`.
    ///
    /// # Errors
    /// [`BootstrapError::NotLaunched`] if no rank is set; [`BootstrapError::Variable`],
    /// [`BootstrapError::Id`] and [`BootstrapError::Rank`] if a value is invalid.
    pub fn from_variables(variable: impl Fn(&'static str) -> Option<String>) -> Result<Self, BootstrapError> {
        let variables = Variables(&variable);
        let (launcher, [rank, ranks, local_rank]) = variables.launcher().ok_or(BootstrapError::NotLaunched)?;
        let number = |name| variables.required(name, "it should be a number");
        let launch = Self {
            launcher,
            rank: Rank(number(rank)?),
            ranks: number(ranks)?,
            local_rank: variables.optional(local_rank, "it should be a number")?,
            rendezvous: variables.rendezvous(launcher)?,
        };
        if launch.rank.0 >= launch.ranks {
            let Self { rank, ranks, .. } = launch;
            return Err(BootstrapError::Rank { rank, ranks });
        }
        Ok(launch)
    }

    /// The environment that a process passes to the ranks that it starts on its own host.
    #[must_use]
    pub fn variables(id: &UniqueId, rank: Rank, ranks: u32) -> [(&'static str, String); 4] {
        [
            ("DOORBELL_RANK", rank.to_string()),
            ("DOORBELL_RANKS", ranks.to_string()),
            ("DOORBELL_LOCAL_RANK", rank.to_string()),
            ("DOORBELL_ID", id.to_string()),
        ]
    }

    /// Joins the rendezvous, and serves it if that is this rank's part.
    ///
    /// # Errors
    /// As [`Group::join`].
    pub fn join(&self, options: &Options) -> Result<Group, BootstrapError> {
        let &Self { rank, ranks, .. } = self;
        let (candidates, secret, serving) = match &self.rendezvous {
            RendezvousPoint::Id(id) => (resolve(id.host(), id.port())?, id.secret(), None),
            RendezvousPoint::Derived { host, port, secret } => {
                let candidates = candidates(host, *port, options.bind.filter(|_| rank == Rank(0)))?;
                if rank == Rank(0) {
                    let serving = serve(&candidates, *secret, ranks, options)?;
                    let id = serving.id();
                    (resolve(id.host(), id.port())?, *secret, Some(serving))
                } else {
                    (candidates, *secret, None)
                }
            }
        };
        let group = Group::join_at(&candidates, JoinRequest { secret, rank, ranks }, options)?;
        serving.map_or(Ok(()), RendezvousServer::wait)?;
        Ok(group)
    }
}

/// All addresses of a derived rendezvous: every port of the first address, then of the next.
fn candidates(host: &str, port: u16, bind: Option<IpAddr>) -> Result<Vec<SocketAddr>, BootstrapError> {
    let mut found = match bind {
        Some(ip) => vec![SocketAddr::new(ip, port)],
        None => resolve(host, port)?,
    };
    found.dedup();
    let ports = |first: SocketAddr| {
        (0..PORTS).filter_map(move |more| {
            let mut candidate = first;
            candidate.set_port(port.checked_add(more)?);
            Some(candidate)
        })
    };
    Ok(found.into_iter().flat_map(ports).collect())
}

fn serve(
    candidates: &[SocketAddr],
    secret: Secret,
    ranks: u32,
    options: &Options,
) -> Result<RendezvousServer, BootstrapError> {
    let mut last = None;
    for candidate in candidates {
        match Rendezvous::open_at(*candidate, secret, ranks) {
            Ok(rendezvous) => return rendezvous.spawn(options.timeout),
            Err(e @ BootstrapError::Listen { .. }) => last = Some(e),
            Err(e) => return Err(e),
        }
    }
    Err(last.unwrap_or_else(|| BootstrapError::System {
        what: "listen for the other ranks",
        error: io::ErrorKind::AddrNotAvailable.into(),
    }))
}

struct Variables<'a>(&'a dyn Fn(&'static str) -> Option<String>);

impl Variables<'_> {
    /// An empty variable counts as unset.
    fn get(&self, name: &'static str) -> Option<String> {
        (self.0)(name).filter(|value| !value.is_empty())
    }

    fn optional<T: std::str::FromStr>(
        &self,
        variable: &'static str,
        expected: &'static str,
    ) -> Result<Option<T>, BootstrapError> {
        let Some(value) = self.get(variable) else {
            return Ok(None);
        };
        let bad = |_| BootstrapError::Variable {
            variable,
            value: value.clone(),
            expected,
        };
        value.parse().map(Some).map_err(bad)
    }

    fn required<T: std::str::FromStr>(
        &self,
        variable: &'static str,
        expected: &'static str,
    ) -> Result<T, BootstrapError> {
        self.optional(variable, expected)?
            .ok_or_else(|| BootstrapError::Variable {
                variable,
                value: String::new(),
                expected,
            })
    }

    fn launcher(&self) -> Option<(Launcher, [&'static str; 3])> {
        let slurm_ranks = if self.get("SLURM_STEP_NUM_TASKS").is_some() {
            "SLURM_STEP_NUM_TASKS"
        } else {
            "SLURM_NTASKS"
        };
        let all = [
            (
                Launcher::Doorbell,
                ["DOORBELL_RANK", "DOORBELL_RANKS", "DOORBELL_LOCAL_RANK"],
            ),
            (Launcher::Torchrun, ["RANK", "WORLD_SIZE", "LOCAL_RANK"]),
            (
                Launcher::OpenMpi,
                [
                    "OMPI_COMM_WORLD_RANK",
                    "OMPI_COMM_WORLD_SIZE",
                    "OMPI_COMM_WORLD_LOCAL_RANK",
                ],
            ),
            (Launcher::Slurm, ["SLURM_PROCID", slurm_ranks, "SLURM_LOCALID"]),
        ];
        // Half of the pair is an error in our own variables only.
        let is_set = |launcher, [rank, ranks, _]: [&'static str; 3]| {
            self.get(rank).is_some() && (launcher == Launcher::Doorbell || self.get(ranks).is_some())
        };
        all.into_iter().find(|(launcher, names)| is_set(*launcher, *names))
    }

    fn rendezvous(&self, launcher: Launcher) -> Result<RendezvousPoint, BootstrapError> {
        const VARIABLE: &str = "DOORBELL_ID";
        if let Some(id) = self.get(VARIABLE) {
            let bad = |error| BootstrapError::Id {
                variable: VARIABLE,
                error,
            };
            return id.parse().map(RendezvousPoint::Id).map_err(bad);
        }
        let missing = |variable, expected| {
            Err(BootstrapError::Variable {
                variable,
                value: String::new(),
                expected,
            })
        };
        match launcher {
            Launcher::Doorbell => missing(
                VARIABLE,
                "it should be the unique id that the launcher of the ranks has made",
            ),
            Launcher::Torchrun => self.at_master(&["torchrun"], self.is_one_host("LOCAL_WORLD_SIZE", "WORLD_SIZE")),
            Launcher::OpenMpi => {
                let job = self
                    .get("PMIX_NAMESPACE")
                    .or_else(|| self.get("OMPI_MCA_ess_base_jobid"));
                let words = ["mpirun", &job.unwrap_or_default()];
                let one_host = self.is_one_host("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE");
                if self.get("MASTER_ADDR").is_some() && !one_host {
                    return self.at_master(&words, false);
                }
                if !one_host {
                    return missing(
                        "MASTER_ADDR",
                        "the ranks run on several hosts, so it should name that of rank 0: mpirun -x MASTER_ADDR=…",
                    );
                }
                self.derived(LOOPBACK.to_owned(), &words)
            }
            Launcher::Slurm => {
                const NODES: &str = "SLURM_STEP_NODELIST";
                let job = self.get("SLURM_JOB_ID").unwrap_or_default();
                let step = self.get("SLURM_STEP_ID").unwrap_or_default();
                let words = ["srun", &job, &step];
                if self.get("SLURM_STEP_NUM_NODES").as_deref() == Some("1") {
                    return self.derived(LOOPBACK.to_owned(), &words);
                }
                let nodes = self
                    .get(NODES)
                    .or_else(|| self.get("SLURM_JOB_NODELIST"))
                    .unwrap_or_default();
                let Some(host) = first_host(&nodes) else {
                    return Err(BootstrapError::Variable {
                        variable: NODES,
                        value: nodes,
                        expected: "it should list hosts, as node[1-4]",
                    });
                };
                self.derived(host, &words)
            }
        }
    }

    fn is_one_host(&self, local: &'static str, all: &'static str) -> bool {
        let local = self.get(local);
        local.is_some() && local == self.get(all)
    }

    /// At the ports after `MASTER_PORT`, which the job's own rendezvous uses.
    fn at_master(&self, words: &[&str], one_host: bool) -> Result<RendezvousPoint, BootstrapError> {
        let host: String = self.required("MASTER_ADDR", "it should name the host of rank 0")?;
        let port: u16 = self.required("MASTER_PORT", "it should be a port below 65535")?;
        let Some(port) = port.checked_add(1) else {
            return Err(BootstrapError::Variable {
                variable: "MASTER_PORT",
                value: port.to_string(),
                expected: "it should be a port below 65535",
            });
        };
        // A restarted job is another job.
        let run = self.get("TORCHELASTIC_RUN_ID").unwrap_or_default();
        let restarts = self.get("TORCHELASTIC_RESTART_COUNT").unwrap_or_default();
        let candidate = format!("{host}:{port}");
        let secret = Secret::of_job(&[words, &[&candidate, &run, &restarts]].concat(), self.0)
            .map_err(BootstrapError::NoSecret)?;
        let host = if one_host { LOOPBACK.to_owned() } else { host };
        Ok(RendezvousPoint::Derived { host, port, secret })
    }

    /// At ports that the job number selects: 10240 to 28671, below the ephemeral range.
    fn derived(&self, host: String, words: &[&str]) -> Result<RendezvousPoint, BootstrapError> {
        // Ports are public: they come of the job's words alone.
        let [low, high, ..] = *Secret::derived(words).bytes();
        let choice = u16::from_le_bytes([low, high]) % (18432 / PORTS);
        let port = 10240 + choice * PORTS;
        let secret = Secret::of_job(words, self.0).map_err(BootstrapError::NoSecret)?;
        Ok(RendezvousPoint::Derived { host, port, secret })
    }
}

/// The first host of Slurm's notation: `a[01-04,7]b,c` begins with `a01b`.
fn first_host(nodes: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = nodes;
    loop {
        let end = rest.find([',', '[']).unwrap_or(rest.len());
        host.push_str(&rest[..end]);
        match rest[end..].strip_prefix('[') {
            Some(range) => {
                let (range, after) = range.split_once(']')?;
                host.push_str(range.split([',', '-']).next()?);
                rest = after;
            }
            None => break,
        }
    }
    let named = host
        .chars()
        .all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_'));
    (!host.is_empty() && named).then_some(host)
}

#[cfg(test)]
#[path = "launch_tests.rs"]
mod tests;
