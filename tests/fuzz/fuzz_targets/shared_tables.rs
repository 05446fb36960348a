//! Drives `doorbell_fuzz::shared_tables`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| doorbell_fuzz::shared_tables(data));
