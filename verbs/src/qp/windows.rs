//! Memory windows on a queue pair: short forms of [`Batch`](crate::Batch)'s requests, and type 1.

use core::ops::RangeBounds;

use doorbell_verbs_sys::{self as sys, inline};

use super::backend::Backend;
use super::batch::post_one;
use super::connected::QueuePair;
use super::post_error::PostError;
use super::transport::{Connected, Reliable};
use crate::memory::{Bindable, BoundWindow, Buffer, Buffers, KeyAccess, MemoryWindow, Source, WindowType1};
use crate::types::RKey;
use crate::wr::op::{self, Binding, UNBOUNDED};
use crate::wr::payload::SingleSge;

impl<T: Connected, B: Backend> QueuePair<T, B> {
    /// Posts one signaled bind of a window: see [`Batch::bind`](crate::Batch::bind). Its
    /// completion [returns it](crate::Completion::take_bound_window).
    ///
    /// # Errors
    /// As for [`post`](Self::post), and when window and memory are of two protection domains, or
    /// the range is empty. The error [returns it](crate::RejectedBatch::take_window).
    ///
    /// # Panics
    /// If the range is beyond the buffer.
    #[doc(alias = "IBV_WR_BIND_MW")]
    pub fn bind<K: KeyAccess>(
        &mut self,
        window: MemoryWindow,
        over: &Buffer<impl Bindable>,
        range: impl RangeBounds<usize>,
        grants: K,
    ) -> Result<(), PostError> {
        self.post(|batch| {
            batch.bind(window, over, range, grants).signaled();
        })
    }

    /// Posts one signaled local invalidate: see [`Batch::invalidate`](crate::Batch::invalidate).
    /// Its completion [returns the window](crate::Completion::take_window).
    ///
    /// # Errors
    /// As for [`post`](Self::post), [returning it](crate::RejectedBatch::take_bound_window).
    #[doc(alias = "IBV_WR_LOCAL_INV")]
    pub fn invalidate<K: KeyAccess>(&mut self, window: BoundWindow<K>) -> Result<(), PostError> {
        self.post(|batch| {
            batch.invalidate(window).signaled();
        })
    }

    /// Posts one signaled bind of a type 1 window (ibv_bind_mw(3)), else as [`bind`](Self::bind).
    ///
    /// # Errors
    /// As for [`bind`](Self::bind).
    ///
    /// # Panics
    /// If the range is beyond the buffer.
    #[doc(alias = "ibv_bind_mw")]
    pub fn bind_type_1<K: KeyAccess>(
        &mut self,
        window: MemoryWindow<WindowType1>,
        over: &Buffer<impl Bindable>,
        range: impl RangeBounds<usize>,
        _grants: K,
    ) -> Result<(), PostError> {
        let (binding, _, in_flight) = window.binding::<K>(over, range);
        self.bind_mw(binding, in_flight)
    }

    /// Posts one signaled unbind of a window of type 1 (ibv_bind_mw(3) with length 0). Its
    /// completion [returns the window](crate::Completion::take_window).
    ///
    /// # Errors
    /// As for [`invalidate`](Self::invalidate).
    #[doc(alias = "ibv_bind_mw")]
    pub fn unbind_type_1<K: KeyAccess>(&mut self, window: BoundWindow<K, WindowType1>) -> Result<(), PostError> {
        let (binding, in_flight) = window.unbinding();
        self.bind_mw(binding, in_flight)
    }

    fn bind_mw(&mut self, binding: Binding, in_flight: Buffers) -> Result<(), PostError> {
        if let Some(reason) = binding.reason() {
            return Err(self.send.reject_one(Some(reason), in_flight));
        }
        self.send.post_by_verb("ibv_bind_mw", in_flight, |qp, wr_id| {
            let mut bind = sys::ibv_mw_bind {
                wr_id,
                send_flags: sys::IBV_SEND_SIGNALED,
                bind_info: binding.info,
            };
            // SAFETY: the queue pair is live; window and region are kept in the request's slot.
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
    pub fn send_with_invalidate(&mut self, buffer: impl Source, rkey: RKey) -> Result<(), PostError> {
        let op = op::SendInvalidate { rkey: rkey.0 };
        post_one(&mut self.send, op, UNBOUNDED, SingleSge::new(buffer))
    }
}
