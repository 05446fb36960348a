//! Multicast groups of UD identifiers: joining, leaving, and what reaches their members.

use std::ffi::c_void;
use std::net::{Ipv4Addr, SocketAddr};
use std::ptr;
use std::time::{Duration, Instant};

use doorbell_roce_proto::Gid;
use doorbell_roce_proto::wire::{GRH_LEN, ip_header_addresses};
use doorbell_softroce_rdmacm::*;
use doorbell_verbs_sys::rdmacm::*;
use doorbell_verbs_sys::*;

use crate::common::*;

const MULTICAST_QPN: u32 = 0x00ff_ffff;
const ADDRESS_AND_FLAGS: u32 = 3;
const SENDONLY: u32 = 1;

/// A group of this process alone.
fn group(last: u8) -> SocketAddr {
    let pid = std::process::id();
    (Ipv4Addr::new(239, 1 + (pid >> 8) as u8 % 250, pid as u8, last), 0).into()
}

/// A bound UD identifier with a queue pair, and memory for its receives.
struct Member {
    id: Id,
    mr: *mut ibv_mr,
    inbox: Box<[u8; 256]>,
}

impl Member {
    fn new(channel: *mut rdma_event_channel, device: u8) -> Self {
        let id = Id::new(channel, RDMA_PS_UDP);
        // SAFETY: live.
        unsafe { ok(rdma_bind_addr(id.0, at(&sys(SocketAddr::new(own_address(device), 0))))) };
        let mut init = qp_init();
        init.qp_type = IBV_QPT_UD;
        let mut inbox = Box::new([0; 256]);
        // SAFETY: live; the memory is until its region is deregistered.
        let mr = unsafe {
            ok(rdma_create_qp(id.0, ptr::null_mut(), &mut init));
            let memory = inbox.as_mut_ptr().cast();
            (doorbell_softroce_ibverbs::api().reg_mr)(id.get().pd, memory, 256, IBV_ACCESS_LOCAL_WRITE as i32)
        };
        assert!(!mr.is_null());
        Self { id, mr, inbox }
    }

    fn join(&self, channel: *mut rdma_event_channel, group: SocketAddr) -> rdma_ud_param {
        let context = ptr::from_ref(self).cast_mut().cast::<c_void>();
        // SAFETY: live, the event until it is acknowledged.
        unsafe {
            ok(rdma_join_multicast(self.id.0, at(&sys(group)), context));
            let event = event(channel, RDMA_CM_EVENT_MULTICAST_JOIN);
            assert_eq!(((*event).id, (*event).status), (self.id.0, 0));
            let ud = (*event).param.ud;
            assert_eq!(ud.private_data, context.cast_const());
            ok(rdma_ack_cm_event(event));
            ud
        }
    }

    fn leave(&self, group: SocketAddr) {
        // SAFETY: live.
        ok(unsafe { rdma_leave_multicast(self.id.0, at(&sys(group))) });
    }

    fn receive(&self) {
        // SAFETY: live.
        unsafe {
            let mut sge = ibv_sge {
                addr: self.inbox.as_ptr() as u64,
                length: 256,
                lkey: (*self.mr).lkey,
            };
            let mut receive = ibv_recv_wr {
                wr_id: 1,
                next: ptr::null_mut(),
                sg_list: &mut sge,
                num_sge: 1,
            };
            ok(inline::post_recv(self.id.get().qp, &mut receive, &mut ptr::null_mut()));
        }
    }

    fn send(&self, to: &rdma_ud_param, message: &[u8]) {
        let api = doorbell_softroce_ibverbs::api();
        let mut vector = to.ah_attr;
        // SAFETY: live; inline data is copied.
        unsafe {
            let ah = (api.create_ah.unwrap())(self.id.get().pd, &mut vector);
            assert!(!ah.is_null());
            let mut sge = ibv_sge {
                addr: message.as_ptr() as u64,
                length: message.len() as u32,
                lkey: 0,
            };
            let mut send: ibv_send_wr = core::mem::zeroed();
            send.sg_list = &mut sge;
            send.num_sge = 1;
            send.opcode = IBV_WR_SEND;
            send.send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE;
            send.wr.ud.ah = ah;
            send.wr.ud.remote_qpn = to.qp_num;
            send.wr.ud.remote_qkey = to.qkey;
            ok(inline::post_send(self.id.get().qp, &mut send, &mut ptr::null_mut()));
            assert!(completion(self.id.get().send_cq, Duration::from_secs(10)).is_some());
            ok((api.destroy_ah.unwrap())(ah));
        }
    }

    /// The payload that arrived within a time, with the source and destination of its IP header.
    fn received(&self, within: Duration) -> Option<(Vec<u8>, SocketAddr, SocketAddr)> {
        let wc = completion(self.id.get().recv_cq, within)?;
        assert_eq!((wc.status, wc.wc_flags & IBV_WC_GRH), (IBV_WC_SUCCESS, IBV_WC_GRH));
        let (header, rest) = self.inbox.split_first_chunk::<GRH_LEN>().unwrap();
        let (source, destination) = ip_header_addresses(header).unwrap();
        let payload = rest[..wc.byte_len as usize - GRH_LEN].to_vec();
        Some((payload, (source, 0).into(), (destination, 0).into()))
    }

    fn destroy(self) {
        // SAFETY: not used again.
        ok(unsafe { (doorbell_softroce_ibverbs::api().dereg_mr)(self.mr) });
        self.id.destroy();
    }
}

