//! Finds what is wrong in a cluster, each with one line of remedy.

mod checks;
mod installation;
pub mod preflight;

use serde::Serialize;
use serde_json::{Value, json};

use crate::snapshot::Snapshot;
use crate::table::{Style, Terminal, clean};

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Could not be looked at.
    Skip,
    /// Works, and should not stay so.
    Warn,
    /// Does not work.
    Fail,
}

impl Level {
    fn word(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::Skip => "SKIP",
            Self::Warn => "WARN",
            Self::Fail => "FAIL",
        }
    }

    fn style(self) -> Style {
        match self {
            Self::Ok => Style::Good,
            Self::Skip => Style::Plain,
            Self::Warn => Style::Warning,
            Self::Fail => Style::Bad,
        }
    }
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How bad.
    pub level: Level,
    /// The check as one word.
    pub check: &'static str,
    /// The finding.
    pub text: String,
    /// The remedy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

impl Finding {
    fn ok(check: &'static str, text: impl Into<String>) -> Self {
        Self {
            level: Level::Ok,
            check,
            text: text.into(),
            remedy: None,
        }
    }

    fn new(
        level: Level,
        check: &'static str,
        text: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            level,
            check,
            text: text.into(),
            remedy: Some(remedy.into()),
        }
    }
}

/// The most findings of one check with a line of their own.
const MAX_OF_CHECK: usize = 10;

/// Looks at everything that the snapshot has.
pub fn examine(snapshot: &Snapshot) -> Vec<Finding> {
    let mut findings = installation::examine(snapshot);
    findings.extend(checks::examine(snapshot));
    findings.extend(snapshot.unread_kinds().into_iter().map(|note| Finding {
        level: Level::Skip,
        check: "Rights",
        text: note,
        remedy: Some("run it as an admin of the cluster".to_owned()),
    }));
    findings
}

/// The worst level.
pub fn worst(findings: &[Finding]) -> Level {
    findings
        .iter()
        .map(|finding| finding.level)
        .max()
        .unwrap_or(Level::Ok)
}

/// The findings as text, with the number of failures and warnings.
pub fn render(findings: &[Finding], terminal: Terminal) -> String {
    let mut text = String::new();
    let mut left_out = 0;
    for (at, finding) in findings.iter().enumerate() {
        let same = findings[..at]
            .iter()
            .filter(|other| other.check == finding.check && other.level == finding.level);
        if same.count() >= MAX_OF_CHECK {
            left_out += 1;
            continue;
        }
        let word = format!("{:<4}", finding.level.word());
        let finding_text = clean(finding.text.clone());
        text.push_str(&format!(
            "{}  {finding_text}\n",
            finding.level.style().paint(&word, terminal)
        ));
        if let Some(remedy) = &finding.remedy {
            text.push_str(&format!("        {}\n", clean(remedy.clone())));
        }
    }
    if left_out > 0 {
        text.push_str(&format!("{left_out} more of these checks: see -o json\n"));
    }
    let number = |level| {
        findings
            .iter()
            .filter(|finding| finding.level == level)
            .count()
    };
    let (failures, warnings) = (number(Level::Fail), number(Level::Warn));
    let plural = |count: usize| if count == 1 { "" } else { "s" };
    text.push_str(&format!(
        "{failures} failure{}, {warnings} warning{}",
        plural(failures),
        plural(warnings)
    ));
    match number(Level::Skip) {
        0 => {}
        skipped => text.push_str(&format!(", {skipped} could not be looked at")),
    }
    text + "\n"
}

/// The findings in the documented `v1` shape.
pub fn json(findings: &[Finding]) -> Value {
    json!({ "apiVersion": "cli.bursar.dev/v1", "kind": "Findings", "items": findings })
}

/// The numbers of a version: `v1.36.3+k3s1` is 1, 36, 3.
pub(crate) fn version(text: &str) -> Option<(u32, u32, u32)> {
    let text = text.trim_start_matches('v');
    let mut parts = text.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    let mut next = || parts.next()?.ok();
    Some((next()?, next()?, next().unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_past_their_suffixes() {
        assert_eq!(version("v1.36.3+k3s1"), Some((1, 36, 3)));
        assert_eq!(version("2.0"), Some((2, 0, 0)));
        assert_eq!(version("1.7.24-rc.1"), Some((1, 7, 24)));
        assert_eq!(version("unknown"), None);
    }
}
