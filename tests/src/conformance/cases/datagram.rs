//! UD: datagrams to any queue pair, checked by Q_Key, with a GRH.

use anyhow::{Result, ensure};
use doorbell_verbs_sys::*;

use crate::conformance::rig::{Ah, Bench, End, Errno, Pair, QKEY, Recv, Send, Setup, gid_bytes, immediate};
use crate::conformance::{Case, case};

/// Bytes of the GRH in front of every received datagram (IBTA vol 1, 11.4.1.2).
const GRH: usize = 40;

pub(super) fn cases() -> Vec<Case> {
    vec![
        case(
            "ud/lengths",
            "9.8.3",
            "a datagram of every length up to the MTU arrives behind 40 bytes, flagged, with its sender",
            lengths,
        ),
        case(
            "ud/header",
            "8.3, A17.4.5.2",
            "the 40 bytes are the datagram's network header: 20 bytes and the IPv4 header, or the IPv6 header",
            header,
        ),
        case(
            "ud/immediate",
            "9.2.8",
            "immediate data arrive with a datagram",
            immediate_data,
        ),
        case("ud/inline", "ibv_post_send(3)", "a datagram can be inline", inline),
        case(
            "ud/scatter",
            "10.7.3.2",
            "header and data are scattered over SGEs of odd sizes",
            scatter,
        ),
        case(
            "ud/answer",
            "ibv_create_ah_from_wc(3)",
            "an address handle from a completion addresses the sender",
            answer,
        ),
        case(
            "ud/wrong-key",
            "9.8.3.1, 10.2.5",
            "a datagram with another Q_Key is dropped silently",
            wrong_key,
        ),
        case(
            "ud/own-key",
            "10.2.5",
            "a Q_Key with its highest bit set selects the sender's own",
            own_key,
        ),
        case(
            "ud/changed-key",
            "11.2.5.2",
            "a Q_Key modified in RTS takes effect at once",
            changed_key,
        ),
        case(
            "ud/no-receive",
            "9.8.3.2",
            "a datagram without a receive is dropped, and completes at its sender",
            no_receive,
        ),
        case(
            "ud/unknown-qpn",
            "9.8.3.2",
            "a datagram to an unknown QPN completes at its sender",
            unknown_qpn,
        ),
        case(
            "ud/receiver-in-init",
            "10.3.1.2",
            "a datagram to a queue pair in INIT is dropped",
            receiver_in_init,
        ),
        case(
            "ud/receiver-in-err",
            "10.3.1.7",
            "a datagram to a queue pair in ERR is dropped",
            receiver_in_err,
        ),
        case(
            "ud/longer-than-mtu",
            "10.7.2.2, C10-93.1.1",
            "a datagram longer than the port's MTU is not sent, without an error",
            longer_than_mtu,
        ),
        case(
            "ud/longer-than-receive",
            "9.8.3.3.1",
            "a datagram longer than its receive writes nothing beyond it, and does not succeed",
            longer_than_receive,
        ),
        case(
            "ud/many-senders",
            "9.8.3",
            "datagrams of several senders carry their source QPN",
            many_senders,
        ),
        case(
            "ud/order",
            "9.8.3",
            "datagrams from one queue pair to another arrive in order",
            order,
        ),
        case(
            "ud/handle-destroyed-after-completion",
            "11.2.3.4",
            "an address handle may be destroyed once its sends are complete",
            handle_gone,
        ),
        case(
            "ud/handle-of-other-domain",
            "10.2.2",
            "an address handle of another protection domain sends nothing",
            other_domain,
        ),
        case(
            "ud/local-error",
            "10.3.1.6",
            "a local error stops the send queue alone: SQE, which still receives, and RTS again",
            local_error,
        ),
        case(
            "ud/write-is-no-datagram",
            "table 34",
            "a connected request to a UD queue pair is not answered",
            connected_request,
        ),
    ]
}

fn pair(bench: &Bench) -> Result<(Pair, Ah)> {
    let pair = bench.pair(&Setup::of(IBV_QPT_UD))?;
    let ah = handle(&pair.a)?;
    Ok((pair, ah))
}

fn handle(end: &End) -> Result<Ah> {
    let device = end.device();
    end.pd.ah(device.address_of(device.gid()))
}

fn datagram(id: u64, ah: &Ah, to: &End) -> Send {
    Send::new(IBV_WR_SEND).id(id).to(ah, to.qp.qpn(), QKEY)
}

