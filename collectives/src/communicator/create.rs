//! Creation of communicators, from a group and devices or from another communicator.

use std::sync::Arc;
use std::time::{Duration, Instant};

use doorbell_verbs::Context;
use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use super::drive::Shared;
use super::state::State;
use super::{CollectiveError, Communicator, FOREVER, Options, calibrate};
use crate::bootstrap::{Exchange, ExchangeError, Group};
use crate::cost::{Compute, Link};
use crate::executor::{Backoff, Engine, EngineError};
use crate::topology;
use crate::tune::{Overrides, Rule, Tuner, TuningFile};
use crate::types::Rank;

#[derive(Serialize, Deserialize)]
struct SharedTuning {
    local: Link,
    remote: Link,
    compute: Compute,
    rules: Vec<Rule>,
    algorithm: Option<String>,
    protocol: Option<String>,
    channels: Option<u32>,
    slice_bytes: Option<u64>,
}

impl SharedTuning {
    fn of(tuner: &Tuner) -> Self {
        let Overrides {
            algorithm,
            protocol,
            channels,
            slice_bytes,
        } = tuner.overrides;
        Self {
            local: tuner.local,
            remote: tuner.remote,
            compute: tuner.compute,
            rules: tuner.rules.clone(),
            algorithm: algorithm.map(|algorithm| algorithm.name().to_owned()),
            protocol: protocol.map(|protocol| protocol.name().to_owned()),
            channels,
            slice_bytes,
        }
    }

    fn tuner(self, channels: u32) -> Option<Tuner> {
        let overrides = Overrides {
            algorithm: self.algorithm.map(|name| name.parse()).transpose().ok()?,
            protocol: self.protocol.map(|name| name.parse()).transpose().ok()?,
            channels: self.channels,
            slice_bytes: self.slice_bytes,
        };
        Some(Tuner {
            overrides,
            rules: self.rules,
            ..Tuner::new(self.local, self.remote, self.compute, channels)
        })
    }
}

impl Communicator {
    /// A rank of a launched job: [`Group::from_env`] on one device, with [`Options::from_env`].
    ///
    /// # Errors
    /// As those, and as [`new`](Self::new).
    #[doc(alias = "MPI_Init")]
    pub fn from_env(device: &Context) -> Result<Self, CollectiveError> {
        let options = Options::from_env()?;
        Self::new(std::slice::from_ref(device), Group::from_env()?, options)
    }

