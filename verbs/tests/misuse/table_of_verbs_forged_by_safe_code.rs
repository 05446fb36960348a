//! A table of verbs, or a modified copy of one, needs the unsafe `Promise` of sound functions.
#![forbid(unsafe_code)]

use core::ffi::c_char;

use doorbell_verbs_sys::{Api, Promise, ibv_device};

extern "C" fn name(_: *mut ibv_device) -> *const c_char {
    core::ptr::without_provenance(1)
}

fn changed(honest: &'static Api) -> Api {
    Api { get_device_name: name, ..*honest }
}

fn copied(honest: &'static Api) -> Api {
    honest.clone()
}

fn promised() -> Promise {
    Promise::given()
}

fn main() {}
