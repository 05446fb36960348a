//! Device attributes, and the lifecycle of its objects.

use anyhow::{Context, Result, ensure};
use doorbell_verbs_sys::*;

use crate::conformance::rig::states::{TRANSPORTS, transport_name};
use crate::conformance::rig::{ALL_RIGHTS, Bench, End, Errno, Memory, Recv, Send, Setup};
use crate::conformance::{Case, case};

pub(super) fn cases() -> Vec<Case> {
    vec![
        case(
            "device/limits",
            "11.2.1.2",
            "every required limit is above zero",
            limits,
        ),
        case(
            "device/port",
            "11.2.1.3",
            "the port is active, and its active MTU at most its maximum MTU",
            port,
        ),
        case(
            "device/no-such-port",
            "ibv_query_port(3)",
            "an unknown port is refused",
            no_such_port,
        ),
        case(
            "device/gid",
            "11.2.1.3",
            "the GID table has an entry, and none beyond its length",
            gid,
        ),
        case(
            "device/pkey",
            "10.9.1",
            "the first partition key is the default one, with full membership",
            pkey,
        ),
        case(
            "object/pd-busy",
            "10.2.2",
            "a protection domain in use cannot be freed",
            pd_busy,
        ),
        case(
            "object/cq-busy",
            "11.2.8.4",
            "a completion queue in use cannot be destroyed",
            cq_busy,
        ),
        case(
            "object/channel-busy",
            "ibv_create_comp_channel(3)",
            "a channel in use cannot be destroyed",
            channel_busy,
        ),
        case(
            "object/ah-keeps-pd",
            "11.2.3.1",
            "an address handle keeps its protection domain",
            ah_keeps_pd,
        ),
        case(
            "object/in-order",
            "ibv_open_device(3)",
            "destroyed in dependency order, every destruction succeeds",
            in_order,
        ),
        case(
            "object/many",
            "10.2.4",
            "keys and QPNs of live objects are unique",
            many,
        ),
        case(
            "object/qpn-is-24-bit",
            "9.2.4",
            "QPNs have 24 bits and are neither 0 nor 1",
            qpn_width,
        ),
        case(
            "cq/capacity",
            "11.2.8.1",
            "a completion queue has at least the requested entries",
            cq_capacity,
        ),
        case(
            "cq/too-large",
            "11.2.8.1",
            "more entries than the device's maximum are refused",
            cq_too_large,
        ),
        case(
            "cq/no-entries",
            "ibv_create_cq(3)",
            "a completion queue of zero or negative entries is refused",
            cq_no_entries,
        ),
        case(
            "cq/bad-vector",
            "ibv_create_cq(3)",
            "an unknown completion vector is refused",
            cq_bad_vector,
        ),
        case(
            "qp/capacity",
            "11.2.4.1",
            "the queues have at least the requested capacities, and report them",
            qp_capacity,
        ),
        case(
            "qp/too-deep",
            "11.2.4.1",
            "more requests than the device's maximum are refused",
            qp_too_deep,
        ),
        case(
            "qp/too-many-elements",
            "11.2.4.1",
            "more SGEs than the device's maximum are refused",
            qp_too_many_sges,
        ),
        case(
            "qp/unknown-transport",
            "ibv_create_qp(3)",
            "an unknown transport is refused",
            qp_unknown_transport,
        ),
        case(
            "qp/one-way",
            "ibv_create_qp(3)",
            "a queue pair may have no receives, or no sends: posting them is refused",
            one_way,
        ),
        case(
            "object/two-contexts",
            "ibv_open_device(3)",
            "objects of one context are invalid in another, and their queue pairs connect",
            two_contexts,
        ),
        case(
            "qp/starts-in-reset",
            "10.3.1.1",
            "a queue pair is created in RESET",
            qp_starts_in_reset,
        ),
        case(
            "mr/no-memory",
            "ibv_reg_mr(3)",
            "unmapped memory cannot be registered",
            mr_no_memory,
        ),
        case(
            "mr/remote-write-needs-local",
            "10.6.3.1",
            "remote write without local write is refused",
            mr_remote_write_alone,
        ),
        case(
            "mr/remote-atomic-needs-local",
            "10.6.3.1",
            "remote atomics without local write are refused",
            mr_remote_atomic_alone,
        ),
        case(
            "mr/same-memory-twice",
            "10.6.3",
            "memory may be registered twice, with different keys",
            mr_twice,
        ),
        case(
            "mr/zero-length",
            "10.6.3",
            "a region of a single byte works like any other",
            mr_one_byte,
        ),
        case(
            "ah/needs-a-port",
            "11.2.3.1",
            "an address of an unknown port is refused",
            ah_bad_port,
        ),
    ]
}

