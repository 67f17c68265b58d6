//! Explains why an object's pods run or not, from what the API has: conditions, events, status.
//!
//! Nothing is planned again here: a line states what agents, operator, scheduler or API server
//! have published, or that it is not known.

pub mod cause;
mod gpu;
mod pending;
mod pod;
mod rollout;
mod room;
mod running;
mod waiting;
pub mod workload;

use serde::Serialize;
use serde_json::{Value, json};

pub use self::cause::Cause;
pub use self::pod::explain as explain_pod;
pub use self::waiting::victim;
use crate::table::{Style, Terminal, clean};

/// Whether an object's pods run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum Verdict {
    /// All run, or have succeeded.
    Runs,
    /// A pod runs, and something is wrong.
    Degraded,
    /// A pod waits.
    Waits,
    /// A pod was refused or has failed.
    Fails,
}

/// A labelled line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Line {
    /// The label, such as `node`.
    pub label: &'static str,
    /// The text.
    pub text: String,
}

/// The explanation of one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// The object: `pod ml/big-0`.
    pub subject: String,
    /// Whether its pods run.
    pub verdict: Verdict,
    /// The first sentence.
    pub headline: String,
    /// The causes that were found.
    pub causes: Vec<Cause>,
    /// The lines below the first sentence.
    pub lines: Vec<Line>,
    /// A sentence for each kind that the CLI could not read, in whole or in part.
    pub not_read: Vec<String>,
}

impl Explanation {
    fn new(subject: String) -> Self {
        Self {
            subject,
            verdict: Verdict::Runs,
            headline: String::new(),
            causes: Vec::new(),
            lines: Vec::new(),
            not_read: Vec::new(),
        }
    }

    fn conclude(&mut self, verdict: Verdict, headline: impl Into<String>) {
        (self.verdict, self.headline) = (verdict, headline.into());
    }

    fn say(&mut self, label: &'static str, text: impl Into<String>) {
        self.lines.push(Line {
            label,
            text: text.into(),
        });
    }

    fn add(&mut self, cause: Cause) {
        if !self.causes.contains(&cause) {
            self.causes.push(cause);
        }
    }

    /// Adds a cause, and makes the verdict at least as grave as `verdict`.
    fn blame(&mut self, cause: Cause, verdict: Verdict) {
        self.verdict = self.verdict.max(verdict);
        self.add(cause);
    }

    /// Adds the remedies of all causes.
    fn remedies(&mut self) {
        let known: Vec<&'static str> = self
            .causes
            .iter()
            .filter_map(|cause| cause.remedy())
            .collect();
        for remedy in known {
            if !self
                .lines
                .iter()
                .any(|line| line.label == "remedy" && line.text.contains(remedy))
            {
                self.say("remedy", remedy);
            }
        }
    }

    /// The explanation as text.
    pub fn render(&self, terminal: Terminal) -> String {
        let style = match self.verdict {
            Verdict::Runs => Style::Good,
            Verdict::Degraded | Verdict::Waits => Style::Warning,
            Verdict::Fails => Style::Bad,
        };
        let mut text = style.paint(&clean(self.headline.clone()), terminal);
        text.push('\n');
        let widest = self
            .lines
            .iter()
            .map(|line| line.label.len())
            .max()
            .unwrap_or(0);
        for Line {
            label,
            text: line_text,
        } in &self.lines
        {
            let wrapped = wrap(
                &clean(line_text.clone()),
                terminal.width.map(|width| width.saturating_sub(widest + 4)),
            );
            for (number, part) in wrapped.iter().enumerate() {
                let label = if number == 0 { label } else { "" };
                text.push_str(&format!("  {label:widest$}  {part}\n"));
            }
        }
        for note in &self.not_read {
            text.push_str(&format!("  {}\n", clean(note.clone())));
        }
        text
    }

    /// The explanation in the documented `v1` shape.
    pub fn json(&self) -> Value {
        let causes: Vec<&str> = self.causes.iter().map(|cause| cause.as_str()).collect();
        json!({ "apiVersion": "cli.bursar.dev/v1", "kind": "Explanation", "subject": self.subject,
                "verdict": self.verdict, "headline": self.headline, "causes": causes,
                "lines": self.lines, "notRead": self.not_read })
    }
}

/// Breaks a text at spaces into lines of at most `width` characters.
fn wrap(text: &str, width: Option<usize>) -> Vec<String> {
    let Some(width) = width.filter(|width| *width >= 20) else {
        return vec![text.to_owned()];
    };
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("there is a first line");
        if line.is_empty() {
            line.push_str(word);
        } else if line.chars().count() + 1 + word.chars().count() <= width {
            line.push(' ');
            line.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_control_character_reaches_the_terminal() {
        let mut explanation = Explanation::new("pod ml/p".to_owned());
        explanation.conclude(Verdict::Waits, "waits\u{1b}[2J");
        explanation.say("node", "gpu-a\u{7}");
        explanation
            .not_read
            .push("pods: denied\u{1b}[2J".to_owned());
        let text = explanation.render(Terminal::default());
        let is_control = |found: char| found.is_control() && found != '\n';
        assert!(!text.contains(is_control), "{text:?}");
    }
}
