//! Ranks in one process: engines created by threads of their own and driven by one thread.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Once;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use doorbell_collectives::bootstrap::{Exchange, ExchangeError};
use doorbell_collectives::executor::{Config, Engine, Failed, Operation, PlanId, Ticket};
use doorbell_collectives::plan::Collective;
use doorbell_collectives::{Algorithm, Rank};
use doorbell_softroce_ibverbs::{DeviceConfig, LinkChoice, api, configure};
use doorbell_verbs::{Context, Library};

/// Longer than any test step takes, on a busy machine too.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(120);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Device {
    /// The device's default link, on two addresses.
    Soft(u8),
    Udp,
    /// UDP, with one packet in fifty lost and some out of order.
    Lossy,
}

impl Device {
    fn name(self) -> String {
        match self {
            Self::Soft(n) => format!("soft{n}"),
            Self::Udp => "udp".to_owned(),
            Self::Lossy => "lossy".to_owned(),
        }
    }
}

/// Names a device of the system to run on instead.
const DEVICE: &str = "DOORBELL_COLLECTIVES_DEVICE";

pub(crate) fn open(device: Device) -> Context {
    if let Ok(name) = std::env::var(DEVICE) {
        return Library::system().unwrap().open(&name).unwrap();
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let [_, _, high, low] = std::process::id().to_be_bytes();
        let devices = [Device::Soft(0), Device::Soft(1), Device::Udp, Device::Lossy];
        let configs = devices.iter().zip(1..).map(|(device, last)| {
            let mut config = DeviceConfig::new(device.name());
            config.address = Some(IpAddr::V4(Ipv4Addr::new(127, 160 + high % 64, low, last)));
            if matches!(device, Device::Udp | Device::Lossy) {
                config.link = LinkChoice::Udp;
            }
            if *device == Device::Lossy {
                (config.faults.drop, config.faults.reorder, config.faults.seed) = (0.02, 0.02, 7);
            }
            config
        });
        configure(configs.collect()).unwrap();
    });
    Library::new(api()).open(&device.name()).unwrap()
}

pub(crate) struct Threads {
    rank: u32,
    to: Vec<Sender<(u32, Vec<u8>)>>,
    from: Receiver<(u32, Vec<u8>)>,
    /// Messages that arrived early: by rank, in order.
    early: Vec<VecDeque<Vec<u8>>>,
}

impl Threads {
    pub(crate) fn new(ranks: u32) -> Vec<Self> {
        let (to, from): (Vec<_>, Vec<_>) = (0..ranks).map(|_| channel()).unzip();
        let exchange = |(rank, from)| Self {
            rank,
            to: to.clone(),
            from,
            early: vec![VecDeque::new(); ranks as usize],
        };
        (0..).zip(from).map(exchange).collect()
    }
}

impl Exchange for Threads {
    fn all_to_all(&mut self, outgoing: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>, ExchangeError> {
        for (to, message) in self.to.iter().zip(outgoing) {
            to.send((self.rank, message)).unwrap();
        }
        while self.early.iter().any(VecDeque::is_empty) {
            let (from, message) = self.from.recv_timeout(TIMEOUT).unwrap();
            self.early[from as usize].push_back(message);
        }
        Ok(self.early.iter_mut().filter_map(VecDeque::pop_front).collect())
    }

    fn ranks(&self) -> u32 {
        self.to.len() as u32
    }
}

pub(crate) struct World {
    pub(crate) engines: Vec<Engine>,
}

impl World {
    pub(crate) fn new(ranks: u32, devices: &[Device], config: Config) -> Self {
        let engines = thread::scope(|scope| {
            let make = |mut exchange: Threads| {
                scope.spawn(move || {
                    let devices: Vec<_> = devices.iter().copied().map(open).collect();
                    let rank = Rank(exchange.rank);
                    Engine::new(&devices, rank, ranks, config, &mut exchange).unwrap()
                })
            };
            let threads: Vec<_> = Threads::new(ranks).into_iter().map(make).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        Self { engines }
    }

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
            if began.elapsed() > TIMEOUT {
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