fn limits(bench: &Bench) -> Result<()> {
    let attr = bench.open()?.query()?;
    let limits = [
        ("max_qp", attr.max_qp),
        ("max_qp_wr", attr.max_qp_wr),
        ("max_sge", attr.max_sge),
        ("max_cq", attr.max_cq),
        ("max_cqe", attr.max_cqe),
        ("max_mr", attr.max_mr),
        ("max_pd", attr.max_pd),
        ("max_ah", attr.max_ah),
        ("max_qp_rd_atom", attr.max_qp_rd_atom),
        ("max_qp_init_rd_atom", attr.max_qp_init_rd_atom),
        ("phys_port_cnt", i32::from(attr.phys_port_cnt)),
        ("max_pkeys", i32::from(attr.max_pkeys)),
    ];
    for (name, limit) in limits {
        ensure!(limit > 0, "{name} is {limit}");
    }
    ensure!(attr.max_mr_size >= 1 << 30, "max_mr_size is {}", attr.max_mr_size);
    ensure!(attr.node_guid != 0, "the node has no GUID");
    Ok(())
}

fn port(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    let port = device.port();
    ensure!(port.state == IBV_PORT_ACTIVE, "state {}", port.state);
    let mtu = port.active_mtu;
    ensure!((IBV_MTU_256..=IBV_MTU_4096).contains(&mtu), "active_mtu {mtu}");
    ensure!(mtu <= port.max_mtu, "active_mtu {mtu} and max_mtu {}", port.max_mtu);
    ensure!(port.max_msg_sz >= 1 << 20, "max_msg_sz {}", port.max_msg_sz);
    ensure!(
        port.gid_tbl_len > 0 && port.pkey_tbl_len > 0,
        "no table of GIDs or partitions"
    );
    Ok(())
}

fn no_such_port(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    for number in [0, device.query()?.phys_port_cnt + 1] {
        ensure!(device.query_port(number).is_err(), "port {number} has attributes");
        ensure!(device.gid_at(number, 0).is_err(), "port {number} has a GID");
        ensure!(device.pkey_at(number, 0).is_err(), "port {number} has a partition key");
    }
    Ok(())
}

fn gid(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    let len = device.port().gid_tbl_len;
    let index = i32::from(device.gid_index());
    let gid = device.gid_at(1, index).context("the GID in use")?;
    ensure!(gid != [0; 16], "it is all zero");
    ensure!(index < len, "it lies beyond the length");
    ensure!(device.gid_at(1, len).is_err(), "there is a GID at {len}, the length");
    ensure!(device.gid_at(1, -1).is_err(), "there is a GID at -1");
    Ok(())
}

fn pkey(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    let pkey = device.pkey_at(1, 0).context("the first")?;
    ensure!(pkey == 0xffff, "{pkey:#06x}");
    let len = i32::from(device.port().pkey_tbl_len);
    ensure!(device.pkey_at(1, len).is_err(), "there is one at {len}, the length");
    Ok(())
}

fn pd_busy(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    let pd = device.pd()?;
    let region = pd.register(64, ALL_RIGHTS)?;
    let result = pd.dealloc();
    ensure!(result == Errno(libc::EBUSY), "with a region: {result}");
    ensure!(region.deregister() == Errno(0), "the region cannot be deregistered");
    let cq = device.cq(4)?;
    let qp = pd.qp(&cq, &cq, &Setup::default(), 0)?;
    let result = pd.dealloc();
    ensure!(result == Errno(libc::EBUSY), "with a queue pair: {result}");
    ensure!(qp.destroy() == Errno(0), "the queue pair cannot be destroyed");
    ensure!(pd.dealloc() == Errno(0), "it cannot be freed with nothing in it");
    Ok(())
}

fn cq_busy(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    let (pd, sends, receives) = (device.pd()?, device.cq(4)?, device.cq(4)?);
    let qp = pd.qp(&sends, &receives, &Setup::default(), 0)?;
    for (cq, queue) in [(&sends, "send"), (&receives, "receive")] {
        let result = cq.destroy();
        ensure!(result == Errno(libc::EBUSY), "that of the {queue} queue: {result}");
    }
    ensure!(qp.destroy() == Errno(0), "the queue pair cannot be destroyed");
    ensure!(
        sends.destroy() == Errno(0) && receives.destroy() == Errno(0),
        "not destroyed when unused"
    );
    Ok(())
}

fn channel_busy(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    let channel = device.channel()?;
    let cq = device.cq_with(4, Some(&channel), 0, 0)?;
    let result = channel.destroy();
    ensure!(result == Errno(libc::EBUSY), "with a completion queue: {result}");
    ensure!(cq.destroy() == Errno(0), "the completion queue cannot be destroyed");
    ensure!(channel.destroy() == Errno(0), "it cannot be destroyed with no queue");
    Ok(())
}

