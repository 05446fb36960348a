//! Communicators that are derived from another one: split, shrink and grow.
//!
//! The ranks of the parent are connected already, and what they exchange for it, they exchange in
//! the order of the calls: each takes a ticket, for which the thread of its initialisation waits.
//! The parent remains usable meanwhile and afterwards.

use std::collections::BTreeSet;
use std::ffi::{c_int, c_void};
use std::slice;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use doorbell_collectives::{Communicator as HostCommunicator, Rank};

use crate::abi::{Config, Opaque, Status, UniqueId, present};
use crate::communicator::{Communicator, Origin, Ready, Request, meet};
use crate::failure::Failure;
use crate::operations::rank;
use crate::{group, handles, unique_id};

const NO_COLOUR: c_int = -1;
const SHRINK_ABORT: c_int = 1;
/// The rank with which a rank that has a communicator lets it grow.
const KEEPS_RANK: c_int = -1;

/// A ticket lock of a communicator, for its calls that exchange something between all ranks.
#[derive(Default)]
pub(crate) struct Tickets {
    numbers: Mutex<Numbers>,
    changed: Condvar,
}

#[derive(Default)]
struct Numbers {
    taken: u64,
    /// All before it are given back.
    current: u64,
    /// Those after it that are given back already.
    over: BTreeSet<u64>,
}

/// A call's ticket, which is given back when it is dropped.
pub(crate) struct Ticket {
    communicator: Arc<Communicator>,
    number: u64,
}

impl Ticket {
    /// The communicator's next ticket, if it is initialised.
    pub(crate) fn take(communicator: Arc<Communicator>) -> Result<Self, Failure> {
        communicator.ready()?;
        let mut numbers = communicator
            .tickets
            .numbers
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let number = numbers.taken;
        numbers.taken += 1;
        drop(numbers);
        Ok(Self { communicator, number })
    }

    /// Waits until all earlier tickets are given back.
    pub(crate) fn wait(&self) -> Result<&Ready, Failure> {
        let Tickets { numbers, changed } = &self.communicator.tickets;
        let numbers = numbers.lock().unwrap_or_else(PoisonError::into_inner);
        drop(changed.wait_while(numbers, |numbers| numbers.current != self.number));
        self.communicator.initialised()
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let Tickets { numbers, changed } = &self.communicator.tickets;
        let mut numbers = numbers.lock().unwrap_or_else(PoisonError::into_inner);
        let Numbers { current, over, .. } = &mut *numbers;
        over.insert(self.number);
        while over.remove(current) {
            *current += 1;
        }
        changed.notify_all();
    }
}

/// What a communicator becomes of its parent's ranks.
pub(crate) struct Derivation {
    ticket: Ticket,
    kind: Kind,
}

enum Kind {
    Split { colour: Option<u32>, key: i32 },
    Shrink { excluded: BTreeSet<Rank> },
    Grow { id: Option<UniqueId>, ranks: u32 },
}

impl Derivation {
    pub(crate) fn is_blocking(&self) -> bool {
        self.ticket.communicator.config.blocking
    }

    /// Whether this rank is in the new communicator.
    pub(crate) fn is_member(&self) -> bool {
        !matches!(self.kind, Kind::Split { colour: None, .. })
    }

    /// Connects the ranks of the new communicator.
    pub(crate) fn run(self) -> Result<Option<HostCommunicator>, Failure> {
        let Self { ticket, kind } = self;
        let parent = ticket.wait()?.gpu.host();
        match kind {
            Kind::Split { colour, key } => Ok(parent.split(colour, key)?),
            Kind::Shrink { excluded } => {
                let without: Vec<Rank> = excluded.into_iter().collect();
                let host = parent.shrink_without(&without)?;
                let remaining = parent.size() as usize - without.len();
                match host.size() as usize == remaining {
                    true => Ok(Some(host)),
                    false => Err(Failure::new(
                        Status::RemoteError,
                        format!(
                            "{remaining} ranks were to remain, and {} do: a rank that is not excluded has failed",
                            host.size()
                        ),
                    )),
                }
            }
            Kind::Grow { id, ranks } => {
                let own = id.map(|id| id.0.map(|byte| byte as u8));
                let known = parent.exchange(own.as_ref().map_or(&[], |id| &id[..]))?;
                let id = known.iter().find(|id| !id.is_empty());
                let Some(id) = id.and_then(|id| unique_id::parse(id)) else {
                    return Err(Failure::invalid_usage(
                        "no rank has given ncclCommGrow the id of ncclCommGetUniqueId",
                    ));
                };
                let rank = parent.rank();
                drop(ticket);
                Ok(Some(meet(&id, rank, ranks)?))
            }
        }
    }
}

