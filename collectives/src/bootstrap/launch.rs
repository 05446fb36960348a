//! Launchers: what mpirun, srun, torchrun and `doorbell` pass to their processes in the
//! environment.

use std::io;
use std::net::{IpAddr, SocketAddr};

use super::error::BootstrapError;
use super::id::{Nonce, UniqueId};
use super::join::{JoinRequest, resolve};
use super::rendezvous::{Rendezvous, RendezvousServer};
use super::{Group, Options};
use crate::types::Rank;

/// Ports that rank 0 tries.
const PORTS: u16 = 8;

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
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RendezvousPoint {
    /// At a rendezvous that is served already.
    Id(UniqueId),
    /// At one of eight ports of rank 0's host that all ranks derive from the environment.
    Derived {
        /// The host.
        host: String,
        /// The first port.
        port: u16,
        /// The nonce that authenticates the job's ranks.
        nonce: Nonce,
    },
}

/// The launch parameters of a process.
///
/// | launcher | rank, ranks, local rank | where they meet |
/// |---|---|---|
/// | `doorbell … --ranks N`, or a script | `DOORBELL_RANK`, `DOORBELL_RANKS`, `DOORBELL_LOCAL_RANK` | `DOORBELL_ID` |
/// | torchrun | `RANK`, `WORLD_SIZE`, `LOCAL_RANK` | `MASTER_ADDR`, from port `MASTER_PORT` + 1 on |
/// | Open MPI's mpirun | `OMPI_COMM_WORLD_RANK`, `…_SIZE`, `…_LOCAL_RANK` | one host: loopback; several: `MASTER_ADDR`, to be given with `-x` |
/// | Slurm's srun | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` or `SLURM_NTASKS`, `SLURM_LOCALID` | the first host of `SLURM_STEP_NODELIST` |
///
/// The first row whose rank and number of ranks are set applies, as launchers may be nested.
/// `DOORBELL_ID` names the rendezvous under any launcher; the process that made the id listens.
/// Without one, rank 0 listens at the first free one of eight ports, and the others try all: those
/// after `MASTER_PORT`, or eight below the ephemeral range that the job number selects.
///
/// An id, and Open MPI's key of the job, are random. Other nonces can be guessed, so they separate
/// groups but do not protect them; `DOORBELL_SECRET`, set alike on all ranks, is mixed into these.
#[derive(Clone, PartialEq, Eq, Debug)]
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
        let (candidates, nonce, serving) = match &self.rendezvous {
            RendezvousPoint::Id(id) => (resolve(id.host(), id.port())?, id.nonce(), None),
            RendezvousPoint::Derived { host, port, nonce } => {
                let candidates = candidates(host, *port, options.bind.filter(|_| rank == Rank(0)))?;
                if rank == Rank(0) {
                    let serving = serve(&candidates, *nonce, ranks, options)?;
                    let id = serving.id();
                    (resolve(id.host(), id.port())?, *nonce, Some(serving))
                } else {
                    (candidates, *nonce, None)
                }
            }
        };
        let group = Group::join_at(&candidates, JoinRequest { nonce, rank, ranks }, options)?;
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
    nonce: Nonce,
    ranks: u32,
    options: &Options,
) -> Result<RendezvousServer, BootstrapError> {
    let mut last = None;
    for candidate in candidates {
        match Rendezvous::at(*candidate, nonce, ranks) {
            Ok(rendezvous) => return rendezvous.spawn(options.timeout),
            Err(e @ BootstrapError::Listen { .. }) => last = Some(e),
            Err(e) => return Err(e),
        }
    }
    Err(last.unwrap_or_else(|| BootstrapError::System {
        what: "listen for the other ranks",
        source: io::ErrorKind::AddrNotAvailable.into(),
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
            let bad = |source| BootstrapError::Id {
                variable: VARIABLE,
                source,
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
            Launcher::Torchrun => self.at_master(&["torchrun"]),
            Launcher::OpenMpi => {
                // mpirun makes 128 random bits for each job, for its own transports.
                let key = self.get("OMPI_MCA_orte_precondition_transports").unwrap_or_default();
                let job = self
                    .get("PMIX_NAMESPACE")
                    .or_else(|| self.get("OMPI_MCA_ess_base_jobid"));
                let words = ["mpirun", &key, &job.unwrap_or_default()];
                let one_host = self.get("OMPI_COMM_WORLD_LOCAL_SIZE") == self.get("OMPI_COMM_WORLD_SIZE");
                if self.get("MASTER_ADDR").is_some() && !one_host {
                    return self.at_master(&words);
                }
                if !one_host {
                    return missing(
                        "MASTER_ADDR",
                        "the ranks run on several hosts, so it should name that of rank 0: mpirun -x MASTER_ADDR=…",
                    );
                }
                Ok(self.derived("127.0.0.1".to_owned(), &words))
            }
            Launcher::Slurm => {
                const NODES: &str = "SLURM_STEP_NODELIST";
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
                let job = self.get("SLURM_JOB_ID").unwrap_or_default();
                let step = self.get("SLURM_STEP_ID").unwrap_or_default();
                Ok(self.derived(host, &["srun", &job, &step]))
            }
        }
    }

    /// At the ports after `MASTER_PORT`, which the job's own rendezvous uses.
    fn at_master(&self, words: &[&str]) -> Result<RendezvousPoint, BootstrapError> {
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
        let words = [words, &[&candidate, &run, &restarts]].concat();
        let nonce = self.nonce(&words);
        Ok(RendezvousPoint::Derived { host, port, nonce })
    }

    /// At ports that the job number selects: 10240 to 28671, below the ephemeral range.
    fn derived(&self, host: String, words: &[&str]) -> RendezvousPoint {
        let nonce = self.nonce(words);
        let [low, high, ..] = *nonce.bytes();
        let choice = u16::from_le_bytes([low, high]) % (18432 / PORTS);
        let port = 10240 + choice * PORTS;
        RendezvousPoint::Derived { host, port, nonce }
    }

    fn nonce(&self, words: &[&str]) -> Nonce {
        let secret = self.get("DOORBELL_SECRET").unwrap_or_default();
        Nonce::derived(&[words, &[&secret]].concat())
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
