//! The device's handler of SIGSEGV and SIGBUS among the application's: each test is a process.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, process, ptr};

use doorbell_roce_proto::work::Status;
use libc::{c_int, c_void, siginfo_t};
use nix::sys::signal::{SigHandler, Signal, raise, signal};

use super::side::{Backing, Side, device, own_address};

/// Set for the process of a test: what it does.
const TASK: &str = "DOORBELL_TEST_SIGNALS";
const PAGE: usize = 4096;

/// How the process ends.
fn run(task: &str) -> ExitStatus {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "signals::process", "--include-ignored"]);
    command.env(TASK, task).status().unwrap()
}

#[test]
fn a_fault_of_the_application_kills_it() {
    assert_eq!(run("default").signal(), Some(libc::SIGSEGV));
    assert_eq!(run("sent").signal(), Some(libc::SIGBUS), "by kill(2)");
}

#[test]
fn a_handler_gets_the_applications_faults_and_no_other() {
    assert_eq!(run("earlier").code(), Some(0));
    assert_eq!(run("later").code(), Some(0), "installed between two registrations");
}

/// It passes the fault on to the handler that it has replaced, the device's: a chain, and no loop.
#[test]
fn a_later_handler_may_pass_faults_on() {
    assert_eq!(run("chaining").signal(), Some(libc::SIGSEGV));
}

#[test]
#[ignore = "no test by itself, but the process of those in this file"]
fn process() {
    let Ok(task) = env::var(TASK) else {
        return;
    };
    let handler = match task.as_str() {
        "chaining" => pass_on,
        _ => repair,
    };
    match task.as_str() {
        "earlier" => install(handler),
        // In place of the standard library's handlers.
        "default" | "sent" => {
            for number in [Signal::SIGSEGV, Signal::SIGBUS] {
                // SAFETY: no handler.
                unsafe { signal(number, SigHandler::SigDfl) }.unwrap();
            }
        }
        _ => {}
    }
    let device = device(own_address(), None);
    let side = || Side::with(&device, PAGE, Backing::Private);
    let first = side();
    if matches!(task.as_str(), "later" | "chaining") {
        install(handler);
    }
    let second = side();
    if task == "sent" {
        raise(Signal::SIGBUS).unwrap();
    }
    PAGE_OF.store(second.memory.addr() as usize, Ordering::Relaxed);
    second.memory.unmap(0, PAGE);
    if matches!(task.as_str(), "earlier" | "later") {
        first.connect(second.key(), 17);
        second.connect(first.key(), 17);
        first.write(1, 0, 8, second.key());
        assert_eq!(first.wait(1)[0].status, Status::RemoteAccess);
        assert_eq!(HANDLED.load(Ordering::Relaxed), 0);
    }
    second.memory.fill(0, 1, 7);
    assert_eq!(HANDLED.load(Ordering::Relaxed), 1);
    process::exit(0);
}

static PAGE_OF: AtomicUsize = AtomicUsize::new(0);
static HANDLED: AtomicUsize = AtomicUsize::new(0);
static REPLACED: AtomicUsize = AtomicUsize::new(0);

type Handler = extern "C" fn(c_int, *mut siginfo_t, *mut c_void);

fn install(handler: Handler) {
    // SAFETY: zeroes are an action; the handlers call async-signal-safe functions only.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO;
        let mut replaced: libc::sigaction = std::mem::zeroed();
        assert_eq!(libc::sigaction(libc::SIGSEGV, &action, &mut replaced), 0);
        REPLACED.store(replaced.sa_sigaction, Ordering::Relaxed);
    }
}

/// As a runtime that makes pages accessible on use.
extern "C" fn repair(_: c_int, info: *mut siginfo_t, _: *mut c_void) {
    let page = PAGE_OF.load(Ordering::Relaxed);
    // SAFETY: the kernel's.
    let at = unsafe { (*info).si_addr() }.addr();
    if HANDLED.fetch_add(1, Ordering::Relaxed) > 0 || at != page {
        process::abort();
    }
    // SAFETY: the test's page, to which there is no reference.
    unsafe {
        libc::mprotect(
            ptr::with_exposed_provenance_mut(page),
            PAGE,
            libc::PROT_READ | libc::PROT_WRITE,
        )
    };
}

/// As a crash reporter.
extern "C" fn pass_on(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    if HANDLED.fetch_add(1, Ordering::Relaxed) > 0 {
        process::abort();
    }
    // SAFETY: the device's handler, which has this type.
    let next = unsafe { std::mem::transmute::<usize, Handler>(REPLACED.load(Ordering::Relaxed)) };
    next(signal, info, context);
}
