//! The guest's image: Debian's kernel and the packages it needs, unpacked under `target/vm`.
//!
//! Nothing is installed on the host: the guest sees the packages layered over the host's root.
//!
//! ```text
//! target/vm/lock                     held while the rest is being made
//! target/vm/system-N/sysroot/        packages, and /usr/lib/modules for `modprobe`
//! target/vm/system-N/vmlinuz
//! target/vm/system-N/kernel          the kernel package's name and version, as text
//! target/vm/initrd-HASH.cpio         made from the above and from init.sh
//! ```
//!
//! A folder gets its final name only when complete.

use super::{cpio::Archive, modules::Modules};
use crate::apt;
use anyhow::{Context, Result, bail};
use std::{
    fs::{self, File},
    hash::{DefaultHasher, Hash, Hasher},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// Version of the staged layout: a new number makes every checkout stage again.
const LAYOUT: u32 = 2;

/// Packages that the guest offers, unless the host has them already.
const PACKAGES: &[&str] = &[
    "busybox-static",
    "ibverbs-utils",
    "iproute2",
    "perftest",
    "rdma-core",
    "rdmacm-utils",
];

/// One file of each package, to check whether the host or the staged folder still has it.
const EXPECTED: &[&str] = &[
    "bin/busybox",
    "bin/ibv_devinfo",
    "bin/ibv_rc_pingpong",
    "bin/ip",
    "bin/rdma",
    "bin/ib_write_bw",
    "bin/rping",
];

/// In this order: the host's file system and the ports, then RDMA. `rdma_rxe` requests "crc32" from
/// the kernel's crypto interface and fails when no implementation is loaded.
const MODULES: &[&str] = &[
    "virtio_pci",
    "virtio_console",
    "9pnet_virtio",
    "9p",
    "overlay",
    "crc32_generic",
    "ib_uverbs",
    "rdma_ucm",
    "rdma_rxe",
    "veth",
];

/// The whole package takes 390 MB, mostly drivers.
const KERNEL_PARTS: &[&str] = &[
    "./boot/vmlinuz-*",
    "./lib/modules/*/modules.*",
    "./lib/modules/*/kernel/arch",
    "./lib/modules/*/kernel/crypto",
    "./lib/modules/*/kernel/lib",
    "./lib/modules/*/kernel/net",
    "./lib/modules/*/kernel/fs/9p",
    "./lib/modules/*/kernel/fs/configfs",
    "./lib/modules/*/kernel/fs/fscache",
    "./lib/modules/*/kernel/fs/netfs",
    "./lib/modules/*/kernel/fs/overlayfs",
    "./lib/modules/*/kernel/drivers/char/virtio_console.ko",
    "./lib/modules/*/kernel/drivers/infiniband",
    "./lib/modules/*/kernel/drivers/net/dummy.ko",
    "./lib/modules/*/kernel/drivers/net/ifb.ko",
    "./lib/modules/*/kernel/drivers/net/macvlan.ko",
    "./lib/modules/*/kernel/drivers/net/veth.ko",
    "./lib/modules/*/kernel/drivers/virtio",
];

pub(crate) struct Image {
    pub(crate) kernel: PathBuf,
    pub(crate) initrd: PathBuf,
    /// Layered over the host's root.
    pub(crate) sysroot: PathBuf,
    pub(crate) kernel_version: String,
}

impl Image {
    /// The image below `folder`, made if missing. Reports slow steps on stderr.
    pub(crate) fn prepare(folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let lock = File::create(folder.join("lock")).context("cannot make the lock file")?;
        lock.lock().context("cannot lock the image")?;
        let system = folder.join(format!("system-{LAYOUT}"));
        let sysroot = system.join("sysroot");
        if !is_complete(&sysroot) {
            let _ = fs::remove_dir_all(&system);
            stage(folder, &system)?;
        }
        let kernel_version = fs::read_to_string(system.join("kernel"))?.trim().to_owned();
        Ok(Self {
            kernel: system.join("vmlinuz"),
            initrd: initrd(folder, &sysroot)?,
            sysroot,
            kernel_version,
        })
    }
}

/// Whether everything that a guest offers is in the staged folder or on the host below it.
fn is_complete(sysroot: &Path) -> bool {
    sysroot.is_dir()
        && EXPECTED
            .iter()
            .all(|file| has_program(sysroot, file) || has_program(Path::new("/"), file))
}

/// Whether `root` has a program in `bin` or `sbin`, with or without `/usr`.
fn has_program(root: &Path, file: &str) -> bool {
    ["", "usr/", "s", "usr/s"]
        .iter()
        .any(|prefix| root.join(format!("{prefix}{file}")).exists())
}

fn stage(folder: &Path, system: &Path) -> Result<()> {
    let work = folder.join("staging");
    let _ = fs::remove_dir_all(&work);
    let sysroot = work.join("sysroot");
    let debs = work.join("debs");
    fs::create_dir_all(&debs)?;
    // Debian's layout: otherwise a package's /lib would hide the host's, a link to /usr/lib.
    for name in ["bin", "lib", "lib64", "sbin"] {
        fs::create_dir_all(sysroot.join("usr").join(name))?;
        symlink(format!("usr/{name}"), sysroot.join(name))?;
    }

    eprintln!(
        "vm: fetching the guest's kernel and packages (once; into {})",
        folder.display()
    );
    let kernel = apt::kernel_package()?;
    let mut wanted = vec![kernel.clone()];
    // Always our own static busybox: the initramfs is made from it.
    wanted.push("busybox-static".to_owned());
    wanted.extend(apt::lacking(PACKAGES)?);
    wanted.dedup();
    apt::download(&wanted, &debs)?;
    for entry in fs::read_dir(&debs)? {
        let deb = entry?.path();
        let is_kernel = deb
            .file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with("linux-image"));
        unpack(&deb, &sysroot, if is_kernel { KERNEL_PARTS } else { &[] })?;
    }

    let modules = modules_folder(&sysroot)?;
    let release = modules.file_name().unwrap_or_default().to_string_lossy().into_owned();
    fs::write(modules.join("modules.dep"), Modules::read(&modules)?.dependency_file())?;
    fs::rename(sysroot.join(format!("boot/vmlinuz-{release}")), work.join("vmlinuz"))
        .context("no kernel in its package")?;
    fs::remove_dir_all(sysroot.join("boot"))?;
    fs::write(
        work.join("kernel"),
        format!("{} {}\n", kernel, apt::candidate(&kernel)?),
    )?;
    fs::remove_dir_all(&debs)?;
    if !is_complete(&sysroot) {
        bail!("the packages {PACKAGES:?} lack one of {EXPECTED:?}");
    }
    fs::rename(&work, system).context("cannot put the image in its place")
}

