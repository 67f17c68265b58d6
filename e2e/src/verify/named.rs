//! Runs tests, and knows by their full names which of them passed.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::{self, Read as _, Seek as _, Write};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use serde::Deserialize;

use super::deadline::{self, CHECK_TIMEOUT};
use crate::cargo;
use crate::paths;

/// Tests of one target of the workspace by their paths.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TestSelection {
    /// The arguments of `cargo test` that select the target: `--lib`, or `--test` and its name.
    pub(super) target: Vec<String>,
    /// The full name of each test. A target with a runner of its own may have none.
    #[serde(default)]
    pub(super) names: Vec<String>,
    /// Whether the tests are marked `#[ignore]`, because they take minutes.
    #[serde(default)]
    pub(super) ignored: bool,
    /// Additional environment variables of the tests.
    #[serde(default)]
    pub(super) env: BTreeMap<String, String>,
}

impl TestSelection {
    /// Selects tests that are marked `#[ignore]`.
    pub(super) fn of_ignored<const N: usize>(target: &[&str], names: [&str; N]) -> TestSelection {
        TestSelection {
            target: target.iter().map(ToString::to_string).collect(),
            names: names.map(str::to_owned).into(),
            ignored: true,
            env: BTreeMap::new(),
        }
    }
}

/// The results of tests in this run of `cargo verify`.
///
/// A test of a target belongs to the target's check, and often to a named check too. It runs once.
#[derive(Debug, Default)]
pub(super) struct TestResults {
    targets: Vec<TargetResults>,
    /// The passed tests of each background job that ran to its end and failed, unless a failed test
    /// draws random numbers.
    failed_jobs: HashMap<&'static str, HashSet<String>>,
    /// The passed tests of all background jobs.
    passed_in_jobs: HashSet<String>,
}

/// The results of the tests of some targets.
#[derive(Debug)]
struct TargetResults {
    /// The arguments that select the targets.
    arguments: Vec<String>,
    /// The full names of the tests that passed, and of those that failed.
    passed: HashSet<String>,
    failed: Vec<String>,
}

/// Parts of the names of targets and tests that draw random numbers. Another run of these tests
/// shows nothing about the first.
const RANDOM_TESTS: [&str; 7] = [
    "adversary",
    "chaos",
    "fuzz",
    "histor",
    "outlive",
    "random",
    "soak",
];

/// Tests failed in a run that did not reach its end, or that did not name them all.
#[derive(Debug, thiserror::Error)]
#[error("the tests did not run to their end")]
pub(super) struct IncompleteRun;

impl TestResults {
    /// Runs every test of these targets of the workspace for at most `timeout`.
    ///
    /// # Errors
    /// When a test fails or the tests run longer.
    pub(super) fn run_targets(
        &mut self,
        targets: &[String],
        timeout: Duration,
    ) -> anyhow::Result<()> {
        let mut command = cargo::command();
        command
            .args(["test", "--locked", "--workspace", "--no-fail-fast"])
            .args(targets)
            .current_dir(paths::repository());
        let (output, result) = run_to_end(&mut command, timeout)?;
        let (mut passed, mut failed) = (HashSet::new(), Vec::new());
        let mut out = io::stdout().lock();
        for line in output.lines() {
            match parse_result(line) {
                Some((name, true)) => drop(passed.insert(name.to_owned())),
                Some((name, false)) => failed.push(name.to_owned()),
                None => writeln!(out, "{line}")?,
            }
        }
        let names = failed.join(", ");
        let result = match result {
            Err(error) if failed.is_empty() => Err(error),
            Err(error) if failed.len() != count_failures(&output) => {
                Err(error.context(IncompleteRun))
            }
            result => result.map_err(|error| error.context(format!("failed tests: {names}"))),
        };
        self.targets.push(TargetResults {
            arguments: targets.to_vec(),
            passed,
            failed,
        });
        result
    }

    /// Returns whether tests of these targets failed, and none that draws random numbers.
    pub(super) fn can_repeat_targets(&self, targets: &[String]) -> bool {
        let results = self.targets.iter().find(|run| run.arguments == targets);
        let failed = results.map_or(&[][..], |run| &run.failed);
        let is_random = failed.iter().any(|name| is_random(name));
        !failed.is_empty() && !is_random && !targets.iter().any(|target| self::is_random(target))
    }

    /// Runs the failed tests of these targets again, one after another.
    ///
    /// # Errors
    /// When a test fails again.
    pub(super) fn repeat_targets(
        &self,
        targets: &[String],
        timeout: Duration,
    ) -> anyhow::Result<()> {
        let results = self.targets.iter().find(|run| run.arguments == targets);
        let failed = results.map_or(&[][..], |run| &run.failed);
        // The arguments after `--` are the test runner's.
        let selection = targets.iter().take_while(|argument| *argument != "--");
        let mut command = cargo::command();
        command
            .args(["test", "--quiet", "--locked", "--workspace"])
            .args(selection)
            .args(["--", "--test-threads=1", "--exact"])
            .args(failed)
            .current_dir(paths::repository());
        run_all(failed, &mut command, timeout)
    }

