//! Every RC operation between two processes, each on any device, in both directions, with every
//! byte verified. The ends run one schedule in lockstep, with barriers over TCP.

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

use crate::program::EndOptions;

/// How an end connects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Listens at this address.
    Listen(SocketAddr),
    /// Connects to this address.
    Connect(SocketAddr),
}

/// Parameters of an end.
#[derive(Clone, Debug)]
pub struct Config {
    /// Its device, address and role.
    pub end: EndOptions,
    /// The UDP port of a soft device.
    pub udp_port: Option<u16>,
    /// The path MTU in bytes; the port's when not given.
    pub mtu: Option<u32>,
    /// The exponent of the queue pair's local ACK timeout; the library's default when not given.
    pub timeout: Option<u8>,
}

/// Runs one end; fails when a call fails or a byte is wrong.
pub fn run(config: &Config) -> Result<()> {
    let context = open(config)?;
    let gid = gid_index(&context, config.end.address)?;
    let mtu = config
        .mtu
        .map(|bytes| Mtu::from_bytes(bytes).with_context(|| format!("no path MTU has {bytes} bytes")));
    let channel = Channel::open(config.end.role)?;
    let first = matches!(config.end.role, Role::Listen(_));
    let mut end = End::connect(&context, gid, mtu.transpose()?, config.timeout, channel)?;
    println!("{}: connected, MTU {}", config.end.device, end.mtu());
    let rounds = rounds::run(&mut end, first)?;
    let streamed = streams::run(&mut end)?;
    println!(
        "{}: {rounds} rounds and {streamed} bytes of streams verified",
        config.end.device
    );
    end.finish()
}

fn open(config: &Config) -> Result<Context> {
    if !config.end.device.starts_with("soft") {
        return Ok(Library::system()?.open(&config.end.device)?);
    }
    let pattern = DeviceConfig::from_env()?
        .into_iter()
        .next()
        .context("the environment configures no soft device")?;
    let device = DeviceConfig {
        name: config.end.device.clone(),
        address: Some(config.end.address),
        port: config.udp_port.unwrap_or(pattern.port),
        ..pattern
    };
    configure(vec![device])?;
    let opened = Library::new(api()).open(&config.end.device);
    // The library's error has an errno, the soft device knows the reason.
    opened.with_context(|| doorbell_softroce_ibverbs::last_open_error().unwrap_or_default())
}

/// The index of the GID of `address`.
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
