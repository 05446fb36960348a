//! Creating a queue pair from its builder, or adopting one: up to INIT, or with UD to RTS.

use core::hash::{BuildHasher, Hasher};
use std::hash::RandomState;
use std::io;
use std::sync::Arc;

use doorbell_verbs_sys as sys;

use super::attributes::QpState;
use super::backend::{Backend, Receives};
use super::builder::{QueuePairBuilder, Settings};
use super::connected::{QueuePair, UdLimits};
use super::endpoint::UdEndpoint;
use super::object::{QpObject, zeroed_attr};
use super::poster::{Poster, SignalPolicy};
use super::prepared::PreparedQueuePair;
use super::ring::QueueKind;
use super::transport::{Connected, Connectionless, Transport, TransportKind};
use crate::ah::MAX_FLOW_LABEL;
use crate::cq::{Attachment, CqInner};
use crate::error::QueuePairError;
use crate::port::{GidEntry, PortAttr, PortState};
use crate::raw::Lender;
use crate::srq::SharedReceiveQueueHandle;
use crate::types::Psn;
use crate::wr::payload::Limits;

pub(super) struct CreatedQp {
    pub(super) object: QpObject,
    pub(super) port: PortAttr,
    pub(super) gid: Option<GidEntry>,
    max_inline: u32,
}

const DEFAULT_RD_ATOMIC: u8 = 16;

