//! Drives `doorbell_fuzz::classic`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| doorbell_fuzz::classic(data));
