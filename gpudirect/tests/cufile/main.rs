//! GPU memory by cuFile, of a library in its place (`fake.c`) on the CUDA stand-in: what it reads
//! and writes, and what becomes of what it refuses. The library is loaded once in a process, so
//! each case is a process.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::{env, fs};

use doorbell_cuda::{Driver, HostMemory, Memory, Stream};
use doorbell_cuda_standin::{ExecutionMode, environment};
use doorbell_gpudirect::GpuMemory;
use doorbell_gpudirect::storage::{File, Storage, StorageError, StorageOptions, StoragePath, survey};

type Outcome = Result<(), Box<dyn Error>>;

const LEN: usize = 1_234_567;

const NOT_LOADED: &str = "the kernel module nvidia-fs is not loaded";
const NOT_INITIALIZED: &str =
    "cuFileDriverOpen: CU_FILE_DRIVER_NOT_INITIALIZED: the kernel module nvidia-fs is not loaded";

struct Case {
    /// What the library refuses.
    mode: &'static str,
    /// Whether it has cuFileSetParameterBool and cuFileGetParameterBool.
    parameters: bool,
    /// Why cuFile is not chosen.
    why: Option<&'static str>,
    /// What becomes of it where it is requested by name.
    forced: Forced,
}

enum Forced {
    Works,
    /// In its compatibility mode, for this reason.
    Compatible(&'static str),
    /// When it is opened, for this reason.
    Refused(&'static str),
    /// With the first request.
    Later,
}

const fn case(mode: &'static str, parameters: bool, why: Option<&'static str>, forced: Forced) -> Case {
    Case {
        mode,
        parameters,
        why,
        forced,
    }
}

const CASES: [Case; 10] = [
    case("", true, None, Forced::Works),
    case("", false, None, Forced::Works),
    case(
        "driver",
        true,
        Some(NOT_INITIALIZED),
        Forced::Refused(
            "cuFileDriverOpen: CU_FILE_DRIVER_NOT_INITIALIZED: the kernel module nvidia-fs is not loaded; \
             in its compatibility mode: \
             cuFileDriverOpen: CU_FILE_DRIVER_NOT_INITIALIZED: the kernel module nvidia-fs is not loaded",
        ),
    ),
    case(
        "module",
        true,
        Some(NOT_INITIALIZED),
        Forced::Compatible(NOT_INITIALIZED),
    ),
    case(
        "module",
        false,
        Some("compatibility mode: the kernel module nvidia-fs is not loaded"),
        Forced::Compatible(NOT_LOADED),
    ),
    case(
        "forced",
        true,
        Some("compatibility mode: CUFILE_FORCE_COMPAT_MODE or force_compat_mode of cufile.json is set"),
        Forced::Compatible("CUFILE_FORCE_COMPAT_MODE or force_compat_mode of cufile.json is set"),
    ),
    case(
        "parameter",
        true,
        Some("cuFileSetParameterBool: CU_FILE_INVALID_VALUE"),
        Forced::Refused(
            "cuFileSetParameterBool: CU_FILE_INVALID_VALUE; in its compatibility mode: \
             cuFileSetParameterBool: CU_FILE_INVALID_VALUE",
        ),
    ),
    case(
        "filesystem",
        true,
        Some("cuFileHandleRegister: CU_FILE_IO_NOT_SUPPORTED: the file system is not supported"),
        Forced::Later,
    ),
    case(
        "io",
        true,
        Some("CU_FILE_INTERNAL_ERROR: cufile.log says more"),
        Forced::Later,
    ),
    case("errno", true, None, Forced::Works),
];

fn main() -> ExitCode {
    if let Some(case) = env::var("CUFILE_CASE").ok().and_then(|case| case.parse::<usize>().ok()) {
        return match run(&CASES[case]) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                println!("{error}");
                ExitCode::FAILURE
            }
        };
    }
    let folder = tempfile::tempdir().expect("a folder");
    let libraries = [false, true].map(|parameters| build(folder.path(), parameters));
    let program = env::current_exe().expect("the path of this program");
    let mut outcome = ExitCode::SUCCESS;
    for (case, Case { mode, parameters, .. }) in CASES.iter().enumerate() {
        let output = Command::new(&program)
            .envs(environment(ExecutionMode::Prompt, 1))
            .env("DOORBELL_CUFILE_LIBRARY", &libraries[usize::from(*parameters)])
            .env("FAKE_CUFILE", mode)
            .env("CUFILE_CASE", case.to_string())
            .output()
            .expect("this program runs");
        if output.status.success() {
            println!("case {case} {mode} ... ok");
        } else {
            println!("case {case} {mode} ... FAILED: {output:?}");
            outcome = ExitCode::FAILURE;
        }
    }
    outcome
}