/// `ncclCommSplit`.
///
/// # Safety
/// As of [`derive`].
pub(crate) unsafe fn split(
    parent: Opaque,
    colour: c_int,
    key: c_int,
    into: *mut Opaque,
    config: *const c_void,
) -> Result<Status, Failure> {
    let colour = match u32::try_from(colour) {
        Ok(colour) => Ok(Some(colour)),
        Err(_) if colour == NO_COLOUR => Ok(None),
        Err(_) => Err(Failure::invalid_argument(format!(
            "{colour} is no colour: those are numbers from 0, and NCCL_SPLIT_NOCOLOR"
        ))),
    };
    // SAFETY: of `into` and `config` the caller has promised what `derive` needs.
    unsafe { derive(parent, into, config, |_, _| Ok(Kind::Split { colour: colour?, key })) }
}

/// `ncclCommShrink`.
///
/// # Safety
/// As of [`derive`]; and `excluded` is null or points to `count` numbers.
pub(crate) unsafe fn shrink(
    parent: Opaque,
    (excluded, count): (*const c_int, c_int),
    into: *mut Opaque,
    config: *const c_void,
    flags: c_int,
) -> Result<Status, Failure> {
    let kind = |communicator: &Communicator, parent: &Ready| {
        present(excluded, "excludeRanksList")?;
        let count = usize::try_from(count).ok().filter(|count| *count > 0);
        let count = count.ok_or_else(|| Failure::invalid_argument("no rank is to be excluded"))?;
        // SAFETY: not null, so `count` numbers.
        let numbers = unsafe { slice::from_raw_parts(excluded, count) };
        let ranks = numbers
            .iter()
            .map(|number| rank(*number, parent.gpu.size(), "excluded rank"));
        let excluded = ranks.collect::<Result<BTreeSet<_>, _>>()?;
        if excluded.contains(&parent.gpu.rank()) {
            return Err(Failure::invalid_argument(format!(
                "rank {} cannot exclude itself: ranks that are excluded do not call ncclCommShrink",
                parent.gpu.rank()
            )));
        }
        // A rank that fails in it has no place in another one either.
        if communicator.shrunk.swap(true, Ordering::Relaxed) {
            return Err(Failure::invalid_usage(
                "the communicator was shrunk before: shrink the one that was made of it",
            ));
        }
        if flags & SHRINK_ABORT != 0 {
            parent.gpu.abort("it called ncclCommShrink with NCCL_SHRINK_ABORT");
        }
        Ok(Kind::Shrink { excluded })
    };
    // SAFETY: of `into` and `config` the caller has promised what `derive` needs.
    unsafe { derive(parent, into, config, kind) }
}

/// `ncclCommGrow` of a rank that has a communicator.
///
/// # Safety
/// As of [`derive`]; and `id` is null or points to an id.
pub(crate) unsafe fn grow(
    parent: Opaque,
    ranks: c_int,
    id: *const UniqueId,
    own: c_int,
    into: *mut Opaque,
    config: *const c_void,
) -> Result<Status, Failure> {
    let kind = |_: &Communicator, parent: &Ready| {
        let (before, rank) = (parent.gpu.size(), parent.gpu.rank());
        if own != KEEPS_RANK && own != rank.0 as c_int {
            return Err(Failure::invalid_argument(format!(
                "rank {rank} cannot become rank {own}: give -1"
            )));
        }
        let ranks = u32::try_from(ranks).ok().filter(|ranks| *ranks > before);
        let ranks = ranks.ok_or_else(|| Failure::invalid_argument(format!("there are {before} ranks already")))?;
        // SAFETY: not null, so an id.
        let id = (!id.is_null()).then(|| unsafe { *id });
        Ok(Kind::Grow { id, ranks })
    };
    // SAFETY: of `into` and `config` the caller has promised what `derive` needs.
    unsafe { derive(parent, into, config, kind) }
}

/// # Safety
/// `into` is null or may be written; `config` is null or as for [`Config::read`].
unsafe fn derive(
    parent: Opaque,
    into: *mut Opaque,
    config: *const c_void,
    kind: impl FnOnce(&Communicator, &Ready) -> Result<Kind, Failure>,
) -> Result<Status, Failure> {
    group::noted((|| {
        present(into, "newcomm")?;
        let parent = handles::get(parent)?;
        let config = match config.is_null() {
            true => parent.config,
            // SAFETY: not null, so a configuration.
            false => unsafe { Config::read(config)? },
        };
        let device = parent.device;
        let kind = kind(&parent, parent.ready()?)?;
        let ticket = Ticket::take(parent)?;
        let origin = Origin::Derived(Derivation { ticket, kind });
        let request = Request { origin, device, config };
        // SAFETY: `into` is not null, so it may be written.
        unsafe { Communicator::create(request, into) }
    })())
}
