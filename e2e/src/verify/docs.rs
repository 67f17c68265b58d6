//! Checks the documentation against the tree: its paths, checks and links, the crates of the
//! architecture page, and the checks of its concepts.

use std::fs;
use std::path::{Path, PathBuf};

use super::{checks, style};
use crate::paths;

#[cfg(test)]
mod picture_tests;

/// The maximum number of lines of `docs/internals/architecture.md`.
const MAX_ARCHITECTURE_LINES: usize = 150;

/// The folders whose paths are checked.
const FOLDERS: &[&str] = &["operator", "device-plugin", "charts", "crds", "e2e", "docs"];

/// A name in a page: text in backticks, or the target of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Name<'a> {
    Code(&'a str),
    Link(&'a str),
}

/// Returns the names in a page, without those in code blocks.
fn names(page: &str) -> Vec<Name<'_>> {
    let text = page.split("```").step_by(2);
    let mut names = Vec::new();
    for text in text {
        for line in text.lines() {
            names.extend(line.split('`').skip(1).step_by(2).map(Name::Code));
            let links = line.split("](").skip(1);
            let targets = links.filter_map(|rest| rest.split([')', '#']).next());
            names.extend(targets.filter(|target| !target.is_empty()).map(Name::Link));
        }
    }
    names
}

/// Returns whether a name in backticks is a path or a check rather than other code.
fn is_path_or_check(code: &str, areas: &[&str]) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
    let top = code.split_once('/').map(|(top, _)| top);
    code.chars().all(is_plain)
        && top.is_some_and(|top| FOLDERS.contains(&top) || areas.contains(&top))
}

/// The pages in which each row of the tables with a column `check` names one.
const PAGES_WITH_CHECKS: &[&str] = &[
    "docs/internals/architecture.md",
    "docs/internals/runtime.md",
    "docs/internals/versions.md",
];

/// Returns the first and last cell of each row of a page's tables whose last column is `check`.
fn rows_with_check(page: &str) -> Vec<(&str, &str)> {
    let (mut rows, mut is_inside) = (Vec::new(), false);
    for line in page.lines() {
        let cells = line
            .strip_prefix('|')
            .and_then(|line| line.trim_end().strip_suffix('|'));
        let Some(cells) = cells else {
            is_inside = false;
            continue;
        };
        let cells = || cells.split('|').map(str::trim);
        match (cells().next(), cells().next_back()) {
            (_, Some("check")) => is_inside = true,
            (Some(first), Some(last)) if is_inside && !first.starts_with("---") => {
                rows.push((first, last));
            }
            _ => {}
        }
    }
    rows
}

/// Returns what is wrong with the checks that a page's tables name.
fn lacking_checks(page: &str, checks: &[&str]) -> Vec<String> {
    let rows = rows_with_check(page);
    if rows.is_empty() {
        return vec!["has no table with the column `check`".to_owned()];
    }
    let names_none = |cell: &str| {
        let mut names = cell.split('`').skip(1).step_by(2);
        !names.any(|name| checks.contains(&name))
    };
    let without = rows.into_iter().filter(|(_, cell)| names_none(cell));
    without
        .map(|(row, _)| format!("names no check of: {row}"))
        .collect()
}

/// Returns the pages of the repository.
fn pages() -> std::io::Result<Vec<PathBuf>> {
    let repository = paths::repository();
    let mut pages = vec![
        repository.join("README.md"),
        repository.join("CONTRIBUTING.md"),
    ];
    style::files(&repository.join("docs"), &["md"], &mut pages)?;
    Ok(pages)
}

/// Returns the members of the workspace that `Cargo.toml` lists.
fn members(manifest: &str) -> Vec<&str> {
    let list = manifest
        .split_once("members = [")
        .and_then(|(_, rest)| rest.split_once(']'));
    let list = list.map_or("", |(list, _)| list);
    list.split('"').skip(1).step_by(2).collect()
}

