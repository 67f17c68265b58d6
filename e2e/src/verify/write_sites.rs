//! Checks that each write of product code is a crash point: a rename, an fsync, an unlink, or the
//! send of a message of a record.
//!
//! The tests of crash points kill a program in the C library's functions, and at each `sendmsg` of
//! its own code (`device-plugin/tests/common/steps.c`).

use std::collections::BTreeMap;
use std::fs;

use syn::visit::{self, Visit};
use syn::{ExprMethodCall, ExprPath, Item, ItemFn, ItemImpl, ItemMod};

use super::layers::is_test;
use super::style;
use crate::paths;

/// The files that write, how often, and which check kills there, or why none does.
const SITES: &[(&str, usize, &str)] = &[
    ("device-plugin/fdstore/src/listener.rs", 1, CRASH_POINTS),
    ("device-plugin/fdstore/src/poll_loop.rs", 1, CRASH_POINTS),
    ("device-plugin/host/src/checkpoint.rs", 5, AGENT),
    ("device-plugin/kubelet/src/server.rs", 2, AGENT),
    ("device-plugin/node/src/cdi/dir.rs", 3, AGENT),
    ("device-plugin/node/src/shim_install.rs", 8, AGENT),
    (
        "device-plugin/protocol/src/fd_passing.rs",
        2,
        "sends what its callers give it",
    ),
    ("device-plugin/provisioner/src/server.rs", 3, CRASH_POINTS),
    (
        "device-plugin/relay/src/relay.rs",
        1,
        "faults/relay-crash-points",
    ),
    (
        "device-plugin/retained/src/fdstore_client.rs",
        2,
        CRASH_POINTS,
    ),
    ("device-plugin/retained/src/tokens/key.rs", 2, AGENT),
    (
        "device-plugin/runtime/src/agent_client.rs",
        1,
        "a tenant's question; no record",
    ),
    ("device-plugin/sessions/src/checkpoint.rs", 2, CRASH_POINTS),
    ("device-plugin/sessions/src/serve.rs", 4, AGENT),
    (
        "device-plugin/sessions/src/stream.rs",
        1,
        "an answer to a tenant; no record",
    ),
    (
        "device-plugin/supervision/src/provisioners.rs",
        1,
        CRASH_POINTS,
    ),
    (
        "device-plugin/supervision/src/provisioners/process.rs",
        1,
        CRASH_POINTS,
    ),
];

const AGENT: &str = "faults/crash-points";
const CRASH_POINTS: &str = "faults/lease-crash-points";

/// The functions that write, and those methods whose names say enough.
const FUNCTIONS: &[&str] = &[
    "fdatasync",
    "fsync",
    "persist",
    "remove_dir",
    "remove_dir_all",
    "remove_file",
    "rename",
    "renameat",
    "renameat_with",
    "send_message",
    "send_with_fd",
    "sendmsg",
    "sync_all",
    "sync_data",
    "unlink",
    "unlinkat",
];
const METHODS: &[&str] = &["persist", "persist_noclobber", "sync_all", "sync_data"];

/// Collects the writes of a file outside of its tests.
#[derive(Default)]
struct Writes {
    count: usize,
    /// Those that go past the C library, where no test can kill the program.
    past_c_library: Vec<String>,
}

impl<'ast> Visit<'ast> for Writes {
    fn visit_item(&mut self, item: &'ast Item) {
        let attributes = match item {
            Item::Fn(ItemFn { attrs, .. })
            | Item::Impl(ItemImpl { attrs, .. })
            | Item::Mod(ItemMod { attrs, .. }) => &attrs[..],
            _ => &[],
        };
        if !attributes.iter().any(is_test) {
            visit::visit_item(self, item);
        }
    }

    fn visit_expr_path(&mut self, path: &'ast ExprPath) {
        let segments = path.path.segments.iter();
        let names: Vec<String> = segments.map(|segment| segment.ident.to_string()).collect();
        let is_write = names
            .last()
            .is_some_and(|name| FUNCTIONS.contains(&&**name));
        self.count += usize::from(is_write);
        // `sendmsg` is trapped wherever the program calls it.
        if is_write && names[0] == "rustix" && !names.ends_with(&["sendmsg".to_owned()]) {
            self.past_c_library.push(names.join("::"));
        }
        visit::visit_expr_path(self, path);
    }

