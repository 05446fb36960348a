//! The functions by name: each macro makes a function's two symbols, `ncclX` and `pncclX`.
//!
//! All follow NCCL's contract: pointers are null or valid for what the function does with them, a
//! stream is one of the communicator's device, and memory is kept until its operation is done.

use std::ffi::{c_char, c_int, c_void};

use doorbell_collectives::executor::Direction;
use doorbell_collectives::plan::Collective;

use crate::abi::{Config, Opaque, Status, Team, UniqueId, data_type, present, store};
use crate::communicator::{Communicator, Request, driver};
use crate::failure::{Failure, boundary, describe, show};
use crate::operations::{Arguments, collective, message};
use crate::{derivation, group, handles, memory, unique_id, window};

/// The version that is reported, and the variable that sets another.
const VERSION: c_int = 23007;
const VERSION_VARIABLE: &str = "DOORBELL_NCCL_VERSION";

macro_rules! symbols {
    ($($name:literal: fn($($argument:ident: $type:ty),*) -> $result:ty $body:block)*) => {$(
        const _: () = {
            // SAFETY: no other symbol of the program has NCCL's names, unless it replaces them on
            // purpose; the contract of each is NCCL's.
            #[unsafe(export_name = concat!("nccl", $name))]
            unsafe extern "C" fn function($($argument: $type),*) -> $result $body

            // SAFETY: as above.
            #[unsafe(export_name = concat!("pnccl", $name))]
            unsafe extern "C" fn profiled($($argument: $type),*) -> $result $body
        };
    )*};
}

/// Functions that return a result; the body is a `Result<Status, Failure>`.
macro_rules! functions {
    ($($name:literal: fn($($argument:ident: $type:ty),*) $body:block)*) => {
        symbols! { $($name: fn($($argument: $type),*) -> c_int { boundary(|| $body) })* }
    };
}

/// Functions that this library does not do, and why; the arguments do not matter.
macro_rules! unsupported {
    ($($why:literal: $($name:literal)*;)*) => {$(
        symbols! { $($name: fn() -> c_int { refuse($name, $why) })* }
    )*};
}

fn refuse(name: &str, why: &str) -> c_int {
    boundary(|| Err(Failure::invalid_usage(format!("nccl{name} is not supported: {why}"))))
}

