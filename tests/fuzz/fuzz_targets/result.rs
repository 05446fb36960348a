//! Drives `doorbell_fuzz::result`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| doorbell_fuzz::result(data));