    /// Records the tests of a background job by its output.
    pub(super) fn record_job(&mut self, job: &'static str, output: &str) {
        let results = || output.lines().filter_map(parse_result);
        let passed = || {
            results()
                .filter(|(_, passed)| *passed)
                .map(|(name, _)| name.to_owned())
        };
        self.passed_in_jobs.extend(passed());
        let failed = || results().filter(|(_, passed)| !passed);
        let is_complete = failed().count() == count_failures(output);
        let is_random = failed().any(|(name, _)| is_random(name));
        if failed().next().is_some() && is_complete && !is_random {
            self.failed_jobs.insert(job, passed().collect());
        }
    }

    /// Returns whether a test of a background job has passed.
    pub(super) fn has_passed_in_job(&self, test: &str) -> bool {
        self.passed_in_jobs.contains(test)
    }

    /// Returns the passed tests of a background job whose failed tests can run again.
    pub(super) fn passed_beside_failed(&self, job: &str) -> Option<&HashSet<String>> {
        self.failed_jobs.get(job)
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
            run_all(&tests.names, &mut command(tests), timeout)?;
        }
        Ok(())
    }

    /// Returns whether all of these tests have passed, under the same conditions.
    fn have(&self, tests: &TestSelection) -> bool {
        let ran_by_default = !tests.ignored && tests.env.is_empty() && !tests.names.is_empty();
        let passed_there = |run: &TargetResults| {
            let has_target = run
                .arguments
                .windows(tests.target.len())
                .any(|arguments| arguments == tests.target);
            has_target && tests.names.iter().all(|name| run.passed.contains(name))
        };
        ran_by_default && self.targets.iter().any(passed_there)
    }
}

/// Runs tests by their full names, with the paths of programs or folders in these variables.
///
/// # Errors
/// As [`TestResults::run_named`].
pub(super) fn run_with_programs(
    tests: &TestSelection,
    programs: &[(&str, PathBuf)],
) -> anyhow::Result<()> {
    let mut command = command(tests);
    command.envs(programs.iter().map(|(name, path)| (name, path)));
    run_all(&tests.names, &mut command, CHECK_TIMEOUT)
}

