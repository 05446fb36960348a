//! Shared by the tests: the devices, and calls with their results checked.

#![allow(dead_code, reason = "each test program uses its part of this module")]

use std::env;
use std::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use doorbell_softroce_ibverbs::{DeviceConfig, configure};
use doorbell_softroce_rdmacm::*;
use doorbell_verbs_sys::rdmacm::*;
use doorbell_verbs_sys::*;
use nix::sys::socket::{SockaddrLike, SockaddrStorage};

/// Set for a child process of a test: the address of its only device, and where it listens.
pub(crate) const CHILD: &str = "DOORBELL_TEST_CM_CHILD";

/// An address unique to this process, so that concurrent test processes do not interfere.
pub(crate) fn own_address(last: u8) -> IpAddr {
    let pid = std::process::id();
    IpAddr::V4(Ipv4Addr::new(127, 1 + (pid >> 8) as u8 % 250, pid as u8, last))
}

/// Configures the devices of this test program, once: at the addresses 1 and 2, or a child's.
pub(crate) fn devices() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let child = env::var(CHILD).map(|address| vec![address.parse::<SocketAddr>().unwrap().ip()]);
        let addresses = child.unwrap_or_else(|_| vec![own_address(1), own_address(2)]);
        let device = |address: IpAddr| DeviceConfig {
            address: Some(address),
            ..DeviceConfig::new(format!("soft-{address}"))
        };
        configure(addresses.into_iter().map(device).collect()).unwrap();
    });
}

/// An address of a device with a port that no other test uses.
pub(crate) fn fresh(last: u8) -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(7000);
    SocketAddr::new(own_address(last), NEXT.fetch_add(1, Ordering::Relaxed))
}

pub(crate) fn errno() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}

