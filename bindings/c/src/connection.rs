//! Connections by one call, and blocking operations on them.

use core::ffi::{c_char, c_void};
use core::time::Duration;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use doorbell::exchange::{Connection, Exchange, ExchangeError, Listener};
use doorbell::{Batch, Completion, CompletionError, ReadAccess, Remote, Success, WriteAccess};

use crate::argument::{end, object, result, store, text, timeout};
use crate::device::doorbell_device;
use crate::memory::{Region, doorbell_key, doorbell_memory};
use crate::status::doorbell_status::{DOORBELL_PEER_FAILED, DOORBELL_TIMED_OUT};
use crate::status::{Failure, doorbell_status, run};

/// The receives that may be posted on a connection.
pub const DOORBELL_MAX_RECEIVES: usize = 128;

/// What listens for connections. Ended by doorbell_listener_close().
pub struct doorbell_listener {
    listener: Listener,
}

/// A connection to one peer: a reliable connected (RC) queue pair. Ended by doorbell_disconnect().
pub struct doorbell_connection {
    link: Mutex<Link>,
}

/// A message that has arrived.
#[repr(C)]
pub struct doorbell_message {
    /// Its first byte, in the receive posted first of those that were left: that one is the
    /// caller's again.
    pub data: *mut c_void,
    /// Its length in bytes; of a peer's write with immediate data what it has written.
    pub length: usize,
    /// Its immediate data, if it has any.
    pub immediate: u32,
    /// Whether it has immediate data.
    pub has_immediate: bool,
    /// Whether it is a peer's write with immediate data: the bytes at data are as they were.
    pub is_write: bool,
}

struct Link {
    /// Until it fails; then why.
    connection: Result<Connection, Failure>,
    receives: Receives,
}

/// Receives complete in the order in which they are posted.
struct Receives {
    posted: VecDeque<(Arc<Region>, usize)>,
    arrived: VecDeque<doorbell_message>,
}

// SAFETY: the addresses in messages are C's, and followed by no code here.
unsafe impl Send for Receives {}

impl Receives {
    fn accept(&mut self, done: &Completion<'_>) -> Result<(), CompletionError> {
        let (length, immediate, is_write) = match done.result()? {
            Success::Receive { len, imm } => (len, imm, false),
            Success::ReceiveWrite { len, imm } => (len, Some(imm), true),
            _ => return Ok(()),
        };
        if let Some((region, offset)) = self.posted.pop_front() {
            self.arrived.push_back(doorbell_message {
                data: region.at(offset).cast(),
                length: length as usize,
                immediate: immediate.unwrap_or(0),
                has_immediate: immediate.is_some(),
                is_write,
            });
        }
        Ok(())
    }
}

impl Link {
    fn make(exchange: Exchange, device: &doorbell_device) -> Result<doorbell_connection, Failure> {
        // What peers may reach is decided by the rights of the memory.
        let connection = exchange.connection(&device.pd, |qp| qp.allow_remote_read().allow_remote_write(), [], b"")?;
        let link = Self {
            connection: Ok(connection),
            receives: Receives {
                posted: VecDeque::with_capacity(DOORBELL_MAX_RECEIVES),
                arrived: VecDeque::with_capacity(DOORBELL_MAX_RECEIVES),
            },
        };
        Ok(doorbell_connection { link: Mutex::new(link) })
    }

    /// The connection, if it has not failed.
    fn parts(&mut self) -> Result<(&mut Connection, &mut Receives), Failure> {
        match &mut self.connection {
            Ok(connection) => Ok((connection, &mut self.receives)),
            Err(failure) => Err(failure.clone()),
        }
    }

    /// Ends the connection: no device uses the caller's memory any more.
    fn fail(&mut self, error: ExchangeError) -> Failure {
        let failure = Failure::from(error);
        self.connection = Err(failure.before("the connection has failed before"));
        self.receives.posted.clear();
        failure
    }

    /// Posts a request and waits for its completion.
    fn request(
        &mut self,
        timeout: Option<Duration>,
        post: impl for<'q> FnOnce(&mut Batch<'q, 'static>),
    ) -> Result<(), Failure> {
        let (connection, receives) = self.parts()?;
        connection.post(post)?;
        let flushed = connection.flush(timeout, |done| receives.accept(&done));
        flushed.map_err(|error| self.fail(error))
    }

    fn receive(&mut self, timeout: Option<Duration>) -> Result<doorbell_message, Failure> {
        if let Some(message) = self.receives.arrived.pop_front() {
            return Ok(message);
        }
        let (connection, receives) = self.parts()?;
        let next = connection.next_with(timeout, |done| {
            receives.accept(&done)?;
            Ok(receives.arrived.pop_front())
        });
        match next {
            Ok(Some(message)) => Ok(message),
            Ok(None) => Err(Failure::new(
                DOORBELL_PEER_FAILED,
                "the peer has disconnected, and sends nothing more",
            )),
            Err(error @ ExchangeError::TimedOut { .. }) => Err(Failure::new(DOORBELL_TIMED_OUT, error)),
            Err(error) => Err(self.fail(error)),
        }
    }
}

