//! Drives `doorbell_fuzz::connection_manager`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| doorbell_fuzz::connection_manager(data));
