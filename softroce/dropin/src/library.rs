//! The first call of any program, ibv_get_device_list(3), which also starts logging.

use core::ffi::c_int;
use std::sync::Once;

use doorbell_softroce_ibverbs::API;
use doorbell_verbs_sys::ibv_device;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

pub(crate) unsafe extern "C" fn get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    static LOG: Once = Once::new();
    LOG.call_once(log);
    // SAFETY: the caller's contract is the same.
    unsafe { (API.get_device_list)(count) }
}

/// To stderr, at the level of `DOORBELL_LOG`: `error`, `warn`, `info`, `debug` or `trace`.
fn log() {
    let Some(wanted) = doorbell_trust::text_variable("DOORBELL_LOG") else {
        return;
    };
    if wanted.is_empty() {
        return;
    }
    let level = wanted.parse().unwrap_or(LevelFilter::WARN);
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .without_time()
        .with_ansi(false)
        .with_target(false);
    // The library's own subscriber: no other code uses this copy of `tracing`.
    let _ = tracing_subscriber::registry().with(lines).with(level).try_init();
}
