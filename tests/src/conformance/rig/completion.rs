//! Completion queues and completions.

use std::ffi::c_int;
use std::fmt;
use std::mem::MaybeUninit;
use std::ptr;
use std::rc::Rc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use doorbell_verbs_sys::*;

use super::{Channel, Device, Errno, Object};

#[derive(Clone)]
pub(in crate::conformance) struct Cq(Rc<Inner>);

struct Inner {
    object: Object<ibv_cq>,
    device: Device,
    _channel: Option<Channel>,
}

impl Device {
    pub(in crate::conformance) fn cq(&self, entries: c_int) -> Result<Cq, Errno> {
        self.cq_with(entries, None, 0, 0)
    }

    /// With a channel, and its cq_context (a number here).
    pub(in crate::conformance) fn cq_with(
        &self,
        entries: c_int,
        channel: Option<&Channel>,
        context: usize,
        vector: c_int,
    ) -> Result<Cq, Errno> {
        let raw = channel.map_or(ptr::null_mut(), Channel::raw);
        let context = ptr::without_provenance_mut(context);
        // SAFETY: context and channel are live, and the queue holds both.
        let cq = unsafe { (self.api().create_cq)(self.raw(), entries, context, raw, vector) };
        self.adopt_cq(cq, channel)
    }

    pub(super) fn adopt_cq(&self, cq: *mut ibv_cq, channel: Option<&Channel>) -> Result<Cq, Errno> {
        Ok(Cq(Rc::new(Inner {
            object: Object::new(self, "completion queue", cq, self.api().destroy_cq)?,
            device: self.clone(),
            _channel: channel.cloned(),
        })))
    }
}

impl Cq {
    pub(in crate::conformance) fn raw(&self) -> *mut ibv_cq {
        self.0.object.get()
    }

    pub(in crate::conformance) fn device(&self) -> &Device {
        &self.0.device
    }

    pub(in crate::conformance) fn destroy(&self) -> Errno {
        self.0.object.destroy()
    }

    /// Releases the pointer, which the caller destroys.
    pub(super) fn take(&self) -> *mut ibv_cq {
        self.0.object.ptr.replace(ptr::null_mut())
    }

    /// Its capacity, at least.
    pub(in crate::conformance) fn capacity(&self) -> c_int {
        // SAFETY: live.
        unsafe { (*self.raw()).cqe }
    }

    pub(in crate::conformance) fn resize(&self, entries: c_int) -> Errno {
        // SAFETY: live.
        Errno(unsafe { (self.device().api().resize_cq)(self.raw(), entries) })
    }

    /// Polls up to `most` completions at once; an error value when the call fails.
    pub(in crate::conformance) fn poll_many(&self, most: usize) -> Result<Vec<ibv_wc>> {
        let mut room = vec![MaybeUninit::<ibv_wc>::uninit(); most];
        // SAFETY: live, with room for `most`.
        let found = unsafe { inline::poll_cq(self.raw(), most as c_int, room.as_mut_ptr().cast()) };
        ensure!(found >= 0 && found as usize <= most, "ibv_poll_cq for {most}: {found}");
        // SAFETY: `found` entries were filled.
        Ok(room[..found as usize]
            .iter()
            .map(|wc| unsafe { wc.assume_init() })
            .collect())
    }

    pub(in crate::conformance) fn poll(&self) -> Result<Option<ibv_wc>> {
        Ok(self.poll_many(1)?.pop())
    }

    pub(in crate::conformance) fn next_within(&self, time: Duration) -> Result<Option<ibv_wc>> {
        let since = Instant::now();
        loop {
            if let Some(wc) = self.poll()? {
                return Ok(Some(wc));
            }
            if since.elapsed() > time {
                return Ok(None);
            }
            thread::yield_now();
        }
    }

    pub(in crate::conformance) fn wait(&self) -> Result<ibv_wc> {
        let time_limit = self.device().time_limit();
        match self.next_within(time_limit)? {
            Some(wc) => Ok(wc),
            None => bail!("no completion within {time_limit:?}"),
        }
    }

    /// The next completion, which must be of this request with this status.
    pub(in crate::conformance) fn wait_for(&self, wr_id: u64, status: ibv_wc_status) -> Result<ibv_wc> {
        let wc = self.wait()?;
        ensure!(
            (wc.wr_id, wc.status) == (wr_id, status),
            "request {} completed with {} instead of request {wr_id} with {}",
            wc.wr_id,
            named(wc.status),
            named(status)
        );
        Ok(wc)
    }

    /// The next completion, which must be a success of this request.
    pub(in crate::conformance) fn done(&self, wr_id: u64) -> Result<ibv_wc> {
        self.wait_for(wr_id, IBV_WC_SUCCESS)
    }

    /// Checks that there is no completion for that time.
    pub(in crate::conformance) fn expect_nothing(&self, time: Duration) -> Result<()> {
        match self.next_within(time)? {
            None => Ok(()),
            Some(wc) => bail!(
                "a completion of request {} that should not be: {}",
                wc.wr_id,
                named(wc.status)
            ),
        }
    }

    /// Checks that there is no completion now.
    pub(in crate::conformance) fn empty(&self) -> Result<()> {
        self.expect_nothing(Duration::ZERO)
    }
}

pub(in crate::conformance) struct Completions<'a>(pub(in crate::conformance) &'a [ibv_wc]);

impl fmt::Display for Completions<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, wc) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}{} {}", wc.wr_id, named(wc.status))?;
        }
        Ok(())
    }
}

/// The immediate data of a completion, in network byte order.
pub(in crate::conformance) fn immediate(wc: &ibv_wc) -> [u8; 4] {
    // SAFETY: both members are 32 bits.
    unsafe { wc.anon_1.imm_data }.to_ne_bytes()
}

/// A status by its name in the C header.
pub(in crate::conformance) fn named(status: ibv_wc_status) -> &'static str {
    const NAMES: [&str; 24] = [
        "SUCCESS",
        "LOC_LEN_ERR",
        "LOC_QP_OP_ERR",
        "LOC_EEC_OP_ERR",
        "LOC_PROT_ERR",
        "WR_FLUSH_ERR",
        "MW_BIND_ERR",
        "BAD_RESP_ERR",
        "LOC_ACCESS_ERR",
        "REM_INV_REQ_ERR",
        "REM_ACCESS_ERR",
        "REM_OP_ERR",
        "RETRY_EXC_ERR",
        "RNR_RETRY_EXC_ERR",
        "LOC_RDD_VIOL_ERR",
        "REM_INV_RD_REQ_ERR",
        "REM_ABORT_ERR",
        "INV_EECN_ERR",
        "INV_EEC_STATE_ERR",
        "FATAL_ERR",
        "RESP_TIMEOUT_ERR",
        "GENERAL_ERR",
        "TM_ERR",
        "TM_RNDV_INCOMPLETE",
    ];
    NAMES.get(status as usize).copied().unwrap_or("a status of no name")
}