fn completion(cq: *mut ibv_cq, within: Duration) -> Option<ibv_wc> {
    let since = Instant::now();
    // SAFETY: live; integers.
    unsafe {
        let mut wc: ibv_wc = core::mem::zeroed();
        while inline::poll_cq(cq, 1, &mut wc) == 0 {
            if since.elapsed() > within {
                return None;
            }
            std::thread::yield_now();
        }
        Some(wc)
    }
}

#[test]
fn a_group_reaches_the_members_of_every_device_and_no_others() {
    let (channel, group, elsewhere) = (channel(), group(1), group(2));
    let members = [1, 2, 2].map(|device| Member::new(channel, device));
    let [sender, other, stranger] = &members;
    let to = sender.join(channel, group);
    other.join(channel, group);
    stranger.join(channel, elsewhere);
    assert_eq!((to.qp_num, to.qkey), (MULTICAST_QPN, RDMA_UDP_QKEY));
    // SAFETY: a GID is 16 bytes, whichever member of the union was written.
    assert_eq!(unsafe { to.ah_attr.grh.dgid.raw }, Gid::from(group.ip()).0);
    members.iter().for_each(Member::receive);

    sender.send(&to, b"to all");
    let source = SocketAddr::new(own_address(1), 0);
    let expected = Some((b"to all".to_vec(), source, group));
    assert_eq!(other.received(Duration::from_secs(10)), expected);
    assert_eq!(sender.received(Duration::from_secs(10)), expected, "its own copy");
    assert_eq!(stranger.received(Duration::from_millis(50)), None);

    // Sending needs no membership; the packets of a group that was left are not received.
    sender.leave(group);
    [sender, other].into_iter().for_each(Member::receive);
    sender.send(&to, b"to the rest");
    let expected = Some((b"to the rest".to_vec(), source, group));
    assert_eq!(other.received(Duration::from_secs(10)), expected);
    assert_eq!(sender.received(Duration::from_millis(50)), None);
    other.leave(group);
    stranger.leave(elsewhere);
    members.into_iter().for_each(Member::destroy);
}

/// A destroyed identifier leaves its groups, as a queue pair that is attached cannot be destroyed.
#[test]
fn an_identifier_leaves_its_groups_with_its_queue_pair() {
    let (channel, group) = (channel(), group(3));
    let [sender, member] = [1, 2].map(|device| Member::new(channel, device));
    let to = sender.join(channel, group);
    member.join(channel, group);
    member.destroy();
    let again = Member::new(channel, 2);
    again.join(channel, group);
    again.receive();
    sender.send(&to, b"again");
    assert!(again.received(Duration::from_secs(10)).is_some());
    again.destroy();
    sender.destroy();
}

#[test]
fn a_sender_that_only_sends_is_not_attached() {
    let (channel, group) = (channel(), group(4));
    let [sender, member] = [1, 1].map(|device| Member::new(channel, device));
    member.join(channel, group);
    let address = sys(group);
    let mut attr = rdma_cm_join_mc_attr_ex {
        comp_mask: ADDRESS_AND_FLAGS,
        join_flags: SENDONLY,
        addr: at(&address),
    };
    // SAFETY: live.
    ok(unsafe { rdma_join_multicast_ex(sender.id.0, &mut attr, ptr::null_mut()) });
    let event = event(channel, RDMA_CM_EVENT_MULTICAST_JOIN);
    // SAFETY: just taken.
    let to = unsafe { (*event).param.ud };
    // SAFETY: just taken.
    ok(unsafe { rdma_ack_cm_event(event) });
    [&sender, &member].into_iter().for_each(Member::receive);
    sender.send(&to, b"one way");
    assert!(member.received(Duration::from_secs(10)).is_some());
    assert_eq!(sender.received(Duration::from_millis(50)), None);
    sender.leave(group);
    member.leave(group);
    sender.destroy();
    member.destroy();
}

#[test]
fn groups_that_cannot_be_joined_or_left() {
    let (channel, group) = (channel(), group(5));
    let address = sys(group);
    let connected = Id::new(channel, RDMA_PS_TCP);
    let unbound = Id::new(channel, RDMA_PS_UDP);
    let member = Member::new(channel, 1);
    let unicast = sys(SocketAddr::new(own_address(2), 0));
    let nowhere = sys((Ipv4Addr::UNSPECIFIED, 0).into());
    // SAFETY: live, and null where it is to fail.
    unsafe {
        ok(rdma_bind_addr(
            connected.0,
            at(&sys(SocketAddr::new(own_address(1), 0))),
        ));
        for id in [connected, unbound] {
            fails(rdma_join_multicast(id.0, at(&address), ptr::null_mut()), libc::EINVAL);
        }
        for wrong in [ptr::null_mut(), at(&nowhere)] {
            fails(rdma_join_multicast(member.id.0, wrong, ptr::null_mut()), libc::EINVAL);
        }
        fails(rdma_leave_multicast(member.id.0, at(&address)), libc::EADDRNOTAVAIL);
        for (comp_mask, join_flags, value) in [(1, 0, libc::EINVAL), (7, 0, libc::ENOTSUP), (3, 2, libc::EINVAL)] {
            let mut attr = rdma_cm_join_mc_attr_ex {
                comp_mask,
                join_flags,
                addr: at(&address),
            };
            fails(rdma_join_multicast_ex(member.id.0, &mut attr, ptr::null_mut()), value);
        }
        // Its queue pair cannot be attached.
        ok(rdma_join_multicast(member.id.0, at(&unicast), ptr::null_mut()));
    }
    assert_eq!(expect_event(channel, RDMA_CM_EVENT_MULTICAST_ERROR), -libc::EINVAL);
    connected.destroy();
    unbound.destroy();
    member.destroy();
}
