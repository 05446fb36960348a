//! File descriptor passing between the ranks of a host: each gets those of the others' device
//! memory.
//!
//! A rank listens on an abstract Unix socket (unix(7)) with a random name, sent over the control
//! mesh, and passes its descriptor (SCM_RIGHTS) to peers of the same user that present the name. A
//! driver's descriptors cannot be reopened through `/proc/PID/fd` as a memfd's can.

use std::fs;
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

use doorbell_rendezvous::random;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, getsockopt, recvmsg, sendmsg, sockopt};

use crate::bootstrap::{Exchange, ExchangeError};
use crate::types::Rank;

/// Bytes of an offer: the boot id and the socket name.
const OFFER_BYTES: usize = 32;
/// Bytes of a hello: the name, and the sender's rank.
const HELLO_BYTES: usize = 20;
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The kernel's boot id: random, and the same for all processes and containers (random(4)).
fn boot_id() -> Option<[u8; 16]> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    Some(u128::from_str_radix(&digits, 16).ok()?.to_be_bytes())
}

/// Passes `own` to each rank of this host, and returns the descriptors received, by rank; `None`
/// for unreachable ranks and this one. Collective.
///
/// # Errors
/// Those of the exchange. Failures between two ranks of a host are not errors.
pub(super) fn exchange_descriptors(
    exchange: &mut dyn Exchange,
    rank: Rank,
    own: BorrowedFd<'_>,
) -> Result<Vec<Option<OwnedFd>>, ExchangeError> {
    let server = DescriptorServer::open();
    let offers = exchange.all_gather(&server.as_ref().map_or([0; OFFER_BYTES], DescriptorServer::offer))?;
    let mut connected: Vec<_> = (0..)
        .map(Rank)
        .zip(&offers)
        .map(|(peer, offer)| server.as_ref().filter(|_| peer != rank)?.connect(offer, rank))
        .collect();
    // Failed connections are announced, so that no rank waits for them.
    let mine: Vec<u8> = connected.iter().map(|one| u8::from(one.is_some())).collect();
    let theirs = exchange.all_gather(&mine)?;
    let coming: Vec<_> = theirs.iter().map(|one| one.get(rank.index()) == Some(&1)).collect();
    if let Some(server) = &server {
        server.serve(own, &coming);
    }
    Ok(connected
        .iter_mut()
        .map(|stream| receive_descriptor(stream.as_mut()?))
        .collect())
}

struct DescriptorServer {
    listener: UnixListener,
    boot: [u8; 16],
    name: [u8; 16],
}

impl DescriptorServer {
    fn open() -> Option<Self> {
        let name = random().ok()?;
        let listener = UnixListener::bind_addr(&address(&name)?).ok()?;
        listener.set_nonblocking(true).ok()?;
        Some(Self {
            listener,
            boot: boot_id()?,
            name,
        })
    }

    fn offer(&self) -> [u8; OFFER_BYTES] {
        let mut offer = [0; OFFER_BYTES];
        offer[..16].copy_from_slice(&self.boot);
        offer[16..].copy_from_slice(&self.name);
        offer
    }

    fn connect(&self, offer: &[u8], rank: Rank) -> Option<UnixStream> {
        let (boot, name) = offer.split_first_chunk::<16>()?;
        let name: [u8; 16] = name.try_into().ok()?;
        (*boot == self.boot).then_some(())?;
        let mut stream = UnixStream::connect_addr(&address(&name)?).ok()?;
        let mut hello = [0; HELLO_BYTES];
        hello[..16].copy_from_slice(&name);
        hello[16..].copy_from_slice(&rank.0.to_be_bytes());
        stream.set_read_timeout(Some(EXCHANGE_TIMEOUT)).ok()?;
        stream.write_all(&hello).ok()?;
        is_same_user(&stream).then_some(stream)
    }

    fn serve(&self, descriptor: BorrowedFd<'_>, coming: &[bool]) {
        let until = Instant::now() + EXCHANGE_TIMEOUT;
        let mut left = coming.to_vec();
        while left.contains(&true) && Instant::now() < until {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    let Some(peer) = self.authenticate(stream.try_clone().ok()) else {
                        continue;
                    };
                    let Some(waited) = left.get_mut(peer.index()) else {
                        continue;
                    };
                    // A peer that does not take it is gone, and reports that itself.
                    let _ = send_descriptor(&stream, descriptor);
                    *waited = false;
                }
                Err(_) => std::thread::sleep(POLL_INTERVAL),
            }
        }
    }

    /// The peer has the same user and presents the name from the control mesh.
    fn authenticate(&self, stream: Option<UnixStream>) -> Option<Rank> {
        let mut stream = stream?;
        is_same_user(&stream).then_some(())?;
        stream.set_nonblocking(false).ok()?;
        stream.set_read_timeout(Some(EXCHANGE_TIMEOUT)).ok()?;
        let mut hello = [0; HELLO_BYTES];
        stream.read_exact(&mut hello).ok()?;
        let (name, rank) = hello.split_first_chunk::<16>()?;
        (*name == self.name).then(|| Some(Rank(u32::from_be_bytes(rank.try_into().ok()?))))?
    }
}

fn address(name: &[u8; 16]) -> Option<SocketAddr> {
    let digits = u128::from_be_bytes(*name);
    SocketAddr::from_abstract_name(format!("doorbell-gpu-{digits:032x}")).ok()
}

fn is_same_user(stream: &UnixStream) -> bool {
    getsockopt(stream, sockopt::PeerCredentials).is_ok_and(|peer| doorbell_trust::is_own_user(peer.uid()))
}

fn send_descriptor(stream: &UnixStream, descriptor: BorrowedFd<'_>) -> nix::Result<()> {
    let descriptors = [descriptor.as_raw_fd()];
    let rights = [ControlMessage::ScmRights(&descriptors)];
    let flags = MsgFlags::MSG_NOSIGNAL;
    sendmsg::<()>(stream.as_raw_fd(), &[IoSlice::new(&[1])], &rights, flags, None).map(drop)
}

fn receive_descriptor(stream: &mut UnixStream) -> Option<OwnedFd> {
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
            // SAFETY: the kernel has just installed them in this process, so they have no other
            // owner.
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
                    let given = exchange_descriptors(group.control_mut(), rank, own.as_fd()).unwrap();
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
