//! Changing a queue pair in use: its attributes, as far as its state allows (the table in `attributes`), and the drained state that allows most.

use core::marker::PhantomData;
use std::io;

use doorbell_verbs_sys as sys;

use super::attributes::QpState;
use super::backend::Backend;
use super::connected::QueuePair;
use super::object::{QpObject, zeroed_attr};
use super::query::{PathAttr, PathMigration, QueuePairAttr, RemoteRights};
use super::transport::{Connected, Reliable, Transport, TransportKind, Ud};
use crate::error::QueuePairError;
use crate::types::QKey;

impl<T: Transport, B: Backend> QueuePair<T, B> {
    /// The state it is in (ibv_query_qp(3)): the device may enter ERR, or with UC and UD SQE, by itself.
    ///
    /// # Errors
    /// When the device cannot be asked.
    pub fn state(&self) -> Result<QpState, QueuePairError> {
        self.object.state()
    }

    /// All that the device says of it (ibv_query_qp(3)).
    ///
    /// # Errors
    /// When the device cannot be asked.
    pub fn query(&self) -> Result<QueuePairAttr, QueuePairError> {
        self.object.query()
    }

    /// Begins a change of its attributes, which [`apply`](Change::apply) makes: `qp.change().min_rnr_timer(14).apply()?`.
    pub fn change(&mut self) -> Change<'_, T> {
        Change {
            object: &self.object,
            link: &mut self.link,
            attr: zeroed_attr(),
            mask: 0,
            refused: None,
            transport: PhantomData,
        }
    }

    /// Has the send queue finish what was begun and begin nothing more: RTS to SQD (IBTA vol 1, 10.3.1.5). Requests may be posted meanwhile, and wait. Once it is
    /// drained, which [`SendQueueDrained`](crate::QueuePairEvent::SendQueueDrained) tells, most attributes may be changed; [`resume`](Self::resume) ends it.
    ///
    /// # Errors
    /// When it is not in RTS, or the device cannot drain.
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

    /// Goes on sending after [`drain`](Self::drain), once it is drained; and with UC and UD after the failure of a send, which took it to SQE: to RTS.
    ///
    /// # Errors
    /// When it is in another state, or still draining.
    pub fn resume(&mut self) -> Result<(), QueuePairError> {
        let from = self.state()?;
        self.object
            .transition((from, QpState::Rts), zeroed_attr(), 0, |_| self.object.draining_note())
    }

    /// Takes it to the error state: all that is in flight completes, as [`Flushed`](crate::Status::Flushed) unless it was done.
    ///
    /// # Errors
    /// When the device refuses.
    pub fn flush(&mut self) -> Result<(), QueuePairError> {
        self.object
            .transition((QpState::Rts, QpState::Err), zeroed_attr(), 0, |_| Vec::new())
    }
}

/// A change of a queue pair's attributes (ibv_modify_qp(3)): made by [`QueuePair::change`], told what to change, and applied in one call. What may be changed depends on
/// the state: in RTS a little, after [`drain`](QueuePair::drain) most. A refusal says which attribute is the wrong one.
#[must_use = "a change does nothing until apply() is called"]
pub struct Change<'q, T: Transport> {
    object: &'q QpObject,
    link: &'q mut T::Link,
    attr: sys::ibv_qp_attr,
    mask: sys::ibv_qp_attr_mask,
    /// What is wrong with the first value that cannot be.
    refused: Option<QueuePairError>,
    transport: PhantomData<T>,
}

impl<T: Transport> Change<'_, T> {
    fn bounded(mut self, what: &'static str, value: u8, max: u8) -> Self {
        if value > max && self.refused.is_none() {
            self.refused = Some(QueuePairError::Range {
                object: self.object.name(),
                what,
                requested: value,
                max,
            });
        }
        self
    }

    /// The index of its partition key; when drained.
    pub fn pkey_index(mut self, index: u16) -> Self {
        self.attr.pkey_index = index;
        self.mask |= sys::IBV_QP_PKEY_INDEX;
        self
    }

    /// Makes the change.
    ///
    /// # Errors
    /// When a value is beyond its range, or the state does not allow the change, or the device does not. Nothing is changed then.
    pub fn apply(self) -> Result<(), QueuePairError> {
        if let Some(refused) = self.refused {
            return Err(refused);
        }
        self.object.modify(self.attr, self.mask, |error| match error.kind() {
            io::ErrorKind::Unsupported => vec!["the device cannot change this".to_owned()],
            _ => self.object.draining_note(),
        })?;
        T::apply(self.link, &self.attr, self.mask);
        Ok(())
    }
}

