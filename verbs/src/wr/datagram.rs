//! The source and position of a received datagram, from its completion.

use core::ops::Range;

use doorbell_verbs_sys as sys;

use crate::cq::Entry;
use crate::qp::GRH_BYTES;
use crate::types::{Lid, Qpn};

/// A datagram received (IBTA vol 1, 11.4.2.1), behind the [`GRH_BYTES`] bytes of its GRH.
///
/// To reply, use [`reply_to`](crate::AddressHandleBuilder::reply_to) and [`source`](Self::source).
/// By convention both sides use the same Q_Key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(alias = "ibv_wc")]
pub struct Datagram {
    pub(crate) len: u32,
    pub(crate) imm: Option<u32>,
    pub(crate) source: Qpn,
    pub(crate) flags: u32,
    pub(crate) pkey_index: u16,
    pub(crate) slid: u16,
    pub(crate) sl: u8,
    pub(crate) path_bits: u8,
}

impl Datagram {
    pub(crate) fn new(entry: impl Entry, imm: Option<u32>) -> Self {
        Self {
            len: entry.byte_len().saturating_sub(GRH_BYTES as u32),
            imm,
            source: Qpn::truncated(entry.src_qp()),
            flags: entry.wc_flags(),
            pkey_index: entry.pkey_index().unwrap_or(0),
            slid: entry.slid(),
            sl: entry.sl(),
            path_bits: entry.dlid_path_bits(),
        }
    }

    pub(crate) fn to_sys(self) -> sys::ibv_wc {
        // SAFETY: all-zero is a valid value of this struct of integers.
        let mut wc: sys::ibv_wc = unsafe { core::mem::zeroed() };
        wc.status = sys::IBV_WC_SUCCESS;
        wc.opcode = sys::IBV_WC_RECV;
        wc.byte_len = self.len.saturating_add(GRH_BYTES as u32);
        wc.src_qp = self.source.get();
        wc.wc_flags = self.flags;
        wc.pkey_index = self.pkey_index;
        wc.slid = self.slid;
        wc.sl = self.sl;
        wc.dlid_path_bits = self.path_bits;
        wc
    }

    /// The message's length in bytes, without the header.
    #[expect(
        clippy::len_without_is_empty,
        reason = "a datagram may be empty, and is one all the same"
    )]
    #[must_use]
    #[doc(alias = "byte_len")]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// The range of the message in the buffers: `&buffer[datagram.payload()]`.
    #[must_use]
    pub fn payload(&self) -> Range<usize> {
        GRH_BYTES..GRH_BYTES + self.len()
    }

    /// Immediate data, if it carried any.
    #[must_use]
    #[doc(alias = "imm_data")]
    pub fn imm(&self) -> Option<u32> {
        self.imm
    }

    /// The queue pair that sent it.
    #[must_use]
    #[doc(alias = "src_qp")]
    pub fn source(&self) -> Qpn {
        self.source
    }

    /// Whether the first [`GRH_BYTES`] bytes hold its GRH, as always on RoCE; or are undefined.
    #[must_use]
    #[doc(alias = "IBV_WC_GRH")]
    pub fn has_grh(&self) -> bool {
        self.flags & sys::IBV_WC_GRH != 0
    }

    /// The LID of the port that sent it; 0 on RoCE.
    #[must_use]
    #[doc(alias = "slid")]
    pub fn source_lid(&self) -> Lid {
        Lid(self.slid)
    }

    /// Its InfiniBand service level.
    #[must_use]
    #[doc(alias = "sl")]
    pub fn service_level(&self) -> u8 {
        self.sl
    }

    /// The index of its P_Key; 0 from an extended completion queue, which does not report it.
    #[must_use]
    pub fn pkey_index(&self) -> u16 {
        self.pkey_index
    }
}
