//! A software bill of materials, in CycloneDX 1.5: <https://cyclonedx.org/docs/1.5/json/>.

use super::build::PACKAGES;
use crate::{
    ci::{command, stdout},
    sanitize, workspace,
};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::PathBuf,
};

/// The version of the workspace, and the text. Without a time and a serial number, so that the same
/// sources give the same text.
pub(super) fn make() -> Result<(String, String)> {
    let lock = fs::read_to_string(workspace().join("Cargo.lock")).context("cannot read Cargo.lock")?;
    let bill = bill(&Graph::of(&metadata()?, &PACKAGES)?, &checksums(&lock));
    let version = bill["metadata"]["component"]["version"].as_str().unwrap_or_default();
    Ok((version.to_owned(), format!("{bill:#}\n")))
}

/// Where the sources of the programs are kept.
pub(super) fn repository() -> Result<String> {
    let graph = Graph::of(&metadata()?, &PACKAGES)?;
    Ok(field(&graph.packages[&graph.roots[0]], "repository"))
}

/// A package of others.
pub(super) struct Foreign {
    /// With its version.
    pub(super) name: String,
    /// An SPDX expression.
    pub(super) licence: String,
    /// Of its sources.
    pub(super) folder: PathBuf,
}

/// The packages of others that the programs and libraries are built from.
pub(super) fn foreign() -> Result<Vec<Foreign>> {
    let graph = Graph::of(&metadata()?, &PACKAGES)?;
    let foreign = graph.dependencies.keys().map(|id| &graph.packages[id]);
    let foreign = foreign.filter(|package| !package["source"].is_null());
    let mut foreign: Vec<_> = foreign
        .map(|package| Foreign {
            name: format!("{} {}", field(package, "name"), field(package, "version")),
            licence: licence(package),
            folder: PathBuf::from(field(package, "manifest_path")).with_file_name(""),
        })
        .collect();
    foreign.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(foreign)
}

fn metadata() -> Result<Value> {
    let mut cargo = command(&["metadata", "--format-version", "1", "--locked"]);
    cargo.args(["--filter-platform", &sanitize::host()?]);
    serde_json::from_slice(&stdout(&mut cargo)?).context("cargo's metadata is no JSON")
}

/// By name and version, of packages from the registry.
fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    let field = |package: &str, name: &str| {
        let line = package.lines().find_map(|line| line.strip_prefix(name));
        line.map(|value| value.trim_matches(['"', ' ', '=']).to_owned())
    };
    let packages = lock.split("[[package]]").skip(1);
    packages
        .filter_map(|package| {
            let key = (field(package, "name = ")?, field(package, "version = ")?);
            Some((key, field(package, "checksum = ")?))
        })
        .collect()
}

/// What is installed, and what it is built from.
struct Graph {
    packages: BTreeMap<String, Value>,
    /// The packages that are installed.
    roots: Vec<String>,
    /// By package, those that it is built from.
    dependencies: BTreeMap<String, BTreeSet<String>>,
}

impl Graph {
    fn of(metadata: &Value, installed: &[&str]) -> Result<Self> {
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let id = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let by_id = |values: &Value| -> BTreeMap<String, Value> {
            list(values)
                .into_iter()
                .map(|value| (id(&value["id"]), value))
                .collect()
        };
        let (packages, nodes) = (by_id(&metadata["packages"]), by_id(&metadata["resolve"]["nodes"]));
        let of_workspace = |name: &&str| {
            let mut members = packages.iter().filter(|(_, package)| package["source"].is_null());
            let member = members.find(|(_, package)| package["name"] == **name);
            member
                .map(|(id, _)| id.clone())
                .with_context(|| format!("no member {name}"))
        };
        let roots: Vec<_> = installed.iter().map(of_workspace).collect::<Result<_>>()?;
        let mut dependencies = BTreeMap::new();
        let mut to_visit = roots.clone();
        while let Some(package) = to_visit.pop() {
            if dependencies.contains_key(&package) {
                continue;
            }
            let node = nodes.get(&package).with_context(|| format!("no package {package}"))?;
            let of_a_build =
                |dependency: &Value| list(&dependency["dep_kinds"]).iter().any(|kind| kind["kind"] != "dev");
            let needed: BTreeSet<_> = list(&node["deps"])
                .iter()
                .filter(|dependency| of_a_build(dependency))
                .map(|dependency| id(&dependency["pkg"]))
                .collect();
            to_visit.extend(needed.iter().cloned());
            dependencies.insert(package, needed);
        }
        Ok(Graph {
            packages,
            roots,
            dependencies,
        })
    }
}

