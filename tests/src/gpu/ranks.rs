//! Ranks as processes of this host: this program again, each with a GPU, on one soft device.

use std::net::{IpAddr, Ipv4Addr};
use std::process::{Child, Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use doorbell_softroce_ibverbs::{DeviceConfig, api, configure};
use doorbell_verbs::{Context, Library};

const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// All ranks. Remaining ones are killed on drop.
pub struct Ranks {
    children: Vec<(Child, Option<ExitStatus>)>,
}

impl Ranks {
    /// Starts this program once per rank, configured by `set`.
    pub fn start(ranks: u32, set: impl Fn(u32, &mut Command)) -> Result<Self> {
        let program = std::env::current_exe()?;
        let mut all = Self { children: Vec::new() };
        for rank in 0..ranks {
            let mut command = Command::new(&program);
            set(rank, &mut command);
            all.children.push((command.spawn()?, None));
        }
        Ok(all)
    }

    /// The process of a rank.
    pub fn child(&mut self, rank: u32) -> Result<&mut Child> {
        let (child, _) = self.children.get_mut(rank as usize).context("no such rank")?;
        Ok(child)
    }

    /// Exit statuses by rank, `None` for those killed at the limit.
    pub fn wait(mut self, limit: Duration) -> Result<Vec<Option<ExitStatus>>> {
        let until = Instant::now() + limit;
        loop {
            for (child, ended) in self.children.iter_mut().filter(|(_, ended)| ended.is_none()) {
                *ended = child.try_wait()?;
            }
            let ended: Vec<_> = self.children.iter().map(|(_, ended)| *ended).collect();
            if ended.iter().all(Option::is_some) || Instant::now() >= until {
                return Ok(ended);
            }
            thread::sleep(POLL_INTERVAL);
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for (child, _) in self.children.iter_mut().filter(|(_, ended)| ended.is_none()) {
            // It fails only if the process has exited.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The soft device, on a machine-local address shared by all ranks of one parent.
pub fn soft_device() -> Result<Context> {
    let mut configs = DeviceConfig::from_env()?;
    let config = configs.first_mut().context("no soft device")?;
    let parent = std::os::unix::process::parent_id();
    let address = Ipv4Addr::new(
        127,
        80 + (parent >> 16) as u8 % 16,
        (parent >> 8) as u8,
        parent as u8 | 1,
    );
    config.address = Some(IpAddr::V4(address));
    let name = config.name.clone();
    configs.truncate(1);
    configure(configs)?;
    Ok(Library::new(api()).open(&name)?)
}
