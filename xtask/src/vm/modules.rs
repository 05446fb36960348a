//! The kernel's modules: their files, dependencies, and load order.
//!
//! The guest's kernel is only unpacked, so there is no `modules.dep` of `depmod`: dependencies are
//! read from the `depends=` field of each module's `.modinfo` section.

use anyhow::{Context, Result, bail};
use std::{
    collections::{BTreeMap, HashSet},
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

pub(crate) struct Modules {
    folder: PathBuf,
    by_name: BTreeMap<String, Module>,
}

struct Module {
    path: PathBuf,
    depends: Vec<String>,
}

impl Modules {
    /// Reads every `.ko` below `folder` (`…/lib/modules/VERSION`).
    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let mut modules = Self {
            folder: folder.to_owned(),
            by_name: BTreeMap::new(),
        };
        let mut pending = vec![folder.to_owned()];
        while let Some(next) = pending.pop() {
            for entry in fs::read_dir(&next).with_context(|| format!("cannot list {}", next.display()))? {
                let path = entry?.path();
                if path.is_dir() {
                    pending.push(path);
                } else if path.extension().is_some_and(|extension| extension == "ko") {
                    modules.add(&path)?;
                }
            }
        }
        Ok(modules)
    }

    fn add(&mut self, path: &Path) -> Result<()> {
        let content = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        let path = path.strip_prefix(&self.folder).unwrap_or(path).to_owned();
        self.by_name.insert(
            canonical(&stem),
            Module {
                path,
                depends: depends(&content),
            },
        );
        Ok(())
    }

    /// Each after its dependencies, `wanted` in the order given.
    pub(crate) fn load_order(&self, wanted: &[&str]) -> Result<Vec<(String, PathBuf)>> {
        let mut order = Vec::new();
        let mut seen = HashSet::new();
        for name in wanted {
            self.visit(name, &mut seen, &mut order)?;
        }
        Ok(order)
    }

    /// `depends=` lists no built-in module: one without a file is missing.
    fn visit(&self, name: &str, seen: &mut HashSet<String>, order: &mut Vec<(String, PathBuf)>) -> Result<()> {
        let Some(module) = self.by_name.get(name) else {
            bail!("the kernel in {} has no module {name}", self.folder.display());
        };
        if !seen.insert(name.to_owned()) {
            return Ok(());
        }
        for needed in &module.depends {
            self.visit(needed, seen, order)?;
        }
        order.push((name.to_owned(), self.folder.join(&module.path)));
        Ok(())
    }

    /// For `modprobe` in the guest; without modules whose dependencies were not unpacked.
    pub(crate) fn dependency_file(&self) -> String {
        let mut text = String::new();
        for (name, module) in &self.by_name {
            let Ok(order) = self.load_order(&[name]) else { continue };
            let _ = write!(text, "{}:", module.path.display());
            // `modprobe` loads this list from its end, then the module itself.
            for (_, path) in order[..order.len() - 1].iter().rev() {
                let _ = write!(text, " {}", path.strip_prefix(&self.folder).unwrap_or(path).display());
            }
            text.push('\n');
        }
        text
    }
}

/// File names use `-` and `_` alike; the kernel's names have `_` only.
fn canonical(name: &str) -> String {
    name.replace('-', "_")
}

/// From `.modinfo`: NUL-terminated strings inside the ELF file.
fn depends(module: &[u8]) -> Vec<String> {
    let field = b"\0depends=";
    let Some(start) = module.windows(field.len()).position(|window| window == field) else {
        return Vec::new();
    };
    let value = &module[start + field.len()..];
    let end = value.iter().position(|byte| *byte == 0).unwrap_or(value.len());
    let value = String::from_utf8_lossy(&value[..end]);
    value
        .split(',')
        .filter(|name| !name.is_empty())
        .map(canonical)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn modules() -> Modules {
        let module = |path: &str, modinfo: &[u8]| Module {
            path: path.into(),
            depends: depends(modinfo),
        };
        let by_name = BTreeMap::from([
            (
                "rxe".to_owned(),
                module(
                    "kernel/rxe.ko",
                    b"\0license=GPL\0depends=ib-uverbs,ib_core\0retpoline=Y\0",
                ),
            ),
            (
                "ib_uverbs".to_owned(),
                module("kernel/ib_uverbs.ko", b"\0depends=ib_core\0"),
            ),
            ("ib_core".to_owned(), module("kernel/ib_core.ko", b"\0depends=\0")),
            ("veth".to_owned(), module("kernel/veth.ko", b"nothing of the kind")),
            ("torn".to_owned(), module("kernel/torn.ko", b"\0depends=not_unpacked\0")),
        ]);
        Modules {
            folder: "/m".into(),
            by_name,
        }
    }

    #[test]
    fn dependencies_come_first_and_once() {
        let order = modules().load_order(&["veth", "rxe"]).unwrap();
        let names: Vec<_> = order.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["veth", "ib_core", "ib_uverbs", "rxe"]);
        assert_eq!(order[3].1, Path::new("/m/kernel/rxe.ko"));
    }

    #[test]
    fn a_missing_module_is_named() {
        for (wanted, missing) in [("siw", "siw"), ("torn", "not_unpacked")] {
            let error = modules().load_order(&[wanted]).unwrap_err().to_string();
            assert!(error.contains(missing), "{error}");
        }
    }

    #[test]
    fn the_dependency_file_lists_the_deepest_last() {
        let text = modules().dependency_file();
        assert!(
            text.contains("kernel/rxe.ko: kernel/ib_uverbs.ko kernel/ib_core.ko\n"),
            "{text}"
        );
        assert!(text.contains("kernel/veth.ko:\n"), "{text}");
        assert!(!text.contains("torn"), "{text}");
    }
}
