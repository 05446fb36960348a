//! Tests of parsing and writing.
