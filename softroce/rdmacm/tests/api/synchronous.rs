//! Synchronous identifiers (without a channel): calls wait for their result.

use std::ffi::CString;
use std::net::SocketAddr;
use std::ptr;
use std::thread;

use doorbell_softroce_rdmacm::*;
use doorbell_verbs_sys::rdmacm::*;
use doorbell_verbs_sys::*;

use crate::common::*;

struct Info(*mut rdma_addrinfo);

impl Info {
    fn new(address: SocketAddr, flags: u32, space: rdma_port_space) -> Self {
        let (node, service) = (
            CString::new(address.ip().to_string()).unwrap(),
            CString::new(address.port().to_string()).unwrap(),
        );
        // SAFETY: integers and pointers.
        let mut hints: rdma_addrinfo = unsafe { core::mem::zeroed() };
        hints.ai_flags = (flags | RAI_NUMERICHOST) as i32;
        hints.ai_port_space = space as i32;
        let mut info = ptr::null_mut();
        // SAFETY: strings, and live hints.
        let code = unsafe { rdma_getaddrinfo(node.as_ptr(), service.as_ptr(), &hints, &mut info) };
        assert_eq!(code, 0);
        Self(info)
    }

    fn endpoint(&self) -> Id {
        devices();
        let (mut id, mut init) = (ptr::null_mut(), qp_init());
        // SAFETY: live.
        ok(unsafe { rdma_create_ep(&mut id, self.0, ptr::null_mut(), &mut init) });
        Id(id)
    }
}

impl Drop for Info {
    fn drop(&mut self) {
        // SAFETY: it came from there.
        unsafe { rdma_freeaddrinfo(self.0) };
    }
}

fn request(listener: Id) -> Id {
    let mut id = ptr::null_mut();
    // SAFETY: live.
    ok(unsafe { rdma_get_request(listener.0, &mut id) });
    Id(id)
}

#[test]
fn endpoint_life_cycle() {
    let address = fresh(1);
    let listener = Info::new(address, RAI_PASSIVE, RDMA_PS_TCP).endpoint();
    // SAFETY: live.
    ok(unsafe { rdma_listen(listener.0, 0) });
    let server = thread::spawn(move || {
        let server = request(listener);
        assert!(!server.get().qp.is_null(), "made with what the listener was given");
        // SAFETY: live; the event is there until the next call.
        unsafe {
            let event = server.get().event;
            assert_eq!((*event).event, RDMA_CM_EVENT_CONNECT_REQUEST);
            assert!(private_data_of(event).starts_with(b"hello\0"));
            ok(rdma_accept(server.0, ptr::null_mut()));
            assert_eq!((*server.get().event).event, RDMA_CM_EVENT_ESTABLISHED);
        }
        server
    });
    let client = Info::new(address, 0, RDMA_PS_TCP).endpoint();
    assert_eq!(client.state(), IBV_QPS_INIT);
    // SAFETY: live.
    ok(unsafe { rdma_connect(client.0, &mut param(b"hello")) });
    let server = server.join().unwrap();
    assert_eq!([client.state(), server.state()], [IBV_QPS_RTS; 2]);
    send_message(client, server, b"one way");
    send_message(server, client, b"the other");
    // SAFETY: live.
    unsafe {
        ok(rdma_disconnect(client.0));
        ok(rdma_disconnect(server.0));
    }
    for id in [client, server, listener] {
        id.destroy();
    }
}

#[test]
fn a_rejection_is_connection_refused() {
    let address = fresh(2);
    let listener = Info::new(address, RAI_PASSIVE, RDMA_PS_TCP).endpoint();
    // SAFETY: live.
    ok(unsafe { rdma_listen(listener.0, 4) });
    let server = thread::spawn(move || {
        let server = request(listener);
        // SAFETY: live.
        ok(unsafe { rdma_reject(server.0, ptr::null(), 0) });
        server.destroy();
    });
    let client = Info::new(address, 0, RDMA_PS_TCP).endpoint();
    // SAFETY: live.
    fails(unsafe { rdma_connect(client.0, &mut param(b"")) }, libc::ECONNREFUSED);
    server.join().unwrap();
    client.destroy();
    listener.destroy();
}

#[test]
fn getaddrinfo_hints() {
    let address = fresh(1);
    let info = Info::new(address, 0, RDMA_PS_UDP);
    // SAFETY: live.
    let found = unsafe { &*info.0 };
    assert_eq!(
        (found.ai_qp_type, found.ai_port_space),
        (IBV_QPT_UD as i32, RDMA_PS_UDP as i32)
    );
    assert_eq!((found.ai_src_len, found.ai_dst_len), (0, 16));
    let passive = Info::new(address, RAI_PASSIVE, 0);
    // SAFETY: live.
    let found = unsafe { &*passive.0 };
    assert_eq!(
        (found.ai_qp_type, found.ai_port_space),
        (IBV_QPT_RC as i32, RDMA_PS_TCP as i32)
    );
    assert_eq!((found.ai_src_len, found.ai_dst_len), (16, 0));

    // SAFETY: integers and pointers.
    let mut hints: rdma_addrinfo = unsafe { core::mem::zeroed() };
    let mut info = ptr::null_mut();
    // SAFETY: strings or null; hints are live.
    unsafe {
        assert_eq!(
            rdma_getaddrinfo(ptr::null(), ptr::null(), ptr::null(), &mut info),
            libc::EAI_NONAME
        );
        hints.ai_flags = 1 << 20;
        assert_eq!(
            rdma_getaddrinfo(c"::1".as_ptr(), ptr::null(), &hints, &mut info),
            libc::EAI_BADFLAGS
        );
        hints.ai_flags = RAI_NUMERICHOST as i32;
        assert_eq!(
            rdma_getaddrinfo(c"a name".as_ptr(), ptr::null(), &hints, &mut info),
            libc::EAI_NONAME
        );
        (hints.ai_qp_type, hints.ai_port_space) = (IBV_QPT_UD as i32, RDMA_PS_TCP as i32);
        assert_eq!(
            rdma_getaddrinfo(c"::1".as_ptr(), ptr::null(), &hints, &mut info),
            libc::EAI_SOCKTYPE
        );
    }
}
