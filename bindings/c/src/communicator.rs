//! Communicators on host memory.

use core::ffi::{c_char, c_void};
use core::mem::MaybeUninit;
use core::time::Duration;
use std::sync::Arc;
use std::time::Instant;

use doorbell::collectives::bootstrap::{self, Launch, Launcher, RendezvousPoint, Secret};
use doorbell::collectives::{CollectiveError, Communicator, Element, Options, Rank, ReduceOp};

use crate::argument::{end, number, object, optional_text, result, store, text, timeout};
use crate::device::doorbell_device;
use crate::elements::{apart, bytes, elements, elements_mut, of_all, typed};
use crate::memory::{Region, doorbell_memory};
use crate::status::{Failure, doorbell_status, run};

/// The type of an element. The values are NCCL's.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum doorbell_type {
    /// Signed, 8 bits.
    DOORBELL_INT8 = 0,
    /// Unsigned, 8 bits.
    DOORBELL_UINT8 = 1,
    /// Signed, 32 bits.
    DOORBELL_INT32 = 2,
    /// Unsigned, 32 bits.
    DOORBELL_UINT32 = 3,
    /// Signed, 64 bits.
    DOORBELL_INT64 = 4,
    /// Unsigned, 64 bits.
    DOORBELL_UINT64 = 5,
    /// IEEE 754 binary16.
    DOORBELL_FLOAT16 = 6,
    /// IEEE 754 binary32, float.
    DOORBELL_FLOAT32 = 7,
    /// IEEE 754 binary64, double.
    DOORBELL_FLOAT64 = 8,
    /// bfloat16: the upper half of a binary32.
    DOORBELL_BFLOAT16 = 9,
    /// 8 bits: sign, 4 of exponent, 3 of mantissa (OCP FP8, E4M3).
    DOORBELL_FLOAT8_E4M3 = 10,
    /// 8 bits: sign, 5 of exponent, 2 of mantissa (OCP FP8, E5M2).
    DOORBELL_FLOAT8_E5M2 = 11,
}

/// A reduction. The values are NCCL's. Floats of 16 and 8 bits are reduced as float, and rounded
/// once.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum doorbell_reduction {
    /// The sum; integers wrap.
    DOORBELL_SUM = 0,
    /// The product; integers wrap.
    DOORBELL_PROD = 1,
    /// The maximum.
    DOORBELL_MAX = 2,
    /// The minimum.
    DOORBELL_MIN = 3,
    /// The sum, divided by the number of ranks; integers truncate towards zero.
    DOORBELL_AVG = 4,
}

/// One rank of a communicator. Ended by doorbell_comm_destroy().
///
/// All ranks call the same collectives in the same order, with the same counts, types, reductions
/// and roots. Each call returns when it is complete on this rank: its output is valid, and its
/// input may be changed. A call of which an argument is invalid has begun nothing. Any other error
/// is a failure of the communicator, on all ranks and for all later calls, within the time-out it
/// was made with; doorbell_comm_failure() names the rank to blame, the same on all ranks.
pub struct doorbell_comm {
    comm: Communicator,
}

