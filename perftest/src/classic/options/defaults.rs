//! The defaults of the classic tools: from the options given to [`Settings`].

use std::time::Duration;

use doorbell_verbs::Gid;

use super::{CQ_MOD_MAX_SIZE, DEPTH, REPORT_INTERVAL, RawOptions};
use crate::classic::settings::{Cuda, Exchange, Rate, Settings, TestLength, Transport};
use crate::classic::tool::{Kind, Verb};
use crate::device::GpuSelector;
use crate::failure::Failure;

pub(super) fn with_defaults(raw: RawOptions) -> Result<Settings, Failure> {
    let tool = raw.settings.tool;
    let bw = tool.kind == Kind::Bw;
    let length = length(&raw)?;
    let iterations = match length {
        TestLength::Iterations(count) => Some(u32::try_from(count).unwrap_or(u32::MAX)),
        TestLength::Duration { .. } => None,
    };
    let at_most_all = |depth: u32| iterations.map_or(depth, |iterations| depth.min(iterations));
    let (post_list, recv_post_list) = (raw.post_list.unwrap_or(1), raw.recv_post_list.unwrap_or(1));
    let tx_depth = match (bw, raw.tx_depth) {
        (true, Some(depth)) => at_most_all(depth),
        (true, None) => at_most_all(post_list.max(128)),
        (false, _) => 1,
    };
    let transport = match raw.transport {
        _ if raw.multicast => Transport::Ud,
        given => given.unwrap_or(Transport::Rc),
    };
    let rx_depth = match (raw.rx_depth, transport, iterations) {
        (Some(depth), ..) => at_most_all(depth),
        // A datagram without a posted receive is lost, so there are as many receives as messages.
        (None, Transport::Ud, Some(iterations)) => iterations.min(*DEPTH.end()),
        (None, ..) => at_most_all(recv_post_list.max(512)),
    };
    check_lists(&raw, iterations, tx_depth, rx_depth)?;
    let qps = raw.settings.qps;
    if raw.settings.shared_receive && rx_depth < qps {
        return Err(Failure::usage(format!(
            "--use-srq with {qps} queue pairs needs at least as many receives: -r {qps}"
        )));
    }
    let size = raw.size.unwrap_or(match (tool.verb, tool.kind) {
        (Verb::Atomic, _) => 8,
        (_, Kind::Bw) => 65_536,
        (_, Kind::Lat) => 2,
    });
    let sizes = if raw.settings.all {
        (1..=23).map(|power| 1 << power).collect()
    } else {
        vec![size]
    };
    let cq_mod = match raw.cq_mod {
        _ if !bw => 1,
        Some(cq_mod) => cq_mod,
        None if post_list > 1 => post_list,
        None if size > CQ_MOD_MAX_SIZE && !raw.settings.all && !raw.settings.events => 1,
        None => 100,
    };
    let rate = raw.rate.map(|rate| {
        let (value, per_message) = match raw.rate_unit {
            Some('p') => (rate, true),
            Some('M') => (rate * f64::from(1 << 20), false),
            _ => (rate * 1e9 / 8.0, false),
        };
        let burst = raw.burst.unwrap_or(tx_depth);
        Rate {
            value,
            per_message,
            burst,
        }
    });
    let group = raw
        .multicast
        .then(|| raw.group.unwrap_or(default_group(raw.settings.host.is_some())));
    let gpu = match (raw.gpu, raw.gpu_bus) {
        (Some(number), _) => Some(GpuSelector::Number(number)),
        (None, bus) => bus.map(GpuSelector::Bus),
    };
    Ok(Settings {
        exchange: match (raw.rdma_cm, raw.over_rdma_cm) {
            (true, _) => Exchange::RdmaCm,
            (_, true) => Exchange::OverRdmaCm,
            _ => Exchange::Tcp,
        },
        transport,
        group,
        traffic_class: raw.traffic_class.or(raw.settings.type_of_service).unwrap_or(0),
        sizes,
        length,
        tx_depth,
        rx_depth,
        post_list,
        recv_post_list,
        cq_mod: cq_mod.min(tx_depth),
        list_moderates: post_list > 1 && raw.cq_mod.is_none(),
        vector: raw.vector.unwrap_or(0),
        cuda: gpu.map(|gpu| Cuda {
            gpu,
            dmabuf: raw.dmabuf,
        }),
        // A WRITE latency test polls the last byte of a message, which must be written last.
        relaxed_ordering: !raw.strict_ordering && (tool.verb != Verb::Write || bw),
        rate,
        ..raw.settings
    })
}

fn length(raw: &RawOptions) -> Result<TestLength, Failure> {
    let tool = raw.settings.tool;
    if raw.settings.forever {
        let duration = raw.duration.map_or(REPORT_INTERVAL, Duration::from_secs);
        return Ok(TestLength::Duration {
            duration,
            margin: Duration::ZERO,
        });
    }
    let Some(seconds) = raw.duration else {
        let default = if tool.kind == Kind::Bw && tool.verb == Verb::Write {
            5000
        } else {
            1000
        };
        return Ok(TestLength::Iterations(raw.iterations.unwrap_or(default)));
    };
    let margin = raw.margin.unwrap_or(seconds / 4);
    if margin * 2 >= seconds {
        return Err(Failure::usage(format!(
            "-f {margin} leaves nothing of -D {seconds}: give a margin of less than half of it"
        )));
    }
    Ok(TestLength::Duration {
        duration: Duration::from_secs(seconds),
        margin: Duration::from_secs(margin),
    })
}

/// The C tools' groups, one for each end.
fn default_group(is_client: bool) -> Gid {
    Gid([255, 1, 0, 0, 0, 2, 201, 133, 0, 0, 0, 0, 0, 0, 0, u8::from(is_client)])
}

/// Whether post lists fit in the queues and divide the number of messages.
fn check_lists(raw: &RawOptions, iterations: Option<u32>, tx_depth: u32, rx_depth: u32) -> Result<(), Failure> {
    for (flag, list, queue, depth) in [
        ("-l", raw.post_list, "-t", tx_depth),
        ("--recv_post_list", raw.recv_post_list, "-r", rx_depth),
    ] {
        let Some(list) = list else { continue };
        if list > depth {
            return Err(Failure::usage(format!(
                "{flag} {list} is more than {queue} {depth} holds: make that {list}, or the list shorter"
            )));
        }
        if let Some(iterations) = iterations.filter(|iterations| iterations % list != 0) {
            return Err(Failure::usage(format!(
                "{flag} {list} does not divide -n {iterations}: make that {}",
                iterations.next_multiple_of(list)
            )));
        }
    }
    match (raw.post_list, raw.cq_mod) {
        (Some(list), Some(cq_mod)) if list > 1 && list % cq_mod != 0 => Err(Failure::usage(format!(
            "-Q {cq_mod} does not divide -l {list}: make it {list}, or leave it out"
        ))),
        _ => Ok(()),
    }
}