impl<T: Connected> Change<'_, T> {
    /// What the peer may do; all of it is replaced. With UC that is to WRITE, or nothing.
    pub fn rights(mut self, rights: RemoteRights) -> Self {
        if T::KIND == TransportKind::Uc && (rights.read || rights.atomic) && self.refused.is_none() {
            self.refused = Some(QueuePairError::NotOfTransport {
                transport: T::KIND,
                setting: "rights to READ or use atomics",
            });
        }
        self.attr.qp_access_flags = rights.to_sys();
        self.mask |= sys::IBV_QP_ACCESS_FLAGS;
        self
    }

    /// The way to the peer; when drained. Made from what [`query`](QueuePair::query) gives.
    pub fn path(mut self, path: PathAttr) -> Self {
        self.attr.ah_attr = path.to_sys();
        self.mask |= sys::IBV_QP_AV;
        self
    }

    /// Another way to the peer, to go over to when the first fails, with the index of its partition key, and with RC the timeout on it (IBTA vol 1, 17.2.8). Few devices
    /// have this; RoCE has not.
    pub fn alternate_path(mut self, path: PathAttr, pkey_index: u16, timeout: u8) -> Self {
        self.attr.alt_ah_attr = path.to_sys();
        self.attr.alt_port_num = path.port;
        self.attr.alt_pkey_index = pkey_index;
        self.attr.alt_timeout = timeout;
        self.mask |= sys::IBV_QP_ALT_PATH;
        self.bounded("the alternate path's timeout", timeout, MAX_5_BITS)
    }

    /// Where it is to stand with its alternate path: [`Rearm`](PathMigration::Rearm) after giving one, [`Migrated`](PathMigration::Migrated) to go over to it now.
    pub fn migration(mut self, state: PathMigration) -> Self {
        self.attr.path_mig_state = state.to_sys();
        self.mask |= sys::IBV_QP_PATH_MIG_STATE;
        self
    }
}

/// The highest value of a field of five bits, such as a timeout's.
const MAX_5_BITS: u8 = 31;
/// The highest value of a field of three bits, such as a number of retries.
const MAX_3_BITS: u8 = 7;

impl<T: Reliable> Change<'_, T> {
    /// As [`QueuePairBuilder::min_rnr_timer`](crate::QueuePairBuilder::min_rnr_timer).
    pub fn min_rnr_timer(mut self, code: u8) -> Self {
        self.attr.min_rnr_timer = code;
        self.mask |= sys::IBV_QP_MIN_RNR_TIMER;
        self.bounded("min_rnr_timer", code, MAX_5_BITS)
    }

    /// As [`QueuePairBuilder::timeout`](crate::QueuePairBuilder::timeout); when drained.
    pub fn timeout(mut self, exponent: u8) -> Self {
        self.attr.timeout = exponent;
        self.mask |= sys::IBV_QP_TIMEOUT;
        self.bounded("timeout", exponent, MAX_5_BITS)
    }

    /// As [`QueuePairBuilder::retry_count`](crate::QueuePairBuilder::retry_count); when drained.
    pub fn retry_count(mut self, retries: u8) -> Self {
        self.attr.retry_cnt = retries;
        self.mask |= sys::IBV_QP_RETRY_CNT;
        self.bounded("retry_count", retries, MAX_3_BITS)
    }

    /// As [`QueuePairBuilder::rnr_retry`](crate::QueuePairBuilder::rnr_retry); when drained.
    pub fn rnr_retry(mut self, retries: u8) -> Self {
        self.attr.rnr_retry = retries;
        self.mask |= sys::IBV_QP_RNR_RETRY;
        self.bounded("rnr_retry", retries, MAX_3_BITS)
    }

    /// How many READs and atomics to have outstanding, no more than the peer serves; when drained.
    pub fn initiator_depth(mut self, requests: u8) -> Self {
        self.attr.max_rd_atomic = requests;
        self.mask |= sys::IBV_QP_MAX_QP_RD_ATOMIC;
        let max = self.object.pd().context.attr.max_initiated_rd_atomic;
        self.bounded("initiator_depth", requests, max)
    }

    /// How many of the peer's READs and atomics to serve at once; when drained.
    pub fn responder_resources(mut self, requests: u8) -> Self {
        self.attr.max_dest_rd_atomic = requests;
        self.mask |= sys::IBV_QP_MAX_DEST_RD_ATOMIC;
        let max = self.object.pd().context.attr.max_rd_atomic;
        self.bounded("responder_resources", requests, max)
    }
}

impl Change<'_, Ud> {
    /// The key that datagrams must carry from now on.
    pub fn qkey(mut self, qkey: QKey) -> Self {
        self.attr.qkey = qkey.0;
        self.mask |= sys::IBV_QP_QKEY;
        self
    }
}

impl<T: Transport> core::fmt::Debug for Change<'_, T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Change")
            .field("queue_pair", &self.object.qpn())
            .field("mask", &format_args!("{:#x}", self.mask))
            .finish_non_exhaustive()
    }
}
