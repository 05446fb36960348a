//! File descriptors between the ranks of a host: how each gets what stands for the others' device memory.
//!
//! A rank listens at an abstract Unix address (unix(7)) with a random name, tells it over the control mesh, and gives its descriptor to whoever connects and is of the same user. The descriptors of a driver cannot be opened from
//! `/proc/PID/fd`, as a memfd's can, for there is nothing behind them to open anew. Nothing is left when it is over: the address goes with its socket.

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, getsockopt, recvmsg, sendmsg, sockopt};
use nix::unistd::geteuid;

use crate::bootstrap::{Exchange, ExchangeError, Nonce};
use crate::executor::boot;
use crate::types::Rank;

/// Bytes of what a rank tells: its kernel and the name of its address.
const OFFER: usize = 32;
/// Bytes that whoever connects says first: the name, and its rank.
const HELLO: usize = 20;
/// How long ranks of one host may take to give what they have promised.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between two looks at an address that nobody has connected to.
const PAUSE: Duration = Duration::from_millis(1);

/// Gives each rank of this host `own`, and returns what each gave, by rank: none of those that cannot be reached so, nor of this rank itself. All ranks call it.
///
/// # Errors
/// Of the exchange. What goes wrong between two ranks of a host is none: they do not reach each other then.
pub(super) fn share(
    exchange: &mut dyn Exchange,
    rank: Rank,
    own: BorrowedFd<'_>,
) -> Result<Vec<Option<OwnedFd>>, ExchangeError> {
    let door = Door::open();
    let said = exchange.all_gather(&door.as_ref().map_or([0; OFFER], Door::offer))?;
    let mut connected: Vec<_> = (0..)
        .map(Rank)
        .zip(&said)
        .map(|(peer, offer)| door.as_ref().filter(|_| peer != rank)?.connect(offer, rank))
        .collect();
    // Nobody waits for one who could not connect.
    let mine: Vec<u8> = connected.iter().map(|one| u8::from(one.is_some())).collect();
    let theirs = exchange.all_gather(&mine)?;
    let coming: Vec<_> = theirs.iter().map(|one| one.get(rank.index()) == Some(&1)).collect();
    if let Some(door) = &door {
        door.serve(own, &coming);
    }
    Ok(connected.iter_mut().map(|stream| receive(stream.as_mut()?)).collect())
}

/// An address of this rank's.
struct Door {
    listener: UnixListener,
    boot: [u8; 16],
    name: [u8; 16],
}

impl Door {
    fn open() -> Option<Self> {
        let name = *Nonce::random().ok()?.bytes();
        let listener = UnixListener::bind_addr(&address(&name)?).ok()?;
        listener.set_nonblocking(true).ok()?;
        Some(Self {
            listener,
            boot: boot()?,
            name,
        })
    }

    fn offer(&self) -> [u8; OFFER] {
        let mut offer = [0; OFFER];
        offer[..16].copy_from_slice(&self.boot);
        offer[16..].copy_from_slice(&self.name);
        offer
    }

    /// Connects to a peer on the same kernel, and says who this is.
    fn connect(&self, offer: &[u8], rank: Rank) -> Option<UnixStream> {
        let (boot, name) = offer.split_first_chunk::<16>()?;
        let name: [u8; 16] = name.try_into().ok()?;
        (*boot == self.boot).then_some(())?;
        let mut stream = UnixStream::connect_addr(&address(&name)?).ok()?;
        let mut hello = [0; HELLO];
        hello[..16].copy_from_slice(&name);
        hello[16..].copy_from_slice(&rank.0.to_be_bytes());
        stream.set_read_timeout(Some(PATIENCE)).ok()?;
        stream.write_all(&hello).ok()?;
        is_ours(&stream).then_some(stream)
    }

