//! Every transition of the state table, with every required, optional and invalid attribute.

use anyhow::{Result, ensure};
use doorbell_verbs_sys::*;

use crate::conformance::rig::states::{
    ATTRIBUTES, CONDITIONAL, Rule, STATES, TRANSPORTS, rule, state_name, transport_name,
};
use crate::conformance::rig::{Bench, Device, End, Errno, Setup};
use crate::conformance::{Case, case};

/// A case for each transport, state and next state.
pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for transport in TRANSPORTS {
        for from in STATES {
            // RC has no SQE.
            if from == IBV_QPS_SQE && transport == IBV_QPT_RC {
                continue;
            }
            for to in STATES {
                let name = format!(
                    "modify/{}-{}-{}",
                    transport_name(transport),
                    state_name(from),
                    state_name(to)
                );
                let description = match rule(transport, from, to) {
                    Some(_) => {
                        "the transition needs what table 91 requires, takes what is optional, and refuses the rest"
                    }
                    None => "there is no such transition",
                };
                cases.push(case(&name, "11.2.5.2, table 91", description, move |bench| {
                    transition(bench, transport, from, to)
                }));
            }
        }
    }
    cases.push(case(
        "modify/query-returns-it",
        "11.2.5.3",
        "a query returns the attributes that were set",
        query_returns,
    ));
    cases.push(case(
        "modify/wrong-current-state",
        "11.2.5.2",
        "a wrong current state is refused",
        wrong_current_state,
    ));
    cases.push(case(
        "modify/without-state",
        "ibv_modify_qp(3)",
        "attributes without a state are modified in the current state",
        without_state,
    ));
    cases.push(case(
        "modify/unknown-attribute",
        "ibv_modify_qp(3)",
        "an unknown attribute bit is refused",
        unknown_attribute,
    ));
    cases.push(case(
        "modify/no-such-state",
        "ibv_modify_qp(3)",
        "an unknown state is refused",
        no_such_state,
    ));
    cases.push(case(
        "modify/values",
        "11.2.5.2",
        "values out of their ranges are refused",
        values,
    ));
    cases.push(case(
        "modify/reset-forgets",
        "10.3.1.1",
        "after RESET the queue pair connects like a new one",
        reset_forgets,
    ));
    cases
}

fn end_in(device: &Device, transport: ibv_qp_type, state: ibv_qp_state) -> Result<End> {
    let end = End::new(device, &Setup::of(transport), 0)?;
    end.qp.bring_to(state)?;
    Ok(end)
}

fn transition(bench: &Bench, transport: ibv_qp_type, from: ibv_qp_state, to: ibv_qp_state) -> Result<()> {
    let device = bench.open()?;
    let end = end_in(&device, transport, from)?;
    let Some(Rule { required, optional }) = rule(transport, from, to) else {
        return no_transition(&end, transport, from, to);
    };
    let flags = device.query()?.device_cap_flags;
    let left_open = CONDITIONAL
        .iter()
        .filter(|(_, flag)| *flag == 0 || flags & flag == 0)
        .fold(0, |bits, (bit, _)| bits | bit);
    // A port cannot be changed, but may be set to its current value.
    let left_open = left_open
        | if from == IBV_QPS_SQD && flags & IBV_DEVICE_CHANGE_PHY_PORT == 0 {
            IBV_QP_PORT
        } else {
            0
        };
    // A refusal leaves the state unchanged, so one queue pair serves all refusals.
    for (bit, name) in ATTRIBUTES {
        if required & bit != 0 {
            let result = end
                .qp
                .modify(&all_attributes(&end, from, to), IBV_QP_STATE | required & !bit);
            ensure!(result == Errno(libc::EINVAL), "without {name}: {result}");
            ensure!(end.qp.state()? == from, "the state changed though {name} was missing");
        } else if (optional | left_open) & bit == 0 {
            let result = end
                .qp
                .modify(&all_attributes(&end, from, to), IBV_QP_STATE | required | bit);
            ensure!(
                result == Errno(libc::EINVAL),
                "with {name}, which has no place in it: {result}"
            );
            ensure!(end.qp.state()? == from, "the state changed though {name} was given");
        }
    }
    let result = end.qp.modify(&all_attributes(&end, from, to), IBV_QP_STATE | required);
    ensure!(result == Errno(0), "with what it requires: {result}");
    ensure!(end.qp.state()? == to, "the state is not {}", state_name(to));
    for (bit, name) in ATTRIBUTES {
        if optional & !left_open & bit != 0 {
            let end = end_in(&device, transport, from)?;
            let result = end
                .qp
                .modify(&all_attributes(&end, from, to), IBV_QP_STATE | required | bit);
            ensure!(result == Errno(0), "with {name}, which is optional: {result}");
            ensure!(end.qp.state()? == to, "with {name} the state is not {}", state_name(to));
        }
    }
    Ok(())
}

