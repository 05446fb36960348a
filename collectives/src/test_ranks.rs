//! Ranks of unit tests: on one userspace device of this process, over UDP.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Once;
use std::thread;

use doorbell_softroce_ibverbs::{DeviceConfig, LinkChoice, api, configure};
use doorbell_verbs::{Context, Library};

use crate::bootstrap::Group;
use crate::{Communicator, Options};

/// The device, on an address of this process's own.
pub(crate) fn device() -> Context {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let [_, _, high, low] = std::process::id().to_be_bytes();
        let device = DeviceConfig {
            address: Some(IpAddr::V4(Ipv4Addr::new(127, 160 + high % 64, low, 9))),
            link: LinkChoice::Udp,
            ..DeviceConfig::new("soft0".to_owned())
        };
        configure(vec![device]).unwrap();
    });
    Library::new(api()).open("soft0").unwrap()
}

/// Runs `rank` as each of so many ranks, each in a thread, and returns their results.
pub(crate) fn ranks<R: Send>(ranks: u32, options: &Options, rank: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    let options = Options {
        calibrate: false,
        ..options.clone()
    };
    let run = |group| rank(Communicator::new(&[device()], group, options.clone()).unwrap());
    thread::scope(|scope| {
        let groups = Group::local(ranks).unwrap().into_iter();
        let threads: Vec<_> = groups.map(|group| scope.spawn(|| run(group))).collect();
        let joined = threads.into_iter().map(thread::ScopedJoinHandle::join);
        joined
            .map(|ended| ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}
