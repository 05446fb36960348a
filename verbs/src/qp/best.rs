//! Creating queue pairs with the fastest backend that the provider supports.

use super::backend::{EitherBackend, WrPost};
use super::builder::QueuePairBuilder;
use super::connected::QueuePair;
use super::prepared::PreparedQueuePair;
use super::transport::{ReliableConnection, UnreliableConnection, UnreliableDatagram};
use crate::error::QueuePairError;

impl<'a> QueuePairBuilder<'a> {
    /// As [`rc`](Self::rc), by the `ibv_wr_*` calls of ibv_wr_post(3) where the provider has them.
    /// Match on the result once, for code generic over the [`Backend`](crate::Backend).
    ///
    /// # Errors
    /// As for [`rc`](Self::rc).
    #[doc(alias = "ibv_create_qp_ex")]
    pub fn best_rc(
        self,
    ) -> Result<EitherBackend<PreparedQueuePair, PreparedQueuePair<ReliableConnection, WrPost>>, QueuePairError> {
        self.best(QueuePairBuilder::rc, QueuePairBuilder::rc)
    }

    /// As [`uc`](Self::uc), by the better backend: see [`best_rc`](Self::best_rc).
    ///
    /// # Errors
    /// As for [`uc`](Self::uc).
    #[doc(alias = "ibv_create_qp_ex")]
    pub fn best_uc(
        self,
    ) -> Result<
        EitherBackend<PreparedQueuePair<UnreliableConnection>, PreparedQueuePair<UnreliableConnection, WrPost>>,
        QueuePairError,
    > {
        self.best(QueuePairBuilder::uc, QueuePairBuilder::uc)
    }

    /// As [`ud`](Self::ud), by the better backend: see [`best_rc`](Self::best_rc).
    ///
    /// # Errors
    /// As for [`ud`](Self::ud).
    #[doc(alias = "ibv_create_qp_ex")]
    pub fn best_ud(
        self,
    ) -> Result<EitherBackend<QueuePair<UnreliableDatagram>, QueuePair<UnreliableDatagram, WrPost>>, QueuePairError>
    {
        self.best(QueuePairBuilder::ud, QueuePairBuilder::ud)
    }

    fn best<L, W>(
        self,
        list: impl FnOnce(Self) -> Result<L, QueuePairError>,
        calls: impl FnOnce(QueuePairBuilder<'a, WrPost>) -> Result<W, QueuePairError>,
    ) -> Result<EitherBackend<L, W>, QueuePairError> {
        match calls(self.clone().wr_post()) {
            Err(QueuePairError::NoWrPost { .. }) => list(self).map(EitherBackend::PostList),
            made => made.map(EitherBackend::WrPost),
        }
    }
}