fn ah_keeps_pd(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    let pd = device.pd()?;
    let ah = pd.ah(device.address_of(device.gid()))?;
    let result = pd.dealloc();
    ensure!(result == Errno(libc::EBUSY), "with an address handle: {result}");
    ensure!(ah.destroy() == Errno(0), "the address handle cannot be destroyed");
    ensure!(pd.dealloc() == Errno(0), "it cannot be freed with nothing in it");
    Ok(())
}

fn in_order(bench: &Bench) -> Result<()> {
    for transport in TRANSPORTS {
        let device = bench.open()?;
        let end = End::new(&device, &Setup::of(transport), 0)?;
        let steps = [
            ("queue pair", end.qp.destroy()),
            ("completion queue", end.sent.destroy()),
            ("completion queue", end.received.destroy()),
            ("region", end.mr.deregister()),
            ("protection domain", end.pd.dealloc()),
            ("device", device.close()),
        ];
        for (what, result) in steps {
            ensure!(result == Errno(0), "{} {what}: {result}", transport_name(transport));
        }
    }
    Ok(())
}

fn many(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    let (pd, cq) = (device.pd()?, device.cq(64)?);
    let mut qps = Vec::new();
    let mut regions = Vec::new();
    for _ in 0..32 {
        qps.push(pd.qp(&cq, &cq, &Setup::default(), 0)?);
        regions.push(pd.register(64, ALL_RIGHTS)?);
    }
    let different = |mut numbers: Vec<u32>| {
        numbers.sort_unstable();
        numbers.windows(2).all(|pair| pair[0] != pair[1])
    };
    ensure!(
        different(qps.iter().map(|qp| qp.qpn()).collect()),
        "two queue pairs of one number"
    );
    ensure!(
        different(regions.iter().map(|mr| mr.lkey()).collect()),
        "two regions of one lkey"
    );
    ensure!(
        different(regions.iter().map(|mr| mr.rkey()).collect()),
        "two regions of one rkey"
    );
    Ok(())
}

fn qpn_width(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    let (pd, cq) = (device.pd()?, device.cq(4)?);
    for transport in TRANSPORTS {
        let qpn = pd.qp(&cq, &cq, &Setup::of(transport), 0)?.qpn();
        ensure!(
            (2..1 << 24).contains(&qpn),
            "{} has {qpn:#x}",
            transport_name(transport)
        );
    }
    Ok(())
}

fn cq_capacity(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    for entries in [1, 2, 3, 255, 1000] {
        let found = device.cq(entries)?.capacity();
        ensure!(found >= entries, "{found} entries of {entries}");
    }
    Ok(())
}

fn cq_too_large(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    let most = device.query()?.max_cqe;
    ensure!(
        device.cq(most.saturating_add(1)).is_err(),
        "{most} and one more entries were granted"
    );
    Ok(())
}

fn cq_no_entries(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    for entries in [0, -1] {
        ensure!(device.cq(entries).is_err(), "a queue of {entries} entries was made");
    }
    Ok(())
}

fn cq_bad_vector(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    let vectors = device.completion_vectors();
    for vector in [vectors, -1] {
        ensure!(
            device.cq_with(4, None, 0, vector).is_err(),
            "vector {vector} of {vectors} was taken"
        );
    }
    Ok(())
}

fn qp_capacity(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    for transport in TRANSPORTS {
        let setup = Setup {
            depth: 33,
            sges: 3,
            inline: 65,
            ..Setup::of(transport)
        };
        let end = End::new(&device, &setup, 0)?;
        let (attr, init) = end.qp.query()?;
        for cap in [attr.cap, init.cap] {
            ensure!(
                cap.max_send_wr >= 33
                    && cap.max_recv_wr >= 33
                    && cap.max_send_sge >= 3
                    && cap.max_recv_sge >= 3
                    && cap.max_inline_data >= 65,
                "{}: {cap:?}",
                transport_name(transport)
            );
        }
    }
    Ok(())
}

fn refuses(bench: &Bench, setup: &Setup, what: &str) -> Result<()> {
    let device = bench.open()?;
    let (pd, cq) = (device.pd()?, device.cq(16)?);
    ensure!(pd.qp(&cq, &cq, setup, 0).is_err(), "a queue pair of {what} was made");
    Ok(())
}

fn qp_too_deep(bench: &Bench) -> Result<()> {
    let most = bench.open()?.query()?.max_qp_wr as u32;
    let setup = Setup {
        depth: most + 1,
        ..Setup::default()
    };
    refuses(bench, &setup, &format!("{most} and one more requests"))
}

fn qp_too_many_sges(bench: &Bench) -> Result<()> {
    let most = bench.open()?.query()?.max_sge as u32;
    let setup = Setup {
        sges: most + 1,
        ..Setup::default()
    };
    refuses(bench, &setup, &format!("{most} and one more elements"))
}