// The library and its communicators.
functions! {
    "GetVersion": fn(version: *mut c_int) {
        // SAFETY: NCCL's contract.
        unsafe { store(version, reported_version()?, "version") }?;
        Ok(Status::Success)
    }
    "GetUniqueId": fn(id: *mut UniqueId) {
        present(id, "uniqueId")?;
        // SAFETY: NCCL's contract.
        unsafe { store(id, unique_id::create()?, "uniqueId") }?;
        Ok(Status::Success)
    }
    "CommInitRank": fn(comm: *mut Opaque, ranks: c_int, id: UniqueId, rank: c_int) {
        // SAFETY: NCCL's contract.
        unsafe { initialise(comm, ranks, &id, rank, std::ptr::null()) }
    }
    "CommInitRankConfig": fn(comm: *mut Opaque, ranks: c_int, id: UniqueId, rank: c_int, config: *const c_void) {
        // SAFETY: NCCL's contract.
        unsafe { initialise(comm, ranks, &id, rank, config) }
    }
    "CommInitRankScalable": fn(
        comm: *mut Opaque, ranks: c_int, rank: c_int, count: c_int, ids: *const UniqueId, config: *const c_void
    ) {
        present(ids, "commIds")?;
        if count < 1 {
            return Err(Failure::invalid_argument("there is no unique id"));
        }
        // SAFETY: NCCL's contract: there is a first one, the same on all ranks.
        unsafe { initialise(comm, ranks, &*ids, rank, config) }
    }
    "CommSplit": fn(comm: Opaque, colour: c_int, key: c_int, into: *mut Opaque, config: *const c_void) {
        // SAFETY: NCCL's contract.
        unsafe { derivation::split(comm, colour, key, into, config) }
    }
    "CommShrink": fn(
        comm: Opaque, excluded: *const c_int, count: c_int, into: *mut Opaque, config: *const c_void, flags: c_int
    ) {
        // SAFETY: NCCL's contract.
        unsafe { derivation::shrink(comm, (excluded, count), into, config, flags) }
    }
    "CommGetUniqueId": fn(comm: Opaque, id: *mut UniqueId) {
        handles::get(comm)?;
        present(id, "uniqueId")?;
        // SAFETY: NCCL's contract.
        unsafe { store(id, unique_id::create()?, "uniqueId") }?;
        Ok(Status::Success)
    }
    "CommGrow": fn(
        comm: Opaque, ranks: c_int, id: *const UniqueId, rank: c_int, into: *mut Opaque, config: *const c_void
    ) {
        if comm.is_null() {
            group::noted(present(id, "uniqueId"))?;
            // SAFETY: NCCL's contract.
            return unsafe { initialise(into, ranks, &*id, rank, config) };
        }
        // SAFETY: NCCL's contract.
        unsafe { derivation::grow(comm, ranks, id, rank, into, config) }
    }
    "CommInitAll": fn(comms: *mut Opaque, count: c_int, devices: *const c_int) {
        // SAFETY: NCCL's contract.
        unsafe { initialise_all(comms, count, devices) }
    }
    "CommCount": fn(comm: Opaque, count: *mut c_int) {
        // SAFETY: NCCL's contract.
        unsafe { store(count, handles::get(comm)?.initialised()?.gpu.size() as c_int, "count") }?;
        Ok(Status::Success)
    }
    "CommUserRank": fn(comm: Opaque, rank: *mut c_int) {
        // SAFETY: NCCL's contract.
        unsafe { store(rank, handles::get(comm)?.initialised()?.gpu.rank().0 as c_int, "rank") }?;
        Ok(Status::Success)
    }
    "CommCuDevice": fn(comm: Opaque, device: *mut c_int) {
        // SAFETY: NCCL's contract.
        unsafe { store(device, handles::get(comm)?.device.ordinal() as c_int, "device") }?;
        Ok(Status::Success)
    }
    "CommGetAsyncError": fn(comm: Opaque, error: *mut c_int) {
        let state = match handles::get(comm)?.state() {
            Ok(status) => status,
            Err(failure) => failure.status,
        };
        // SAFETY: NCCL's contract.
        unsafe { store(error, state as c_int, "asyncError") }?;
        Ok(Status::Success)
    }
    "CommFinalize": fn(comm: Opaque) { handles::get(comm)?.finalize() }
    "CommDestroy": fn(comm: Opaque) { handles::remove(comm)?.destroy() }
    "CommAbort": fn(comm: Opaque) { handles::remove(comm)?.abort() }
    "GroupStart": fn() { group::start() }
    "GroupEnd": fn() { group::end() }
    "RedOpCreatePreMulSum": fn(op: *mut c_int, scalar: *const c_void, data: c_int, residence: c_int, comm: Opaque) {
        let communicator = handles::get(comm)?;
        present(op, "op")?;
        present(scalar, "scalar")?;
        // SAFETY: NCCL's contract.
        unsafe { store(op, communicator.operators.create(scalar, data_type(data)?, residence)?, "op") }?;
        Ok(Status::Success)
    }
    "RedOpDestroy": fn(op: c_int, comm: Opaque) {
        handles::get(comm)?.operators.destroy(op)?;
        Ok(Status::Success)
    }
}

// Memory. ncclCommRegister is local, and so has nothing to give to the other ranks: windows have.
functions! {
    "MemAlloc": fn(pointer: *mut Opaque, bytes: usize) {
        present(pointer, "ptr")?;
        // SAFETY: NCCL's contract.
        unsafe { store(pointer, memory::allocate(bytes)?, "ptr") }?;
        Ok(Status::Success)
    }
    "MemFree": fn(pointer: Opaque) { memory::free(pointer) }
    "CommRegister": fn(comm: Opaque, buffer: Opaque, bytes: usize, handle: *mut Opaque) {
        handles::get(comm)?;
        present(buffer, "buff")?;
        if bytes == 0 {
            return Err(Failure::invalid_argument("size is 0"));
        }
        // SAFETY: NCCL's contract.
        unsafe { store(handle, buffer, "handle") }?;
        Ok(Status::Success)
    }
    "CommDeregister": fn(comm: Opaque, handle: Opaque) {
        handles::get(comm)?;
        present(handle, "handle")?;
        Ok(Status::Success)
    }
}

// Windows.
functions! {
    "CommWindowRegister": fn(comm: Opaque, buffer: Opaque, bytes: usize, win: *mut Opaque, flags: c_int) {
        // SAFETY: NCCL's contract.
        unsafe { window::register(comm, (buffer, bytes), win, flags) }
    }
    "CommWindowDeregister": fn(comm: Opaque, win: Opaque) { window::deregister(comm, win) }
    "WinGetUserPtr": fn(comm: Opaque, win: Opaque, pointer: *mut Opaque) {
        // SAFETY: NCCL's contract.
        unsafe { store(pointer, window::user_pointer(comm, win)?, "outUserPtr") }?;
        Ok(Status::Success)
    }
}

