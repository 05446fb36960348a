//! Datagrams of Linux 6.1's rdma_cm on rxe as captured, without trailing zeros; their contents.

use super::*;
use crate::cm::{IpHeader, PortSpace};

const REP: &str = "01070203000000002c3ffd26000000010013000000000000784af7bc003ffd2700000000000011000000000038122c00010178e02cf119fffeff649f";
const DREP: &str = "01070203000000002c3ffd26000000010016000000000000784af7bc003ffd27";
const REQ: &str = "010702030000000000000002bcf74a7b00100000000000007b4af7bc000000000000000001061d302cf119fffeff649f00000000000000000000120100000001000000a0cd8cd1a5\
    ffff30f0ffffffff00000000000000000000ffff0a09000100000000000000000000ffff0a0900025e34100000400098000000000000000000000000000000000000000000000000\
    00000000000000000000000000000000000000000040b3cf0000000000000000000000000a0900010000000000000000000000000a090002";
const RTU: &str = "010702030000000000000002bcf74a7b00140000000000007b4af7bc000bc68f";
const SIDR_REQ: &str = "010702030000000000000002bcf74a7a00170000000000007a4af7bcffff00000000000001111c060040acad0000000000000000000000000a090001000000000000000000000000\
    0a090002";
const SIDR_REP: &str =
    "0107020300000000fd00bc140000000100180000000000000000bc1500000000000014000000000001111c0601234567";
const REJ: &str = "010702030000000051e9d8ed000000010012000000000000000000000029d8ee00000008";

fn mad(hex: &str) -> Mad {
    let mut mad = [0; 256];
    for (byte, digits) in mad.iter_mut().zip(hex.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(str::from_utf8(digits).unwrap(), 16).unwrap();
    }
    mad
}

fn message(hex: &str) -> Message {
    let mad = mad(hex);
    let (transaction, message) = Message::parse(&mad).unwrap();
    assert_eq!(message.to_mad(transaction), mad);
    message
}

#[test]
fn a_request() {
    let Message::Req(req) = message(REQ) else {
        panic!("no REQ");
    };
    assert_eq!(req.local_id, 0x7b4a_f7bc);
    assert_eq!(req.service, ServiceId::of_port(PortSpace::Tcp, 7472));
    assert_eq!(req.guid, 0x2cf1_19ff_feff_649f);
    assert_eq!((req.qpn, req.psn), (Qpn::new(0x12), Psn::new(0xcd_8cd1)));
    assert_eq!((req.responder_resources, req.initiator_depth), (1, 1));
    assert_eq!((req.remote_timeout, req.local_timeout, req.max_retries), (20, 20, 15));
    assert_eq!((req.retry_count, req.rnr_retry_count), (5, 0));
    assert_eq!((req.transport, req.flow_control, req.srq), (0, false, false));
    assert_eq!((req.pkey, req.mtu), (0xffff, 3));
    assert_eq!(req.primary.local_gid.to_string(), "::ffff:10.9.0.1");
    assert_eq!(req.primary.remote_gid.to_string(), "::ffff:10.9.0.2");
    assert_eq!((req.primary.local_lid, req.primary.remote_lid), (0xffff, 0xffff));
    assert_eq!(
        (req.primary.hop_limit, req.primary.ack_timeout, req.primary.subnet_local),
        (64, 19, false)
    );
    let (header, rest) = IpHeader::split(&req.private_data).unwrap();
    assert_eq!(header.source, "10.9.0.1:46031".parse().unwrap());
    assert_eq!(header.destination, "10.9.0.2".parse::<core::net::IpAddr>().unwrap());
    assert_eq!(rest, [0; 56]);
}

#[test]
fn a_reply_and_what_follows() {
    let Message::Rep(rep) = message(REP) else {
        panic!("no REP");
    };
    assert_eq!((rep.local_id, rep.remote_id), (0x784a_f7bc, 0x003f_fd27));
    assert_eq!((rep.qpn, rep.psn), (Qpn::new(0x11), Psn::new(0x38_122c)));
    assert_eq!((rep.responder_resources, rep.initiator_depth), (1, 1));
    assert_eq!(
        (rep.ack_delay, rep.rnr_retry_count, rep.guid),
        (15, 7, 0x2cf1_19ff_feff_649f)
    );
    let Message::Rtu(rtu) = message(RTU) else {
        panic!("no RTU");
    };
    assert_eq!((rtu.local_id, rtu.remote_id), (0x7b4a_f7bc, 0x000b_c68f));
    let Message::Drep(drep) = message(DREP) else {
        panic!("no DREP");
    };
    assert_eq!((drep.local_id, drep.remote_id), (0x784a_f7bc, 0x003f_fd27));
}

/// Where Linux has them (ibta_vol1_c12.h): the vendor id in the message, the options in the
/// attribute modifier. A captured message of an rxe has none.
#[test]
fn vendor_options() {
    let none = Ece::default();
    let ece = Ece {
        vendor_id: 0x0a_0b0c,
        options: 0x0102_0304,
    };
    for (text, vendor) in [(REQ, [5, 6, 7]), (REP, [15, 19, 23])] {
        let mut mad = mad(text);
        let of = |mad: &Mad| match Message::parse(mad) {
            Some((_, Message::Req(req))) => req.ece,
            Some((_, Message::Rep(rep))) => rep.ece,
            other => panic!("{other:?}"),
        };
        assert_eq!(of(&mad), none);
        mad[20..24].copy_from_slice(&[1, 2, 3, 4]);
        for (at, byte) in vendor.into_iter().zip([10, 11, 12]) {
            mad[24 + at] = byte;
        }
        assert_eq!(of(&mad), ece);
        let (transaction, message) = Message::parse(&mad).unwrap();
        assert_eq!(message.to_mad(transaction), mad);
    }
}

#[test]
fn a_rejection() {
    let Message::Rej(rej) = message(REJ) else {
        panic!("no REJ");
    };
    assert_eq!((rej.local_id, rej.remote_id), (0, 0x0029_d8ee));
    assert_eq!(
        (rej.message, rej.reason),
        (MessageKind::Request, RejectReason::INVALID_SERVICE_ID)
    );
    assert_eq!(
        (rej.info, rej.private_data),
        (Vec::new(), vec![0; private_data_len::REJ])
    );
}

#[test]
fn a_datagram_service() {
    let Message::SidrReq(req) = message(SIDR_REQ) else {
        panic!("no SIDR_REQ");
    };
    assert_eq!((req.request_id, req.pkey), (0x7a4a_f7bc, 0xffff));
    assert_eq!(req.service, ServiceId::of_port(PortSpace::Udp, 7174));
    assert_eq!(req.private_data.len(), private_data_len::SIDR_REQ);
    let Message::SidrRep(rep) = message(SIDR_REP) else {
        panic!("no SIDR_REP");
    };
    assert_eq!((rep.request_id, rep.status), (0x0000_bc15, SidrStatus::SUCCESS));
    assert_eq!(
        (rep.qpn, rep.qkey, rep.service),
        (Qpn::new(0x14), 0x0123_4567, req.service)
    );
}
