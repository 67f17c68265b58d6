//! Runs tests by their full names, and fails if fewer ran than were named.

use std::io::{self, BufRead as _, BufReader, Write};
use std::panic::resume_unwind;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use super::deadline;
use crate::cargo;
use crate::paths;

/// Tests of one target of the workspace by their paths.
#[derive(Clone, Copy, Debug)]
pub(super) struct TestSelection {
    /// The arguments of `cargo test` that select the target: `--lib`, or `--test` and its name.
    pub(super) target: &'static [&'static str],
    /// The full name of each test.
    pub(super) names: &'static [&'static str],
    /// Whether the tests are marked `#[ignore]`, because they take minutes.
    pub(super) ignored: bool,
    /// Additional environment variables of the tests.
    pub(super) env: &'static [(&'static str, &'static str)],
}

/// A check that runs tests by their full names.
#[derive(Clone, Copy, Debug)]
pub(super) struct NamedCheck {
    /// The area, a slash and a word.
    pub(super) name: &'static str,
    /// The promise that the tests hold.
    pub(super) promise: &'static str,
    /// Whether the check runs only under `--long`.
    pub(super) long: bool,
    pub(super) tests: &'static [TestSelection],
}

/// Runs these tests, each selection for at most `timeout`.
///
/// # Errors
/// When a test fails or a selection runs longer, or when fewer tests ran than were named: a renamed
/// test would otherwise go unnoticed.
pub(super) fn run(tests: &[TestSelection], timeout: Option<Duration>) -> anyhow::Result<()> {
    for tests in tests {
        let ran = run_and_count_passed(&mut command(tests), timeout, &mut io::stdout())?;
        anyhow::ensure!(
            ran >= tests.names.len(),
            "{ran} of {} named tests ran; compare the names with `cargo test -- --list`: {}",
            tests.names.len(),
            tests.names.join(", ")
        );
    }
    Ok(())
}

/// Returns the call of `cargo test`. All crates are selected, as in every other check, so that no
/// crate is compiled twice.
fn command(tests: &TestSelection) -> Command {
    let TestSelection {
        target,
        names,
        ignored,
        env,
    } = *tests;
    let mut command = cargo::command();
    command
        .args(["test", "--quiet", "--locked", "--workspace"])
        .args(target)
        .args(["--", "--exact"])
        .args(names)
        .args(ignored.then_some("--ignored"))
        .envs(env.iter().copied())
        .current_dir(paths::repository());
    command
}

/// Runs the command, passes its output on, and sums the passed tests of its summary lines.
fn run_and_count_passed(
    command: &mut Command,
    timeout: Option<Duration>,
    out: &mut impl Write,
) -> anyhow::Result<usize> {
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let stdout = child.stdout.take();
    let end = thread::spawn(move || match timeout {
        Some(timeout) => deadline::wait_within(&mut child, timeout),
        None => child.wait(),
    });
    let mut count = 0;
    for line in stdout
        .into_iter()
        .flat_map(|stdout| BufReader::new(stdout).split(b'\n'))
    {
        let line = line?;
        count += parse_passed(&String::from_utf8_lossy(&line)).unwrap_or_default();
        out.write_all(&line)?;
        out.write_all(b"\n")?;
    }
    let status = end.join().unwrap_or_else(|panic| resume_unwind(panic))?;
    anyhow::ensure!(status.success(), "{command:?}: {status}");
    Ok(count)
}

/// Parses the number of passed tests in a summary line of libtest.
fn parse_passed(line: &str) -> Option<usize> {
    let counts = line.strip_prefix("test result: ok. ")?;
    counts.split_once(" passed;")?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_passed_reads_the_summary_line_only() {
        let line = "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out";
        assert_eq!(parse_passed(line), Some(12));
        for other in ["12 passed, 0 failed", "test result: FAILED. 12 passed;", ""] {
            assert_eq!(parse_passed(other), None, "{other}");
        }
    }

    #[test]
    fn run_counts_passed_tests_and_fails_with_the_command() {
        let mut echo = Command::new("echo");
        echo.arg("-e")
            .arg("test result: ok. 1 passed;\ntest result: ok. 2 passed;");
        let mut printed = Vec::new();
        assert_eq!(
            run_and_count_passed(&mut echo, None, &mut printed).ok(),
            Some(3)
        );
        assert_eq!(printed.iter().filter(|byte| **byte == b'\n').count(), 2);
        assert!(run_and_count_passed(&mut Command::new("false"), None, &mut printed).is_err());
    }
}