/// A datagram that arrives, after one that must not.
fn next_arrives(pair: &Pair, ah: &Ah, receive: u64) -> Result<()> {
    pair.a.post(datagram(99, ah, &pair.b).inline(b"next"))?;
    pair.a.sent.done(99)?;
    let wc = pair.b.received.done(receive)?;
    ensure!(
        wc.byte_len as usize == GRH + 4,
        "another datagram arrived, of {} bytes",
        wc.byte_len
    );
    Ok(())
}

fn lengths(bench: &Bench) -> Result<()> {
    let (pair, ah) = pair(bench)?;
    let mtu = 128 << pair.a.device().port().active_mtu;
    for len in [0, 1, 2, 3, 4, 255, 256, mtu - 1, mtu] {
        let bytes = bench.pattern(len, len as u32);
        pair.a.fill(0, &bytes);
        pair.b.fill(0, &vec![0; GRH + len + 8]);
        pair.b.expect(1, 0, GRH + len + 8)?;
        pair.a.post(datagram(2, &ah, &pair.b).sge(pair.a.mr.sge(0, len)))?;
        ensure!(
            pair.a.sent.done(2)?.opcode == IBV_WC_SEND,
            "the send completed as something else"
        );
        let wc = pair.b.received.done(1)?;
        ensure!(
            wc.opcode == IBV_WC_RECV && wc.byte_len as usize == GRH + len,
            "{} bytes of {len} and 40",
            wc.byte_len
        );
        ensure!(
            wc.src_qp == pair.a.qp.qpn(),
            "from {:#x} instead of {:#x}",
            wc.src_qp,
            pair.a.qp.qpn()
        );
        ensure!(wc.qp_num == pair.b.qp.qpn(), "for queue pair {:#x}", wc.qp_num);
        ensure!(wc.wc_flags & IBV_WC_GRH != 0, "no header is flagged");
        ensure!(
            pair.b.bytes(GRH, len) == bytes,
            "other bytes arrived than the {len} sent"
        );
        ensure!(
            pair.b.bytes(GRH + len, 8) == [0; 8],
            "bytes behind the datagram changed"
        );
    }
    Ok(())
}

fn received_header(pair: &Pair, ah: &Ah) -> Result<(ibv_wc, [u8; GRH])> {
    pair.b.expect(1, 0, 64)?;
    pair.a.post(datagram(2, ah, &pair.b).inline(b"ping"))?;
    pair.a.sent.done(2)?;
    let wc = pair.b.received.done(1)?;
    let mut header = [0; GRH];
    header.copy_from_slice(&pair.b.bytes(0, GRH));
    Ok((wc, header))
}

fn header(bench: &Bench) -> Result<()> {
    let (pair, ah) = pair(bench)?;
    let (_, header) = received_header(&pair, &ah)?;
    let gid = gid_bytes(&pair.a.device().gid());
    if let [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, address @ ..] = gid {
        let ip = &header[20..];
        ensure!(ip[0] == 0x45, "version and length are {:#04x}", ip[0]);
        ensure!(ip[9] == 17, "the protocol is {}", ip[9]);
        ensure!(
            ip[12..16] == address && ip[16..20] == address,
            "addresses {:?} and {:?}",
            &ip[12..16],
            &ip[16..20]
        );
        // BTH, DETH, four bytes and ICRC in UDP.
        let total = u16::from_be_bytes([ip[2], ip[3]]);
        ensure!(total == 20 + 8 + 12 + 8 + 4 + 4, "the total length is {total}");
        ensure!(ip[8] > 0, "no time to live");
    } else {
        ensure!(header[0] >> 4 == 6 && header[6] == 17, "not IPv6 with UDP");
        ensure!(header[8..24] == gid && header[24..40] == gid, "other addresses");
    }
    Ok(())
}

fn immediate_data(bench: &Bench) -> Result<()> {
    let (pair, ah) = pair(bench)?;
    pair.b.expect(1, 0, 64)?;
    let send = Send::new(IBV_WR_SEND_WITH_IMM)
        .id(2)
        .to(&ah, pair.b.qp.qpn(), QKEY)
        .imm([9, 8, 7, 6]);
    pair.a.post(send)?;
    pair.a.sent.done(2)?;
    let wc = pair.b.received.done(1)?;
    ensure!(
        wc.wc_flags & IBV_WC_WITH_IMM != 0 && immediate(&wc) == [9, 8, 7, 6],
        "{:02x?}",
        immediate(&wc)
    );
    ensure!(wc.byte_len as usize == GRH, "{} bytes", wc.byte_len);
    Ok(())
}

