//! Programs in C and C++ with the installed library: `install.sh`, pkg-config, cc, and their runs.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// Of C alone, before the sources.
const C: [&str; 2] = ["cc", "-std=c11"];
const CPP: [&str; 2] = ["c++", "-std=c++17"];

/// Where the library is installed, once for all tests.
fn installed() -> &'static Path {
    static PREFIX: OnceLock<PathBuf> = OnceLock::new();
    PREFIX.get_or_init(|| {
        let prefix = Path::new(env!("CARGO_TARGET_TMPDIR")).join("installed");
        let profile = if cfg!(debug_assertions) { "dev" } else { "release" };
        let mut install = Command::new(source("install.sh"));
        install.arg(&prefix).arg(profile);
        // This program is in TARGET/PROFILE/deps.
        let program = std::env::current_exe().unwrap();
        install.env("CARGO", env!("CARGO"));
        install.env("CARGO_TARGET_DIR", program.ancestors().nth(3).unwrap());
        succeed(&mut install);
        prefix
    })
}

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn pkg_config(arguments: &[&str]) -> Command {
    let mut command = Command::new("pkg-config");
    command.args(arguments).arg("doorbell");
    command.env("PKG_CONFIG_PATH", installed().join("lib/pkgconfig"));
    command
}

/// The flags of pkg-config, or the same without it.
fn flags() -> Vec<String> {
    let prefix = installed().display();
    match pkg_config(&["--cflags", "--libs"]).output() {
        Ok(output) if output.status.success() => {
            let flags = String::from_utf8(output.stdout).unwrap();
            flags.split_whitespace().map(str::to_owned).collect()
        }
        Ok(output) => panic!("{output:?}"),
        Err(error) => {
            eprintln!("without pkg-config: {error}");
            vec![
                format!("-I{prefix}/include"),
                format!("-L{prefix}/lib"),
                "-ldoorbell".to_owned(),
            ]
        }
    }
}

/// Compiles a source, with all warnings as errors, to a file of its own.
fn program(compiler: [&str; 2], name: &str, flags: &[String]) -> PathBuf {
    let source = source(name);
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let made = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("program-{number}"));
    let mut compile = Command::new(compiler[0]);
    compile.args([
        compiler[1],
        "-Wall",
        "-Wextra",
        "-Wpedantic",
        "-Werror",
        "-pthread",
        "-o",
    ]);
    compile.arg(&made).arg(source).args(flags);
    compile.arg(format!("-Wl,-rpath,{}/lib", installed().display()));
    succeed(&mut compile);
    made
}

fn succeed(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    checked(&format!("{command:?}"), output)
}

fn checked(name: &str, output: Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{name}: {}\n{out}{err}", output.status);
    out.into_owned()
}

/// Starts a program as one of several processes.
fn start(program: &Path, arguments: &[&str]) -> Child {
    let mut command = Command::new(program);
    command.args(arguments).env("DOORBELL_SECRET", "a secret of the test");
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().unwrap()
}

fn all_succeed(processes: impl IntoIterator<Item = Child>) -> Vec<String> {
    let outputs: Vec<_> = processes
        .into_iter()
        .map(|process| process.wait_with_output().unwrap())
        .collect();
    let outputs = outputs.into_iter().enumerate();
    outputs
        .map(|(number, output)| checked(&format!("process {number}"), output))
        .collect()
}

/// An address that no process listens on.
fn address() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().to_string()
}

#[test]
fn every_collective_type_and_reduction_is_right_on_two_ranks() {
    let program = program(C, "tests/collectives.c", &flags());
    let address = address();
    all_succeed(["0", "1"].map(|rank| start(&program, &[rank, &address])));
}

#[test]
fn a_rank_that_fails_is_named_by_the_others_in_time() {
    let program = program(C, "tests/failures.c", &flags());
    for how in ["killed", "aborted", "absent"] {
        let address = address();
        let [first, second, mut failing] = ["0", "1", "2"].map(|rank| start(&program, &[rank, &address, how]));
        all_succeed([first, second]);
        // Its input ends here.
        let status = failing.wait().unwrap();
        assert_eq!(status.success(), how != "killed", "{how}: {status}");
    }
}

