//! Reads the console blocks of a page, and compares the output that they show with a real one.

use std::net::IpAddr;

/// A command of a console block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// The line of the page, from 1 on.
    pub line: usize,
    /// The command as a shell reads it, without the prompt.
    pub command: String,
    /// The lines of output that the page shows. `...` stands for any text.
    pub shown: Vec<String>,
}

/// A line of a console block stands before its first command.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {0} of a console block follows no command; a command begins with `$ `")]
pub struct NoCommand(usize);

/// Returns the commands of the page's console blocks, in order.
///
/// # Errors
/// When a block does not begin with a command.
pub fn steps(page: &str) -> Result<Vec<Step>, NoCommand> {
    let (mut steps, mut in_block): (Vec<Step>, bool) = (Vec::new(), false);
    for (number, text) in (1..).zip(page.lines()) {
        if text.starts_with("```") {
            in_block = text == "```console";
            continue;
        }
        if !in_block {
            continue;
        }
        let open = steps.last_mut().filter(|step| !is_complete(&step.command));
        if let Some(step) = open {
            step.command.push('\n');
            step.command.push_str(text);
        } else if let Some(command) = text.strip_prefix("$ ") {
            steps.push(Step {
                line: number,
                command: command.to_owned(),
                shown: Vec::new(),
            });
        } else {
            let step = steps.last_mut().ok_or(NoCommand(number))?;
            step.shown.push(text.to_owned());
        }
    }
    Ok(steps)
}

/// Returns whether a shell would execute the command now: no line continues, and no quotation and
/// no here document is open.
fn is_complete(command: &str) -> bool {
    if let Some((_, rest)) = command.split_once("<<") {
        let word = rest.split_whitespace().next().unwrap_or_default();
        let word = word.trim_matches('\'');
        return command.lines().skip(1).any(|line| line == word);
    }
    !command.ends_with('\\') && command.matches('\'').count().is_multiple_of(2)
}

impl Step {
    /// Returns whether the output is the shown one, apart from ages, addresses, identifiers,
    /// versions and the widths of columns. Without shown output any output is as expected.
    pub fn shows(&self, output: &str) -> bool {
        if self.shown.is_empty() {
            return true;
        }
        let shown = masked(&self.shown.join("\n"));
        let output = masked(output);
        let mut parts = shown.split("...");
        let first = parts.next().unwrap_or_default();
        let Some(mut rest) = output.strip_prefix(first) else {
            return false;
        };
        let parts: Vec<&str> = parts.collect();
        let Some((last, middle)) = parts.split_last() else {
            return rest.is_empty();
        };
        for part in middle {
            match rest.split_once(part) {
                Some((_, after)) => rest = after,
                None => return false,
            }
        }
        rest.ends_with(last)
    }
}

/// Replaces the words that differ from run to run. Blanks count as one, and empty lines are left
/// out.
fn masked(text: &str) -> String {
    let lines = text.lines().map(|line| {
        let words = line.split_whitespace().map(masked_word);
        words.collect::<Vec<_>>().join(" ")
    });
    let lines: Vec<String> = lines.filter(|line| !line.is_empty()).collect();
    lines.join("\n")
}

fn masked_word(word: &str) -> String {
    let is_edge = |letter: char| !letter.is_ascii_alphanumeric();
    let core = word.trim_matches(is_edge);
    let mask = if core.starts_with("GPU-") {
        "GPU"
    } else if core.parse::<IpAddr>().is_ok() {
        "ADDRESS"
    } else if is_age(core) {
        "AGE"
    } else if is_version(core) {
        "VERSION"
    } else if is_uid(core) {
        "UID"
    } else {
        return word.to_owned();
    };
    word.replacen(core, mask, 1)
}

/// Returns whether the word is a duration, such as `42s`, `1.5s` or `3m20s`.
fn is_age(word: &str) -> bool {
    let units = ["ms", "s", "m", "h", "d"];
    let mut rest = word;
    while !rest.is_empty() {
        let after =
            rest.trim_start_matches(|letter: char| letter.is_ascii_digit() || letter == '.');
        let unit = units.iter().find_map(|unit| after.strip_prefix(unit));
        match unit {
            Some(next) if after.len() < rest.len() => rest = next,
            _ => return false,
        }
    }
    !word.is_empty()
}

/// Returns whether the word is a version, such as `v1.36.3` or `0.1.0-rc.1`.
fn is_version(word: &str) -> bool {
    let numbers = word.strip_prefix('v').unwrap_or(word);
    let parts: Vec<&str> = numbers.splitn(3, '.').collect();
    let is_number = |part: &str| !part.is_empty() && part.chars().all(|c| c.is_ascii_digit());
    matches!(parts[..], [major, minor, patch]
        if is_number(major) && is_number(minor) && patch.starts_with(|c: char| c.is_ascii_digit()))
}

/// Returns whether the word is a UUID.
fn is_uid(word: &str) -> bool {
    let lengths = word.split('-').map(str::len);
    lengths.eq([8, 4, 4, 4, 12]) && word.chars().all(|c| c.is_ascii_hexdigit() || c == '-')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(shown: &str) -> Step {
        Step {
            line: 1,
            command: String::new(),
            shown: shown.lines().map(str::to_owned).collect(),
        }
    }

    #[test]
    fn steps_are_commands_with_their_continuations_and_output() {
        let page = "# A\n```console\n$ a \\\n    b\n$ cat <<'END'\nx\nEND\nx\n$ d <<END\nz\nEND\n```\n```yaml\n$ no\n```\n\
                    ```console\n$ c '{\n}'\n```\n";
        let found = steps(page).unwrap();
        let commands: Vec<_> = found.iter().map(|step| step.command.as_str()).collect();
        assert_eq!(
            commands,
            [
                "a \\\n    b",
                "cat <<'END'\nx\nEND",
                "d <<END\nz\nEND",
                "c '{\n}'"
            ]
        );
        assert_eq!(found[1].shown, ["x"]);
        assert_eq!((found[0].line, found[3].line), (3, 17));
        assert_eq!(steps("```console\noutput\n```\n"), Err(NoCommand(2)));
    }

    #[test]
    fn shows_compares_lines_without_what_differs_from_run_to_run() {
        let shown = step("NAME   AGE\nfirst  42s\n\n(GPU-1) at 10.0.0.1 of v1.36.3.");
        assert!(shown.shows("NAME AGE\nfirst 3m20s\n(GPU-2) at 10.0.0.9 of v1.37.0.\n"));
        assert!(!shown.shows("NAME AGE\nsecond 3m20s\n(GPU-2) at 10.0.0.9 of v1.37.0.\n"));
        assert!(step("").shows("anything"));
    }

    #[test]
    fn shows_takes_three_points_for_any_text() {
        let shown = step("{\"got\":1,...,\"total\":2...}\nend");
        assert!(shown.shows("{\"got\":1,\"x\":3,\"total\":2,\"y\":1}\nend"));
        assert!(!shown.shows("{\"got\":1,\"x\":3,\"total\":4,\"y\":1}\nend"));
        assert!(!shown.shows("{\"got\":1,\"x\":3,\"total\":2,\"y\":1}\nend more"));
    }

    #[test]
    fn masks_leave_amounts_and_names_alone() {
        for word in [
            "16", "8Gi", "1.5", "first", "s", "m1", "6.5", "node-1", "1/1",
        ] {
            assert_eq!(masked_word(word), word);
        }
        assert_eq!(
            masked_word("(82146db3-fff9-4d46-a90f-00e893e5727c)"),
            "(UID)"
        );
        assert_eq!(masked_word("0.2s,"), "AGE,");
    }
}
