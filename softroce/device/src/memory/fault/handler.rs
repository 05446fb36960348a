//! The handler of SIGSEGV and SIGBUS, and its place among the application's.
//!
//! It is installed at the first registration. What is no fault of a routine goes to the handler
//! that it has replaced, with the mask, the stack and the arguments that this would have had from
//! the kernel. An application that installs its own later replaces it; the next registration
//! installs it again, before the application's. As that may pass faults on to what *it* has
//! replaced, each installation is a function of its own, which passes them on to its own
//! predecessor: a chain, and no loop.

use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;

use libc::{SIG_DFL, SIG_IGN, c_int, c_void, sigaction, siginfo_t};
use parking_lot::Mutex;

use super::arch::{detect, program_counter};
use super::routines::resume_from;

/// How often it is installed. An application replaces it once; two copies of this crate in one
/// process, as with the drop-in library, may replace each other's for ever.
const LEVELS: usize = 4;
const SIGNALS: [c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];
/// A static, so that each has one address.
static HANDLERS: [Handler; LEVELS] = [handle::<0>, handle::<1>, handle::<2>, handle::<3>];

type Handler = extern "C" fn(c_int, *mut siginfo_t, *mut c_void);

/// The handlers that those of each level have replaced. A handler reads them without a lock.
static REPLACED: [[OnceLock<sigaction>; SIGNALS.len()]; LEVELS] =
    [const { [const { OnceLock::new() }; SIGNALS.len()] }; LEVELS];

/// Makes faults of the routines errors from here on, unless the application replaces the handler.
pub(in crate::memory) fn install() {
    static LEVEL: Mutex<[usize; SIGNALS.len()]> = Mutex::new([0; SIGNALS.len()]);
    let mut levels = LEVEL.lock();
    if levels.iter().all(|level| *level == 0) {
        detect();
    }
    for (index, signal) in SIGNALS.into_iter().enumerate() {
        let level = &mut levels[index];
        let Some(current) = exchange(signal, None).filter(|current| !is_own(current)) else {
            continue;
        };
        let Some((replaced, handler)) = REPLACED.get(*level).zip(HANDLERS.get(*level)) else {
            tracing::debug!("the handler of signal {signal} has been replaced {LEVELS} times; it stays as it is");
            continue;
        };
        *level += 1;
        let own = action_before(replaced[index].get_or_init(|| current), *handler);
        if exchange(signal, Some(&own)).is_none() {
            tracing::debug!("no handler of signal {signal} can be installed");
        }
    }
}

fn is_own(action: &sigaction) -> bool {
    HANDLERS.iter().any(|own| *own as usize == action.sa_sigaction)
}

/// As `next`, to which it passes faults: the kernel does for it what it would do for that.
fn action_before(next: &sigaction, handler: Handler) -> sigaction {
    let mut action = *next;
    action.sa_sigaction = handler as usize;
    action.sa_flags = if is_function(next) {
        next.sa_flags & !libc::SA_RESETHAND | libc::SA_SIGINFO
    } else {
        libc::SA_SIGINFO | libc::SA_ONSTACK
    };
    action
}

fn is_function(action: &sigaction) -> bool {
    action.sa_sigaction != SIG_DFL && action.sa_sigaction != SIG_IGN
}

/// sigaction(2): returns the former action.
fn exchange(signal: c_int, new: Option<&sigaction>) -> Option<sigaction> {
    let mut former = MaybeUninit::uninit();
    let new = new.map_or(ptr::null(), ptr::from_ref);
    // SAFETY: null or an action, whose handler follows `handle`'s rules; the former is written
    // before it is read.
    unsafe { (sigaction(signal, new, former.as_mut_ptr()) == 0).then(|| former.assume_init()) }
}

/// Calls only what is async-signal-safe (signal-safety(7)).
extern "C" fn handle<const LEVEL: usize>(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel's, as the handler has SA_SIGINFO. A code above 0 is the kernel's, thus a
    // fault of the interrupted instruction: others may interrupt a routine at any other.
    let is_fault = unsafe { (*info).si_code } > 0;
    // SAFETY: as above.
    let pc = unsafe { program_counter(context) };
    if is_fault && let Some(resume) = resume_from(*pc as usize) {
        *pc = resume as _;
        return;
    }
    let index = usize::from(signal != SIGNALS[0]);
    if let Some(next) = REPLACED[LEVEL][index].get() {
        // SAFETY: the kernel's arguments; `next` was installed for this signal.
        unsafe { pass_on(next, signal, info, context) };
    }
}

/// Does what the kernel would do for the signal if `next` were installed.
///
/// # Safety
/// `info` and `context` are the kernel's, and `next` is an action that sigaction(2) returned.
unsafe fn pass_on(next: &sigaction, signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel's, by contract.
    let code = unsafe { (*info).si_code };
    if !is_function(next) {
        // A fault cannot be ignored (signal(7)).
        if next.sa_sigaction == SIG_DFL || code > 0 {
            default(signal, code);
        }
        return;
    }
    if next.sa_flags & libc::SA_RESETHAND != 0 {
        set_default(signal);
    }
    if next.sa_flags & libc::SA_SIGINFO == 0 {
        // SAFETY: a handler without SA_SIGINFO has this type.
        let handler = unsafe { std::mem::transmute::<usize, extern "C" fn(c_int)>(next.sa_sigaction) };
        handler(signal);
    } else {
        // SAFETY: a handler with SA_SIGINFO has this type.
        let handler = unsafe { std::mem::transmute::<usize, Handler>(next.sa_sigaction) };
        handler(signal, info, context);
    }
}

fn set_default(signal: c_int) {
    // SAFETY: the default action calls no code.
    unsafe { libc::signal(signal, SIG_DFL) };
}

/// Ends the process by the default action: the instruction faults again, or the signal is sent
/// again where there was no instruction.
fn default(signal: c_int, code: c_int) {
    set_default(signal);
    if code <= 0 || signal == libc::SIGBUS && code == libc::BUS_MCEERR_AO {
        // SAFETY: async-signal-safe; the signal is blocked until the handler returns.
        unsafe { libc::raise(signal) };
    }
}
