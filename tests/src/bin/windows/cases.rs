//! Operations across the wire, each case over a connection of its own, which a refusal ends.

use anyhow::{Context, Result, ensure};
use doorbell_verbs_sys::*;

use crate::end::{Connection, End, LEN, Window, request};

const ALL: u32 = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
/// The window spans several packets, and starts and ends inside one.
const AT: usize = 5000;
const SIZE: usize = 5001;
/// The peer's source or destination of an operation.
const SCRATCH: usize = 0;
/// The key of no window and no region.
const NO_KEY: u32 = 0x1234_5678;

#[derive(Clone, Copy, Debug)]
struct Attempt {
    opcode: ibv_wr_opcode,
    at: i64,
    len: usize,
}

const fn attempt(opcode: ibv_wr_opcode, at: i64, len: usize) -> Attempt {
    Attempt { opcode, at, len }
}

const WRITE: Attempt = attempt(IBV_WR_RDMA_WRITE, 0, SIZE);

/// Runs every case as `owner` of the windows or as the peer; `soft`: the owner is a soft device.
pub(crate) fn run(end: &mut End, owner: bool, soft: bool) -> Result<usize> {
    let mut count = 0;
    for kind in [IBV_MW_TYPE_1, IBV_MW_TYPE_2] {
        let mut case = |name: &str, run: &mut dyn FnMut(&mut End) -> Result<()>| {
            count += 1;
            let role = if owner { "owner" } else { "peer" };
            run(end).with_context(|| format!("{name}, window of type {kind}, as {role}"))
        };
        case("every operation", &mut |end| every_operation(end, owner, kind))?;
        for (access, attempt) in WITHOUT_RIGHT {
            let name = format!("{attempt:?} with access {access:#x}");
            case(&name, &mut |end| refused(end, owner, kind, access, attempt))?;
        }
        case("unbound", &mut |end| unbound(end, owner, kind))?;
    }
    for len in [0, 100, 3000] {
        count += 1;
        invalidated(end, owner, soft, len).with_context(|| format!("SEND of {len} bytes with invalidate"))?;
    }
    for former in [false, true] {
        count += 1;
        wrongly_invalidated(end, owner, soft, former).context("SEND with invalidate of a wrong key")?;
    }
    Ok(count)
}

/// Accesses that these rights do not allow.
const WITHOUT_RIGHT: [(u32, Attempt); 3] = [
    (IBV_ACCESS_REMOTE_READ, attempt(IBV_WR_RDMA_WRITE, 0, 8)),
    (IBV_ACCESS_REMOTE_WRITE, attempt(IBV_WR_RDMA_READ, 0, 8)),
    (IBV_ACCESS_REMOTE_WRITE, attempt(IBV_WR_ATOMIC_CMP_AND_SWP, 0, 8)),
];

fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let byte = |at: usize| ((seed << 32 | at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8;
    (0..len).map(byte).collect()
}

/// Passes the window's address and rkey to the peer; the peer's side returns what it received.
fn offer(end: &mut End, window: Option<&Window>) -> Result<(u64, u32)> {
    let (addr, rkey) = window.map_or((0, 0), |window| (end.base.addr(AT), window.rkey()));
    let addr_theirs = u64::from_be_bytes(end.channel.exchange(addr.to_be_bytes())?);
    let rkey_theirs = u32::from_be_bytes(end.channel.exchange(rkey.to_be_bytes())?);
    Ok(if window.is_some() {
        (addr, rkey)
    } else {
        (addr_theirs, rkey_theirs)
    })
}

/// A connection, and on the owner's side a bound window over memory with a pattern; and its address
/// and rkey. In this order, so that the window is dropped first: rxe (Linux 6.1) hangs when a queue
/// pair with a bound type 2 window is destroyed.
fn prepared(
    end: &mut End,
    owner: bool,
    kind: ibv_mw_type,
    access: u32,
) -> Result<(Connection, Option<Window>, (u64, u32))> {
    let connection = end.connect()?;
    end.base.fill(0, &pattern(LEN, u64::from(owner)));
    let mut window = None;
    if owner {
        let made = end.window(kind)?;
        expect(
            &connection.bind(&made, end.range(AT, SIZE, access))?,
            IBV_WC_SUCCESS,
            IBV_WC_BIND_MW,
        )?;
        ensure!(made.rkey() != end.base.rkey(), "window and region have one key");
        window = Some(made);
    }
    let target = offer(end, window.as_ref())?;
    Ok((connection, window, target))
}

fn expect(wc: &ibv_wc, status: ibv_wc_status, opcode: ibv_wc_opcode) -> Result<()> {
    ensure!(
        wc.status == status,
        "a completion of status {} instead of {status}",
        wc.status
    );
    ensure!(
        status != IBV_WC_SUCCESS || wc.opcode == opcode,
        "a completion of opcode {}",
        wc.opcode
    );
    Ok(())
}

fn act(end: &End, connection: &Connection, attempt: Attempt, (addr, rkey): (u64, u32)) -> Result<ibv_wc_status> {
    let remote_addr = addr.wrapping_add_signed(attempt.at);
    let mut wr = request(attempt.opcode);
    match attempt.opcode {
        IBV_WR_ATOMIC_FETCH_AND_ADD | IBV_WR_ATOMIC_CMP_AND_SWP => {
            wr.wr.atomic = ibv_send_wr_atomic {
                remote_addr,
                compare_add: 7,
                swap: 9,
                rkey,
            };
        }
        _ => wr.wr.rdma = ibv_send_wr_rdma { remote_addr, rkey },
    }
    Ok(connection.complete(wr, end.base.element(SCRATCH, attempt.len))?.status)
}

/// The peer's access is refused; the owner's memory is unchanged.
fn refusal(end: &mut End, owner: bool, connection: &Connection, attempt: Attempt, target: (u64, u32)) -> Result<()> {
    end.channel.barrier()?;
    if !owner {
        let status = act(end, connection, attempt, target)?;
        ensure!(status == IBV_WC_REM_ACCESS_ERR, "status {status} instead of a refusal");
    }
    end.channel.barrier()?;
    if owner {
        ensure!(end.bytes() == pattern(LEN, 1), "memory has changed");
    }
    Ok(())
}

fn every_operation(end: &mut End, owner: bool, kind: ibv_mw_type) -> Result<()> {
    let (connection, _window, target) = prepared(end, owner, kind, ALL)?;
    // The first aligned word in the window.
    let word = (AT.next_multiple_of(8) - AT) as i64;
    if !owner {
        end.base.fill(SCRATCH, &pattern(SIZE, 5));
        ensure!(
            act(end, &connection, WRITE, target)? == IBV_WC_SUCCESS,
            "the WRITE failed"
        );
    }
    end.channel.barrier()?;
    let mut wanted = pattern(LEN, 1);
    wanted[AT..AT + SIZE].copy_from_slice(&pattern(SIZE, 5));
    if owner {
        ensure!(end.bytes() == wanted, "memory is not as written");
        end.base.fill(AT, &pattern(SIZE, 6));
        end.base.fill(AT + word as usize, &7_u64.to_ne_bytes());
    }
    end.channel.barrier()?;
    if !owner {
        let read = attempt(IBV_WR_RDMA_READ, 0, SIZE);
        ensure!(
            act(end, &connection, read, target)? == IBV_WC_SUCCESS,
            "the READ failed"
        );
        let mut wanted = pattern(SIZE, 6);
        wanted[word as usize..word as usize + 8].copy_from_slice(&7_u64.to_ne_bytes());
        ensure!(end.bytes()[SCRATCH..SCRATCH + SIZE] == wanted, "what was read is wrong");
        for (opcode, before) in [(IBV_WR_ATOMIC_CMP_AND_SWP, 7_u64), (IBV_WR_ATOMIC_FETCH_AND_ADD, 9)] {
            let status = act(end, &connection, attempt(opcode, word, 8), target)?;
            ensure!(status == IBV_WC_SUCCESS, "the atomic {opcode} failed with {status}");
            ensure!(
                end.bytes()[..8] == before.to_ne_bytes(),
                "the atomic {opcode} gave a wrong value"
            );
        }
    }
    end.channel.barrier()?;
    if owner {
        let at = AT + word as usize;
        ensure!(
            end.bytes()[at..at + 8] == 16_u64.to_ne_bytes(),
            "the atomics left a wrong value"
        );
    }
    end.channel.barrier()
}

fn refused(end: &mut End, owner: bool, kind: ibv_mw_type, access: u32, attempt: Attempt) -> Result<()> {
    let (connection, _window, target) = prepared(end, owner, kind, access)?;
    refusal(end, owner, &connection, attempt, target)
}

fn invalidate(opcode: ibv_wr_opcode, rkey: u32) -> ibv_send_wr {
    let mut wr = request(opcode);
    wr.anon_1.invalidate_rkey = rkey;
    wr
}

/// The owner revokes the window: by binding it to length 0, or by invalidating its key.
fn unbound(end: &mut End, owner: bool, kind: ibv_mw_type) -> Result<()> {
    let (connection, window, target) = prepared(end, owner, kind, ALL)?;
    if let Some(window) = &window {
        if kind == IBV_MW_TYPE_1 {
            let wc = connection.bind(window, end.range(AT, 0, 0))?;
            expect(&wc, IBV_WC_SUCCESS, IBV_WC_BIND_MW)?;
        } else {
            let wc = connection.complete(invalidate(IBV_WR_LOCAL_INV, window.rkey()), end.base.element(0, 0))?;
            expect(&wc, IBV_WC_SUCCESS, IBV_WC_LOCAL_INV)?;
        }
    }
    refusal(end, owner, &connection, WRITE, target)
}

fn invalidated(end: &mut End, owner: bool, soft: bool, len: usize) -> Result<()> {
    let (connection, window, target) = prepared(end, owner, IBV_MW_TYPE_2, ALL)?;
    if owner {
        connection.receive(end.base.element(SCRATCH, 4000))?;
    }
    end.channel.barrier()?;
    if owner {
        let wc = connection.received()?;
        expect(&wc, IBV_WC_SUCCESS, IBV_WC_RECV)?;
        // rxe (Linux 6.1) passes the kernel's value of the flag on.
        let flag = if soft { IBV_WC_WITH_INV } else { IBV_WC_IP_CSUM_OK };
        ensure!(wc.wc_flags & flag != 0, "flags {:#x}", wc.wc_flags);
        // SAFETY: the flag says that this member was written.
        let rkey = unsafe { wc.anon_1.invalidated_rkey };
        ensure!(
            window.as_ref().is_some_and(|window| window.rkey() == rkey),
            "the key {rkey:#x}"
        );
        ensure!(wc.byte_len as usize == len, "{} bytes", wc.byte_len);
        ensure!(
            end.bytes()[SCRATCH..SCRATCH + len] == pattern(LEN, 0)[..len],
            "the message is wrong"
        );
        end.base.fill(0, &pattern(LEN, 1));
    } else {
        let wc = connection.complete(
            invalidate(IBV_WR_SEND_WITH_INV, target.1),
            end.base.element(SCRATCH, len),
        )?;
        expect(&wc, IBV_WC_SUCCESS, IBV_WC_SEND)?;
    }
    refusal(end, owner, &connection, WRITE, target)
}

/// The peer invalidates a wrong key: a `former` one of this window, or an unknown one.
fn wrongly_invalidated(end: &mut End, owner: bool, soft: bool, former: bool) -> Result<()> {
    let (connection, _window, (_, rkey)) = prepared(end, owner, IBV_MW_TYPE_2, ALL)?;
    if owner {
        connection.receive(end.base.element(SCRATCH, 100))?;
    }
    let key = if former { rkey ^ 0xff } else { NO_KEY };
    if owner {
        let wc = connection.received()?;
        ensure!(wc.status == IBV_WC_REM_INV_REQ_ERR, "status {}", wc.status);
    } else {
        let wc = connection.complete(invalidate(IBV_WR_SEND_WITH_INV, key), end.base.element(SCRATCH, 0))?;
        // rxe (Linux 6.1) acknowledges the message before it fails.
        let wanted = if soft { IBV_WC_REM_ACCESS_ERR } else { IBV_WC_SUCCESS };
        ensure!(wc.status == wanted, "status {} instead of {wanted}", wc.status);
    }
    end.channel.barrier()
}
