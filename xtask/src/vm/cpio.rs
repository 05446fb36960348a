//! Writes the guest's initramfs: a cpio archive in the "newc" format
//! (`Documentation/driver-api/early-userspace/buffer-format.rst` of the kernel). Our own, because
//! an unprivileged user cannot make its device node on disk, and a new machine has no `cpio`.

pub(crate) struct Archive {
    bytes: Vec<u8>,
    inode: u32,
}

const DIRECTORY: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const CHARACTER_DEVICE: u32 = 0o020_000;

impl Archive {
    pub(crate) fn new() -> Self {
        Self {
            bytes: Vec::new(),
            inode: 0,
        }
    }

    /// Adds a directory. Parents come before their children.
    pub(crate) fn directory(&mut self, path: &str) {
        self.entry(path, DIRECTORY | 0o755, (0, 0), &[]);
    }

    pub(crate) fn file(&mut self, path: &str, permissions: u32, content: &[u8]) {
        self.entry(path, FILE | permissions, (0, 0), content);
    }

    /// Adds a character device node, given as major and minor number.
    pub(crate) fn character_device(&mut self, path: &str, number: (u32, u32)) {
        self.entry(path, CHARACTER_DEVICE | 0o600, number, &[]);
    }

    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.inode += 1;
        let size = u32::try_from(content.len()).expect("an initramfs member is far below 4 GiB");
        let name_size = u32::try_from(path.len() + 1).expect("a path is short");
        let fields = [
            self.inode, mode, 0, 0, 1, 0, size, 0, 0, device.0, device.1, name_size, 0,
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    /// Headers and contents both start at a multiple of four bytes.
    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_has_the_layout_that_the_kernel_reads() {
        let mut archive = Archive::new();
        archive.file("init", 0o755, b"hello");
        let bytes = archive.finish();
        let header = str::from_utf8(&bytes[..110]).unwrap();
        assert_eq!(&header[..6], "070701");
        assert_eq!(&header[6 + 8..6 + 16], "000081ed", "mode");
        assert_eq!(&header[6 + 48..6 + 56], "00000005", "size");
        assert_eq!(&header[6 + 88..6 + 96], "00000005", "size of the name with its NUL");
        assert_eq!(&bytes[110..115], b"init\0");
        assert_eq!(&bytes[116..121], b"hello", "the content starts on a multiple of four");
        assert_eq!(&bytes[124..130], b"070701", "and so does the next header");
        assert_eq!(bytes.len() % 4, 0);
    }

    #[test]
    fn a_device_node_carries_its_number() {
        let mut archive = Archive::new();
        archive.character_device("dev/console", (5, 1));
        let bytes = archive.finish();
        let header = str::from_utf8(&bytes[..110]).unwrap();
        assert_eq!(&header[6 + 8..6 + 16], "00002180");
        assert_eq!(&header[6 + 72..6 + 88], "0000000500000001");
    }
}
