//! Sizes, alignments, offsets and constants against `<infiniband/verbs.h>` and `<rdma/rdma_cma.h>`:
//! a generated C program prints the compiler's values.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Output};

use doorbell_verbs_sys::inline;

use crate::layout::{CONSTANTS, TYPES};
use crate::missing;

const EXTENDED: &str = "__VERBS_ABI_IS_EXTENDED";

#[test]
fn bindings_agree_with_the_c_headers() {
    let dir = tempfile::tempdir().unwrap();
    if !has_headers(dir.path()) {
        return missing("no C compiler with <rdma/rdma_cma.h> (gcc and librdmacm-dev)");
    }
    let c = compile_and_run(dir.path());
    let mut compared = 0;
    let mut differences = Vec::new();
    let mut compare = |what: String, rust: i128| {
        compared += 1;
        match c.get(&what) {
            Some(&value) if value == rust => {}
            value => differences.push(format!("{what}: C {value:?}, Rust {rust}")),
        }
    };
    for ty in TYPES {
        compare(format!("sizeof {}", ty.c), ty.size as i128);
        compare(format!("alignof {}", ty.c), ty.align as i128);
        for field in ty.fields {
            compare(format!("offsetof {} {}", ty.c, field.c), field.offset as i128);
            compare(format!("sizeof {} {}", ty.c, field.c), field.size as i128);
        }
    }
    for &(name, value) in CONSTANTS {
        compare(format!("value {name}"), value);
    }
    // A macro, so it is not among the constants.
    compare(EXTENDED.to_owned(), inline::VERBS_ABI_IS_EXTENDED.addr() as i128);
    assert!(
        differences.is_empty(),
        "{} of {compared} differ:\n{}",
        differences.len(),
        differences.join("\n")
    );
    assert_eq!(compared, c.len());
    // An empty table would pass too: rdma-core 44 has over 100 types and 400 constants.
    assert!(
        TYPES.len() > 100 && CONSTANTS.len() > 400,
        "{} types, {} constants",
        TYPES.len(),
        CONSTANTS.len()
    );
}

pub(crate) fn has_headers(dir: &Path) -> bool {
    let source = dir.join("probe.c");
    std::fs::write(&source, "#include <rdma/rdma_cma.h>\n").unwrap();
    Command::new("cc")
        .arg("-fsyntax-only")
        .arg(source)
        .output()
        .is_ok_and(|output| output.status.success())
}

fn compile_and_run(dir: &Path) -> HashMap<String, i128> {
    let (source, program) = (dir.join("layout.c"), dir.join("layout"));
    std::fs::write(&source, c_program()).unwrap();
    run(Command::new("cc").args(["-std=gnu11", "-o"]).arg(&program).arg(&source));
    let output = run(&mut Command::new(&program));
    String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| {
            let (what, value) = line.rsplit_once(' ').unwrap();
            (what.to_owned(), value.parse().unwrap())
        })
        .collect()
}

fn c_program() -> String {
    let mut c = String::from(
        "#include <stddef.h>\n#include <stdio.h>\n#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\nint main(void) {\n",
    );
    for ty in TYPES {
        let t = ty.c;
        let _ = writeln!(
            c,
            "printf(\"sizeof {t} %zu\\nalignof {t} %zu\\n\", sizeof({t}), _Alignof({t}));"
        );
        for field in ty.fields {
            let f = field.c;
            let _ = writeln!(
                c,
                "printf(\"offsetof {t} {f} %zu\\nsizeof {t} {f} %zu\\n\", offsetof({t}, {f}), sizeof((({t} *)0)->{f}));"
            );
        }
    }
    for (name, _) in CONSTANTS {
        let _ = writeln!(c, "printf(\"value {name} %lld\\n\", (long long)({name}));");
    }
    let _ = writeln!(c, "printf(\"{EXTENDED} %zu\\n\", (size_t){EXTENDED});");
    c.push_str("return 0;\n}\n");
    c
}

pub(crate) fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    output
}