fn inline(bench: &Bench) -> Result<()> {
    let (pair, ah) = pair(bench)?;
    for len in [1, 5, 64] {
        let bytes = bench.pattern(len, len as u32);
        pair.b.expect(1, 0, 128)?;
        pair.a.post(datagram(2, &ah, &pair.b).inline(&bytes))?;
        pair.a.sent.done(2)?;
        pair.b.received.done(1)?;
        ensure!(
            pair.b.bytes(GRH, len) == bytes,
            "other bytes arrived than the {len} sent"
        );
    }
    Ok(())
}

fn scatter(bench: &Bench) -> Result<()> {
    let (pair, ah) = pair(bench)?;
    let bytes = bench.pattern(100, 1);
    pair.a.fill(0, &bytes);
    let parts = [(0, 33), (100, 0), (200, 40), (300, 100)];
    let receive = parts
        .iter()
        .fold(Recv::new(1), |receive, &(at, len)| receive.sge(pair.b.mr.sge(at, len)));
    ensure!(pair.b.qp.receive_one(receive) == Errno(0), "the receive was refused");
    pair.a.post(datagram(2, &ah, &pair.b).sge(pair.a.mr.sge(0, 100)))?;
    pair.a.sent.done(2)?;
    pair.b.received.done(1)?;
    // 7 bytes of the GRH are in the third element.
    ensure!(
        pair.b.bytes(207, 33) == bytes[..33] && pair.b.bytes(300, 67) == bytes[33..],
        "other bytes arrived"
    );
    ensure!(
        pair.b.bytes(33, 8) == [0; 8] && pair.b.bytes(367, 33) == [0; 33],
        "bytes around the elements changed"
    );
    Ok(())
}

fn answer(bench: &Bench) -> Result<()> {
    let (pair, ah) = pair(bench)?;
    let (wc, header) = received_header(&pair, &ah)?;
    let back = pair.b.pd.ah_from(wc, header)?;
    pair.a.expect(3, 0, 64)?;
    pair.b
        .post(Send::new(IBV_WR_SEND).id(4).to(&back, wc.src_qp, QKEY).inline(b"pong"))?;
    pair.b.sent.done(4)?;
    pair.a.received.done(3)?;
    ensure!(pair.a.bytes(GRH, 4) == b"pong", "other bytes came back");
    Ok(())
}

fn wrong_key(bench: &Bench) -> Result<()> {
    let (pair, ah) = pair(bench)?;
    pair.b.expect(1, 0, 64)?;
    pair.a.post(
        Send::new(IBV_WR_SEND)
            .id(2)
            .to(&ah, pair.b.qp.qpn(), QKEY ^ 1)
            .inline(b"wrong key"),
    )?;
    pair.a.sent.done(2)?;
    next_arrives(&pair, &ah, 1)?;
    ensure!(pair.b.qp.state()? == IBV_QPS_RTS, "the receiver is not in RTS");
    Ok(())
}

fn own_key(bench: &Bench) -> Result<()> {
    let (pair, ah) = pair(bench)?;
    pair.b.expect(1, 0, 64)?;
    pair.a.post(
        Send::new(IBV_WR_SEND)
            .id(2)
            .to(&ah, pair.b.qp.qpn(), 0x8000_0000)
            .inline(b"ours"),
    )?;
    pair.a.sent.done(2)?;
    pair.b.received.done(1)?;
    Ok(())
}

fn changed_key(bench: &Bench) -> Result<()> {
    let (pair, ah) = pair(bench)?;
    let mut attr = pair.b.qp.attr();
    attr.qp_state = IBV_QPS_RTS;
    attr.qkey = QKEY + 5;
    let result = pair.b.qp.modify(&attr, IBV_QP_STATE | IBV_QP_QKEY);
    ensure!(result == Errno(0), "the change: {result}");
    ensure!(pair.b.qp.query()?.0.qkey == QKEY + 5, "a query returns another value");
    pair.b.expect(1, 0, 64)?;
    pair.a.post(datagram(2, &ah, &pair.b).inline(b"the old key"))?;
    pair.a.post(
        Send::new(IBV_WR_SEND)
            .id(3)
            .to(&ah, pair.b.qp.qpn(), QKEY + 5)
            .inline(b"new"),
    )?;
    pair.a.sent.done(2)?;
    pair.a.sent.done(3)?;
    ensure!(
        pair.b.received.done(1)?.byte_len as usize == GRH + 3,
        "the old key was taken"
    );
    Ok(())
}

