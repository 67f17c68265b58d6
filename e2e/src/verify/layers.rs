//! Checks the direction of imports: between crates by floors, and between the files of a crate.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use petgraph::algo::tarjan_scc;
use petgraph::graphmap::DiGraphMap;
use serde::Deserialize;
use syn::visit::{self, Visit};
use syn::{Attribute, File, Item, UseTree};

use super::style;
use crate::cargo;
use crate::paths;

/// The crates by floors, the lowest first. A crate depends on crates of lower floors only.
const FLOORS: &[&[&str]] = &[
    &[
        "bursar-biased-lock",
        "bursar-confine",
        "bursar-crds",
        "bursar-http",
        "bursar-protocol",
        "bursar-shim-common",
        "bursar-sim-api",
        "bursar-sim-state",
        "bursar-watch",
    ],
    &[
        "bursar-cli",
        "bursar-driver",
        "bursar-fdstore",
        "bursar-ledger",
        "bursar-nvml-shim",
        "bursar-operator",
        "bursar-shim",
        "bursar-sim-cuda",
        "bursar-sim-kernel",
        "bursar-sim-lab",
        "bursar-sim-nvml",
    ],
    &[
        "bursar-config",
        "bursar-kubelet",
        "bursar-metrics",
        "bursar-provisioner",
        "bursar-runtime",
    ],
    &[
        "bursar-apiserver",
        "bursar-capi",
        "bursar-gpu-programs",
        "bursar-host",
        "bursar-probe",
    ],
    &["bursar-gpu", "bursar-relay"],
    &["bursar-sessions"],
    &["bursar-supervision"],
    &["bursar-node"],
    &["bursar-enforcement", "bursar-retained"],
    &["bursar-compute"],
    &["bursar-gpu-node"],
    &["bursar-device-plugin", "bursar-e2e"],
];

/// The crates that call the driver through `bursar-driver` alone, or the runtime over it: the
/// demo's pods and the node's retained memory show what these do.
const OVER_DRIVER: &[&str] = &["bursar-probe", "bursar-provisioner"];

/// The libraries that open the driver or define its calls.
const DRIVERS: &[&str] = &["cudarc", "libloading"];

/// The most files that may import each other in a circle.
const MAX_CIRCLE: usize = 4;

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    manifest_path: PathBuf,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    /// None for a normal dependency: tests may depend on any crate.
    kind: Option<String>,
}

/// Returns the crates that no floor has, and the dependencies that do not point downwards.
fn wrong_dependencies(packages: &[Package], floors: &[&[&str]]) -> Vec<String> {
    let floor_of = |name: &str| floors.iter().position(|floor| floor.contains(&name));
    let members: BTreeSet<&str> = packages.iter().map(|package| &*package.name).collect();
    let mut wrong = Vec::new();
    for Package {
        name, dependencies, ..
    } in packages
    {
        let Some(floor) = floor_of(name) else {
            wrong.push(format!("{name} is on no floor of e2e/src/verify/layers.rs"));
            continue;
        };
        let built = dependencies.iter().filter(|on| on.kind.is_none());
        let members = built.filter(|on| members.contains(&*on.name));
        let upward = members.filter(|on| floor_of(&on.name).is_none_or(|below| below >= floor));
        wrong.extend(upward.map(|on| format!("{name} depends on {}, not below it", on.name)));
    }
    wrong
}

/// Returns the crates of [`OVER_DRIVER`] that depend on another way to the driver, tests included.
fn past_the_driver(packages: &[Package]) -> Vec<String> {
    let over = packages
        .iter()
        .filter(|of| OVER_DRIVER.contains(&&*of.name));
    let past = over.flat_map(|of| {
        let others = of.dependencies.iter().map(|on| &*on.name);
        let others = others.filter(|on| DRIVERS.contains(on));
        others.map(|on| format!("{} depends on {on}, not on bursar-driver alone", of.name))
    });
    past.collect()
}

/// Returns the paths through which a file reaches the driver's functions: [`DRIVERS`], and
/// the raw calls that `bursar-driver` exports.
fn driver_calls(names: &Names) -> impl Iterator<Item = &Vec<String>> {
    names.paths.iter().filter(|path| {
        let mut pairs = path.windows(2);
        path.first()
            .is_some_and(|first| DRIVERS.contains(&&**first))
            || pairs.any(|pair| pair == ["driver", "raw"])
    })
}

/// A module of a crate, by its path from the root.
type Module = Vec<String>;

/// Collects the paths that a file names outside of its tests.
#[derive(Default)]
struct Names {
    paths: Vec<Vec<String>>,
    /// The names that the file re-exports, with the path of each.
    exports: Vec<Vec<String>>,
}