fn build(folder: &Path, parameters: bool) -> PathBuf {
    let library = folder.join(format!("libcufile-{parameters}.so"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cufile/fake.c");
    let mut compiler = Command::new("cc");
    compiler
        .args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"])
        .arg(&library)
        .arg(source);
    if parameters {
        compiler.arg("-DPARAMETERS");
    }
    assert!(compiler.status().expect("a C compiler").success(), "fake.c compiles");
    library
}

fn run(case: &Case) -> Outcome {
    let Case { mode, why, .. } = *case;
    let stream = Stream::new(&Driver::load()?.device(0)?.context()?)?;
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("data");
    let bytes: Vec<u8> = (0..LEN).map(|at| (at * 31 + at / 255) as u8).collect();
    fs::write(&path, &bytes)?;
    let file = File::open_for_writing(&path)?;
    if let Some(reason) = file.buffered() {
        println!("left out: {reason}");
        return Ok(());
    }
    if mode == "errno" {
        let memory = GpuMemory::alloc(stream.context(), LEN)?;
        let error = Storage::on_stream(&stream)?
            .read_at(&file, 7, memory.all())
            .expect_err("EIO");
        return check_io_error(&error);
    }
    let found = survey(&path, Some(&stream))?;
    let refused = found.paths[0].1.as_ref().err().map(String::as_str);
    expect("the survey's reason", refused, why)?;
    forced(&case.forced, &stream, &file, &bytes)?;
    fs::write(&path, &bytes)?;

    // What cuFile refuses goes another way, with the same bytes.
    let mut storage = StorageOptions::new().block(64 << 10).depth(4).on_stream(&stream)?;
    read_and_write(&mut storage, &stream, &file, &bytes)?;
    let used = if why.is_none() {
        StoragePath::CuFile
    } else {
        storage.path()
    };
    expect("the path", Some(storage.path_of(&file)), Some(used))?;
    let reasons = storage.refused_of(&file);
    let first = reasons.first().filter(|refused| refused.path == StoragePath::CuFile);
    expect("the reason", first.map(|refused| refused.why.as_str()), why)
}

/// Requested by name, cuFile may use its compatibility mode, and says so.
fn forced(expected: &Forced, stream: &Stream, file: &File, bytes: &[u8]) -> Outcome {
    let opened = StorageOptions::new().path(StoragePath::CuFile).on_stream(stream);
    match (expected, opened) {
        (Forced::Refused(why), opened) => {
            let said = opened.err().map(|error| error.to_string());
            let refused = format!("cufile is forced, and refused: {why}");
            expect("forced", said.as_deref(), Some(&*refused))
        }
        (Forced::Later, opened) => {
            let memory = GpuMemory::alloc(stream.context(), LEN)?;
            match opened?.read_at(&File::open(file.path())?, 0, memory.all()) {
                Err(StorageError::Refused { .. }) => Ok(()),
                other => Err(format!("forced: {other:?}").into()),
            }
        }
        (Forced::Works | Forced::Compatible(_), opened) => {
            let mut storage = opened?;
            let mode = match expected {
                Forced::Compatible(why) => Some(*why),
                _ => None,
            };
            expect("the compatibility mode", storage.compatibility(), mode)?;
            read_and_write(&mut storage, stream, file, bytes)?;
            expect("the path", Some(storage.path_of(file)), Some(StoragePath::CuFile))
        }
    }
}

fn read_and_write(storage: &mut Storage, stream: &Stream, file: &File, bytes: &[u8]) -> Outcome {
    let memory = GpuMemory::alloc(stream.context(), LEN + 9)?;
    for (offset, len) in [(0, LEN), (4097, 500_000), (LEN - 5, 9), (LEN + 3, 9)] {
        let count = storage.read_at(file, offset as u64, memory.span(9..9 + len)?)?;
        let expected = &bytes[offset.min(LEN)..(offset + len).min(LEN)];
        expect("the count", Some(count), Some(expected.len()))?;
        if contents(&memory, stream)?[9..9 + count] != *expected {
            return Err(format!("wrong data: {len} bytes at {offset}").into());
        }
    }
    let mut written = bytes.to_vec();
    for (offset, len) in [(4096, 8192), (77, 300_001), (LEN - 3, 1000)] {
        storage.write_at(file, offset as u64, memory.span(..len)?)?;
        written.resize(written.len().max(offset + len), 0);
        written[offset..offset + len].copy_from_slice(&contents(&memory, stream)?[..len]);
    }
    if fs::read(file.path())? != written {
        return Err("wrong data in the file".into());
    }
    Ok(())
}

fn check_io_error(error: &StorageError) -> Outcome {
    match error {
        StorageError::Io { offset: 7, error, .. } if error.raw_os_error() == Some(libc::EIO) => Ok(()),
        other => Err(format!("{other:?}").into()),
    }
}

fn contents(memory: &GpuMemory, stream: &Stream) -> Result<Vec<u8>, Box<dyn Error>> {
    let host = HostMemory::alloc(memory.context(), memory.len())?;
    stream.copy(host.all(), memory.all())?;
    stream.synchronize()?;
    let mut bytes = vec![0; memory.len()];
    host.copy_out(0, &mut bytes)?;
    Ok(bytes)
}

fn expect<T: PartialEq + std::fmt::Debug>(what: &str, found: Option<T>, expected: Option<T>) -> Outcome {
    if found == expected {
        return Ok(());
    }
    Err(format!("{what}: {found:?} in place of {expected:?}").into())
}
