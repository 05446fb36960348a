//! Identifiers on event channels.

use std::ptr;
use std::time::Duration;

use doorbell_softroce_rdmacm::*;
use doorbell_verbs_sys::rdmacm::*;
use doorbell_verbs_sys::*;

use crate::common::*;

/// The type of service of clients.
const TOS: u8 = 46 << 2;

fn connected(active: *mut rdma_event_channel, passive: *mut rdma_event_channel, to: std::net::SocketAddr) -> [Id; 2] {
    let client = resolved(active, RDMA_PS_TCP, to);
    client.set_tos(TOS);
    client.create_qp();
    // SAFETY: all is live.
    unsafe {
        ok(rdma_connect(client.0, &mut param(b"hello")));
        let request = event(passive, RDMA_CM_EVENT_CONNECT_REQUEST);
        let server = Id((*request).id);
        assert!(private_data_of(request).starts_with(b"hello\0") && private_data_of(request).len() == 56);
        let requested = (*request).param.conn;
        assert_eq!(
            (requested.responder_resources, requested.initiator_depth),
            (2, 3),
            "as this side sees it"
        );
        assert_eq!(requested.qp_num, (*client.get().qp).qp_num);
        server.create_qp();
        ok(rdma_accept(server.0, &mut param(b"welcome")));
        ok(rdma_ack_cm_event(request));
        let reply = event(active, RDMA_CM_EVENT_ESTABLISHED);
        assert!(private_data_of(reply).starts_with(b"welcome\0") && private_data_of(reply).len() == 196);
        assert_eq!((*reply).param.conn.qp_num, (*server.get().qp).qp_num);
        ok(rdma_ack_cm_event(reply));
        expect_event(passive, RDMA_CM_EVENT_ESTABLISHED);
        [client, server]
    }
}

#[test]
fn connection_life_cycle() {
    let (active, passive) = (channel(), channel());
    let address = fresh(1);
    let listener = Id::listening(passive, RDMA_PS_TCP, address);
    let [client, server] = connected(active, passive, address);
    assert_eq!([client.state(), server.state()], [IBV_QPS_RTS; 2]);
    let traffic_class = |id: Id| id.attributes().ah_attr.grh.traffic_class;
    assert_eq!([client, server].map(traffic_class), [TOS; 2]);
    // SAFETY: all is live, and not used again at the end.
    unsafe {
        assert_eq!(rdma_get_dst_port(client.0), address.port().to_be());
        assert_eq!(rdma_get_src_port(server.0), address.port().to_be());
        assert_eq!(rdma_get_src_port(client.0), rdma_get_dst_port(server.0));
        assert_eq!(client.get().route.num_paths, 1);
        assert!(!client.get().verbs.is_null() && client.get().port_num == 1);
        send_message(client, server, b"from the client");
        send_message(server, client, b"from the server");

        ok(rdma_disconnect(server.0));
        assert_eq!(server.state(), IBV_QPS_ERR);
        expect_event(active, RDMA_CM_EVENT_DISCONNECTED);
        expect_event(passive, RDMA_CM_EVENT_DISCONNECTED);
        ok(rdma_disconnect(client.0));
        assert_eq!(client.state(), IBV_QPS_ERR);
        for id in [client, server, listener] {
            id.destroy();
        }
        rdma_destroy_event_channel(active);
        rdma_destroy_event_channel(passive);
    }
}

#[test]
fn destroying_one_end_disconnects_the_other() {
    let (active, passive) = (channel(), channel());
    let address = fresh(2);
    let listener = Id::listening(passive, RDMA_PS_TCP, address);
    let [client, server] = connected(active, passive, address);
    client.destroy();
    expect_event(passive, RDMA_CM_EVENT_DISCONNECTED);
    server.destroy();
    listener.destroy();
}

#[test]
fn rejected_with_a_reason_and_without_an_answer() {
    let (active, passive) = (channel(), channel());
    let address = fresh(1);
    let listener = Id::listening(passive, RDMA_PS_TCP, address);
    let connect = || {
        let client = resolved(active, RDMA_PS_TCP, address);
        client.create_qp();
        // SAFETY: live.
        ok(unsafe { rdma_connect(client.0, &mut param(b"")) });
        client
    };
    let client = connect();
    let request = event(passive, RDMA_CM_EVENT_CONNECT_REQUEST);
    // SAFETY: live.
    unsafe {
        let server = Id((*request).id);
        ok(rdma_ack_cm_event(request));
        ok(rdma_reject(server.0, b"no".as_ptr().cast(), 2));
        let rejected = event(active, RDMA_CM_EVENT_REJECTED);
        assert_eq!((*rejected).status, 28, "by the consumer");
        assert!(private_data_of(rejected).starts_with(b"no\0"));
        ok(rdma_ack_cm_event(rejected));
        assert_eq!(client.state(), IBV_QPS_ERR);
        server.destroy();
        client.destroy();
    }

    let client = connect();
    let request = event(passive, RDMA_CM_EVENT_CONNECT_REQUEST);
    // SAFETY: live.
    unsafe {
        let server = Id((*request).id);
        ok(rdma_ack_cm_event(request));
        ok(rdma_reject_ece(server.0, ptr::null(), 0));
        server.destroy();
    }
    assert_eq!(expect_event(active, RDMA_CM_EVENT_REJECTED), 35, "a vendor's option");
    client.destroy();

    // The request has not been taken when its listener is destroyed.
    let client = connect();
    // Readable, so the request is there.
    assert!(is_readable(passive, Duration::from_secs(20)));
    listener.destroy();
    assert_eq!(expect_event(active, RDMA_CM_EVENT_REJECTED), 28);
    client.destroy();

    let client = connect();
    assert_eq!(expect_event(active, RDMA_CM_EVENT_REJECTED), 8, "no listener");
    client.destroy();
}

