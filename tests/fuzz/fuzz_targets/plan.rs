//! Drives `doorbell_fuzz::plan`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| doorbell_fuzz::plan(data));