impl doorbell_connection {
    /// Runs alone on the connection.
    fn with<R>(&self, act: impl FnOnce(&mut Link) -> R) -> R {
        // A panic has left a connection that is whole, or has failed.
        act(&mut self.link.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Listens on an address, "HOST:PORT" as "0.0.0.0:18516" or "[::1]:18516"; port 0 is any free one.
/// Hosts are not authenticated: listen only on trusted networks.
///
/// DOORBELL_CONNECTION_FAILED if the address is not of this host, or in use.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_listen(
    address: *const c_char,
    listener: *mut *mut doorbell_listener,
) -> doorbell_status {
    let make = || {
        // SAFETY: a string or null, by contract.
        let address = unsafe { text(address, "address") }?;
        Ok(doorbell_listener {
            listener: Listener::bind(address)?,
        })
    };
    // SAFETY: the caller's place for a handle, by contract.
    run(|| unsafe { store(listener, "listener", make) })
}

/// The TCP port that it listens on; 0 of NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_listener_port(listener: *const doorbell_listener) -> u16 {
    // SAFETY: a handle or null, by contract.
    let listener = unsafe { object(listener, "listener") };
    listener.map_or(0, |listener| listener.listener.local_addr().port())
}

/// Waits for a peer and connects to it, for so long each; several threads may.
///
/// DOORBELL_TIMED_OUT if none comes in time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_accept(
    listener: *const doorbell_listener,
    device: *const doorbell_device,
    timeout_ms: u32,
    connection: *mut *mut doorbell_connection,
) -> doorbell_status {
    let make = || {
        // SAFETY: a handle or null, by contract.
        let listener = unsafe { object(listener, "listener") }?;
        // SAFETY: a handle or null, by contract.
        let device = unsafe { object(device, "device") }?;
        let exchange = listener.listener.accept(timeout(timeout_ms).unwrap_or(Duration::MAX))?;
        Link::make(exchange, device)
    };
    // SAFETY: the caller's place for a handle, by contract.
    run(|| unsafe { store(connection, "connection", make) })
}

/// Ends the handle of what listens. Its connections stay.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_listener_close(listener: *mut doorbell_listener) -> doorbell_status {
    run(|| {
        // SAFETY: a handle that ends here, by contract.
        drop(unsafe { end(listener) });
        Ok(())
    })
}

/// Connects to a peer that listens on "HOST:PORT", or will in this time.
///
/// DOORBELL_CONNECTION_FAILED if none does.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_connect(
    device: *const doorbell_device,
    address: *const c_char,
    timeout_ms: u32,
    connection: *mut *mut doorbell_connection,
) -> doorbell_status {
    let make = || {
        // SAFETY: a handle or null, by contract.
        let device = unsafe { object(device, "device") }?;
        // SAFETY: a string or null, by contract.
        let address = unsafe { text(address, "address") }?;
        let exchange = Exchange::connect(address, timeout(timeout_ms).unwrap_or(Duration::MAX))?;
        Link::make(exchange, device)
    };
    // SAFETY: the caller's place for a handle, by contract.
    run(|| unsafe { store(connection, "connection", make) })
}

/// Posts a receive: the length bytes at offset of the memory are the connection's, for one message
/// of at most that length, until doorbell_receive() returns it or the connection is ended. Messages
/// take receives in the order in which they were posted; a peer that sends before one is posted
/// waits. Returns at once.
///
/// DOORBELL_INVALID_ARGUMENT also if DOORBELL_MAX_RECEIVES are posted or not taken yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_post_receive(
    connection: *mut doorbell_connection,
    memory: *const doorbell_memory,
    offset: usize,
    length: usize,
) -> doorbell_status {
    run(|| {
        // SAFETY: handles or null, by contract.
        let (connection, memory) = unsafe { (object(connection, "connection")?, object(memory, "memory")?) };
        let part = memory.region.part(offset, length)?;
        connection.with(|link| {
            let (connection, receives) = link.parts()?;
            if receives.posted.len() + receives.arrived.len() >= DOORBELL_MAX_RECEIVES {
                return Err(Failure::invalid(format!(
                    "{DOORBELL_MAX_RECEIVES} receives are posted already"
                )));
            }
            connection.receive(part)?;
            receives.posted.push_back((Arc::clone(&memory.region), offset));
            Ok(())
        })
    })
}

/// Waits for the next message. It stays in the memory of its receive.
///
/// DOORBELL_TIMED_OUT if none arrives in time, after which the connection can be used as before;
/// DOORBELL_PEER_FAILED if the peer has disconnected, and all its messages have been taken.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_receive(
    connection: *mut doorbell_connection,
    timeout_ms: u32,
    message: *mut doorbell_message,
) -> doorbell_status {
    run(|| {
        // SAFETY: a handle or null, by contract.
        let connection = unsafe { object(connection, "connection") }?;
        // SAFETY: the caller's place, by contract.
        let message = unsafe { result(message, "message") }?;
        message.write(connection.with(|link| link.receive(timeout(timeout_ms)))?);
        Ok(())
    })
}