/// Makes a rank of a communicator on a device. All ranks call it, each with its rank, from 0 to
/// ranks - 1.
///
/// They meet at rank 0's address, "HOST:PORT", which rank 0 listens on; where the port is taken, on
/// one of the seven after it. secret is a text of at least 16 characters that only they have, or
/// NULL for that of the variable DOORBELL_SECRET or of the file that DOORBELL_SECRET_FILE names, or
/// else that of ~/.config/doorbell/secret, which is made where there is none. timeout_ms is for the
/// ranks to meet, and then for each operation.
///
/// DOORBELL_TIMED_OUT if some rank does not come in time, which rank 0's text names;
/// DOORBELL_CONNECTION_FAILED if rank 0 has refused this one: its time has passed before, or the
/// secrets differ.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_comm_create(
    device: *const doorbell_device,
    rank: u32,
    ranks: u32,
    address: *const c_char,
    secret: *const c_char,
    timeout_ms: u32,
    comm: *mut *mut doorbell_comm,
) -> doorbell_status {
    let make = || {
        // SAFETY: a string or null, by contract.
        let (host, port) = host_and_port(unsafe { text(address, "address") }?)?;
        // SAFETY: a string or null, by contract.
        let secret = secret_of(unsafe { optional_text(secret, "secret") }?, port)?;
        let launch = Launch {
            launcher: Launcher::Doorbell,
            rank: Rank(rank),
            ranks,
            local_rank: None,
            rendezvous: RendezvousPoint::Derived { host, port, secret },
        };
        if rank >= ranks {
            return Err(Failure::invalid(format!(
                "rank {rank} is not one of {ranks}: ranks count from 0"
            )));
        }
        // SAFETY: a handle or null, by contract.
        create(unsafe { object(device, "device") }?, &launch, timeout_ms)
    };
    // SAFETY: the caller's place for a handle, by contract.
    run(|| unsafe { store(comm, "comm", make) })
}

/// As doorbell_comm_create(), with the rank, the ranks and the address that mpirun, srun or
/// torchrun has set in the environment, or that DOORBELL_RANK, DOORBELL_RANKS and DOORBELL_ID are.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_comm_create_from_env(
    device: *const doorbell_device,
    timeout_ms: u32,
    comm: *mut *mut doorbell_comm,
) -> doorbell_status {
    let make = || {
        let launch = Launch::from_env().map_err(CollectiveError::from)?;
        // SAFETY: a handle or null, by contract.
        create(unsafe { object(device, "device") }?, &launch, timeout_ms)
    };
    // SAFETY: the caller's place for a handle, by contract.
    run(|| unsafe { store(comm, "comm", make) })
}

fn create(device: &doorbell_device, launch: &Launch, timeout_ms: u32) -> Result<doorbell_comm, Failure> {
    let deadline = match timeout(timeout_ms) {
        Some(Duration::ZERO) => return Err(Failure::invalid("timeout_ms is 0, in which no ranks can meet")),
        timeout => timeout.unwrap_or(Duration::MAX),
    };
    let meeting = bootstrap::Options {
        timeout: deadline,
        ..bootstrap::Options::from_env().map_err(CollectiveError::from)?
    };
    let options = Options {
        deadline,
        ..Options::from_env()?
    };
    let since = Instant::now();
    let group = launch.join(&meeting).map_err(|error| {
        // Rank 0 refuses those that have come when its time has passed.
        Failure::from(CollectiveError::from(error)).or_timed_out(since.elapsed() >= deadline)
    })?;
    let comm = Communicator::new(&[device.pd.context()], group, options)?;
    Ok(doorbell_comm { comm })
}

fn host_and_port(address: &str) -> Result<(String, u16), Failure> {
    let wrong = || Failure::invalid(format!("address {address:?} is not HOST:PORT"));
    let (host, port) = address.rsplit_once(':').ok_or_else(wrong)?;
    let port = port.parse().ok().filter(|port| *port != 0).ok_or_else(wrong)?;
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    Ok((bare.unwrap_or(host).to_owned(), port))
}

fn secret_of(given: Option<&str>, port: u16) -> Result<Secret, Failure> {
    // Hosts may know rank 0 by different names, but for the port.
    let words = ["doorbell_comm_create", &port.to_string()];
    let Some(given) = given else {
        return Secret::from_env(&words).map_err(Failure::invalid);
    };
    const MIN: usize = 16;
    if given.len() < MIN {
        return Err(Failure::invalid(format!(
            "secret should have at least {MIN} characters"
        )));
    }
    Ok(Secret::derived(&[&words[..], &[given]].concat()))
}

