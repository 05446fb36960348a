//! Classification and redirection of paths.

use core::ffi::CStr;

/// The redirected folders. [`may_be_redirected`] checks their first components too.
const FOLDERS: [&[u8]; 3] = [
    b"/sys/class/infiniband",
    b"/sys/class/infiniband_verbs",
    b"/dev/infiniband",
];

/// Where PCI devices are found: by their place, their bus and their address.
const PCI_FOLDERS: [&[u8]; 3] = [b"/sys/devices", b"/sys/class/pci_bus", b"/sys/bus/pci/devices"];

/// The PCI domain of the soft devices, by which their paths are known among those of others.
const PCI_DOMAIN: &[u8] = b"d00b:";

pub(crate) const LONGEST: usize = libc::PATH_MAX as usize;

/// Whether a path that begins with these bytes may be redirected: few may.
pub(crate) const fn may_be_redirected(first: [u8; 5]) -> bool {
    matches!(&first, b"/sys/" | b"/dev/")
}

/// The redirected folder, and the rest of the path: empty, or beginning with a slash.
pub(crate) fn redirected(path: &CStr) -> Option<(&'static [u8], &[u8])> {
    let path = path.to_bytes();
    let in_one = |folders: &[&'static [u8]]| {
        let mut folders = folders.iter();
        folders.find_map(|folder| below(path, folder).map(|rest| (*folder, rest)))
    };
    in_one(&FOLDERS).or_else(|| in_one(&PCI_FOLDERS).filter(|(_, rest)| names_soft_device(rest)))
}

/// Whether one of its folders is a soft device, its bus or its root.
fn names_soft_device(path: &[u8]) -> bool {
    let mut names = path.split(|&byte| byte == b'/');
    names.any(|name| name.strip_prefix(b"pci").unwrap_or(name).starts_with(PCI_DOMAIN))
}

/// The rest of the path after the folder, with any number of repeated slashes.
fn below<'a>(mut path: &'a [u8], folder: &[u8]) -> Option<&'a [u8]> {
    for component in folder.split(|&byte| byte == b'/').skip(1) {
        let named = path
            .iter()
            .position(|&byte| byte != b'/')
            .filter(|&slashes| slashes > 0)?;
        path = path[named..].strip_prefix(component)?;
    }
    (path.is_empty() || path[0] == b'/').then_some(path)
}

/// Writes the NUL-terminated path of a folder and a rest under `root`; `None` if it is too long.
pub(crate) fn build_path<'a>(
    root: &[u8],
    folder: &[u8],
    rest: &[u8],
    buffer: &'a mut [u8; LONGEST],
) -> Option<&'a CStr> {
    let mut len = 0;
    for part in [root, folder, rest, b"\0"] {
        buffer.get_mut(len..len + part.len())?.copy_from_slice(part);
        len += part.len();
    }
    CStr::from_bytes_with_nul(&buffer[..len]).ok()
}

/// `None` if the path is in no redirected folder under `root`.
pub(crate) fn original_len(root: &[u8], path: &[u8]) -> Option<usize> {
    let rest = path.strip_prefix(root)?;
    // Of PCI folders those above a soft device are there, too.
    FOLDERS
        .iter()
        .chain(&PCI_FOLDERS)
        .any(|folder| below(rest, folder).is_some())
        .then_some(rest.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_folders_are_redirected() {
        let (class, verbs, dev) = (FOLDERS[0], FOLDERS[1], FOLDERS[2]);
        let redirected_paths = [
            (c"/sys/class/infiniband", (class, &b""[..])),
            (c"/sys/class/infiniband/", (class, b"/")),
            (c"//sys//class///infiniband//soft0", (class, b"//soft0")),
            (c"/sys/class/infiniband_verbs/uverbs0/ibdev", (verbs, b"/uverbs0/ibdev")),
            (c"/dev/infiniband/uverbs0", (dev, b"/uverbs0")),
            (c"/sys/devices/pcid00b:00", (PCI_FOLDERS[0], b"/pcid00b:00")),
            (
                c"/sys/devices/pci0000:17/0000:17:01.0/d00b:00:00.0/class",
                (PCI_FOLDERS[0], b"/pci0000:17/0000:17:01.0/d00b:00:00.0/class"),
            ),
            (
                c"/sys/class/pci_bus/d00b:00/../../d00b:00:00.0",
                (PCI_FOLDERS[1], b"/d00b:00/../../d00b:00:00.0"),
            ),
            (c"/sys/bus/pci/devices/d00b:00:00.0", (PCI_FOLDERS[2], b"/d00b:00:00.0")),
        ];
        for (path, expected) in redirected_paths {
            assert_eq!(redirected(path), Some(expected), "{path:?}");
        }
        let others = [
            c"",
            c"/",
            c"/sys",
            c"/sys/class",
            c"/sys/class/",
            c"/sys/classinfiniband",
            c"/sysclass/infiniband",
            c"/sys/class/infiniband_mad",
            c"/sys/class/infinibandx/soft0",
            c"/sys/class/net/lo",
            c"/sys/devices/pci0000:17/0000:17:01.0/class",
            c"/sys/bus/pci/devices",
            c"/sys/class/net/d00b:",
            c"/system/class/infiniband",
            c"sys/class/infiniband",
            c"/tmp/sys/class/infiniband",
            c"/dev/null",
        ];
        for path in others {
            assert_eq!(redirected(path), None, "{path:?}");
        }
    }

    #[test]
    fn every_folder_passes_the_prefix_check() {
        for folder in FOLDERS.iter().chain(&PCI_FOLDERS) {
            assert!(may_be_redirected(*folder.first_chunk().unwrap()));
        }
        assert!(!may_be_redirected(*b"/etc/") && !may_be_redirected(*b"/sysx"));
    }

    #[test]
    fn build_and_restore_are_inverse() {
        let mut buffer = [0; LONGEST];
        let built = build_path(b"/tmp/view", FOLDERS[0], b"/soft0", &mut buffer).unwrap();
        assert_eq!(built, c"/tmp/view/sys/class/infiniband/soft0");
        assert_eq!(
            original_len(b"/tmp/view", built.to_bytes()),
            Some(b"/sys/class/infiniband/soft0".len())
        );
        assert_eq!(original_len(b"/tmp/view", b"/tmp/view2/sys/class/infiniband"), None);
        assert_eq!(original_len(b"/tmp/view", b"/tmp/view/sys/classes"), None);
        assert_eq!(original_len(b"/tmp/view", b"/usr"), None);
        let above = b"/sys/devices/pci0000:17/0000:17:01.0";
        assert_eq!(
            original_len(b"/tmp/view", &[b"/tmp/view", &above[..]].concat()),
            Some(above.len())
        );
    }

    #[test]
    fn a_path_too_long_is_refused() {
        let mut buffer = [0; LONGEST];
        let fits = vec![b'x'; LONGEST - b"/r/dev/infiniband".len() - 1];
        assert!(build_path(b"/r", FOLDERS[2], &fits, &mut buffer).is_some());
        assert!(build_path(b"/rr", FOLDERS[2], &fits, &mut buffer).is_none());
    }
}
