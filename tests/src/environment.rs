//! The privileges of programs under test, the addresses of the guest's device, the extent of tests.

use anyhow::{Context, Result, bail};
use std::{
    env, fs,
    net::{Ipv4Addr, Ipv6Addr},
    path::Path,
};

/// Whether tests run all of their cases, `DOORBELL_SWEEP=all`, and not a selection.
pub fn is_whole() -> bool {
    env::var_os("DOORBELL_SWEEP").is_some_and(|value| value == "all")
}

/// A command prefix that drops every privilege; empty when there is none to drop.
pub fn unprivileged() -> Vec<String> {
    // SAFETY: geteuid(2) cannot fail and touches no memory.
    if unsafe { libc::geteuid() } != 0 {
        return Vec::new();
    }
    [
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        "--no-new-privs",
        "--inh-caps=-all",
    ]
    .map(str::to_owned)
    .into()
}

/// The index of an address in rxe0's GID table; fails when there is none.
pub fn kernel_gid(address: &str) -> Result<u32> {
    let address: Ipv6Addr = match address.parse::<Ipv4Addr>() {
        Ok(address) => address.to_ipv6_mapped(),
        Err(_) => address.parse()?,
    };
    let wanted = address.segments().map(|segment| format!("{segment:04x}")).join(":");
    let table = Path::new("/sys/class/infiniband/rxe0/ports/1/gids");
    for entry in fs::read_dir(table).with_context(|| format!("cannot list {}", table.display()))? {
        let entry = entry?;
        if fs::read_to_string(entry.path()).is_ok_and(|text| text.trim() == wanted) {
            return Ok(entry.file_name().to_string_lossy().parse()?);
        }
    }
    bail!("rxe0 has no GID {wanted}")
}
