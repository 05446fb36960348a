//! Drives `doorbell_fuzz::endpoint`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| doorbell_fuzz::endpoint(data));
