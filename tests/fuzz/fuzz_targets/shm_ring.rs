//! Drives `doorbell_fuzz::shm_ring`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| doorbell_fuzz::shm_ring(data));
