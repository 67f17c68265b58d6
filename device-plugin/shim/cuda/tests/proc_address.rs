//! Tests what `cuGetProcAddress` returns on the simulated driver.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

mod support;
#[path = "../build/symbol_table.rs"]
#[allow(dead_code, reason = "the build script uses all of it")]
mod symbol_table;

use std::collections::{BTreeMap, BTreeSet};

use support::{Container, MIB};
use symbol_table::{Function, Symbol};

/// CUDA versions around those that introduced forms of functions.
const VERSIONS: [u32; 8] = [2000, 3020, 7000, 11000, 11030, 11080, 12000, 13000];

/// `CU_GET_PROC_ADDRESS_DEFAULT`, `..._LEGACY_STREAM`, `..._PER_THREAD_DEFAULT_STREAM`.
const FLAGS: [u32; 3] = [0, 1, 2];

fn functions() -> Vec<Function<'static>> {
    let symbols = symbol_table::parse(include_str!("../symbols.txt")).unwrap();
    let functions = symbols.into_iter().filter_map(|symbol| match symbol {
        Symbol::Function(function) => Some(function),
        Symbol::Variable(..) => None,
    });
    functions.collect()
}

#[test]
fn driver_address_of_a_hooked_name_is_always_replaced() {
    let container = Container::with_quota(MIB);
    let mut program = container.program();
    let mut forms = BTreeMap::<_, BTreeSet<_>>::new();
    for function in functions() {
        forms
            .entry(symbol_table::base_name(function.name))
            .or_default()
            .insert((function.name, function.handling.is_some()));
    }
    let mut replaced = 0;
    for (base, forms) in forms {
        let ours: BTreeSet<_> = forms
            .iter()
            .filter(|form| form.1)
            .map(|form| form.0)
            .collect();
        for (version, flags) in VERSIONS
            .iter()
            .flat_map(|version| FLAGS.map(|flags| (version, flags)))
        {
            let answer = program.call(format!("address {base} {version} {flags}"));
            let Some(found) = answer.strip_prefix("ok ") else {
                continue;
            };
            let (is_shim, symbol) = found.split_once(' ').unwrap();
            assert_eq!(
                is_shim == "1",
                ours.contains(symbol),
                "{base} {version} {flags}: {answer}"
            );
            // The driver's own form, for which the table has no function of the shim.
            assert!(
                is_shim == "1" || forms.contains(&(symbol, false)),
                "{base} {version} {flags}: {answer}"
            );
            replaced += usize::from(is_shim == "1");
        }
    }
    assert!(replaced > 100, "{replaced}");
}

#[test]
fn name_that_the_driver_lacks_is_not_found() {
    let container = Container::with_quota(MIB);
    let mut program = container.program();
    assert_eq!(program.call("address cuMemAllocTiered 13000 0"), "err 500");
}

#[test]
fn simulated_driver_returns_a_form_of_the_requested_name() {
    // So does an H200's driver, for each of these names.
    let container = Container::with_quota(MIB);
    let mut program = container.bare_program();
    let functions = functions();
    let names = functions
        .iter()
        .map(|function| symbol_table::base_name(function.name));
    for base in names.collect::<BTreeSet<_>>() {
        for version in VERSIONS {
            let answer = program.call(format!("address {base} {version} 0"));
            if let Some(symbol) = answer.strip_prefix("ok 1 ") {
                assert_eq!(symbol_table::base_name(symbol), base, "{version}");
            }
        }
    }
}