/// Unpacks a package, or the `parts` of it, below `root`, following `root`'s links.
fn unpack(deb: &Path, root: &Path, parts: &[&str]) -> Result<()> {
    let mut from = Command::new("dpkg-deb")
        .arg("--fsys-tarfile")
        .arg(deb)
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run dpkg-deb")?;
    let archive = from.stdout.take().context("dpkg-deb has no output")?;
    let tar = Command::new("tar")
        .args([
            "--extract",
            "--keep-directory-symlink",
            "--no-same-owner",
            "--wildcards",
            "--directory",
        ])
        .arg(root)
        .args(parts)
        .stdin(archive)
        .status()
        .context("cannot run tar")?;
    let from = from.wait()?;
    if !tar.success() || !from.success() {
        bail!("cannot unpack {}", deb.display());
    }
    Ok(())
}

/// The one folder in `usr/lib/modules`.
fn modules_folder(sysroot: &Path) -> Result<PathBuf> {
    let all = sysroot.join("usr/lib/modules");
    let first = fs::read_dir(&all)
        .ok()
        .and_then(|mut entries| entries.next())
        .context("no modules in the kernel package")?;
    Ok(first?.path())
}

/// The initramfs: busybox, init and the modules to load. Rebuilt when init changes.
fn initrd(folder: &Path, sysroot: &Path) -> Result<PathBuf> {
    const INIT: &str = include_str!("init.sh");
    let mut hasher = DefaultHasher::new();
    (LAYOUT, INIT, MODULES).hash(&mut hasher);
    let path = folder.join(format!("initrd-{LAYOUT}-{:016x}.cpio", hasher.finish()));
    if path.exists() {
        return Ok(path);
    }

    let mut archive = Archive::new();
    for name in ["bin", "dev", "host", "modules", "proc", "root", "rw", "sys", "sysroot"] {
        archive.directory(name);
    }
    archive.character_device("dev/console", (5, 1));
    archive.file(
        "bin/busybox",
        0o755,
        &fs::read(sysroot.join("bin/busybox")).context("no busybox staged")?,
    );
    archive.file("init", 0o755, INIT.as_bytes());
    let mut order = String::new();
    for (name, file) in Modules::read(&modules_folder(sysroot)?)?.load_order(MODULES)? {
        archive.file(&format!("modules/{name}.ko"), 0o644, &fs::read(file)?);
        order.push_str(&name);
        order.push('\n');
    }
    archive.file("modules/order", 0o644, order.as_bytes());
    let partial = path.with_extension("partial");
    fs::write(&partial, archive.finish())?;
    fs::rename(&partial, &path)?;
    Ok(path)
}
