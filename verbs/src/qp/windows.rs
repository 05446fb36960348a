//! Memory windows on a queue pair: the short forms of [`Batch`](crate::Batch)'s requests, and
//! windows of type 1, which have a verb of their own.

use core::ops::RangeBounds;

use doorbell_verbs_sys::{self as sys, inline};

use super::backend::Backend;
use super::batch::post_one;
use super::connected::QueuePair;
use super::post_error::Refused;
use super::transport::{Connected, Reliable};
use crate::memory::{Bindable, BoundWindow, Buffer, Buffers, Key, MemoryWindow, Source, Type1};
use crate::types::RKey;
use crate::wr::op::{self, Binding, UNBOUNDED};
use crate::wr::payload::One;

impl<T: Connected, B: Backend> QueuePair<T, B> {
    /// Posts one signalled bind of a window: see [`Batch::bind`](crate::Batch::bind). Its
    /// completion [returns it](crate::Completion::take_bound_window).
    ///
    /// # Errors
    /// As for [`post`](Self::post), and when window and memory are of two protection domains, or
    /// the range is empty. The error [returns it](crate::RefusedBatch::take_window).
    ///
    /// # Panics
    /// If the range is beyond the buffer.
    #[doc(alias = "IBV_WR_BIND_MW")]
    pub fn bind<K: Key>(
        &mut self,
        window: MemoryWindow,
        over: &Buffer<impl Bindable>,
        range: impl RangeBounds<usize>,
        grants: K,
    ) -> Result<(), Refused> {
        self.post(|batch| {
            batch.bind(window, over, range, grants).signalled();
        })
    }

    /// Posts one signalled local invalidate: see [`Batch::invalidate`](crate::Batch::invalidate).
    /// Its completion [returns the window](crate::Completion::take_window).
    ///
    /// # Errors
    /// As for [`post`](Self::post); the error [returns it](crate::RefusedBatch::take_bound_window).
    #[doc(alias = "IBV_WR_LOCAL_INV")]
    pub fn invalidate<K: Key>(&mut self, window: BoundWindow<K>) -> Result<(), Refused> {
        self.post(|batch| {
            batch.invalidate(window).signalled();
        })
    }

    /// Posts one signalled bind of a window of type 1 (ibv_bind_mw(3)), otherwise as
    /// [`bind`](Self::bind).
    ///
    /// # Errors
    /// As for [`bind`](Self::bind).
    ///
    /// # Panics
    /// If the range is beyond the buffer.
    #[doc(alias = "ibv_bind_mw")]
    pub fn bind_type_1<K: Key>(
        &mut self,
        window: MemoryWindow<Type1>,
        over: &Buffer<impl Bindable>,
        range: impl RangeBounds<usize>,
        _grants: K,
    ) -> Result<(), Refused> {
        let (binding, _, in_flight) = window.binding::<K>(over, range);
        self.bind_mw(binding, in_flight)
    }

    /// Posts one signalled unbind of a window of type 1 (ibv_bind_mw(3) with length 0). Its
    /// completion [returns the window](crate::Completion::take_window).
    ///
    /// # Errors
    /// As for [`invalidate`](Self::invalidate).
    #[doc(alias = "ibv_bind_mw")]
    pub fn unbind_type_1<K: Key>(&mut self, window: BoundWindow<K, Type1>) -> Result<(), Refused> {
        let (binding, in_flight) = window.unbinding();
        self.bind_mw(binding, in_flight)
    }

    /// ibv_bind_mw(3).
    fn bind_mw(&mut self, binding: Binding, in_flight: Buffers) -> Result<(), Refused> {
        if let Some(reason) = binding.reason() {
            return Err(self.send.reject_one(Some(reason), in_flight));
        }
        self.send.post_by_verb("ibv_bind_mw", in_flight, |qp, wr_id| {
            let mut bind = sys::ibv_mw_bind {
                wr_id,
                send_flags: sys::IBV_SEND_SIGNALED,
                bind_info: binding.info,
            };
            // SAFETY: the queue pair is live; so are window and region, which are kept in the
            // request's slot.
            unsafe { inline::bind_mw(qp, binding.mw, &mut bind) }
        })
    }
}

impl<T: Reliable, B: Backend> QueuePair<T, B> {
    /// Posts one SEND with invalidate of `rkey`, the key of a peer's window: see
    /// [`Batch::send_with_invalidate`](crate::Batch::send_with_invalidate).
    ///
    /// # Errors
    /// As for [`post`](Self::post).
    #[doc(alias = "IBV_WR_SEND_WITH_INV")]
    pub fn send_with_invalidate(&mut self, buffer: impl Source, rkey: RKey) -> Result<(), Refused> {
        let op = op::SendInvalidate { rkey: rkey.0 };
        post_one(&mut self.send, op, UNBOUNDED, One::new(buffer))
    }
}
