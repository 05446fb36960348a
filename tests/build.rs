//! Generates tables for `abi/` from the bindings of verbs-sys, so that nothing in them can remain
//! uncompared: every struct, union, field path, constant and symbol.
//!
//! The parser depends on rustfmt's formatting; what it misreads fails to compile, in Rust or in C.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// Types without a tag in C, whose fields are compared through the enclosing named type.
const UNNAMED_IN_C: &[&str] = &[
    "ibv_gid_global",
    "ibv_async_event_element",
    "ibv_odp_transport_caps",
    "ibv_wc_imm",
    "ibv_send_wr_imm",
    "ibv_send_wr_remote",
    "ibv_send_wr_rdma",
    "ibv_send_wr_atomic",
    "ibv_send_wr_ud",
    "ibv_send_wr_qp_type",
    "ibv_send_wr_xrc",
    "ibv_send_wr_extra",
    "ibv_send_wr_bind_mw",
    "ibv_send_wr_tso",
];

struct Aggregate {
    keyword: &'static str,
    fields: Vec<(String, String)>,
}

impl Aggregate {
    /// Declared but not defined in the headers.
    fn is_opaque(&self) -> bool {
        self.fields
            .iter()
            .all(|(name, _)| matches!(name.as_str(), "_unused" | "_address"))
    }
}

fn main() {
    let sys = Path::new(env!("CARGO_MANIFEST_DIR")).join("../verbs/sys/src");
    let bindings = read(&sys.join("bindings.rs")) + &read(&sys.join("rdmacm/bindings.rs"));
    let aggregates = aggregates(&bindings);
    let mut out = String::from(
        "use libc::{\n    pthread_cond_t, pthread_mutex_t, sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage, socklen_t, timespec,\n};\n",
    );
    write_types(&mut out, &aggregates);
    write_constants(&mut out, &bindings);
    let tables = [("libibverbs.so.1", "api.rs"), ("librdmacm.so.1", "rdmacm/mod.rs")];
    write_symbols(
        &mut out,
        &tables.map(|(library, file)| (library, read(&sys.join(file)))),
    );
    let target = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("layout.rs");
    fs::write(&target, out).expect("OUT_DIR is writable");
}

fn read(path: &Path) -> String {
    println!("cargo::rerun-if-changed={}", path.display());
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn aggregates(bindings: &str) -> BTreeMap<String, Aggregate> {
    let mut found = BTreeMap::new();
    for (keyword, marker) in [("struct", "\npub struct "), ("union", "\npub union ")] {
        for chunk in bindings.split(marker).skip(1) {
            let (name, rest) = chunk.split_once(" {").expect("an opening brace follows the name");
            let (body, _) = rest.split_once("\n}").expect("a closing brace ends the body");
            found.insert(
                name.to_owned(),
                Aggregate {
                    keyword,
                    fields: fields(body),
                },
            );
        }
    }
    found
}

/// Splits a body at the commas outside all brackets.
fn fields(body: &str) -> Vec<(String, String)> {
    let body = body.split_whitespace().collect::<Vec<_>>().join(" ");
    let (mut depth, mut before) = (0, ' ');
    body.split(|c| {
        depth += match c {
            '(' | '[' | '<' => 1,
            ')' | ']' => -1,
            // The arrow of a return type closes nothing.
            '>' if before != '-' => -1,
            _ => 0,
        };
        before = c;
        c == ',' && depth == 0
    })
    .filter_map(|field| {
        let field = field.trim();
        let (name, ty) = field.strip_prefix("pub ").unwrap_or(field).split_once(": ")?;
        Some((name.to_owned(), ty.to_owned()))
    })
    .collect()
}

fn is_unnamed(name: &str) -> bool {
    UNNAMED_IN_C.contains(&name) || name.contains("__bindgen_ty")
}

struct Leaf {
    rust: String,
    c: String,
    ty: String,
}

fn leaves(
    aggregates: &BTreeMap<String, Aggregate>,
    fields: &[(String, String)],
    rust: &str,
    c: &str,
    out: &mut Vec<Leaf>,
) {
    for (name, ty) in fields {
        let rust = format!("{rust}{name}");
        // Members of an unnamed member are the outer type's own members in C.
        let own = if name.starts_with("anon_") {
            None
        } else {
            Some(format!("{c}{}", name.trim_end_matches('_')))
        };
        if let Some(c) = &own {
            out.push(Leaf {
                rust: rust.clone(),
                c: c.clone(),
                ty: ty.clone(),
            });
        }
        if let Some(inner) = aggregates.get(ty).filter(|_| is_unnamed(ty)) {
            let c = own.map_or_else(|| c.to_owned(), |own| format!("{own}."));
            leaves(aggregates, &inner.fields, &format!("{rust}."), &c, out);
        }
    }
}

fn write_types(out: &mut String, aggregates: &BTreeMap<String, Aggregate>) {
    out.push_str("pub(crate) static TYPES: &[Type] = &[\n");
    for (name, aggregate) in aggregates
        .iter()
        .filter(|(name, a)| !is_unnamed(name) && !a.is_opaque())
    {
        let mut found = Vec::new();
        leaves(aggregates, &aggregate.fields, "", "", &mut found);
        write_type(out, &format!("{} {name}", aggregate.keyword), name, &found);
    }
    out.push_str("];\n");
}

fn write_type(out: &mut String, c: &str, rust: &str, leaves: &[Leaf]) {
    let _ = writeln!(
        out,
        "Type {{ c: {c:?}, size: size_of::<{rust}>(), align: align_of::<{rust}>(), fields: &["
    );
    for Leaf { rust: path, c, ty } in leaves {
        let _ = writeln!(
            out,
            "Field {{ c: {c:?}, offset: offset_of!({rust}, {path}), size: size_of::<{ty}>() }},"
        );
    }
    out.push_str("] },\n");
}

fn write_constants(out: &mut String, bindings: &str) {
    out.push_str("pub(crate) static CONSTANTS: &[(&str, i128)] = &[\n");
    for line in bindings.lines() {
        if let Some((name, _)) = line.strip_prefix("pub const ").and_then(|rest| rest.split_once(':')) {
            let _ = writeln!(out, "({name:?}, {name} as i128),");
        }
    }
    out.push_str("];\n");
}

fn write_symbols(out: &mut String, tables: &[(&str, String)]) {
    out.push_str("pub(crate) static SYMBOLS: &[(&str, &str)] = &[\n");
    for (library, api) in tables {
        let table = api
            .split_once("\napi! {")
            .expect("a table is filled with the macro api!")
            .1;
        for (before, after) in table.lines().filter_map(|line| line.split_once(" = \"")) {
            if before.trim_start().starts_with("fn ") {
                let symbol = after.split('"').next().unwrap_or_default();
                let _ = writeln!(out, "({library:?}, {symbol:?}),");
            }
        }
    }
    out.push_str("];\n");
}