#[test]
fn a_wildcard_listens_on_every_device() {
    let (active, passive) = (channel(), channel());
    let anywhere = (std::net::Ipv4Addr::UNSPECIFIED, 0).into();
    let listener = Id::listening(passive, RDMA_PS_TCP, anywhere);
    assert!(listener.get().verbs.is_null());
    // SAFETY: live.
    let port = u16::from_be(unsafe { rdma_get_src_port(listener.0) });
    assert_ne!(port, 0);
    for last in [1, 2] {
        let [client, server] = connected(active, passive, (own_address(last), port).into());
        send_message(client, server, b"hello");
        client.destroy();
        expect_event(passive, RDMA_CM_EVENT_DISCONNECTED);
        server.destroy();
    }
    listener.destroy();
}

#[test]
fn an_identifier_moves_with_its_events() {
    let (active, passive, other) = (channel(), channel(), channel());
    let address = fresh(1);
    let listener = Id::listening(passive, RDMA_PS_TCP, address);
    let [client, server] = connected(active, passive, address);
    // SAFETY: live.
    unsafe {
        ok(rdma_disconnect(client.0));
        expect_event(active, RDMA_CM_EVENT_DISCONNECTED);
        // Queued by the thread of the client's event, before or after it: in flight, or queued.
        ok(rdma_migrate_id(server.0, other));
        assert_eq!(server.get().channel, other);
    }
    expect_event(other, RDMA_CM_EVENT_DISCONNECTED);
    for id in [client, server, listener] {
        id.destroy();
    }
}

#[test]
fn external_queue_pairs() {
    let (active, passive) = (channel(), channel());
    let address = fresh(1);
    let listener = Id::listening(passive, RDMA_PS_TCP, address);
    let client = resolved(active, RDMA_PS_TCP, address);
    // SAFETY: all is live.
    unsafe {
        let mut attr: ibv_qp_attr = core::mem::zeroed();
        let mut mask = 0;
        attr.qp_state = IBV_QPS_RTR;
        fails(rdma_init_qp_attr(client.0, &mut attr, &mut mask), libc::EINVAL);
        let requested = rdma_conn_param {
            qp_num: 0x1234,
            ..param(b"")
        };
        ok(rdma_connect(client.0, &mut requested.clone()));
        let request = event(passive, RDMA_CM_EVENT_CONNECT_REQUEST);
        let server = Id((*request).id);
        assert_eq!((*request).param.conn.qp_num, 0x1234);
        let accepted = rdma_conn_param {
            qp_num: 0x4321,
            ..param(b"")
        };
        ok(rdma_accept(server.0, &mut accepted.clone()));
        ok(rdma_ack_cm_event(request));
        expect_event(active, RDMA_CM_EVENT_CONNECT_RESPONSE);
        ok(rdma_init_qp_attr(client.0, &mut attr, &mut mask));
        assert_eq!(attr.dest_qp_num, 0x4321);
        assert_eq!((attr.max_dest_rd_atomic, attr.ah_attr.is_global), (2, 1));
        assert_eq!(mask as u32 & IBV_QP_AV, IBV_QP_AV);
        attr.qp_state = IBV_QPS_INIT;
        ok(rdma_init_qp_attr(client.0, &mut attr, &mut mask));
        assert_eq!(attr.qp_access_flags & IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_READ);
        ok(rdma_establish(client.0));
        expect_event(passive, RDMA_CM_EVENT_ESTABLISHED);
        for id in [client, server, listener] {
            id.destroy();
        }
    }
}

