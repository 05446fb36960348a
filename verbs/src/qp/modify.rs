//! Modifying a queue pair in use, as far as its state allows (`attributes`), and the SQD state.

use core::marker::PhantomData;
use std::io;

use doorbell_verbs_sys as sys;

use super::attributes::QpState;
use super::backend::Backend;
use super::connected::QueuePair;
use super::object::{QpObject, zeroed_attr};
use super::query::{PathAttr, PathMigration, QueuePairAttr, RemoteRights};
use super::transport::{Connected, Reliable, Transport, TransportKind, UnreliableDatagram};
use crate::error::QueuePairError;
use crate::types::QKey;

impl<T: Transport, B: Backend> QueuePair<T, B> {
    /// The current state (ibv_query_qp(3)); the device may enter ERR, UC and UD SQE, by itself.
    ///
    /// # Errors
    /// When the query fails.
    #[doc(alias("ibv_qp_state", "IBV_QP_STATE"))]
    pub fn state(&self) -> Result<QpState, QueuePairError> {
        self.object.state()
    }

    /// All attributes (ibv_query_qp(3)).
    ///
    /// # Errors
    /// When the query fails.
    #[doc(alias = "ibv_query_qp")]
    pub fn query(&self) -> Result<QueuePairAttr, QueuePairError> {
        self.object.query()
    }

    /// Starts a change of attributes: `qp.modify().min_rnr_timer(14).apply()?` (ibv_modify_qp(3)).
    #[doc(alias = "ibv_modify_qp")]
    pub fn modify(&mut self) -> ModifyQueuePair<'_, T> {
        ModifyQueuePair {
            object: &self.object,
            link: &mut self.link,
            attr: zeroed_attr(),
            mask: 0,
            error: None,
            transport: PhantomData,
        }
    }

    /// Drains the send queue: RTS to SQD (IBTA vol 1, 10.3.1.5). Requests posted meanwhile wait.
    /// After [`SendQueueDrained`](crate::QueuePairEvent::SendQueueDrained) most attributes may be
    /// modified; [`resume`](Self::resume) returns to RTS.
    ///
    /// # Errors
    /// When it is not in RTS, or the device does not support SQD.
    #[doc(alias("IBV_QPS_SQD", "SQD"))]
    pub fn drain(&mut self) -> Result<(), QueuePairError> {
        let mut attr = zeroed_attr();
        attr.en_sqd_async_notify = 1;
        self.object.transition(
            (QpState::Rts, QpState::Sqd),
            attr,
            sys::IBV_QP_EN_SQD_ASYNC_NOTIFY,
            |_| Vec::new(),
        )
    }

    /// Returns to RTS: after [`drain`](Self::drain), once drained; with UC and UD also from SQE,
    /// which a failed send has caused.
    ///
    /// # Errors
    /// When it is in another state, or still draining.
    #[doc(alias = "IBV_QPS_RTS")]
    pub fn resume(&mut self) -> Result<(), QueuePairError> {
        let from = self.state()?;
        self.object
            .transition((from, QpState::Rts), zeroed_attr(), 0, |_| self.object.draining_note())
    }

    /// Moves it to ERR: all requests in flight complete, as
    /// [`Flushed`](crate::CompletionStatus::Flushed) unless they were already done.
    ///
    /// # Errors
    /// When the device refuses.
    #[doc(alias = "IBV_QPS_ERR")]
    pub fn flush(&mut self) -> Result<(), QueuePairError> {
        self.object
            .transition((QpState::Rts, QpState::Err), zeroed_attr(), 0, |_| Vec::new())
    }
}

/// A change of attributes (ibv_modify_qp(3)). RTS allows few, [SQD](QueuePair::drain) most.
#[must_use = "a change does nothing until apply() is called"]
#[doc(alias("ibv_modify_qp", "ibv_qp_attr", "ibv_qp_attr_mask"))]
pub struct ModifyQueuePair<'q, T: Transport> {
    object: &'q QpObject,
    link: &'q mut T::Link,
    attr: sys::ibv_qp_attr,
    mask: sys::ibv_qp_attr_mask,
    error: Option<QueuePairError>,
    transport: PhantomData<T>,
}

impl<T: Transport> ModifyQueuePair<'_, T> {
    fn bounded(mut self, what: &'static str, value: u8, max: u8) -> Self {
        if value > max && self.error.is_none() {
            self.error = Some(QueuePairError::Range {
                object: self.object.name(),
                what,
                requested: value,
                max,
            });
        }
        self
    }

    /// The index of its P_Key; in SQD only.
    #[doc(alias = "IBV_QP_PKEY_INDEX")]
    pub fn pkey_index(mut self, index: u16) -> Self {
        self.attr.pkey_index = index;
        self.mask |= sys::IBV_QP_PKEY_INDEX;
        self
    }

    /// Applies the change.
    ///
    /// # Errors
    /// When a value, the state or the device does not allow the change: nothing is modified then.
    #[doc(alias = "ibv_modify_qp")]
    pub fn apply(self) -> Result<(), QueuePairError> {
        if let Some(error) = self.error {
            return Err(error);
        }
        self.object.modify(self.attr, self.mask, |error| match error.kind() {
            io::ErrorKind::Unsupported => vec!["the device cannot change this".to_owned()],
            _ => self.object.draining_note(),
        })?;
        T::apply(self.link, &self.attr, self.mask);
        Ok(())
    }
}