/// Runs the tests by this call, and fails if fewer ran than were named.
fn run_all(
    names: &[impl AsRef<str>],
    command: &mut Command,
    timeout: Duration,
) -> anyhow::Result<()> {
    let (output, result) = run_to_end(command, timeout)?;
    io::stdout().write_all(output.as_bytes())?;
    result.map_err(|error| match count_failures(&output) {
        0 => error.context(IncompleteRun),
        _ => error,
    })?;
    let ran: usize = output.lines().filter_map(parse_passed_count).sum();
    let joined = || {
        names
            .iter()
            .map(AsRef::as_ref)
            .collect::<Vec<_>>()
            .join(", ")
    };
    anyhow::ensure!(
        ran >= names.len(),
        "{ran} of {} named tests ran; compare the names with `cargo test -- --list`: {}",
        names.len(),
        joined()
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
    } = tests;
    let mut command = cargo::command();
    command
        .args(["test", "--quiet", "--locked", "--workspace"])
        .args(target)
        .args(["--", "--exact"])
        .args(names)
        .args(ignored.then_some("--ignored"))
        .envs(env)
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

/// Parses a test's name in a line of libtest or of libtest-mimic, and whether it passed.
fn parse_result(line: &str) -> Option<(&str, bool)> {
    let (name, result) = line.strip_prefix("test ")?.rsplit_once(" ... ")?;
    let passed = match result {
        "ok" => true,
        "FAILED" => false,
        _ => return None,
    };
    Some((name.trim_end(), passed))
}

/// Returns whether a target or a test draws random numbers.
pub(super) fn is_random(name: &str) -> bool {
    RANDOM_TESTS.iter().any(|part| name.contains(part))
}

/// Counts the failed tests in the summaries of an output. Zero if a target did not reach its end.
fn count_failures(output: &str) -> usize {
    let count = |prefix| {
        output
            .lines()
            .filter(|line| line.starts_with(prefix))
            .count()
    };
    match count("running ") == count("test result: ") {
        true => output.lines().filter_map(parse_failed_count).sum(),
        false => 0,
    }
}

/// Parses the number of failed tests in a summary line of libtest.
fn parse_failed_count(line: &str) -> Option<usize> {
    let counts = line.strip_prefix("test result: FAILED. ")?;
    let (_, counts) = counts.split_once(" passed; ")?;
    counts.split_once(" failed;")?.0.parse().ok()
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
    fn parse_result_reads_whole_lines_of_finished_tests_only() {
        assert_eq!(parse_result("test a::b ... ok"), Some(("a::b", true)));
        assert_eq!(parse_result("test a::b ... FAILED"), Some(("a::b", false)));
        assert_eq!(parse_result("test a-b      ... ok"), Some(("a-b", true)));
        for other in [
            "test a::b ... ignored",
            "test a::b ... words of a child process",
            "test result: ok. 12 passed;",
        ] {
            assert_eq!(parse_result(other), None, "{other}");
        }
    }

    fn words(words: &str) -> Vec<String> {
        words.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn passed_tests_run_again_only_under_other_conditions() {
        let results = TestResults {
            targets: vec![TargetResults {
                arguments: words("--test facts --test audit -- --test-threads=6"),
                passed: HashSet::from(["a".to_owned(), "b".to_owned()]),
                failed: Vec::new(),
            }],
            ..TestResults::default()
        };
        let tests = TestSelection {
            target: words("--test audit"),
            names: words("a b"),
            ..TestSelection::default()
        };
        assert!(results.have(&tests));
        let others: [fn(&mut TestSelection); 6] = [
            |tests| tests.target = words("--lib"),
            |tests| tests.target = words("--test aud"),
            |tests| tests.names = words("a c"),
            |tests| tests.names.clear(),
            |tests| tests.ignored = true,
            |tests| tests.env = BTreeMap::from([("BURSAR_LONG".to_owned(), "1".to_owned())]),
        ];
        for change in others {
            let mut other = tests.clone();
            change(&mut other);
            assert!(!results.have(&other), "{other:?}");
        }
    }

    #[test]
    fn failed_tests_are_repeated_unless_they_draw_random_numbers() {
        let can_repeat = |targets: &str, failed: &[&str]| {
            let targets = words(targets);
            let results = TestResults {
                targets: vec![TargetResults {
                    arguments: targets.clone(),
                    passed: HashSet::new(),
                    failed: failed.iter().map(|name| (*name).to_owned()).collect(),
                }],
                ..TestResults::default()
            };
            results.can_repeat_targets(&targets)
        };
        let leases = "--test leases";
        assert!(can_repeat(leases, &["drained::gpu_is_released"]));
        let random = ["drained::gpu_is_released", "chaos::kills"];
        assert!(!can_repeat(leases, &random));
        assert!(!can_repeat("--test fuzz", &["frames"]));
        assert!(!can_repeat(leases, &[]));
        assert!(!TestResults::default().can_repeat_targets(&words(leases)));
    }

    #[test]
    fn failed_trials_are_repeated_without_those_that_passed() {
        let trial = |name: &str, result: &str| format!("test {name} ... {result}\n");
        let passed_beside = |trials: &str, summary: &str| {
            let output = format!("\nrunning 3 tests\n{trials}{summary}\n");
            let mut results = TestResults::default();
            results.record_job("main/cluster", &output);
            let passed = results.passed_beside_failed("main/cluster")?;
            Some(passed.iter().cloned().collect::<Vec<_>>())
        };
        let summary = "test result: FAILED. 1 passed; 1 failed; 1 ignored;";
        let failed = trial("quota   ", "ok") + &trial("restarts", "FAILED");
        assert_eq!(
            passed_beside(&failed, summary),
            Some(vec!["quota".to_owned()])
        );
        assert_eq!(passed_beside(&failed, ""), None, "did not end");
        let ok = "test result: ok. 1 passed; 0 failed; 0 ignored;";
        assert_eq!(passed_beside(&trial("quota", "ok"), ok), None);
        let random = trial("quota", "ok") + &trial("chaos", "FAILED");
        assert_eq!(passed_beside(&random, summary), None);
    }

    #[test]
    fn count_failures_is_zero_when_a_target_did_not_end() {
        let ended = "running 2 tests\ntest result: FAILED. 1 passed; 1 failed; 0 ignored;\n";
        assert_eq!(count_failures(ended), 1);
        assert_eq!(count_failures(&format!("{ended}running 3 tests\n")), 0);
        assert_eq!(count_failures(""), 0);
    }

    #[test]
    fn parse_failed_count_reads_the_summary_line_of_failures() {
        let line =
            "test result: FAILED. 12 passed; 2 failed; 1 ignored; 0 measured; 3 filtered out";
        assert_eq!(parse_failed_count(line), Some(2));
        assert_eq!(
            parse_failed_count("test result: ok. 12 passed; 0 failed;"),
            None
        );
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
