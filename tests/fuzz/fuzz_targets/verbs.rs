//! Drives `doorbell_fuzz::verbs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| doorbell_fuzz::verbs(data));
