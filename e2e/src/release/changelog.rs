//! Finds the entry of a version in the changelog.

/// The changelog has no entry of the version.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "failed to find version {0} in CHANGELOG.md: no heading names it; rename the heading Unreleased"
)]
pub struct NoEntry(String);

/// The heading of changes that no version has. A pre-release takes them.
const UNRELEASED: &str = "Unreleased";

/// Returns the text below the heading of `version`, or below `Unreleased` for a pre-release
/// without a heading of its own.
///
/// # Errors
/// When there is no such heading, or nothing below it.
pub(super) fn entry(changelog: &str, version: &str) -> Result<String, NoEntry> {
    let own = section(changelog, version);
    let pre_release = version.contains('-');
    let found = own.or_else(|| {
        pre_release
            .then(|| section(changelog, UNRELEASED))
            .flatten()
    });
    found
        .filter(|text| !text.is_empty())
        .ok_or_else(|| NoEntry(version.to_owned()))
}

/// Returns the text below the heading `## name`, up to the next heading of its level.
fn section(changelog: &str, name: &str) -> Option<String> {
    let mut sections = changelog.split("\n## ").skip(1);
    let text = sections.find_map(|section| {
        let (heading, text) = section.split_once('\n').unwrap_or((section, ""));
        let named = heading.split_whitespace().next()?;
        (named.trim_matches(['[', ']']) == name).then_some(text)
    })?;
    Some(text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHANGELOG: &str = "# Changelog\n\n## Unreleased\n\n- new\n\n## [0.2.0] - 2026-12-01\n\n### Added\n\n- two\n\n## 0.1.0\n\n- one\n";

    #[test]
    fn entry_is_the_text_below_the_versions_heading() {
        assert_eq!(entry(CHANGELOG, "0.2.0").unwrap(), "### Added\n\n- two");
        assert_eq!(entry(CHANGELOG, "0.1.0").unwrap(), "- one");
    }

    #[test]
    fn only_a_pre_release_takes_unreleased_changes() {
        assert_eq!(entry(CHANGELOG, "0.3.0-rc.1").unwrap(), "- new");
        let error = entry(CHANGELOG, "0.3.0").unwrap_err();
        assert!(error.to_string().contains("rename the heading"), "{error}");
    }
}
