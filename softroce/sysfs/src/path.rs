//! Which paths are ours, and what stands in their place.

use core::ffi::CStr;

/// The folders that are shown. The first component of each is looked at in [`may_be_shown`] too.
const FOLDERS: [&[u8]; 3] = [
    b"/sys/class/infiniband",
    b"/sys/class/infiniband_verbs",
    b"/dev/infiniband",
];

/// As many bytes as a path may have (PATH_MAX).
pub(crate) const LONGEST: usize = libc::PATH_MAX as usize;

/// Whether a path that begins with these bytes is worth a closer look: few are.
pub(crate) const fn may_be_shown(first: [u8; 5]) -> bool {
    matches!(&first, b"/sys/" | b"/dev/")
}

/// The folder that `path` is in, if it is shown, and the rest of the path, which is empty or begins with a slash.
pub(crate) fn shown(path: &CStr) -> Option<(&'static [u8], &[u8])> {
    let path = path.to_bytes();
    FOLDERS
        .iter()
        .find_map(|folder| below(path, folder).map(|rest| (*folder, rest)))
}

/// What comes after the folder in the path, however often its slashes are doubled.
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

/// Writes the path that a folder and a rest have under `root`, with the zero after it; `None` where it is too long.
pub(crate) fn place<'a>(root: &[u8], folder: &[u8], rest: &[u8], room: &'a mut [u8; LONGEST]) -> Option<&'a CStr> {
    let mut len = 0;
    for part in [root, folder, rest, b"\0"] {
        room.get_mut(len..len + part.len())?.copy_from_slice(part);
        len += part.len();
    }
    CStr::from_bytes_with_nul(&room[..len]).ok()
}

/// How many bytes at the end of a path that the kernel resolved are its name outside, if it is one of what is shown under `root`.
pub(crate) fn outside(root: &[u8], path: &[u8]) -> Option<usize> {
    let rest = path.strip_prefix(root)?;
    FOLDERS
        .iter()
        .any(|folder| below(rest, folder).is_some())
        .then_some(rest.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_shown_is_ours() {
        let (class, verbs, dev) = (FOLDERS[0], FOLDERS[1], FOLDERS[2]);
        let ours = [
            (c"/sys/class/infiniband", (class, &b""[..])),
            (c"/sys/class/infiniband/", (class, b"/")),
            (c"//sys//class///infiniband//soft0", (class, b"//soft0")),
            (c"/sys/class/infiniband_verbs/uverbs0/ibdev", (verbs, b"/uverbs0/ibdev")),
            (c"/dev/infiniband/uverbs0", (dev, b"/uverbs0")),
        ];
        for (path, expected) in ours {
            assert_eq!(shown(path), Some(expected), "{path:?}");
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
            c"/system/class/infiniband",
            c"sys/class/infiniband",
            c"/tmp/sys/class/infiniband",
            c"/dev/null",
        ];
        for path in others {
            assert_eq!(shown(path), None, "{path:?}");
        }
    }

    #[test]
    fn every_folder_gets_its_closer_look() {
        for folder in FOLDERS {
            assert!(may_be_shown(*folder.first_chunk().unwrap()));
        }
        assert!(!may_be_shown(*b"/etc/") && !may_be_shown(*b"/sysx"));
    }

    #[test]
    fn a_path_is_found_and_found_again() {
        let mut room = [0; LONGEST];
        let placed = place(b"/tmp/view", FOLDERS[0], b"/soft0", &mut room).unwrap();
        assert_eq!(placed, c"/tmp/view/sys/class/infiniband/soft0");
        assert_eq!(
            outside(b"/tmp/view", placed.to_bytes()),
            Some(b"/sys/class/infiniband/soft0".len())
        );
        assert_eq!(outside(b"/tmp/view", b"/tmp/view2/sys/class/infiniband"), None);
        assert_eq!(outside(b"/tmp/view", b"/tmp/view/sys/classes"), None);
        assert_eq!(outside(b"/tmp/view", b"/usr"), None);
    }

    #[test]
    fn a_path_too_long_is_no_path() {
        let mut room = [0; LONGEST];
        let fits = vec![b'x'; LONGEST - b"/r/dev/infiniband".len() - 1];
        assert!(place(b"/r", FOLDERS[2], &fits, &mut room).is_some());
        assert!(place(b"/rr", FOLDERS[2], &fits, &mut room).is_none());
    }
}
