//! The library's exports, compared with those of the system's three, read as files.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use crate::{built, missing};

/// Versions that the newest distributions' binaries import, and the system's library may lack.
const NEWER: [&str; 8] = [
    "MLX5_1.25",
    "MLX5_1.25.1",
    "MLX5_1.26",
    "MLX5_1.27",
    "IBVERBS_1.15",
    "IBVERBS_PRIVATE_57",
    "IBVERBS_PRIVATE_59",
    "IBVERBS_PRIVATE_65",
];

/// As `FUNC ibv_reg_mr@@IBVERBS_1.1`; `None` where readelf(1) or the file is missing.
fn exported(library: &Path) -> Option<BTreeSet<String>> {
    let output = Command::new("readelf")
        .args(["-W", "--dyn-syms"])
        .arg(library)
        .output()
        .ok()?;
    if !output.status.success() {
        return None;
    }
    let text = String::from_utf8(output.stdout).expect("readelf writes text");
    let lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let exported = lines.filter_map(|words| match words[..] {
        [_, _, _, kind @ ("FUNC" | "OBJECT"), "GLOBAL", _, section, name] if section != "UND" && section != "ABS" => {
            Some(format!("{kind} {name}"))
        }
        _ => None,
    });
    Some(exported.collect())
}

/// The path of the system's library, as the dynamic loader resolves it.
fn system(name: &str) -> Option<String> {
    let output = Command::new("/sbin/ldconfig").arg("-p").output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let line = text
        .lines()
        .find(|line| line.trim_start().starts_with(name) && line.contains("64"))?;
    Some(line.rsplit_once("=> ")?.1.to_owned())
}

#[test]
fn every_symbol_of_the_systems_libraries_is_there_at_every_version() {
    let ours = exported(&built().join("libdoorbell_dropin.so"));
    let system = |name| system(name).and_then(|path| exported(Path::new(&path)));
    let (verbs, cm, mlx5) = (
        system("libibverbs.so.1 "),
        system("librdmacm.so.1 "),
        system("libmlx5.so.1 "),
    );
    let (Some(ours), Some(verbs), Some(cm), Some(mlx5)) = (ours, verbs, cm, mlx5) else {
        return missing(
            "libibverbs.so.1, librdmacm.so.1, libmlx5.so.1 (libibverbs1, librdmacm1, ibverbs-providers) and readelf (binutils)",
        );
    };
    for (theirs, at_least) in [(&verbs, 150), (&cm, 60), (&mlx5, 125)] {
        let absent: Vec<_> = theirs.difference(&ours).collect();
        assert!(absent.is_empty(), "not in ours: {absent:#?}");
        assert!(theirs.len() > at_least, "only {} symbols were found", theirs.len());
    }
    // Nothing else is exported that could shadow a symbol of the program.
    let of_newer = |symbol: &str| NEWER.iter().any(|version| symbol.ends_with(version));
    let theirs = &(&verbs | &cm) | &mlx5;
    let more: Vec<_> = ours.difference(&theirs).filter(|symbol| !of_newer(symbol)).collect();
    assert!(more.is_empty(), "only in ours: {more:#?}");
}

#[test]
fn the_private_symbols_are_there_for_newer_drivers_too() {
    let Some(ours) = exported(&built().join("libdoorbell_dropin.so")) else {
        return missing("readelf (binutils)");
    };
    let at = |version: &str| {
        let names = ours.iter().filter_map(|symbol| symbol.split_once('@'));
        let names = names.filter(|(_, at)| at.trim_start_matches('@') == version);
        names
            .map(|(name, _)| name.replace(version.rsplit('_').next().unwrap_or(""), ""))
            .collect::<BTreeSet<_>>()
    };
    let first = at("IBVERBS_PRIVATE_34");
    assert!(first.len() > 60, "{}", first.len());
    for version in NEWER.iter().filter(|version| version.starts_with("IBVERBS_PRIVATE")) {
        assert_eq!(at(version), first, "{version}");
    }
}

#[test]
fn the_library_identifies_itself() {
    let output = Command::new("readelf")
        .args(["-W", "-d"])
        .arg(built().join("libdoorbell_dropin.so"))
        .output();
    let Ok(output) = output else {
        return missing("readelf (binutils)");
    };
    let text = String::from_utf8(output.stdout).expect("readelf writes text");
    assert!(text.contains("Library soname: [libibverbs.so.1]"), "{text}");
    assert!(
        text.contains("NODELETE"),
        "its threads' code could be taken from under them: {text}"
    );
}