fn no_receive(bench: &Bench) -> Result<()> {
    let (pair, ah) = pair(bench)?;
    pair.a.post(datagram(2, &ah, &pair.b).inline(b"lost"))?;
    pair.a.sent.done(2)?;
    pair.b.received.expect_nothing(bench.quiet)?;
    pair.b.expect(1, 0, 64)?;
    pair.b.received.expect_nothing(bench.quiet)?;
    next_arrives(&pair, &ah, 1)
}

fn unknown_qpn(bench: &Bench) -> Result<()> {
    let (pair, ah) = pair(bench)?;
    let gone = pair.b.qp.qpn();
    ensure!(pair.b.qp.destroy() == Errno(0), "destroying the receiver");
    for id in 0..3 {
        pair.a
            .post(Send::new(IBV_WR_SEND).id(id).to(&ah, gone, QKEY).inline(b"unknown"))?;
        pair.a.sent.done(id)?;
    }
    Ok(())
}

fn receiver_in_init(bench: &Bench) -> Result<()> {
    let setup = Setup::of(IBV_QPT_UD);
    let pair = bench.unconnected_pair(&setup, &setup)?;
    pair.a.qp.bring_to(IBV_QPS_RTS)?;
    pair.b.qp.bring_to(IBV_QPS_INIT)?;
    let ah = handle(&pair.a)?;
    pair.b.expect(1, 0, 64)?;
    pair.a.post(datagram(2, &ah, &pair.b).inline(b"too early"))?;
    pair.a.sent.done(2)?;
    pair.b.received.expect_nothing(bench.quiet)?;
    pair.b.qp.modify_through(IBV_QPS_INIT, &[IBV_QPS_RTR])?;
    next_arrives(&pair, &ah, 1)
}

fn receiver_in_err(bench: &Bench) -> Result<()> {
    let (pair, ah) = pair(bench)?;
    ensure!(pair.b.qp.step(IBV_QPS_RTS, IBV_QPS_ERR) == Errno(0), "RTS → ERR");
    pair.a.post(datagram(2, &ah, &pair.b).inline(b"too late"))?;
    pair.a.sent.done(2)?;
    pair.b.received.expect_nothing(bench.quiet)
}

fn longer_than_mtu(bench: &Bench) -> Result<()> {
    let (pair, ah) = pair(bench)?;
    let mtu = 128 << pair.a.device().port().active_mtu;
    pair.b.expect(1, 0, GRH + 2 * mtu)?;
    pair.a.post(datagram(2, &ah, &pair.b).sge(pair.a.mr.sge(0, mtu + 1)))?;
    pair.a.sent.done(2)?;
    pair.b.received.expect_nothing(bench.quiet)?;
    next_arrives(&pair, &ah, 1)
}

fn longer_than_receive(bench: &Bench) -> Result<()> {
    let (pair, ah) = pair(bench)?;
    pair.a.fill(0, &[0x77; 200]);
    pair.b.expect(1, 0, GRH + 100)?;
    pair.a.post(datagram(2, &ah, &pair.b).sge(pair.a.mr.sge(0, 200)))?;
    pair.a.sent.done(2)?;
    if let Some(wc) = pair.b.received.next_within(bench.quiet)? {
        ensure!(
            wc.status != IBV_WC_SUCCESS,
            "the receive is a success of {} bytes",
            wc.byte_len
        );
    }
    ensure!(
        pair.b.bytes(GRH + 100, 200) == [0; 200],
        "bytes behind the receive changed"
    );
    Ok(())
}