    fn visit_expr_method_call(&mut self, call: &'ast ExprMethodCall) {
        self.count += usize::from(METHODS.iter().any(|name| call.method == name));
        visit::visit_expr_method_call(self, call);
    }
}

/// Returns what is wrong with the writes of these files, by their paths.
fn wrong_sites(found: &BTreeMap<String, Writes>, sites: &[(&str, usize, &str)]) -> Vec<String> {
    let mut wrong = Vec::new();
    for (path, writes) in found {
        for name in &writes.past_c_library {
            wrong.push(format!("{path}: {name} is no crash point; use std::fs"));
        }
        let known = sites.iter().find(|(site, ..)| site == path);
        let known = known.map_or(0, |(_, count, _)| *count);
        if writes.count != known {
            wrong.push(format!(
                "{path} has {} writes and not {known}; let a test of crash points reach each, or \
                 write through bursar-host, and tell in e2e/src/verify/write_sites.rs",
                writes.count
            ));
        }
    }
    let gone = sites.iter().filter(|(site, ..)| !found.contains_key(*site));
    wrong.extend(gone.map(|(site, ..)| format!("{site} is not there")));
    wrong
}

/// Fails on a write of product code that no test of crash points reaches.
///
/// # Errors
/// Names each such file, or the file that could not be read.
pub(super) fn check() -> anyhow::Result<()> {
    let repository = paths::repository();
    let mut paths = Vec::new();
    for folder in ["crds", "device-plugin", "operator"] {
        style::sources(&repository.join(folder), &mut paths)?;
    }
    let mut found = BTreeMap::new();
    for path in paths {
        let name = path.strip_prefix(&repository)?.display().to_string();
        let others = [
            "/tests/",
            "/benches/",
            "/examples/",
            "/testing.rs",
            "tests.rs",
        ];
        if !name.contains("/src/") || others.iter().any(|other| name.contains(other)) {
            continue;
        }
        let file = syn::parse_file(&fs::read_to_string(&path)?)
            .map_err(|error| anyhow::anyhow!("failed to parse {name}: {error}"))?;
        let mut writes = Writes::default();
        writes.visit_file(&file);
        found.insert(name, writes);
    }
    let wrong = wrong_sites(&found, SITES);
    anyhow::ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    println!("{} files, {} with writes", found.len(), SITES.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writes(source: &str) -> Writes {
        let mut writes = Writes::default();
        writes.visit_file(&syn::parse_file(source).unwrap());
        writes
    }

    #[test]
    fn write_without_a_crash_point_is_found() {
        let source = "fn f() { fs::rename(a, b).and_then(|()| file.sync_all()); \
                      list.unlink(1); paths.map(std::fs::remove_file); } \
                      #[cfg(test)] mod tests { fn g() { fs::remove_file(a); } }";
        let raw = "fn f() { rustix::fs::fsync(a); rustix::net::sendmsg(a, b, c, d); }";
        let found = BTreeMap::from([("a.rs".to_owned(), writes(source))]);
        assert!(wrong_sites(&found, &[("a.rs", 3, "")]).is_empty());
        assert_eq!(wrong_sites(&found, &[]).len(), 1);
        assert_eq!(wrong_sites(&found, &[("a.rs", 2, "")]).len(), 1);
        assert_eq!(
            wrong_sites(&found, &[("a.rs", 3, ""), ("b.rs", 1, "")]).len(),
            1
        );
        let found = BTreeMap::from([("a.rs".to_owned(), writes(raw))]);
        let [raw] = &wrong_sites(&found, &[("a.rs", 2, "")])[..] else {
            panic!("one goes past the C library");
        };
        assert!(raw.contains("rustix::fs::fsync"), "{raw}");
    }
}