impl<'ast> Visit<'ast> for Names {
    fn visit_item(&mut self, item: &'ast Item) {
        let attributes: &[Attribute] = match item {
            Item::Fn(item) => &item.attrs,
            Item::Impl(item) => &item.attrs,
            Item::Mod(item) => &item.attrs,
            Item::Use(item) => &item.attrs,
            _ => &[],
        };
        if !attributes.iter().any(is_test) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        let is_private = matches!(item.vis, syn::Visibility::Inherited);
        let into = if is_private {
            &mut self.paths
        } else {
            &mut self.exports
        };
        flatten(&item.tree, &mut Vec::new(), into);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments = path.segments.iter();
        self.paths
            .push(segments.map(|segment| segment.ident.to_string()).collect());
        visit::visit_path(self, path);
    }
}

/// Returns whether the attribute limits an item to tests.
pub(super) fn is_test(attribute: &Attribute) -> bool {
    attribute.path().is_ident("cfg")
        && matches!(&attribute.meta, syn::Meta::List(list)
            if list.tokens.to_string().contains("test"))
}

fn flatten(tree: &UseTree, prefix: &mut Vec<String>, into: &mut Vec<Vec<String>>) {
    let path = |name: &syn::Ident| [&prefix[..], &[name.to_string()]].concat();
    match tree {
        UseTree::Path(tree) => {
            prefix.push(tree.ident.to_string());
            flatten(&tree.tree, prefix, into);
            prefix.pop();
        }
        UseTree::Group(group) => {
            for tree in &group.items {
                flatten(tree, prefix, into);
            }
        }
        UseTree::Name(name) => into.push(path(&name.ident)),
        UseTree::Rename(name) => into.push(path(&name.ident)),
        UseTree::Glob(_) => into.push(prefix.clone()),
    }
}

/// Returns the module that a path leads to from `module`, if the crate has the file.
fn resolve(module: &Module, path: &[String], files: &BTreeMap<Module, Names>) -> Option<Module> {
    let (mut at, mut rest) = match path.first()?.as_str() {
        "crate" => (Module::new(), &path[1..]),
        "self" => (module.clone(), &path[1..]),
        "super" => {
            let up = path.iter().take_while(|name| *name == "super").count();
            let above = module.len().checked_sub(up)?;
            (module[..above].to_vec(), &path[up..])
        }
        name => {
            let child = [&module[..], &[name.to_owned()]].concat();
            files.contains_key(&child).then_some(())?;
            (module.clone(), path)
        }
    };
    while let Some((name, after)) = rest.split_first() {
        let child = [&at[..], std::slice::from_ref(name)].concat();
        if !files.contains_key(&child) {
            break;
        }
        (at, rest) = (child, after);
    }
    files.contains_key(&at).then_some(at)
}

/// Returns the modules that import each other in circles of more than `most` files.
///
/// A module and the module that contains it may name each other: they are one subject.
fn circles(files: &BTreeMap<Module, Names>, most: usize) -> Vec<Vec<Module>> {
    let index: Vec<&Module> = files.keys().collect();
    let number = |module: &Module| index.binary_search(&module).ok();
    let mut exports = BTreeMap::new();
    for (module, names) in files {
        for path in &names.exports {
            if let (Some(name), Some(to)) = (path.last(), resolve(module, path, files)) {
                exports.insert((module.clone(), name.clone()), to);
            }
        }
    }
    let mut graph = DiGraphMap::<usize, ()>::new();
    for (module, names) in files {
        for path in &names.paths {
            let Some(mut to) = resolve(module, path, files) else {
                continue;
            };
            let name = path.last().cloned().unwrap_or_default();
            // Two re-exports in a row are the most that a crate has.
            for _ in 0..2 {
                if let Some(further) = exports.get(&(to.clone(), name.clone())) {
                    to.clone_from(further);
                }
            }
            let is_family = module.starts_with(&to) || to.starts_with(module);
            if let (false, Some(from), Some(to)) = (is_family, number(module), number(&to)) {
                graph.add_edge(from, to, ());
            }
        }
    }
    let groups = tarjan_scc(&graph).into_iter();
    let large = groups.filter(|group| group.len() > most);
    large
        .map(|group| group.into_iter().map(|at| index[at].clone()).collect())
        .collect()
}

/// Parses the product files below a crate's `src`.
fn parse_crate(src: &Path) -> anyhow::Result<BTreeMap<Module, Names>> {
    let mut paths = Vec::new();
    style::sources(src, &mut paths)?;
    let mut files = BTreeMap::new();
    for path in paths {
        let relative = path.strip_prefix(src)?.with_extension("");
        let mut module: Module = relative
            .iter()
            .map(|name| name.to_string_lossy().into_owned())
            .collect();
        let is_test = |name: &String| ["tests", "fixtures"].contains(&name.as_str());
        if module.iter().any(is_test) || module == ["main"] {
            continue;
        }
        let root = ["lib", "mod", "main"];
        if module
            .last()
            .is_some_and(|name| root.contains(&name.as_str()))
        {
            module.pop();
        }
        let text = fs::read_to_string(&path)?;
        let file: File = syn::parse_file(&text)
            .map_err(|error| anyhow::anyhow!("failed to parse {}: {error}", path.display()))?;
        let mut names = Names::default();
        names.visit_file(&file);
        files.insert(module, names);
    }
    Ok(files)
}

