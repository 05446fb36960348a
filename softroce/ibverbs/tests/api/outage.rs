//! Ports that go down, as configured: events, states, and what becomes of requests.

use std::mem::MaybeUninit;
use std::time::Instant;

use doorbell_softroce_ibverbs::api;
use doorbell_verbs_sys::*;

use crate::common::*;

fn port_state(context: *mut ibv_context) -> ibv_port_state {
    let mut port = MaybeUninit::<ibv_port_attr>::uninit();
    // SAFETY: live; filled on success.
    unsafe {
        assert_eq!(inline::query_port(api(), context, 1, port.as_mut_ptr()), 0);
        port.assume_init().state
    }
}

/// The port neither sends nor receives: requests in either direction fail, in the time that the
/// queue pairs' timeouts permit.
#[test]
fn requests_over_a_port_that_is_down_fail_in_time() {
    crate::setup();
    let setup = Setup {
        // 16.8 ms, up to four times as long (IBTA vol 1, 9.7.6.1.3), three times.
        timeout: 12,
        retry_cnt: 2,
        ..Setup::default()
    };
    let (a, b) = pair(("cut", "uncut"), &setup);
    assert_eq!(async_event(a.context).event_type, IBV_EVENT_PORT_ERR);
    assert_eq!(
        (port_state(a.context), port_state(b.context)),
        (IBV_PORT_DOWN, IBV_PORT_ACTIVE)
    );
    for (from, to) in [(&a, &b), (&b, &a)] {
        let since = Instant::now();
        let write = rdma(1, IBV_WR_RDMA_WRITE, to.addr(), to.rkey());
        assert_eq!(from.post(write, &mut [from.sge(0, 8)]), 0);
        assert_eq!(from.wait().status, IBV_WC_RETRY_EXC_ERR);
        let took = since.elapsed();
        assert!(took.as_millis() >= 3 * 16 && took < TIMEOUT / 2, "{took:?}");
    }
}

#[test]
fn a_port_comes_back() {
    crate::setup();
    let (a, b) = pair(("flapping", "uncut"), &Setup::default());
    for (event, state) in [
        (IBV_EVENT_PORT_ERR, IBV_PORT_DOWN),
        (IBV_EVENT_PORT_ACTIVE, IBV_PORT_ACTIVE),
    ] {
        assert_eq!(async_event(a.context).event_type, event);
        assert_eq!(port_state(a.context), state);
    }
    let write = rdma(1, IBV_WR_RDMA_WRITE, b.addr(), b.rkey());
    assert_eq!(a.post(write, &mut [a.sge(0, 8)]), 0);
    a.done(1);
}
