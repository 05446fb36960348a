//! One run of QEMU: sends the job, forwards the command's output and reports how it ended.
//!
//! Four Unix sockets, a serial console and three virtio ports (see `init.sh`), lie in a private
//! folder and are unlinked once QEMU has connected: guests never collide. The kernel kills QEMU
//! when this process dies (`setpriv --pdeathsig`).

use super::{image::Image, job::Job};
use anyhow::{Context, Result, bail};
use std::{
    collections::VecDeque,
    fs,
    io::{self, BufRead, BufReader, ErrorKind, Read, Write},
    os::unix::{
        fs::DirBuilderExt,
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        atomic::{AtomicU32, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Longest time from power-on to the command's start. It takes 5 s on an idle machine.
const BOOT_LIMIT: Duration = Duration::from_secs(180);

const CONSOLE_LINES: usize = 40;

pub(crate) type Sink = Box<dyn Write + Send>;

#[derive(Debug)]
pub(crate) enum Outcome {
    /// The command ended with this status, 128 + n when signal n ended it.
    Exited(u8),
    /// The limit passed first; the guest was stopped.
    TimedOut,
    /// The reader of the output is gone; the guest was stopped.
    Unread,
    /// The guest itself failed, with the reason and the console's last lines.
    Failed {
        reason: String,
        /// Oldest first.
        console: Vec<String>,
    },
}

pub(crate) struct Options {
    /// Longest time for the whole run.
    pub(crate) limit: Duration,
    /// Show the console, and how long the start took, on stderr.
    pub(crate) verbose: bool,
    pub(crate) stdout: Sink,
    pub(crate) stderr: Sink,
}

#[derive(Debug, PartialEq, Eq)]
enum Event {
    Up(String),
    Exit(u8),
    Fail(String),
    Unread,
    Gone,
}

pub(crate) fn run(image: &Image, job: &Job, options: Options) -> Result<Outcome> {
    let started = Instant::now();
    let script = job.script();
    let sockets = Sockets::new()?;
    let mut qemu = Qemu(
        command(image, &sockets, script.len(), options.verbose)
            .spawn()
            .context("cannot run qemu-system-x86_64 (through setpriv)")?,
    );
    let [console, stdout, stderr, mut control] = sockets.accept(&mut qemu.0)?;

    let console = thread::spawn(move || keep_last_lines(console, options.verbose));
    let (events, received) = mpsc::channel();
    let outputs = [
        pump(stdout, options.stdout, events.clone()),
        pump(stderr, options.stderr, events.clone()),
    ];
    let control_reader = control.try_clone()?;
    thread::spawn(move || read_control(control_reader, &events));
    // Read when the guest gets that far; until then the socket's buffer or this thread holds it.
    thread::spawn(move || control.write_all(&script));

    let outcome = wait(&received, started, options.limit, options.verbose);
    // The guest reports after its output was taken: killing loses nothing.
    qemu.kill();
    for output in outputs {
        let _ = output.join();
    }
    let console = console.join().unwrap_or_default();
    Ok(match outcome {
        Outcome::Failed { reason, .. } => Outcome::Failed { reason, console },
        other => other,
    })
}

fn wait(received: &Receiver<Event>, started: Instant, limit: Duration, verbose: bool) -> Outcome {
    let failed = |reason: String| Outcome::Failed {
        reason,
        console: Vec::new(),
    };
    let mut up = false;
    loop {
        let now = if up { limit } else { limit.min(BOOT_LIMIT) };
        match received.recv_timeout(now.saturating_sub(started.elapsed())) {
            Ok(Event::Up(kernel)) => {
                up = true;
                if verbose {
                    eprintln!("vm: up after {:.1} s: {kernel}", started.elapsed().as_secs_f64());
                }
            }
            Ok(Event::Exit(status)) => return Outcome::Exited(status),
            Ok(Event::Fail(reason)) => return failed(reason),
            Ok(Event::Unread) => return Outcome::Unread,
            Ok(Event::Gone) | Err(RecvTimeoutError::Disconnected) => {
                return failed("the guest stopped before its command ended".to_owned());
            }
            Err(RecvTimeoutError::Timeout) if now < limit => {
                return failed(format!("the guest did not come up within {} s", now.as_secs()));
            }
            Err(RecvTimeoutError::Timeout) => return Outcome::TimedOut,
        }
    }
}

/// The machine's process, killed and reaped on drop.
struct Qemu(Child);

impl Qemu {
    fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        self.kill();
    }
}

fn command(image: &Image, sockets: &Sockets, job_size: usize, verbose: bool) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--", "qemu-system-x86_64"]);
    // KVM is not used even where /dev/kvm exists: the guest hung under it on the first machine we
    // tried, many have none, and emulation behaves the same everywhere.
    command.args([
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-no-reboot",
        "-nic",
        "none",
    ]);
    command.args([
        "-machine",
        "pc",
        "-accel",
        "tcg,thread=multi",
        "-cpu",
        "max",
        "-smp",
        &processors().to_string(),
        "-m",
        "2048",
    ]);
    command
        .arg("-kernel")
        .arg(&image.kernel)
        .arg("-initrd")
        .arg(&image.initrd)
        .arg("-append")
        .arg(format!(
            "console=ttyS0 {} panic=-1 mitigations=off random.trust_cpu=on tsc=reliable doorbell.job={job_size}",
            if verbose { "" } else { "quiet" }
        ));
    for (tag, path) in [("host", Path::new("/")), ("sysroot", &image.sysroot)] {
        let share = "security_model=none,readonly=on,multidevs=remap";
        command
            .arg("-virtfs")
            .arg(format!("local,path={},mount_tag={tag},{share}", option_value(path)));
    }
    command.args(["-device", "virtio-serial-pci"]);
    for (port, name) in Sockets::NAMES.iter().enumerate() {
        let path = option_value(&sockets.path(name));
        command.arg("-chardev").arg(format!("socket,id={name},path={path}"));
        match port {
            0 => command.arg("-serial").arg(format!("chardev:{name}")),
            _ => command
                .arg("-device")
                .arg(format!("virtserialport,chardev={name},nr={port}")),
        };
    }
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command
}

/// The guest's processors: no more than the host's, where a guest thread that holds a lock would
/// wait for one that spins for it; at least two, as its tests have two ends.
fn processors() -> usize {
    thread::available_parallelism().map_or(2, |host| host.get().clamp(2, 4))
}

fn option_value(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}

/// The listening ends, in a folder that only this user may enter.
struct Sockets {
    folder: PathBuf,
    listeners: [UnixListener; 4],
}

impl Sockets {
    /// The serial console, then the virtio ports in the order of their numbers.
    const NAMES: [&str; 4] = ["console", "stdout", "stderr", "control"];

    fn new() -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!(
            "doorbell-vm-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        let folder = std::env::temp_dir().join(name);
        // Only a process with our pid can have left this, and it is gone.
        let _ = fs::remove_dir_all(&folder);
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&folder)
            .with_context(|| format!("cannot make {}", folder.display()))?;
        match Self::listen(&folder) {
            Ok(listeners) => Ok(Self { folder, listeners }),
            Err(error) => {
                let _ = fs::remove_dir_all(&folder);
                Err(error).with_context(|| format!("cannot listen in {}", folder.display()))
            }
        }
    }

    fn listen(folder: &Path) -> io::Result<[UnixListener; 4]> {
        let listen = |name| -> io::Result<UnixListener> {
            let listener = UnixListener::bind(folder.join(name))?;
            listener.set_nonblocking(true)?;
            Ok(listener)
        };
        let [console, stdout, stderr, control] = Self::NAMES.map(listen);
        Ok([console?, stdout?, stderr?, control?])
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Waits for QEMU to connect all of them, then removes the folder.
    fn accept(self, qemu: &mut Child) -> Result<[UnixStream; 4]> {
        let mut accept = |listener: &UnixListener| -> Result<UnixStream> {
            loop {
                match listener.accept() {
                    Ok((stream, _)) => {
                        stream.set_nonblocking(false)?;
                        return Ok(stream);
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    Err(error) => return Err(error.into()),
                }
                if let Some(status) = qemu.try_wait()? {
                    bail!("QEMU ended at once ({status}); it said why above");
                }
                thread::sleep(Duration::from_millis(5));
            }
        };
        let [console, stdout, stderr, control] = self.listeners.each_ref().map(&mut accept);
        Ok([console?, stdout?, stderr?, control?])
    }
}

impl Drop for Sockets {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Reports when the sink fails (its reader left), but reads on: the command never blocks.
fn pump(mut port: UnixStream, mut sink: Sink, events: Sender<Event>) -> JoinHandle<()> {
    thread::spawn(move || {
        let mut buffer = vec![0; 64 << 10];
        let mut open = true;
        while let Ok(count @ 1..) = port.read(&mut buffer) {
            if open && sink.write_all(&buffer[..count]).and_then(|()| sink.flush()).is_err() {
                open = false;
                let _ = events.send(Event::Unread);
            }
        }
    })
}

fn keep_last_lines(console: UnixStream, verbose: bool) -> Vec<String> {
    let mut last = VecDeque::with_capacity(CONSOLE_LINES);
    for line in BufReader::new(console).split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line).trim_end().to_owned();
        if verbose {
            eprintln!("console: {line}");
        }
        if last.len() == CONSOLE_LINES {
            last.pop_front();
        }
        last.push_back(line);
    }
    last.into()
}

fn read_control(control: UnixStream, events: &Sender<Event>) {
    for line in BufReader::new(control).lines().map_while(Result::ok) {
        if let Some(event) = parse(&line)
            && events.send(event).is_err()
        {
            return;
        }
    }
    let _ = events.send(Event::Gone);
}

/// A line of the control port, as `init.sh` writes them.
fn parse(line: &str) -> Option<Event> {
    match line.split_once(' ')? {
        ("up", kernel) => Some(Event::Up(kernel.to_owned())),
        ("exit", status) => Some(match status.parse() {
            Ok(status) => Event::Exit(status),
            Err(_) => Event::Fail(format!("the guest reported an exit status of {status:?}")),
        }),
        ("fail", reason) => Some(Event::Fail(reason.to_owned())),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guests_lines_are_parsed() {
        assert_eq!(
            parse("up 6.1.0-9-amd64 #1 SMP"),
            Some(Event::Up("6.1.0-9-amd64 #1 SMP".to_owned()))
        );
        assert_eq!(parse("exit 0"), Some(Event::Exit(0)));
        assert_eq!(parse("exit 139"), Some(Event::Exit(139)));
        assert_eq!(parse("fail no /run"), Some(Event::Fail("no /run".to_owned())));
        assert!(
            matches!(parse("exit 256"), Some(Event::Fail(_))),
            "a status is never cut to eight bits"
        );
        assert!(matches!(parse("exit "), Some(Event::Fail(_))));
        assert_eq!(parse(""), None);
        assert_eq!(parse("exit"), None);
    }

    #[test]
    fn the_first_end_event_decides() {
        let outcome = |sent: Vec<Event>, limit| {
            let (events, received) = mpsc::channel();
            sent.into_iter().for_each(|event| events.send(event).unwrap());
            let outcome = wait(&received, Instant::now(), Duration::from_millis(limit), false);
            drop(events);
            outcome
        };
        let up = || Event::Up(String::new());
        assert!(matches!(
            outcome(vec![up(), Event::Exit(3), Event::Gone], 60_000),
            Outcome::Exited(3)
        ));
        assert!(matches!(
            outcome(vec![up(), Event::Gone, Event::Exit(3)], 60_000),
            Outcome::Failed { .. }
        ));
        assert!(matches!(
            outcome(vec![Event::Fail("no /run".to_owned())], 60_000),
            Outcome::Failed { .. }
        ));
        assert!(matches!(outcome(vec![up(), Event::Unread], 60_000), Outcome::Unread));
        assert!(matches!(outcome(vec![up()], 1), Outcome::TimedOut));
        assert!(
            matches!(outcome(vec![], 1), Outcome::TimedOut),
            "the caller's limit counts from the power-on"
        );
    }

    #[test]
    fn only_the_last_lines_of_the_console_are_kept() {
        let (reader, mut writer) = UnixStream::pair().unwrap();
        // In one write: the socket would not hold hundreds of small ones.
        let text: String = (0..100).map(|number| format!("line {number}\r\n")).collect();
        writer.write_all(text.as_bytes()).unwrap();
        drop(writer);
        let lines = keep_last_lines(reader, false);
        assert_eq!(lines.len(), CONSOLE_LINES);
        assert_eq!(lines[0], "line 60");
        assert_eq!(lines[CONSOLE_LINES - 1], "line 99");
    }

    #[test]
    fn a_sink_that_fails_is_reported_once_and_does_not_block_the_command() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let (reader, mut writer) = UnixStream::pair().unwrap();
        let (events, received) = mpsc::channel();
        let pump = pump(reader, Box::new(Closed), events);
        // Far more than a socket buffers: this returns only if the pump keeps reading.
        writer.write_all(&vec![0; 4 << 20]).unwrap();
        drop(writer);
        pump.join().unwrap();
        assert_eq!(received.iter().collect::<Vec<_>>(), [Event::Unread]);
    }
}
