//! Drives `doorbell_fuzz::bootstrap`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| doorbell_fuzz::bootstrap(data));
