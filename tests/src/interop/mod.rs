//! Every RC operation between two processes, each on any device, in both directions, with every byte verified.
//!
//! The ends run the same schedule in lockstep, kept in step by barriers over a TCP connection; in each round one end is active and the other passive.

mod channel;
mod end;
mod pattern;
mod rounds;
mod streams;

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, Result, bail};
use doorbell_softroce_ibverbs::{DeviceConfig, api, configure};
use doorbell_verbs::{Context, Library, Mtu};

pub use channel::Channel;
pub use end::End;

use crate::program::Place;

/// How an end takes part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Waits at this address for the other.
    Listen(SocketAddr),
    /// Goes to the other, which waits at this address.
    Connect(SocketAddr),
}

/// What an end is given.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where it runs.
    pub place: Place,
    /// The UDP port of a soft device.
    pub udp_port: Option<u16>,
    /// The path MTU in bytes; the port's when not given.
    pub mtu: Option<u32>,
    /// The exponent of the queue pair's local ACK timeout; the library's default when not given.
    pub timeout: Option<u8>,
}

/// Runs one end, from opening its device to the last verification.
///
/// # Errors
/// When anything fails or any byte is wrong.
pub fn run(config: &Config) -> Result<()> {
    let context = open(config)?;
    let gid = gid_index(&context, config.place.address)?;
    let mtu = config
        .mtu
        .map(|bytes| Mtu::from_bytes(bytes).with_context(|| format!("no path MTU has {bytes} bytes")));
    let channel = Channel::open(config.place.role)?;
    let first = matches!(config.place.role, Role::Listen(_));
    let mut end = End::connect(&context, gid, mtu.transpose()?, config.timeout, channel)?;
    println!("{}: connected, MTU {}", config.place.device, end.mtu());
    let rounds = rounds::run(&mut end, first)?;
    let streamed = streams::run(&mut end)?;
    println!(
        "{}: {rounds} rounds and {streamed} bytes of streams verified",
        config.place.device
    );
    end.finish()
}

fn open(config: &Config) -> Result<Context> {
    if !config.place.device.starts_with("soft") {
        return Ok(Library::system()?.open(&config.place.device)?);
    }
    let pattern = DeviceConfig::from_env()?
        .into_iter()
        .next()
        .context("the environment asks for no soft device")?;
    let device = DeviceConfig {
        name: config.place.device.clone(),
        address: Some(config.place.address),
        port: config.udp_port.unwrap_or(pattern.port),
        ..pattern
    };
    configure(vec![device])?;
    let opened = Library::new(api()).open(&config.place.device);
    // The library's error has an errno, the soft device knows the reason.
    opened.with_context(|| doorbell_softroce_ibverbs::last_open_error().unwrap_or_default())
}

/// The index of the GID that stands for `address`.
fn gid_index(context: &Context, address: IpAddr) -> Result<u8> {
    let gids = context.gids(1)?;
    let found = gids.iter().find(|entry| entry.gid.to_ip() == address);
    let Some(entry) = found else {
        bail!(
            "{} has no GID for {address}, only {:?}",
            context.name(),
            gids.iter().map(|e| e.gid.to_ip()).collect::<Vec<_>>()
        );
    };
    Ok(u8::try_from(entry.index)?)
}
