//! Local operations, which send no packets and take no PSNs: bind memory window and local
//! invalidate (IBTA vol 1, 10.6.7.2 and 10.8.3).
//!
//! Each is executed when it begins: before any later request, so that a key is valid when the peer
//! learns it, and after earlier READs and atomics if fenced. It completes in queue order.

use crate::memory::{AccessError, Invalidator, Memory};
use crate::outbox::Outbox;
use crate::qp::Connection;
use crate::qp::requester::Requester;
use crate::work::{Operation, Status};

impl Requester {
    /// Begins the next request that has packets. False when there is none, or it must wait.
    ///
    /// # Errors
    /// The status with which the oldest request fails.
    pub(super) fn advance_cursor<M: Memory>(
        &mut self,
        connection: &Connection,
        draining: bool,
        memory: &mut M,
        out: &mut Outbox,
    ) -> Result<bool, Status> {
        while self.cursor < self.queue.tail {
            if self.cursor == self.begun && !self.begin(connection, draining, memory)? {
                return Ok(false);
            }
            if self.queue.get(self.cursor).packets > 0 {
                return Ok(true);
            }
            self.cursor += 1;
            self.complete_local(connection, out);
        }
        // A local request waits for the completion of those before it.
        Ok(self.local_end > self.queue.head && self.request_ack())
    }

    /// Executes the local request at the cursor. False if it failed and is not the oldest yet.
    pub(super) fn begin_local<M: Memory>(
        &mut self,
        operation: &Operation,
        connection: &Connection,
        memory: &mut M,
    ) -> Result<bool, Status> {
        let done = match operation {
            Operation::Bind(bind) => memory.bind(connection.access_context(), bind),
            Operation::Invalidate { rkey } => memory.invalidate(connection.access_context(), *rkey, Invalidator::Local),
            _ => Err(AccessError),
        };
        if done.is_err() {
            return self.fail_or_stall(Status::WindowBind).map(|()| false);
        }
        let first = self.next;
        let entry = self.queue.get_mut(self.cursor);
        entry.first = first;
        entry.packets = 0;
        self.begun += 1;
        self.local_end = self.begun;
        Ok(true)
    }

    pub(super) fn complete_local(&mut self, connection: &Connection, out: &mut Outbox) {
        while self.queue.head < self.begun && self.queue.get(self.queue.head).packets == 0 {
            self.complete(Status::Success, connection, out);
        }
    }
}
