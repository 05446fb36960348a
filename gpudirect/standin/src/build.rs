//! Builds the stand-in library. Outputs are named by a hash of all their inputs, so that nothing is
//! compiled twice and none is stale. Each kernel source is a translation unit of its own.

use std::collections::hash_map::DefaultHasher;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::{env, thread};

use doorbell_cuda::KernelFile;

/// No floating-point contraction in kernels: results must be bit-identical to the collectives'.
const FLAGS: [&str; 11] = [
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    "-ffp-contract=off",
    "-Wall",
    "-Werror",
    "-Wno-unknown-pragmas",
    // At low optimisation GCC misses that a variable is set and used under one condition.
    "-Wno-maybe-uninitialized",
];

/// A missing build prerequisite, if any.
#[must_use]
pub fn missing() -> Option<&'static str> {
    match Command::new("c++").arg("--version").output() {
        Ok(_) => None,
        Err(_) => Some("no C++ compiler (g++)"),
    }
}

/// The library, built if necessary.
///
/// # Panics
/// If compilation fails, with the compiler's output.
#[must_use]
pub fn build() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(provide).clone()
}

pub(crate) fn folder() -> PathBuf {
    let target = env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository("target"), PathBuf::from);
    let folder = target.join("standin");
    fs::create_dir_all(&folder).expect("a folder of the build");
    folder.canonicalize().expect("a folder that was just made")
}

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

struct Unit {
    source: PathBuf,
    flags: Vec<String>,
    hash: u64,
}

fn provide() -> PathBuf {
    let folder = folder();
    let units = units(&folder);
    let mut hasher = DefaultHasher::new();
    units.iter().for_each(|unit| unit.hash.hash(&mut hasher));
    let library = folder.join(format!("libcuda-standin-{:016x}.so", hasher.finish()));
    // One process compiles; the others wait for the lock and find the output.
    let lock = File::create(folder.join("lock")).expect("a file in the folder of the build");
    lock.lock().expect("a lock on a file");
    if !library.exists() {
        let objects = thread::scope(|scope| {
            let object = |unit: &Unit| folder.join(format!("{:016x}.o", unit.hash));
            // Two at a time, to leave the machine some capacity.
            for pair in units.chunks(2) {
                let threads: Vec<_> = pair
                    .iter()
                    .filter(|unit| !object(unit).exists())
                    .map(|unit| {
                        let object = object(unit);
                        scope.spawn(move || compile(&object, |c| c.args(&unit.flags).arg("-c").arg(&unit.source)))
                    })
                    .collect();
                threads
                    .into_iter()
                    .for_each(|thread| thread.join().expect("the compiler"));
            }
            units.iter().map(object).collect::<Vec<_>>()
        });
        compile(&library, |c| c.arg("-shared").args(objects));
    }
    library
}

fn units(folder: &Path) -> Vec<Unit> {
    let driver = repository("gpudirect/standin/driver");
    let kernels = repository("gpudirect/cuda/kernels");
    let includes = vec![format!("-I{}", kernels.display()), format!("-I{}", driver.display())];
    let mut headers = DefaultHasher::new();
    FLAGS.hash(&mut headers);
    for path in files(&driver, "h").into_iter().chain(files(&kernels, "cuh")) {
        read(&path).hash(&mut headers);
    }
    let unit = |source: PathBuf, flags: Vec<String>, more: &str| {
        let mut hasher = headers.clone();
        (read(&source), more).hash(&mut hasher);
        Unit {
            source,
            flags,
            hash: hasher.finish(),
        }
    };

    let wrapper = driver.join("kernels.cpp");
    let mut units: Vec<_> = files(&driver, "cpp")
        .into_iter()
        .filter(|path| *path != wrapper)
        .map(|path| unit(path, includes.clone(), ""))
        .collect();
    let ours = repository("gpudirect/standin/kernels");
    for source in files(&kernels, "cu").into_iter().chain(files(&ours, "cu")) {
        let name = source
            .file_stem()
            .and_then(OsStr::to_str)
            .expect("a source's name")
            .to_owned();
        let text = read(&source);
        let entries: String = entries(&source, &text)
            .iter()
            .map(|name| format!("ENTRY({name})\n"))
            .collect();
        let mut hasher = DefaultHasher::new();
        entries.hash(&mut hasher);
        let table = folder.join(format!("{name}-{:016x}.inc", hasher.finish()));
        write(&table, &entries);
        let flags = [
            // Keeps symbols of different sources apart.
            format!("-Ddoorbell=doorbell_{name}"),
            format!("-DSOURCE=\"{}\"", source.display()),
            format!("-DENTRIES=\"{}\"", table.display()),
        ];
        units.push(unit(
            wrapper.clone(),
            [&includes[..], &flags].concat(),
            &format!("{name}\n{text}\n{entries}"),
        ));
    }
    units
}

/// The kernels of a source: those of its PTX, or without one, those declared in the source itself.
fn entries(source: &Path, text: &str) -> Vec<String> {
    let name = |rest: &str| {
        rest.trim_start()
            .split(['(', ' ', '\n'])
            .next()
            .unwrap_or_default()
            .to_owned()
    };
    let shipped = KernelFile::ALL
        .into_iter()
        .find(|file| source.file_stem() == Some(OsStr::new(file.name())));
    let (text, prefix) = match shipped {
        Some(file) => (file.ptx(), ".visible .entry "),
        None => (text, "extern \"C\" __global__ void "),
    };
    let entries = text.lines().filter_map(|line| line.strip_prefix(prefix));
    entries.map(name).collect()
}

/// The files of a folder with this extension, sorted by name.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files: Vec<_> = entries
        .map(|entry| entry.expect("a file of the repository").path())
        .filter(|path| path.extension() == Some(OsStr::new(extension)))
        .collect();
    files.sort();
    files
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn write(path: &Path, text: &str) {
    let part = path.with_extension(format!("part-{}", std::process::id()));
    fs::write(&part, text)
        .and_then(|()| fs::rename(&part, path))
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

/// Runs the compiler; `output` appears only when it is complete.
fn compile(output: &Path, arguments: impl FnOnce(&mut Command) -> &mut Command) {
    let part = output.with_extension(format!("part-{}", std::process::id()));
    let mut compiler = Command::new("c++");
    compiler.args(FLAGS);
    let result = arguments(&mut compiler)
        .arg("-o")
        .arg(&part)
        .output()
        .expect("a C++ compiler, c++ (g++)");
    assert!(
        result.status.success(),
        "c++ cannot make {}:\n{}",
        output.display(),
        String::from_utf8_lossy(&result.stderr)
    );
    fs::rename(&part, output).expect("a file that was just made");
}