/// Sends the length bytes at offset of the memory as one message, with 32 bits of immediate data
/// unless that is NULL, and waits until the peer has received it.
///
/// If it fails or times out after it was begun, the connection has failed: it does not use memory
/// any more, later calls return the same status, and it can only be ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_send(
    connection: *mut doorbell_connection,
    memory: *const doorbell_memory,
    offset: usize,
    length: usize,
    immediate: *const u32,
    timeout_ms: u32,
) -> doorbell_status {
    run(|| {
        // SAFETY: handles or null, by contract.
        let (connection, memory) = unsafe { (object(connection, "connection")?, object(memory, "memory")?) };
        let part = memory.region.part(offset, length)?;
        // SAFETY: a number or null, by contract.
        let immediate = unsafe { immediate.as_ref() }.copied();
        let post = |batch: &mut Batch<'_, 'static>| match immediate {
            Some(immediate) => drop(batch.send(part).imm(immediate)),
            None => drop(batch.send(part)),
        };
        connection.with(|link| link.request(timeout(timeout_ms), post))
    })
}

/// Writes the length bytes at offset of the memory to the peer's memory that the key is of, at
/// offset_there, and waits until the peer's device has them. With immediate data, unless that is
/// NULL, a receive of the peer returns, as doorbell_message describes; without it the peer is not
/// notified.
///
/// DOORBELL_INVALID_ARGUMENT if the key grants no writing, or the bytes are beyond its memory;
/// DOORBELL_DEVICE_ERROR if the peer's device does not accept the key. For the rest it is as
/// doorbell_send().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_write(
    connection: *mut doorbell_connection,
    memory: *const doorbell_memory,
    offset: usize,
    length: usize,
    key: *const doorbell_key,
    offset_there: u64,
    immediate: *const u32,
    timeout_ms: u32,
) -> doorbell_status {
    run(|| {
        // SAFETY: handles or null, by contract.
        let (connection, memory) = unsafe { (object(connection, "connection")?, object(memory, "memory")?) };
        let part = memory.region.part(offset, length)?;
        // SAFETY: a key or null, by contract.
        let key = unsafe { object(key, "key") }?;
        let remote = Remote::<WriteAccess>::from_bytes(&key.bytes).map_err(Failure::invalid)?;
        let remote = there(remote.slice(offset_there, length as u64), offset_there, length)?;
        // SAFETY: a number or null, by contract.
        let immediate = unsafe { immediate.as_ref() }.copied();
        let post = |batch: &mut Batch<'_, 'static>| match immediate {
            Some(immediate) => drop(batch.write(part, remote).imm(immediate)),
            None => drop(batch.write(part, remote)),
        };
        connection.with(|link| link.request(timeout(timeout_ms), post))
    })
}

/// Reads length bytes of the peer's memory that the key is of, from offset_there on, to the memory
/// at offset. The peer is not notified.
///
/// DOORBELL_INVALID_ARGUMENT if the key grants no reading, or the bytes are beyond its memory; for
/// the rest it is as doorbell_write().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_read(
    connection: *mut doorbell_connection,
    memory: *const doorbell_memory,
    offset: usize,
    length: usize,
    key: *const doorbell_key,
    offset_there: u64,
    timeout_ms: u32,
) -> doorbell_status {
    run(|| {
        // SAFETY: handles or null, by contract.
        let (connection, memory) = unsafe { (object(connection, "connection")?, object(memory, "memory")?) };
        let part = memory.region.part(offset, length)?;
        // SAFETY: a key or null, by contract.
        let key = unsafe { object(key, "key") }?;
        let remote = Remote::<ReadAccess>::from_bytes(&key.bytes).map_err(Failure::invalid)?;
        let remote = there(remote.slice(offset_there, length as u64), offset_there, length)?;
        let post = |batch: &mut Batch<'_, 'static>| drop(batch.read(part, remote));
        connection.with(|link| link.request(timeout(timeout_ms), post))
    })
}

fn there<K>(slice: Option<K>, offset: u64, len: usize) -> Result<K, Failure> {
    slice.ok_or_else(|| {
        Failure::invalid(format!(
            "{len} bytes at offset {offset} are beyond the end of the key's memory"
        ))
    })
}

/// Ends the handle of a connection. Waits until the peer disconnects, too, so that what was sent
/// last is acknowledged, for the time that doorbell_accept() or doorbell_connect() had. After it no
/// device uses the memory of posted receives.
///
/// DOORBELL_PEER_FAILED or DOORBELL_TIMED_OUT if the peer does not; the handle is ended all the
/// same.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_disconnect(connection: *mut doorbell_connection) -> doorbell_status {
    run(|| {
        // SAFETY: a handle that ends here, by contract.
        let Some(connection) = (unsafe { end(connection) }) else {
            return Ok(());
        };
        let link = connection.link.into_inner().unwrap_or_else(PoisonError::into_inner);
        // One that has failed has reported so, and there is nothing to wait for.
        link.connection.map_or(Ok(()), |connection| Ok(connection.finish()?))
    })
}
