//! Bootstrap: processes meet at the rendezvous named by a [`UniqueId`] and form a [`Group`] with a
//! full mesh of TCP connections.
//!
//! All connections are authenticated by the group's [`Secret`]. Data of collectives goes over
//! queue pairs; the [`ControlMesh`] carries what is needed before
//! (addresses and keys), beside (failure detection, abort) and after (shrink).

mod error;
mod exchange;
#[doc(hidden)]
pub mod fuzzing;
mod id;
mod join;
mod launch;
mod mesh;
mod peers;
mod registered;
mod rendezvous;
mod split;
mod wire;

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;
use std::{fmt, io, thread};

use doorbell_rendezvous::set_keepalive;
pub use doorbell_rendezvous::{Secret, SecretError};
pub use error::BootstrapError;
pub use exchange::{Exchange, ExchangeError};
pub use id::{NotAnId, UniqueId};
pub use launch::{Launch, Launcher, RendezvousPoint};
pub use mesh::{ControlMesh, GroupControl, MAX_MESSAGE};
pub use rendezvous::{Rendezvous, RendezvousServer};

pub(crate) use mesh::GroupId;
pub(crate) use wire::one_line;

use crate::failure::ShrinkError;
use crate::types::Rank;

/// Default timeout for a group to form.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

/// Options of the bootstrap.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The address for the other ranks to connect to; `None` is the one that the rendezvous sees.
    pub bind: Option<IpAddr>,
    /// Timeout for the group to form.
    pub timeout: Duration,
    /// Whether the rendezvous is open before any rank joins. Where nothing listens, it has ended
    /// then, and a rank does not wait for it.
    pub rendezvous_is_open: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            bind: None,
            timeout: DEFAULT_TIMEOUT,
            rendezvous_is_open: false,
        }
    }
}

impl Options {
    /// Options from the environment: `DOORBELL_BOOTSTRAP` is an address of this host, or an
    /// interface.
    ///
    /// # Errors
    /// [`BootstrapError::Variable`] if there is no such address or interface.
    pub fn from_env() -> Result<Self, BootstrapError> {
        const VARIABLE: &str = "DOORBELL_BOOTSTRAP";
        let Some(value) = doorbell_trust::text_variable(VARIABLE).filter(|value| !value.is_empty()) else {
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

/// The first IPv4 address, else the first IPv6 one. Link-local ones need an interface: skipped.
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

/// Has the kernel end the connection of a peer whose host vanishes, which closes none.
fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    const INTERVAL_S: u32 = 10;
    const PROBES: u32 = 3;
    set_keepalive(stream, INTERVAL_S, INTERVAL_S, PROBES)
}

/// A process of a group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Member {
    /// The name of its host.
    pub host: String,
    /// Its process id.
    pub process: u32,
}

impl Member {
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

/// The processes of a communicator, seen from one of them.
#[derive(Debug)]
pub struct Group {
    control: ControlMesh,
}

impl Group {
    /// Registers at the rendezvous as `rank` of `ranks`, and returns once all pairs of ranks are
    /// connected.
    ///
    /// # Errors
    /// A [`BootstrapError`] that names the missing ranks, or the peer that rejected this one, no
    /// later than `options.timeout`. It comes at once, and names the rank, when one ends that had
    /// registered, and when the rendezvous ends.
    pub fn join(id: &UniqueId, rank: Rank, ranks: u32, options: &Options) -> Result<Self, BootstrapError> {
        let candidates = join::resolve(id.host(), id.port())?;
        let request = join::JoinRequest {
            secret: id.secret(),
            rank,
            ranks,
        };
        Self::join_at(&candidates, request, options)
    }

    /// Joins as the launcher's environment says: see [`Launch`] for the variables, and
    /// [`Options::from_env`].
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
        let links = join::join(candidates, &request, options)?;
        let control = ControlMesh::start(links, request.rank)?;
        Ok(Self { control })
    }

    /// All ranks of a group in this process, for tests and for threads as ranks; they bootstrap
    /// over loopback as processes do.
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

    /// Splits the group: members of one `colour` form a group, ordered by `key` and then by rank. A
    /// member without a colour is in none.
    ///
    /// # Errors
    /// An [`ExchangeError`], on all members or on some; a new group that some members lack is
    /// unusable.
    pub fn split(&mut self, colour: Option<u32>, key: i32) -> Result<Option<Self>, ExchangeError> {
        let part = self.control.split(colour, key)?;
        Ok(part.map(Self::of))
    }

    /// A second group of the same members.
    ///
    /// # Errors
    /// As [`split`](Self::split).
    pub fn duplicate(&mut self) -> Result<Self, ExchangeError> {
        let rank = self.rank();
        self.split(Some(0), 0)?.ok_or(ExchangeError::Misuse {
            rank,
            reason: "it is not in its own group".to_owned(),
        })
    }

    /// After a failure, forms a group of the survivors. A member that does not call it within
    /// `timeout` is excluded.
    ///
    /// # Errors
    /// [`ShrinkError`]: the others continue without this member, or there was no agreement in time.
    pub fn shrink(&self, timeout: Duration) -> Result<Self, ShrinkError> {
        self.control.shrink(&[], timeout).map(Self::of)
    }

    pub(crate) fn of(control: ControlMesh) -> Self {
        Self { control }
    }

    /// The rank of this process.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.control.rank()
    }

    /// The number of ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.control.ranks()
    }

    /// The members, by rank.
    #[must_use]
    pub fn members(&self) -> &[Member] {
        self.control.members()
    }

    /// The control mesh.
    #[must_use]
    pub fn control(&self) -> &ControlMesh {
        &self.control
    }

    /// The control mesh, for exchanges.
    #[must_use]
    pub fn control_mut(&mut self) -> &mut ControlMesh {
        &mut self.control
    }
}