#[test]
fn connections_send_receive_write_and_read() {
    succeed(&mut Command::new(program(C, "tests/connections.c", &flags())));
}

#[test]
fn a_wrong_argument_has_its_status_and_text() {
    let mut command = Command::new(program(C, "tests/arguments.c", &flags()));
    for variable in ["DOORBELL_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"] {
        command.env_remove(variable);
    }
    assert_eq!(succeed(command.arg(address())).trim(), env!("CARGO_PKG_VERSION"));
}

#[test]
fn the_examples_run() {
    let flags = flags();
    let sums = program(C, "examples/all_reduce.c", &flags);
    let meeting = address();
    let printed = all_succeed(["0", "1"].map(|rank| start(&sums, &[rank, "2", &meeting])));
    assert_eq!(printed, ["rank 0 of 2: 2 4 6 1\n", "rank 1 of 2: 2 4 6 1\n"]);

    let ping_pong = program(C, "examples/ping_pong.c", &flags);
    let meeting = address();
    let printed = all_succeed([start(&ping_pong, &[&meeting]), start(&ping_pong, &[&meeting, "client"])]);
    assert!(printed[1].starts_with("1000 messages to and fro, "), "{printed:?}");
}

#[test]
fn the_header_is_for_cpp_too() {
    let program = program(CPP, "tests/header.cpp", &flags());
    assert_eq!(succeed(&mut Command::new(program)).trim(), env!("CARGO_PKG_VERSION"));
}

#[test]
fn pkg_config_knows_the_version_and_the_static_library() {
    if let Err(error) = Command::new("pkg-config").arg("--version").output() {
        eprintln!("skipped: pkg-config: {error}");
        return;
    }
    assert_eq!(
        succeed(&mut pkg_config(&["--modversion"])).trim(),
        env!("CARGO_PKG_VERSION")
    );
    // With the archive in the place of the library, the program needs no installation.
    let flags = succeed(&mut pkg_config(&["--static", "--cflags", "--libs"]));
    let flags = flags
        .split_whitespace()
        .map(|flag| flag.replace("-ldoorbell", "-l:libdoorbell.a"));
    let program = program(CPP, "tests/header.cpp", &flags.collect::<Vec<_>>());
    let bytes = std::fs::read(&program).unwrap();
    assert!(!bytes.windows(14).any(|window| window == b"libdoorbell.so"));
    assert_eq!(succeed(&mut Command::new(program)).trim(), env!("CARGO_PKG_VERSION"));
}

#[test]
fn only_the_functions_of_the_header_are_exported() {
    let library = installed().join("lib/libdoorbell.so");
    let symbols = succeed(
        Command::new("nm")
            .args(["--dynamic", "--defined-only", "--format=just-symbols"])
            .arg(library),
    );
    let mut exported: Vec<_> = symbols.lines().collect();
    exported.sort_unstable();
    let header = std::fs::read_to_string(source("doorbell.h")).unwrap();
    let function = |(at, _): (usize, &str)| {
        let (name, rest) = header[at..].split_at(header[at..].find(|c: char| c != '_' && !c.is_alphanumeric())?);
        rest.starts_with('(').then_some(name)
    };
    let mut declared: Vec<_> = header.match_indices("doorbell_").filter_map(function).collect();
    declared.sort_unstable();
    declared.dedup();
    assert_eq!(exported, declared);
}

#[test]
fn the_code_of_the_book_is_of_the_examples() {
    let read = |name: &str| std::fs::read_to_string(source(name)).unwrap();
    let examples = read("examples/all_reduce.c") + &read("examples/ping_pong.c");
    let chapter = read("../../docs/book/src/c.md");
    let blocks = chapter.split("```c\n").skip(1);
    let blocks: Vec<_> = blocks.map(|block| block.split("```").next().unwrap()).collect();
    assert_eq!(blocks.len(), 2);
    for block in blocks {
        assert!(examples.contains(block), "{block}");
    }
}