fn all_attributes(end: &End, from: ibv_qp_state, to: ibv_qp_state) -> ibv_qp_attr {
    let mut attr = end.qp.attr();
    attr.qp_state = to;
    attr.cur_qp_state = from;
    attr
}

fn no_transition(end: &End, transport: ibv_qp_type, from: ibv_qp_state, to: ibv_qp_state) -> Result<()> {
    let everywhere = |states: [ibv_qp_state; 7]| {
        states
            .into_iter()
            .filter_map(|state| rule(transport, state, to))
            .fold(0, |bits, rule| bits | rule.required)
    };
    for mask in [0, everywhere(STATES)] {
        let result = end.qp.modify(&all_attributes(end, from, to), IBV_QP_STATE | mask);
        ensure!(result == Errno(libc::EINVAL), "with attributes {mask:#x}: {result}");
        ensure!(end.qp.state()? == from, "the state changed");
    }
    Ok(())
}

fn query_returns(bench: &Bench) -> Result<()> {
    let setup = Setup {
        mtu: IBV_MTU_512,
        access: IBV_ACCESS_REMOTE_READ,
        timeout: 13,
        retry_cnt: 5,
        rnr_retry: 6,
        min_rnr_timer: 9,
        rd_atomic: 3,
        dest_rd_atomic: 2,
        signal_all: true,
        ..Setup::default()
    };
    let pair = bench.pair(&setup)?;
    let (attr, init) = pair.a.qp.query()?;
    let set = pair.a.qp.attr();
    let values = [
        ("qp_state", attr.qp_state, IBV_QPS_RTS),
        ("path_mtu", attr.path_mtu, set.path_mtu),
        ("rq_psn", attr.rq_psn, set.rq_psn),
        ("sq_psn", attr.sq_psn, set.sq_psn),
        ("dest_qp_num", attr.dest_qp_num, set.dest_qp_num),
        ("qp_access_flags", attr.qp_access_flags, set.qp_access_flags),
        ("timeout", attr.timeout.into(), set.timeout.into()),
        ("retry_cnt", attr.retry_cnt.into(), set.retry_cnt.into()),
        ("rnr_retry", attr.rnr_retry.into(), set.rnr_retry.into()),
        ("min_rnr_timer", attr.min_rnr_timer.into(), set.min_rnr_timer.into()),
        (
            "max_dest_rd_atomic",
            attr.max_dest_rd_atomic.into(),
            set.max_dest_rd_atomic.into(),
        ),
        ("port_num", attr.port_num.into(), 1),
        ("pkey_index", attr.pkey_index.into(), 0),
        ("ah_attr.is_global", attr.ah_attr.is_global.into(), 1),
        (
            "ah_attr.grh.sgid_index",
            attr.ah_attr.grh.sgid_index.into(),
            set.ah_attr.grh.sgid_index.into(),
        ),
        ("sq_sig_all", init.sq_sig_all as u32, 1),
        ("qp_type", init.qp_type, IBV_QPT_RC),
    ];
    for (name, found, expected) in values {
        ensure!(found == expected, "{name} is {found:#x} instead of {expected:#x}");
    }
    // A device may grant more.
    ensure!(
        attr.max_rd_atomic >= set.max_rd_atomic,
        "max_rd_atomic is {}",
        attr.max_rd_atomic
    );
    ensure!(
        crate::conformance::rig::gid_bytes(&attr.ah_attr.grh.dgid)
            == crate::conformance::rig::gid_bytes(&set.ah_attr.grh.dgid),
        "another destination GID"
    );
    Ok(())
}

fn wrong_current_state(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    device.needs(IBV_DEVICE_CURR_QP_STATE_MOD, "a modify that names the current state")?;
    let end = end_in(&device, IBV_QPT_RC, IBV_QPS_RTS)?;
    let mut attr = end.qp.attr();
    attr.qp_state = IBV_QPS_RTS;
    attr.cur_qp_state = IBV_QPS_SQD;
    let result = end.qp.modify(&attr, IBV_QP_STATE | IBV_QP_CUR_STATE);
    ensure!(result == Errno(libc::EINVAL), "SQD, in RTS: {result}");
    ensure!(end.qp.state()? == IBV_QPS_RTS, "the state changed");
    Ok(())
}

fn no_such_state(bench: &Bench) -> Result<()> {
    let end = End::new(&bench.open()?, &Setup::default(), 0)?;
    for state in [7, 8, 255] {
        let mut attr = end.qp.attr();
        attr.qp_state = state;
        let result = end.qp.modify(&attr, IBV_QP_STATE);
        ensure!(result == Errno(libc::EINVAL), "state {state}: {result}");
    }
    Ok(())
}