#[test]
fn vendor_options_of_both_ends() {
    let (active, passive) = (channel(), channel());
    let address = fresh(1);
    let listener = Id::listening(passive, RDMA_PS_TCP, address);
    let set = |id: Id, vendor_id, options| {
        let mut ece = ibv_ece {
            vendor_id,
            options,
            comp_mask: 0,
        };
        // SAFETY: live.
        unsafe { rdma_set_local_ece(id.0, &mut ece) }
    };
    let remote = |id: Id| {
        let mut ece = ibv_ece {
            vendor_id: 1,
            options: 1,
            comp_mask: 1,
        };
        // SAFETY: live.
        ok(unsafe { rdma_get_remote_ece(id.0, &mut ece) });
        assert_eq!(ece.comp_mask, 0);
        (ece.vendor_id, ece.options)
    };
    for (ours, theirs) in [((0x15_b3, 7), (0x15_b3, 0x8000_0005)), ((0, 0), (0, 0))] {
        let offer = |id: Id, (vendor_id, options)| {
            if vendor_id != 0 {
                ok(set(id, vendor_id, options));
            }
        };
        // Numbers of its own: one that has a connection already would be stale.
        let param_of = |qp_num| rdma_conn_param { qp_num, ..param(b"") };
        let client = resolved(active, RDMA_PS_TCP, address);
        fails(set(client, 0, 1), libc::EINVAL);
        offer(client, ours);
        // SAFETY: all is live.
        unsafe {
            ok(rdma_connect(client.0, &mut param_of(0x2345)));
            let request = event(passive, RDMA_CM_EVENT_CONNECT_REQUEST);
            let server = Id((*request).id);
            assert_eq!((remote(server), remote(client)), (ours, (0, 0)));
            offer(server, theirs);
            ok(rdma_accept(server.0, &mut param_of(0x5432)));
            ok(rdma_ack_cm_event(request));
            expect_event(active, RDMA_CM_EVENT_CONNECT_RESPONSE);
            assert_eq!((remote(server), remote(client)), (ours, theirs));
            client.destroy();
            expect_event(passive, RDMA_CM_EVENT_REJECTED);
            server.destroy();
        }
    }
    listener.destroy();
}

#[test]
fn datagram_service_is_resolved() {
    let (active, passive) = (channel(), channel());
    let address = fresh(2);
    let listener = Id::listening(passive, RDMA_PS_UDP, address);
    let connect = || {
        let client = resolved(active, RDMA_PS_UDP, address);
        client.set_tos(TOS);
        // SAFETY: live.
        ok(unsafe { rdma_connect(client.0, &mut param(b"who")) });
        client
    };
    // SAFETY: all is live.
    unsafe {
        let client = connect();
        let request = event(passive, RDMA_CM_EVENT_CONNECT_REQUEST);
        let (server, ud) = (Id((*request).id), (*request).param.ud);
        assert_eq!(ud.private_data_len, 180);
        assert_eq!(server.get().qp_type, IBV_QPT_UD);
        let mut init = qp_init();
        init.qp_type = IBV_QPT_UD;
        ok(rdma_create_qp(server.0, ptr::null_mut(), &mut init));
        assert_eq!(server.state(), IBV_QPS_RTS);
        ok(rdma_accept(server.0, &mut param(b"me")));
        ok(rdma_ack_cm_event(request));
        let found = event(active, RDMA_CM_EVENT_ESTABLISHED);
        let ud = (*found).param.ud;
        assert_eq!((ud.qp_num, ud.qkey), ((*server.get().qp).qp_num, RDMA_UDP_QKEY));
        let mut vector = ud.ah_attr;
        assert_eq!(vector.grh.traffic_class, TOS);
        let ah = doorbell_softroce_ibverbs::api().create_ah.unwrap()(client.get().pd, &mut vector);
        assert!(!ah.is_null(), "the address it gives is good");
        doorbell_softroce_ibverbs::api().destroy_ah.unwrap()(ah);
        ok(rdma_ack_cm_event(found));
        server.destroy();
        client.destroy();

        let client = connect();
        let request = event(passive, RDMA_CM_EVENT_CONNECT_REQUEST);
        let server = Id((*request).id);
        ok(rdma_reject(server.0, ptr::null(), 0));
        ok(rdma_ack_cm_event(request));
        assert_eq!(expect_event(active, RDMA_CM_EVENT_UNREACHABLE), 2, "rejected");
        server.destroy();
        client.destroy();
    }
    listener.destroy();
}

#[test]
fn a_shared_receive_queue_of_the_identifier() {
    let (active, passive) = (channel(), channel());
    let address = fresh(1);
    let listener = Id::listening(passive, RDMA_PS_TCP, address);
    let client = resolved(active, RDMA_PS_TCP, address);
    client.create_qp();
    // SAFETY: all is live.
    unsafe {
        ok(rdma_connect(client.0, &mut param(b"")));
        let request = event(passive, RDMA_CM_EVENT_CONNECT_REQUEST);
        let server = Id((*request).id);
        ok(rdma_ack_cm_event(request));
        let mut init: ibv_srq_init_attr = core::mem::zeroed();
        init.attr.max_wr = 4;
        init.attr.max_sge = 1;
        ok(rdma_create_srq(server.0, ptr::null_mut(), &mut init));
        server.create_qp();
        assert_eq!((*server.get().qp).srq, server.get().srq);
        ok(rdma_accept(server.0, ptr::null_mut()));
        expect_event(active, RDMA_CM_EVENT_ESTABLISHED);
        expect_event(passive, RDMA_CM_EVENT_ESTABLISHED);
        send_message(client, server, b"shared");
        for id in [client, server, listener] {
            id.destroy();
        }
    }
}
