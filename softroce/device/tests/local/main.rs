//! Lanes between devices on one address: memory and queue pairs that go while others copy from them, and processes that are killed or stopped.

mod processes;
mod races;
mod side;