    /// The same on any number of devices, with these options. Environment variables of options are
    /// ignored unless the options began as [`Options::from_env`]:
    ///
    /// ```no_run
    /// # use doorbell_collectives::{CollectiveError, Communicator, Options};
    /// # fn example(devices: &[doorbell_verbs::Context]) -> Result<Communicator, CollectiveError> {
    /// let options = Options { progress_thread: true, ..Options::from_env()? };
    /// Communicator::from_env_with(devices, options)
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Group::from_env`] and [`new`](Self::new).
    pub fn from_env_with(devices: &[Context], options: Options) -> Result<Self, CollectiveError> {
        Self::new(devices, Group::from_env()?, options)
    }

    /// A rank of this group, on these devices; connections are spread over them. All members call
    /// it at the same time.
    ///
    /// # Errors
    /// When a device refuses a request, a member is missing, or the tuning file is invalid.
    #[doc(alias("ncclCommInitRank", "ncclCommInitRankConfig"))]
    pub fn new(devices: &[Context], mut group: Group, mut options: Options) -> Result<Self, CollectiveError> {
        options.deadline = options.deadline.min(FOREVER);
        let state = State::connect(devices, &mut group, &options, None)?;
        let comm = Self::of(state, group, devices, options)?;
        if comm.options.calibrate {
            comm.calibrate()?;
        }
        Ok(comm)
    }

    fn of(state: State, group: Group, devices: &[Context], options: Options) -> Result<Self, CollectiveError> {
        let (rank, ranks, members) = (group.rank(), group.ranks(), group.members().into());
        let shared = Arc::new(Shared::new(state, group, options.progress_thread));
        let progress = if options.progress_thread {
            let shared = Arc::clone(&shared);
            let thread = doorbell_threads::spawn("collectives", move || shared.drive_in_background());
            Some(thread.map_err(CollectiveError::Thread)?)
        } else {
            None
        };
        Ok(Self {
            shared,
            progress,
            rank,
            ranks,
            members,
            devices: devices.into(),
            options,
        })
    }

    /// Splits the communicator: members of one `colour` form a communicator, ordered by `key` and
    /// then by rank. A member without a colour is in none. All ranks call it.
    ///
    /// # Errors
    /// When a member is missing, or a device refuses a request.
    #[doc(alias("ncclCommSplit", "MPI_Comm_split"))]
    pub fn split(&self, colour: Option<u32>, key: i32) -> Result<Option<Self>, CollectiveError> {
        let part = self.with_exchange(|group| group.split(colour, key))?;
        part.map(|group| self.with_group(group)).transpose()
    }

    /// A second communicator of the same members. All ranks call it.
    ///
    /// # Errors
    /// As [`split`](Self::split).
    #[doc(alias = "MPI_Comm_dup")]
    pub fn duplicate(&self) -> Result<Self, CollectiveError> {
        let group = self.with_exchange(Group::duplicate)?;
        self.with_group(group)
    }

    /// Measures the costs of the cost model and chooses algorithms anew. All ranks call it, with
    /// nothing in flight. A tuning file's costs take precedence.
    ///
    /// # Errors
    /// When an operation fails, or a rank is missing.
    pub fn calibrate(&self) -> Result<(), CollectiveError> {
        let mut tuner = calibrate::measured(self)?;
        if let Some(path) = &self.options.tuning_file {
            let rules = std::mem::take(&mut tuner.rules);
            tuner = tuner.with_file(TuningFile::read(path)?);
            tuner.rules = rules;
        }
        let tuner = share_tuning(&tuner, &mut self.shared.group())?;
        self.shared.with(|state| state.choose_by(tuner));
        Ok(())
    }

    /// Sends bytes to all ranks over their control connections, and returns those of each, by rank.
    /// All ranks call it, in the same order as splits.
    ///
    /// # Errors
    /// When a rank is missing, or there are more than
    /// [`MAX_MESSAGE`](crate::bootstrap::MAX_MESSAGE) bytes.
    #[doc(alias = "MPI_Allgather")]
    pub fn exchange(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.with_exchange(|group| group.control_mut().all_gather(bytes))
    }

    /// Runs an exchange of the group within the communicator's deadline; all ranks run the same.
    pub(crate) fn with_exchange<R>(
        &self,
        act: impl FnOnce(&mut Group) -> Result<R, ExchangeError>,
    ) -> Result<R, CollectiveError> {
        let mut group = self.shared.group();
        group.control_mut().set_timeout(self.options.deadline);
        Ok(act(&mut group)?)
    }

    fn with_group(&self, mut group: Group) -> Result<Self, CollectiveError> {
        let tuner = self.tuner();
        let state = State::connect(&self.devices, &mut group, &self.options, Some(tuner))?;
        Self::of(state, group, &self.devices, self.options.clone())
    }

    /// After a failure, creates a communicator of the survivors. All that want to continue call it;
    /// a member that does not within `timeout`, or dies meanwhile, is excluded.
    ///
    /// # Errors
    /// When the others continue without this rank, or there was no agreement in time.
    #[doc(alias("ncclCommShrink", "MPIX_Comm_shrink"))]
    pub fn shrink(&self, timeout: Duration) -> Result<Self, CollectiveError> {
        self.shared.abort_local("the communicator is being shrunk");
        self.survivors(&[], timeout.min(FOREVER))
    }

    /// Creates a communicator of the ranks that are not in `excluded`, which all call it, within
    /// the deadline of operations; those that fail meanwhile are excluded, too. This communicator,
    /// unless it has failed, remains usable, but can be shrunk no more.
    ///
    /// # Errors
    /// As [`shrink`](Self::shrink).
    pub fn shrink_without(&self, excluded: &[Rank]) -> Result<Self, CollectiveError> {
        self.survivors(excluded, self.options.deadline)
    }

    fn survivors(&self, excluded: &[Rank], timeout: Duration) -> Result<Self, CollectiveError> {
        let until = Instant::now() + timeout;
        let tuner = self.tuner();
        let mut group = Group::of(self.shared.control.shrink(excluded, timeout)?);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            group.control_mut().set_timeout(left.max(Duration::from_millis(1)));
            match State::connect(&self.devices, &mut group, &self.options, Some(tuner.clone())) {
                Ok(state) => return Self::of(state, group, &self.devices, self.options.clone()),
                // A member was lost meanwhile.
                Err(CollectiveError::Engine(EngineError::Exchange(_)) | CollectiveError::Exchange(_))
                    if !left.is_zero() =>
                {
                    group = group.shrink(left)?;
                }
                Err(error) => return Err(error),
            }
        }
    }
}

impl State {
    fn connect(
        devices: &[Context],
        group: &mut Group,
        options: &Options,
        tuner: Option<Tuner>,
    ) -> Result<Self, CollectiveError> {
        let (rank, ranks) = (group.rank(), group.ranks());
        let mut engine = Engine::new(devices, rank, ranks, options.config, group.control_mut())?;
        engine.set_backoff(backoff(group)?);
        let locations = locations(group, options.location.as_ref())?;
        let hosts = hosts(&locations);
        let order = topology::ring(&locations);
        let tuner = match tuner {
            Some(tuner) => tuner,
            None => {
                let mut tuner = tuner_of(options);
                if let Some(path) = &options.tuning_file {
                    tuner = tuner.with_file(TuningFile::read(path)?);
                }
                share_tuning(&tuner, group)?
            }
        };
        Ok(Self::new(engine, tuner, hosts, order, locations))
    }
}

/// The wait policy: by the number of ranks on this host and the processors on which any of them may
/// run. A single rank may be bound to one processor and still have it to itself.
fn backoff(group: &mut Group) -> Result<Backoff, ExchangeError> {
    let allowed = sched_getaffinity(Pid::from_raw(0)).ok();
    let own: Vec<u8> = (0..CpuSet::count())
        .map(|cpu| u8::from(allowed.is_some_and(|allowed| allowed.is_set(cpu) == Ok(true))))
        .collect();
    let said = group.control_mut().all_gather(&own)?;
    let host = &group.members()[group.rank().index()].host;
    let here = group.members().iter().zip(&said);
    let here: Vec<_> = here
        .filter(|(member, _)| member.host == *host)
        .map(|(_, said)| said)
        .collect();
    let may_run = |cpu: &usize| here.iter().any(|said| said.get(*cpu) == Some(&1));
    Ok(Backoff::for_processors(
        here.len(),
        (0..CpuSet::count()).filter(may_run).count(),
    ))
}

fn locations(group: &mut Group, mine: Option<&topology::Member>) -> Result<Vec<topology::Member>, ExchangeError> {
    let mine = mine.map(topology::Member::encode).unwrap_or_default();
    let said = group.control_mut().all_gather(&mine)?;
    let members = group.members().iter().zip(said).zip(0..);
    let location = members.map(|((member, said), rank)| {
        let location = match said.is_empty() {
            true => Some(topology::Member::default()),
            false => topology::Member::decode(&said),
        };
        let location = location.ok_or_else(|| ExchangeError::Misuse {
            rank: Rank(rank),
            reason: "where it is makes no sense to this release: run the same release everywhere".to_owned(),
        })?;
        Ok(topology::Member {
            host: member.host.clone(),
            ..location
        })
    });
    location.collect()
}

/// By rank: the index of its host, in the order of the hosts' lowest ranks.
fn hosts(members: &[topology::Member]) -> Vec<u32> {
    let mut names: Vec<&str> = Vec::new();
    let mut number = |host| match names.iter().position(|name| *name == host) {
        Some(known) => known as u32,
        None => {
            names.push(host);
            names.len() as u32 - 1
        }
    };
    members.iter().map(|member| number(member.host.as_str())).collect()
}

fn share_tuning(mine: &Tuner, group: &mut Group) -> Result<Tuner, CollectiveError> {
    let tuning = match group.rank() {
        Rank(0) => serde_json::to_vec(&SharedTuning::of(mine)).unwrap_or_default(),
        _ => Vec::new(),
    };
    let said = group.control_mut().all_gather(&tuning)?;
    let tuning = said
        .first()
        .and_then(|first| serde_json::from_slice::<SharedTuning>(first).ok());
    let tuner = tuning.and_then(|tuning| tuning.tuner(mine.channels));
    tuner.ok_or_else(|| {
        let reason =
            "rank 0 has said nothing that this release understands: run the same release everywhere".to_owned();
        ExchangeError::Misuse {
            rank: group.rank(),
            reason,
        }
        .into()
    })
}

/// Uses the costs of the soft device between processes of one host.
fn tuner_of(options: &Options) -> Tuner {
    let link = Link::soft_local();
    let mut tuner = Tuner::new(link, link, Compute::default(), options.config.channels);
    tuner.overrides = options.overrides;
    tuner
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_location_is_refused_by_its_rank() {
        let mut groups = Group::local(3).unwrap();
        let mut stranger = groups.pop().unwrap();
        let said = std::thread::scope(|scope| {
            scope.spawn(|| stranger.control_mut().all_gather(b"\x02nonsense").unwrap());
            let threads: Vec<_> = groups
                .iter_mut()
                .map(|group| scope.spawn(|| locations(group, Some(&topology::Member::default()))))
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect::<Vec<_>>()
        });
        for refused in said {
            let said = refused.unwrap_err().to_string();
            assert!(
                said.starts_with("rank 2 cannot send this: where it is makes no sense"),
                "{said}"
            );
        }
    }
}
