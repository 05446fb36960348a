//! A receiver whose socket is too small for what one request brings: a READ's responses come all at once, as the responder sees no window. What does not
//! fit is lost, the rest asked for again, and again, until all is there.

use std::time::Duration;

use doorbell_roce_proto::memory::Sge;
use doorbell_roce_proto::work::{Operation, Payload, SendRequest, Status};
use doorbell_roce_proto::{EndpointConfig, Mtu};
use doorbell_softroce::link::fault::FaultConfig;

use crate::memory::Rights;
use crate::net::{Idents, LinkConfig, Network, Socket, Step};
use crate::pair::{PD, connect};
use crate::trace::Trace;

const LEN: usize = 1 << 20;
const BASE: u64 = 0x1000_0000;
/// 67 ms, what most programs use.
const TIMEOUT: u8 = 14;

/// What Linux' default socket buffer holds of packets of 1 KiB, and an owner who sleeps for longer than the READ's responses take.
const SMALL: Socket = Socket {
    packets: 185,
    nap: Duration::from_millis(2),
};

#[test]
fn a_read_longer_than_the_socket_buffer_arrives() {
    for idents in [Idents::Known, Idents::Zero, Idents::Counting] {
        let link = LinkConfig {
            bits_per_second: 10_000_000_000,
            latency: Duration::from_micros(50),
            backlog: Duration::from_micros(10),
            faults: FaultConfig::default(),
            idents,
            socket: Some(SMALL),
        };
        let mut net = Network::new(link, Trace::default());
        net.capture = Some(Vec::new());
        let qpns = connect(&mut net, EndpointConfig::DEFAULT_WINDOW, Mtu::Mtu1024, TIMEOUT);
        let near = net.nodes[0].memory.register(PD, BASE, Rights::LOCAL, vec![0; LEN]);
        let bytes: Vec<u8> = (0..LEN).map(|i| (i / 1024 * 31 + i) as u8).collect();
        let far = net.nodes[1].memory.register(
            PD,
            BASE,
            Rights {
                read: true,
                ..Rights::LOCAL
            },
            bytes,
        );
        let sges = [Sge {
            addr: BASE,
            len: LEN as u32,
            lkey: net.nodes[0].memory.lkey(near),
        }];
        let request = SendRequest {
            wr_id: 0,
            operation: Operation::Read {
                addr: BASE,
                rkey: net.nodes[1].memory.rkey(far),
            },
            payload: Payload::Gather(&sges),
            signalled: true,
            fence: false,
            solicited: false,
        };
        net.nodes[0]
            .endpoint
            .post_send(net.now, qpns[0], &request)
            .expect("the queue is empty");
        net.service(0).expect("the wire's rules hold");
        while net.step().expect("the wire's rules hold") != Step::Idle {}
        let statuses: Vec<_> = net.nodes[0]
            .completions
            .iter()
            .map(|(_, completion)| completion.status)
            .collect();
        assert_eq!(statuses, [Status::Success], "{idents:?}");
        assert!(
            net.nodes[0].memory.region(near).bytes == net.nodes[1].memory.region(far).bytes,
            "{idents:?}"
        );
        // Each time it is asked, the responder brings as much as the socket holds: nothing of that may be refused.
        let requests = net.capture.iter().flatten().filter(|(node, _)| *node == 0).count();
        let bursts = LEN.div_ceil(1024).div_ceil(SMALL.packets as usize);
        assert!(
            requests <= bursts + 1,
            "{idents:?}: asked {requests} times for what {bursts} bursts bring"
        );
    }
}