    /// Gives `descriptor` to the ranks that have connected, and to nobody else.
    fn serve(&self, descriptor: BorrowedFd<'_>, coming: &[bool]) {
        let until = Instant::now() + PATIENCE;
        let mut left = coming.to_vec();
        while left.contains(&true) && Instant::now() < until {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    let Some(peer) = self.greeted(stream.try_clone().ok()) else {
                        continue;
                    };
                    let Some(waited) = left.get_mut(peer.index()) else {
                        continue;
                    };
                    // It has gone if it does not take it, and says so itself.
                    let _ = give(&stream, descriptor);
                    *waited = false;
                }
                Err(_) => std::thread::sleep(PAUSE),
            }
        }
    }

    /// Who has connected, if it is a rank of this user's that knows the name from the control mesh.
    fn greeted(&self, stream: Option<UnixStream>) -> Option<Rank> {
        let mut stream = stream?;
        is_ours(&stream).then_some(())?;
        stream.set_nonblocking(false).ok()?;
        stream.set_read_timeout(Some(PATIENCE)).ok()?;
        let mut hello = [0; HELLO];
        stream.read_exact(&mut hello).ok()?;
        let (name, rank) = hello.split_first_chunk::<16>()?;
        (*name == self.name).then(|| Some(Rank(u32::from_be_bytes(rank.try_into().ok()?))))?
    }
}

fn address(name: &[u8; 16]) -> Option<SocketAddr> {
    let digits = u128::from_be_bytes(*name);
    SocketAddr::from_abstract_name(format!("doorbell-gpu-{digits:032x}")).ok()
}

/// Whether the other end is a process of this user.
fn is_ours(stream: &UnixStream) -> bool {
    getsockopt(stream, sockopt::PeerCredentials).is_ok_and(|peer| peer.uid() == geteuid().as_raw())
}

fn give(stream: &UnixStream, descriptor: BorrowedFd<'_>) -> nix::Result<()> {
    let descriptors = [descriptor.as_raw_fd()];
    let rights = [ControlMessage::ScmRights(&descriptors)];
    let flags = MsgFlags::MSG_NOSIGNAL;
    sendmsg::<()>(stream.as_raw_fd(), &[IoSlice::new(&[1])], &rights, flags, None).map(drop)
}

/// What the other end gives; none if it gives nothing in time.
fn receive(stream: &mut UnixStream) -> Option<OwnedFd> {
    let mut byte = [0];
    let mut bytes = [IoSliceMut::new(&mut byte)];
    let mut room = nix::cmsg_space!([RawFd; 1]);
    let message = recvmsg::<()>(
        stream.as_raw_fd(),
        &mut bytes,
        Some(&mut room),
        MsgFlags::MSG_CMSG_CLOEXEC,
    )
    .ok()?;
    let mut given = Vec::new();
    for control in message.cmsgs().ok()? {
        if let ControlMessageOwned::ScmRights(descriptors) = control {
            // SAFETY: the kernel has opened them for this process just now, and nobody else knows of them.
            given.extend(
                descriptors
                    .into_iter()
                    .map(|descriptor| unsafe { OwnedFd::from_raw_fd(descriptor) }),
            );
        }
    }
    given.into_iter().next()
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::thread;

    use super::*;
    use crate::bootstrap::Group;

    #[test]
    fn each_rank_gets_the_descriptors_of_all_others() {
        let groups = Group::local(4).unwrap();
        thread::scope(|scope| {
            for mut group in groups {
                scope.spawn(move || {
                    let rank = group.rank();
                    let mut own = tempfile();
                    write!(own, "rank {rank}").unwrap();
                    let given = share(group.control_mut(), rank, own.as_fd()).unwrap();
                    for (peer, descriptor) in given.into_iter().enumerate() {
                        let Some(descriptor) = descriptor else {
                            assert_eq!(peer, rank.index());
                            continue;
                        };
                        let mut bytes = [0; 6];
                        std::os::unix::fs::FileExt::read_exact_at(&File::from(descriptor), &mut bytes, 0).unwrap();
                        assert_eq!(bytes, *format!("rank {peer}").as_bytes());
                    }
                });
            }
        });
    }

    fn tempfile() -> File {
        nix::sys::memfd::memfd_create("descriptor", nix::sys::memfd::MFdFlags::MFD_CLOEXEC)
            .unwrap()
            .into()
    }
}