impl<B: Backend> QueuePairBuilder<'_, B> {
    pub(crate) fn create_ready<T: Connectionless>(self) -> Result<QueuePair<T, B>, QueuePairError> {
        self.check_rights(TransportKind::Ud, 0)?;
        let made = self.create::<T>()?;
        self.ready_from(made)
    }

    pub(super) fn ready_from<T: Connectionless>(self, made: CreatedQp) -> Result<QueuePair<T, B>, QueuePairError> {
        self.to_init::<T>(&made.object)?;
        self.to_ready(&made.object)?;
        let mtu = self.settings.mtu.unwrap_or(made.port.active_mtu);
        let endpoint = UdEndpoint {
            gid: made.gid.map(|entry| entry.gid).unwrap_or_default(),
            lid: made.port.lid,
            qpn: made.object.qpn(),
            qkey: self.settings.qkey,
            mtu,
        };
        let (mut send, recv) = self.posters(&made);
        send.ud = UdLimits {
            pd: Arc::as_ptr(self.pd.inner()).addr(),
            port: self.settings.port,
            max_len: mtu.bytes(),
        };
        made.object.recv().ring().set_datagrams();
        self.pd.inner().handles.add_send_queue(made.object.send().ring());
        Ok(QueuePair::new(send, recv, made.object, endpoint))
    }

    pub(crate) fn prepare_unreliable<T: Connected>(self) -> Result<PreparedQueuePair<T, B>, QueuePairError> {
        self.check_rights(TransportKind::Uc, sys::IBV_ACCESS_REMOTE_WRITE)?;
        self.prepare()
    }

    pub(crate) fn prepare<T: Connected>(self) -> Result<PreparedQueuePair<T, B>, QueuePairError> {
        let made = self.create::<T>()?;
        self.prepared_from(made)
    }

    pub(super) fn prepared_from<T: Connected>(
        self,
        made: CreatedQp,
    ) -> Result<PreparedQueuePair<T, B>, QueuePairError> {
        self.to_init::<T>(&made.object)?;
        let rd_atomic = if T::KIND == TransportKind::Rc {
            self.granted_rd_atomic()
        } else {
            0
        };
        let psn = self.settings.psn.unwrap_or_else(random_psn);
        let (send, recv) = self.posters(&made);
        Ok(PreparedQueuePair::new(made, send, recv, self.settings, rd_atomic, psn))
    }

    fn create<T: Transport>(&self) -> Result<CreatedQp, QueuePairError> {
        // SAFETY: none is given.
        unsafe { self.create_or_adopt::<T>(None) }
    }

    /// Creates the queue pair, or adopts `given`.
    ///
    /// # Safety
    /// As of [`prepared_from_raw`](QueuePairBuilder::prepared_from_raw), but in any state, if one
    /// is given. It is not adopted when this fails.
    pub(super) unsafe fn create_or_adopt<T: Transport>(
        &self,
        given: Option<(*mut sys::ibv_qp, Lender)>,
    ) -> Result<CreatedQp, QueuePairError> {
        self.check_limits()?;
        let context = self.pd.context();
        let port = context.port(self.settings.port)?;
        if !matches!(port.state, PortState::Active | PortState::ActiveDefer) {
            return Err(QueuePairError::PortDown {
                device: context.name().to_owned(),
                port: self.settings.port,
                state: port.state,
            });
        }
        self.check_mtu(&port)?;
        let gid = context.source_gid(self.settings.port, self.settings.gid_index, &port)?;

        let send = self.attach("send", self.send_cq, self.send_depth, QueueKind::Send)?;
        let mut recv = self.attach("receive", self.recv_cq, self.recv_depth, QueueKind::Receive)?;
        let srq = self.attach_srq(&mut recv)?;
        let mut init = sys::ibv_qp_init_attr {
            qp_context: core::ptr::null_mut(),
            send_cq: send.cq().raw(),
            recv_cq: recv.cq().raw(),
            srq,
            cap: sys::ibv_qp_cap {
                max_send_wr: self.send_depth,
                max_recv_wr: self.recv_depth,
                max_send_sge: self.max_send_sge,
                max_recv_sge: self.max_recv_sge,
                max_inline_data: self.max_inline,
            },
            qp_type: T::KIND.to_sys(),
            sq_sig_all: i32::from(self.signal_all),
        };
        let pd = self.pd.inner();
        // The completion queues stay live as long as the queue pair: the object below holds them.
        let (raw, lender) = match given {
            Some((raw, lender)) => (raw, lender),
            None => (B::create(self.pd, T::KIND, &mut init)?, None),
        };
        // SAFETY: just made, with these; or given, which is as good by contract.
        let object = unsafe { QpObject::new(raw, T::KIND, pd.clone(), send, recv, lender) };
        Ok(CreatedQp {
            object,
            port,
            gid,
            // The granted capacity: at least the requested one, by ibv_create_qp(3).
            max_inline: init.cap.max_inline_data.max(self.max_inline),
        })
    }

    pub(super) fn posters(&self, made: &CreatedQp) -> (Poster<B>, Poster<Receives>) {
        let (raw, send, recv) = (made.object.raw(), made.object.send(), made.object.recv());
        let to_send = Limits {
            max_inline: made.max_inline,
            max_sge: self.max_send_sge,
        };
        let to_receive = Limits {
            max_inline: 0,
            max_sge: self.max_recv_sge,
        };
        let signaling = if self.signal_all {
            SignalPolicy::None
        } else {
            SignalPolicy::EveryHalfQueue
        };
        // SAFETY: the queue pair lives as long as the object, which goes after the posters in
        // PreparedQueuePair and in QueuePair; each ring is fresh, and this is called once.
        unsafe {
            (
                Poster::new(raw, send.ring().clone(), send.key(), to_send, signaling),
                Poster::new(raw, recv.ring().clone(), recv.key(), to_receive, SignalPolicy::None),
            )
        }
    }

    pub(super) fn check_rights(
        &self,
        transport: TransportKind,
        possible: sys::ibv_access_flags,
    ) -> Result<(), QueuePairError> {
        let rights = [
            (sys::IBV_ACCESS_REMOTE_READ, "allow_remote_read"),
            (sys::IBV_ACCESS_REMOTE_WRITE, "allow_remote_write"),
            (sys::IBV_ACCESS_REMOTE_ATOMIC, "allow_remote_atomic"),
        ];
        let excess = self.access & !possible;
        match rights.iter().find(|(bit, _)| excess & bit != 0) {
            Some(&(_, setting)) => Err(QueuePairError::NotOfTransport { transport, setting }),
            None => Ok(()),
        }
    }

    fn check_limits(&self) -> Result<(), QueuePairError> {
        let attr = *self.pd.context().attr();
        let depth = attr.max_qp_wr;
        let limits = [
            ("max_send_wr", self.send_depth, depth),
            ("max_recv_wr", self.recv_depth, depth),
            ("max_send_sge", self.max_send_sge, attr.max_sge),
            ("max_recv_sge", self.max_recv_sge, attr.max_sge),
            ("port", self.settings.port.into(), attr.ports.into()),
            (
                "max_rd_atomic",
                self.settings.rd_atomic.unwrap_or(0).into(),
                attr.max_rd_atomic.into(),
            ),
            ("timeout", self.settings.timeout.into(), 31),
            ("retry_count", self.settings.retry_count.into(), 7),
            ("rnr_retry", self.settings.rnr_retry.into(), 7),
            ("min_rnr_timer", self.settings.min_rnr_timer.into(), 31),
            ("service_level", self.settings.service_level.into(), 15),
            ("flow_label", self.settings.flow_label, MAX_FLOW_LABEL),
        ];
        for (what, requested, max) in limits {
            if requested > max {
                return Err(QueuePairError::Limit {
                    device: self.pd.context().name().to_owned(),
                    what,
                    requested,
                    max,
                });
            }
        }
        Ok(())
    }

    fn check_mtu(&self, port: &PortAttr) -> Result<(), QueuePairError> {
        match self.settings.mtu {
            Some(requested) if requested > port.active_mtu => Err(QueuePairError::Mtu {
                device: self.pd.context().name().to_owned(),
                port: self.settings.port,
                requested,
                active: port.active_mtu,
            }),
            _ => Ok(()),
        }
    }

    fn attach(
        &self,
        which: &'static str,
        inner: &Arc<CqInner>,
        depth: u32,
        queue: QueueKind,
    ) -> Result<Attachment, QueuePairError> {
        if inner.context.raw != self.pd.inner().context.raw {
            return Err(QueuePairError::ForeignCompletionQueue { which });
        }
        Attachment::new(inner, depth, queue, self.tag).map_err(|free| QueuePairError::CompletionQueueTooSmall {
            which,
            needed: depth,
            free,
            capacity: inner.capacity(),
        })
    }

    fn attach_srq(&self, recv: &mut Attachment) -> Result<*mut sys::ibv_srq, QueuePairError> {
        let Some(srq) = self.srq.map(SharedReceiveQueueHandle::inner) else {
            return Ok(core::ptr::null_mut());
        };
        if srq.context().raw != self.pd.inner().context.raw {
            return Err(QueuePairError::ForeignSharedReceiveQueue);
        }
        recv.share(srq)
            .map_err(|free| QueuePairError::CompletionQueueTooSmall {
                which: "receive",
                needed: srq.depth(),
                free,
                capacity: recv.cq().capacity(),
            })?;
        Ok(srq.raw())
    }

    fn to_init<T: Transport>(&self, object: &QpObject) -> Result<(), QueuePairError> {
        let mut attr = zeroed_attr();
        attr.pkey_index = self.settings.pkey_index;
        attr.port_num = self.settings.port;
        attr.qp_access_flags = self.access;
        attr.qkey = self.settings.qkey.0;
        let own = match T::KIND {
            TransportKind::Rc | TransportKind::Uc => sys::IBV_QP_ACCESS_FLAGS,
            TransportKind::Ud => sys::IBV_QP_QKEY,
        };
        let mask = sys::IBV_QP_PKEY_INDEX | sys::IBV_QP_PORT | own;
        object.transition((QpState::Reset, QpState::Init), attr, mask, |error| {
            self.init_notes(T::KIND, error)
        })
    }

    fn init_notes(&self, transport: TransportKind, error: &io::Error) -> Vec<String> {
        let Settings {
            port, pkey_index, qkey, ..
        } = self.settings;
        match transport {
            TransportKind::Ud if qkey.is_controlled() && error.kind() == io::ErrorKind::PermissionDenied => {
                vec![format!(
                    "Q_Key {qkey} has its highest bit set: only privileged processes may use it"
                )]
            }
            TransportKind::Ud => vec![format!("port {port} and P_Key index {pkey_index} must exist")],
            TransportKind::Rc | TransportKind::Uc => vec![format!(
                "port {port} and P_Key index {pkey_index} must exist, and the device must have the rights allowed to the peer"
            )],
        }
    }

    fn to_ready(&self, object: &QpObject) -> Result<(), QueuePairError> {
        object.transition((QpState::Init, QpState::Rtr), zeroed_attr(), 0, |_| Vec::new())?;
        let mut attr = zeroed_attr();
        attr.sq_psn = self.settings.psn.unwrap_or_else(random_psn).get();
        object.transition((QpState::Rtr, QpState::Rts), attr, sys::IBV_QP_SQ_PSN, |_| Vec::new())
    }

    fn granted_rd_atomic(&self) -> u8 {
        let attr = *self.pd.context().attr();
        self.settings
            .rd_atomic
            .unwrap_or(DEFAULT_RD_ATOMIC)
            .min(attr.max_rd_atomic)
    }
}

/// A random PSN, which a packet of an earlier connection is unlikely to match (IBTA vol 1, 9.7.1).
fn random_psn() -> Psn {
    // The standard library's hasher is seeded by the operating system.
    Psn::truncated(RandomState::new().build_hasher().finish() as u32)
}
