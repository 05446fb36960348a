//! The copy engines.

mod script;
