//! Running a test.

mod pattern;
