use clap::Parser;

use super::*;
use crate::cli::{Cli, Command};

fn plan(line: &str) -> Result<Plan, Failure> {
    match Cli::try_parse_from(format!("doorbell {line}").split(' '))
        .expect(line)
        .command
    {
        Command::Bw(args) => Plan::bw(&args),
        Command::Lat(args) => Plan::lat(&args),
        other => panic!("{other:?} has no plan"),
    }
}

#[test]
fn defaults_are_perftests() {
    let bw = plan("bw write").unwrap();
    assert_eq!(
        (bw.sizes[0], bw.tx_depth, bw.qps, bw.post_list, bw.inline),
        (65536, 128, 1, 1, 0)
    );
    assert_eq!(bw.iterations(65536), Some(5000));
    assert_eq!(bw.test_name(), "write_bw");
    assert_eq!(plan("bw send").unwrap().iterations(65536), Some(1000));
    let lat = plan("lat write").unwrap();
    assert_eq!((lat.sizes[0], lat.iterations(2), lat.inline), (2, Some(1000), 220));
    assert_eq!(plan("lat atomic").unwrap().sizes, [8]);
    assert_eq!(plan("lat read").unwrap().inline, 0);
    let all = plan("bw write -a").unwrap().sizes;
    assert_eq!((all.len(), all[0], all[22]), (23, 2, 8 << 20));
}

#[test]
fn default_iterations_are_bounded_by_volume() {
    let bw = plan("bw write -a").unwrap();
    assert_eq!(bw.iterations(8 << 20), Some(512));
    assert_eq!(plan("bw write -s 8M -n 5000").unwrap().iterations(8 << 20), Some(5000));
    assert_eq!(bw.warmup(65536), 100);
    assert_eq!(bw.warmup(8 << 20), 51);
}

#[test]
fn contradictions_are_bad_usage() {
    for line in [
        "bw write --post-list 64 --tx-depth 32",
        "bw write --cq-mod 64 --tx-depth 32",
        "bw write --rx-depth 64",
        "bw write --atomic-op fetch-add",
        "bw atomic -s 16",
        "bw atomic -a",
        "bw read --inline 64",
        "bw write --inline 64K",
        "bw write -s 0",
        "bw write -s 2G",
        "bw write -s 1G -q 64",
        "bw write --gpu 0,1,2",
        "bw write --gpu 0,1 peer",
        "lat write --gpu 0 --inline 64",
        "bw atomic --gpu 0",
        "lat write --events",
        "bw read --transport uc",
        "bw atomic --transport uc",
        "bw write --transport ud",
        "bw read --transport ud",
        "lat atomic --transport ud",
        "bw send --transport uc --rdma-cm",
        "bw send --transport ud -s 8K",
        "bw send --transport ud --gpu 0",
        "bw write --interval 1 --repeat 2",
    ] {
        assert_eq!(plan(line).expect_err(line).status(), 2, "{line}");
    }
}

#[test]
fn a_clients_plan_is_limited_by_the_server() {
    let plan = plan("bw write -a -q 64 -D 10 --repeat 2").unwrap();
    let memory = plan.registers_bytes() + 64 * (128 + 512) * WORK_REQUEST_BYTES;
    let check = |client_qps, client_memory, client_time| {
        plan.check_limits(&LimitArgs {
            client_memory,
            client_time,
            client_qps,
        })
    };
    assert_eq!(check(64, memory, 460.0), Ok(()));
    for (refused, option) in [
        (check(63, memory, 460.0), "--client-qps of 63"),
        (check(64, memory - 1, 460.0), "--client-memory of"),
        (check(64, memory, 459.9), "--client-time of 459.9 s"),
    ] {
        assert!(refused.unwrap_err().contains(option), "{option}");
    }
}

#[test]
fn datagrams_are_no_longer_than_the_mtu() {
    let sizes = |line, mtu, given| plan(line).unwrap().fitted(mtu, given).map(|plan| plan.sizes);
    assert_eq!(sizes("bw send --transport ud", 1024, false).unwrap(), [1024]);
    assert_eq!(sizes("bw send --transport ud -a", 8, false).unwrap(), [2, 4, 8]);
    assert_eq!(sizes("bw send --transport ud --mtu 512", 4096, false).unwrap(), [512]);
    assert_eq!(sizes("bw send --transport ud -s 1024", 1024, true).unwrap(), [1024]);
    assert_eq!(
        sizes("bw send --transport ud -s 1025", 1024, true)
            .unwrap_err()
            .status(),
        2
    );
    assert_eq!(sizes("bw send --transport uc", 1024, false).unwrap(), [65536]);
}

#[test]
fn messages_without_flow_control_have_a_receive_each() {
    for (line, receives) in [
        ("bw send", 512),
        ("bw send --transport ud", 1100),
        ("bw send --transport uc -n 9000", 4096),
        ("bw send --transport ud -D 1", 512),
        ("bw send --transport ud --rx-depth 64", 64),
        ("bw write --transport uc", 512),
    ] {
        assert_eq!(plan(line).unwrap().rx_depth, receives, "{line}");
    }
}

#[test]
fn windows_fit_the_memory_budget() {
    let bw = plan("bw write").unwrap();
    assert_eq!(bw.window(65536), 128);
    assert_eq!(bw.window(8 << 20), 32);
    assert_eq!(bw.window(1 << 30), 2);
    assert_eq!(plan("bw write --tx-depth 1").unwrap().window(64), 1);
}

#[test]
fn only_plans_are_deserialized() {
    let bw = plan("bw atomic --atomic-op compare-swap -D 0.5 --mtu 1024").unwrap();
    let text = serde_json::to_string(&bw).unwrap();
    assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), bw);
    let extra = text.replacen('{', "{\"surprise\":1,", 1);
    assert!(serde_json::from_str::<Plan>(&extra).is_err());
}