// Operations.
functions! {
    "AllReduce": fn(input: *const c_void, output: Opaque, count: usize, data: c_int, op: c_int, comm: Opaque, stream: Opaque) {
        let arguments = Arguments { operator: Some(op), ..plain(Collective::AllReduce, input, output, count, data) };
        collective(&arguments, comm, stream)
    }
    "ReduceScatter": fn(input: *const c_void, output: Opaque, count: usize, data: c_int, op: c_int, comm: Opaque, stream: Opaque) {
        let arguments = Arguments { operator: Some(op), ..plain(Collective::ReduceScatter, input, output, count, data) };
        collective(&arguments, comm, stream)
    }
    "Reduce": fn(
        input: *const c_void, output: Opaque, count: usize, data: c_int, op: c_int, root: c_int, comm: Opaque, stream: Opaque
    ) {
        let arguments = plain(Collective::Reduce, input, output, count, data);
        collective(&Arguments { operator: Some(op), root: Some(root), ..arguments }, comm, stream)
    }
    "AllGather": fn(input: *const c_void, output: Opaque, count: usize, data: c_int, comm: Opaque, stream: Opaque) {
        collective(&plain(Collective::AllGather, input, output, count, data), comm, stream)
    }
    "AlltoAll": fn(input: *const c_void, output: Opaque, count: usize, data: c_int, comm: Opaque, stream: Opaque) {
        collective(&plain(Collective::AllToAll, input, output, count, data), comm, stream)
    }
    "Broadcast": fn(
        input: *const c_void, output: Opaque, count: usize, data: c_int, root: c_int, comm: Opaque, stream: Opaque
    ) {
        let arguments = plain(Collective::Broadcast, input, output, count, data);
        collective(&Arguments { root: Some(root), ..arguments }, comm, stream)
    }
    "Bcast": fn(buffer: Opaque, count: usize, data: c_int, root: c_int, comm: Opaque, stream: Opaque) {
        let arguments = plain(Collective::Broadcast, buffer, buffer, count, data);
        collective(&Arguments { root: Some(root), ..arguments }, comm, stream)
    }
    "Gather": fn(input: *const c_void, output: Opaque, count: usize, data: c_int, root: c_int, comm: Opaque, stream: Opaque) {
        let arguments = plain(Collective::Gather, input, output, count, data);
        collective(&Arguments { root: Some(root), ..arguments }, comm, stream)
    }
    "Scatter": fn(input: *const c_void, output: Opaque, count: usize, data: c_int, root: c_int, comm: Opaque, stream: Opaque) {
        let arguments = plain(Collective::Scatter, input, output, count, data);
        collective(&Arguments { root: Some(root), ..arguments }, comm, stream)
    }
    "Send": fn(buffer: *const c_void, count: usize, data: c_int, peer: c_int, comm: Opaque, stream: Opaque) {
        message(Direction::Send, buffer, (count, data), peer, comm, stream)
    }
    "Recv": fn(buffer: Opaque, count: usize, data: c_int, peer: c_int, comm: Opaque, stream: Opaque) {
        message(Direction::Receive, buffer, (count, data), peer, comm, stream)
    }
}

symbols! {
    "GetErrorString": fn(status: c_int) -> *const c_char { describe(status) }
    "GetLastError": fn(comm: Opaque) -> *const c_char {
        let failure = handles::get(comm).ok().and_then(|communicator| communicator.state().err());
        show(failure.map(|failure| failure.text))
    }
    // Deprecated: it re-reads variables that only NCCL has.
    "ResetDebugInit": fn() -> () {}
    "ParamDumpAll": fn() -> () {}
}

