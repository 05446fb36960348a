//! Queue pairs made with the C API, adopted or lent: see [`raw`](crate::raw).

use doorbell_verbs_sys as sys;

use super::backend::Backend;
use super::builder::QueuePairBuilder;
use super::connected::QueuePair;
use super::create::CreatedQp;
use super::endpoint::Endpoint;
use super::prepared::PreparedQueuePair;
use super::transport::{Connected, HasReceiveQueue, Link, Transport, TransportKind, UnreliableDatagram};
use crate::error::{QueuePairError, check};
use crate::raw::Ownership;

impl<T: Connected, B: Backend> PreparedQueuePair<T, B> {
    pub(crate) fn raw(&self) -> *mut sys::ibv_qp {
        self.object.raw()
    }

    /// The queue pair, connected to `peer` by ibv_modify_qp(3) on its [pointer](Self::as_raw). The
    /// path MTU is the smaller of the builder's and the peer's.
    ///
    /// # Safety
    /// It is in RTS.
    #[must_use]
    pub unsafe fn assume_connected(self, peer: &Endpoint) -> QueuePair<T, B> {
        let mtu = self.mtu().min(peer.mtu);
        QueuePair::new(self.send_queue, self.recv_queue, self.object, Link { peer: *peer, mtu })
    }
}

impl<B: Backend> QueuePairBuilder<'_, B> {
    /// Adopts a queue pair in RESET instead of creating one, and moves it to INIT as
    /// [`rc`](Self::rc) and [`uc`](Self::uc) do.
    ///
    /// # Errors
    /// As for these, except of ibv_create_qp(3). It is then destroyed, or its lender's again.
    ///
    /// # Safety
    /// See [the rules](crate::raw#taking-over). Besides:
    /// - It is of transport `T`, of this protection domain, on these two completion queues and on
    ///   no shared receive queue, with at least the builder's capacities. Its `sq_sig_all` is what
    ///   [`signal_all`](Self::signal_all) said. For the backend [`WrPost`](crate::WrPost) it was
    ///   made by ibv_create_qp_ex with all operations of its transport.
    /// - Nothing is posted to it, and none of its completions is in its completion queues.
    pub unsafe fn prepared_from_raw<T: Connected + HasReceiveQueue>(
        self,
        raw: *mut sys::ibv_qp,
        ownership: Ownership,
    ) -> Result<PreparedQueuePair<T, B>, QueuePairError> {
        if T::KIND == TransportKind::Uc {
            self.check_rights(T::KIND, sys::IBV_ACCESS_REMOTE_WRITE)
                .inspect_err(|_| self.destroy_unadopted(raw, &ownership))?;
        }
        // SAFETY: by contract.
        let made = unsafe { self.adopt::<T>(raw, ownership) }?;
        self.prepared_from(made)
    }

    /// Adopts a queue pair that is connected to `peer` and in RTS.
    ///
    /// # Errors
    /// As for [`prepared_from_raw`](Self::prepared_from_raw).
    ///
    /// # Safety
    /// As for [`prepared_from_raw`](Self::prepared_from_raw). The builder's connection parameters
    /// are ignored, but for the path MTU.
    pub unsafe fn connected_from_raw<T: Connected + HasReceiveQueue>(
        self,
        raw: *mut sys::ibv_qp,
        peer: &Endpoint,
        ownership: Ownership,
    ) -> Result<QueuePair<T, B>, QueuePairError> {
        // SAFETY: by contract.
        let made = unsafe { self.adopt::<T>(raw, ownership) }?;
        let mtu = self.settings.mtu.unwrap_or(made.port.active_mtu).min(peer.mtu);
        let (send, recv) = self.posters(&made);
        Ok(QueuePair::new(send, recv, made.object, Link { peer: *peer, mtu }))
    }

    /// Adopts a UD queue pair in RESET, and moves it to RTS as [`ud`](Self::ud) does.
    ///
    /// # Errors
    /// As for [`prepared_from_raw`](Self::prepared_from_raw).
    ///
    /// # Safety
    /// As for [`prepared_from_raw`](Self::prepared_from_raw).
    pub unsafe fn datagrams_from_raw(
        self,
        raw: *mut sys::ibv_qp,
        ownership: Ownership,
    ) -> Result<QueuePair<UnreliableDatagram, B>, QueuePairError> {
        self.check_rights(TransportKind::Ud, 0)
            .inspect_err(|_| self.destroy_unadopted(raw, &ownership))?;
        // SAFETY: by contract.
        let made = unsafe { self.adopt::<UnreliableDatagram>(raw, ownership) }?;
        self.ready_from(made)
    }

    /// # Safety
    /// As of `prepared_from_raw`, but in any state.
    unsafe fn adopt<T: Transport>(
        &self,
        raw: *mut sys::ibv_qp,
        ownership: Ownership,
    ) -> Result<CreatedQp, QueuePairError> {
        let lender = ownership.clone().lender();
        // SAFETY: by contract.
        unsafe { self.create_or_adopt::<T>(Some((raw, lender))) }
            .inspect_err(|_| self.destroy_unadopted(raw, &ownership))
    }

    /// Destroys a queue pair that could not be adopted, unless it is lent.
    fn destroy_unadopted(&self, raw: *mut sys::ibv_qp, ownership: &Ownership) {
        if let Ownership::Lent(_) = ownership {
            return;
        }
        let context = self.pd.context();
        // SAFETY: live and ours, by the contract of the callers, and not used after.
        if let Err(error) = check(unsafe { (context.inner().api.destroy_qp)(raw) }) {
            tracing::error!(device = context.name(), %error, "ibv_destroy_qp failed; it is leaked");
        }
    }
}
