//! An order of operations across streams and graphs.

use core::fmt;
use std::collections::VecDeque;
use std::ptr;
use std::sync::Arc;

use crate::capture::{CaptureInfo, Captured};
use crate::context::Context;
use crate::error::Error;
use crate::event::Event;
use crate::stream::{RelaxedCapture, Stream};
use crate::sys::{RawGraph, RawNode, RawStream, Status};

/// Has operations run one after another, on whatever streams, enqueued directly or captured into
/// graphs of any code: each begins when the one before has ended. A launch of a graph counts
/// as all operations captured into it.
///
/// Graphs and directly enqueued operations share an event, from the first captured operation on.
/// Of a graph the first operation waits for it, and one node records it behind the last.
#[derive(Debug)]
pub struct StreamOrder {
    context: Context,
    /// In which the first operation that is captured records the event that graphs share: made
    /// beforehand, as little as possible is made while operations wait for other ranks.
    recorder: Stream,
    /// The last operation that was enqueued directly: its stream and its end.
    last: Option<(Known, Event)>,
    /// Ends of operations, to be used again once nothing else holds them.
    ends: VecDeque<Event>,
    shared: Option<Event>,
}

/// Ends that are kept: more than a watchdog holds at a time.
const ENDS: usize = 256;
/// Of these, how many are checked for one to use again.
const CHECKED: usize = 4;

/// What a stream is known by. A borrowed one may be destroyed, and another one have its address.
#[derive(Debug)]
enum Known {
    Kept(Stream),
    Id(u64),
    /// Nothing: a borrowed one of a driver that has no numbers for streams, or one of operations
    /// that all wait for the shared event.
    Not,
}

impl Known {
    fn of(stream: &Stream) -> Result<Self, Error> {
        if stream.follower().is_none() {
            return Ok(Self::Kept(stream.clone()));
        }
        Ok(stream.id()?.map_or(Self::Not, Self::Id))
    }

    fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Kept(one), Self::Kept(other)) => one.as_raw() == other.as_raw(),
            (Self::Id(one), Self::Id(other)) => one == other,
            _ => false,
        }
    }
}

/// An operation between its [begin](StreamOrder::begin) and its [end](StreamOrder::end), both in
/// one thread, which may load and allocate meanwhile even if the operation is captured.
#[must_use = "an operation has an end"]
pub struct Turn(Kind);

enum Kind {
    Captured(Arc<Captured>, RelaxedCapture),
    Direct(Known),
}

impl StreamOrder {
    /// An order without operations.
    pub fn new(context: &Context) -> Result<Self, Error> {
        Ok(Self {
            context: context.clone(),
            recorder: Stream::new(context)?,
            last: None,
            ends: VecDeque::new(),
            shared: None,
        })
    }

    /// Makes later work of `stream` wait for the operation before.
    pub fn begin(&mut self, stream: &Stream) -> Result<Turn, Error> {
        if let Some(captured) = stream.captured()? {
            let relaxed = RelaxedCapture::enter(self.context.driver());
            captured.begin(self.share()?, stream)?;
            return Ok(Turn(Kind::Captured(captured, relaxed)));
        }
        if let Some(shared) = &self.shared {
            // From now on all operations do, whatever their streams.
            stream.wait(shared)?;
            return Ok(Turn(Kind::Direct(Known::Not)));
        }
        let known = Known::of(stream)?;
        if let Some((before, end)) = &self.last
            && !before.is(&known)
        {
            stream.wait(end)?;
        }
        Ok(Turn(Kind::Direct(known)))
    }

    /// Ends an operation, whose work is the last one of `stream`. Returns the event of its end,
    /// unless it was captured: there is none before a launch, and then there may be several.
    pub fn end(&mut self, turn: Turn, stream: &Stream) -> Result<Option<Event>, Error> {
        let known = match turn.0 {
            Kind::Captured(captured, _relaxed) => {
                captured.end(self.share()?, stream)?;
                return Ok(None);
            }
            Kind::Direct(known) => known,
        };
        let end = self.unused_end()?;
        stream.record_end(&end)?;
        if let Some(shared) = &self.shared {
            stream.record(shared)?;
        }
        self.last = Some((known, end.clone()));
        if self.ends.len() == ENDS {
            self.ends.pop_front();
        }
        self.ends.push_back(end.clone());
        Ok(Some(end))
    }

    /// An event that nothing else holds. What streams wait for of an earlier record stays that.
    fn unused_end(&mut self) -> Result<Event, Error> {
        for _ in 0..CHECKED {
            let Some(mut end) = self.ends.pop_front() else { break };
            if end.is_held_once() {
                return Ok(end);
            }
            self.ends.push_back(end);
        }
        Event::new(&self.context)
    }

    /// The end of the last operation that was enqueued directly.
    #[must_use]
    pub fn last_end(&self) -> Option<&Event> {
        self.last.as_ref().map(|(_, end)| end)
    }

