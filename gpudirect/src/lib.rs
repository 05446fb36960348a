//! GPU memory on queue pairs.

pub mod heap;
pub mod proxy;
pub mod stream;
mod words;