impl<T: Connected> ModifyQueuePair<'_, T> {
    /// What the peer may do; replaces all rights. With UC only WRITE or nothing.
    #[doc(alias("IBV_QP_ACCESS_FLAGS", "qp_access_flags"))]
    pub fn rights(mut self, rights: RemoteRights) -> Self {
        if T::KIND == TransportKind::Uc && (rights.read || rights.atomic) && self.error.is_none() {
            self.error = Some(QueuePairError::NotOfTransport {
                transport: T::KIND,
                setting: "rights to READ or use atomics",
            });
        }
        self.attr.qp_access_flags = rights.to_sys();
        self.mask |= sys::IBV_QP_ACCESS_FLAGS;
        self
    }

    /// The path to the peer; in SQD only. Made from the result of [`query`](QueuePair::query).
    #[doc(alias("IBV_QP_AV", "ah_attr"))]
    pub fn path(mut self, path: PathAttr) -> Self {
        self.attr.ah_attr = path.to_sys();
        self.mask |= sys::IBV_QP_AV;
        self
    }

    /// An alternate path to the peer for automatic path migration (APM), with its P_Key index, and
    /// with RC its local ACK timeout (IBTA vol 1, 17.2.8). Few devices support it; RoCE does not.
    #[doc(alias("IBV_QP_ALT_PATH", "alt_ah_attr"))]
    pub fn alternate_path(mut self, path: PathAttr, pkey_index: u16, timeout: u8) -> Self {
        self.attr.alt_ah_attr = path.to_sys();
        self.attr.alt_port_num = path.port;
        self.attr.alt_pkey_index = pkey_index;
        self.attr.alt_timeout = timeout;
        self.mask |= sys::IBV_QP_ALT_PATH;
        self.bounded("the alternate path's timeout", timeout, MAX_5_BITS)
    }

    /// The path migration state: [`Rearm`](PathMigration::Rearm) after setting an alternate path,
    /// [`Migrated`](PathMigration::Migrated) to fail over to it now.
    #[doc(alias("IBV_QP_PATH_MIG_STATE", "path_mig_state"))]
    pub fn migration(mut self, state: PathMigration) -> Self {
        self.attr.path_mig_state = state.to_sys();
        self.mask |= sys::IBV_QP_PATH_MIG_STATE;
        self
    }
}

/// The highest value of a 5-bit field, such as a timeout.
const MAX_5_BITS: u8 = 31;
/// The highest value of a 3-bit field, such as a retry count.
const MAX_3_BITS: u8 = 7;

impl<T: Reliable> ModifyQueuePair<'_, T> {
    /// As [`QueuePairBuilder::min_rnr_timer`](crate::QueuePairBuilder::min_rnr_timer).
    #[doc(alias = "IBV_QP_MIN_RNR_TIMER")]
    pub fn min_rnr_timer(mut self, code: u8) -> Self {
        self.attr.min_rnr_timer = code;
        self.mask |= sys::IBV_QP_MIN_RNR_TIMER;
        self.bounded("min_rnr_timer", code, MAX_5_BITS)
    }

    /// As [`QueuePairBuilder::timeout`](crate::QueuePairBuilder::timeout); in SQD only.
    #[doc(alias = "IBV_QP_TIMEOUT")]
    pub fn timeout(mut self, exponent: u8) -> Self {
        self.attr.timeout = exponent;
        self.mask |= sys::IBV_QP_TIMEOUT;
        self.bounded("timeout", exponent, MAX_5_BITS)
    }

    /// As [`QueuePairBuilder::retry_count`](crate::QueuePairBuilder::retry_count); in SQD only.
    #[doc(alias("IBV_QP_RETRY_CNT", "retry_cnt"))]
    pub fn retry_count(mut self, retries: u8) -> Self {
        self.attr.retry_cnt = retries;
        self.mask |= sys::IBV_QP_RETRY_CNT;
        self.bounded("retry_count", retries, MAX_3_BITS)
    }

    /// As [`QueuePairBuilder::rnr_retry`](crate::QueuePairBuilder::rnr_retry); in SQD only.
    #[doc(alias = "IBV_QP_RNR_RETRY")]
    pub fn rnr_retry(mut self, retries: u8) -> Self {
        self.attr.rnr_retry = retries;
        self.mask |= sys::IBV_QP_RNR_RETRY;
        self.bounded("rnr_retry", retries, MAX_3_BITS)
    }

    /// READs and atomics outstanding as requester, at most what the peer serves; in SQD only.
    #[doc(alias = "IBV_QP_MAX_QP_RD_ATOMIC")]
    pub fn max_rd_atomic(mut self, requests: u8) -> Self {
        self.attr.max_rd_atomic = requests;
        self.mask |= sys::IBV_QP_MAX_QP_RD_ATOMIC;
        let max = self.object.pd().context.attr.max_qp_init_rd_atomic;
        self.bounded("max_rd_atomic", requests, max)
    }

    /// The READs and atomics to serve at once as responder; in SQD only.
    #[doc(alias = "IBV_QP_MAX_DEST_RD_ATOMIC")]
    pub fn max_dest_rd_atomic(mut self, requests: u8) -> Self {
        self.attr.max_dest_rd_atomic = requests;
        self.mask |= sys::IBV_QP_MAX_DEST_RD_ATOMIC;
        let max = self.object.pd().context.attr.max_rd_atomic;
        self.bounded("max_dest_rd_atomic", requests, max)
    }
}

impl ModifyQueuePair<'_, UnreliableDatagram> {
    /// The Q_Key that datagrams must carry from now on.
    #[doc(alias = "IBV_QP_QKEY")]
    pub fn qkey(mut self, qkey: QKey) -> Self {
        self.attr.qkey = qkey.0;
        self.mask |= sys::IBV_QP_QKEY;
        self
    }
}

impl<T: Transport> core::fmt::Debug for ModifyQueuePair<'_, T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Change")
            .field("queue_pair", &self.object.qpn())
            .field("mask", &format_args!("{:#x}", self.mask))
            .finish_non_exhaustive()
    }
}
