//! Ranks as threads of this process, on one soft device.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Once;
use std::thread;

use doorbell_collectives::bootstrap::Group;
use doorbell_collectives::{Communicator, Options};
use doorbell_softroce_ibverbs::{DeviceConfig, api, configure};
use doorbell_verbs::{Context, Library};

/// Device `soft0`, on an address of this process's own.
pub(crate) fn open() -> Context {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let [_, _, high, low] = std::process::id().to_be_bytes();
        configure(vec![DeviceConfig {
            address: Some(IpAddr::V4(Ipv4Addr::new(127, 96 + high % 64, low, 3))),
            ..DeviceConfig::new("soft0".to_owned())
        }])
        .unwrap();
    });
    Library::new(api()).open("soft0").unwrap()
}

pub(crate) fn options() -> Options {
    Options {
        calibrate: false,
        ..Options::default()
    }
}

/// Runs `rank` as each of so many ranks, each in a thread of its own, and returns their results.
pub(crate) fn ranks<R: Send>(ranks: u32, options: &Options, rank: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    let groups = Group::local(ranks).unwrap();
    thread::scope(|scope| {
        let rank = &rank;
        let run =
            |group: Group| scope.spawn(move || rank(Communicator::new(&[open()], group, options.clone()).unwrap()));
        let threads: Vec<_> = groups.into_iter().map(run).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}
