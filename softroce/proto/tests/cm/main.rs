//! Two managers in virtual time over a lossy, duplicating and reordering network.

mod bounds;
mod exchanges;
mod hostile;
mod net;
mod random;
mod services;