    /// The event that graphs wait for and record.
    fn share(&mut self) -> Result<&Event, Error> {
        let event = match self.shared.take() {
            Some(event) => event,
            None => self.first_shared()?,
        };
        Ok(self.shared.insert(event))
    }

    /// Recorded behind the operations so far, of which none has done so.
    fn first_shared(&self) -> Result<Event, Error> {
        let event = Event::new(&self.context)?;
        if let Some((_, end)) = &self.last {
            self.recorder.wait(end)?;
        }
        self.recorder.record(&event)?;
        Ok(event)
    }
}

impl Turn {
    /// Whether work on `other`, made to wait for the operation's stream, would be the operation's:
    /// a stream that is in no capture, or in another one, may not join a captured operation.
    #[must_use]
    pub fn can_span(&self, other: &Stream) -> bool {
        let state = other.inner().state();
        match (&self.0, &state.capture) {
            (Kind::Direct(_), _) => true,
            (Kind::Captured(captured, _), Some(others)) => Arc::ptr_eq(captured, others),
            (Kind::Captured(..), None) => false,
        }
    }
}

impl fmt::Debug for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_captured = matches!(self.0, Kind::Captured(..));
        f.debug_tuple("Turn").field(&is_captured).finish()
    }
}

/// An order in a capture.
pub(crate) struct Place {
    /// The order's event, which the graph uses whenever it is launched.
    shared: Event,
    last: Option<Last>,
}

/// The last operation of an order in a capture.
struct Last {
    stream: RawStream,
    end: Event,
    /// The node that records the shared event, behind the nodes that end the operation.
    record: RawNode,
    behind: Vec<RawNode>,
}

// SAFETY: the pointers are handles of the driver, which any thread may use, and which this crate
// never dereferences.
unsafe impl Send for Last {}

impl Captured {
    fn begin(&self, shared: &Event, stream: &Stream) -> Result<(), Error> {
        let mut places = self.places.lock();
        let index = places.iter().position(|place| place.is_of(shared));
        match index.and_then(|index| places[index].last.as_ref()) {
            // A stream exists as long as it is captured, so its address is that of no other.
            Some(last) if last.stream == stream.as_raw() => Ok(()),
            Some(last) => stream.wait(&last.end),
            None => {
                if index.is_none() {
                    places.push(Place {
                        shared: shared.clone(),
                        last: None,
                    });
                }
                stream.wait_external(shared)
            }
        }
    }

    fn end(&self, shared: &Event, stream: &Stream) -> Result<(), Error> {
        let mut places = self.places.lock();
        let place = places.iter_mut().find(|place| place.is_of(shared));
        let (Some(place), Some(info)) = (place, stream.capture_info()?) else {
            return Err(Error::Captured);
        };
        match &mut place.last {
            Some(last) => last.advance(stream, info),
            none => {
                *none = Some(Last::new(shared, stream, info)?);
                Ok(())
            }
        }
    }
}

impl Place {
    fn is_of(&self, shared: &Event) -> bool {
        self.shared.raw() == shared.raw()
    }
}

impl Last {
    fn new(shared: &Event, stream: &Stream, info: CaptureInfo) -> Result<Self, Error> {
        let mut record = ptr::null_mut();
        let behind = info.dependencies;
        // SAFETY: the pointers are to a local CUgraphNode, and to so many nodes of the graph, which
        // is live, as it is being captured; the capture keeps the event.
        let status = unsafe {
            (stream.driver().table().graph_add_event_record_node)(
                &raw mut record,
                info.graph,
                behind.as_ptr(),
                behind.len(),
                shared.raw(),
            )
        };
        stream.check(status, "cuGraphAddEventRecordNode")?;
        let end = Event::new(stream.context())?;
        stream.record(&end)?;
        Ok(Self {
            stream: stream.as_raw(),
            end,
            record,
            behind,
        })
    }

    /// Moves the node behind another operation: nodes may not be destroyed during a capture.
    fn advance(&mut self, stream: &Stream, info: CaptureInfo) -> Result<(), Error> {
        let table = stream.driver().table();
        let edges = |change: unsafe extern "C" fn(RawGraph, *const RawNode, *const RawNode, usize) -> Status,
                     from: &[RawNode]| {
            let to = vec![self.record; from.len()];
            // SAFETY: as many nodes as edges, all of them of this graph, which is being captured.
            unsafe { change(info.graph, from.as_ptr(), to.as_ptr(), from.len()) }
        };
        if info.dependencies != self.behind {
            let status = edges(table.graph_remove_dependencies, &self.behind);
            stream.check(status, "cuGraphRemoveDependencies")?;
            let status = edges(table.graph_add_dependencies, &info.dependencies);
            stream.check(status, "cuGraphAddDependencies")?;
        }
        stream.record(&self.end)?;
        self.stream = stream.as_raw();
        self.behind = info.dependencies;
        Ok(())
    }
}