/// Fails if a crate depends on a crate that is not below it, or calls the driver past the runtime.
/// Fails too if more than [`MAX_CIRCLE`] files import each other in a circle.
///
/// # Errors
/// Names each dependency and each circle, or the program or file that failed.
pub(super) fn check() -> anyhow::Result<()> {
    let output = cargo::command()
        .args([
            "metadata",
            "--format-version",
            "1",
            "--no-deps",
            "--offline",
        ])
        .current_dir(paths::repository())
        .output()?;
    anyhow::ensure!(output.status.success(), "cargo metadata failed");
    let Metadata { packages } = serde_json::from_slice(&output.stdout)?;
    let mut wrong = wrong_dependencies(&packages, FLOORS);
    wrong.extend(past_the_driver(&packages));
    let mut file_count = 0;
    for Package {
        name,
        manifest_path,
        ..
    } in &packages
    {
        let files = parse_crate(&manifest_path.with_file_name("src"))?;
        file_count += files.len();
        if OVER_DRIVER.contains(&&**name) {
            let calls = files.values().flat_map(driver_calls);
            wrong.extend(
                calls.map(|path| format!("{name} calls the driver by {}", path.join("::"))),
            );
        }
        for circle in circles(&files, MAX_CIRCLE) {
            let modules: Vec<String> = circle.iter().map(|module| module.join("::")).collect();
            wrong.push(format!(
                "{name} has a circle of {} files: {}",
                circle.len(),
                modules.join(", ")
            ));
        }
    }
    anyhow::ensure!(
        file_count > 300,
        "only {file_count} files were found: the crates are not where they were"
    );
    anyhow::ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    println!(
        "{} crates on {} floors, {file_count} files without a large circle",
        packages.len(),
        FLOORS.len()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, on: &[(&str, Option<&str>)]) -> Package {
        let dependency = |(name, kind): &(&str, Option<&str>)| Dependency {
            name: (*name).to_owned(),
            kind: kind.map(str::to_owned),
        };
        Package {
            name: name.to_owned(),
            manifest_path: PathBuf::new(),
            dependencies: on.iter().map(dependency).collect(),
        }
    }

    #[test]
    fn dependencies_point_downwards_except_those_of_tests() {
        let floors: &[&[&str]] = &[&["low", "beside"], &["high"]];
        let packages = [
            package("low", &[("high", Some("dev")), ("serde", None)]),
            package("beside", &[("low", None)]),
            package("high", &[("low", None)]),
            package("new", &[]),
        ];
        assert_eq!(
            wrong_dependencies(&packages, floors),
            [
                "beside depends on low, not below it",
                "new is on no floor of e2e/src/verify/layers.rs"
            ]
        );
    }

    #[test]
    fn demo_and_provisioner_call_the_driver_through_its_crate_alone() {
        let packages = [
            package("bursar-probe", &[("bursar-runtime", None)]),
            package("bursar-provisioner", &[("cudarc", Some("dev"))]),
            package("bursar-runtime", &[("cudarc", None)]),
        ];
        assert_eq!(
            past_the_driver(&packages),
            ["bursar-provisioner depends on cudarc, not on bursar-driver alone"]
        );
        let sources = files(&[(
            "",
            "use bursar_runtime::driver::{Driver, raw}; fn call() { libloading::library_filename() }",
        )]);
        let paths = sources.values().flat_map(driver_calls);
        let paths: Vec<String> = paths.map(|path| path.join("::")).collect();
        assert_eq!(
            paths,
            [
                "bursar_runtime::driver::raw",
                "libloading::library_filename"
            ]
        );
    }

    fn files(sources: &[(&str, &str)]) -> BTreeMap<Module, Names> {
        let parse = |(name, source): &(&str, &str)| {
            let mut names = Names::default();
            names.visit_file(&syn::parse_file(source).unwrap());
            let module = name.split("::").filter(|name| !name.is_empty());
            (module.map(str::to_owned).collect(), names)
        };
        sources.iter().map(parse).collect()
    }

    #[test]
    fn circle_is_found_through_use_paths_and_reexports() {
        let files = files(&[
            ("", "pub use c::C;"),
            ("a", "use crate::b::{self, B};"),
            ("b", "fn f() -> crate::C { todo!() }"),
            ("c", "use super::a::A as Other;"),
        ]);
        let [circle] = &circles(&files, 2)[..] else {
            panic!("one circle")
        };
        assert_eq!(circle.len(), 3);
        assert!(circles(&files, 3).is_empty());
    }

    #[test]
    fn tests_and_families_make_no_circle() {
        let files = files(&[
            ("a", "mod child; use child::X; use crate::b::B;"),
            ("a::child", "use super::Y;"),
            ("b", "#[cfg(test)] mod tests { use crate::a::A; }"),
        ]);
        assert!(circles(&files, 1).is_empty());
    }
}