/// The rank of this end; 0 of NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_comm_rank(comm: *const doorbell_comm) -> u32 {
    // SAFETY: a handle or null, by contract.
    unsafe { object(comm, "comm") }.map_or(0, |comm| comm.comm.rank().0)
}

/// The number of ranks; 0 of NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_comm_size(comm: *const doorbell_comm) -> u32 {
    // SAFETY: a handle or null, by contract.
    unsafe { object(comm, "comm") }.map_or(0, |comm| comm.comm.size())
}

/// Allocates and registers memory of this length for operations of the communicator, initially zero
/// and aligned for every type. Operations whose input and output are in it, anywhere, copy nothing;
/// others copy through memory of the communicator. It is no connection's, and may be used after the
/// communicator has ended.
///
/// DOORBELL_NO_MEMORY if there is none, or the limit of locked memory (ulimit -l) is reached.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_comm_alloc(
    comm: *const doorbell_comm,
    length: usize,
    memory: *mut *mut doorbell_memory,
) -> doorbell_status {
    let make = || {
        // SAFETY: a handle or null, by contract.
        let comm = &unsafe { object(comm, "comm") }?.comm;
        let region = Region::of_communicator(comm.alloc(length)?);
        Ok(doorbell_memory {
            region: Arc::new(region),
        })
    };
    // SAFETY: the caller's place for a handle, by contract.
    run(|| unsafe { store(memory, "memory", make) })
}

/// Whether and why the communicator has failed: DOORBELL_OK if it has not. Otherwise the status and
/// doorbell_last_error() are those of the failure, and rank, unless it is NULL, is the rank to
/// blame, or -1 where that is not known.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_comm_failure(comm: *const doorbell_comm, rank: *mut i64) -> doorbell_status {
    run(|| {
        // SAFETY: a handle or null, by contract.
        let comm = unsafe { object(comm, "comm") }?;
        let Some(failure) = comm.comm.failure() else {
            return Ok(());
        };
        // SAFETY: the caller's place or null, by contract.
        if let Ok(rank) = unsafe { result(rank, "rank") } {
            rank.write(failure.culprit().map_or(-1, |rank| rank.0.into()));
        }
        Err(failure.into())
    })
}

/// Fails the communicator on all ranks, with this reason, which may be NULL. Returns at once; may
/// be called while another thread waits in an operation of it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_comm_abort(comm: *const doorbell_comm, reason: *const c_char) -> doorbell_status {
    run(|| {
        // SAFETY: a handle or null, by contract.
        let comm = unsafe { object(comm, "comm") }?;
        // SAFETY: a string or null, by contract.
        let reason = unsafe { optional_text(reason, "reason") }?;
        comm.comm.abort(reason.unwrap_or("doorbell_comm_abort() was called"));
        Ok(())
    })
}

/// Ends the handle of a communicator: completes what is in flight, and returns when all ranks have
/// called it.
///
/// The failure of the communicator, or DOORBELL_TIMED_OUT if a rank does not call it in time; the
/// handle is ended all the same.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_comm_destroy(comm: *mut doorbell_comm) -> doorbell_status {
    run(|| {
        // SAFETY: a handle that ends here, by contract.
        match unsafe { end(comm) } {
            Some(comm) => Ok(comm.comm.destroy()?),
            None => Ok(()),
        }
    })
}

/// Returns when all ranks have called it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_barrier(comm: *const doorbell_comm) -> doorbell_status {
    run(|| {
        // SAFETY: a handle or null, by contract.
        let comm = unsafe { object(comm, "comm") }?;
        Ok(comm.comm.barrier().wait()?)
    })
}

