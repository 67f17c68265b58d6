//! Builds the book of `docs/`, which has every page.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use super::style;
use crate::paths;
use crate::tools;

/// The list of chapters, relative to `docs/`.
const SUMMARY: &str = "SUMMARY.md";

/// Fails if the book does not build, or lacks a page.
///
/// # Errors
/// Names the pages that `docs/SUMMARY.md` lacks, or the program that failed.
pub(super) fn check() -> anyhow::Result<()> {
    let docs = paths::repository().join("docs");
    let summary = fs::read_to_string(docs.join(SUMMARY))?;
    let mut pages = Vec::new();
    style::files(&docs, &["md"], &mut pages)?;
    let listed = listed(&summary);
    let mut page_count = 0;
    for page in pages {
        let name = page.strip_prefix(&docs)?.to_path_buf();
        anyhow::ensure!(
            listed.contains(&name) || name.as_os_str() == SUMMARY,
            "docs/SUMMARY.md does not list {}",
            name.display()
        );
        page_count += 1;
    }
    anyhow::ensure!(page_count > 70, "only {page_count} pages in docs/");
    let mdbook = tools::mdbook()?;
    let out = tempfile::tempdir()?;
    let built = Command::new(mdbook)
        .arg("build")
        .arg("--dest-dir")
        .args([out.path(), &docs])
        .output()?;
    let stderr = String::from_utf8_lossy(&built.stderr);
    anyhow::ensure!(built.status.success(), "mdbook: {}: {stderr}", built.status);
    for page in &listed {
        // mdBook writes README.md as the index of its folder.
        let html = match page.ends_with("README.md") {
            true => page.with_file_name("index.html"),
            false => page.with_extension("html"),
        };
        anyhow::ensure!(
            out.path().join(&html).exists(),
            "mdBook writes no {}",
            html.display()
        );
    }
    println!("a book of {} pages", listed.len());
    Ok(())
}

/// Returns the pages that the list of chapters names.
fn listed(summary: &str) -> BTreeSet<PathBuf> {
    let links = summary.split("](").skip(1);
    let targets = links.filter_map(|rest| rest.split(')').next());
    targets.map(PathBuf::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listed_pages_are_the_targets_of_links() {
        let summary = "# Summary\n\n[A](a.md)\n\n- [B (b)](b/README.md)\n";
        let expected = ["a.md", "b/README.md"].map(PathBuf::from);
        assert_eq!(listed(summary), BTreeSet::from(expected));
    }
}
