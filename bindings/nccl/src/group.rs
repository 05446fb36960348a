//! Groups: per thread, nested, and done at the outermost end. A call outside of one is a group of
//! its own.
//!
//! The end first waits for the communicators that were initialised in the group, and registers the
//! windows. Then it enqueues, for one communicator after another, the collectives in the order of
//! the calls, and after them all sends and receives as one operation, which progress together: the
//! same order on all ranks.

use std::cell::RefCell;
use std::sync::Arc;

use crate::abi::Status;
use crate::communicator::Communicator;
use crate::failure::Failure;
use crate::operations::{Work, enqueue, read_scalar};
use crate::window::{self, Registration};

#[derive(Default)]
struct Group {
    depth: u32,
    initialised: Vec<Arc<Communicator>>,
    windows: Vec<Registration>,
    work: Vec<(Arc<Communicator>, Work)>,
    /// The first call in it that failed: nothing of it is done then.
    failed: Option<Failure>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

/// `ncclGroupStart`.
pub(crate) fn start() -> Result<Status, Failure> {
    GROUP.with_borrow_mut(|group| group.depth += 1);
    Ok(Status::Success)
}

/// `ncclGroupEnd`.
pub(crate) fn end() -> Result<Status, Failure> {
    let group = GROUP.with_borrow_mut(|group| match group.depth {
        0 => Err(Failure::invalid_usage("ncclGroupEnd without ncclGroupStart")),
        1 => Ok(Some(std::mem::take(group))),
        _ => {
            group.depth -= 1;
            Ok(None)
        }
    })?;
    let Some(Group {
        initialised,
        windows,
        mut work,
        failed,
        ..
    }) = group
    else {
        return Ok(Status::Success);
    };
    if let Some(failure) = failed {
        initialised.iter().for_each(|communicator| communicator.give_up());
        return Err(failure);
    }
    // All are waited for, so that none is left half initialised when this returns.
    let waited = initialised.iter().map(|communicator| communicator.wait());
    waited.fold(Ok(()), Result::and)?;
    window::complete(windows)?;
    launch(&mut work)
}

/// Notes the failure of a call in a group, which fails as a whole.
pub(crate) fn noted<T>(result: Result<T, Failure>) -> Result<T, Failure> {
    result.inspect_err(|failure| {
        GROUP.with_borrow_mut(|group| {
            if group.depth > 0 {
                group.failed.get_or_insert_with(|| failure.clone());
            }
        });
    })
}

/// Waits for the initialisation of a communicator, now or at the end of the group.
pub(crate) fn wait_for(communicator: Arc<Communicator>) -> Result<Status, Failure> {
    let now = GROUP.with_borrow_mut(|group| match group.depth {
        0 => Some(communicator),
        _ => {
            group.initialised.push(communicator);
            None
        }
    });
    match now {
        Some(communicator) => communicator.wait().map(|()| Status::Success),
        None => Ok(Status::Success),
    }
}

/// Registers a window, now or at the end of the group.
pub(crate) fn register(registration: Registration) -> Result<Status, Failure> {
    let now = GROUP.with_borrow_mut(|group| match group.depth {
        0 => Some(registration),
        _ => {
            group.windows.push(registration);
            None
        }
    });
    window::complete(now.into_iter().collect())?;
    Ok(Status::Success)
}

/// Enqueues work, now or at the end of the group.
pub(crate) fn add(communicator: Arc<Communicator>, work: Work) -> Result<Status, Failure> {
    let now = GROUP.with_borrow_mut(|group| match group.depth {
        0 => Some((communicator, work)),
        _ => {
            group.work.push((communicator, work));
            None
        }
    });
    match now {
        Some(work) => launch(&mut [work]),
        None => Ok(Status::Success),
    }
}

fn launch(all: &mut [(Arc<Communicator>, Work)]) -> Result<Status, Failure> {
    for (communicator, work) in &mut *all {
        read_scalar(communicator, work)?;
    }
    for (index, (communicator, _)) in all.iter().enumerate() {
        let is_same = |(other, _): &&(Arc<Communicator>, Work)| Arc::ptr_eq(other, communicator);
        if !all[..index].iter().any(|entry| is_same(&entry)) {
            let work = all[index..].iter().filter(is_same).map(|(_, work)| work);
            enqueue(communicator, work)?;
        }
    }
    Ok(Status::Success)
}
