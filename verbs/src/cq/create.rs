//! Creating completion queues (ibv_create_cq(3), ibv_create_cq_ex(3)).
//!
//! No model: a counter on which nothing else depends.

use core::ffi::c_int;
use core::mem::ManuallyDrop;
use core::sync::atomic::AtomicUsize;
use std::io;
use std::sync::Arc;

use doorbell_verbs_sys::{self as sys, inline};

use super::classic::WcBatch;
use super::extended::ExtendedPoll;
use super::locked_registry::LockedRegistry;
use super::{ClassicCq, CompletionQueue, CqInner, ExtendedCq, size};
use crate::context::{Context, ContextInner};
use crate::error::CompletionQueueError;
use crate::event::CompletionChannel;
use crate::event::channel::{ChannelInner, CqId};
use crate::raw::Lender;

impl CqInner {
    /// `create` gets the number of entries, the queue's id, and its channel or null.
    fn make(
        context: &Context,
        entries: u32,
        channel: Option<&CompletionChannel>,
        verb: &'static str,
        create: impl FnOnce(c_int, CqId, *mut sys::ibv_comp_channel) -> *mut sys::ibv_cq,
    ) -> Result<Self, CompletionQueueError> {
        let channel = channel.map(CompletionChannel::inner);
        if channel.is_some_and(|channel| !channel.is_of(context)) {
            return Err(CompletionQueueError::ForeignChannel {
                device: context.name().to_owned(),
            });
        }
        let context = context.inner();
        let cqe = size::checked(context, entries)?;
        let id = CqId::next();
        if let Some(channel) = channel {
            channel.register_cq(id);
        }
        let raw = create(cqe, id, channel.map_or(core::ptr::null_mut(), |channel| channel.raw()));
        if raw.is_null() {
            let error = io::Error::last_os_error();
            if let Some(channel) = channel {
                channel.unregister_cq(id);
            }
            return Err(CompletionQueueError::Create {
                verb,
                device: context.name.clone(),
                entries,
                error,
            });
        }
        // SAFETY: just created, by this context.
        Ok(unsafe { Self::adopt(context, raw, (id, channel), None) })
    }

    /// # Safety
    /// `raw` is a live queue of this device, which only the lender, if any, destroys, and which
    /// nothing else polls; its events carry `id`, if it is on a channel.
    unsafe fn adopt(
        context: &Arc<ContextInner>,
        raw: *mut sys::ibv_cq,
        (id, channel): (CqId, Option<&Arc<ChannelInner>>),
        lender: Lender,
    ) -> Self {
        // SAFETY: live by contract.
        let capacity = u32::try_from(unsafe { (*raw).cqe }).unwrap_or(0);
        Self {
            raw,
            context: ManuallyDrop::new(Arc::clone(context)),
            id,
            channel: ManuallyDrop::new(channel.map(Arc::clone)),
            registry: LockedRegistry::new(capacity),
            polled_by: AtomicUsize::new(0),
            lender,
        }
    }
}

impl CompletionQueue<ClassicCq> {
    pub(crate) fn classic(
        context: &Context,
        entries: u32,
        channel: Option<&CompletionChannel>,
        vector: u32,
    ) -> Result<Self, CompletionQueueError> {
        let vector = c_int::try_from(vector).unwrap_or(c_int::MAX);
        let (api, raw_context) = (context.inner().api, context.inner().raw);
        let inner = CqInner::make(context, entries, channel, "ibv_create_cq", |cqe, id, channel| {
            // SAFETY: context and channel are live, of one device; the user pointer is a number.
            unsafe { (api.create_cq)(raw_context, cqe, id.to_context(), channel, vector) }
        })?;
        Ok(Self::new(inner, WcBatch::new()))
    }

    /// # Safety
    /// As for [`CqInner::adopt`]; it is empty, and on no channel.
    pub(crate) unsafe fn adopt(context: &Context, raw: *mut sys::ibv_cq, lender: Lender) -> Self {
        // SAFETY: by contract.
        let inner = unsafe { CqInner::adopt(context.inner(), raw, (CqId::next(), None), lender) };
        Self::new(inner, WcBatch::new())
    }
}

