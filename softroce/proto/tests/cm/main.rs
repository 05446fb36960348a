//! Communication management: two managers in virtual time, with a network between them that loses, repeats and reorders.

mod exchanges;
mod hostile;
mod net;
mod random;
mod services;
