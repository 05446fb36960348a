//! Several processes on the stand-in: shared memory, words, kernels, a killed process, an access to
//! a device address. A program of its own, which runs itself as the second process.

use std::cell::RefCell;
use std::error::Error;
use std::io::{self, BufRead, BufReader};
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::{env, fs, ptr, thread};

use doorbell_cuda::{Context, DeviceMemory, Driver, HostMemory, Launch, Memory, Module, Stream, WaitCondition};
use doorbell_cuda_standin::{ExecutionMode, Standin, environment, missing};

type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

const CHILD: &str = "--child";
const BYTES: usize = 3 << 20;
const ROUNDS: u32 = 100;
const BLOCKS: u32 = 2;
const PTX: &str = ".visible .entry meet(";
/// The offsets of each side's flags and results in the memory.
const FLAGS: [usize; 2] = [0, 256];
const RESULTS: [usize; 2] = [512, 768];

type Case = (&'static str, fn(&First) -> Result, fn(&Side) -> Result);
const CASES: [Case; 4] = [
    (
        "words",
        |first| first.ends_well(|side| words(side, 0)),
        |side| words(side, 1),
    ),
    (
        "kernels",
        |first| first.ends_well(|side| kernels(side, 0)),
        |side| kernels(side, 1),
    ),
    ("killed", survive, wait_for_the_end),
    ("addresses", see_it_die, follow_an_address),
];

struct Side {
    stream: Stream,
    context: Context,
    memory: DeviceMemory,
}

struct First {
    side: Side,
    child: RefCell<Child>,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let succeeded = match &arguments[..] {
        [first, name] if first == CHILD => {
            let case = CASES.iter().find(|(case, ..)| case == name);
            let result = case.ok_or_else(|| "no such case".into());
            said("the second process", result.and_then(|(.., run)| run(&second()?)))
        }
        _ => match missing() {
            Some(what) => {
                println!("skipped: {what}");
                env::var_os("CI").is_none()
            }
            None => CASES.iter().all(|(name, run, _)| said(name, first(name, *run))),
        },
    };
    if succeeded {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn said(name: &str, result: Result) -> bool {
    match &result {
        Ok(()) => eprintln!("{name} ... ok"),
        Err(error) => eprintln!("{name} ... FAILED: {error}"),
    }
    result.is_ok()
}

fn first(name: &str, run: fn(&First) -> Result) -> Result {
    let standin = Standin::load(ExecutionMode::Prompt);
    let context = standin.driver()?.device(0)?.context()?;
    let stream = Stream::new(&context)?;
    let memory = DeviceMemory::alloc(&context, BYTES)?;
    stream.fill(memory.all(), 0)?;
    stream.synchronize()?;
    let child = Command::new(env::current_exe()?)
        .args([CHILD, name])
        .envs(environment(ExecutionMode::Prompt, 2))
        .stdin(Stdio::from(memory.export_fd()?))
        .stdout(Stdio::piped())
        .spawn()?;
    let first = First {
        side: Side {
            stream,
            context,
            memory,
        },
        child: RefCell::new(child),
    };
    let result = run(&first);
    if result.is_err() {
        first.child.borrow_mut().kill()?;
    }
    first.child.borrow_mut().wait()?;
    result?;
    first.side.stream.synchronize()?;
    drop(first);
    standin.assert_nothing_left(name);
    Ok(())
}

/// The second process's side, on another device.
fn second() -> Result<Side> {
    let context = Driver::load()?.device(1)?.context()?;
    // Makes addresses differ.
    let _before = DeviceMemory::alloc(&context, 10 << 20)?;
    let memory = DeviceMemory::import(&context, io::stdin().as_fd(), BYTES)?;
    assert_eq!(memory.device().map(|device| device.ordinal()), Some(0));
    Ok(Side {
        stream: Stream::new(&context)?,
        context,
        memory,
    })
}

impl First {
    fn ends_well(&self, run: impl FnOnce(&Side) -> Result) -> Result {
        run(&self.side)?;
        let status = self.wait()?;
        if status.success() {
            Ok(())
        } else {
            Err(status.to_string().into())
        }
    }

    fn wait(&self) -> Result<ExitStatus> {
        Ok(self.child.borrow_mut().wait()?)
    }
}

impl Side {
    fn words(&self, from: usize, count: usize) -> Result<Vec<u32>> {
        let mut host = HostMemory::alloc(&self.context, 4 * count)?;
        self.stream
            .copy(host.all(), self.memory.span(from..from + 4 * count)?)?;
        let bytes = host.bytes_mut()?;
        Ok(bytes
            .as_chunks::<4>()
            .0
            .iter()
            .map(|word| u32::from_ne_bytes(*word))
            .collect())
    }
}

/// Streams of two processes alternate through words, and each adds a byte to shared memory.
fn words(side: &Side, who: usize) -> Result {
    let (word, other) = (side.memory.span(..4)?, side.memory.span(4..8)?);
    let (own, theirs) = if who == 0 { (word, other) } else { (other, word) };
    for round in 1..=ROUNDS {
        if who == 1 {
            side.stream.wait_value32(theirs, WaitCondition::AtLeast(round))?;
        }
        let at = 4096 + 2 * round as usize + who;
        side.stream.fill(side.memory.span(at..at + 1)?, round as u8)?;
        side.stream.write_value32(own, round)?;
        if who == 0 {
            side.stream.wait_value32(theirs, WaitCondition::AtLeast(round))?;
        }
    }
    let got = side.words(4096, 51)?;
    let bytes: Vec<u8> = got.iter().flat_map(|word| word.to_ne_bytes()).collect();
    for round in 1..=ROUNDS as usize {
        assert_eq!(bytes[2 * round..2 * round + 2], [round as u8; 2], "round {round}");
    }
    Ok(())
}

fn kernels(side: &Side, who: usize) -> Result {
    let kernel = Module::from_ptx(&side.context, PTX)?.kernel("meet")?;
    let at = |offset: usize| Ok::<_, Box<dyn Error>>(side.memory.span(offset..)?.device_ptr());
    let (own, theirs, result) = (at(FLAGS[who])?, at(FLAGS[1 - who])?, at(RESULTS[who])?);
    // SAFETY: the flags and results of these blocks lie in the memory.
    unsafe {
        kernel.launch(
            &side.stream,
            Launch::linear(BLOCKS, 64),
            &[&own, &theirs, &result, &ROUNDS],
            &[side.memory.all()],
        )?;
    }
    assert_eq!(side.words(RESULTS[who], BLOCKS as usize)?, [ROUNDS; BLOCKS as usize]);
    Ok(())
}

/// The other process dies before its write; this one writes the word, and its stream completes.
fn survive(first: &First) -> Result {
    let Side {
        stream,
        context,
        memory,
    } = &first.side;
    let mut line = String::new();
    BufReader::new(first.child.borrow_mut().stdout.take().ok_or("no pipe")?).read_line(&mut line)?;
    assert_eq!(line, "ready\n");
    stream.wait_value32(memory.span(8..12)?, WaitCondition::Equal(1))?;
    stream.fill(memory.span(4096..8192)?, 9)?;
    first.child.borrow_mut().kill()?;
    assert_eq!(first.wait()?.signal(), Some(libc::SIGKILL));
    assert!(!stream.is_idle()?);
    let other = Stream::new(context)?;
    other.write_value32(memory.span(8..12)?, 1)?;
    stream.synchronize()?;
    // The other process had done its part before it was killed.
    assert_eq!(first.side.words(0, 1)?, [1]);
    assert_eq!(first.side.words(4096, 2)?, [0x0909_0909; 2]);
    Ok(())
}

fn wait_for_the_end(side: &Side) -> Result {
    side.stream.write_value32(side.memory.span(..4)?, 1)?;
    side.stream.synchronize()?;
    println!("ready");
    // Also with a kernel, and a stream wait that never ends.
    side.stream
        .wait_value32(side.memory.span(12..16)?, WaitCondition::Equal(1))?;
    loop {
        thread::park();
    }
}

/// A program cannot access a device address.
fn see_it_die(first: &First) -> Result {
    assert_eq!(first.wait()?.signal(), Some(libc::SIGSEGV));
    Ok(())
}

fn follow_an_address(side: &Side) -> Result {
    // No core dump is wanted.
    fs::write("/proc/self/coredump_filter", "0")?;
    let at = ptr::with_exposed_provenance::<u8>(usize::try_from(side.memory.device_ptr().0)?);
    // SAFETY: none: the test verifies that this faults.
    let byte = unsafe { at.read_volatile() };
    Err(format!("there is {byte}").into())
}
