//! Advice for a failure: the ends of the errors' texts.

use std::io;

use crate::port::PortState;
use crate::types::Gid;

pub(super) fn list_devices(there: &[String]) -> String {
    if there.is_empty() {
        return "this library has none: check `rdma link` and that the driver is loaded, or use the soft device"
            .to_owned();
    }
    format!("open one of those there are: {}", there.join(", "))
}

pub(super) fn list_gids(there: &[(u32, Gid)]) -> String {
    if there.is_empty() {
        return "the table is empty: give the port's network interface an IP address".to_owned();
    }
    const SHOWN: usize = 8;
    let list: Vec<String> = there
        .iter()
        .take(SHOWN)
        .map(|(index, gid)| format!("{index} = {gid}"))
        .collect();
    let more = if there.len() > SHOWN { ", …" } else { "" };
    format!(
        "use one of those there are ({}{more}), or leave the index out",
        list.join(", ")
    )
}

pub(super) fn open_advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "the user needs read and write access to its node, /dev/infiniband/uverbs*: join the group that owns it (`ls -l` says which), or have udev give it \
             mode 0666"
        }
        io::ErrorKind::NotFound => {
            "its node under /dev/infiniband is missing: load ib_uverbs, or pass it into the container (`--device`)"
        }
        _ if is_descriptor_limit(error) => RAISE_DESCRIPTORS,
        _ => "is its driver loaded?",
    }
}

const RAISE_DESCRIPTORS: &str = "raise the limit on descriptors (`ulimit -n`)";

fn is_descriptor_limit(error: &io::Error) -> bool {
    error.raw_os_error() == Some(nix::libc::EMFILE)
}

/// Of a failed ibv_modify_qp(3) whose attributes are not the reason: that is EINVAL.
pub(crate) fn modify_advice(error: &io::Error) -> Option<&'static str> {
    match error.kind() {
        io::ErrorKind::InvalidInput => None,
        _ if is_descriptor_limit(error) => Some(RAISE_DESCRIPTORS),
        _ => Some("the attributes are not the reason"),
    }
}

pub(super) fn device_memory_advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::Unsupported => "; the device has no memory to give: use the host's",
        io::ErrorKind::OutOfMemory => "; see DeviceAttr::device_memory_bytes, which others share",
        _ => "",
    }
}

pub(super) fn resize_advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::Unsupported => ": the device cannot resize queues: make it large enough from the start",
        _ => "",
    }
}

pub(super) fn moderate_advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::Unsupported => ": the device has no moderation: do without, it only saves interrupts",
        io::ErrorKind::InvalidInput => ": lower the count or the time",
        _ => "",
    }
}

pub(super) fn port_advice(state: &PortState) -> &'static str {
    match state {
        PortState::Init | PortState::Armed => "the subnet manager has yet to configure it: is one running (opensm)?",
        _ => "bring its link up (`rdma link`, `ip link set … up`), and check the cable",
    }
}

pub(super) fn create_advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::OutOfMemory => {
            "the device has no room for another queue pair of this size, or RLIMIT_MEMLOCK is reached"
        }
        io::ErrorKind::InvalidInput => {
            "a depth, the number of scatter-gather elements or the inline size is beyond what the device has: lower them"
        }
        io::ErrorKind::Unsupported => "the device does not support this transport",
        _ => "see the kernel's log",
    }
}

/// `RLIMIT_MEMLOCK` is the most frequent cause, unless there is no limit.
fn locked_memory_advice(limit: Option<&str>) -> String {
    match limit {
        Some(UNLIMITED) => {
            "RLIMIT_MEMLOCK does not limit it, so the machine or the device has no room: register less, or in fewer regions".to_owned()
        }
        Some(limit) => format!(
            "the process may lock {limit} bytes (RLIMIT_MEMLOCK): raise that with `ulimit -l unlimited`, `LimitMEMLOCK=infinity` or \
             `docker run --ulimit memlock=-1`, or register less"
        ),
        None => "raise RLIMIT_MEMLOCK (`ulimit -l unlimited`), or register less".to_owned(),
    }
}

/// The soft limit on locked memory, in bytes or [`UNLIMITED`], from proc(5).
fn locked_memory_limit() -> Option<String> {
    let limits = std::fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    line.split_whitespace().next().map(str::to_owned)
}

pub(crate) fn register_advice(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::OutOfMemory => locked_memory_advice(locked_memory_limit().as_deref()),
        io::ErrorKind::InvalidInput => "the device does not allow these access rights together".to_owned(),
        io::ErrorKind::Unsupported => "the device cannot register memory of this kind".to_owned(),
        _ => "see the kernel's log".to_owned(),
    }
}

pub(super) fn create_cq_advice(verb: &str, error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::Unsupported if verb == "ibv_create_cq_ex" => {
            "; the device has no extended queues, or no time stamps: request fewer options, or use Context::completion_queue"
        }
        io::ErrorKind::InvalidInput if verb == "ibv_create_cq_ex" => {
            "; the device does not support a requested option: request fewer, or use Context::completion_queue"
        }
        io::ErrorKind::OutOfMemory => {
            "; the device or RLIMIT_MEMLOCK has no room for it: make it smaller, or drop others"
        }
        _ => "",
    }
}

pub(super) fn window_advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::Unsupported => {
            "the device has none of that type (see DeviceAttr::windows): register memory with remote rights"
        }
        io::ErrorKind::OutOfMemory => "it has no more: drop some, or register memory with remote rights",
        _ => "does the device have such windows (see DeviceAttr::windows)?",
    }
}

/// How proc(5) shows that there is no limit.
const UNLIMITED: &str = "unlimited";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_registration_names_the_limit_and_how_to_raise_it_if_there_is_one() {
        let advice = locked_memory_advice(Some("65536"));
        assert!(advice.contains("65536 bytes (RLIMIT_MEMLOCK)"), "{advice}");
        assert!(advice.contains("ulimit -l"), "{advice}");
        let advice = locked_memory_advice(Some(UNLIMITED));
        assert!(!advice.contains("ulimit"), "{advice}");
        assert!(locked_memory_limit().is_some(), "proc(5) says it");
    }
}