fn qp_unknown_transport(bench: &Bench) -> Result<()> {
    refuses(bench, &Setup::of(77), "transport 77")
}

fn qp_starts_in_reset(bench: &Bench) -> Result<()> {
    for transport in TRANSPORTS {
        let device = bench.open()?;
        let end = End::new(&device, &Setup::of(transport), 0)?;
        ensure!(end.qp.state()? == IBV_QPS_RESET, "{} is not", transport_name(transport));
    }
    Ok(())
}

fn mr_no_memory(bench: &Bench) -> Result<()> {
    let pd = bench.open()?.pd()?;
    for rights in [0, IBV_ACCESS_LOCAL_WRITE] {
        let result = pd.register_nothing(rights);
        ensure!(result == Errno(libc::EFAULT), "with rights {rights:#x}: {result}");
    }
    Ok(())
}

fn mr_remote_write_alone(bench: &Bench) -> Result<()> {
    let pd = bench.open()?.pd()?;
    let result = pd.register(64, IBV_ACCESS_REMOTE_WRITE).map(|_| ());
    ensure!(result == Err(Errno(libc::EINVAL)), "{result:?}");
    Ok(())
}

fn mr_remote_atomic_alone(bench: &Bench) -> Result<()> {
    let pd = bench.open()?.pd()?;
    let result = pd.register(64, IBV_ACCESS_REMOTE_ATOMIC).map(|_| ());
    ensure!(result == Err(Errno(libc::EINVAL)), "{result:?}");
    Ok(())
}

fn mr_twice(bench: &Bench) -> Result<()> {
    let pd = bench.open()?.pd()?;
    let memory = Memory::new(256);
    let one = pd.register_part(&memory, 0..256, ALL_RIGHTS)?;
    let other = pd.register_part(&memory, 64..128, 0)?;
    ensure!(one.lkey() != other.lkey(), "two regions of one lkey");
    ensure!(
        (one.length(), other.length()) == (256, 64),
        "the capacities are less than requested"
    );
    ensure!(
        one.deregister() == Errno(0) && other.deregister() == Errno(0),
        "not deregistered"
    );
    Ok(())
}

fn mr_one_byte(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup {
        bytes: 8,
        ..Setup::default()
    })?;
    let region = pair.a.pd.register(1, 0)?;
    region.memory.fill(0, &[0x5a]);
    pair.b.expect(1, 0, 8)?;
    pair.a.post(Send::new(IBV_WR_SEND).id(2).sge(region.sge(0, 1)))?;
    pair.a.sent.done(2)?;
    let wc = pair.b.received.done(1)?;
    ensure!(
        wc.byte_len == 1 && pair.b.bytes(0, 2) == [0x5a, 0],
        "another byte arrived"
    );
    Ok(())
}

fn ah_bad_port(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    let pd = device.pd()?;
    let mut address = device.address_of(device.gid());
    address.port_num = device.query()?.phys_port_cnt + 1;
    ensure!(pd.ah(address).is_err(), "it was made");
    Ok(())
}

fn one_way(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    let none = Setup {
        depth: 0,
        sges: 0,
        inline: 0,
        ..Setup::default()
    };
    let end = End::with(&device.pd()?, device.cq(4)?, device.cq(4)?, &none, 0)?;
    end.qp.bring_to(IBV_QPS_RTS)?;
    let (receive, send) = (
        Recv::new(1).sge(end.mr.sge(0, 8)),
        Send::new(IBV_WR_SEND).sge(end.mr.sge(0, 8)),
    );
    ensure!(end.qp.receive_one(receive) != Errno(0), "a receive was taken");
    ensure!(end.qp.post_one(send) != Errno(0), "a send was taken");
    Ok(())
}

fn two_contexts(bench: &Bench) -> Result<()> {
    let (one, other) = (bench.open()?, bench.open()?);
    let setup = Setup::default();
    let a = End::new(&one, &setup, bench.psn(1))?;
    let b = End::new(&other, &setup, bench.psn(2))?;
    a.qp.set_peer(b.qp.as_peer());
    b.qp.set_peer(a.qp.as_peer());
    a.qp.bring_to(IBV_QPS_RTS)?;
    b.qp.bring_to(IBV_QPS_RTS)?;
    b.expect(1, 0, 64)?;
    a.post(Send::new(IBV_WR_SEND).id(2).inline(b"from the other context"))?;
    a.sent.done(2)?;
    b.received.done(1)?;
    ensure!(b.bytes(0, 22) == b"from the other context", "other bytes arrived");
    // A key of the other context.
    a.post(Send::new(IBV_WR_SEND).id(3).sge(b.mr.sge(0, 8)))?;
    ensure!(
        a.sent.wait()?.status != IBV_WC_SUCCESS,
        "it sent from the other's region"
    );
    Ok(())
}
