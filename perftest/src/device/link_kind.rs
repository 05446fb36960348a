//! Whether a device of the system's library is an adapter or a software device of the kernel.

use std::fs;
use std::path::Path;

use crate::report::LinkKind;

/// The kernel's RDMA devices.
const CLASS: &str = "/sys/class/infiniband";

/// What carries the packets of a system device. The kernel's software devices identify themselves:
/// rxe names its parent interface and describes itself as `rxe`, siw as a software stack, and both
/// are virtual devices on newer kernels.
pub(crate) fn of_system_device(name: &str) -> LinkKind {
    of_entry(Path::new(CLASS), name)
}

fn of_entry(class: &Path, name: &str) -> LinkKind {
    let entry = class.join(name);
    let description = fs::read_to_string(entry.join("node_desc"))
        .unwrap_or_default()
        .to_ascii_lowercase();
    let described = description.starts_with("rxe") || description.contains("software");
    let is_virtual =
        fs::canonicalize(&entry).is_ok_and(|path| path.components().any(|part| part.as_os_str() == "virtual"));
    let named = ["rxe", "siw"].iter().any(|prefix| {
        name.strip_prefix(prefix)
            .is_some_and(|rest| rest.trim_start_matches('_').bytes().all(|byte| byte.is_ascii_digit()))
    });
    if described || is_virtual || named || entry.join("parent").exists() {
        LinkKind::KernelSoft
    } else {
        LinkKind::Hardware
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn software_is_never_taken_for_hardware() {
        let class = std::env::temp_dir().join(format!("doorbell-class-{}", std::process::id()));
        for (name, file, content) in [
            ("mlx5_0", "node_desc", "host HCA-1\n"),
            ("fast0", "node_desc", "rxe\n"),
            ("iw0", "node_desc", "Software iWARP stack\n"),
            ("soft1", "parent", "eth0\n"),
        ] {
            fs::create_dir_all(class.join(name)).unwrap();
            fs::write(class.join(name).join(file), content).unwrap();
        }
        assert_eq!(of_entry(&class, "mlx5_0"), LinkKind::Hardware);
        for name in ["fast0", "iw0", "soft1", "rxe0", "siw_1"] {
            assert_eq!(of_entry(&class, name), LinkKind::KernelSoft, "{name}");
        }
        fs::remove_dir_all(&class).unwrap();
    }
}