#[track_caller]
pub(crate) fn ok(result: c_int) {
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

#[track_caller]
pub(crate) fn fails(result: c_int, value: c_int) {
    assert_eq!((result, errno()), (-1, value), "{}", std::io::Error::last_os_error());
}

pub(crate) fn sys(address: SocketAddr) -> SockaddrStorage {
    SockaddrStorage::from(address)
}

/// A pointer to an address, for calls that only read it.
pub(crate) fn at(address: &SockaddrStorage) -> *mut libc::sockaddr {
    address.as_ptr().cast_mut()
}

/// # Safety
/// `address` is live, and as long as its family requires.
pub(crate) unsafe fn address(address: *const libc::sockaddr) -> SocketAddr {
    // SAFETY: by contract.
    let storage = unsafe { SockaddrStorage::from_raw(address, None) }.unwrap();
    let v4 = storage.as_sockaddr_in().map(|v4| SocketAddrV4::from(*v4).into());
    v4.unwrap_or_else(|| SocketAddrV6::from(*storage.as_sockaddr_in6().unwrap()).into())
}

#[derive(Clone, Copy)]
pub(crate) struct Id(pub(crate) *mut rdma_cm_id);

// SAFETY: identifiers may be used by any thread.
unsafe impl Send for Id {}

impl Id {
    pub(crate) fn new(channel: *mut rdma_event_channel, space: rdma_port_space) -> Self {
        devices();
        let mut id = ptr::null_mut();
        // SAFETY: the channel is null or live.
        ok(unsafe { rdma_create_id(channel, &mut id, ptr::null_mut(), space) });
        Self(id)
    }

    pub(crate) fn listening(channel: *mut rdma_event_channel, space: rdma_port_space, address: SocketAddr) -> Self {
        let id = Self::new(channel, space);
        // SAFETY: live.
        unsafe {
            ok(rdma_bind_addr(id.0, at(&sys(address))));
            ok(rdma_listen(id.0, 8));
        }
        id
    }

    pub(crate) fn get(&self) -> &rdma_cm_id {
        // SAFETY: live, and not modified concurrently in these tests.
        unsafe { &*self.0 }
    }

    pub(crate) fn create_qp(self) {
        let mut init = qp_init();
        // SAFETY: live.
        ok(unsafe { rdma_create_qp(self.0, ptr::null_mut(), &mut init) });
        assert!(
            init.cap.max_inline_data >= 16,
            "what programs post inline without a query"
        );
    }

    pub(crate) fn destroy(self) {
        // SAFETY: live, and not used again.
        unsafe { rdma_destroy_ep(self.0) };
    }

    pub(crate) fn state(self) -> ibv_qp_state {
        self.attributes().qp_state
    }

    /// rdma_set_option(3) of the type of service.
    pub(crate) fn set_tos(self, mut class: u8) {
        let (level, option) = (RDMA_OPTION_ID as c_int, RDMA_OPTION_ID_TOS as c_int);
        // SAFETY: live, and one byte.
        ok(unsafe { rdma_set_option(self.0, level, option, (&raw mut class).cast(), 1) });
    }

    pub(crate) fn attributes(self) -> ibv_qp_attr {
        // SAFETY: its queue pair is live; both structs are integers and pointers.
        unsafe {
            let (mut attr, mut init) = core::mem::zeroed();
            let api = doorbell_softroce_ibverbs::api();
            ok((api.query_qp)(
                self.get().qp,
                &mut attr,
                (IBV_QP_STATE | IBV_QP_AV) as c_int,
                &mut init,
            ));
            attr
        }
    }
}

/// A small queue pair; the library creates its completion queues.
pub(crate) fn qp_init() -> ibv_qp_init_attr {
    // SAFETY: integers and pointers.
    let mut init: ibv_qp_init_attr = unsafe { core::mem::zeroed() };
    init.cap.max_send_wr = 4;
    init.cap.max_recv_wr = 4;
    init.cap.max_send_sge = 1;
    init.cap.max_recv_sge = 1;
    init.qp_type = IBV_QPT_RC;
    init
}

pub(crate) fn param(private_data: &[u8]) -> rdma_conn_param {
    rdma_conn_param {
        private_data: private_data.as_ptr().cast(),
        private_data_len: private_data.len() as u8,
        responder_resources: 3,
        initiator_depth: 2,
        flow_control: 1,
        retry_count: 7,
        rnr_retry_count: 7,
        srq: 0,
        qp_num: 0,
    }
}

pub(crate) fn channel() -> *mut rdma_event_channel {
    let channel = rdma_create_event_channel();
    assert!(!channel.is_null());
    channel
}

#[track_caller]
pub(crate) fn event(channel: *mut rdma_event_channel, kind: rdma_cm_event_type) -> *mut rdma_cm_event {
    let mut event = ptr::null_mut();
    // SAFETY: the channel is live, and so is the event once returned.
    unsafe {
        ok(rdma_get_cm_event(channel, &mut event));
        assert_eq!((*event).event, kind, "status {}", (*event).status);
    }
    event
}

/// The same, acknowledged; returns its status.
#[track_caller]
pub(crate) fn expect_event(channel: *mut rdma_event_channel, kind: rdma_cm_event_type) -> c_int {
    let event = event(channel, kind);
    // SAFETY: just taken.
    unsafe {
        let status = (*event).status;
        ok(rdma_ack_cm_event(event));
        status
    }
}

pub(crate) fn resolved(channel: *mut rdma_event_channel, space: rdma_port_space, to: SocketAddr) -> Id {
    let id = Id::new(channel, space);
    // SAFETY: live.
    unsafe {
        ok(rdma_resolve_addr(id.0, ptr::null_mut(), at(&sys(to)), 1000));
        expect_event(channel, RDMA_CM_EVENT_ADDR_RESOLVED);
        ok(rdma_resolve_route(id.0, 1000));
    }
    expect_event(channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
    id
}

/// Whether an event is there within a time.
pub(crate) fn is_readable(channel: *mut rdma_event_channel, timeout: Duration) -> bool {
    let mut fd = libc::pollfd {
        // SAFETY: live.
        fd: unsafe { (*channel).fd },
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one descriptor.
    unsafe { libc::poll(&mut fd, 1, timeout.as_millis() as i32) == 1 }
}

pub(crate) fn private_data_of(event: *mut rdma_cm_event) -> Vec<u8> {
    // SAFETY: live, and its data is as long as it says.
    unsafe {
        let conn = (*event).param.conn;
        core::slice::from_raw_parts(conn.private_data.cast::<u8>(), conn.private_data_len.into()).to_vec()
    }
}

pub(crate) fn send_message(from: Id, to: Id, message: &[u8]) {
    let api = doorbell_softroce_ibverbs::api();
    let mut outbox = message.to_vec();
    let mut inbox = vec![0_u8; message.len()];
    // SAFETY: all is live; the memory until its region is deregistered, after its completion.
    unsafe {
        let register = |id: Id, memory: &mut [u8]| {
            let mr = (api.reg_mr)(
                id.get().pd,
                memory.as_mut_ptr().cast(),
                memory.len(),
                IBV_ACCESS_LOCAL_WRITE as c_int,
            );
            assert!(!mr.is_null());
            let sge = ibv_sge {
                addr: memory.as_ptr() as u64,
                length: memory.len() as u32,
                lkey: (*mr).lkey,
            };
            (mr, sge)
        };
        let ((out_mr, mut out_sge), (in_mr, mut in_sge)) = (register(from, &mut outbox), register(to, &mut inbox));
        let mut receive = ibv_recv_wr {
            wr_id: 1,
            next: ptr::null_mut(),
            sg_list: &mut in_sge,
            num_sge: 1,
        };
        ok(match to.get().srq {
            srq if srq.is_null() => inline::post_recv(to.get().qp, &mut receive, &mut ptr::null_mut()),
            srq => inline::post_srq_recv(srq, &mut receive, &mut ptr::null_mut()),
        });
        let mut send: ibv_send_wr = core::mem::zeroed();
        send.sg_list = &mut out_sge;
        send.num_sge = 1;
        send.opcode = IBV_WR_SEND;
        send.send_flags = IBV_SEND_SIGNALED;
        ok(inline::post_send(from.get().qp, &mut send, &mut ptr::null_mut()));
        completes(to.get().recv_cq);
        completes(from.get().send_cq);
        ok((api.dereg_mr)(out_mr));
        ok((api.dereg_mr)(in_mr));
    }
    assert_eq!(inbox, message);
}

unsafe fn completes(cq: *mut ibv_cq) {
    // SAFETY: live by contract; integers.
    unsafe {
        let mut wc: ibv_wc = core::mem::zeroed();
        while inline::poll_cq(cq, 1, &mut wc) == 0 {
            std::thread::yield_now();
        }
        assert_eq!(wc.status, IBV_WC_SUCCESS);
    }
}
