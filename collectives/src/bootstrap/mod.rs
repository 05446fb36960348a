//! How processes become a group: they meet by a [`UniqueId`], and each gets a connection to each other.
//!
//! A [`Group`] is what comes of it: this process' [`Rank`], who the others are, and a [`ControlMesh`] between them. What a collective moves goes over queue pairs; the mesh is for what comes before (addresses and keys), beside (who
//! is alive, who has to stop) and after (who is left).

mod error;
mod exchange;
mod id;
mod join;
mod launch;
mod listener;
mod mesh;
mod rendezvous;
mod split;
mod wire;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::thread;
use std::time::Duration;

pub use error::BootstrapError;
pub use exchange::{Exchange, ExchangeError};
pub use id::{Nonce, NotAnId, UniqueId};
pub use launch::{Launch, Launcher, Meeting};
pub use mesh::{ControlMesh, MAX_MESSAGE};
pub use rendezvous::{Rendezvous, Serving};

pub(crate) use mesh::GroupId;
pub(crate) use wire::{Reader, put_text};

use crate::failure::ShrinkError;
use crate::types::Rank;

/// How long a group has to come together, if nothing else was said.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// How a group comes together.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The address for the other ranks to connect to; none is the one by which the rendezvous sees this process.
    pub bind: Option<IpAddr>,
    /// How long it may take.
    pub timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            bind: None,
            timeout: PATIENCE,
        }
    }
}

impl Options {
    /// What the environment says: `DOORBELL_BOOTSTRAP` is the address to use, or the interface whose address it is.
    ///
    /// # Errors
    /// [`BootstrapError::Variable`] if there is no such address or interface.
    pub fn from_env() -> Result<Self, BootstrapError> {
        const VARIABLE: &str = "DOORBELL_BOOTSTRAP";
        let Some(value) = std::env::var(VARIABLE).ok().filter(|value| !value.is_empty()) else {
            return Ok(Self::default());
        };
        let bind = value.parse().ok().or_else(|| address_of(&value));
        let bad = BootstrapError::Variable {
            variable: VARIABLE,
            value,
            expected: "it should be an address of this machine, or an interface that has one and is up",
        };
        Ok(Self {
            bind: Some(bind.ok_or(bad)?),
            ..Self::default()
        })
    }
}

/// The address of an interface: the first of IPv4, or else of IPv6. Those that mean something only together with an interface do not travel, and are passed over.
fn address_of(interface: &str) -> Option<IpAddr> {
    let all = nix::ifaddrs::getifaddrs()
        .ok()?
        .filter(|one| one.interface_name == interface);
    let addresses = all.filter_map(|one| {
        let address = one.address?;
        let four = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
        let six = || {
            address
                .as_sockaddr_in6()
                .map(|v6| v6.ip())
                .filter(|ip| !ip.is_unicast_link_local())
        };
        four.or_else(|| six().map(IpAddr::V6))
    });
    addresses.min_by_key(IpAddr::is_ipv6)
}

/// A process of a group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Member {
    /// The name of its host.
    pub host: String,
    /// Its number there.
    pub process: u32,
}

impl Member {
    /// This process.
    fn this() -> Self {
        let host =
            nix::unistd::gethostname().map_or_else(|_| "unknown".into(), |name| name.to_string_lossy().into_owned());
        Self {
            host,
            process: std::process::id(),
        }
    }
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} on {}", self.process, self.host)
    }
}

/// The processes that make collectives together, seen from one of them.
#[derive(Debug)]
pub struct Group {
    control: ControlMesh,
}

impl Group {
    /// Comes to the rendezvous as `rank` of `ranks`, and returns when all are connected with all.
    ///
    /// # Errors
    /// A [`BootstrapError`] that says who did not come, or who does not want this process and why; never later than `options.timeout` and a moment.
    pub fn join(id: &UniqueId, rank: Rank, ranks: u32, options: &Options) -> Result<Self, BootstrapError> {
        let candidates = join::resolve(id.host(), id.port())?;
        let request = join::JoinRequest {
            nonce: id.nonce(),
            rank,
            ranks,
        };
        Self::join_at(&candidates, request, options)
    }

    /// Does what the launcher said, in the environment: see [`Launch`] for the variables, and [`Options::from_env`].
    ///
    /// # Errors
    /// As [`Launch::from_env`] and [`join`](Self::join).
    pub fn from_env() -> Result<Self, BootstrapError> {
        Launch::from_env()?.join(&Options::from_env()?)
    }

    fn join_at(
        candidates: &[SocketAddr],
        request: join::JoinRequest,
        options: &Options,
    ) -> Result<Self, BootstrapError> {
        let links = join::join(candidates, request, options)?;
        let control = ControlMesh::start(links, request.rank)?;
        Ok(Self { control })
    }

    /// All ranks of a group in this process, for tests and for threads as ranks; they meet over loopback as processes do.
    ///
    /// # Errors
    /// As [`Rendezvous::open`] and [`join`](Self::join).
    pub fn local(ranks: u32) -> Result<Vec<Self>, BootstrapError> {
        let options = Options::default();
        let serving = Rendezvous::open(IpAddr::V4(Ipv4Addr::LOCALHOST), ranks)?.spawn(options.timeout)?;
        let groups = thread::scope(|scope| {
            let join = |rank| {
                let (id, options) = (serving.id(), &options);
                scope.spawn(move || Self::join(id, Rank(rank), ranks, options))
            };
            let threads: Vec<_> = (0..ranks).map(join).collect();
            let groups = threads.into_iter().map(|thread| match thread.join() {
                Ok(group) => group,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            groups.collect::<Result<Vec<_>, _>>()
        })?;
        serving.wait()?;
        Ok(groups)
    }

    /// Divides the group: members of one `colour` are together, in the order of their `key`s, and of their ranks where keys are alike. Without a colour one is in none.
    ///
    /// # Errors
    /// An [`ExchangeError`], on all members or on some: those who have a new group then cannot use it.
    pub fn split(&mut self, colour: Option<u32>, key: i32) -> Result<Option<Self>, ExchangeError> {
        let part = self.control.split(colour, key)?;
        Ok(part.map(|control| Self { control }))
    }

    /// The same members once more, as another group.
    ///
    /// # Errors
    /// As [`split`](Self::split).
    pub fn duplicate(&mut self) -> Result<Self, ExchangeError> {
        let rank = self.rank();
        self.split(Some(0), 0)?.ok_or(ExchangeError::Misuse {
            rank,
            reason: "it has no candidate in its own group".to_owned(),
        })
    }

    /// The members who can and want to go on after a failure, as a group of their own; whoever does not call it too within `timeout` is not in it.
    ///
    /// # Errors
    /// [`ShrinkError`]: the others go on without this one, or there was no agreement in time.
    pub fn shrink(&self, timeout: Duration) -> Result<Self, ShrinkError> {
        self.control.shrink(timeout).map(|control| Self { control })
    }

    /// This process.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.control.rank()
    }

    /// How many there are.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.control.ranks()
    }

    /// Who they are, by rank.
    #[must_use]
    pub fn members(&self) -> &[Member] {
        self.control.members()
    }

    /// The connections to the others.
    #[must_use]
    pub fn control(&self) -> &ControlMesh {
        &self.control
    }

    /// The connections to the others, to exchange something over them.
    #[must_use]
    pub fn control_mut(&mut self) -> &mut ControlMesh {
        &mut self.control
    }
}
