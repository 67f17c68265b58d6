//! Runs tests, and knows by their full names which of them passed.

use std::collections::HashSet;
use std::io::{self, Read as _, Seek as _, Write};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use super::deadline::{self, CHECK_TIMEOUT};
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

/// The tests that passed in this run of `cargo verify`.
///
/// A test of a target belongs to the target's check, and often to a named check too. It runs once.
#[derive(Debug, Default)]
pub(super) struct PassedTests {
    /// The arguments that selected targets, and the full names of the tests that passed there.
    targets: Vec<(&'static [&'static str], HashSet<String>)>,
}

impl PassedTests {
    /// Runs every test of these targets of the workspace for at most `timeout`.
    ///
    /// # Errors
    /// When a test fails or the tests run longer.
    pub(super) fn run_targets(
        &mut self,
        targets: &'static [&'static str],
        timeout: Duration,
    ) -> anyhow::Result<()> {
        let mut command = cargo::command();
        command
            .args(["test", "--locked", "--workspace", "--no-fail-fast"])
            .args(targets)
            .current_dir(paths::repository());
        let (output, result) = run_to_end(&mut command, timeout)?;
        let mut names = HashSet::new();
        let mut out = io::stdout().lock();
        for line in output.lines() {
            match parse_passed_name(line) {
                Some(name) => drop(names.insert(name.to_owned())),
                None => writeln!(out, "{line}")?,
            }
        }
        self.targets.push((targets, names));
        result
    }

    /// Runs the tests that have not passed yet, each selection for at most `timeout`.
    ///
    /// # Errors
    /// When a test fails or a selection runs longer, or when fewer tests ran than were named: a
    /// renamed test would otherwise go unnoticed.
    pub(super) fn run_named(
        &self,
        tests: &[TestSelection],
        timeout: Duration,
    ) -> anyhow::Result<()> {
        for tests in tests.iter().filter(|tests| !self.have(tests)) {
            run_all(tests, &mut command(tests), timeout)?;
        }
        Ok(())
    }

    /// Returns whether all of these tests have passed, under the same conditions.
    fn have(&self, tests: &TestSelection) -> bool {
        let ran_by_default = !tests.ignored && tests.env.is_empty() && !tests.names.is_empty();
        let passed_there = |(targets, names): &(&[&str], HashSet<String>)| {
            let has_target = targets
                .windows(tests.target.len())
                .any(|arguments| arguments == tests.target);
            has_target && tests.names.iter().all(|name| names.contains(*name))
        };
        ran_by_default && self.targets.iter().any(passed_there)
    }
}

/// Runs tests by their full names, with the paths of programs or folders in these variables.
///
/// # Errors
/// As [`PassedTests::run_named`].
pub(super) fn run_with_programs(
    tests: &TestSelection,
    programs: &[(&str, PathBuf)],
) -> anyhow::Result<()> {
    let mut command = command(tests);
    command.envs(programs.iter().map(|(name, path)| (name, path)));
    run_all(tests, &mut command, CHECK_TIMEOUT)
}

/// Runs the tests by this call, and fails if fewer ran than were named.
fn run_all(tests: &TestSelection, command: &mut Command, timeout: Duration) -> anyhow::Result<()> {
    let (output, result) = run_to_end(command, timeout)?;
    io::stdout().write_all(output.as_bytes())?;
    result?;
    let ran: usize = output.lines().filter_map(parse_passed_count).sum();
    anyhow::ensure!(
        ran >= tests.names.len(),
        "{ran} of {} named tests ran; compare the names with `cargo test -- --list`: {}",
        tests.names.len(),
        tests.names.join(", ")
    );
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

/// Runs the command for at most `timeout`, and returns its output beside its outcome.
///
/// The output goes to a file: a process that a test left behind would keep a pipe open.
fn run_to_end(
    command: &mut Command,
    timeout: Duration,
) -> io::Result<(String, anyhow::Result<()>)> {
    let mut file = tempfile::tempfile()?;
    let mut child = command.stdout(file.try_clone()?).spawn()?;
    let status = deadline::wait_within(&mut child, timeout);
    file.rewind()?;
    let mut output = Vec::new();
    file.read_to_end(&mut output)?;
    let result = match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(anyhow::anyhow!("{command:?}: {status}")),
        Err(error) => Err(error.into()),
    };
    Ok((String::from_utf8_lossy(&output).into_owned(), result))
}

/// Parses the name of a passed test in a line of libtest.
fn parse_passed_name(line: &str) -> Option<&str> {
    line.strip_prefix("test ")?.strip_suffix(" ... ok")
}

/// Parses the number of passed tests in a summary line of libtest.
fn parse_passed_count(line: &str) -> Option<usize> {
    let counts = line.strip_prefix("test result: ok. ")?;
    counts.split_once(" passed;")?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_passed_count_reads_the_summary_line_only() {
        let line = "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out";
        assert_eq!(parse_passed_count(line), Some(12));
        for other in ["12 passed, 0 failed", "test result: FAILED. 12 passed;", ""] {
            assert_eq!(parse_passed_count(other), None, "{other}");
        }
    }

    #[test]
    fn parse_passed_name_reads_whole_lines_of_passed_tests_only() {
        assert_eq!(parse_passed_name("test a::b ... ok"), Some("a::b"));
        for other in [
            "test a::b ... FAILED",
            "test a::b ... ignored",
            "test a::b ... words of a child process",
            "test result: ok. 12 passed;",
        ] {
            assert_eq!(parse_passed_name(other), None, "{other}");
        }
    }

    #[test]
    fn passed_tests_run_again_only_under_other_conditions() {
        let passed = PassedTests {
            targets: vec![(
                &[
                    "--test",
                    "facts",
                    "--test",
                    "audit",
                    "--",
                    "--test-threads=6",
                ],
                HashSet::from(["a".to_owned(), "b".to_owned()]),
            )],
        };
        let tests = TestSelection {
            target: &["--test", "audit"],
            names: &["a", "b"],
            ignored: false,
            env: &[],
        };
        assert!(passed.have(&tests));
        for other in [
            TestSelection {
                target: &["--lib"],
                ..tests
            },
            TestSelection {
                target: &["--test", "aud"],
                ..tests
            },
            TestSelection {
                names: &["a", "c"],
                ..tests
            },
            TestSelection {
                names: &[],
                ..tests
            },
            TestSelection {
                ignored: true,
                ..tests
            },
            TestSelection {
                env: &[("BURSAR_LONG", "1")],
                ..tests
            },
        ] {
            assert!(!passed.have(&other), "{other:?}");
        }
    }

    #[test]
    fn run_to_end_returns_the_output_beside_a_failure() {
        let mut shell = Command::new("sh");
        shell.args(["-c", "echo one; exit 3"]);
        let (output, result) = run_to_end(&mut shell, Duration::from_secs(60)).unwrap();
        assert_eq!(output, "one\n");
        assert!(result.unwrap_err().to_string().ends_with("exit status: 3"));
    }
}