fn many_senders(bench: &Bench) -> Result<()> {
    let setup = Setup::of(IBV_QPT_UD);
    let (pair, ah) = pair(bench)?;
    let others = [3, 4, 5].map(|salt| End::new(pair.a.device(), &setup, bench.psn(salt)));
    for other in others {
        let other = other?;
        other.qp.bring_to(IBV_QPS_RTS)?;
        pair.b.expect(1, 0, 64)?;
        let their = handle(&other)?;
        other.post(datagram(2, &their, &pair.b).inline(b"it is me"))?;
        other.sent.done(2)?;
        ensure!(pair.b.received.done(1)?.src_qp == other.qp.qpn(), "another sender");
    }
    pair.b.expect(1, 0, 64)?;
    next_arrives(&pair, &ah, 1)
}

fn order(bench: &Bench) -> Result<()> {
    let (pair, ah) = pair(bench)?;
    for round in 0..4_u8 {
        for index in 0..8 {
            pair.b.expect(index, index as usize * 64, 64)?;
        }
        for index in 0..8_u8 {
            pair.a
                .post(datagram(index.into(), &ah, &pair.b).inline(&[round, index]))?;
        }
        for index in 0..8_u8 {
            pair.a.sent.done(index.into())?;
            pair.b.received.done(index.into())?;
            let found = pair.b.bytes(usize::from(index) * 64 + GRH, 2);
            ensure!(
                found == [round, index],
                "datagram {index} of round {round} is {found:?}"
            );
        }
    }
    Ok(())
}

fn handle_gone(bench: &Bench) -> Result<()> {
    let (pair, ah) = pair(bench)?;
    pair.b.expect(1, 0, 64)?;
    pair.a.post(datagram(2, &ah, &pair.b).inline(b"last"))?;
    pair.a.sent.done(2)?;
    ensure!(ah.destroy() == Errno(0), "destroying the handle");
    pair.b.received.done(1)?;
    ensure!(pair.b.bytes(GRH, 4) == b"last", "other bytes arrived");
    Ok(())
}

fn local_error(bench: &Bench) -> Result<()> {
    let (pair, ah) = pair(bench)?;
    let back = handle(&pair.b)?;
    let mut bad = pair.a.mr.sge(0, 8);
    bad.lkey ^= 0x0055_0000;
    pair.a.post(datagram(1, &ah, &pair.b).sge(bad))?;
    ensure!(pair.a.sent.wait()?.status != IBV_WC_SUCCESS, "it was sent");
    ensure!(pair.a.qp.state()? == IBV_QPS_SQE, "the state is {}", pair.a.qp.state()?);
    pair.a.expect(2, 0, 64)?;
    pair.b.post(datagram(3, &back, &pair.a).inline(b"still there?"))?;
    pair.b.sent.done(3)?;
    pair.a.received.done(2)?;
    ensure!(pair.a.qp.step(IBV_QPS_SQE, IBV_QPS_RTS) == Errno(0), "SQE → RTS");
    pair.b.expect(4, 0, 64)?;
    next_arrives(&pair, &ah, 4)
}

fn connected_request(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    let short_timeouts = Setup {
        timeout: 12,
        retry_cnt: 3,
        ..Setup::default()
    };
    let a = End::new(&device, &short_timeouts, bench.psn(1))?;
    let b = End::new(&device, &Setup::of(IBV_QPT_UD), bench.psn(2))?;
    a.qp.set_peer(b.qp.as_peer());
    a.qp.bring_to(IBV_QPS_RTS)?;
    b.qp.bring_to(IBV_QPS_RTS)?;
    b.expect(2, 0, 64)?;
    a.post(
        Send::new(IBV_WR_RDMA_WRITE)
            .id(1)
            .sge(a.mr.sge(0, 8))
            .at(b.mr.at(0), b.mr.rkey()),
    )?;
    a.sent.wait_for(1, IBV_WC_RETRY_EXC_ERR)?;
    b.received.empty()?;
    ensure!(b.bytes(0, 8) == [0; 8], "the memory changed");
    Ok(())
}

fn other_domain(bench: &Bench) -> Result<()> {
    let (pair, _) = pair(bench)?;
    let device = pair.a.device();
    let foreign = device.pd()?.ah(device.address_of(device.gid()))?;
    pair.b.expect(1, 0, 64)?;
    // Refused, or completed in error.
    if pair
        .a
        .qp
        .post_one(datagram(2, &foreign, &pair.b).inline(b"from elsewhere"))
        == Errno(0)
    {
        ensure!(pair.a.sent.wait()?.status != IBV_WC_SUCCESS, "it was sent");
    }
    pair.b.received.expect_nothing(bench.quiet)
}
