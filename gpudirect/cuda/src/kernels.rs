//! The PTX of `kernels/*.cu`, written by `cargo xtask kernels` to `kernels/ptx.bin`, and machine
//! code assembled from it, to `kernels/code.bin`, with `kernels/manifest.txt` (hashes, compiler,
//! architectures). An archive is a sequence of members, each a header line
//! `NAME COMPRESSED_BYTES\n` followed by a zlib stream.

use std::sync::OnceLock;

use crate::device::ComputeCapability;

const ARCHIVE: &[u8] = include_bytes!("../kernels/ptx.bin");
/// Members are `NAME.ARCHITECTURE`.
const CODE_ARCHIVE: &[u8] = include_bytes!("../kernels/code.bin");
/// What there is machine code for, which devices of the same major and no lower minor version run.
const ARCHITECTURES: [(ComputeCapability, &str); 2] = [
    (ComputeCapability { major: 9, minor: 0 }, "sm_90"),
    (ComputeCapability { major: 10, minor: 0 }, "sm_100"),
];

/// A source in `kernels/` and the PTX that it was compiled to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelFile {
    /// `reduce.cu`: reductions of up to eight sources.
    Reduce,
    /// `collective.cu`: collectives of a whole rank.
    Collective,
    /// `small.cu`: collectives of short messages.
    Small,
    /// `exchange.cu`: messages between pairs of ranks.
    Exchange,
    /// `moe.cu`: dispatch and combine of expert parallelism.
    Moe,
    /// `put.cu`: puts that kernels start, for tests.
    Put,
    /// `copy.cu`: short copies by a resident block.
    Copy,
}

impl KernelFile {
    /// Every file.
    pub const ALL: [Self; 7] = [
        Self::Reduce,
        Self::Collective,
        Self::Small,
        Self::Exchange,
        Self::Moe,
        Self::Put,
        Self::Copy,
    ];

    /// The file's name without extension.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reduce => "reduce",
            Self::Collective => "collective",
            Self::Small => "small",
            Self::Exchange => "exchange",
            Self::Moe => "moe",
            Self::Put => "put",
            Self::Copy => "copy",
        }
    }

    /// The PTX, decompressed on first use: a few milliseconds for the largest file.
    ///
    /// # Panics
    /// When the archive in this crate is damaged.
    #[must_use]
    pub fn ptx(self) -> &'static str {
        static TEXTS: [OnceLock<String>; KernelFile::ALL.len()] = [const { OnceLock::new() }; KernelFile::ALL.len()];
        TEXTS[self as usize].get_or_init(|| {
            let bytes = member(ARCHIVE, self.name())
                .and_then(|stream| miniz_oxide::inflate::decompress_to_vec_zlib(stream).ok())
                .expect("ptx.bin has every kernel file");
            String::from_utf8(bytes).expect("PTX is ASCII")
        })
    }

    /// The machine code for such a device, if there is any, decompressed: an ELF of all kernels.
    ///
    /// # Panics
    /// When the archive in this crate is damaged.
    pub(crate) fn code(self, of: ComputeCapability) -> Option<Vec<u8>> {
        let runs = |code: &ComputeCapability| code.major == of.major && code.minor <= of.minor;
        let (_, architecture) = ARCHITECTURES.iter().find(|(code, _)| runs(code))?;
        let bytes = member(CODE_ARCHIVE, &format!("{}.{architecture}", self.name()))
            .and_then(|stream| miniz_oxide::inflate::decompress_to_vec_zlib(stream).ok());
        Some(bytes.expect("code.bin has every kernel file"))
    }
}

fn member<'a>(mut archive: &'a [u8], name: &str) -> Option<&'a [u8]> {
    loop {
        let end = archive.iter().position(|byte| *byte == b'\n')?;
        let (found, len) = str::from_utf8(&archive[..end]).ok()?.split_once(' ')?;
        let (stream, rest) = archive[end + 1..].split_at_checked(len.parse().ok()?)?;
        if found == name {
            return Some(stream);
        }
        archive = rest;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archive_has_every_file_and_nothing_else() {
        for file in KernelFile::ALL {
            assert!(file.ptx().contains(".visible .entry "), "{}", file.name());
        }
        assert!(member(ARCHIVE, "none").is_none());
    }

    #[test]
    fn devices_run_code_of_their_major_version() {
        let code = |major, minor| KernelFile::Exchange.code(ComputeCapability { major, minor });
        assert_eq!((code(8, 9), code(12, 0)), (None, None));
        assert_eq!(code(10, 3), code(10, 0));
        assert!(code(9, 0).is_some() && code(9, 0) != code(10, 0));
        for file in KernelFile::ALL {
            for (architecture, _) in ARCHITECTURES {
                let code = file.code(architecture).expect("an architecture of the archive");
                assert!(code.starts_with(b"\x7fELF"), "{} for {architecture}", file.name());
            }
        }
    }

    #[test]
    fn truncated_archive_is_refused() {
        assert_eq!(member(b"a 2\nxyb 1\nz", "b"), Some(&b"z"[..]));
        for cut in [&b"a 2\nx"[..], b"a two\nxy", b"a", b""] {
            assert!(member(cut, "a").is_none());
        }
    }
}
