//! Programs that must not compile, one per misuse of verbs, each with the compiler's message.

#[test]
fn misuse_does_not_compile() {
    let cases = trybuild::TestCases::new();
    cases.compile_fail("tests/misuse/*.rs");
}