/// Each rank gets the reduction of all ranks' input: count elements. In place if output is input;
/// otherwise they must not overlap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_all_reduce(
    comm: *const doorbell_comm,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    r#type: MaybeUninit<doorbell_type>,
    reduction: MaybeUninit<doorbell_reduction>,
) -> doorbell_status {
    run(|| {
        // SAFETY: a handle or null, by contract.
        let comm = &unsafe { object(comm, "comm") }?.comm;
        let op = reduction_of(number(reduction))?;
        // SAFETY: memory of these lengths that is the call's, by contract.
        typed!(number(r#type), T => unsafe { all_reduce::<T>(comm, input, output, count, op) })
    })
}

/// Each rank gets its part of the reduction of all ranks' input, which has count elements for each
/// rank, by rank; output has count. In place if output is the own part of input; otherwise they
/// must not overlap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_reduce_scatter(
    comm: *const doorbell_comm,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    r#type: MaybeUninit<doorbell_type>,
    reduction: MaybeUninit<doorbell_reduction>,
) -> doorbell_status {
    run(|| {
        // SAFETY: a handle or null, by contract.
        let comm = &unsafe { object(comm, "comm") }?.comm;
        let op = reduction_of(number(reduction))?;
        // SAFETY: memory of these lengths that is the call's, by contract.
        typed!(number(r#type), T => unsafe { reduce_scatter::<T>(comm, input, output, count, op) })
    })
}

/// Each rank gets all ranks' input of count elements each, by rank. In place if input is the own
/// part of output; otherwise they must not overlap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_all_gather(
    comm: *const doorbell_comm,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    r#type: MaybeUninit<doorbell_type>,
) -> doorbell_status {
    run(|| {
        // SAFETY: a handle or null, by contract.
        let comm = &unsafe { object(comm, "comm") }?.comm;
        let part = bytes(count, number(r#type))?;
        let whole = of_all(part, comm)?;
        let own = output.cast::<u8>().wrapping_add(part * comm.rank().index());
        // SAFETY: memory of these lengths that is the call's, by contract.
        unsafe {
            let all = elements_mut::<u8>(output, whole, "output")?;
            if core::ptr::eq(input.cast(), own) {
                return Ok(comm.all_gather(all).wait()?);
            }
            apart(input, part, output, whole)?;
            Ok(comm
                .all_gather_into(elements::<u8>(input, part, "input")?, all)
                .wait()?)
        }
    })
}

/// All ranks get the root's count elements at data.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_broadcast(
    comm: *const doorbell_comm,
    data: *mut c_void,
    count: usize,
    r#type: MaybeUninit<doorbell_type>,
    root: u32,
) -> doorbell_status {
    run(|| {
        // SAFETY: a handle or null, by contract.
        let comm = &unsafe { object(comm, "comm") }?.comm;
        let len = bytes(count, number(r#type))?;
        // SAFETY: memory of this length that is the call's, by contract.
        let data = unsafe { elements_mut::<u8>(data, len, "data") }?;
        Ok(comm.broadcast(data, Rank(root)).wait()?)
    })
}

/// Each rank gets its part of each rank's input: input and output have count elements for each
/// rank, by rank, and must not overlap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_all_to_all(
    comm: *const doorbell_comm,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    r#type: MaybeUninit<doorbell_type>,
) -> doorbell_status {
    run(|| {
        // SAFETY: a handle or null, by contract.
        let comm = &unsafe { object(comm, "comm") }?.comm;
        let whole = of_all(bytes(count, number(r#type))?, comm)?;
        apart(input, whole, output, whole)?;
        // SAFETY: memory of this length that is the call's, by contract; it does not overlap.
        let (input, output) = unsafe {
            (
                elements::<u8>(input, whole, "input")?,
                elements_mut::<u8>(output, whole, "output")?,
            )
        };
        Ok(comm.all_to_all(input, output).wait()?)
    })
}

/// Sends count elements at data to rank to, which calls doorbell_comm_receive() for as many. Only
/// these two call. Returns when they have arrived; so two ranks that both send first wait for each
/// other until they time out.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_comm_send(
    comm: *const doorbell_comm,
    data: *const c_void,
    count: usize,
    r#type: MaybeUninit<doorbell_type>,
    to: u32,
) -> doorbell_status {
    run(|| {
        // SAFETY: a handle or null, by contract.
        let comm = &unsafe { object(comm, "comm") }?.comm;
        let len = bytes(count, number(r#type))?;
        // SAFETY: memory of this length that is the call's, by contract.
        let data = unsafe { elements::<u8>(data, len, "data") }?;
        other_rank(comm, to)?;
        Ok(comm.send(data, Rank(to)).wait()?)
    })
}

/// Receives the count elements that rank from sends to this one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_comm_receive(
    comm: *const doorbell_comm,
    data: *mut c_void,
    count: usize,
    r#type: MaybeUninit<doorbell_type>,
    from: u32,
) -> doorbell_status {
    run(|| {
        // SAFETY: a handle or null, by contract.
        let comm = &unsafe { object(comm, "comm") }?.comm;
        let len = bytes(count, number(r#type))?;
        // SAFETY: memory of this length that is the call's, by contract.
        let data = unsafe { elements_mut::<u8>(data, len, "data") }?;
        other_rank(comm, from)?;
        Ok(comm.receive(data, Rank(from)).wait()?)
    })
}

/// A call that waits cannot send to itself.
fn other_rank(comm: &Communicator, peer: u32) -> Result<(), Failure> {
    if peer == comm.rank().0 {
        return Err(Failure::invalid(format!("rank {peer} is this rank itself")));
    }
    Ok(())
}

fn reduction_of(number: u32) -> Result<ReduceOp, Failure> {
    use self::doorbell_reduction::*;
    let all = [
        (DOORBELL_SUM, ReduceOp::Sum),
        (DOORBELL_PROD, ReduceOp::Prod),
        (DOORBELL_MAX, ReduceOp::Max),
        (DOORBELL_MIN, ReduceOp::Min),
        (DOORBELL_AVG, ReduceOp::Avg),
    ];
    let found = all.into_iter().find(|(value, _)| *value as u32 == number);
    let found = found.map(|(_, op)| op);
    found.ok_or_else(|| Failure::invalid(format!("reduction {number} is no doorbell_reduction")))
}

/// # Safety
/// As of [`elements`] and [`elements_mut`], for `count` elements each.
unsafe fn all_reduce<T: Element>(
    comm: &Communicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    op: ReduceOp,
) -> Result<(), Failure> {
    // SAFETY: `count` elements each, which nothing else uses; the input is none of the output's.
    unsafe {
        let reduced = elements_mut::<T>(output, count, "output")?;
        if input == output.cast_const() {
            return Ok(comm.all_reduce(reduced, op).wait()?);
        }
        apart(input, size_of_val(reduced), output, size_of_val(reduced))?;
        let given = elements::<T>(input, count, "input")?;
        Ok(comm.all_reduce_into(given, reduced, op).wait()?)
    }
}

/// # Safety
/// As of [`elements`] for the input, `count` for each rank, and of [`elements_mut`] for the output,
/// `count`. If the output is the own part of the input, the whole input may be written.
unsafe fn reduce_scatter<T: Element>(
    comm: &Communicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    op: ReduceOp,
) -> Result<(), Failure> {
    let all = of_all(count, comm)?;
    let own = input.cast::<T>().wrapping_add(count * comm.rank().index());
    // SAFETY: so many elements each, which nothing else uses; unless it is in place, where one
    // slice is of both, the output is none of the input's.
    unsafe {
        if core::ptr::eq(own, output.cast()) {
            let data = elements_mut::<T>(input.cast_mut(), all, "input")?;
            return Ok(comm.reduce_scatter(data, op).wait()?);
        }
        let given = elements::<T>(input, all, "input")?;
        apart(input, size_of_val(given), output, count * size_of::<T>())?;
        let reduced = elements_mut::<T>(output, count, "output")?;
        Ok(comm.reduce_scatter_into(given, reduced, op).wait()?)
    }
}
