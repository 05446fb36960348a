//! A peer's socket that shows the IP header fields of each packet, for tests, also those in `src`.

use std::io::IoSliceMut;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::Duration;

use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg, setsockopt, sockopt};

/// A received packet.
#[derive(Debug)]
pub(crate) struct Observed {
    pub(crate) traffic_class: u8,
    pub(crate) hop_limit: u8,
    pub(crate) bytes: Vec<u8>,
}

pub(crate) struct Observer(pub(crate) UdpSocket);

impl Observer {
    pub(crate) fn bind(addr: SocketAddr) -> Self {
        let socket = UdpSocket::bind(addr).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        if addr.is_ipv4() {
            setsockopt(&socket, sockopt::IpRecvTos, &true).unwrap();
            setsockopt(&socket, sockopt::Ipv4RecvTtl, &true).unwrap();
        } else {
            setsockopt(&socket, sockopt::Ipv6RecvTClass, &true).unwrap();
            setsockopt(&socket, sockopt::Ipv6RecvHopLimit, &true).unwrap();
        }
        Self(socket)
    }

    /// The next packet.
    pub(crate) fn observe(&self) -> Observed {
        let (mut bytes, mut control) = ([0; 8192], nix::cmsg_space!(libc::c_int, libc::c_int));
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let fd = self.0.as_raw_fd();
        let message = recvmsg::<()>(fd, &mut parts, Some(&mut control), MsgFlags::empty()).unwrap();
        let (mut traffic_class, mut hop_limit) = (None, None);
        for control in message.cmsgs().unwrap() {
            match control {
                ControlMessageOwned::Ipv4Tos(class) => traffic_class = Some(class),
                ControlMessageOwned::Ipv6TClass(class) => traffic_class = u8::try_from(class).ok(),
                ControlMessageOwned::Ipv4Ttl(hops) | ControlMessageOwned::Ipv6HopLimit(hops) => {
                    hop_limit = u8::try_from(hops).ok();
                }
                other => panic!("{other:?}"),
            }
        }
        let len = message.bytes;
        Observed {
            traffic_class: traffic_class.unwrap(),
            hop_limit: hop_limit.unwrap(),
            bytes: bytes[..len].to_vec(),
        }
    }
}