fn bill(graph: &Graph, checksums: &BTreeMap<(String, String), String>) -> Value {
    let Graph {
        packages,
        roots,
        dependencies,
    } = graph;
    let reference = |id: &String| purl(&packages[id]);
    let components: BTreeMap<_, _> = dependencies
        .keys()
        .map(|id| (reference(id), component(&packages[id], checksums)))
        .collect();
    let mut edges: BTreeMap<_, Vec<_>> = dependencies
        .iter()
        .map(|(id, needed)| (reference(id), needed.iter().map(reference).collect()))
        .collect();
    let version = packages
        .get(&roots[0])
        .map_or(Value::Null, |first| first["version"].clone());
    let whole = format!("pkg:generic/doorbell@{}", version.as_str().unwrap_or_default());
    edges.insert(whole.clone(), roots.iter().map(reference).collect());
    json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": { "component": {
            "type": "application", "name": "doorbell", "version": version, "bom-ref": whole, "purl": whole,
        }},
        "components": components.into_values().collect::<Vec<_>>(),
        "dependencies": edges.into_iter().map(|(of, on)| json!({ "ref": of, "dependsOn": on })).collect::<Vec<_>>(),
    })
}

/// A package URL: <https://github.com/package-url/purl-spec>.
fn purl(package: &Value) -> String {
    format!(
        "pkg:cargo/{}@{}",
        field(package, "name"),
        field(package, "version").replace('+', "%2B")
    )
}

fn field(package: &Value, name: &str) -> String {
    package[name].as_str().unwrap_or_default().to_owned()
}

/// Older manifests separate the alternatives by a slash, which is no SPDX expression.
fn licence(package: &Value) -> String {
    field(package, "license").replace(" / ", " OR ").replace('/', " OR ")
}

fn component(package: &Value, checksums: &BTreeMap<(String, String), String>) -> Value {
    let mut component = json!({
        "type": "library",
        "bom-ref": purl(package),
        "name": package["name"],
        "version": package["version"],
        "purl": purl(package),
    });
    let licence = licence(package);
    if !licence.is_empty() {
        component["licenses"] = json!([{ "expression": licence }]);
    }
    if let Some(checksum) = checksums.get(&(field(package, "name"), field(package, "version"))) {
        component["hashes"] = json!([{ "alg": "SHA-256", "content": checksum }]);
    }
    component
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bill_has_what_is_built_and_not_what_tests_use() {
        let package = |name: &str| json!({ "id": name, "name": name, "version": "1.0.0+x", "license": "MIT/ISC" });
        let dependency = |name: &str, kind: Value| json!({ "pkg": name, "dep_kinds": [{ "kind": kind }] });
        let node = |name: &str, deps: Value| json!({ "id": name, "deps": deps });
        let packages = ["tool", "library", "builder", "checker", "other"].map(package);
        let metadata = json!({
            "packages": packages,
            "resolve": { "nodes": [
                node("tool", json!([dependency("library", Value::Null), dependency("checker", json!("dev"))])),
                node("library", json!([dependency("builder", json!("build"))])),
                node("builder", json!([])),
                node("checker", json!([])),
                node("other", json!([dependency("tool", Value::Null)])),
            ]},
        });
        let lock = "[[package]]\nname = \"library\"\nversion = \"1.0.0+x\"\nchecksum = \"ab12\"\n";
        let bill = bill(&Graph::of(&metadata, &["tool"]).unwrap(), &checksums(lock));
        let components = bill["components"].as_array().unwrap();
        let names: Vec<_> = components.iter().map(|component| component["name"].clone()).collect();
        assert_eq!(names, ["builder", "library", "tool"]);
        assert_eq!(components[1]["hashes"][0]["content"], "ab12");
        assert_eq!(components[1]["purl"], "pkg:cargo/library@1.0.0%2Bx");
        assert_eq!(components[1]["licenses"][0]["expression"], "MIT OR ISC");
        let edges = bill["dependencies"].as_array().unwrap();
        assert_eq!(edges.len(), 4, "{edges:?}");
        assert_eq!(edges[2]["dependsOn"], json!(["pkg:cargo/library@1.0.0%2Bx"]));
    }
}
