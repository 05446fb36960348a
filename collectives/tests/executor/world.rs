//! Ranks in one process: an engine for each, made by a thread of its own and driven in turn by one.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Once;
use std::thread;
use std::time::{Duration, Instant};

use doorbell_collectives::bootstrap::Group;
use doorbell_collectives::executor::{Config, Engine, Failed, Operation, PlanId, Ticket};
use doorbell_collectives::plan::Collective;
use doorbell_collectives::{Algorithm, Rank};
use doorbell_softroce_ibverbs::{DeviceConfig, api, configure};
use doorbell_verbs::{Context, Library};

/// Longer than anything here takes, on a busy machine too.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// Device `soft0` or `soft1`, on an address of this process's own.
pub(crate) fn open(n: u8) -> Context {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let [_, _, high, low] = std::process::id().to_be_bytes();
        let device = |n: u8| DeviceConfig {
            address: Some(IpAddr::V4(Ipv4Addr::new(127, 160 + high % 64, low, 1 + n))),
            ..DeviceConfig::new(format!("soft{n}"))
        };
        configure(vec![device(0), device(1)]).unwrap();
    });
    Library::new(api()).open(&format!("soft{n}")).unwrap()
}

/// All ranks of a communicator.
pub(crate) struct World {
    pub(crate) engines: Vec<Engine>,
}

impl World {
    /// So many ranks on so many devices each.
    pub(crate) fn new(ranks: u32, rails: u8, config: Config) -> Self {
        let groups = Group::local(ranks).unwrap();
        let engines = thread::scope(|scope| {
            let make = |mut group: Group| {
                scope.spawn(move || {
                    let devices: Vec<_> = (0..rails).map(open).collect();
                    Engine::new(&devices, group.rank(), ranks, config, group.control_mut()).unwrap()
                })
            };
            let threads: Vec<_> = groups.into_iter().map(make).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        Self { engines }
    }

    /// Makes a plan ready on all ranks.
    pub(crate) fn prepare(&mut self, algorithm: Algorithm, collective: Collective, root: Rank) -> PlanId {
        let order: Vec<_> = (0..self.engines.len() as u32).map(Rank).collect();
        let schedule = algorithm.schedule(collective, &order, root).unwrap();
        let plans: Vec<_> = self
            .engines
            .iter_mut()
            .map(|engine| engine.prepare(&*schedule).unwrap())
            .collect();
        plans[0]
    }

    /// Submits one operation to each rank.
    ///
    /// # Safety
    /// As of `Engine::submit`.
    pub(crate) unsafe fn submit(&mut self, mut operation: impl FnMut(Rank) -> Operation) -> Vec<Ticket> {
        self.engines
            .iter_mut()
            // SAFETY: by contract.
            .map(|engine| unsafe { engine.submit(operation(engine.rank())) }.unwrap())
            .collect()
    }

    /// Drives all ranks until each has its result.
    pub(crate) fn finish(&mut self, tickets: &[Ticket]) -> Vec<Result<(), Failed>> {
        let began = Instant::now();
        let mut results: Vec<Option<Result<(), Failed>>> = tickets.iter().map(|_| None).collect();
        while results.iter().any(Option::is_none) {
            for ((engine, ticket), result) in self.engines.iter_mut().zip(tickets).zip(&mut results) {
                engine.progress();
                if result.is_none() {
                    *result = engine.take(*ticket);
                }
            }
            if began.elapsed() > PATIENCE {
                let waits: Vec<_> = self
                    .engines
                    .iter()
                    .map(|engine| (engine.rank(), engine.waiting()))
                    .collect();
                panic!("not done: {results:?} {waits:?}");
            }
        }
        results.into_iter().flatten().collect()
    }
}