/// Sets an attribute to a value out of its range.
type Spoil = fn(&mut ibv_qp_attr, &Device);

fn values(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    let ways: [(&str, ibv_qp_state, ibv_qp_state, Spoil); 9] = [
        ("port_num 0", IBV_QPS_RESET, IBV_QPS_INIT, |attr, _| attr.port_num = 0),
        ("port_num 99", IBV_QPS_RESET, IBV_QPS_INIT, |attr, _| attr.port_num = 99),
        (
            "pkey_index beyond the table",
            IBV_QPS_RESET,
            IBV_QPS_INIT,
            |attr, device| {
                attr.pkey_index = device.port().pkey_tbl_len;
            },
        ),
        ("path_mtu 0", IBV_QPS_INIT, IBV_QPS_RTR, |attr, _| attr.path_mtu = 0),
        ("path_mtu of no name", IBV_QPS_INIT, IBV_QPS_RTR, |attr, _| {
            attr.path_mtu = 6
        }),
        ("ah_attr.port_num 99", IBV_QPS_INIT, IBV_QPS_RTR, |attr, _| {
            attr.ah_attr.port_num = 99
        }),
        (
            "sgid_index beyond the table",
            IBV_QPS_INIT,
            IBV_QPS_RTR,
            |attr, device| {
                attr.ah_attr.grh.sgid_index = device.port().gid_tbl_len.min(255) as u8;
            },
        ),
        ("max_dest_rd_atomic 255", IBV_QPS_INIT, IBV_QPS_RTR, |attr, _| {
            attr.max_dest_rd_atomic = 255
        }),
        ("max_rd_atomic 255", IBV_QPS_RTR, IBV_QPS_RTS, |attr, _| {
            attr.max_rd_atomic = 255
        }),
    ];
    for (what, from, to, spoil) in ways {
        let end = end_in(&device, IBV_QPT_RC, from)?;
        let mut attr = all_attributes(&end, from, to);
        spoil(&mut attr, &device);
        let required = rule(IBV_QPT_RC, from, to).map_or(0, |rule| rule.required);
        let result = end.qp.modify(&attr, IBV_QP_STATE | required);
        ensure!(result != Errno(0), "{what} was taken");
        ensure!(end.qp.state()? == from, "{what} was refused, but the state changed");
    }
    Ok(())
}

fn reset_forgets(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    // Receives and sends before the reset.
    pair.b.expect(1, 0, 8)?;
    for end in [&pair.a, &pair.b] {
        ensure!(end.qp.step(IBV_QPS_RTS, IBV_QPS_RESET) == Errno(0), "RTS → RESET");
        end.qp.bring_to(IBV_QPS_RTS)?;
    }
    pair.b.received.empty()?;
    pair.b.expect(2, 0, 8)?;
    pair.a
        .post(crate::conformance::rig::Send::new(IBV_WR_SEND).id(3).inline(b"again"))?;
    pair.a.sent.done(3)?;
    pair.b.received.done(2)?;
    ensure!(pair.b.bytes(0, 5) == b"again", "another message arrived");
    pair.a.sent.empty()
}

fn without_state(bench: &Bench) -> Result<()> {
    let end = end_in(&bench.open()?, IBV_QPT_RC, IBV_QPS_RTS)?;
    let mut attr = end.qp.attr();
    attr.qp_access_flags = IBV_ACCESS_REMOTE_READ;
    let result = end.qp.modify(&attr, IBV_QP_ACCESS_FLAGS);
    ensure!(result == Errno(0), "{result}");
    let (found, _) = end.qp.query()?;
    ensure!(
        (found.qp_state, found.qp_access_flags) == (IBV_QPS_RTS, IBV_ACCESS_REMOTE_READ),
        "state {}, rights {:#x}",
        found.qp_state,
        found.qp_access_flags
    );
    let result = end.qp.modify(&attr, IBV_QP_DEST_QPN);
    ensure!(result == Errno(libc::EINVAL), "what cannot change in RTS: {result}");
    Ok(())
}

fn unknown_attribute(bench: &Bench) -> Result<()> {
    let end = end_in(&bench.open()?, IBV_QPT_RC, IBV_QPS_RTS)?;
    for bit in [1 << 27, 1 << 30] {
        let mut attr = end.qp.attr();
        attr.qp_state = IBV_QPS_RTS;
        let result = end.qp.modify(&attr, IBV_QP_STATE | bit);
        ensure!(result != Errno(0), "bit {bit:#x} was taken");
        ensure!(end.qp.state()? == IBV_QPS_RTS, "the state changed");
    }
    Ok(())
}