impl CompletionQueue<ExtendedCq> {
    /// # Safety
    /// As for [`CqInner::adopt`]; empty, on no channel, of ibv_create_cq_ex(3), able to poll.
    pub(crate) unsafe fn adopt_extended(context: &Context, raw: *mut sys::ibv_cq_ex, lender: Lender) -> Self {
        // SAFETY: by contract; an `ibv_cq_ex` begins with the fields of `ibv_cq`.
        let inner = unsafe { CqInner::adopt(context.inner(), raw.cast(), (CqId::next(), None), lender) };
        // SAFETY: lives as long as `inner`, dropped after the poll state; functions are present.
        let calls = unsafe { ExtendedPoll::new(raw) };
        Self::new(inner, calls)
    }
}

/// Builds an extended completion queue: see [`Context::extended_completion_queue`].
#[doc(alias("ibv_cq_init_attr_ex", "ibv_create_cq_ex"))]
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing until create() is called"]
pub struct ExtendedCompletionQueueBuilder<'a> {
    context: &'a Context,
    channel: Option<&'a CompletionChannel>,
    entries: u32,
    fields: u32,
}

impl<'a> ExtendedCompletionQueueBuilder<'a> {
    pub(crate) fn new(context: &'a Context, entries: u32) -> Self {
        Self {
            context,
            channel: None,
            entries,
            fields: sys::IBV_WC_STANDARD_FLAGS,
        }
    }

    /// Puts the queue on `channel`, which reports when it has completions.
    #[doc(alias = "comp_channel")]
    pub fn on(mut self, channel: &'a CompletionChannel) -> Self {
        self.channel = Some(channel);
        self
    }

    /// Timestamps: see [`Completion::timestamp_ticks`](crate::Completion::timestamp_ticks).
    #[doc(alias = "IBV_WC_EX_WITH_COMPLETION_TIMESTAMP")]
    pub fn timestamps(mut self) -> Self {
        self.fields |= sys::IBV_WC_EX_WITH_COMPLETION_TIMESTAMP;
        self
    }

    /// Wall-clock timestamps: [`Completion::wallclock_ns`](crate::Completion::wallclock_ns).
    #[doc(alias = "IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK")]
    pub fn wallclock(mut self) -> Self {
        self.fields |= sys::IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;
        self
    }

    /// Creates the queue.
    ///
    /// # Errors
    /// When the device has no extended queues (an error of kind
    /// [`Unsupported`](io::ErrorKind::Unsupported)), none with these fields, or none as large; when
    /// it refuses, or the channel is another device's.
    #[doc(alias = "ibv_create_cq_ex")]
    pub fn create(self) -> Result<CompletionQueue<ExtendedCq>, CompletionQueueError> {
        let raw_context = self.context.inner().raw;
        let verb = "ibv_create_cq_ex";
        let inner = CqInner::make(self.context, self.entries, self.channel, verb, |cqe, id, channel| {
            let mut attr = sys::ibv_cq_init_attr_ex {
                cqe: cqe.cast_unsigned(),
                cq_context: id.to_context(),
                channel,
                comp_vector: 0,
                wc_flags: self.fields.into(),
                comp_mask: 0,
                flags: 0,
                parent_domain: core::ptr::null_mut(),
            };
            // SAFETY: context and channel are live, of one device; the user pointer is a number.
            unsafe { inline::create_cq_ex(raw_context, &mut attr) }.cast()
        })?;
        let raw = inner.raw.cast::<sys::ibv_cq_ex>();
        // SAFETY: just created.
        let complete =
            unsafe { (*raw).start_poll.is_some() && (*raw).next_poll.is_some() && (*raw).end_poll.is_some() };
        if !complete {
            return Err(CompletionQueueError::Create {
                verb,
                device: self.context.name().to_owned(),
                entries: self.entries,
                error: io::ErrorKind::Unsupported.into(),
            });
        }
        // SAFETY: lives as long as `inner`, dropped after the poll state; functions are present.
        let calls = unsafe { ExtendedPoll::new(raw) };
        Ok(CompletionQueue::new(inner, calls))
    }
}