unsupported! {
    "ncclCommShrink with NCCL_SHRINK_ABORT ends operations, too": "CommRevoke";
    "it has no memory that could be given back": "CommSuspend" "CommResume" "CommMemStats";
    "it has no one-sided operations": "PutSignal" "Signal" "WaitSignal";
    "it has no settings per call: use the function without Config":
        "AllReduceConfig" "BroadcastConfig" "ReduceConfig" "AllGatherConfig" "ReduceScatterConfig" "AlltoAllConfig"
        "GatherConfig" "ScatterConfig";
    "it estimates no times": "GroupSimulateEnd";
    "ranks are authenticated, and their data is not encrypted": "SetEncryption";
    "it has no parameters of NCCL":
        "ParamBind" "ParamGet" "ParamGetAllParameterKeys" "ParamGetI16" "ParamGetI32" "ParamGetI64" "ParamGetI8"
        "ParamGetParameter" "ParamGetStr" "ParamGetU16" "ParamGetU32" "ParamGetU64" "ParamGetU8";
    "kernels of programs cannot communicate by it (NCCL's device API)":
        "CommQueryProperties" "DevCommCreate" "DevCommDestroy" "GetCftDeviceLeInfo" "GetLsaDevicePointer"
        "GetLsaMultimemDevicePointer" "GetMultimemDeviceLeInfo" "GetMultimemDevicePointer" "GetPeerDeviceLeInfo"
        "GetPeerDevicePointer" "GinBarrierCreateRequirement" "GinInboxA2ACreateRequirement"
        "GinOutboxCreateRequirement" "LLA2ACreateRequirement" "LsaBarrierCreateRequirement";
}

/// Functions of the device API that return something else than a result: nothing, and no rank.
macro_rules! device_api {
    ($type:ty = $value:expr; $($name:literal)*) => {
        symbols! { $($name: fn() -> $type {
            refuse($name, "kernels of programs cannot communicate by it (NCCL's device API)");
            $value
        })* }
    };
}
device_api! { Team = Team::EMPTY; "TeamCft" "TeamCftMultimem" "TeamLsa" "TeamRail" "TeamWorld" }
device_api! { c_int = -1; "TeamRankToLsa" "TeamRankToWorld" }
device_api! { c_int = 0; "LLA2ACalcSlots" }

// It has no twin in NCCL, either. SAFETY: as of the other symbols.
#[unsafe(export_name = "ncclResetDebugInitInternal")]
extern "C" fn reset_debug_init_internal() {}

/// A collective without operator and root.
fn plain(collective: Collective, input: *const c_void, output: Opaque, count: usize, data: c_int) -> Arguments {
    Arguments {
        collective,
        input,
        output,
        count,
        data,
        operator: None,
        root: None,
    }
}

fn reported_version() -> Result<c_int, Failure> {
    let Some(text) = doorbell_trust::text_variable(VERSION_VARIABLE).filter(|text| !text.is_empty()) else {
        return Ok(VERSION);
    };
    text.parse().map_err(|_| {
        Failure::invalid_usage(format!(
            "{VERSION_VARIABLE} is {text:?}: it is a number such as {VERSION}"
        ))
    })
}

/// # Safety
/// NCCL's contract of `ncclCommInitRankConfig`.
unsafe fn initialise(
    comm: *mut Opaque,
    ranks: c_int,
    id: &UniqueId,
    rank: c_int,
    config: *const c_void,
) -> Result<Status, Failure> {
    group::noted((|| {
        present(comm, "comm")?;
        // SAFETY: the caller's promise.
        let config = unsafe { Config::read(config)? };
        let request = Request::new(id, rank, ranks, config)?;
        // SAFETY: the caller's promise.
        unsafe { Communicator::create(request, comm) }
    })())
}

/// # Safety
/// NCCL's contract of `ncclCommInitAll`: there are `count` communicators, and devices unless null.
unsafe fn initialise_all(comms: *mut Opaque, count: c_int, devices: *const c_int) -> Result<Status, Failure> {
    present(comms, "comm")?;
    let id = unique_id::create()?;
    let mut begun = Vec::new();
    group::start()?;
    for rank in 0..count {
        let created = group::noted((|| {
            let device = match devices.is_null() {
                true => rank,
                // SAFETY: the caller's promise.
                false => unsafe { devices.add(rank as usize).read() },
            };
            let device = usize::try_from(device).unwrap_or(usize::MAX);
            let device = driver()?.device(device);
            let device = device.map_err(|error| Failure::invalid_argument(error.to_string()))?;
            let request = Request::on(device, &id, rank, count, Config::default())?;
            // SAFETY: the caller's promise.
            unsafe {
                Communicator::create(request, comms.add(rank as usize))?;
                Ok(comms.add(rank as usize).read())
            }
        })());
        match created {
            Ok(handle) => begun.push(handle),
            Err(_) => break,
        }
    }
    group::end().inspect_err(|_| begun.into_iter().for_each(|handle| drop(handles::remove(handle))))
}
