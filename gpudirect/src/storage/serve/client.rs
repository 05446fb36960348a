//! The client's side.

use std::ffi::OsStr;
use std::time::Duration;

use doorbell_verbs::exchange::{Connection, Exchange};
use doorbell_verbs::{Buffer, GrantsWrite, Local, ProtectionDomain, Remote, Success};

use super::ServeError;
use super::message::{Answer, MAX_ANSWER, MAX_READ, MAX_REQUEST, Request};

/// Reads files of a [`FileServer`](super::FileServer).
#[derive(Debug)]
pub struct FileClient {
    peer: Connection,
    /// With the server while a request is sent.
    outbox: Option<Buffer>,
    timeout: Duration,
}

impl FileClient {
    /// By a connected exchange, whose peer calls [`FileServer::serve`](super::FileServer::serve).
    ///
    /// # Errors
    /// Of the connection.
    pub fn new(pd: &ProtectionDomain, exchange: Exchange) -> Result<Self, ServeError> {
        let inboxes = pd.register_chunks(vec![0; 2 * MAX_ANSWER], MAX_ANSWER, Local)?;
        let peer = exchange.connection(pd, |qp| qp.allow_remote_write(), inboxes, b"")?;
        let outbox = pd.register(vec![0; MAX_REQUEST], Local)?;
        Ok(Self {
            peer,
            outbox: Some(outbox),
            timeout: Duration::from_secs(60),
        })
    }

    /// The time for an answer, of up to 1 GiB: 60 seconds if this is not called.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// What the server gives every client that connects, without a meaning here.
    #[must_use]
    pub fn data(&self) -> &[u8] {
        self.peer.peer_data()
    }

    /// The length of a file. Reads of it, up to the next call of this, fail if it was changed
    /// since.
    ///
    /// # Errors
    /// [`ServeError::Refused`] with the server's reason; of the connection.
    pub fn len(&mut self, name: impl AsRef<OsStr>) -> Result<u64, ServeError> {
        let name = name.as_ref().to_owned();
        self.request(&Request::Length { name })
    }

    /// Has the server write the bytes from `offset` on to `into`, which is memory of this process,
    /// registered on the protection domain of [`new`](Self::new), until it is full or the file
    /// ends: the count of bytes. Those of GPU memory are visible to kernels after
    /// [`Arrivals::publish`](crate::Arrivals::publish).
    ///
    /// # Errors
    /// [`ServeError::Read`] with the server's reason, or of the connection. Any byte of `into` may
    /// have changed, and after an error of the connection may still change.
    pub fn read_at<K: GrantsWrite>(
        &mut self,
        name: impl AsRef<OsStr>,
        offset: u64,
        into: Remote<K>,
    ) -> Result<u64, ServeError> {
        let mut done = 0;
        for part in into.chunks(MAX_READ) {
            let at = offset.saturating_add(done);
            let request = Request::Read {
                name: name.as_ref().to_owned(),
                offset: at,
                into: Remote::from_raw(part.addr(), part.rkey().0, part.len()),
            };
            let count = self.request(&request);
            let count = count.and_then(|count| match count {
                beyond if beyond > part.len() => Err(ServeError::Protocol("a count beyond what was requested")),
                count => Ok(count),
            });
            let count = count.map_err(|error| error.of(name.as_ref(), at, part.len()))?;
            done += count;
            if count < part.len() {
                break;
            }
        }
        Ok(done)
    }

    fn request(&mut self, request: &Request) -> Result<u64, ServeError> {
        let bytes = request.to_bytes()?;
        let mut outbox = self
            .outbox
            .take()
            .ok_or(ServeError::Protocol("nothing: an earlier request has failed"))?;
        outbox[..bytes.len()].copy_from_slice(&bytes);
        self.peer.send(outbox.part(..bytes.len()))?;
        loop {
            match self.peer.wait(self.timeout)? {
                (Success::Receive { len, .. }, inbox) => {
                    let answer = Answer::from_bytes(&inbox[..len as usize]);
                    self.peer.receive(inbox)?;
                    while self.outbox.is_none() {
                        self.outbox = Some(self.peer.wait(self.timeout)?.1);
                    }
                    return match answer? {
                        Answer::Done(value) => Ok(value),
                        Answer::Failed { errno, text } => Err(ServeError::Refused { errno, text }),
                    };
                }
                (_, outbox) => self.outbox = Some(outbox),
            }
        }
    }

    /// Leaves, once the server has answered everything.
    ///
    /// # Errors
    /// Of the connection.
    pub fn finish(self) -> Result<(), ServeError> {
        Ok(self.peer.finish()?)
    }
}