/// Fails if a page names a path, a check or a link that does not exist, or if a concept has no
/// check. The architecture page must name each check of the area `mission/`.
///
/// # Errors
/// Names each page and name, or the file that could not be read.
pub(super) fn check() -> anyhow::Result<()> {
    let repository = paths::repository();
    let checks: Vec<&str> = checks::all()
        .iter()
        .map(|check| check.name.as_str())
        .collect();
    let areas: Vec<&str> = checks
        .iter()
        .filter_map(|name| Some(name.split_once('/')?.0))
        .collect();
    let exists = |page: &Path, name: Name<'_>| match name {
        Name::Code(code) if is_path_or_check(code, &areas) => {
            let is_area = code
                .strip_suffix('/')
                .is_some_and(|area| areas.contains(&area));
            is_area || checks.contains(&code) || repository.join(code).exists()
        }
        Name::Code(_) => true,
        Name::Link(target) if target.contains(':') => true,
        Name::Link(target) => page
            .parent()
            .is_some_and(|folder| folder.join(target).exists()),
    };
    let (mut name_count, mut wrong) = (0, Vec::new());
    for path in pages()? {
        let text = fs::read_to_string(&path)?;
        let names = names(&text);
        name_count += names.len();
        let lacking = names.into_iter().filter(|name| !exists(&path, *name));
        wrong.extend(lacking.map(|name| format!("{}: {name:?} does not exist", path.display())));
    }
    let architecture = fs::read_to_string(repository.join("docs/internals/architecture.md"))?;
    if architecture.lines().count() > MAX_ARCHITECTURE_LINES {
        wrong.push(format!(
            "docs/internals/architecture.md has more than {MAX_ARCHITECTURE_LINES} lines"
        ));
    }
    let systems = checks.iter().filter(|name| name.starts_with("mission/"));
    let lacking = systems.filter(|name| !architecture.contains(&format!("`{name}`")));
    wrong
        .extend(lacking.map(|name| format!("docs/internals/architecture.md does not name {name}")));
    for page in PAGES_WITH_CHECKS {
        let text = fs::read_to_string(repository.join(page))?;
        let lacking = lacking_checks(&text, &checks).into_iter();
        wrong.extend(lacking.map(|what| format!("{page} {what}")));
    }
    let manifest = fs::read_to_string(repository.join("Cargo.toml"))?;
    let without_row = members(&manifest).into_iter();
    let without_row = without_row.filter(|member| !architecture.contains(&format!("`{member}`")));
    wrong.extend(
        without_row.map(|member| format!("docs/internals/architecture.md has no row of {member}")),
    );
    anyhow::ensure!(
        name_count > 500,
        "only {name_count} names were found: the pages are not where they were"
    );
    anyhow::ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    println!("{name_count} names in the documentation, and all paths, checks and links exist");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_code_and_links_outside_of_code_blocks() {
        let page = "See `docs/a.md` and [b](b.md#part), [c](#here).\n```\n`no`\n```\n`cargo x`";
        let expected = [
            Name::Code("docs/a.md"),
            Name::Link("b.md"),
            Name::Code("cargo x"),
        ];
        assert_eq!(names(page), expected);
    }

    #[test]
    fn code_is_a_path_or_a_check_below_known_folders_only() {
        let is = |code| is_path_or_check(code, &["main"]);
        assert!(is("docs/a.md") && is("main/unit") && is("e2e/src/verify/"));
        assert!(!is("cargo verify") && !is("/run/bursar") && !is("text/plain") && !is("docs"));
    }

    #[test]
    fn row_without_an_existing_check_is_named() {
        let page = "| crate | job |\n|---|---|\n| a | b |\n\n\
            | concept | where | check |\n|---|---|---|\n\
            | pods | `docs/a.md` | `main/unit`, `main/later` |\n\
            | nodes | `main/unit` |  |\n| leases | | `main/later` |\n";
        let lacking = lacking_checks(page, &["main/unit"]);
        assert_eq!(
            lacking,
            ["names no check of: nodes", "names no check of: leases"]
        );
        let page = "| crate | job |\n|---|---|\n| a | b |\n";
        let lacking = lacking_checks(page, &["main/unit"]);
        assert_eq!(lacking, ["has no table with the column `check`"]);
    }

    #[test]
    fn members_are_those_of_the_manifest() {
        assert_eq!(
            members("[workspace]\nmembers = [\n \"a\",\n \"b/c\",\n]\n"),
            ["a", "b/c"]
        );
    }
}
