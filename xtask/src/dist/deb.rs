//! A Debian package: deb(5).

use super::{
    archive::{TIME, tar_gz},
    build::Built,
    content::File,
};
use anyhow::{Result, bail};

const DESCRIPTION: &str = "\
RDMA tests, and a userspace RoCEv2 device for any program
 The command doorbell measures bandwidth and latency of RDMA, on adapters, on
 the kernel's software devices and on a userspace RoCEv2 device. It runs any
 program that is linked with libibverbs or librdmacm on the userspace device,
 without an adapter, a kernel module or root.";

/// `files` are those of an installation, below /usr.
pub(super) fn make(version: &str, built: &Built, files: &[File]) -> Result<(String, Vec<u8>)> {
    let architecture = architecture(&built.target)?;
    let kibibytes: usize = files.iter().map(|file| file.bytes.len().div_ceil(1024)).sum();
    let control = format!(
        "Package: doorbell\nVersion: {version}\nArchitecture: {architecture}\nSection: net\nPriority: optional\n\
         Maintainer: The Doorbell developers <doorbell@localhost>\nInstalled-Size: {kibibytes}\n\
         Depends: libc6 (>= {})\nSuggests: ibverbs-utils, perftest, rdmacm-utils\nDescription: {DESCRIPTION}\n",
        built.glibc
    );
    let mut package = ar::Builder::new(Vec::new());
    for (name, bytes) in [
        ("debian-binary", b"2.0\n".to_vec()),
        ("control.tar.gz", tar_gz("./", &[File::new("control", control)])?),
        ("data.tar.gz", tar_gz("./usr/", files)?),
    ] {
        let mut header = ar::Header::new(name.into(), bytes.len() as u64);
        header.set_mode(0o100_644);
        header.set_mtime(TIME);
        package.append(&header, &bytes[..])?;
    }
    Ok((format!("doorbell_{version}_{architecture}.deb"), package.into_inner()?))
}

fn architecture(target: &str) -> Result<&'static str> {
    match target.split('-').next() {
        Some("x86_64") => Ok("amd64"),
        Some("aarch64") => Ok("arm64"),
        _ => bail!("Debian's name for {target} is unknown"),
    }
}
