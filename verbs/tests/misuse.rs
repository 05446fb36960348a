//! Programs that must not compile, one per way of misusing verbs, each with what the compiler says.

#[test]
fn misuse_does_not_compile() {
    let cases = trybuild::TestCases::new();
    cases.compile_fail("tests/misuse/*.rs");
}
