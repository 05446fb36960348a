//! Which paths are ours, and what stands in their place.

use core::ffi::CStr;

/// The folders of `/sys/class` that are shown.
const CLASSES: [&[u8]; 2] = [b"infiniband", b"infiniband_verbs"];

/// As many bytes as a path may have (PATH_MAX).
pub(crate) const LONGEST: usize = libc::PATH_MAX as usize;

/// Where in `path` the class begins, if it is in a class that is shown: after `/sys/class/`, however often its slashes are doubled.
pub(crate) fn class(path: &CStr) -> Option<&[u8]> {
    let path = path.to_bytes();
    // Most paths are told apart here.
    if !path.starts_with(b"/sys/") {
        return None;
    }
    let rest = below(below(path, b"sys")?, b"class")?;
    let rest = without_slashes(rest);
    let end = rest.iter().position(|&byte| byte == b'/').unwrap_or(rest.len());
    CLASSES.contains(&&rest[..end]).then_some(rest)
}

/// What comes after a first component of this name.
fn below<'a>(path: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    without_slashes(path)
        .strip_prefix(name)
        .filter(|rest| rest.starts_with(b"/"))
}

fn without_slashes(mut path: &[u8]) -> &[u8] {
    while let [b'/', rest @ ..] = path {
        path = rest;
    }
    path
}

/// Writes the path in the folder `root` that stands for `class`, with the zero after it; `None` where it is too long.
pub(crate) fn place<'a>(root: &[u8], class: &[u8], room: &'a mut [u8; LONGEST]) -> Option<&'a CStr> {
    let mut len = 0;
    for part in [root, b"/class/", class, b"\0"] {
        room.get_mut(len..len + part.len())?.copy_from_slice(part);
        len += part.len();
    }
    CStr::from_bytes_with_nul(&room[..len]).ok()
}

/// How many bytes at the end of a path that the kernel resolved lie in `/sys`, if it is one in the folder `root`.
pub(crate) fn inside(root: &[u8], path: &[u8]) -> Option<usize> {
    let rest = path.strip_prefix(root)?;
    rest.starts_with(b"/class/").then_some(rest.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_shown_is_ours() {
        let ours = [
            (c"/sys/class/infiniband", &b"infiniband"[..]),
            (c"/sys/class/infiniband/", b"infiniband/"),
            (c"/sys//class///infiniband//soft0", b"infiniband//soft0"),
            (
                c"/sys/class/infiniband_verbs/uverbs0/ibdev",
                b"infiniband_verbs/uverbs0/ibdev",
            ),
        ];
        for (path, expected) in ours {
            assert_eq!(class(path), Some(expected), "{path:?}");
        }
        let others = [
            c"",
            c"/",
            c"/sys",
            c"/sys/class",
            c"/sys/class/",
            c"/sys/classinfiniband",
            c"/sys/class/infiniband_mad",
            c"/sys/class/infinibandx/soft0",
            c"/sys/class/net/lo",
            c"/system/class/infiniband",
            c"sys/class/infiniband",
            c"/tmp/sys/class/infiniband",
        ];
        for path in others {
            assert_eq!(class(path), None, "{path:?}");
        }
    }

    #[test]
    fn a_path_is_found_and_found_again() {
        let mut room = [0; LONGEST];
        let placed = place(b"/tmp/view", b"infiniband/soft0", &mut room).unwrap();
        assert_eq!(placed, c"/tmp/view/class/infiniband/soft0");
        assert_eq!(
            inside(b"/tmp/view", placed.to_bytes()),
            Some(b"/class/infiniband/soft0".len())
        );
        assert_eq!(inside(b"/tmp/view", b"/tmp/view2/class/x"), None);
        assert_eq!(inside(b"/tmp/view", b"/tmp/view/classes"), None);
        assert_eq!(inside(b"/tmp/view", b"/usr"), None);
    }

    #[test]
    fn a_path_too_long_is_no_path() {
        let mut room = [0; LONGEST];
        let fits = vec![b'x'; LONGEST - b"/r/class/".len() - 1];
        assert!(place(b"/r", &fits, &mut room).is_some());
        assert!(place(b"/rr", &fits, &mut room).is_none());
    }
}
